"""What happens to an occurrence whose schedule already has as many active runs as it may.

``fate`` is pure: ``_CLAIM_SQL`` decides the same inside PostgreSQL, and a test compares the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Literal

from django.db import models
from django.db.models.functions import Coalesce

from distcron_app.instants import database_now
from distcron_app.models import Run, Schedule

__all__ = ["REPLACE_CAUSE", "Fate", "OpenRuns", "fate", "open_runs", "replace"]

# Told to the active run that a newer occurrence replaces.
REPLACE_CAUSE = "a newer occurrence replaces it"

Fate = Literal["start", "queue", "skip"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenRuns:
    """The open runs of a schedule: ``active`` and ``waiting`` ones, and which is in the way.

    ``blocked_by`` is the first active run, or the first of the queue where none is active.
    """

    active: int = 0
    blocked_by: int | None = None
    waiting: int = 0


def fate(schedule: Schedule, runs: OpenRuns, *, own: int = 0, was_queued: bool = False) -> Fate:
    """Return whether a run may start, waits in the queue of its schedule, or is skipped.

    ``own`` is 1 where the run itself is among the active ones: a recovered run keeps its
    schedule while it waits for its next attempt. One that ``was_queued`` has waited for its
    turn; a new one goes to the end of the queue, where there is one.
    """
    limit = schedule.active_limit
    overtakes = bool(runs.waiting) and schedule.overlap in _IN_ORDER and not was_queued
    if limit is None or (runs.active - own < limit and not overtakes):
        return "start"
    places: dict[str, int] = {
        Schedule.Overlap.QUEUE_ONE: 1,
        Schedule.Overlap.QUEUE_ALL: schedule.max_queued,
        # It takes the place of whatever waits.
        Schedule.Overlap.REPLACE: runs.waiting + 1,
    }
    return "queue" if runs.waiting < places.get(schedule.overlap, 0) else "skip"


_IN_ORDER = (Schedule.Overlap.QUEUE_ONE, Schedule.Overlap.QUEUE_ALL)
_WAITING_TRIGGERS = (Run.Trigger.TIMETABLE, Run.Trigger.CHAIN)


def open_runs(schedule_ids: Collection[int]) -> dict[int, OpenRuns]:
    """Return the open runs of the schedules that have any, by one read."""
    is_active = ~models.Q(state=Run.State.QUEUED) | models.Q(attempt__gt=0)
    # What a person queued takes no place in the schedule's queue.
    waits = models.Q(
        state=Run.State.QUEUED,
        attempt=0,
        reason=Run.Reason.OVERLAP,
        trigger__in=_WAITING_TRIGGERS,
    )
    rows = (
        Run.objects.open()
        .filter(schedule__in=list(schedule_ids))
        .order_by()
        .values_list("schedule_id")
        .annotate(
            active=models.Count("id", filter=is_active),
            first=Coalesce(models.Min("id", filter=is_active), models.Min("id", filter=waits)),
            waiting=models.Count("id", filter=waits),
        )
    )
    return {
        pk: OpenRuns(active=active, blocked_by=first, waiting=waiting)
        for pk, active, first, waiting in rows
    }


def replace(overlapped: Mapping[int, tuple[Fate, OpenRuns]], *, told: Collection[int]) -> list[int]:
    """Skip what waits in these schedules, and ask active runs to stop that are in the way.

    What a person queued is kept: a newer occurrence does not stand for it. Return the runs
    that are skipped now, of the schedules in ``told`` only, whose end somebody waits for.
    """
    now = database_now() if overlapped else None
    skipped: list[int] = []
    for pk, (fated, beside) in overlapped.items():
        of_schedule = Run.objects.filter(schedule=pk)
        waiting = of_schedule.filter(
            models.Q(reason=Run.Reason.OVERLAP, trigger__in=_WAITING_TRIGGERS)
            # Another schedule started it, and no node has claimed it yet.
            | models.Q(reason=Run.Reason.NONE, trigger=Run.Trigger.CHAIN),
            state=Run.State.QUEUED,
            attempt=0,
        )
        if pk in told:
            skipped += waiting.select_for_update().order_by("pk").values_list("pk", flat=True)
        waiting.update(
            state=Run.State.SKIPPED,
            reason=Run.Reason.OVERLAP,
            finished_at=now,
            details={"blocked_by": beside.blocked_by if beside.active else None, "replaced": True},
        )
        if fated == "queue":
            of_schedule.filter(state__in=Run.ACTIVE_STATES, cancel_requested_at=None).update(
                cancel_requested_at=now, cancel_cause=REPLACE_CAUSE
            )
    return skipped
