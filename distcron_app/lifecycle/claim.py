"""∅ → claimed, running, skipped (timetable); ∅ → queued (by hand); queued → claimed."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.core.serializers.json import DjangoJSONEncoder
from django.db import connection, models, transaction
from django.utils.translation import gettext as _

from distcron_app.errors import ScheduleBusy
from distcron_app.instants import DatabaseNow, database_now
from distcron_app.lifecycle.values import Claimed, ClaimedRun, Decision, SkippedRun
from distcron_app.models import Node, Run, Schedule

__all__ = ["claim", "claim_queued", "queue_manual", "read_back"]

# Rows per INSERT on the portable path; SQLite limits the variables of one statement.
_PORTABLE_CHUNK = 200


def claim(decisions: Sequence[Decision], node_id: UUID) -> Claimed:
    """Claim the occurrences of a batch of due schedules; return what this node now owns.

    One transaction: (1) lock the schedules that still stand where they were seen, if this
    node's lease is alive; (2) move each to its next instant and bump its fencing token;
    (3) where a run is active, decide ``skipped`` for overlap; (4) insert the rows. What
    another node holds or has moved is left out: it lost nothing, somebody else has it.

    Blocks for two round trips on PostgreSQL. Raise DatabaseError when the outcome is
    unknown; settle it with ``read_back``.
    """
    if not decisions:
        return Claimed()
    ordered = sorted(decisions, key=lambda decision: decision.schedule_id)
    with transaction.atomic():
        if connection.vendor == "postgresql":
            return _claim_postgres(ordered, node_id)
        return _claim_portable(ordered, node_id)


def claim_queued(owner_tokens: Mapping[int, str], node_id: UUID) -> list[ClaimedRun]:
    """Claim queued runs, given as run id to fresh owner token; return those now owned.

    A run whose schedule has an active run stays queued. The schedule's row is locked
    first, as in ``claim``, so that the two cannot miss each other.
    """
    if not owner_tokens:
        return []
    with transaction.atomic():
        rows = {row.pk: row for row in Run.objects.filter(pk__in=owner_tokens, state="queued")}
        schedules = _lock_schedules({row.schedule_id for row in rows.values()}, node_id)
        if not schedules:
            return []
        active = _active_runs(schedules)
        locked = (
            Run.objects.select_for_update(skip_locked=_can_skip_locked())
            .filter(pk__in=rows, state="queued", schedule__in=schedules, due_at__lte=DatabaseNow())
            .order_by("id")
        )
        won: list[Run] = []
        for run in locked:
            if active.setdefault(run.schedule_id or 0, run.pk) == run.pk:
                won.append(run)
        return _write_queued_claims(won, schedules, owner_tokens, node_id)


def queue_manual(schedule: Schedule, *, by: str, arguments: Mapping[str, Any] | None = None) -> Run:
    """Insert a queued run that starts as soon as a node has a free slot.

    Raise ScheduleBusy when a run of the schedule is queued or active.
    """
    with transaction.atomic():
        Schedule.objects.select_for_update().get(pk=schedule.pk)
        blocking = Run.objects.open().filter(schedule=schedule.pk).order_by("id").first()
        if blocking is not None:
            raise ScheduleBusy(schedule.key, blocking.pk)
        return Run.objects.create(
            schedule=schedule,
            schedule_name=schedule.name,
            job=schedule.job,
            arguments=dict(schedule.arguments if arguments is None else arguments),
            delivery=schedule.delivery,
            trigger=Run.Trigger.MANUAL,
            triggered_by=by,
            due_at=database_now(),
            state=Run.State.QUEUED,
        )


def read_back(owner_tokens: Collection[str], node_id: UUID) -> list[ClaimedRun]:
    """Return the runs that were committed under these owner tokens.

    For a link that broke around COMMIT: what is absent was not committed, and is dropped.
    """
    rows = Run.objects.filter(
        owner_token__in=list(owner_tokens), node_id=node_id, state__in=Run.ACTIVE_STATES
    )
    return [_owned(run) for run in rows.select_related("schedule")]


def _owned(run: Run) -> ClaimedRun:
    return ClaimedRun(
        run_id=run.pk,
        schedule_id=run.schedule_id or 0,
        schedule_key=run.schedule.key if run.schedule else "",
        schedule_name=run.schedule_name,
        job=run.job,
        arguments=run.arguments,
        delivery=run.delivery,
        scheduled_at=run.scheduled_at or run.due_at,
        state=run.state,
        attempt=run.attempt,
        recoveries=run.recoveries,
        fencing_token=run.fencing_token,
        owner_token=run.owner_token,
    )


# --- PostgreSQL ---------------------------------------------------------------

_LOCK_SQL = """
SELECT s.id
FROM distcron_schedule s
JOIN unnest(%s::bigint[], %s::int[], %s::timestamptz[]) AS p(id, version, seen) ON p.id = s.id
WHERE s.next_run_at = p.seen AND s.version = p.version AND s.state = 'active'
  AND EXISTS (SELECT 1 FROM distcron_node n
              WHERE n.id = %s AND n.state = 'active' AND n.expires_at > statement_timestamp())
