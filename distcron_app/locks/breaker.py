"""Stops asking a lock backend that does not answer, so that ticks stay short."""

from __future__ import annotations

import logging
import os
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
# A call that fails after this long has tried twice by itself, or hung as long as two.
_SLOW_SECONDS = 0.6
_PROBE_SECONDS = 1.0

_Answer = TypeVar("_Answer")


class Breaker(LockBackend):
    """Passes calls on to ``backend`` while it answers.

    After two failures in a row, or one that took 0.6 s, ``state`` is "open" and calls raise
    LockUnavailable at once. A thread then asks ``ping()`` once a second, so that no caller
    waits for it, and its success closes the breaker. ``since`` is the monotonic second of
    the last change.

    A backend that answers, and refuses to write, is asked on for all but new locks: a full
    Redis still renews and releases. A forked child starts closed.
    """

    def __init__(self, backend: LockBackend, *, clock: Clock | None = None) -> None:
        self.name = backend.name
        self._backend = backend
        self._clock = clock or Clock()
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._closing = threading.Event()
        self._failures = 0
        self._refused = False
        self._change("closed")

    def acquire(self, wanted: Mapping[str, str], ttl_ms: int) -> dict[str, Lease]:
        """Take the free locks, as ``LockBackend.acquire`` promises."""
        return self._guard(lambda: self._backend.acquire(wanted, ttl_ms), is_new=True)

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

    def ping(self) -> float:
        """Return how many seconds the backend took to answer."""
        return self._guard(self._backend.ping, is_new=True)

    def close(self) -> None:
        """End the thread and close the backend, in any state."""
        self._closing.set()
        self._backend.close()
        self._start()

    def _guard(self, call: Callable[[], _Answer], *, is_new: bool = False) -> _Answer:
        if self._pid != os.getpid():
            # The thread that asks is the parent's, and its mutex may be taken for ever.
            self._start()
        if self.state == "open" and (is_new or not self._refused):
            down_seconds = self._clock.monotonic() - self.since
            raise LockUnavailable(self.name, f"not asked, down for {down_seconds:.1f} s")
        started = self._clock.monotonic()
        try:
            answer = call()
        except LockUnavailable as error:
            self._note_failure(error, self._clock.monotonic() - started)
            raise
        self._failures = 0
        return answer

    def _note_failure(self, error: LockUnavailable, seconds: float) -> None:
        with self._mutex:
            self._failures += 1
            self._refused = error.refused
            too_few = self._failures < _FAILURES_TO_OPEN and seconds < _SLOW_SECONDS
            if self.state == "open" or too_few:
                return
            self._change("open")
            threading.Thread(
                target=self._probe, args=(self._closing,), name="distcron-lock-probe", daemon=True
            ).start()
        logger.warning("locks_unavailable backend=%s cause=%r", self.name, error.cause)

    def _probe(self, closing: threading.Event) -> None:
        while not self._clock.wait(closing, _PROBE_SECONDS):
            try:
                self._backend.ping()
            except LockUnavailable:
                continue
            self._note_recovery(closing)
            return

    def _note_recovery(self, closing: threading.Event) -> None:
        with self._mutex:
            if closing.is_set():
                return
            self._failures = 0
            down_seconds = self._clock.monotonic() - self.since
            self._change("closed")
        logger.info("locks_available backend=%s down_seconds=%.1f", self.name, down_seconds)

    def _change(self, state: str) -> None:
        self.state = state
        self.since = self._clock.monotonic()
