"""Several backends as one: a lock is held where every part grants it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence

from distcron_app.errors import LockUnavailable
from distcron_app.locks.base import Lease, LockBackend, LockInfo

__all__ = ["CombinedLockBackend"]


class CombinedLockBackend(LockBackend):
    """Asks ``parts`` in their order, the cheapest first, so that losers stop at the gate.

    A lease ends when the first of its parts does. What people see is what the first part
    knows, which is the one that lists names.
    """

    def __init__(self, parts: Sequence[LockBackend]) -> None:
        self.name = "+".join(part.name for part in parts)
        self._parts = tuple(parts)

    @property
    def state(self) -> str:  # type: ignore[override]
        """Return "open" while any part has given up for the moment."""
        return "open" if any(part.state == "open" for part in self._parts) else "closed"

    def acquire(self, wanted: Mapping[str, str], ttl_ms: int) -> dict[str, Lease]:
        """Take the locks that every part grants; the others are given up again."""
        won: list[dict[str, Lease]] = []
        left = dict(wanted)
        try:
            for part in self._parts:
                won.append(part.acquire(left, ttl_ms) if left else {})
                left = {name: token for name, token in left.items() if name in won[-1]}
        except LockUnavailable:
            self._give_up(won, kept=())
            raise
        self._give_up(won, kept=left)
        return _earliest(won, left)

    def renew(self, leases: Collection[Lease], ttl_ms: int) -> dict[str, Lease]:
        """Extend the leases that every part still grants; the rest of a lost one is released."""
        extended = [part.renew(leases, ttl_ms) for part in self._parts]
        kept = [lease.name for lease in leases if all(lease.name in each for each in extended)]
        self._give_up(extended, kept=kept)
        return _earliest(extended, kept)

    def release(self, leases: Collection[Lease]) -> set[str]:
        """End the leases in every part, the gate last; raise the first failure afterwards."""
        released: list[set[str]] = []
        failure: LockUnavailable | None = None
        for part in reversed(self._parts):
            try:
                released.append(part.release(leases))
            except LockUnavailable as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return set.union(*released)

    def inspect(self, names: Collection[str]) -> dict[str, LockInfo]:
        """Return the holders of the names that are held in any part, as the first one knows."""
        found: dict[str, LockInfo] = {}
        for part in reversed(self._parts):
            found |= part.inspect(names)
        return {name: found[name] for name in names if name in found}

    def held(self) -> list[LockInfo]:
        """Return the held locks that any part lists."""
        found: dict[str, LockInfo] = {}
        for part in self._parts:
            # A part that lists numbers knows the name of one once it was asked for it.
            part.inspect(found)
            found = {info.name: info for info in part.held()} | found
        return [found[name] for name in sorted(found)]

    def force_release(self, name: str) -> bool:
        """End a lock in every part, whoever owns it."""
        return any([part.force_release(name) for part in self._parts])

    def ping(self) -> float:
        """Return the seconds that all parts took to answer."""
        return sum(part.ping() for part in self._parts)

    def close(self) -> None:
        """Do nothing: each part is closed by whoever made it."""

    def _give_up(self, won: Iterable[Mapping[str, Lease]], kept: Collection[str]) -> None:
        for part, leases in zip(self._parts, won, strict=False):
            stray = [lease for name, lease in leases.items() if name not in kept]
            if stray:
                # What cannot be given up now expires by itself.
                with contextlib.suppress(LockUnavailable):
                    part.release(stray)


def _earliest(won: Sequence[Mapping[str, Lease]], names: Iterable[str]) -> dict[str, Lease]:
    return {
        name: min((leases[name] for leases in won), key=lambda lease: lease.expires_at)
        for name in names
    }
