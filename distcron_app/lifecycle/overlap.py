"""What happens to an occurrence whose schedule already has as many active runs as it may.

Pure: ``_CLAIM_SQL`` decides the same inside PostgreSQL, and a test compares the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal

from django.db import models

from distcron_app.models import Run, Schedule

__all__ = ["Fate", "OpenRuns", "fate", "open_runs"]

Fate = Literal["start", "queue", "skip"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenRuns:
    """The open runs of a schedule: ``active`` ones, the first of them, and ``waiting`` ones.

    ``executing`` are the active ones that a node has: claimed or running.
    """

    active: int = 0
    executing: int = 0
    blocked_by: int | None = None
    waiting: int = 0


def fate(
    schedule: Schedule, runs: OpenRuns, *, has_begun: bool = False, was_queued: bool = False
) -> Fate:
    """Return whether a run may start, waits in the queue of its schedule, or is skipped.

    One that ``has_begun`` is among the active ones itself: it keeps its schedule while it
    waits for its next attempt, and so do others, which must not keep it from that for ever.
    One that ``was_queued`` has waited for its turn; a new one goes to the end of the queue,
    where there is one.
    """
    limit = schedule.active_limit
    overtakes = bool(runs.waiting) and schedule.overlap in _IN_ORDER and not was_queued
    before = runs.executing if has_begun else runs.active
    if limit is None or (before < limit and not overtakes):
        return "start"
    places = {
        Schedule.Overlap.QUEUE_ONE: 1,
        Schedule.Overlap.QUEUE_ALL: schedule.max_queued,
        # It takes the place of whatever waits.
        Schedule.Overlap.REPLACE: runs.waiting + 1,
    }
    return "queue" if runs.waiting < places.get(Schedule.Overlap(schedule.overlap), 0) else "skip"


_IN_ORDER = (Schedule.Overlap.QUEUE_ONE, Schedule.Overlap.QUEUE_ALL)


def open_runs(schedule_ids: Collection[int]) -> dict[int, OpenRuns]:
    """Return the open runs of the schedules that have any, by one read."""
    is_active = ~models.Q(state=Run.State.QUEUED) | models.Q(attempt__gt=0)
    # What a person queued takes no place in the schedule's queue.
    waits = models.Q(
        state=Run.State.QUEUED,
        attempt=0,
        reason=Run.Reason.OVERLAP,
        trigger=Run.Trigger.TIMETABLE,
    )
    rows = (
        Run.objects.open()
        .filter(schedule__in=list(schedule_ids))
        .order_by()
        .values_list("schedule_id")
        .annotate(
            active=models.Count("id", filter=is_active),
            executing=models.Count("id", filter=~models.Q(state=Run.State.QUEUED)),
            first=models.Min("id", filter=is_active),
            waiting=models.Count("id", filter=waits),
        )
    )
    return {
        pk: OpenRuns(active=active, executing=executing, blocked_by=first, waiting=waiting)
        for pk, active, executing, first, waiting in rows
    }
