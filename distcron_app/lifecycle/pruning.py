"""final → deleted: what is older than its retention, summed up by day in the same transaction.

Only what can never be claimed again goes: a run whose instant is before its schedule's
``next_run_at``, and never the newest instant of a schedule, from which planning goes on.
Any number of nodes may prune at once: each skips the rows that another one has locked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.db.models import Exists, OuterRef, Q

from distcron_app.conf import get_config
from distcron_app.instants import database_now
from distcron_app.models import (
    Attempt,
    ChainStart,
    Run,
    RunDay,
    RunOutput,
    RunQuerySet,
    Schedule,
)

__all__ = ["PRUNE_BATCH", "Limits", "Pruned", "count_prunable", "prune"]

PRUNE_BATCH = 1000
# Schedules whose history is looked at in one step.
_SCHEDULES = 50
_ENDED = (*Run.ENDED_STATES, *Run.BROKEN_STATES)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a person prunes: one schedule or all, and limits in place of the stored ones."""

    schedule_id: int | None = None
    keep_days: int | None = None
    keep_failed: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """How many runs one step deleted, and after which schedule id the next one goes on.

    ``after`` is None at the end of the walk over all schedules.
    """

    count: int
    after: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Retention:
    """What stays of one schedule's history; 0 is no limit."""

    days: int
    failed_days: int
    succeeded: int
    failed: int

    @property
    def by_states(self) -> tuple[tuple[tuple[str, ...], int, int], ...]:
        """Return (states, days, count) of the two kinds of ends."""
        return (
            (Run.ENDED_STATES, self.days, self.succeeded),
            (Run.BROKEN_STATES, self.failed_days, self.failed),
        )


def prune(after: int = 0, *, batch: int = PRUNE_BATCH, limits: Limits | None = None) -> Pruned:
    """Delete up to ``batch`` runs of the schedules behind the id ``after``, in one transaction.

    With each run go its output and its attempts; its day keeps the sum. Looks at a bounded
    number of schedules, so that it is cheap where nothing is to be deleted.
    """
    limits = limits or Limits()
    ids = _schedule_ids(after, limits)
    found: dict[int, datetime | None] = {}
    is_full = False
    for condition in _conditions(ids, limits):
        room = batch - len(found)
        rows = _unclaimable(Run.objects.filter(condition)).order_by()
        some = dict(rows.values_list("pk", "finished_at")[:room])
        found |= some
        is_full = len(some) == room
        if is_full:
            break
    count = _delete(found) if found else 0
    if is_full and count:
        return Pruned(count=count, after=after)
    return Pruned(count=count, after=ids[-1] if len(ids) == _SCHEDULES else None)


def count_prunable(limits: Limits | None = None) -> int:
    """Return how many runs pruning would delete now. Reads the history: slow where it is long."""
    limits = limits or Limits()
    total, after = 0, 0
    while ids := _schedule_ids(after, limits):
        conditions = list(_conditions(ids, limits))
        if conditions:
            # By key, since a run may be beyond both its age and its number.
            either = Q(*conditions, _connector=Q.OR)
            total += _unclaimable(Run.objects.filter(either)).order_by().count()
        after = ids[-1]
        if limits.schedule_id is not None:
            break
    return total


# --- what may go ------------------------------------------------------------------------------


def _schedule_ids(after: int, limits: Limits) -> list[int]:
    """Return the next ids of schedules that have runs, of deleted ones too, in order.

    One probe of an index for each: reading them together reads their whole history, and
    MariaDB does so even in a recursive query.
    """
    if limits.schedule_id is not None:
        return [limits.schedule_id]
    ids: list[int] = []
    while len(ids) < _SCHEDULES:
        behind = Run.objects.filter(schedule__gt=ids[-1] if ids else after)
        found = behind.order_by("schedule_id").values_list("schedule_id", flat=True)[:1]
        following = next(iter(found), None)
        if following is None:
            break
        ids.append(following)
    return ids


def _conditions(ids: Sequence[int], limits: Limits) -> Iterator[Q]:
    """Yield what is beyond the retention: by age for many schedules, by number for each."""
    now = database_now()
    for retention, of_schedules in _retentions(ids, limits).items():
        for states, days, count in retention.by_states:
            if days:
                limit = now - timedelta(days=days)
                yield Q(schedule__in=of_schedules, state__in=states, finished_at__lt=limit)
            if count:
                yield from _beyond(of_schedules, states, count)


def _beyond(ids: Iterable[int], states: tuple[str, ...], count: int) -> Iterator[Q]:
    for schedule_id in ids:
        runs = Run.objects.filter(schedule=schedule_id, state__in=states)
        last = runs.order_by("-id").values_list("pk", flat=True)[count : count + 1].first()
        if last is not None:
            yield Q(schedule=schedule_id, state__in=states, pk__lte=last)


def _retentions(ids: Sequence[int], limits: Limits) -> dict[_Retention, list[int]]:
    """Group the schedules by what stays of them; deleted ones follow the project's days."""
    rows = Schedule.objects.filter(pk__in=ids).order_by()
    stored: dict[int, tuple[int | None, ...]] = {
        pk: tuple(own)
        for pk, *own in rows.values_list("pk", "keep_days", "keep_succeeded", "keep_failed")
    }
    groups: dict[_Retention, list[int]] = {}
    for pk in ids:
        days, succeeded, failed = stored.get(pk, (None, 0, 0))
        retention = _retention(
            days=days if limits.keep_days is None else limits.keep_days,
            succeeded=succeeded,
            failed=failed if limits.keep_failed is None else limits.keep_failed,
        )
        groups.setdefault(retention, []).append(pk)
    return groups


