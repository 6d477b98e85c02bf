"""Many holders of one lock on a quorum whose instances fail at random, and who overlapped.

Each holder notes when it may believe that it holds the lock: from the moment the backend
said so until it releases, or its lease ends. All in one process, so by one clock.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from tests.contracts.lock_contract import take
from tests.quorum import Farm

__all__ = ["Fuzz"]

TTL_MS = 1000


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Held:
    """A span of monotonic seconds in which ``holder`` was entitled to act."""

    start: float
    end: float
    holder: int


class Fuzz:
    """Four threads that take, hold and release ``schedule:1`` for some seconds."""

    def __init__(self, farm: Farm, *, jitter_seconds: float, quorum: int | None = None) -> None:
        self.spans: list[Held] = []
        self.unavailable = 0
        self._farm = farm
        for proxy in farm.use_proxies():
            proxy.jitter_seconds = jitter_seconds
        self._backends = [
            farm.backend(rejoin_ms=TTL_MS, retries=2, retry_delay_ms=20) for _ in range(4)
        ]
        for backend in self._backends:
            backend.quorum = quorum or backend.quorum
        self._is_over = threading.Event()

    def run(self, seconds: float, *, until_it_overlaps: bool = False) -> None:
        """Run, with one instance at a time killed, stopped or cut off."""
        threads = [
            threading.Thread(target=self._hold, args=(number, backend))
            for number, backend in enumerate(self._backends)
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (until_it_overlaps and self.overlaps):
            self._break_one()
        self._is_over.set()
        for thread in threads:
            thread.join()

    @property
    def overlaps(self) -> Sequence[tuple[Held, Held]]:
        """Return who held the lock at once."""
        found = []
        latest: Held | None = None
        for span in sorted(self.spans):
            if latest is not None and span.start < latest.end:
                found.append((latest, span))
            latest = max(latest or span, span, key=lambda each: each.end)
        return found

    def _hold(self, number: int, backend: Any) -> None:
        clock = Clock()
        while not self._is_over.is_set():
            try:
                won = take(backend, "schedule:1", ttl_ms=TTL_MS)
                start = clock.monotonic()
                if not won:
                    self._is_over.wait(random.uniform(0, 0.02))
                    continue
                self._is_over.wait(random.uniform(0, 0.01))
                if random.random() < 0.3:
                    won = backend.renew(won.values(), TTL_MS) or won
            except LockUnavailable:
                self.unavailable += 1
                self._is_over.wait(0.02)
                continue
            self._note(number, won["schedule:1"], start)
            self._let_go(backend, won)

    def _note(self, number: int, lease: Any, start: float) -> None:
        end = min(Clock().monotonic(), lease.expires_at)
        if end > start:
            self.spans.append(Held(start, end, number))

    def _let_go(self, backend: Any, won: Any) -> None:
        # One in thirty does not, as a killed process.
        if random.random() < 0.97:
            try:
                backend.release(won.values())
            except LockUnavailable:
                self.unavailable += 1

    def _break_one(self) -> None:
        place = random.randrange(len(self._farm.servers))
        server, proxy = self._farm.servers[place], self._farm.proxies[place]
        how = random.choice(("kill", "stop", "cut", "partition"))
        seconds = random.uniform(0.05, 0.4)
        if how == "kill":
            server.kill9()
            server.start()
        elif how == "stop":
            server.pause()
            self._is_over.wait(seconds)
            server.resume()
        elif how == "partition":
            proxy.partition()
            self._is_over.wait(seconds)
            proxy.heal()
        else:
            proxy.cut()
        self._is_over.wait(seconds)
