"""No locks: every name is won, and the database alone decides who owns a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from distcron_app.clock import Clock
from distcron_app.locks.base import Lease, LockBackend, LockInfo, checked_ttl

__all__ = ["NoLockBackend"]


class NoLockBackend(LockBackend):
    """Excludes nobody. More nodes reach the claim transaction; one of them wins there."""

    name = "none"

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()

    def acquire(self, wanted: Mapping[str, str], ttl_ms: int) -> dict[str, Lease]:
        """Return a lease for every name."""
        expires_at = self._clock.monotonic() + checked_ttl(ttl_ms) / 1000
        return {
            name: Lease(name=name, owner_token=token, expires_at=expires_at)
            for name, token in wanted.items()
        }

    def renew(self, leases: Collection[Lease], ttl_ms: int) -> dict[str, Lease]:
        """Extend every lease."""
        return self.acquire({lease.name: lease.owner_token for lease in leases}, ttl_ms)

    def release(self, leases: Collection[Lease]) -> set[str]:
        """Return every name."""
        return {lease.name for lease in leases}

    def inspect(self, names: Collection[str]) -> dict[str, LockInfo]:
        """Return nothing: no lock exists."""
        return {}

    def held(self) -> list[LockInfo]:
        """Return nothing: no lock exists."""
        return []

    def force_release(self, name: str) -> bool:
        """Return False: no lock exists."""
        return False

    def ping(self) -> float:
        """Return 0: nothing has to answer."""
        return 0.0

    def close(self) -> None:
        """Do nothing."""
