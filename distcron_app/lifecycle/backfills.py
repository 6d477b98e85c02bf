"""∅ → queued (the runs of a backfill); queued, claimed → cancelled with their backfill."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, models, transaction
from django.db.models import Exists, OuterRef

from distcron_app.instants import DatabaseNow
from distcron_app.lifecycle.cancel import request_cancel
from distcron_app.lifecycle.overlap import OpenRuns
from distcron_app.models import Backfill, Run, Schedule

__all__ = [
    "BackfillCancel",
    "active_of",
    "cancel_backfill",
    "forget_backfills",
    "in_turn",
    "queue_backfill",
    "settle_backfills",
]

_CHUNK = 500  # rows in one statement
# Keeps the runs of a backfill without a pace in their order, and their locks, which name
# the millisecond, apart.
_TICK = timedelta(milliseconds=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackfillCancel:
    """How many runs of a backfill are cancelled now, and how many were asked to stop."""

    cancelled: int = 0
    asked: int = 0


def queue_backfill(
    backfill: Backfill, schedule: Schedule, instants: Sequence[datetime], *, start: datetime
) -> None:
    """Insert one queued run for each instant, the oldest first, paced from ``start`` on.

    All or none: the caller's transaction inserts the backfill and holds the schedule's row.
    """
    given = backfill.arguments
    arguments: dict[str, Any] = schedule.arguments if given is None else given
    pause = max(backfill.pause, _TICK)
    rows = (
        Run(
            schedule=schedule,
            schedule_name=schedule.name,
            job=schedule.job,
            arguments=arguments,
            delivery=schedule.delivery,
            queue=schedule.queue,
            priority=schedule.priority,
            trigger=Run.Trigger.BACKFILL,
            triggered_by=backfill.by,
            backfill=backfill,
            nominal_at=instant,
            due_at=start + place * pause,
            state=Run.State.QUEUED,
        )
        for place, instant in enumerate(sorted(instants))
    )
    Run.objects.bulk_create(rows, batch_size=_CHUNK)


def in_turn(backfill: Backfill, beside: OpenRuns, own: int) -> bool:
    """Return True where the next run of a backfill may start by the backfill's own rule.

    ``beside`` are the open runs of its schedule, ``own`` the active ones of the backfill.
    An occurrence of the timetable that waits goes first.
    """
    if beside.waiting:
        return False
    if backfill.overlap == Backfill.Overlap.ONE_BY_ONE:
        return beside.active == 0
    return backfill.most_active is None or own < backfill.most_active


def active_of(backfills: Mapping[int, Backfill]) -> dict[int, int]:
    """Return how many runs each backfill has active, where it has a limit of its own."""
    limited = [pk for pk, backfill in backfills.items() if backfill.most_active is not None]
    if not limited:
        return {}
    rows = Run.objects.active().filter(backfill__in=limited).order_by()
    return dict(rows.values_list("backfill_id").annotate(models.Count("pk")))


def cancel_backfill(
    backfill_id: int, *, by: str, reason: str, now: datetime, is_stopping: bool
) -> BackfillCancel | None:
    """Cancel what has not started, in one transaction; None where the backfill has ended.

    With ``is_stopping`` its running runs are asked to stop, else they go on to their end.
    """
    with transaction.atomic():
        found = Backfill.objects.select_for_update().active().filter(pk=backfill_id).first()
        if found is None:
            return None
        found.state, found.state_at = Backfill.State.CANCELLED, now
        found.state_by, found.state_reason = by[:150], reason
        found.save(update_fields=["state", "state_at", "state_by", "state_reason"])
        cause = f"by {by}: {reason}"
        runs = Run.objects.filter(backfill=backfill_id)
        # One statement for what may be thousands; a claim that holds a row goes first.
        cancelled = runs.filter(state=Run.State.QUEUED).update(
            state=Run.State.CANCELLED,
            reason=Run.Reason.CANCELLED,
            error=cause[:500],
            finished_at=now,
        )
        states = Run.ACTIVE_STATES if is_stopping else (Run.State.CLAIMED,)
        active = runs.filter(state__in=states).values_list("pk", flat=True)
        done = request_cancel(list(active), cause=cause)
    return BackfillCancel(cancelled=cancelled + len(done.cancelled), asked=len(done.asked))


def settle_backfills() -> int:
    """End the backfills whose last run has ended; return how many.

    One whose schedule was deleted meanwhile is cancelled: its waiting runs are, too.
    """
    over = Backfill.objects.active().exclude(
        Exists(Run.objects.open().filter(backfill=OuterRef("pk")).order_by())
    )
    ids = list(over.order_by("pk").values_list("pk", flat=True))
    if not ids:
        return 0
    kept = Schedule.objects.filter(pk=OuterRef("schedule")).order_by()
    state = models.Case(
        models.When(Exists(kept), then=models.Value(Backfill.State.DONE)),
        default=models.Value(Backfill.State.CANCELLED),
    )
    return over.filter(pk__in=ids).update(state=state, state_at=DatabaseNow())


def forget_backfills() -> int:
    """Delete ended backfills whose runs were all pruned; return how many. The audit stays."""
    ended = Backfill.objects.exclude(state=Backfill.State.ACTIVE)
    empty = ended.exclude(Exists(Run.objects.filter(backfill=OuterRef("pk")).order_by()))
    ids = list(empty.order_by("pk").values_list("pk", flat=True))
    return Backfill.objects.filter(pk__in=ids)._raw_delete(connection.alias) if ids else 0
