"""claimed → queued (given back, node died); running → queued, lost, failed, cancelled (its node
or worker died, its lock was released); queued → cancelled (the schedule is gone),
skipped (its time to start is over)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from django.db import connection, transaction

from distcron_app.instants import DatabaseNow, database_now
from distcron_app.lifecycle.chains import follow
from distcron_app.lifecycle.values import MAX_RECOVERIES, ClaimedRun
from distcron_app.models import Attempt, Run, Schedule, ended_attempt

__all__ = [
    "Recovered",
    "Released",
    "cancel_without_schedule",
    "expire",
    "give_back",
    "recover",
    "recover_owned",
    "release",
    "runs_again",
    "settle_strays",
]

# Orphaned runs taken in one transaction; the rest follows in the next sweep.
_BATCH = 500


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What became of orphaned runs."""

    requeued: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """What became of the runs whose lock was released; writes below the token are refused."""

    fencing_token: int
    runs: Recovered


def give_back(runs: Sequence[ClaimedRun]) -> int:
    """Return claimed runs that have not started to the queue; return how many were still ours."""
    tokens = {run.run_id: (run.fencing_token, run.owner_token) for run in runs}
    with transaction.atomic():
        rows = [
            run
            for run in Run.objects.select_for_update()
            .filter(pk__in=tokens, state=Run.State.CLAIMED)
            .order_by("pk")
            if tokens[run.pk] == (run.fencing_token, run.owner_token)
        ]
        for run in rows:
            _to_queue(run)
        _write(rows)
    return len(rows)


def recover() -> Recovered:
    """Recover a batch of runs whose node is dead or has left.

    Claimed: never started, so it is queued again. Running: queued again where delivery is
    at_least_once and the run has not used up its recoveries, else ``lost``. The node was
    fenced first, so it can start nothing more under its id; its late report still settles
    a lost run, and is refused where another attempt has begun.
    """
    skip = connection.features.has_select_for_update_skip_locked
    with transaction.atomic():
        rows = list(
            Run.objects.orphaned()
            .select_for_update(skip_locked=skip, of=_of_self())
            .order_by("pk")[:_BATCH]
        )
        return _settle(rows, Run.Reason.NODE_DIED, unknown=Run.State.LOST, detail="")


def recover_owned(
    runs: Sequence[ClaimedRun], *, reason: str, unknown: str, detail: str
) -> Recovered:
    """Settle this node's own runs whose worker is known to be gone, without waiting for a lease.

    ``unknown`` is the state of a run that must not start again: failed where the job is
    known to have died, lost where it was cut off by a shutdown, cancelled where it stopped
    when it was told to. ``detail`` says how.
    """
    tokens = {run.run_id: (run.fencing_token, run.owner_token) for run in runs}
    with transaction.atomic():
        rows = [
            run
            for run in Run.objects.select_for_update()
            .filter(pk__in=tokens, state=Run.State.RUNNING)
            .order_by("pk")
            if tokens[run.pk] == (run.fencing_token, run.owner_token)
        ]
        return _settle(rows, reason, unknown=unknown, detail=detail)


def release(schedule_id: int) -> Released:
    """Take the active runs of a schedule from their nodes, for a person who releases its lock.

    What follows is what follows when a node dies, at once: claimed is queued again, running
    is queued again with at_least_once, else lost. The fencing token grows first, so that a
    holder that is alive after all can neither start nor finish the run; what it reports
    late is noted on the attempt. Raise Schedule.DoesNotExist.
    """
    with transaction.atomic():
        schedule = Schedule.objects.select_for_update().get(pk=schedule_id)
        schedule.fencing_token += 1
        Schedule.objects.bulk_update([schedule], ["fencing_token"])
        rows = list(
            Run.objects.select_for_update()
            .filter(schedule=schedule_id, state__in=Run.ACTIVE_STATES)
            .order_by("pk")
        )
        runs = _settle(
            rows,
            Run.Reason.RELEASED,
            unknown=Run.State.LOST,
            detail="",
            fencing_token=schedule.fencing_token,
        )
    return Released(fencing_token=schedule.fencing_token, runs=runs)


def runs_again(run: Run) -> bool:
    """Return True where an active run that is taken from its node is queued again."""
    if run.state == Run.State.CLAIMED:
        return True
    may_repeat = run.delivery == Schedule.Delivery.AT_LEAST_ONCE and not run.cancel_requested_at
    return may_repeat and run.recoveries < MAX_RECOVERIES


