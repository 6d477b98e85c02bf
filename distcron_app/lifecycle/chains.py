"""∅ → queued, skipped: the runs that the end of another schedule's run starts.

``follow`` is called in the transaction that ends the runs, so that an end and what it
starts are committed together or not at all. Where no link waits for the end, the callers on
the hot path know it from their own statement and do not call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.db import connection
from django.db.models import Count, Exists, F, Min, OuterRef, Q

from distcron_app.context import ParentRun
from distcron_app.instants import database_now
from distcron_app.lifecycle.overlap import Fate, OpenRuns, Scope, fate, in_scope, replace
from distcron_app.models import ChainLink, ChainStart, Run, Schedule

__all__ = ["MAX_CHAIN_DEPTH", "event_of", "follow", "parents_of", "waits_for"]

# People cannot save a cycle, but rows written past the model may hold one. No chain that
# somebody wants is as long as this.
MAX_CHAIN_DEPTH = 50
# A person who paused a schedule wants nothing of it, and a chain that is cut stays cut.
_SILENT = (Run.Reason.PAUSED, Run.Reason.CHAIN_DEPTH)
_CHUNK = 200

_EVENTS = {
    Run.State.SUCCEEDED: ChainLink.Event.SUCCEEDED,
    Run.State.FAILED: ChainLink.Event.FAILED,
    Run.State.LOST: ChainLink.Event.FAILED,
    Run.State.SKIPPED: ChainLink.Event.SKIPPED,
}


def event_of(run: Run) -> str | None:
    """Return the event that the end of a run is for links; None where it is none."""
    if run.state == Run.State.SKIPPED and run.reason in _SILENT:
        return None
    return _EVENTS.get(Run.State(run.state))


def waits_for(schedule: str, *events: str) -> Exists:
    """Return whether a link waits for one of these events of ``schedule``, a column's name."""
    links = ChainLink.objects.filter(schedule=OuterRef(schedule))
    return Exists((links.filter(event__in=events) if events else links).order_by())


def follow(run_ids: Collection[int]) -> None:
    """Queue what the links of these runs start; each end starts a follower once.

    The caller has ended the runs and holds their rows. Costs one read where no link waits,
    else a fixed number of statements for each step of a chain of skipped runs.
    """
    while run_ids:
        run_ids = _follow(run_ids)


def parents_of(runs: Collection[Run]) -> dict[int, ParentRun]:
    """Return what started those of the runs that another schedule started, by one read at most."""
    wanted = [run.pk for run in runs if run.trigger == Run.Trigger.CHAIN]
    starts = ChainStart.objects.filter(pk__in=wanted) if wanted else ()
    return {
        start.run_id: ParentRun(
            run_id=start.parent_id,
            attempt=start.attempt,
            schedule_key=start.parent_key,
            state=start.state,
            reason=start.reason,
            scheduled_at=start.scheduled_at,
            result=start.result,
        )
        for start in starts
    }