FOR UPDATE OF s SKIP LOCKED
"""

# A statement of its own, after the locks: its snapshot sees every run committed by
# whoever held those rows before, so an active run cannot be overlooked.
_CLAIM_SQL = """
WITH p AS (
  SELECT * FROM unnest(%(ids)s::bigint[], %(nexts)s::timestamptz[]) AS p(id, next_run_at)
), moved AS (
  UPDATE distcron_schedule s
  SET next_run_at = p.next_run_at,
      fencing_token = s.fencing_token + 1,
      state = CASE WHEN p.next_run_at IS NULL THEN 'exhausted' ELSE s.state END,
      state_reason = CASE WHEN p.next_run_at IS NULL THEN %(exhausted)s ELSE s.state_reason END
  FROM p WHERE s.id = p.id
  RETURNING s.id, s.key, s.name, s.job, s.arguments, s.delivery, s.fencing_token
), active AS (
  SELECT r.schedule_id, min(r.id) AS run_id
  FROM distcron_run r
  WHERE r.schedule_id = ANY(%(ids)s) AND r.state IN ('queued', 'claimed', 'running')
    AND (r.state <> 'queued' OR r.attempt > 0)
  GROUP BY r.schedule_id
), wanted AS (
  SELECT w.*, m.*, a.run_id AS blocked_by,
         CASE WHEN w.reason <> '' THEN 'skipped'
              WHEN a.run_id IS NOT NULL THEN 'skipped'
              WHEN m.delivery = 'at_least_once' THEN 'running'
              ELSE 'claimed' END AS new_state
  FROM unnest(%(w_ids)s::bigint[], %(w_at)s::timestamptz[], %(w_reason)s::text[],
              %(w_details)s::text[], %(w_token)s::text[])
       AS w(schedule_id, scheduled_at, reason, details, owner_token)
  JOIN moved m ON m.id = w.schedule_id
  LEFT JOIN active a ON a.schedule_id = w.schedule_id
), inserted AS (
  INSERT INTO distcron_run (
    schedule_id, schedule_name, job, arguments, delivery, "trigger", triggered_by,
    scheduled_at, due_at, state, reason, details, attempt, recoveries, fencing_token,
    owner_token, node_id, claimed_at, started_at, finished_at, late, progress_message, error)
  SELECT schedule_id, name, job, arguments, delivery, 'timetable', '',
         scheduled_at, scheduled_at, new_state,
         CASE WHEN reason <> '' THEN reason WHEN new_state = 'skipped' THEN 'overlap' ELSE '' END,
         CASE WHEN reason <> '' THEN details::jsonb
              WHEN new_state = 'skipped' THEN jsonb_build_object('blocked_by', blocked_by) END,
         CASE WHEN new_state = 'running' THEN 1 ELSE 0 END, 0, fencing_token,
         CASE WHEN new_state = 'skipped' THEN '' ELSE owner_token END, %(node)s,
         statement_timestamp(),
         CASE WHEN new_state = 'running' THEN statement_timestamp() END,
         CASE WHEN new_state = 'skipped' THEN statement_timestamp() END,
         false, '', ''
  FROM wanted
  ON CONFLICT (schedule_id, scheduled_at) DO NOTHING
  RETURNING id, schedule_id, state, attempt, fencing_token, owner_token,
            EXTRACT(EPOCH FROM scheduled_at), reason, details::text
)
SELECT i.*, m.key, m.name, m.job, m.arguments::text, m.delivery
FROM inserted i JOIN moved m ON m.id = i.schedule_id
ORDER BY i.id
"""


def _claim_postgres(decisions: Sequence[Decision], node_id: UUID) -> Claimed:
    with connection.cursor() as cursor:
        cursor.execute(
            _LOCK_SQL,
            [
                [decision.schedule_id for decision in decisions],
                [decision.version for decision in decisions],
                [decision.seen_next_run_at for decision in decisions],
                node_id,
            ],
        )
        locked = {schedule_id for (schedule_id,) in cursor.fetchall()}
        kept = [decision for decision in decisions if decision.schedule_id in locked]
        if not kept:
            return Claimed()
        cursor.execute(_CLAIM_SQL, _claim_parameters(kept, node_id))
        rows = [_from_row(row) for row in cursor.fetchall()]
    return Claimed(
        runs=tuple(row for row in rows if isinstance(row, ClaimedRun)),
        skipped=tuple(row for row in rows if isinstance(row, SkippedRun)),
    )


def _claim_parameters(decisions: Sequence[Decision], node_id: UUID) -> dict[str, Any]:
    rows = [row for decision in decisions for row in _wanted_rows(decision)]
    return {
        "ids": [decision.schedule_id for decision in decisions],
        "nexts": [decision.next_run_at for decision in decisions],
        "exhausted": _exhausted_reason(),
        "w_ids": [row[0] for row in rows],
        "w_at": [row[1] for row in rows],
        "w_reason": [row[2] for row in rows],
        "w_details": [None if row[3] is None else _json(row[3]) for row in rows],
        "w_token": [row[4] for row in rows],
        "node": node_id,
    }


def _wanted_rows(
    decision: Decision,
) -> list[tuple[int, datetime, str, dict[str, Any] | None, str]]:
    """Return (schedule, scheduled_at, reason, details, owner token) of the rows to insert."""
    rows: list[tuple[int, datetime, str, dict[str, Any] | None, str]] = [
        (decision.schedule_id, skip.scheduled_at, skip.reason, skip.details, "")
        for skip in decision.skips
    ]
    if decision.run_at is not None:
        rows.append((decision.schedule_id, decision.run_at, "", None, decision.owner_token))
    return rows


def _from_row(row: tuple[Any, ...]) -> ClaimedRun | SkippedRun:
    run_id, schedule_id, state, attempt, fencing, owner, epoch, reason, details = row[:9]
    key, name, job, arguments, delivery = row[9:]
    scheduled_at = datetime.fromtimestamp(float(epoch), UTC)
    if state == Run.State.SKIPPED:
        return SkippedRun(
            run_id=run_id,
            schedule_key=key,
            scheduled_at=scheduled_at,
            reason=reason,
            details=None if details is None else json.loads(details),
        )
    return ClaimedRun(
        run_id=run_id,
        schedule_id=schedule_id,
        schedule_key=key,
        schedule_name=name,
        job=job,
        arguments=json.loads(arguments),
        delivery=delivery,
        scheduled_at=scheduled_at,
        state=state,
        attempt=attempt,
        recoveries=0,
        fencing_token=fencing,
        owner_token=owner,
    )


def _json(value: Any) -> str:
    return json.dumps(value, cls=DjangoJSONEncoder)


def _exhausted_reason() -> str:
    return _("No instant of the timetable is left.")


# --- MariaDB, MySQL, SQLite ------------------------------------------------------


def _claim_portable(decisions: Sequence[Decision], node_id: UUID) -> Claimed:
    schedules = _lock_schedules([decision.schedule_id for decision in decisions], node_id)
    kept = [
        decision
        for decision in decisions
        if (schedule := schedules.get(decision.schedule_id)) is not None
        and schedule.next_run_at == decision.seen_next_run_at
        and schedule.version == decision.version
        and schedule.state == Schedule.State.ACTIVE
    ]
    if not kept:
        return Claimed()
    active = _active_runs([decision.schedule_id for decision in kept])
    for decision in kept:
        schedule = schedules[decision.schedule_id]
        schedule.next_run_at = decision.next_run_at
        schedule.fencing_token += 1
        if decision.next_run_at is None:
            schedule.state = Schedule.State.EXHAUSTED
            schedule.state_reason = _exhausted_reason()
    Schedule.objects.write_claims(
        [schedules[decision.schedule_id] for decision in kept], _PORTABLE_CHUNK
    )
    return _insert_portable(kept, schedules, active, node_id)


def _insert_portable(
    decisions: Sequence[Decision],
    schedules: Mapping[int, Schedule],
    active: Mapping[int, int],
    node_id: UUID,
) -> Claimed:
    now = database_now()
    rows = [
        _new_run(schedules[schedule_id], at, reason, details, token, active, node_id, now)
        for decision in decisions
        for schedule_id, at, reason, details, token in _wanted_rows(decision)
    ]
    # The schedule's row lock keeps other claims out; an occurrence that is there already
    # was claimed before an edit moved next_run_at back.
    taken = set(
        Run.objects.filter(
            schedule__in={row.schedule_id for row in rows},
            scheduled_at__in={row.scheduled_at for row in rows},
        ).values_list("schedule_id", "scheduled_at")
    )
    # In key order: two batches that insert in different orders deadlock on InnoDB.
    free = sorted(
        (row for row in rows if (row.schedule_id, row.scheduled_at) not in taken),
        key=lambda row: (row.schedule_id, row.scheduled_at),
    )
    Run.objects.bulk_create(free, batch_size=_PORTABLE_CHUNK)
    skipped = [row for row in free if row.state == Run.State.SKIPPED]
    tokens = [row.owner_token for row in free if row.state != Run.State.SKIPPED]
    return Claimed(
        runs=tuple(read_back(tokens, node_id)) if tokens else (),
        skipped=tuple(_skipped(row, schedules[row.schedule_id or 0]) for row in skipped),
    )


def _skipped(run: Run, schedule: Schedule) -> SkippedRun:
    return SkippedRun(
        run_id=run.pk or 0,
        schedule_key=schedule.key,
        scheduled_at=run.scheduled_at or run.due_at,
        reason=run.reason,
        details=run.details,
    )


def _new_run(
    schedule: Schedule,
    scheduled_at: datetime,
    reason: str,
    details: dict[str, Any] | None,
    owner_token: str,
    active: Mapping[int, int],
    node_id: UUID,
    now: datetime,
) -> Run:
    blocked_by = active.get(schedule.pk)
    run = Run(
        schedule=schedule,
        schedule_name=schedule.name,
        job=schedule.job,
        arguments=schedule.arguments,
        delivery=schedule.delivery,
        scheduled_at=scheduled_at,
        due_at=scheduled_at,
        fencing_token=schedule.fencing_token,
        node_id=node_id,
        claimed_at=now,
    )
    if reason or blocked_by is not None:
        run.state, run.finished_at = Run.State.SKIPPED, now
        run.reason = reason or Run.Reason.OVERLAP
        run.details = details if reason else {"blocked_by": blocked_by}
    elif schedule.delivery == Schedule.Delivery.AT_LEAST_ONCE:
        run.state, run.started_at, run.attempt = Run.State.RUNNING, now, 1
        run.owner_token = owner_token
    else:
        run.state, run.owner_token = Run.State.CLAIMED, owner_token
    return run


# --- both ------------------------------------------------------------------------


def _lock_schedules(schedule_ids: Collection[int | None], node_id: UUID) -> dict[int, Schedule]:
    """Lock the rows that nobody else holds, in key order; none when this node is not alive."""
    if not Node.objects.alive().filter(pk=node_id, state=Node.State.ACTIVE).exists():
        return {}
    rows = (
        Schedule.objects.select_for_update(skip_locked=_can_skip_locked())
        .filter(pk__in=[pk for pk in schedule_ids if pk is not None])
        .order_by("pk")
    )
    return {schedule.pk: schedule for schedule in rows}


def _can_skip_locked() -> bool:
    return connection.features.has_select_for_update_skip_locked


def _active_runs(schedule_ids: Collection[int]) -> dict[int, int]:
    rows = (
        Run.objects.active()
        .filter(schedule__in=list(schedule_ids))
        .order_by()
        .values_list("schedule_id")
        .annotate(first=models.Min("id"))
    )
    return dict(rows)


def _write_queued_claims(
    runs: Sequence[Run],
    schedules: Mapping[int, Schedule],
    owner_tokens: Mapping[int, str],
    node_id: UUID,
) -> list[ClaimedRun]:
    now = database_now()
    for run in runs:
        schedule = schedules[run.schedule_id or 0]
        schedule.fencing_token += 1
        run.schedule = schedule
        run.state = Run.State.CLAIMED
        run.fencing_token = schedule.fencing_token
        run.owner_token = owner_tokens[run.pk]
        run.node_id = node_id
        run.claimed_at = now
    if runs:
        Schedule.objects.bulk_update(
            [schedules[run.schedule_id or 0] for run in runs], ["fencing_token"]
        )
        Run.objects.bulk_update(
            runs, ["state", "fencing_token", "owner_token", "node_id", "claimed_at"]
        )
    return [_owned(run) for run in runs]
