"""claimed → running; running → succeeded, failed, cancelled; lost → the same (late);
running → queued for a further attempt."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.core.serializers.json import DjangoJSONEncoder
from django.db import connection, transaction
from django.db.models import F, Q, QuerySet

from distcron_app.instants import DatabaseNow, database_now
from distcron_app.lifecycle.chains import follow, waits_for
from distcron_app.lifecycle.retries import decide, retry_policy
from distcron_app.lifecycle.values import ClaimedRun, Failure, Finished
from distcron_app.models import Attempt, Node, Run, RunOutput, ended_attempt

__all__ = ["FinishResult", "finish", "note_lease_lost", "report_progress", "start"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinishResult:
    """Which reports were taken: ``late`` settled a lost run, ``rejected`` changed no run.

    ``retried`` maps runs that failed and are queued again to when; they are not accepted.
    """

    accepted: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    rejected: frozenset[int] = frozenset()
    retried: dict[int, datetime] = dataclasses.field(default_factory=dict)


_START_SQL = """
UPDATE distcron_run r
SET state = 'running', started_at = statement_timestamp(), attempt = r.attempt + 1,
    finished_at = NULL
FROM unnest(%s::bigint[], %s::bigint[], %s::text[]) AS p(id, fencing_token, owner_token)
WHERE r.id = p.id AND r.state = 'claimed' AND r.fencing_token = p.fencing_token
  AND r.owner_token = p.owner_token
  AND EXISTS (SELECT 1 FROM distcron_node n
              WHERE n.id = %s AND n.state IN ('active', 'draining')
                AND n.expires_at > statement_timestamp())
RETURNING r.id
"""


def start(runs: Sequence[ClaimedRun], node_id: UUID) -> set[int]:
    """Commit the start of claimed runs; return the ids that may be executed now.

    A run that was recovered, cancelled or claimed again since, and every run of a node
    whose lease has expired, is not among them. At most one caller gets an id per claim.
    """
    if not runs:
        return set()
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                _START_SQL,
                [
                    [run.run_id for run in runs],
                    [run.fencing_token for run in runs],
                    [run.owner_token for run in runs],
                    node_id,
                ],
            )
            return {run_id for (run_id,) in cursor.fetchall()}
    with transaction.atomic():
        if not Node.objects.alive().filter(pk=node_id).exists():
            return set()
        started = _lock_owned(
            {run.run_id: (run.fencing_token, run.owner_token) for run in runs}, ["claimed"]
        )
        Run.objects.filter(pk__in=started).update(
            state=Run.State.RUNNING,
            started_at=DatabaseNow(),
            attempt=F("attempt") + 1,
            finished_at=None,
        )
        return set(started)


_FINISH_SQL = """
UPDATE distcron_run r
SET state = p.state, reason = p.reason, result = p.result::jsonb, error = p.error,
    finished_at = greatest(p.finished_at, r.started_at), late = (r.state = 'lost'),
    progress_percent = CASE WHEN p.state = 'succeeded' AND r.progress_percent IS NOT NULL
                            THEN 100 ELSE r.progress_percent END
FROM unnest(%s::bigint[], %s::bigint[], %s::text[], %s::text[], %s::text[], %s::text[],
            %s::text[], %s::timestamptz[])
     AS p(id, fencing_token, owner_token, state, reason, result, error, finished_at)
WHERE r.id = p.id AND r.state IN ('running', 'lost') AND r.fencing_token = p.fencing_token
  AND r.owner_token = p.owner_token
RETURNING r.id, r.late,
          -- Whether other schedules follow this end.
          p.state IN ('succeeded', 'failed') AND EXISTS (
            SELECT 1 FROM distcron_chainlink l
            WHERE l.schedule_id = r.schedule_id AND l.event = p.state)
