"""The leases that this node holds for its runs: kept alive together, released together.

Used by two threads: the loop adds and lets go, the keeper renews.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks import Lease, Level

__all__ = ["FindLevel", "Grant", "LeaseBook"]

logger = logging.getLogger("distcron.leases")

# Returns a lock level by its name; raises ConfigurationError for one that cannot be used.
FindLevel = Callable[[str], Level]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A lock that is wanted or was won: where, under which name and owner token.

    ``lease`` is None where the database alone decided, because the backend of a gate
    was away or the lock was stuck. It is exclusive where it guards a whole schedule, and
    not where it is one occurrence's, whose runs may be side by side.
    """

    level: Level
    name: str
    owner_token: str
    lease: Lease | None = None
    is_exclusive: bool = True


@dataclasses.dataclass(slots=True)
class _Holding:
    schedule_id: int
    grant: Grant
    since: datetime
    lost: bool = False


class LeaseBook:
    """Maps each run of this node to the lease on its schedule.

    A run at a gate level may be without a lease; the keeper then tries to get it later.
    """

    def __init__(self, ttl_ms: int, *, clock: Clock | None = None) -> None:
        self._ttl_ms = ttl_ms
        self._clock = clock or Clock()
        self._lock = threading.Lock()
        self._holdings: dict[int, _Holding] = {}

    def hold(self, run_id: int, *, schedule_id: int, grant: Grant, since: datetime) -> None:
        """Enter a run with what was granted for it.

        ``since`` is when it was claimed, aware, by the database's clock.
        """
        with self._lock:
            self._holdings[run_id] = _Holding(schedule_id, grant, since)

    def names(self) -> dict[str, datetime]:
        """Return the locks of schedules and scopes that runs keep, with when the newest came."""
        with self._lock:
            return {
                held.grant.name: held.since
                for held in self._holdings.values()
                if held.grant.is_exclusive
            }

    def schedules(self) -> dict[int, datetime]:
        """Return the schedules that this node's runs keep, with when the newest was claimed."""
        with self._lock:
            return {
                held.schedule_id: held.since
                for held in self._holdings.values()
                if held.grant.is_exclusive
            }

    def grant_of(self, run_id: int) -> Grant | None:
        """Return what was granted for a run of this node, None for one that it does not know."""
        with self._lock:
            held = self._holdings.get(run_id)
            return None if held is None else held.grant

    def let_go(self, run_ids: Iterable[int]) -> None:
        """Release the leases of runs that ended, by one call for each level.

        A backend that is away is not an error: the keys expire by themselves.
        """
        with self._lock:
            gone = [self._holdings.pop(run_id, None) for run_id in run_ids]
        self.release(held.grant for held in gone if held is not None)

    def release(self, grants: Iterable[Grant]) -> None:
        """Release leases that belong to no run, as those of claims that were lost."""
        by_level: dict[str, list[Grant]] = {}
        for grant in grants:
            if grant.lease is not None:
                by_level.setdefault(grant.level.name, []).append(grant)
        for same in by_level.values():
            try:
                same[0].level.backend.release([each.lease for each in same if each.lease])
            except LockUnavailable as error:
                logger.info("release_failed count=%d error=%s", len(same), error)

    def renew(self) -> dict[int, str]:
        """Extend every lease by one call for each level; return run id to cause of the lost.

        At a gate level a key that is missing is taken again under the same owner token:
        the backend was wiped, and the database still says that the run is ours. It is lost
        only when somebody else holds it, and never because the backend does not answer. At
        a strict level a lease is lost when its lock was gone for a moment, and while the
        backend is away as soon as it would end before the next try has failed.
        """
        with self._lock:
            current = {run_id: held for run_id, held in self._holdings.items() if not held.lost}
        by_level: dict[str, dict[int, _Holding]] = {}
        for run_id, held in current.items():
            by_level.setdefault(held.grant.level.name, {})[run_id] = held
        lost: dict[int, str] = {}
        for same in by_level.values():
            asked_at = self._clock.monotonic()
            try:
                lost |= self._enter(same, self._renewed(same))
            except LockUnavailable as error:
                logger.info("renew_failed error=%s", error)
                lost |= self._expire(same, error.cause, asked_at)
        return lost

    def _renewed(self, holdings: Mapping[int, _Holding]) -> dict[str, Lease]:
        level = next(iter(holdings.values())).grant.level
        leases = [held.grant.lease for held in holdings.values() if held.grant.lease is not None]
        renewed = level.backend.renew(leases, self._ttl_ms) if leases else {}
        missing = {
            held.grant.name: held.grant.owner_token
            for held in holdings.values()
            if held.grant.name not in renewed
        }
        if missing and not level.is_strict:
            renewed |= level.backend.acquire(missing, self._ttl_ms)
        return renewed

    def _enter(self, holdings: Mapping[int, _Holding], leases: dict[str, Lease]) -> dict[int, str]:
        lost: dict[int, str] = {}
        stray: list[Grant] = []
        with self._lock:
            for run_id, held in holdings.items():
                lease = leases.get(held.grant.name)
                if lease is not None:
                    grant = dataclasses.replace(held.grant, lease=lease)
                    if self._holdings.get(run_id) is held:
                        held.grant = grant
                    else:
                        # The run ended while its lease was being renewed.
                        stray.append(grant)
                elif self._holdings.get(run_id) is held and held.grant.lease is not None:
                    held.lost = True
                    lost[run_id] = self._cause(held.grant)
        self.release(stray)
        return lost

    def _expire(
        self, holdings: Mapping[int, _Holding], cause: str, asked_at: float
    ) -> dict[int, str]:
        now = self._clock.monotonic()
        # The next try begins a third of the TTL from now, and may take as long to fail.
        known_at = now + self._ttl_ms / 3000 + (now - asked_at)
        lost: dict[int, str] = {}
        with self._lock:
            for run_id, held in holdings.items():
                lease = held.grant.lease
                if lease is None or not held.grant.level.is_strict:
                    continue
                if lease.expires_at <= known_at:
                    held.lost = True
                    lost[run_id] = f"lock {lease.name!r} could not be renewed, {cause}"
        return lost

    def _cause(self, grant: Grant) -> str:
        if grant.level.is_strict:
            return f"lock {grant.name!r} is gone at level {grant.level.name!r}"
        return f"lock {grant.name!r} is held by another owner"
