"""What happens to an occurrence whose scope already has as many active runs as it may.

``fate`` is pure: ``_CLAIM_SQL`` decides the same inside PostgreSQL, and a test compares the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from django.db import models
from django.db.models.functions import MD5

from distcron_app.instants import database_now
from distcron_app.models import Run, RunQuerySet, Schedule

__all__ = [
    "REPLACE_CAUSE",
    "Fate",
    "OpenRuns",
    "Scope",
    "fate",
    "in_scope",
    "open_runs",
    "replace",
]

# Told to the active run that a newer occurrence replaces.
REPLACE_CAUSE = "a newer occurrence replaces it"

Fate = Literal["start", "queue", "skip"]


# What a person queued takes no place in the queue, and what waits in a backfill neither.
_IN_QUEUE = models.Q(
    state=Run.State.QUEUED,
    attempt=0,
    reason=Run.Reason.OVERLAP,
    trigger__in=[Run.Trigger.TIMETABLE, Run.Trigger.CHAIN],
)


class Scope(NamedTuple):
    """Which runs count for an occurrence: those of its schedule, or of its concurrency key."""

    schedule_id: int
    key: str = ""

    def counts_for(self, scope: Scope) -> bool:
        """Return True where a run of this schedule and key is one of ``scope``."""
        if scope.key and self.key:
            return scope.key == self.key
        return scope.schedule_id == self.schedule_id


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenRuns:
    """The open runs of a scope: ``active`` and ``waiting`` ones, and which is in the way.

    ``executing`` are the active ones that a node has: claimed or running. ``backfilling`` of
    the active ones belong to a backfill; those that wait in one are left out. ``blocked_by``
    is the first active run, or the first of the queue where none is active.
    """

    active: int = 0
    executing: int = 0
    backfilling: int = 0
    blocked_by: int | None = None
    waiting: int = 0


def fate(
    schedule: Schedule, runs: OpenRuns, *, has_begun: bool = False, was_queued: bool = False
) -> Fate:
    """Return whether a run may start, waits in the queue of its schedule, or is skipped.

    One that ``has_begun`` is among the active ones itself: it keeps its schedule while it
    waits for its next attempt, and so do others, which must not keep it from that for ever.
    One that ``was_queued`` has waited for its turn; a new one goes to the end of the queue,
    where there is one. Behind runs of a backfill alone one occurrence waits, whatever the
    policy: a backfill takes none away.
    """
    limit = schedule.active_limit
    overtakes = bool(runs.waiting) and schedule.overlap in _IN_ORDER and not was_queued
    before = runs.executing if has_begun else runs.active
    if limit is None or (before < limit and not overtakes):
        return "start"
    places: dict[str, int] = {
        Schedule.Overlap.QUEUE_ONE: 1,
        Schedule.Overlap.QUEUE_ALL: schedule.max_queued,
        # It takes the place of whatever waits.
        Schedule.Overlap.REPLACE: runs.waiting + 1,
    }
    own_places = places.get(schedule.overlap, 0)
    if runs.active - runs.backfilling - has_begun < limit:
        own_places = max(own_places, 1)
    return "queue" if runs.waiting < own_places else "skip"


_IN_ORDER = (Schedule.Overlap.QUEUE_ONE, Schedule.Overlap.QUEUE_ALL)


def open_runs(scopes: Collection[Scope]) -> dict[Scope, OpenRuns]:
    """Return the open runs of each scope, by one read, and one more where there are keys.

    Without a key they are the runs of the schedule, whatever their keys. With one they are
    the runs of every schedule with that key, and those of the schedule without any.
    """
    keys = {scope.key for scope in scopes if scope.key}
    own = _counted("schedule_id", [scope.schedule_id for scope in scopes])
    shared = _counted("concurrency_key", keys) if keys else {}
    return {
        scope: _together(
            each
            for each in (
                *(row for row in own.get(scope.schedule_id, ()) if not (scope.key and row.key)),
                *(shared.get(scope.key, ()) if scope.key else ()),
            )
        )
        for scope in scopes
    }


def in_scope(scope: Scope) -> RunQuerySet:
    """Return the open runs that count for ``scope``, as ``open_runs`` does."""
    own = models.Q(schedule=scope.schedule_id)
    if scope.key:
        # The text first, for its index; then as equal as Python finds it.
        same = models.Q(concurrency_key=scope.key, exactly=MD5(models.Value(scope.key)))
        own = same | (own & models.Q(concurrency_key=""))
    return Run.objects.open().annotate(exactly=MD5("concurrency_key")).filter(own)


class _Counted(NamedTuple):
    key: str
    active: int
    executing: int
    backfilling: int
    first: int | None
    waiting: int
    first_waiting: int | None


def _together(counted: Iterable[_Counted]) -> OpenRuns:
    each = list(counted)
    first = [found.first for found in each if found.first is not None]
    behind = [found.first_waiting for found in each if found.first_waiting is not None]
    return OpenRuns(
        active=sum(found.active for found in each),
        executing=sum(found.executing for found in each),
        backfilling=sum(found.backfilling for found in each),
        blocked_by=min(first or behind, default=None),
        waiting=sum(found.waiting for found in each),
    )


def _counted(column: str, values: Collection[Any]) -> dict[Any, list[_Counted]]:
    """Return the open runs by ``column``, each list by concurrency key.

    Keys are as Python finds them equal; a collation may take others for the same.
    """
    is_active = ~models.Q(state=Run.State.QUEUED) | models.Q(attempt__gt=0)
    rows = (
        Run.objects.open()
        .filter(**{f"{column}__in": list(values)})
        .order_by()
        .annotate(exactly=MD5("concurrency_key"))
        .values_list("schedule_id", "concurrency_key", "exactly")
        .annotate(
            active=models.Count("id", filter=is_active),
            executing=models.Count("id", filter=~models.Q(state=Run.State.QUEUED)),
            backfilling=models.Count("id", filter=is_active & models.Q(backfill__isnull=False)),
            first=models.Min("id", filter=is_active),
            waiting=models.Count("id", filter=_IN_QUEUE),
            first_waiting=models.Min("id", filter=_IN_QUEUE),
        )
    )
    found: dict[Any, list[_Counted]] = {}
    for schedule_id, key, _exactly, *counts in rows:
        name = schedule_id if column == "schedule_id" else key
        found.setdefault(name, []).append(_Counted(key, *counts))
    return found


def replace(
    overlapped: Mapping[Scope, tuple[Fate, OpenRuns]], *, told: Collection[int]
) -> list[int]:
    """Skip what waits in these scopes, and ask active runs to stop that are in the way.

    What a person queued is kept, and so is a backfill: a newer occurrence does not stand for
    it. Return the runs that are skipped now where somebody may wait for their end: of the
    schedules in ``told``, and of all in a scope with a key.
    """
    now = database_now() if overlapped else None
    skipped: list[int] = []
    for scope, (fated, runs) in overlapped.items():
        beside = in_scope(scope)
        # Or another schedule started it, and no node has claimed it yet.
        started = models.Q(reason=Run.Reason.NONE, trigger=Run.Trigger.CHAIN)
        waiting = beside.filter(_IN_QUEUE | started & models.Q(state=Run.State.QUEUED, attempt=0))
        if scope.key or scope.schedule_id in told:
            skipped += waiting.select_for_update().order_by("pk").values_list("pk", flat=True)
        waiting.update(
            state=Run.State.SKIPPED,
            reason=Run.Reason.OVERLAP,
            finished_at=now,
            details={"blocked_by": runs.blocked_by if runs.active else None, "replaced": True},
        )
        if fated == "queue":
            beside.filter(
                state__in=Run.ACTIVE_STATES, cancel_requested_at=None, backfill=None
            ).update(cancel_requested_at=now, cancel_cause=REPLACE_CAUSE)
    return skipped