def _follow(run_ids: Collection[int]) -> list[int]:
    """Take one step; return the followers that were skipped, which is an end as well."""
    ended = list(
        Run.objects.filter(waits_for("schedule"), pk__in=list(run_ids))
        .select_related("schedule", "chain_start")
        .order_by("pk")
    )
    if not ended:
        return []
    wanted = _wanted(ended)
    if not wanted:
        return []
    keys = {each.follower_id for each in wanted}
    # Two ends that start one follower decide about its overlap one after the other. Its own
    # row is not locked: a claim holds that and waits for runs that are held here.
    list(
        ChainLink.objects.select_for_update()
        .filter(follower__in=keys)
        .order_by("pk")
        .values_list("pk", flat=True)
    )
    done = set(
        ChainStart.objects.filter(parent__in=[run.pk for run in ended]).values_list(
            "parent_id", "attempt", "schedule_id"
        )
    )
    wanted = [each for each in wanted if each.key not in done]
    followers = Schedule.objects.in_bulk(keys)
    step = _Step(followers, _ahead(followers.values()), database_now())
    for each in wanted:
        step.add(each)
    skipped = replace(step.replaced, told={scope.schedule_id for scope in step.replaced})
    _insert(step.rows)
    ChainStart.objects.bulk_create(
        [each.start(run) for each, run in zip(step.taken, step.rows, strict=True)],
        batch_size=_CHUNK,
    )
    return [*skipped, *(run.pk for run in step.rows if run.state == Run.State.SKIPPED)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """One follower of one run that has ended."""

    parent: Run
    follower_id: int

    @property
    def key(self) -> tuple[int, int, int]:
        return self.parent.pk, self.parent.attempt, self.follower_id

    @property
    def depth(self) -> int:
        led_here: ChainStart | None = getattr(self.parent, "chain_start", None)
        return 1 if led_here is None else led_here.depth + 1

    @property
    def scheduled_at(self) -> datetime:
        """Return the instant of the first run of the chain."""
        led_here: ChainStart | None = getattr(self.parent, "chain_start", None)
        own: datetime = self.parent.scheduled_at or self.parent.due_at
        return own if led_here is None else led_here.scheduled_at

    def start(self, run: Run) -> ChainStart:
        parent = self.parent
        return ChainStart(
            run_id=run.pk,
            parent_id=parent.pk,
            attempt=parent.attempt,
            schedule_id=self.follower_id,
            parent_key=parent.schedule.key if parent.schedule else "",
            state=parent.state,
            reason=parent.reason,
            scheduled_at=self.scheduled_at,
            result=parent.result if parent.state == Run.State.SUCCEEDED else None,
            depth=self.depth,
        )


class _Ahead(NamedTuple):
    """What a new run of a follower would come behind, and the first that is active of it."""

    schedule_id: int
    runs: OpenRuns
    active_id: int | None


class _Step:
    """The runs that are to be inserted, each decided in the sight of those before it."""

    def __init__(
        self, followers: Mapping[int, Schedule], ahead: Sequence[_Ahead], now: datetime
    ) -> None:
        self._followers = followers
        self._ahead = {each.schedule_id: each.runs for each in ahead}
        self._active = {each.schedule_id: each.active_id for each in ahead}
        self._now = now
        self.taken: list[_Wanted] = []
        self.rows: list[Run] = []
        self.replaced: dict[Scope, tuple[Fate, OpenRuns]] = {}

    def add(self, wanted: _Wanted) -> None:
        schedule = self._followers.get(wanted.follower_id)
        if schedule is None:
            return
        run = _new_run(schedule, wanted.parent, self._now)
        if schedule.state == Schedule.State.PAUSED:
            _skip(run, Run.Reason.PAUSED)
        elif schedule.state == Schedule.State.INVALID:
            _skip(run, Run.Reason.INVALID)
        elif wanted.depth > MAX_CHAIN_DEPTH:
            _skip(run, Run.Reason.CHAIN_DEPTH)
        else:
            self._queue(run, schedule)
        self.taken.append(wanted)
        self.rows.append(run)

    def _queue(self, run: Run, schedule: Schedule) -> None:
        beside = self._ahead.get(schedule.pk, OpenRuns())
        fated = fate(schedule, beside)
        details: dict[str, Any] = {"blocked_by": beside.blocked_by}
        if fated == "skip":
            waiting = {"waiting": beside.waiting} if beside.waiting else {}
            _skip(run, Run.Reason.OVERLAP, details | waiting)
            return
        if fated == "queue":
            run.reason, run.details = Run.Reason.OVERLAP, details
            if schedule.overlap == Schedule.Overlap.REPLACE:
                self._replace(_scope_of(schedule), beside)
        self._ahead[schedule.pk] = dataclasses.replace(
            beside,
            active=beside.active + (fated == "start"),
            waiting=beside.waiting + (fated == "queue"),
        )

    def _replace(self, scope: Scope, beside: OpenRuns) -> None:
        active = self._active.get(scope.schedule_id)
        in_the_way = dataclasses.replace(beside, blocked_by=active)
        self.replaced.setdefault(scope, ("queue", in_the_way))
        for row in self.rows:
            if row.schedule_id == scope.schedule_id and row.state == Run.State.QUEUED:
                _skip(row, Run.Reason.OVERLAP, {"blocked_by": beside.blocked_by, "replaced": True})


def _wanted(ended: Sequence[Run]) -> list[_Wanted]:
    links: dict[tuple[int, str], list[int]] = {}
    rows = ChainLink.objects.filter(schedule__in={run.schedule_id for run in ended})
    for link in rows.order_by("pk"):
        links.setdefault((link.schedule_id, link.event), []).append(link.follower_id)
    return [
        _Wanted(parent=run, follower_id=follower_id)
        for run in ended
        if (event := event_of(run)) is not None
        for follower_id in links.get((run.schedule_id or 0, event), ())
    ]


def _scope_of(schedule: Schedule) -> Scope:
    return Scope(schedule.pk, schedule.scope())


def _ahead(followers: Iterable[Schedule]) -> list[_Ahead]:
    """Return the open runs of the followers, by one read, and one for each concurrency key.

    What is queued and will start as soon as a node has a slot counts as active: which of two
    ends came first must not depend on how quickly a node claims. The claim decides again,
    under the lock of the scope.
    """
    waits = Q(state=Run.State.QUEUED, attempt=0, reason=Run.Reason.OVERLAP)
    is_held_back = Q(
        state=Run.State.QUEUED,
        attempt=0,
        reason=Run.Reason.NONE,
        scheduled_at__isnull=False,
        due_at__gt=F("scheduled_at"),
    )
    in_queue = waits & ~Q(trigger=Run.Trigger.MANUAL)
    is_active = ~Q(state=Run.State.QUEUED) | Q(attempt__gt=0)
    counted = {
        "ahead": Count("id", filter=~waits & ~is_held_back),
        "first": Min("id", filter=~waits & ~is_held_back),
        "backfilling": Count("id", filter=is_active & Q(backfill__isnull=False)),
        "active": Min("id", filter=is_active),
        "waiting": Count("id", filter=in_queue),
    }
    scopes = [_scope_of(each) for each in followers]
    own = Run.objects.in_the_way().filter(
        schedule__in=[scope.schedule_id for scope in scopes if not scope.key]
    )
    rows = [
        *own.order_by().values("schedule_id").annotate(**counted),
        *(
            in_scope(scope).in_the_way().aggregate(**counted) | {"schedule_id": scope.schedule_id}
            for scope in scopes
            if scope.key
        ),
    ]
    return [
        _Ahead(
            schedule_id=row["schedule_id"],
            runs=OpenRuns(
                active=row["ahead"],
                backfilling=row["backfilling"],
                blocked_by=row["active"] or row["first"],
                waiting=row["waiting"],
            ),
            active_id=row["active"],
        )
        for row in rows
    ]


def _new_run(schedule: Schedule, parent: Run, now: datetime) -> Run:
    return Run(
        schedule=schedule,
        schedule_name=schedule.name,
        job=schedule.job,
        arguments=schedule.arguments,
        delivery=schedule.delivery,
        queue=schedule.queue,
        priority=schedule.priority,
        concurrency_key=schedule.scope(),
        trigger=Run.Trigger.CHAIN,
        parent=parent,
        due_at=now,
        state=Run.State.QUEUED,
    )


def _skip(run: Run, reason: str, details: dict[str, Any] | None = None) -> None:
    run.state, run.reason, run.details = Run.State.SKIPPED, reason, details
    run.finished_at = run.due_at


def _insert(rows: Sequence[Run]) -> None:
    """Insert the rows and learn their ids; MySQL alone cannot tell those of several."""
    if connection.features.can_return_rows_from_bulk_insert:
        Run.objects.bulk_create(rows, batch_size=_CHUNK)
        return
    for run in rows:
        run.save(force_insert=True)