def _retention(*, days: int | None, succeeded: int | None, failed: int | None) -> _Retention:
    config = get_config()
    days = config.keep_days if days is None else days
    failed_days = config.keep_failed_days
    return _Retention(
        days=days,
        # Never shorter than the others: bad ends are what somebody looks for later.
        failed_days=max(days, failed_days) if days and failed_days else 0,
        succeeded=config.keep_succeeded if succeeded is None else succeeded,
        failed=config.keep_failed if failed is None else failed,
    )


def _unclaimable(runs: RunQuerySet) -> RunQuerySet:
    """Leave out instants that might still be planned: from ``next_run_at`` on, and the newest.

    A stale planner fails on ``next_run_at`` alone, whatever was pruned. The newest instant
    stays since planning starts after it where a row was changed past the model.
    """
    schedule = Schedule.objects.filter(pk=OuterRef("schedule"))
    ahead = schedule.filter(next_run_at__lte=OuterRef("scheduled_at"))
    newer = Run.objects.filter(
        schedule=OuterRef("schedule"), scheduled_at__gt=OuterRef("scheduled_at")
    )
    is_over = Exists(newer.order_by()) & ~Exists(ahead.order_by())
    return runs.filter(Q(scheduled_at=None) | ~Exists(schedule.order_by()) | is_over)


# --- deleting ---------------------------------------------------------------------------------


def _delete(found: dict[int, datetime | None]) -> int:
    """Delete those of the runs that nobody has touched since, and add them to their days."""
    skip = connection.features.has_select_for_update_skip_locked
    with transaction.atomic():
        locked = (
            Run.objects.filter(pk__in=sorted(found), state__in=_ENDED)
            .select_for_update(skip_locked=skip)
            .order_by("pk")
            .values_list("pk", "schedule_id", "state", "started_at", "finished_at", named=True)
        )
        rows = {row.pk: row for row in locked if row.finished_at == found[row.pk]}
        # Asked again: an edit may have moved next_run_at back since the rows were found.
        kept = _unclaimable(Run.objects.filter(pk__in=list(rows))).order_by()
        pks = list(kept.values_list("pk", flat=True))
        _add_days(rows[pk] for pk in pks)
        # Without loading the rows first, as delete() would to look for what hangs on them.
        Attempt.objects.filter(run__in=pks)._raw_delete(connection.alias)
        RunOutput.objects.filter(run__in=pks)._raw_delete(connection.alias)
        ChainStart.objects.filter(run__in=pks)._raw_delete(connection.alias)
        Run.objects.filter(pk__in=pks)._raw_delete(connection.alias)
    return len(pks)


def _add_days(rows: Iterable[Any]) -> None:
    days: dict[tuple[int, date], RunDay] = {}
    for row in rows:
        key = (row.schedule_id, row.finished_at.date())
        day = days.setdefault(key, RunDay(schedule_id=key[0], day=key[1]))
        setattr(day, row.state, getattr(day, row.state) + 1)
        if row.started_at is not None:
            seconds = (row.finished_at - row.started_at).total_seconds()
            day.timed += 1
            day.total_seconds += seconds
            day.longest_seconds = max(day.longest_seconds, seconds)
    # In key order, so that two pruners wait for each other instead of both for ever.
    ordered = [days[key] for key in sorted(days)]
    for start in range(0, len(ordered), _DAYS_IN_STATEMENT):
        _upsert(ordered[start : start + _DAYS_IN_STATEMENT])


_DAYS_IN_STATEMENT = 200
_SUMS = (*_ENDED, "timed", "total_seconds")


def _upsert(days: Sequence[RunDay]) -> None:
    """Add to the rows of the days, in one statement: a read before would let two both insert."""
    columns = ("schedule_id", "day", *_SUMS, "longest_seconds")
    marks = ", ".join([f"({', '.join(['%s'] * len(columns))})"] * len(days))
    statement = (
        f"INSERT INTO distcron_runday ({', '.join(columns)}) VALUES {marks} "  # noqa: S608 - no input
        f"{_on_conflict(connection.vendor)}"
    )
    values = [
        day.day.isoformat() if column == "day" else getattr(day, column)
        for day in days
        for column in columns
    ]
    with connection.cursor() as cursor:
        cursor.execute(statement, values)


def _on_conflict(vendor: str) -> str:
    """Return the clause that adds to the row of a day that is there already."""
    if vendor == "mysql":
        head, new, larger = "ON DUPLICATE KEY UPDATE", "VALUES({})", "GREATEST"
    else:
        head, new = "ON CONFLICT (schedule_id, day) DO UPDATE SET", "excluded.{}"
        larger = "GREATEST" if vendor == "postgresql" else "MAX"
    old = "distcron_runday.{}".format
    sums = [f"{name} = {old(name)} + {new.format(name)}" for name in _SUMS]
    name = "longest_seconds"
    return f"{head} {', '.join(sums)}, {name} = {larger}({old(name)}, {new.format(name)})"
