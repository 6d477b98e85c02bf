"""The leases that this node holds for its runs: kept alive together, released together.

Used by two threads: the loop adds and lets go, the keeper renews.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Collection, Iterable
from datetime import datetime

from distcron_app.errors import LockUnavailable
from distcron_app.locks import Lease, LockBackend

__all__ = ["LeaseBook"]

logger = logging.getLogger("distcron.leases")


@dataclasses.dataclass(slots=True)
class _Holding:
    schedule_id: int
    name: str
    owner_token: str
    lease: Lease | None
    since: datetime
    lost: bool = False


class LeaseBook:
    """Maps each run of this node to the lease on its schedule.

    A run may be without a lease: it was claimed by the database alone, because the
    backend was away or the lock was stuck. The keeper then tries to get it later.
    """

    def __init__(self, backend: LockBackend, ttl_ms: int) -> None:
        self._backend = backend
        self._ttl_ms = ttl_ms
        self._lock = threading.Lock()
        self._holdings: dict[int, _Holding] = {}

    def hold(
        self,
        run_id: int,
        *,
        schedule_id: int,
        name: str,
        owner_token: str,
        lease: Lease | None,
        since: datetime,
    ) -> None:
        """Enter a run with the lease that was acquired for it, or None.

        ``since`` is when it was claimed, aware, by the database's clock.
        """
        with self._lock:
            self._holdings[run_id] = _Holding(schedule_id, name, owner_token, lease, since)

    def schedules(self) -> dict[int, datetime]:
        """Return the schedules of this node's runs, with when the newest was claimed."""
        with self._lock:
            return {held.schedule_id: held.since for held in self._holdings.values()}

    def let_go(self, run_ids: Iterable[int]) -> None:
        """Release the leases of runs that ended, in one call.

        A backend that is away is not an error: the keys expire by themselves.
        """
        with self._lock:
            gone = [self._holdings.pop(run_id, None) for run_id in run_ids]
        self.release([held.lease for held in gone if held is not None and held.lease is not None])

    def release(self, leases: Collection[Lease]) -> None:
        """Release leases that belong to no run, as those of claims that were lost."""
        if not leases:
            return
        try:
            self._backend.release(leases)
        except LockUnavailable as error:
            logger.info("release_failed count=%d error=%s", len(leases), error)

    def renew(self) -> dict[int, str]:
        """Extend every lease by one call; return run id to cause for those that are lost.

        A key that is missing is taken again under the same owner token: the backend was
        wiped, and the database still says that the run is ours. It is lost only when
        somebody else holds it. Raise LockUnavailable when the backend does not answer;
        nothing is lost by that.
        """
        with self._lock:
            current = {run_id: held for run_id, held in self._holdings.items() if not held.lost}
        leases = [held.lease for held in current.values() if held.lease is not None]
        renewed = self._backend.renew(leases, self._ttl_ms) if leases else {}
        missing = {run_id: held for run_id, held in current.items() if held.name not in renewed}
        taken = (
            self._backend.acquire(
                {held.name: held.owner_token for held in missing.values()}, self._ttl_ms
            )
            if missing
            else {}
        )
        return self._enter(current, renewed | taken)

    def _enter(self, current: dict[int, _Holding], leases: dict[str, Lease]) -> dict[int, str]:
        lost: dict[int, str] = {}
        stray: list[Lease] = []
        with self._lock:
            for run_id, held in current.items():
                lease = leases.get(held.name)
                if self._holdings.get(run_id) is not held:
                    # The run ended while its lease was being renewed.
                    if lease is not None:
                        stray.append(lease)
                elif lease is not None:
                    held.lease = lease
                elif held.lease is not None:
                    held.lease, held.lost = None, True
                    lost[run_id] = f"lock {held.name!r} is held by another owner"
        self.release(stray)
        return lost
