"""Locks in this process' memory: for tests, and for a single process without Redis."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Mapping

from distcron_app.clock import Clock
from distcron_app.locks.base import Lease, LockBackend, LockInfo, checked_ttl

__all__ = ["MemoryLockBackend"]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Held:
    lease: Lease
    note: str
    since: float
    granted_ms: int
    renewals: int = 0


class MemoryLockBackend(LockBackend):
    """Excludes threads of one process from each other; other processes see nothing.

    The locks are those of ``beside`` where it is given, under another ``note``.
    """

    name = "memory"

    def __init__(
        self,
        *,
        note: str = "",
        clock: Clock | None = None,
        beside: MemoryLockBackend | None = None,
    ) -> None:
        self._note = note
        self._clock = clock or Clock()
        self._held: dict[str, _Held] = {}
        self._mutex = threading.RLock()
        if beside is not None:
            self._held, self._mutex = beside._held, beside._mutex

    def acquire(self, wanted: Mapping[str, str], ttl_ms: int) -> dict[str, Lease]:
        """Take the free locks, as ``LockBackend.acquire`` promises."""
        now = self._clock.monotonic()
        expires_at = now + checked_ttl(ttl_ms) / 1000
        with self._mutex:
            won = {
                name: Lease(name=name, owner_token=token, expires_at=expires_at)
                for name, token in wanted.items()
                if self._owner(name) in (None, token)
            }
            for name, lease in won.items():
                first = _Held(lease=lease, note=self._note, since=now, granted_ms=ttl_ms)
                held = self._held.setdefault(name, first)
                held.lease, held.granted_ms = lease, ttl_ms
        return won

    def renew(self, leases: Collection[Lease], ttl_ms: int) -> dict[str, Lease]:
        """Extend the leases that have not expired."""
        with self._mutex:
            ours = {lease.name: lease.owner_token for lease in leases if self._is_ours(lease)}
            renewed = self.acquire(ours, ttl_ms)
            for name in renewed:
                self._held[name].renewals += 1
            return renewed

    def release(self, leases: Collection[Lease]) -> set[str]:
        """End the leases that have not expired."""
        with self._mutex:
            released = {lease.name for lease in leases if self._is_ours(lease)}
            for name in released:
                del self._held[name]
        return released

    def inspect(self, names: Collection[str]) -> dict[str, LockInfo]:
        """Return the holders of those names that are held."""
        with self._mutex:
            return {name: self._info(name) for name in names if self._owner(name) is not None}

    def held(self) -> list[LockInfo]:
        """Return all held locks."""
        with self._mutex:
            names = sorted(self._held)
        return list(self.inspect(names).values())

    def force_release(self, name: str) -> bool:
        """End a lock whoever owns it."""
        with self._mutex:
            return self._owner(name) is not None and bool(self._held.pop(name))

    def ping(self) -> float:
        """Return 0: nothing has to answer."""
        return 0.0

    def close(self) -> None:
        """Forget all locks."""
        with self._mutex:
            self._held.clear()

    def _is_ours(self, lease: Lease) -> bool:
        return self._owner(lease.name) == lease.owner_token

    def _owner(self, name: str) -> str | None:
        held = self._held.get(name)
        if held is None:
            return None
        if held.lease.expires_at <= self._clock.monotonic():
            del self._held[name]
            return None
        return held.lease.owner_token

    def _info(self, name: str) -> LockInfo:
        held, now = self._held[name], self._clock.monotonic()
        return LockInfo(
            name=name,
            owner_token=held.lease.owner_token,
            note=held.note,
            ttl_ms=round((held.lease.expires_at - now) * 1000),
            granted_ms=held.granted_ms,
            age_ms=round((now - held.since) * 1000),
            renewals=held.renewals,
        )
