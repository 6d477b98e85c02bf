"""Run a past range of a schedule: a dry count first, then one row for each instant."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from distcron_app import audit, lifecycle, registry
from distcron_app.errors import BackfillMovedOn, InvalidBackfill
from distcron_app.instants import database_now
from distcron_app.models import Backfill, Run, Schedule
from distcron_app.operations.author import Author, check_reason, once, row_key

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractBaseUser

__all__ = [
    "MAX_BACKFILL",
    "MAX_PER_MINUTE",
    "MAX_SIDE_BY_SIDE",
    "BackfillCancellation",
    "BackfillPlan",
    "BackfillRequest",
    "backfill",
    "cancel_backfill",
    "plan_backfill",
]

MAX_BACKFILL = 10_000  # instants in one range: they are inserted in one transaction
MAX_PER_MINUTE = 6000
MAX_SIDE_BY_SIDE = 1000
_MICROSECOND = timedelta(microseconds=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackfillRequest:
    """Which range is to run, both ends included and aware, and how.

    ``arguments`` None are the schedule's. ``most_active`` is for side by side; None is as
    many as the schedule allows. ``per_minute`` None is no pace.
    """

    first_at: datetime
    last_at: datetime
    arguments: dict[str, Any] | None = None
    overlap: str = Backfill.Overlap.ONE_BY_ONE
    most_active: int | None = None
    per_minute: int | None = None
    repeat: str = Backfill.Repeat.NONE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackfillPlan:
    """The dry count of a backfill: ``instants`` would run, the oldest first.

    ``repeated`` of them have a run already. The others of the range are left out: ``existing``
    have a run, ``excluded`` are on excluded days, ``upcoming`` are still the timetable's to
    run, ``outside`` are beyond the bounds of the schedule.
    """

    request: BackfillRequest
    instants: tuple[datetime, ...]
    repeated: int = 0
    existing: int = 0
    excluded: int = 0
    upcoming: int = 0
    outside: int = 0

    @property
    def count(self) -> int:
        """Return how many runs it would be."""
        return len(self.instants)

    @property
    def first(self) -> datetime | None:
        """Return the first instant that would run."""
        return self.instants[0] if self.instants else None

    @property
    def last(self) -> datetime | None:
        """Return the last instant that would run."""
        return self.instants[-1] if self.instants else None

    @property
    def paced_seconds(self) -> float:
        """Return how long its pace alone makes it take, from the first start to the last."""
        per_minute = self.request.per_minute
        return max(0, self.count - 1) * 60 / per_minute if per_minute else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackfillCancellation:
    """What the cancel of a backfill did."""

    backfill_id: int
    cancelled: int
    asked: int

    def in_words(self) -> str:
        """Return what became of its runs."""
        parts = [
            _("Backfill %d is cancelled.") % self.backfill_id,
            ngettext("%d run will not start.", "%d runs will not start.", self.cancelled)
            % self.cancelled,
        ]
        if self.asked:
            text = ngettext("%d run is asked to stop.", "%d runs are asked to stop.", self.asked)
            parts.append(text % self.asked)
        return " ".join(parts)


def plan_backfill(schedule: Schedule, request: BackfillRequest) -> BackfillPlan:
    """Return what the request would run, by at most three queries; writes nothing.

    Raise InvalidBackfill for what cannot be, TimetableError for a schedule whose rule is
    wrong.
    """
    now = database_now()
    _check(schedule, request, now)
    fates: Counter[str] = Counter()
    kept: list[datetime] = []
    instants = _instants(schedule, request, now)
    runs = _states(schedule, instants)
    decided_from = _decided_from(schedule)
    for at in instants:
        if not _is_within(schedule, at):
            fate = "outside"
        elif schedule.excluded(at):
            fate = "excluded"
        elif decided_from is not None and at >= decided_from:
            fate = "upcoming"
        else:
            fate = _fate(request.repeat, runs.get(at))
        fates[fate] += 1
        if fate in ("new", "repeated"):
            kept.append(at)
    del fates["new"]
    return BackfillPlan(request=request, instants=tuple(kept), **fates)


def backfill(
    schedule: Schedule,
    request: BackfillRequest,
    *,
    reason: str = "",
    actor: str,
    user: AbstractBaseUser | None = None,
    via: audit.Via,
    expected: int | None = None,
    idempotency_key: str | None = None,
) -> Backfill:
    """Queue a run for each instant of the range and return the backfill; also while paused.

    All rows come with one transaction, or none. The same idempotency key returns the same
    backfill. ``expected`` is the dry count that a person agreed to. Raise BackfillMovedOn
    where it is another one by now, or nothing is left to run; InvalidBackfill, UnknownJob
    or InvalidArguments for what could not run.
    """
    author = Author(actor=actor, user=user, via=via, reason=reason.strip())
    check_reason(author.reason)
    key = row_key("backfill", schedule.pk, idempotency_key)

    def insert() -> Backfill:
        job = registry.get(schedule.job)
        given = request.arguments
        job.check(schedule.arguments if given is None else job.dump(given))
        return _insert(schedule, request, author, expected, key)

    return once(key, _backfill_of, insert, BackfillMovedOn)


def cancel_backfill(
    found: Backfill,
    *,
    reason: str,
    is_stopping: bool = True,
    actor: str,
    user: AbstractBaseUser | None = None,
    via: audit.Via,
    idempotency_key: str | None = None,
) -> BackfillCancellation:
    """Cancel what has not started of a backfill; with ``is_stopping`` ask the rest to stop.

    Raise ValueError without a reason, BackfillMovedOn for one that has ended.
    """
    if not reason.strip():
        raise ValueError(_("Reason: missing. Say why, for whoever looks for the runs' work."))
    author = Author(actor=actor, user=user, via=via, reason=reason.strip())
    check_reason(author.reason)
    key = row_key("cancel_backfill", found.pk, idempotency_key)
    return once(
        key, _cancellation_of, lambda: _cancel(found, author, is_stopping, key), BackfillMovedOn
    )


# --- the dry count ----------------------------------------------------------------


def _check(schedule: Schedule, request: BackfillRequest, now: datetime) -> None:
    def refuse(field: str, problem: str) -> InvalidBackfill:
        return InvalidBackfill(schedule.key, field, problem)

    if request.last_at < request.first_at:
        raise refuse("last_at", _("the end is before the beginning. Exchange them."))
    if request.first_at > now:
        message = _("it begins in the future. A backfill is for instants that are over.")
        raise refuse("first_at", message)
    if request.per_minute is not None and not 1 <= request.per_minute <= MAX_PER_MINUTE:
        message = _("%(given)d runs per minute: allowed 1 to %(most)d.")
        facts = {"given": request.per_minute, "most": MAX_PER_MINUTE}
        raise refuse("per_minute", message % facts)
    _check_overlap(schedule, request)


def _check_overlap(schedule: Schedule, request: BackfillRequest) -> None:
    most, limit = request.most_active, schedule.active_limit
    problem = ""
    if most is None:
        return
    if request.overlap != Backfill.Overlap.SIDE_BY_SIDE:
        problem = _("a number of runs at once needs the choice side by side.")
    elif not 1 <= most <= MAX_SIDE_BY_SIDE:
        problem = _("%(given)d side by side: allowed 1 to %(most)d.")
        problem %= {"given": most, "most": MAX_SIDE_BY_SIDE}
    elif limit is not None and most > limit:
        problem = ngettext(
            "%(given)d side by side: the schedule allows %(limit)d active run. Raise its limit.",
            "%(given)d side by side: the schedule allows %(limit)d active runs. Raise its limit.",
            limit,
        ) % {"given": most, "limit": limit}
    if problem:
        raise InvalidBackfill(schedule.key, "most_active", problem)


def _instants(schedule: Schedule, request: BackfillRequest, now: datetime) -> list[datetime]:
    start, end = request.first_at - _MICROSECOND, min(request.last_at, now)
    found = list(schedule.timetable().between(start, end, limit=MAX_BACKFILL + 1))
    if len(found) > MAX_BACKFILL:
        message = _("the range has more than %d instants. Shorten it.")
        raise InvalidBackfill(schedule.key, "last_at", message % MAX_BACKFILL)
    return found


def _states(schedule: Schedule, instants: Iterable[datetime]) -> dict[datetime, set[str]]:
    """Return the states of the runs of each instant; a skipped one is none."""
    wanted = list(instants)
    states: dict[datetime, set[str]] = {}
    if not wanted:
        return states
    runs = Run.objects.filter(schedule=schedule.pk).exclude(state=Run.State.SKIPPED).order_by()
    for column in ("scheduled_at", "nominal_at"):
        rows = runs.filter(**{f"{column}__gte": wanted[0], f"{column}__lte": wanted[-1]})
        for at, state in rows.values_list(column, "state"):
            states.setdefault(at, set()).add(state)
    return states


def _decided_from(schedule: Schedule) -> datetime | None:
    """Return from which instant on the timetable is still to decide; None where it has."""
    if schedule.state == Schedule.State.ACTIVE:
        found: datetime | None = schedule.next_run_at
        return found
    waits = schedule.on_resume == Schedule.OnResume.MISFIRE
    if schedule.state == Schedule.State.PAUSED and waits and schedule.planned_from is not None:
        return schedule.planning_start(schedule.planned_from) + _MICROSECOND
    return None


def _is_within(schedule: Schedule, at: datetime) -> bool:
    starts_at, ends_at = schedule.starts_at, schedule.ends_at
    return (starts_at is None or at >= starts_at) and (ends_at is None or at <= ends_at)


def _fate(repeat: str, states: set[str] | None) -> str:
    if not states:
        return "new"
    if not states.isdisjoint(Run.OPEN_STATES):
        return "existing"
    if repeat == Backfill.Repeat.ALL:
        return "repeated"
    is_done = Run.State.SUCCEEDED in states
    return "repeated" if repeat == Backfill.Repeat.FAILED and not is_done else "existing"


# --- the rows ---------------------------------------------------------------------


def _insert(
    schedule: Schedule,
    request: BackfillRequest,
    author: Author,
    expected: int | None,
    key: str | None,
) -> Backfill:
    # Held until the commit: two backfills of one range would each count the instants as free.
    locked = Schedule.objects.select_for_update().filter(pk=schedule.pk).first()
    if locked is None:
        raise BackfillMovedOn(schedule.key, _("the schedule was deleted."))
    plan = plan_backfill(locked, request)
    if expected is not None and plan.count != expected:
        message = _("it would be %(count)d runs by now instead of %(expected)d. Look again.")
        facts = {"count": plan.count, "expected": expected}
        raise BackfillMovedOn(schedule.key, message % facts)
    if not plan.instants:
        raise BackfillMovedOn(schedule.key, _("nothing of the range is left to run."))
    now = database_now()
    row = Backfill.objects.create(
        schedule=locked,
        schedule_name=locked.name,
        planned=plan.count,
        by=author.actor[:150],
        reason=author.reason,
        created_at=now,
        **dataclasses.asdict(request),
    )
    # Before the runs, so that the second click of a double click fails before its thousands.
    audit.record(
        actor=author.actor,
        user=author.user,
        via=author.via,
        verb="backfill",
        target=locked,
        reason=author.reason,
        after={"backfill": row.pk, "runs": plan.count, **_facts(request)},
        idempotency_key=key,
    )
    lifecycle.queue_backfill(row, locked, plan.instants, start=now)
    return row


def _facts(request: BackfillRequest) -> dict[str, Any]:
    """Return what was asked for, for the audit; without what was left as it is."""
    given = {name: audit.json_value(value) for name, value in dataclasses.asdict(request).items()}
    return {name: value for name, value in given.items() if value is not None}


def _backfill_of(after: dict[str, Any]) -> Backfill | None:
    return Backfill.objects.filter(pk=after["backfill"]).first()


def _cancel(
    found: Backfill, author: Author, is_stopping: bool, key: str | None
) -> BackfillCancellation:
    done = lifecycle.cancel_backfill(
        found.pk,
        by=author.actor,
        reason=author.reason,
        now=database_now(),
        is_stopping=is_stopping,
    )
    if done is None:
        raise BackfillMovedOn(str(found), _("it has ended, so nothing was cancelled."))
    audit.record(
        actor=author.actor,
        user=author.user,
        via=author.via,
        verb="cancel_backfill",
        target=found,
        reason=author.reason,
        after={"backfill": found.pk, "cancelled": done.cancelled, "asked": done.asked},
        idempotency_key=key,
    )
    return BackfillCancellation(backfill_id=found.pk, cancelled=done.cancelled, asked=done.asked)


def _cancellation_of(after: dict[str, Any]) -> BackfillCancellation:
    return BackfillCancellation(
        backfill_id=after["backfill"],
        cancelled=after["cancelled"],
        asked=after["asked"],
    )