def cancel_without_schedule() -> int:
    """Cancel queued runs whose schedule was deleted; return how many."""
    with transaction.atomic():
        rows = list(
            Run.objects.select_for_update()
            .filter(state=Run.State.QUEUED)
            .exclude(schedule__in=Schedule.objects.values("pk"))
            .order_by("pk")[:_BATCH]
        )
        now = database_now()
        for run in rows:
            run.state, run.reason, run.finished_at = Run.State.CANCELLED, "deleted", now
        _write(rows)
    return len(rows)


def expire() -> int:
    """Skip queued runs that could not start within their schedule's deadline; return how many.

    Counted from the instant of the timetable, or from when the run was to start where that
    is later. A run that has begun once is left alone: it is decided by its retries.
    """
    rows = list(
        Run.objects.filter(
            state=Run.State.QUEUED, attempt=0, schedule__start_deadline_seconds__isnull=False
        ).select_related("schedule")[:_BATCH]
    )
    if not rows:
        return 0
    now = database_now()
    late = [run.pk for run in rows if _is_too_late(run, now)]
    with transaction.atomic():
        expired = list(
            Run.objects.select_for_update()
            .filter(pk__in=late, state=Run.State.QUEUED, attempt=0)
            .order_by("pk")
        )
        for run in expired:
            run.state, run.reason, run.finished_at = Run.State.SKIPPED, Run.Reason.EXPIRED, now
        _write(expired)
        follow([run.pk for run in expired])
    return len(expired)


def _is_too_late(run: Run, now: datetime) -> bool:
    assert run.schedule is not None  # noqa: S101 - the filter joins it
    seconds = run.schedule.start_deadline_seconds or 0
    instant: datetime = run.scheduled_at or run.due_at
    if run.is_held_back:
        instant = max(instant, run.due_at)
    return now > instant + timedelta(seconds=seconds)


def settle_strays(node_id: UUID, known: Collection[int], older_than: timedelta) -> Recovered:
    """Settle runs that the database gives to this node and the node does not know.

    A COMMIT whose answer was lost, and which was absent at the read-back, may still have
    landed afterwards. ``known`` are the ids of the runs that the node holds in memory.
    """
    with transaction.atomic():
        rows = [
            run
            for run in Run.objects.select_for_update()
            .filter(
                node=node_id,
                state__in=Run.ACTIVE_STATES,
                claimed_at__lt=DatabaseNow(-older_than),
            )
            .order_by("pk")
            if run.pk not in known
        ]
        return _settle(rows, Run.Reason.NODE_DIED, unknown=Run.State.LOST, detail="")


def _of_self() -> tuple[str, ...]:
    return ("self",) if connection.features.has_select_for_update_of else ()


def _settle(
    rows: Sequence[Run],
    reason: str,
    *,
    unknown: str,
    detail: str,
    fencing_token: int | None = None,
) -> Recovered:
    """Decide and write; with ``fencing_token`` the owner's late report is refused as well."""
    now = database_now()
    requeued: list[int] = []
    ended: list[int] = []
    attempts: list[Attempt] = []
    for run in rows:
        if run.state == Run.State.CLAIMED:
            _to_queue(run)
            requeued.append(run.pk)
            continue
        if runs_again(run):
            attempts.append(ended_attempt(run, reason, now))
            run.recoveries += 1
            _to_queue(run)
            run.reason = Run.Reason.RECOVERY
            requeued.append(run.pk)
        else:
            if fencing_token is not None:
                attempts.append(ended_attempt(run, reason, now))
                run.owner_token, run.fencing_token = "", fencing_token
            # Else the tokens stay: they let the owner's late report settle a lost run.
            run.state, run.reason, run.finished_at = unknown, reason, now
            run.error = detail
            ended.append(run.pk)
    Attempt.objects.bulk_create(attempts)
    _write(rows)
    follow(ended)
    lost = unknown == Run.State.LOST
    return Recovered(
        requeued=tuple(requeued),
        lost=tuple(ended) if lost else (),
        failed=() if lost else tuple(ended),
    )


def _to_queue(run: Run) -> None:
    run.state, run.owner_token, run.node_id = Run.State.QUEUED, "", None
    run.progress_percent, run.progress_message, run.details = None, "", None


def _write(rows: Sequence[Run]) -> None:
    if rows:
        Run.objects.bulk_update(
            rows,
            [
                "state",
                "reason",
                "error",
                "owner_token",
                "fencing_token",
                "node_id",
                "recoveries",
                "finished_at",
                "progress_percent",
                "progress_message",
                "details",
            ],
            batch_size=200,
        )
