"""Stops asking a lock backend that does not answer, so that ticks stay short."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks.base import Lease, LockBackend, LockInfo

__all__ = ["Breaker"]

logger = logging.getLogger("distcron.locks")

# One failure may be a restart of Redis; two in a row are an outage.
_FAILURES_TO_OPEN = 2
_PROBE_SECONDS = 1.0

_Answer = TypeVar("_Answer")


class Breaker(LockBackend):
    """Passes calls on to ``backend`` while it answers.

    After two failures in a row ``state`` is "open": calls raise LockUnavailable at once,
    except one per second that is let through. Its success closes the breaker again.
    ``since`` is the monotonic second of the last change.
    """

    def __init__(self, backend: LockBackend, *, clock: Clock | None = None) -> None:
        self.name = backend.name
        self.state = "closed"
        self._backend = backend
        self._clock = clock or Clock()
        self.since = self._clock.monotonic()
        self._failures = 0
        self._probed_at = self.since
        self._mutex = threading.Lock()

    def acquire(self, wanted: Mapping[str, str], ttl_ms: int) -> dict[str, Lease]:
        """Take the free locks, as ``LockBackend.acquire`` promises."""
        return self._guard(lambda: self._backend.acquire(wanted, ttl_ms))

    def renew(self, leases: Collection[Lease], ttl_ms: int) -> dict[str, Lease]:
        """Extend the leases that are still ours."""
        return self._guard(lambda: self._backend.renew(leases, ttl_ms))

    def release(self, leases: Collection[Lease]) -> set[str]:
        """End the leases that are still ours."""
        return self._guard(lambda: self._backend.release(leases))

    def inspect(self, names: Collection[str]) -> dict[str, LockInfo]:
        """Return the holders of those names that are held."""
        return self._guard(lambda: self._backend.inspect(names))

    def held(self) -> list[LockInfo]:
        """Return all held locks."""
        return self._guard(self._backend.held)

    def force_release(self, name: str) -> bool:
        """End a lock whoever owns it."""
        return self._guard(lambda: self._backend.force_release(name))

    @property
    def guarded(self) -> LockBackend:
        """Return the backend behind it, for what only some backends offer."""
        return self._backend

    def ping(self) -> float:
        """Return how many seconds the backend took to answer."""
        return self._guard(self._backend.ping)

    def close(self) -> None:
        """Close the backend, in any state."""
        self._backend.close()

    def _guard(self, call: Callable[[], _Answer]) -> _Answer:
        self._admit()
        try:
            answer = call()
        except LockUnavailable as error:
            self._note_failure(error.cause)
            raise
        self._note_success()
        return answer

    def _admit(self) -> None:
        with self._mutex:
            if self.state == "closed":
                return
            now = self._clock.monotonic()
            if now - self._probed_at < _PROBE_SECONDS:
                raise LockUnavailable(self.name, f"not asked, down for {now - self.since:.1f} s")
            self._probed_at = now

    def _note_failure(self, cause: str) -> None:
        with self._mutex:
            self._failures += 1
            if self.state == "open":
                # A hung backend takes longer to fail than the pause between probes.
                self._probed_at = self._clock.monotonic()
                return
            if self._failures < _FAILURES_TO_OPEN:
                return
            self._change("open")
            self._probed_at = self.since
        logger.warning("locks_unavailable backend=%s cause=%r", self.name, cause)

    def _note_success(self) -> None:
        with self._mutex:
            self._failures = 0
            if self.state == "closed":
                return
            down_seconds = self._clock.monotonic() - self.since
            self._change("closed")
        logger.info("locks_available backend=%s down_seconds=%.1f", self.name, down_seconds)

    def _change(self, state: str) -> None:
        self.state = state
        self.since = self._clock.monotonic()
