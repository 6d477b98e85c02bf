"""What the pages read: nodes, schedules and runs as people ask for them. Writes nothing.

No question here counts the runs or reads them all: lists go by id (keyset), and what
looks back in time looks at the newest ``_RECENT_ROWS`` rows at most.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Any

from django.db.models import Count, Exists, F, Max, Q, Subquery, Sum
from django.db.models.lookups import Exact, In

from distcron_app.conf import get_config
from distcron_app.errors import TimetableError
from distcron_app.instants import DatabaseNow, SecondsBetween, UtcDay, database_now
from distcron_app.models import (
    TIMETABLE_FIELDS,
    Attempt,
    AuditEntry,
    ChainLink,
    ChainStart,
    Maintenance,
    Node,
    Run,
    RunDay,
    RunOutput,
    RunQuerySet,
    Schedule,
    exclusions_of,
    timetable_of,
)
from distcron_app.timetable import Timetable
from distcron_app.timetable.calendars import Excluding
from distcron_app.timetable.forecast import counts
from distcron_app.timetable.spread import spread_instant
from distcron_app.wording import Mark, marks

__all__ = [
    "PAGE_SIZE",
    "Chains",
    "DayCounts",
    "Forecast",
    "Membership",
    "Overview",
    "RunPage",
    "chains_of",
    "children_of",
    "daily_counts",
    "find_run",
    "forecast",
    "known_nodes",
    "last_runs",
    "longest_usual",
    "membership",
    "newer_than",
    "overview",
    "release_of",
    "run_page",
    "runs_matching",
    "schedule_marks",
    "schedules_matching",
    "start_of",
    "with_names",
]

PAGE_SIZE = 50
# The overview's lists end here; the number above each leads to all of it.
_SHORT_LIST = 10
# Bounds the scan for recent failures where they are rare: tens of milliseconds.
_RECENT_ROWS = 50_000
_RECENT = timedelta(hours=24)
# Releases of a schedule's lock that are looked through for the one that a run met.
_RELEASES = 50
_JUDGED = ("succeeded", "failed")  # states from which is taken how long a run takes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The nodes that should be alive, at ``now`` of the database's clock.

    ``silent`` ones have let their lease expire and are not declared dead yet.
    ``maintenance`` is the switch that keeps them from claiming, None while it is off.
    """

    now: datetime
    alive: tuple[Node, ...]
    silent: tuple[Node, ...]
    maintenance: Maintenance | None = None

    @property
    def alerts(self) -> tuple[Node, ...]:
        """Return the alive nodes that report something a person should know."""
        return tuple(node for node in self.alive if node.alert)

    @property
    def running(self) -> int:
        """Return how many runs the alive nodes said they execute."""
        return sum(node.running for node in self.alive)

    @property
    def slots(self) -> int:
        """Return how many runs the alive nodes could execute at once."""
        return sum(node.slots for node in self.alive)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """What the first page shows; the lists are cut to ten rows."""

    numbers: dict[str, int]
    active: Sequence[Run]
    upcoming: Sequence[Schedule]
    problems: Sequence[Run]
    problem_count: str
    broken: Sequence[Schedule]

    @property
    def is_calm(self) -> bool:
        """Return True when nothing needs a person."""
        return not self.problems and not self.broken


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """The links from and to schedules, each by the id of the schedule that is asked about."""

    starts: dict[int, list[ChainLink]]
    started_by: dict[int, list[ChainLink]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DayCounts:
    """How many runs of a schedule ended on a day in UTC, pruned ones included.

    ``timed`` of them started and ended; they took ``total_seconds`` together.
    """

    day: date
    states: dict[str, int]
    timed: int = 0
    total_seconds: float = 0.0
    longest_seconds: float = 0.0

    @property
    def count(self) -> int:
        """Return how many runs ended, or were skipped, on the day."""
        return sum(self.states.values())

    @property
    def average_seconds(self) -> float | None:
        """Return how long a run took on average, or None where none has run."""
        return self.total_seconds / self.timed if self.timed else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """One page of runs, newest first; ``older`` and ``newer`` are ids to page on from."""

    rows: Sequence[Run]
    older: int | None
    newer: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """How many occurrences start in each minute from ``start`` on, and of how many schedules."""

    start: datetime
    counts: Sequence[int]
    schedules: int

    @property
    def total(self) -> int:
        """Return how many occurrences there are."""
        return sum(self.counts)

    def busiest(self, most: int) -> list[tuple[datetime, int]]:
        """Return the minutes with the most occurrences, the earlier of equal ones first."""
        found = ((minute, count) for minute, count in enumerate(self.counts) if count)
        chosen = heapq.nsmallest(most, found, key=lambda each: (-each[1], each[0]))
        return [(self._at(minute), count) for minute, count in chosen]

    def by_hour(self, zone: tzinfo) -> list[tuple[datetime, int]]:
        """Return the counts by hour of the clock in ``zone``; the first and last may be cut."""

        def hour(place: tuple[int, int]) -> tuple[datetime, timedelta | None]:
            local = self._at(place[0]).astimezone(zone)
            return local.replace(minute=0, tzinfo=None), local.utcoffset()

        return [
            (self._at(minutes[0][0]), sum(count for _minute, count in minutes))
            for minutes in (
                list(group) for _hour, group in itertools.groupby(enumerate(self.counts), hour)
            )
        ]

    def _at(self, minute: int) -> datetime:
        return self.start + timedelta(minutes=minute)


def membership() -> Membership:
    """Return who is alive, by one query while there are nodes and three without.

    Maintenance costs one more while it is on.
    """
    switch = Maintenance.objects.on()
    members: list[Any] = list(
        Node.objects.filter(state__in=Node.MEMBER_STATES).annotate(
            read_at=DatabaseNow(), is_held=Exists(switch)
        )
    )
    now = _read_at(members[0]) if members else database_now()
    return Membership(
        now=now,
        alive=tuple(node for node in members if node.expires_at > now),
        silent=tuple(node for node in members if node.expires_at <= now),
        maintenance=switch.first() if not members or members[0].is_held else None,
    )


def known_nodes() -> list[Node]:
    """Return all nodes whose rows are kept, members first, then the newest."""
    nodes = Node.objects.order_by("name", "-started_at")
    return sorted(nodes, key=lambda node: node.state not in Node.MEMBER_STATES)


def overview(now: datetime) -> Overview:
    """Return the first page's content, by five queries whatever the number of rows."""
    active = Run.objects.filter(state__in=Run.ACTIVE_STATES).order_by("id")
    planned = Schedule.objects.filter(state=Schedule.State.ACTIVE, next_run_at__isnull=False)
    broken = Schedule.objects.filter(_needs_attention(now)).order_by("state", "name")
    problems = list(_recent_problems(now)[: PAGE_SIZE + 1])
    return Overview(
        numbers=_numbers(now),
        active=list(with_names(active)[:_SHORT_LIST]),
        upcoming=list(planned.order_by("next_run_at", "id")[:_SHORT_LIST]),
        problems=problems[:_SHORT_LIST],
        problem_count=f"{PAGE_SIZE}+" if len(problems) > PAGE_SIZE else str(len(problems)),
        broken=list(broken[:_SHORT_LIST]),
    )


def runs_matching(
    *,
    states: Iterable[str] = (),
    schedule_id: int | None = None,
    nodes: Iterable[Any] | None = None,
    trigger: str = "",
    job: str = "",
) -> RunQuerySet:
    """Return the runs that fit every given condition; an empty one means any."""
    runs = Run.objects.all()
    if states:
        runs = runs.filter(state__in=list(states))
    if schedule_id is not None:
        runs = runs.filter(Exact(F("schedule_id"), schedule_id))
    if nodes is not None:
        runs = runs.filter(In(F("node_id"), list(nodes)))
    if trigger:
        runs = runs.filter(trigger=trigger)
    if job:
        runs = runs.filter(job=job)
    return runs


def run_page(
    runs: RunQuerySet,
    *,
    before: int | None = None,
    after: int | None = None,
    top: int | None = None,
) -> RunPage:
    """Return one page of ``runs`` by id: those below ``before``, or just above ``after``.

    ``top`` holds a page still: nothing newer than that id is shown.
    """
    rows = with_names(runs)
    if after is not None:
        found = list(rows.filter(id__gt=after).order_by("id")[: PAGE_SIZE + 1])
        shown, has_more = found[:PAGE_SIZE][::-1], len(found) > PAGE_SIZE
        return RunPage(
            rows=shown,
            older=shown[-1].pk if shown else None,
            newer=shown[0].pk if has_more else None,
        )
    if before is not None:
        rows = rows.filter(id__lt=before)
    if top is not None:
        rows = rows.filter(id__lte=top)
    found = list(rows.order_by("-id")[: PAGE_SIZE + 1])
    shown = found[:PAGE_SIZE]
    return RunPage(
        rows=shown,
        older=shown[-1].pk if len(found) > PAGE_SIZE else None,
        newer=shown[0].pk if before is not None and shown else None,
    )


def newer_than(runs: RunQuerySet, top: int) -> int:
    """Return how many of ``runs`` came after the id ``top``, one more than a page at most."""
    return len(runs.filter(id__gt=top).order_by("id").values_list("id")[: PAGE_SIZE + 1])


def find_run(run_id: int) -> tuple[Run | None, Sequence[Attempt], RunOutput | None]:
    """Return a run with its ended attempts and its long text, by three queries."""
    run = with_names(Run.objects.filter(pk=run_id)).first()
    if run is None:
        return None, (), None
    attempts = Attempt.objects.filter(run=run_id).select_related("node").order_by("fencing_token")
    return run, list(attempts), RunOutput.objects.filter(pk=run_id).first()


def start_of(run: Run) -> ChainStart | None:
    """Return what started a run that another schedule started, by one query; None for others."""
    if run.trigger != Run.Trigger.CHAIN:
        return None
    return ChainStart.objects.filter(pk=run.pk).first()


def children_of(run: Run) -> list[Run]:
    """Return the runs that the end of ``run`` has started, the oldest first, by one query."""
    children = Run.objects.filter(chain_start__parent=run.pk).order_by("id")
    return list(with_names(children)[:PAGE_SIZE])


def chains_of(schedule_ids: Sequence[int]) -> Chains:
    """Return the links from and to the schedules, by one query."""
    wanted = set(schedule_ids)
    chains = Chains(starts={}, started_by={})
    links = ChainLink.objects.filter(Q(schedule__in=wanted) | Q(follower__in=wanted))
    ordered = links.select_related("schedule", "follower").order_by("schedule__key", "event", "pk")
    for link in ordered:
        if link.schedule_id in wanted:
            chains.starts.setdefault(link.schedule_id, []).append(link)
        if link.follower_id in wanted:
            chains.started_by.setdefault(link.follower_id, []).append(link)
    return chains


def release_of(run: Run, attempts: Sequence[Attempt]) -> AuditEntry | None:
    """Return who released the lock under ``run`` last, by one query; None where nobody did."""
    reasons = {run.reason, *(attempt.reason for attempt in attempts)}
    if Run.Reason.RELEASED not in reasons:
        return None
    entries = AuditEntry.objects.filter(
        object_type="schedule",
        object_id=str(run.schedule_id),
        verb=AuditEntry.Verb.RELEASE_LOCK,
    )
    for entry in entries.order_by("-id")[:_RELEASES]:
        after = entry.after or {}
        if run.pk in (*after.get("lost", ()), *after.get("requeued", ())):
            return entry
    return None


def schedules_matching(*, text: str = "", state: str = "", now: datetime) -> Any:
    """Return schedules by name, with ``last_run_id``; ``state`` may also be ``overdue``."""
    schedules = Schedule.objects.with_last_run().select_related("calendar").order_by("name", "id")
    if text:
        schedules = schedules.filter(
            Q(name__icontains=text) | Q(key__icontains=text) | Q(job__icontains=text)
        )
    if state == "overdue":
        return schedules.filter(_overdue(now))
    return schedules.filter(state=state) if state else schedules


def last_runs(schedules: Iterable[Any]) -> dict[int, Run]:
    """Return the newest run of each schedule that ``with_last_run`` found, by schedule id."""
    ids = [schedule.last_run_id for schedule in schedules if schedule.last_run_id]
    return {run.schedule_id or 0: run for run in Run.objects.filter(pk__in=ids)}


def schedule_marks(schedule: Schedule, now: datetime, runs: Iterable[Run]) -> list[Mark]:
    """Return what is to know about the timetable of a stored schedule, by one query.

    How long a run takes is read from ``runs``, the newest of the schedule.
    """
    return marks(schedule.timetable(), after=now, herd=_herd(schedule), p95=longest_usual(runs))


def forecast(now: datetime, hours: int = 24) -> Forecast:
    """Return how many occurrences each minute of the next ``hours`` has, by one query.

    Those of active schedules, at the instant when they are due. What is spread, limited,
    or kept clear of excluded days costs its instants; anything else costs nothing of note.
    """
    start = now.replace(second=0, microsecond=0)
    planned = Schedule.objects.filter(state=Schedule.State.ACTIVE).order_by("pk")
    active = planned.exclude(kind=Schedule.Kind.MANUAL)
    rows = active.annotate(calendar_revision=F("calendar__revision"))
    found = [
        _Outlook(*(*row[:_OUTLOOK], row[_OUTLOOK:]))
        for row in rows.values_list(*_OUTLOOK_FIELDS, *TIMETABLE_FIELDS)
    ]
    end = start + timedelta(hours=hours)
    plain: list[Timetable] = []
    listed: list[datetime] = []
    for row in found:
        try:
            if row.is_plain(start, end):
                plain.append(row.timetable)
            else:
                listed += row.due_instants(start, end)
        except TimetableError:
            continue  # the sweep marks it invalid
    minutes = counts(plain, start, hours=hours)
    for at in listed:
        minutes[(at - start) // timedelta(minutes=1)] += 1
    return Forecast(start=start, counts=minutes, schedules=len(found))


def daily_counts(schedule_id: int, days: int = 30) -> list[DayCounts]:
    """Return one entry for each of the last ``days`` days in UTC, today last.

    Adds the runs that are there to what was pruned, so pruning changes no total. One
    statement for both: a batch that is pruned meanwhile is never counted twice or missed.
    """
    today = database_now().date()
    wanted = [today - timedelta(days=ago) for ago in reversed(range(days))]
    nothing = (0,) * len(_ENDED_STATES) + (0, 0.0, 0.0)
    rows: dict[date, list[tuple[Any, ...]]] = {day: [nothing] for day in wanted}
    for day, *numbers in _live_and_pruned(schedule_id, wanted[0]):
        if day in rows:
            rows[day].append(tuple(numbers))
    return [_day_counts(day, of_day) for day, of_day in rows.items()]


_ENDED_STATES = (*Run.ENDED_STATES, *Run.BROKEN_STATES)
_DAY_COLUMNS = ("day", *_ENDED_STATES, "timed", "total_seconds", "longest_seconds")


def _live_and_pruned(schedule_id: int, first: date) -> Iterable[Any]:
    start = datetime.combine(first, time(), UTC)
    seconds = SecondsBetween("started_at", "finished_at")
    live = (
        Run.objects.filter(schedule=schedule_id, state__in=_ENDED_STATES, finished_at__gte=start)
        .order_by()
        .annotate(day=UtcDay("finished_at"))
        .values("day")
        .annotate(
            **{state: Count("pk", filter=Q(state=state)) for state in _ENDED_STATES},
            timed=Count("started_at"),
            total_seconds=Sum(seconds),
            longest_seconds=Max(seconds),
        )
    )
    pruned = RunDay.objects.filter(schedule=schedule_id, day__gte=first).order_by()
    both = live.values_list(*_DAY_COLUMNS).union(pruned.values_list(*_DAY_COLUMNS), all=True)
    return both.order_by()  # Django 6.1 takes up the model's order again, by a column not there


def _day_counts(day: date, rows: Sequence[tuple[Any, ...]]) -> DayCounts:
    columns = [[number or 0 for number in column] for column in zip(*rows, strict=True)]
    *states, timed, total_seconds, longest_seconds = columns
    return DayCounts(
        day=day,
        states={state: sum(counts) for state, counts in zip(_ENDED_STATES, states, strict=True)},
        timed=sum(timed),
        total_seconds=sum(total_seconds),
        longest_seconds=max(longest_seconds),
    )


def with_names(runs: RunQuerySet) -> RunQuerySet:
    """Join what a list prints; a schedule or node that was deleted reads as None.

    A plain ``filter(schedule=...)`` would make the join an inner one, and the runs of
    a deleted schedule would be gone; ``runs_matching`` compares the column instead.
    """
    return runs.select_related("schedule", "node")


@dataclasses.dataclass(frozen=True, slots=True)
class _Outlook:
    """An active schedule, as the forecast reads it."""

    pk: int
    starts_at: datetime | None
    ends_at: datetime | None
    max_runs: int | None
    runs_planned: int
    next_run_at: datetime | None
    planned_from: datetime | None
    calendar_id: int | None
    calendar_revision: Any
    calendar_action: str
    spread_by: str
    spread_seconds: int
    spread_key: str
    columns: tuple[Any, ...]

    @property
    def timetable(self) -> Timetable:
        calendar = None
        if self.calendar_id is not None:
            calendar = (self.calendar_id, self.calendar_revision)
        rule = timetable_of(self.columns, calendar, self.calendar_action)
        if calendar is None or self.calendar_action != Schedule.Excluded.SKIP:
            return rule
        return Excluding(timetable=rule, exclusions=exclusions_of(*calendar))

    def is_plain(self, start: datetime, end: datetime) -> bool:
        """Return True where each instant of the rule in the stretch runs, at that instant."""
        first = max(filter(None, (self.starts_at, self.planned_from)), default=start)
        return (
            not self.spread_seconds
            and self.calendar_id is None
            and self.max_runs is None
            and first <= start
            and (self.ends_at is None or self.ends_at >= end)
        )

    def due_instants(self, start: datetime, end: datetime) -> Iterator[datetime]:
        """Yield when its occurrences are due, with start <= instant < end."""
        limit = None if self.max_runs is None else max(0, self.max_runs - self.runs_planned)
        for at in itertools.islice(self._instants(start, end), limit):
            due_at = self._spread(at)
            if start <= due_at < end:
                yield due_at

    def _instants(self, start: datetime, end: datetime) -> Iterator[datetime]:
        tick = timedelta(microseconds=1)
        after = start - tick - timedelta(seconds=self.spread_seconds)
        if self.max_runs is not None and self.next_run_at is not None:
            after = self.next_run_at - tick  # what came before has been counted as planned
        if self.planned_from is not None:
            after = max(after, self.planned_from)
        if self.starts_at is not None:
            after = max(after, self.starts_at - tick)
        last = end - tick if self.ends_at is None else min(end - tick, self.ends_at)
        return self.timetable.between(after, last)

    def _spread(self, at: datetime) -> datetime:
        return spread_instant(
            self.spread_by, self.spread_seconds, self.spread_key or str(self.pk), at
        )


_OUTLOOK_FIELDS = tuple(
    field.name for field in dataclasses.fields(_Outlook) if field.name != "columns"
)
_OUTLOOK = len(_OUTLOOK_FIELDS)


def _herd(schedule: Schedule) -> int:
    """Return how many other schedules start at the second of the next instant of this one."""
    at = schedule.next_run_at
    if at is None or schedule.spread_seconds:
        return 0
    second = at.replace(microsecond=0)
    others = Schedule.objects.filter(
        state=Schedule.State.ACTIVE,
        spread_seconds=0,
        next_run_at__gte=second,
        next_run_at__lt=second + timedelta(seconds=1),
    )
    return others.exclude(pk=schedule.pk).count()


def longest_usual(runs: Iterable[Run]) -> timedelta | None:
    """Return how long 95 of 100 of the runs that ended took at most; None without one."""
    taken = sorted(
        run.finished_at - run.started_at
        for run in runs
        if run.state in _JUDGED and run.started_at and run.finished_at
    )
    return taken[(len(taken) * 95 - 1) // 100] if taken else None


def _read_at(node: Any) -> datetime:
    read_at: datetime = node.read_at
    return read_at


def _numbers(now: datetime) -> dict[str, int]:
    return Schedule.objects.aggregate(
        schedules=Count("pk"),
        paused=Count("pk", filter=Q(state=Schedule.State.PAUSED)),
        invalid=Count("pk", filter=Q(state=Schedule.State.INVALID)),
        overdue=Count("pk", filter=_overdue(now)),
    )


def _overdue(now: datetime) -> Q:
    limit = now - timedelta(seconds=get_config().misfire_grace_seconds)
    return Q(state=Schedule.State.ACTIVE, next_run_at__lt=limit)


def _needs_attention(now: datetime) -> Q:
    return Q(state__in=[Schedule.State.INVALID, Schedule.State.PAUSED]) | _overdue(now)


def _recent_problems(now: datetime) -> RunQuerySet:
    newest = Run.objects.order_by("-id").values("id")[:1]
    return (
        with_names(Run.objects.filter(state__in=[Run.State.LOST, Run.State.FAILED]))
        .filter(finished_at__gte=now - _RECENT, id__gt=Subquery(newest) - _RECENT_ROWS)
        .order_by("-id")
    )
