"""∅ → skipped (the instants of a pause); how many runs of a schedule failed in a row."""

from __future__ import annotations

from datetime import datetime, timedelta

from distcron_app import timetable
from distcron_app.models import Run, Schedule

__all__ = ["failed_in_a_row", "skip_paused"]

# What says something about the job: a run that was cancelled or skipped does not.
_OUTCOMES = (Run.State.SUCCEEDED, Run.State.FAILED, Run.State.LOST)
_FAILURES = (Run.State.FAILED, Run.State.LOST)
_TICK = timedelta(microseconds=1)


def skip_paused(schedule: Schedule, since: datetime, until: datetime) -> Run | None:
    """Write one skipped row for the instants of a pause; None where there was none.

    ``since`` is excluded, ``until`` included. A long pause costs no more than a short one.
    The caller holds the schedule's row.
    """
    first = since if schedule.starts_at is None else max(since, schedule.starts_at - _TICK)
    last = until if schedule.ends_at is None else min(until, schedule.ends_at)
    span = timetable.span(schedule.timetable(), after=first, until=last)
    if span is None:
        return None
    details = {
        "first_at": span.first.isoformat(),
        "last_at": span.last.isoformat(),
        "count": span.count,
    }
    return Run.objects.create(
        schedule=schedule,
        schedule_name=schedule.name,
        job=schedule.job,
        arguments=schedule.arguments,
        delivery=schedule.delivery,
        scheduled_at=span.first,
        due_at=span.first,
        state=Run.State.SKIPPED,
        reason=Run.Reason.PAUSED,
        details=details if span.count > 1 else None,
        fencing_token=schedule.fencing_token,
        finished_at=until,
    )


def failed_in_a_row(schedule: Schedule, count: int) -> Run | None:
    """Return the newest run if the last ``count`` outcomes are failed or lost, else None.

    Runs by hand do not count, nor does what ended before the state was changed last.
    """
    runs = Run.objects.filter(
        schedule=schedule, trigger__in=Run.AUTOMATIC_TRIGGERS, state__in=_OUTCOMES
    ).order_by("-id")
    newest = list(runs.defer("result", "arguments")[:count])
    if len(newest) < count or any(run.state not in _FAILURES for run in newest):
        return None
    since = schedule.state_at
    if since is not None and any(
        run.finished_at is None or run.finished_at <= since for run in newest
    ):
        return None
    return newest[0]
