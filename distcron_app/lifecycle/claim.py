"""∅ → claimed, running, skipped (timetable); ∅ → queued (by hand); queued → claimed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.core.serializers.json import DjangoJSONEncoder
from django.db import connection, transaction
from django.utils.translation import gettext as _

from distcron_app.context import ParentRun
from distcron_app.errors import ScheduleBusy
from distcron_app.instants import DatabaseNow, database_now
from distcron_app.lifecycle.backfills import active_of, in_turn
from distcron_app.lifecycle.chains import follow, parents_of, waits_for
from distcron_app.lifecycle.overlap import (
    REPLACE_CAUSE,
    Fate,
    OpenRuns,
    Scope,
    fate,
    in_scope,
    open_runs,
    replace,
)
from distcron_app.lifecycle.scopes import lock_scopes
from distcron_app.lifecycle.values import (
    Claimed,
    ClaimedRun,
    Decision,
    EndedAttempt,
    SkippedRun,
)
from distcron_app.models import Attempt, Backfill, ChainLink, Node, Run, Schedule, ended_attempt

__all__ = [
    "claim",
    "claim_queued",
    "one_of_each_scope",
    "queue_again",
    "queue_manual",
    "read_back",
]

# Rows per INSERT on the portable path; SQLite limits the variables of one statement.
_PORTABLE_CHUNK = 200


def claim(decisions: Sequence[Decision], node_id: UUID) -> Claimed:
    """Claim the occurrences of a batch of due schedules; return what this node now owns.

    One transaction: (1) lock the scopes, where there are concurrency keys; (2) lock the
    schedules that still stand where they were seen, if this node's lease is alive; (3) move
    each to its next instant and bump its fencing token; (4) where a run is active, decide
    ``skipped`` for overlap; (5) insert the rows. What another node holds or has moved is
    left out: it lost nothing, somebody else has it. Of each scope the first is decided and
    the others are left out, for the next call.

    Blocks for two round trips on PostgreSQL, for three with concurrency keys. Raise
    DatabaseError when the outcome is unknown; settle it with ``read_back``.
    """
    if not decisions:
        return Claimed()
    alone = one_of_each_scope(decisions)
    keys = {decision.concurrency_key for decision in alone if decision.concurrency_key}
    with transaction.atomic():
        locked = {"", *lock_scopes(keys)}
        ordered = sorted(
            (decision for decision in alone if decision.concurrency_key in locked),
            key=lambda decision: decision.schedule_id,
        )
        if not ordered:
            return Claimed()
        if connection.vendor == "postgresql":
            return _claim_postgres(ordered, node_id)
        return _claim_portable(ordered, node_id)


def one_of_each_scope(decisions: Iterable[Decision]) -> list[Decision]:
    """Return the decisions without those whose concurrency key one before them has."""
    seen: set[str] = set()
    kept: list[Decision] = []
    for decision in decisions:
        if decision.concurrency_key not in seen:
            kept.append(decision)
        if decision.concurrency_key:
            seen.add(decision.concurrency_key)
    return kept


def claim_queued(owner_tokens: Mapping[int, str], node_id: UUID) -> Claimed:
    """Claim queued runs, given as run id to fresh owner token; return what is now owned.

    A run whose schedule, or scope, has an active run stays queued, and a spread occurrence
    is skipped then, or where its schedule was paused meanwhile. One of a backfill waits for
    its turn by the rule of the backfill as well. The scope and the schedule's row are
    locked first, as in ``claim``, so that the two cannot miss each other.
    """
    if not owner_tokens:
        return Claimed()
    queued = Run.objects.filter(pk__in=owner_tokens, state="queued")
    found = list(queued.values_list("pk", "schedule_id", "concurrency_key", "backfill_id"))
    keys = {key for _pk, _schedule_id, key, _backfill in found if key}
    with transaction.atomic():
        free = {"", *lock_scopes(keys)}
        rows = {pk: schedule_id for pk, schedule_id, key, _backfill in found if key in free}
        schedules = _lock_schedules(set(rows.values()), node_id)
        if not schedules:
            return Claimed()
        opened = open_runs([Scope(pk or 0, key) for _id, pk, key, _in in found if key in free])
        backfills = _backfills(backfill for *_rest, backfill in found)
        own = active_of(backfills)
        locked = (
            Run.objects.select_for_update(skip_locked=_can_skip_locked())
            .filter(pk__in=rows, state="queued", schedule__in=schedules, due_at__lte=DatabaseNow())
            .order_by("id")
        )
        now = database_now()
        won: list[Run] = []
        decided: list[Run] = []
        ended: list[int] = []
        for run in locked:
            schedule = schedules[run.schedule_id or 0]
            beside = opened[_scope_of(run)]
            fated = fate(
                schedule, beside, has_begun=run.attempt > 0, was_queued=not run.is_held_back
            )
            if run.is_undecided and schedule.state == Schedule.State.PAUSED:
                _skip(run, Run.Reason.PAUSED, None, now)
                decided.append(run)
                continue
            if run.waits_in_backfill and not in_turn(
                backfills[run.backfill_id or 0], beside, own.get(run.backfill_id or 0, 0)
            ):
                continue
            if run.is_held_back and schedule.overlap == Schedule.Overlap.REPLACE:
                ended += replace({_scope_of(run): (fated, beside)}, told=_followed(schedules))
            if fated == "start":
                won.append(run)
                _count_in(opened, run)
                own[run.backfill_id or 0] = own.get(run.backfill_id or 0, 0) + 1
            elif run.is_held_back and fated == "queue":
                run.reason, run.details = Run.Reason.OVERLAP, {"blocked_by": beside.blocked_by}
                decided.append(run)
            elif run.is_held_back:
                _skip(run, Run.Reason.OVERLAP, _overlap_details(beside), now)
                decided.append(run)
        Run.objects.bulk_update(decided, ["state", "reason", "details", "finished_at"])
        skipped = [run for run in decided if run.state == Run.State.SKIPPED]
        followed = _followed(schedules)
        follow([*ended, *(run.pk for run in skipped if run.schedule_id in followed)])
        return Claimed(
            runs=tuple(_write_queued_claims(won, schedules, owner_tokens, node_id)),
            skipped=tuple(_skipped(run, schedules[run.schedule_id or 0]) for run in skipped),
        )


def _backfills(ids: Iterable[int | None]) -> dict[int, Backfill]:
    wanted = {pk for pk in ids if pk is not None}
    return Backfill.objects.in_bulk(list(wanted)) if wanted else {}


def _scope_of(run: Run) -> Scope:
    return Scope(run.schedule_id or 0, run.concurrency_key)


def _count_in(opened: dict[Scope, OpenRuns], run: Run) -> None:
    """Let a run that is claimed block the others of this batch that count it."""
    own = _scope_of(run)
    added = 0 if run.attempt else 1
    for scope, beside in opened.items():
        if own.counts_for(scope):
            opened[scope] = OpenRuns(
                active=beside.active + added,
                executing=beside.executing + 1,
                backfilling=beside.backfilling + (added if run.backfill_id else 0),
                blocked_by=beside.blocked_by or run.pk,
                waiting=beside.waiting,
            )


def queue_manual(
    schedule: Schedule,
    *,
    by: str,
    arguments: Mapping[str, Any] | None = None,
    nominal_at: datetime | None = None,
    behind: bool = False,
) -> Run:
    """Insert a queued run that starts as soon as a node has a free slot.

    With ``nominal_at``, aware, it stands for that instant; the timetable's own run of it is
    not touched. Raise ScheduleBusy when a run of the schedule, or of the scope of these
    arguments, is queued or active; what waits in a backfill does not count. With ``behind``
    it waits for that one instead, whatever the queue holds already.
    """
    key = schedule.scope(arguments)
    with transaction.atomic():
        lock_scopes([key], waits=True)
        limit = Schedule.objects.select_for_update().get(pk=schedule.pk).active_limit
        opened = list(in_scope(Scope(schedule.pk, key)).in_the_way().order_by("id"))
        if opened and not behind:
            raise _busy(schedule, opened[0])
        waits = limit is not None and len(opened) >= limit
        return Run.objects.create(
            schedule=schedule,
            schedule_name=schedule.name,
            job=schedule.job,
            arguments=dict(schedule.arguments if arguments is None else arguments),
            delivery=schedule.delivery,
            queue=schedule.queue,
            priority=schedule.priority,
            concurrency_key=key,
            trigger=Run.Trigger.MANUAL,
            triggered_by=by,
            nominal_at=nominal_at,
            due_at=database_now(),
            state=Run.State.QUEUED,
            reason=Run.Reason.OVERLAP if waits else Run.Reason.NONE,
            details={"blocked_by": opened[0].pk} if waits else None,
        )


def _busy(schedule: Schedule, blocking: Run | None) -> ScheduleBusy:
    if blocking is None:
        return ScheduleBusy(schedule.key, 0)
    other = "" if blocking.schedule_id == schedule.pk else blocking.schedule_name
    return ScheduleBusy(schedule.key, blocking.pk, other)


def queue_again(run_id: int) -> Run | None:
    """Queue a run again that has failed, was cancelled or is lost; for a person.

    It is the same run with one more attempt; the policy adds none to it. Return None where
    it is in another state by now, or its schedule is gone. Raise ScheduleBusy when the
    schedule has as many active runs as it may.
    """
    keys = [*Run.objects.filter(pk=run_id).values_list("concurrency_key", flat=True)]
    with transaction.atomic():
        lock_scopes(keys, waits=True)
        run = Run.objects.select_for_update().filter(pk=run_id, state__in=Run.AGAIN_STATES).first()
        schedule = None
        if run is not None:
            schedule = Schedule.objects.select_for_update().filter(pk=run.schedule_id or 0).first()
        if run is None or schedule is None:
            return None
        scope = _scope_of(run)
        beside = open_runs([scope])[scope]
        if fate(schedule, beside, was_queued=True) != "start":
            raise _busy(schedule, Run.objects.filter(pk=beside.blocked_by or 0).first())
        now = database_now()
        if run.attempt and not Attempt.objects.filter(run=run, number=run.attempt).exists():
            ended_attempt(run, run.reason, run.finished_at or now, run.error).save()
        run.state, run.reason, run.due_at = Run.State.QUEUED, Run.Reason.AGAIN, now
        run.owner_token, run.node_id, run.finished_at = "", None, None
        run.first_started_at = None
        run.cancel_requested_at, run.cancel_cause, run.late = None, "", False
        run.error = ""
        run.progress_percent, run.progress_message, run.details = None, "", None
        run.save(update_fields=_AGAIN_FIELDS)
        return run


# What queue_again changes of a run.
_AGAIN_FIELDS = (
    "state",
    "reason",
    "due_at",
    "owner_token",
    "node",
    "first_started_at",
    "finished_at",
    "cancel_requested_at",
    "cancel_cause",
    "late",
    "error",
    "progress_percent",
    "progress_message",
    "details",
)


def read_back(owner_tokens: Collection[str], node_id: UUID) -> list[ClaimedRun]:
    """Return the runs that were committed under these owner tokens.

    For a link that broke around COMMIT: what is absent was not committed, and is dropped.
    """
    rows = Run.objects.filter(
        owner_token__in=list(owner_tokens), node_id=node_id, state__in=Run.ACTIVE_STATES
    )
    return _all_owned(rows.select_related("schedule"))


def _all_owned(runs: Iterable[Run]) -> list[ClaimedRun]:
    runs = list(runs)
    parents = parents_of(runs)
    earlier = _newest_attempts([run.pk for run in runs if _has_ended_attempts(run)])
    return [_owned(run, parents.get(run.pk), earlier.get(run.pk)) for run in runs]


def _has_ended_attempts(run: Run) -> bool:
    return run.attempt > (1 if run.state == Run.State.RUNNING else 0)


def _newest_attempts(run_ids: Sequence[int]) -> dict[int, EndedAttempt]:
    """Return the newest ended attempt of each run, by one query; none for no runs."""
    if not run_ids:
        return {}
    rows = Attempt.objects.filter(run__in=run_ids).select_related("node").order_by("fencing_token")
    return {
        row.run_id: EndedAttempt(
            number=row.number,
            node=row.node.name if row.node else "",
            reason=row.reason,
            progress_percent=row.progress_percent,
            progress_message=row.progress_message,
        )
        for row in rows
    }


def _owned(run: Run, parent: ParentRun | None, earlier: EndedAttempt | None) -> ClaimedRun:
    schedule = run.schedule or Schedule()
    instant = run.due_at if parent is None else parent.scheduled_at
    return ClaimedRun(
        run_id=run.pk,
        schedule_id=run.schedule_id or 0,
        schedule_key=schedule.key,
        schedule_name=run.schedule_name,
        job=run.job,
        arguments=run.arguments,
        delivery=run.delivery,
        scheduled_at=run.instant or instant,
        due_at=run.due_at,
        state=run.state,
        attempt=run.attempt,
        recoveries=run.recoveries,
        max_attempts=schedule.max_attempts,
        fencing_token=run.fencing_token,
        owner_token=run.owner_token,
        checkpoint=run.checkpoint,
        earlier=earlier,
        first_started_at=run.first_started_at if run.attempt else None,
        parent=parent,
        priority=run.priority,
        **{name: getattr(schedule, name) for name in _LIMITS},
    )


# Columns of the schedule that go with a claim, in the order of _CLAIM_SQL.
_LIMITS = (
    "isolation",
    "run_timeout_seconds",
    "total_timeout_seconds",
    "kill_grace_seconds",
    "memory_limit_mb",
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
WITH scopes AS (
  SELECT * FROM unnest(%(ids)s::bigint[], %(scopes)s::text[]) AS s(id, key)
), beside AS MATERIALIZED (
  -- As overlap.open_runs(): which runs count for each schedule. Without keys the second
  -- half finds nothing, in an index of the runs that have one.
  SELECT s.id AS schedule_id, r.id, r.state, r.attempt, r.reason, r."trigger", r.backfill_id
  FROM distcron_run r JOIN scopes s ON s.id = r.schedule_id
  WHERE r.schedule_id = ANY(%(ids)s) AND r.state IN ('queued', 'claimed', 'running')
    AND (s.key = '' OR r.concurrency_key IN ('', s.key))
  UNION ALL
  SELECT s.id, r.id, r.state, r.attempt, r.reason, r."trigger", r.backfill_id
  FROM distcron_run r JOIN scopes s ON s.key = r.concurrency_key
  WHERE r.concurrency_key = ANY(%(keys)s) AND r.concurrency_key <> ''
    AND r.state IN ('queued', 'claimed', 'running') AND r.schedule_id IS DISTINCT FROM s.id
), opened AS (
  SELECT r.schedule_id,
         count(*) FILTER (WHERE r.state <> 'queued' OR r.attempt > 0) AS active,
         count(*) FILTER (WHERE r.backfill_id IS NOT NULL
                                AND (r.state <> 'queued' OR r.attempt > 0)) AS backfilling,
         -- Where only the queue is in the way, its first.
         coalesce(min(r.id) FILTER (WHERE r.state <> 'queued' OR r.attempt > 0),
                  min(r.id) FILTER (WHERE w.waits)) AS blocked_by,
         count(*) FILTER (WHERE w.waits) AS waiting
  FROM beside r
  -- What a person queued takes no place in the schedule's queue.
  CROSS JOIN LATERAL (SELECT r.state = 'queued' AND r.attempt = 0 AND r.reason = 'overlap'
                             AND r."trigger" IN ('timetable', 'chain') AS waits) w
  GROUP BY r.schedule_id
), fates AS (
  -- As overlap.fate().
  SELECT s.id, o.blocked_by, coalesce(o.waiting, 0) AS waiting, coalesce(o.active, 0) AS active,
         CASE WHEN s.max_active IS NULL AND s.overlap = 'allow' THEN 'start'
              WHEN coalesce(o.active, 0) < coalesce(s.max_active, 1)
                   AND (coalesce(o.waiting, 0) = 0 OR s.overlap NOT IN ('queue_one', 'queue_all'))
              THEN 'start'
              WHEN s.overlap = 'replace' THEN 'queue'
              WHEN s.overlap = 'queue_one' AND coalesce(o.waiting, 0) < 1 THEN 'queue'
              WHEN s.overlap = 'queue_all' AND coalesce(o.waiting, 0) < s.max_queued THEN 'queue'
              WHEN o.active - o.backfilling < coalesce(s.max_active, 1) AND o.waiting < 1
              THEN 'queue'
              ELSE 'skip' END AS fate
  FROM distcron_schedule s LEFT JOIN opened o ON o.schedule_id = s.id
  WHERE s.id = ANY(%(ids)s)
), p AS (
  SELECT p.id, s.runs_planned + p.counts AS runs_planned,
         CASE WHEN s.runs_planned + p.counts >= s.max_runs THEN NULL
              ELSE p.next_run_at END AS next_run_at,
         p.runs AND NOT p.spread AND s.overlap = 'replace' AS replaces,
         p.fate = 'queue' AS asks
  FROM (
    SELECT p.id, p.next_run_at, p.runs, p.spread, f.fate,
           -- Nothing is decided where this is false.
           f.active > 0 OR NOT p.only_beside AS decided,
           p.queued + CASE WHEN p.runs AND (p.spread OR f.fate <> 'skip') THEN 1 ELSE 0 END
             AS counts
    FROM unnest(%(ids)s::bigint[], %(nexts)s::timestamptz[], %(runs)s::bool[],
                %(queued)s::int[], %(spread)s::bool[], %(only_beside)s::bool[])
         AS p(id, next_run_at, runs, queued, spread, only_beside)
    JOIN fates f ON f.id = p.id
  ) p JOIN distcron_schedule s ON s.id = p.id
  WHERE p.decided
), replaced AS (
  -- As overlap.replace().
  UPDATE distcron_run r
  SET state = 'skipped', reason = 'overlap', finished_at = statement_timestamp(),
      details = jsonb_build_object('blocked_by', CASE WHEN f.active > 0 THEN f.blocked_by END,
                                   'replaced', true)
  FROM p JOIN fates f ON f.id = p.id JOIN beside b ON b.schedule_id = p.id
  WHERE p.replaces AND r.id = b.id AND r.state = 'queued' AND r.attempt = 0
    AND (r.reason = 'overlap' AND r."trigger" IN ('timetable', 'chain')
         OR r.reason = '' AND r."trigger" = 'chain')
  RETURNING r.id, r.schedule_id
), asked AS (
  UPDATE distcron_run r
  SET cancel_requested_at = statement_timestamp(), cancel_cause = %(replace_cause)s
  FROM p JOIN beside b ON b.schedule_id = p.id
  WHERE p.replaces AND p.asks AND r.id = b.id
    AND r.state IN ('claimed', 'running') AND r.cancel_requested_at IS NULL
    AND r.backfill_id IS NULL
), moved AS (
  UPDATE distcron_schedule s
  SET next_run_at = p.next_run_at,
      fencing_token = s.fencing_token + 1,
      runs_planned = p.runs_planned,
      state = CASE WHEN p.next_run_at IS NULL THEN 'exhausted' ELSE s.state END,
      state_reason = CASE WHEN p.next_run_at IS NULL THEN %(exhausted)s ELSE s.state_reason END
  FROM p WHERE s.id = p.id
  RETURNING s.id, s.key, s.name, s.job, s.arguments, s.delivery, s.fencing_token,
            s.max_attempts, s.queue, s.priority, s.isolation, s.run_timeout_seconds,
            s.total_timeout_seconds, s.kill_grace_seconds, s.memory_limit_mb
), wanted AS (
  SELECT w.*, m.*, f.blocked_by, f.waiting, f.fate,
         w.due_at > greatest(w.scheduled_at, statement_timestamp()) AS spread,
         CASE WHEN w.reason = 'catch_up' THEN 'queued'
              WHEN w.reason <> '' THEN 'skipped'
              WHEN w.due_at > greatest(w.scheduled_at, statement_timestamp()) THEN 'queued'
              WHEN f.fate = 'skip' THEN 'skipped'
              WHEN f.fate = 'queue' THEN 'queued'
              WHEN m.delivery = 'at_least_once' THEN 'running'
              ELSE 'claimed' END AS new_state
  FROM unnest(%(w_ids)s::bigint[], %(w_at)s::timestamptz[], %(w_due)s::timestamptz[],
              %(w_reason)s::text[], %(w_details)s::text[], %(w_token)s::text[],
              %(w_key)s::text[])
       AS w(schedule_id, scheduled_at, due_at, reason, details, owner_token, concurrency_key)
  JOIN moved m ON m.id = w.schedule_id
  JOIN fates f ON f.id = w.schedule_id
), inserted AS (
  INSERT INTO distcron_run (
    schedule_id, schedule_name, job, arguments, delivery, "trigger", triggered_by,
    scheduled_at, due_at, state, reason, details, attempt, recoveries, fencing_token,
    owner_token, node_id, claimed_at, started_at, first_started_at, finished_at, late,
    progress_message,
    error, cancel_cause, queue, priority, concurrency_key)
  SELECT schedule_id, name, job, arguments, delivery, 'timetable', '',
         scheduled_at, due_at, new_state,
         CASE WHEN reason <> '' THEN reason
              WHEN fate <> 'start' AND NOT spread THEN 'overlap' ELSE '' END,
         CASE WHEN reason <> '' THEN details::jsonb
              WHEN fate = 'skip' AND NOT spread AND waiting > 0
              THEN jsonb_build_object('blocked_by', blocked_by, 'waiting', waiting)
              WHEN fate <> 'start' AND NOT spread
              THEN jsonb_build_object('blocked_by', blocked_by) END,
         CASE WHEN new_state = 'running' THEN 1 ELSE 0 END, 0, fencing_token,
         CASE WHEN new_state IN ('claimed', 'running') THEN owner_token ELSE '' END,
         CASE WHEN new_state <> 'queued' THEN %(node)s::uuid END,
         CASE WHEN new_state <> 'queued' THEN statement_timestamp() END,
         CASE WHEN new_state = 'running' THEN statement_timestamp() END,
         CASE WHEN new_state = 'running' THEN statement_timestamp() END,
         CASE WHEN new_state = 'skipped' THEN statement_timestamp() END,
         false, '', '', '', queue, priority, concurrency_key
  FROM wanted
  ON CONFLICT (schedule_id, scheduled_at) DO NOTHING
  RETURNING id, schedule_id, state, attempt, fencing_token, owner_token,
            EXTRACT(EPOCH FROM scheduled_at), EXTRACT(EPOCH FROM due_at), reason,
            details::text
)
SELECT i.*, m.key, m.name, m.job, m.arguments::text, m.delivery, m.max_attempts, m.priority,
       m.isolation, m.run_timeout_seconds, m.total_timeout_seconds, m.kill_grace_seconds,
       m.memory_limit_mb,
       -- The run whose end other schedules follow: this one, or one that it replaces.
       CASE WHEN gone.id IS NOT NULL THEN gone.id
            WHEN i.state = 'skipped' AND EXISTS (
              SELECT 1 FROM distcron_chainlink l
              WHERE l.schedule_id = i.schedule_id AND l.event = 'skipped') THEN i.id END
FROM (inserted i JOIN moved m ON m.id = i.schedule_id AND i.state <> 'queued')
FULL JOIN (SELECT r.id FROM replaced r JOIN distcron_chainlink l
           ON l.schedule_id = r.schedule_id AND l.event = 'skipped') gone ON false
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
        found = cursor.fetchall()
    rows = [_from_row(row[:-1]) for row in found if row[0] is not None]
    follow({row[-1] for row in found if row[-1] is not None})
    return Claimed(
        runs=tuple(row for row in rows if isinstance(row, ClaimedRun)),
        skipped=tuple(row for row in rows if isinstance(row, SkippedRun)),
    )


def _claim_parameters(decisions: Sequence[Decision], node_id: UUID) -> dict[str, Any]:
    rows = [row for decision in decisions for row in _wanted_rows(decision)]
    return {
        "ids": [decision.schedule_id for decision in decisions],
        "scopes": [decision.concurrency_key for decision in decisions],
        "keys": [each.concurrency_key for each in decisions if each.concurrency_key],
        "nexts": [decision.next_run_at for decision in decisions],
        "runs": [decision.run_at is not None for decision in decisions],
        "queued": [len(decision.queue) for decision in decisions],
        "spread": [decision.is_held_back for decision in decisions],
        "only_beside": [decision.only_beside for decision in decisions],
        "exhausted": _exhausted_reason(),
        "replace_cause": REPLACE_CAUSE,
        "w_ids": [row.schedule_id for row in rows],
        "w_at": [row.scheduled_at for row in rows],
        "w_due": [row.due_at for row in rows],
        "w_reason": [row.reason for row in rows],
        "w_details": [None if row.details is None else _json(row.details) for row in rows],
        "w_token": [row.owner_token for row in rows],
        "w_key": [row.concurrency_key for row in rows],
        "node": node_id,
    }


class _Wanted(NamedTuple):
    """A row to insert; ``reason`` is empty for one that is to run now, or later where spread."""

    schedule_id: int
    scheduled_at: datetime
    due_at: datetime
    reason: str = ""
    details: dict[str, Any] | None = None
    owner_token: str = ""
    concurrency_key: str = ""


def _wanted_rows(decision: Decision) -> list[_Wanted]:
    rows = [
        _Wanted(
            decision.schedule_id, skip.scheduled_at, skip.scheduled_at, skip.reason, skip.details
        )
        for skip in decision.skips
    ]
    rows += [
        _Wanted(decision.schedule_id, scheduled_at, due_at, Run.Reason.CATCH_UP)
        for scheduled_at, due_at in decision.queue
    ]
    if decision.run_at is not None:
        due_at = decision.due_at or decision.run_at
        rows.append(
            _Wanted(decision.schedule_id, decision.run_at, due_at, owner_token=decision.owner_token)
        )
    return [row._replace(concurrency_key=decision.concurrency_key) for row in rows]


def _from_row(row: tuple[Any, ...]) -> ClaimedRun | SkippedRun:
    run_id, schedule_id, state, attempt, fencing, owner, planned, due, reason, details = row[:10]
    key, name, job, arguments, delivery, max_attempts, priority, *limits = row[10:]
    scheduled_at = datetime.fromtimestamp(float(planned), UTC)
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
        due_at=datetime.fromtimestamp(float(due), UTC),
        state=state,
        attempt=attempt,
        recoveries=0,
        max_attempts=max_attempts,
        fencing_token=fencing,
        owner_token=owner,
        priority=priority,
        **dict(zip(_LIMITS, limits, strict=True)),
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
    scopes = {each.schedule_id: Scope(each.schedule_id, each.concurrency_key) for each in kept}
    opened = open_runs(list(scopes.values()))
    runs = {pk: opened[scope] for pk, scope in scopes.items()}
    kept = [each for each in kept if runs[each.schedule_id].active or not each.only_beside]
    fates = {pk: fate(schedules[pk], runs[pk]) for pk in (each.schedule_id for each in kept)}
    for decision in kept:
        _move(schedules[decision.schedule_id], decision, fates[decision.schedule_id])
    moved = [schedules[decision.schedule_id] for decision in kept]
    Schedule.objects.write_claims(moved, _PORTABLE_CHUNK)
    followed = _followed(schedules)
    replaced = replace(
        {
            scopes[pk]: (fates[pk], runs[pk])
            for pk in (each.schedule_id for each in kept if each.run_at and not each.is_held_back)
            if schedules[pk].overlap == Schedule.Overlap.REPLACE
        },
        told=followed,
    )
    claimed, skipped = _insert_portable(kept, schedules, fates, runs, node_id)
    follow([*replaced, *(run.pk for run in skipped if run.schedule_id in followed)])
    return claimed


def _move(schedule: Schedule, decision: Decision, fated: Fate) -> None:
    """Set where the schedule stands after the decision, as _CLAIM_SQL does."""
    is_counted = decision.is_held_back or fated != "skip"
    schedule.runs_planned += (decision.run_at is not None and is_counted) + len(decision.queue)
    schedule.fencing_token += 1
    is_last = schedule.max_runs is not None and schedule.runs_planned >= schedule.max_runs
    schedule.next_run_at = None if is_last else decision.next_run_at
    if schedule.next_run_at is None:
        schedule.state = Schedule.State.EXHAUSTED
        schedule.state_reason = _exhausted_reason()


def _insert_portable(
    decisions: Sequence[Decision],
    schedules: Mapping[int, Schedule],
    fates: Mapping[int, Fate],
    runs: Mapping[int, OpenRuns],
    node_id: UUID,
) -> tuple[Claimed, list[Run]]:
    now = database_now()
    rows = [
        _new_run(
            schedules[wanted.schedule_id],
            wanted,
            (fates[wanted.schedule_id], runs[wanted.schedule_id]),
            node_id,
            now,
        )
        for decision in decisions
        for wanted in _wanted_rows(decision)
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
    tokens = [row.owner_token for row in free if row.owner_token]
    claimed = Claimed(
        runs=tuple(read_back(tokens, node_id)) if tokens else (),
        skipped=tuple(_skipped(row, schedules[row.schedule_id or 0]) for row in skipped),
    )
    return claimed, skipped


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
    wanted: _Wanted,
    overlapped: tuple[Fate, OpenRuns],
    node_id: UUID,
    now: datetime,
) -> Run:
    fated, beside = overlapped
    run = Run(
        schedule=schedule,
        schedule_name=schedule.name,
        job=schedule.job,
        arguments=schedule.arguments,
        delivery=schedule.delivery,
        queue=schedule.queue,
        priority=schedule.priority,
        concurrency_key=wanted.concurrency_key,
        scheduled_at=wanted.scheduled_at,
        due_at=wanted.due_at,
        fencing_token=schedule.fencing_token,
        node_id=node_id,
        claimed_at=now,
    )
    if wanted.reason == Run.Reason.CATCH_UP:
        run.state, run.node_id, run.claimed_at = Run.State.QUEUED, None, None
        run.reason = Run.Reason.CATCH_UP
    elif wanted.reason:
        _skip(run, wanted.reason, wanted.details, now)
    elif wanted.due_at > max(wanted.scheduled_at, now):
        run.state, run.node_id, run.claimed_at = Run.State.QUEUED, None, None
    elif fated == "queue":
        run.state, run.node_id, run.claimed_at = Run.State.QUEUED, None, None
        run.reason, run.details = Run.Reason.OVERLAP, {"blocked_by": beside.blocked_by}
    elif fated == "skip":
        _skip(run, Run.Reason.OVERLAP, _overlap_details(beside), now)
    elif schedule.delivery == Schedule.Delivery.AT_LEAST_ONCE:
        run.state, run.attempt = Run.State.RUNNING, 1
        run.started_at = run.first_started_at = now
        run.owner_token = wanted.owner_token
    else:
        run.state, run.owner_token = Run.State.CLAIMED, wanted.owner_token
    return run


def _overlap_details(beside: OpenRuns) -> dict[str, Any]:
    details: dict[str, Any] = {"blocked_by": beside.blocked_by}
    return details | ({"waiting": beside.waiting} if beside.waiting else {})


def _skip(run: Run, reason: str, details: dict[str, Any] | None, now: datetime) -> None:
    run.state, run.reason, run.details = Run.State.SKIPPED, reason, details
    run.finished_at = now


# --- both ------------------------------------------------------------------------


def _lock_schedules(schedule_ids: Collection[int | None], node_id: UUID) -> dict[int, Schedule]:
    """Lock the rows that nobody else holds, in key order; none when this node is not alive."""
    if not Node.objects.alive().filter(pk=node_id, state=Node.State.ACTIVE).exists():
        return {}
    rows = (
        Schedule.objects.select_for_update(skip_locked=_can_skip_locked())
        .filter(pk__in=[pk for pk in schedule_ids if pk is not None])
        .annotate(is_followed=waits_for("pk", ChainLink.Event.SKIPPED))
        .order_by("pk")
    )
    return {schedule.pk: schedule for schedule in rows}


def _followed(schedules: Mapping[int, Any]) -> set[int]:
    """Return the locked schedules of which another one waits for a skipped run."""
    return {pk for pk, schedule in schedules.items() if schedule.is_followed}


def _can_skip_locked() -> bool:
    return connection.features.has_select_for_update_skip_locked


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
    return _all_owned(runs)