"""


def finish(reports: Sequence[Finished]) -> FinishResult:
    """Write the outcomes of a batch of attempts, each guarded by its tokens.

    No lease is tested: a late result that nobody superseded is true. A report that
    another claim superseded changes no run; it is noted on the attempt that it ends.
    Repeating a report that was taken is harmless and counts as rejected. A failure whose
    schedule allows another attempt queues the run again instead.
    """
    if not reports:
        return FinishResult()
    with transaction.atomic():
        retried = _retry([report for report in reports if report.failure is not None])
        final = [report for report in reports if report.run_id not in retried]
        settled = (
            _finish_postgres(final)
            if connection.vendor == "postgresql"
            else _finish_portable(final)
        )
        follow([run_id for run_id, each in settled.items() if each.is_followed])
        taken = settled.keys() | retried.keys()
        _store_text([report for report in reports if report.run_id in taken])
        rejected = [report for report in final if report.run_id not in settled]
        for report in rejected:
            Attempt.objects.filter(
                run=report.run_id, fencing_token=report.fencing_token, late_at=None
            ).update(late_state=report.state, late_at=DatabaseNow())
    return FinishResult(
        accepted=frozenset(settled),
        late=frozenset(run_id for run_id, each in settled.items() if each.is_late),
        rejected=frozenset(report.run_id for report in rejected),
        retried=retried,
    )


def _retry(reports: Sequence[Finished]) -> dict[int, datetime]:
    """Queue the runs whose schedule allows another attempt; return when each is due."""
    if not reports:
        return {}
    by_id = {report.run_id: report for report in reports}
    tokens = {pk: (report.fencing_token, report.owner_token) for pk, report in by_id.items()}
    owned = _lock_owned(tokens, ["running"])
    now = database_now()
    retried: dict[int, datetime] = {}
    rows: list[Run] = []
    attempts: list[Attempt] = []
    for run in Run.objects.filter(pk__in=owned).select_related("schedule").order_by("pk"):
        due_at = _next_attempt_at(run, by_id[run.pk].failure, now)
        if due_at is None:
            continue
        retried[run.pk] = due_at
        attempts.append(ended_attempt(run, by_id[run.pk].reason, now, by_id[run.pk].error))
        run.state, run.reason, run.due_at = Run.State.QUEUED, Run.Reason.RETRY, due_at
        run.error, run.owner_token, run.node_id = by_id[run.pk].error, "", None
        run.progress_percent, run.progress_message, run.details = None, "", None
        rows.append(run)
    Attempt.objects.bulk_create(attempts)
    if rows:
        Run.objects.bulk_update(rows, _RETRY_FIELDS, batch_size=200)
    return retried


def _next_attempt_at(run: Run, failure: Failure | None, now: datetime) -> datetime | None:
    schedule = run.schedule
    if schedule is None or failure is None or run.cancel_requested_at is not None:
        return None
    verdict = decide(
        retry_policy(schedule),
        attempt=run.attempt - run.recoveries,
        exceptions=failure.exceptions,
        wanted_delay=failure.retry_seconds,
        now=now,
        next_run_at=schedule.next_run_at,
    )
    return verdict.due_at


def report_progress(
    progress: Mapping[int, tuple[float, str]], tokens: Mapping[int, tuple[int, str]]
) -> None:
    """Store percent and message of running runs; a run that moved on is left alone."""
    with transaction.atomic():
        running = _lock_owned({pk: tokens[pk] for pk in progress if pk in tokens}, ["running"])
        rows = [
            Run(pk=pk, progress_percent=progress[pk][0], progress_message=progress[pk][1][:200])
            for pk in running
        ]
        if rows:
            Run.objects.bulk_update(rows, ["progress_percent", "progress_message"])


def note_lease_lost(causes: Mapping[int, str], tokens: Mapping[int, tuple[int, str]]) -> None:
    """Note on running runs that their lease was lost and why; the outcome is not changed by it."""
    with transaction.atomic():
        running = _lock_owned({pk: tokens[pk] for pk in causes if pk in tokens}, ["running"])
        rows = [Run(pk=pk, details={"lease_lost": causes[pk][:200]}) for pk in running]
        if rows:
            Run.objects.bulk_update(rows, ["details"])


class _Settled(NamedTuple):
    """A report that was taken: did it settle a lost run, and do other schedules follow it?"""

    is_late: bool
    is_followed: bool


def _finish_postgres(reports: Sequence[Finished]) -> dict[int, _Settled]:
    with connection.cursor() as cursor:
        cursor.execute(
            _FINISH_SQL,
            [
                [report.run_id for report in reports],
                [report.fencing_token for report in reports],
                [report.owner_token for report in reports],
                [report.state for report in reports],
                [report.reason for report in reports],
                [_json(report.result) for report in reports],
                [report.error for report in reports],
                [report.finished_at for report in reports],
            ],
        )
        return {run_id: _Settled(*found) for run_id, *found in cursor.fetchall()}


# What _retry changes of a run.
_RETRY_FIELDS = (
    "state",
    "reason",
    "due_at",
    "error",
    "owner_token",
    "node_id",
    "progress_percent",
    "progress_message",
    "details",
)


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, cls=DjangoJSONEncoder)


def _finish_portable(reports: Sequence[Finished]) -> dict[int, _Settled]:
    by_id = {report.run_id: report for report in reports}
    tokens = {pk: (report.fencing_token, report.owner_token) for pk, report in by_id.items()}
    owned = _lock_owned(tokens, ["running", "lost"])
    rows: list[Any] = list(
        Run.objects.filter(pk__in=owned).annotate(is_followed=waits_for("schedule")).order_by("pk")
    )
    for run in rows:
        report = by_id[run.pk]
        run.late = run.state == Run.State.LOST
        run.state, run.reason = report.state, report.reason
        run.result, run.error = report.result, report.error
        run.finished_at = max(report.finished_at, run.started_at or report.finished_at)
        if run.progress_percent is not None and report.state == Run.State.SUCCEEDED:
            run.progress_percent = 100
    if rows:
        Run.objects.bulk_update(
            rows,
            ["state", "reason", "result", "error", "finished_at", "late", "progress_percent"],
            batch_size=200,
        )
    return {run.pk: _Settled(run.late, run.is_followed) for run in rows}


def _lock_owned(tokens: Mapping[int, tuple[int, str]], states: list[str]) -> list[int]:
    """Lock the runs that are in one of ``states`` under exactly these tokens; return their ids."""
    rows: QuerySet[Run] = (
        Run.objects.select_for_update()
        .filter(Q(pk__in=list(tokens)), state__in=states)
        .order_by("pk")
    )
    found = rows.values_list("pk", "fencing_token", "owner_token")
    return [pk for pk, fencing, owner in found if tokens[pk] == (fencing, owner)]


def _store_text(reports: Sequence[Finished]) -> None:
    rows = [
        RunOutput(run_id=report.run_id, output=report.output, traceback=report.traceback)
        for report in reports
        if report.output or report.traceback
    ]
    if rows:
        unique = None if connection.vendor == "mysql" else ["run"]
        RunOutput.objects.bulk_create(
            rows,
            update_conflicts=True,
            update_fields=["output", "traceback"],
            unique_fields=unique,
            batch_size=200,
        )
