"""What the pages read: nodes, schedules and runs as people ask for them. Writes nothing.

No question here counts the runs or reads them all: lists go by id (keyset), and what
looks back in time looks at the newest ``_RECENT_ROWS`` rows at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, F, Q, Subquery
from django.db.models.lookups import Exact, In

from distcron_app.conf import get_config
from distcron_app.instants import DatabaseNow, database_now
from distcron_app.locks import schedule_lock_name
from distcron_app.models import Attempt, Node, Run, RunOutput, RunQuerySet, Schedule

__all__ = [
    "PAGE_SIZE",
    "Membership",
    "Overview",
    "RunPage",
    "find_run",
    "known_nodes",
    "last_runs",
    "membership",
    "newer_than",
    "overview",
    "run_page",
    "runs_matching",
    "schedules_matching",
    "schedules_of_locks",
    "with_names",
]

PAGE_SIZE = 50
# The overview's lists end here; the number above each leads to all of it.
_SHORT_LIST = 10
# Bounds the scan for recent failures where they are rare: tens of milliseconds.
_RECENT_ROWS = 50_000
_RECENT = timedelta(hours=24)
_MOST_LOCKS = 5_000  # below the limit of parameters of any database


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The nodes that should be alive, at ``now`` of the database's clock.

    ``silent`` ones have let their lease expire and are not declared dead yet.
    """

    now: datetime
    alive: tuple[Node, ...]
    silent: tuple[Node, ...]

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
class RunPage:
    """One page of runs, newest first; ``older`` and ``newer`` are ids to page on from."""

    rows: Sequence[Run]
    older: int | None
    newer: int | None


def membership() -> Membership:
    """Return who is alive, by one query while there are nodes and two without."""
    members = list(
        Node.objects.filter(state__in=Node.MEMBER_STATES).annotate(read_at=DatabaseNow())
    )
    now = _read_at(members[0]) if members else database_now()
    return Membership(
        now=now,
        alive=tuple(node for node in members if node.expires_at > now),
        silent=tuple(node for node in members if node.expires_at <= now),
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


def schedules_matching(*, text: str = "", state: str = "", now: datetime) -> Any:
    """Return schedules by name, with ``last_run_id``; ``state`` may also be ``overdue``."""
    schedules = Schedule.objects.with_last_run().order_by("name", "id")
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


def schedules_of_locks(names: Iterable[str]) -> dict[str, Schedule]:
    """Return the schedules that these locks are of, by name of the lock."""
    ids: list[int] = []
    for name in names:
        kind, _colon, number = name.partition(":")
        if kind == "schedule" and number.isascii() and number.isdigit():
            ids.append(min(int(number), 2**63 - 1))
    found = Schedule.objects.filter(pk__in=ids[:_MOST_LOCKS])
    return {schedule_lock_name(schedule.pk): schedule for schedule in found}


def with_names(runs: RunQuerySet) -> RunQuerySet:
    """Join what a list prints; a schedule or node that was deleted reads as None.

    A plain ``filter(schedule=...)`` would make the join an inner one, and the runs of
    a deleted schedule would be gone; ``runs_matching`` compares the column instead.
    """
    return runs.select_related("schedule", "node")


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
