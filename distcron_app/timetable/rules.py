"""All time maths: rules are checked here, turned into instants, and due instants planned.

A timetable is a value (Cron, CalendarInterval, Interval, Once, Union) that yields aware UTC
instants. Pure: no models, no settings, no clock; the same text, zone and
``tzdata_version()`` give the same instants on every node.

Cron follows Debian's cron at clock changes, unless a rule's ``gap`` and ``fold`` differ:

1. A rule is a wildcard if its minute or hour field starts with ``*``; otherwise it is fixed.
2. Wildcard: every UTC minute whose local time matches; nothing in a gap, both passes of a fold.
3. Fixed, gap under 3 h: the minutes jumped over run once, at the first minute after the gap.
4. Fixed, fold up to 3 h: only the first pass runs.
5. Larger jumps are corrections of the clock: nothing is made up, nothing is held back.
6. Day and weekday both restricted: either suffices (OR); if one starts with ``*``: both (AND).

Where a gap gives several minutes to one instant, that instant is one occurrence. Every N
days, weeks or months counts as fixed.
"""

from __future__ import annotations

import calendar
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from django.utils.translation import gettext_lazy as _

from distcron_app.errors import TimetableError
from distcron_app.timetable import zone_walk
from distcron_app.timetable.fields import fields
from distcron_app.timetable.grammar import MAX_TEXT, CronFields, canonical
from distcron_app.timetable.kinds import (
    EPOCH,
    FOLDS,
    GAPS,
    MICROSECOND,
    UNITS,
    CalendarInterval,
    Cron,
    Interval,
    Never,
    Once,
    Timetable,
    Union,
    WallTimetable,
    as_utc,
    parts,
    second_of,
)
from distcron_app.timetable.walk import Policy, Rule
from distcron_app.timetable.zones import check_timezone, tzdata_version, zone

__all__ = [
    "DEFAULT_CATCHUP_MAX",
    "EPOCH",
    "FOLDS",
    "GAPS",
    "KINDS",
    "MAX_CALENDAR_EVERY",
    "MAX_INTERVAL_SECONDS",
    "MAX_RULES",
    "MAX_TEXT",
    "MISFIRES",
    "UNITS",
    "CalendarInterval",
    "ClockChange",
    "Cron",
    "CronFields",
    "Interval",
    "Never",
    "Once",
    "Plan",
    "Span",
    "Timetable",
    "Union",
    "WallTimetable",
    "build",
    "canonical",
    "check_timezone",
    "clock_change",
    "fields",
    "first_after",
    "latest",
    "parts",
    "plan",
    "span",
    "tzdata_version",
    "union",
    "zone",
]

KINDS = ("cron", "calendar", "interval", "once", "manual")
MAX_INTERVAL_SECONDS = 31_536_000  # 365 days
MAX_RULES = 20  # of a union
MAX_CALENDAR_EVERY = {"days": 3660, "weeks": 520, "months": 120}  # ten years

# A fixed start makes the verdict the same at any time. 2000 to 2030 meet every pairing of
# date and weekday, leap days included, and no skipped leap year. In days since 1970.
_FIRST_OCCURRENCE_FROM = (date(2000, 1, 1) - EPOCH.date()).days
_FIRST_OCCURRENCE_UNTIL = (date(2030, 1, 1) - EPOCH.date()).days
_FIRST_YEAR, _LAST_YEAR = 1970, 2199  # of a calendar start: beyond is a slip of the hand
_ANY_POLICY = Policy(shifts=True, first_pass=True, second_pass=False)
_LABELS = {"gap": _("Gap"), "fold": _("Fold"), "calendar_unit": _("Calendar unit")}
RUN_LATEST, RUN_ALL, SKIP = MISFIRES = ("run_latest", "run_all", "skip")
DEFAULT_CATCHUP_MAX = 100
_SHORTEST_CATCHUP = timedelta(minutes=5)
_LONGEST_CATCHUP = timedelta(hours=24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of instants that were decided upon together."""

    first: datetime
    last: datetime
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do with the due instants of one schedule, and the instant to look at next.

    ``run`` is None when nothing is worth running; ``next`` when nothing comes any more.
    ``then`` are to run after it, one by one, the oldest first.
    """

    run: datetime | None
    then: tuple[datetime, ...] = ()
    coalesced: Span | None = None
    misfired: Span | None = None
    next: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockChange:
    """What a clock change did to one instant; ``wall`` is naive local time of the zone.

    ``kind`` is "gap": the rule's wall time ``wall`` did not exist and runs now instead.
    Or "fold": the wall time ``wall`` happens twice and this is the ``fold`` of them,
    "first" or "second".
    """

    kind: str
    wall: datetime
    fold: str = "first"


def build(
    *,
    kind: str,
    cron: str = "",
    timezone: str = "UTC",
    interval_seconds: int | None = None,
    interval_anchor: datetime | None = None,
    run_at: datetime | None = None,
    calendar_every: int | None = None,
    calendar_unit: str = "",
    calendar_start: datetime | None = None,
    gap: str = "shift",
    fold: str = "first",
    spread_key: str = "",
) -> Timetable:
    """Return the timetable that a schedule's columns describe; columns of other kinds are ignored.

    Raise TimetableError whose ``field`` is the parameter at fault. Without
    ``interval_anchor`` the interval counts from 1970-01-01 UTC. ``calendar_start`` is naive
    local time of ``timezone``. ``gap`` and ``fold`` count for cron and calendar.
    Where H is refused, the number to write instead comes from ``spread_key``.
    """
    check_timezone(timezone)
    if kind == "interval":
        anchor = EPOCH if interval_anchor is None else interval_anchor
        return Interval(
            seconds=_checked_seconds(interval_seconds),
            anchor=_checked_instant("interval_anchor", anchor),
        )
    if kind == "manual":
        return Never()
    if kind == "once":
        return Once(at=_checked_instant("run_at", run_at))
    if kind not in KINDS:
        message = _("Kind %(kind)r: not known. Choose one of %(kinds)s.")
        raise TimetableError("kind", message % {"kind": str(kind)[:40], "kinds": ", ".join(KINDS)})
    gap, fold = _checked_choice("gap", gap, GAPS), _checked_choice("fold", fold, FOLDS)
    if kind == "cron":
        expression = _occurring(canonical(cron, spread_key=spread_key))
        return Cron(expression=expression, timezone=timezone, gap=gap, fold=fold)
    unit = _checked_choice("calendar_unit", calendar_unit, UNITS)
    every, start = _checked_every(calendar_every, unit), _checked_start(calendar_start)
    return CalendarInterval(
        every=every, unit=unit, start=start, timezone=timezone, gap=gap, fold=fold
    )


def union(rules: Iterable[Timetable]) -> Timetable:
    """Return one timetable of all ``rules``, each once; a single rule as it is.

    Raise TimetableError if there are none or more than MAX_RULES.
    """
    distinct = tuple(dict.fromkeys(rules))
    if 1 <= len(distinct) <= MAX_RULES:
        return distinct[0] if len(distinct) == 1 else Union(distinct)
    message = _("Timetable of %(count)d rules: must have from 1 to %(largest)d.")
    raise TimetableError("rules", message % {"count": len(distinct), "largest": MAX_RULES})


def first_after(
    timetable: Timetable,
    after: datetime,
    *,
    starts_at: datetime | None = None,
    ends_at: datetime | None = None,
    max_runs: int | None = None,
    runs_so_far: int = 0,
) -> datetime | None:
    """Return the first instant after ``after`` that has starts_at <= instant <= ends_at.

    None if ``runs_so_far``, which the caller counts, has reached ``max_runs``.
    """
    if max_runs is not None and runs_so_far >= max_runs:
        return None
    if starts_at is not None and as_utc(starts_at) > as_utc(after):
        after = as_utc(starts_at) - MICROSECOND
    instant = timetable.next_after(after)
    if instant is None or (ends_at is not None and instant > as_utc(ends_at)):
        return None
    return instant


def latest(timetable: Timetable, *, after: datetime, until: datetime) -> datetime | None:
    """Return the newest instant with after < instant <= until."""
    until = as_utc(until)
    newest = until if timetable.matches(until) else timetable.previous_before(until)
    return newest if newest is not None and newest > as_utc(after) else None


def plan(
    timetable: Timetable,
    *,
    due_from: datetime,
    now: datetime,
    misfire_grace: timedelta,
    misfire: str = RUN_LATEST,
    catchup_window: timedelta | None = None,
    catchup_max: int = DEFAULT_CATCHUP_MAX,
    ends_at: datetime | None = None,
    max_runs: int | None = None,
    runs_so_far: int = 0,
) -> Plan:
    """Decide about the due instants from ``due_from``, the oldest, to ``now``.

    1. If the oldest is at most ``misfire_grace`` late it runs; later ones stay due.
    2. Otherwise those older than ``catchup_window`` are misfired, and of the rest
       ``misfire`` decides: "run_latest" runs the newest, and the others are coalesced into
       it; "run_all" runs the newest ``catchup_max``, the oldest of them first; "skip" runs
       nothing that is later than the grace.
    3. ``next`` is the first instant after those decided upon, computed from the planned
       instant and never from the clock; None beyond ``ends_at``.
    4. At most ``max_runs`` run, ``runs_so_far`` included; then nothing is next.

    ``catchup_window`` defaults to the period of the timetable, at least 5 minutes and at
    most 24 h. Costs months of outage, not instants.
    """
    left = None if max_runs is None else max_runs - runs_so_far
    if left is not None and left <= 0:
        return Plan(run=None, next=None)
    planned = _unlimited_plan(
        timetable,
        due_from=due_from,
        now=now,
        misfire_grace=misfire_grace,
        misfire=misfire,
        catchup_window=catchup_window,
        catchup_max=catchup_max,
        ends_at=ends_at,
    )
    if left is None or planned.run is None or left > 1 + len(planned.then):
        return planned
    return dataclasses.replace(planned, then=planned.then[: left - 1], next=None)


def _unlimited_plan(
    timetable: Timetable,
    *,
    due_from: datetime,
    now: datetime,
    misfire_grace: timedelta,
    misfire: str,
    catchup_window: timedelta | None,
    catchup_max: int,
    ends_at: datetime | None,
) -> Plan:
    due_from, now = as_utc(due_from), as_utc(now)
    until = now if ends_at is None else min(now, as_utc(ends_at))
    if due_from > until:
        return Plan(run=None, next=due_from if ends_at is None or due_from <= ends_at else None)
    if now - due_from <= misfire_grace:
        return Plan(run=due_from, next=first_after(timetable, due_from, ends_at=ends_at))
    if catchup_window is None:
        catchup_window = _default_catchup(timetable, due_from)
    before = due_from - MICROSECOND
    cut = max(before, min(now - catchup_window - MICROSECOND, until))
    if misfire == SKIP:
        cut = max(cut, min(now - misfire_grace - MICROSECOND, until))
        # What is within the grace stays due, and runs with the next look.
        return Plan(
            run=None,
            misfired=span(timetable, after=before, until=cut),
            next=first_after(timetable, cut, ends_at=ends_at),
        )
    if misfire == RUN_ALL:
        return _plan_of_all(
            timetable, before=before, cut=cut, until=until, most=catchup_max, ends_at=ends_at
        )
    run = latest(timetable, after=cut, until=until)
    return Plan(
        run=run,
        coalesced=span(timetable, after=cut, until=run - MICROSECOND) if run else None,
        misfired=span(timetable, after=before, until=cut),
        next=first_after(timetable, until, ends_at=ends_at),
    )


def _plan_of_all(
    timetable: Timetable,
    *,
    before: datetime,
    cut: datetime,
    until: datetime,
    most: int,
    ends_at: datetime | None,
) -> Plan:
    """Run the newest ``most`` instants with cut < instant <= until, the oldest of them first."""
    kept: list[datetime] = []
    instant = latest(timetable, after=cut, until=until)
    while instant is not None and len(kept) < most:
        kept.append(instant)
        instant = latest(timetable, after=cut, until=instant - MICROSECOND)
    kept.reverse()
    return Plan(
        run=kept[0] if kept else None,
        then=tuple(kept[1:]),
        misfired=span(timetable, after=before, until=kept[0] - MICROSECOND if kept else cut),
        next=first_after(timetable, until, ends_at=ends_at),
    )


def clock_change(timetable: Timetable, at: datetime) -> ClockChange | None:
    """Return what a clock change did to the instant ``at`` of the timetable, if anything.

    Only fixed cron rules and calendar intervals are moved or held back; of a union, the
    first rule that was counts.
    """
    for rule in parts(timetable):
        if isinstance(rule, WallTimetable) and rule.matches(at):
            change = _change_of(rule, second_of(at))
            if change is not None:
                return change
    return None


def _change_of(timetable: WallTimetable, second: int) -> ClockChange | None:
    rule = timetable.rule
    moved = zone_walk.moved_wall(rule, timetable.timezone, second)
    if moved is not None:
        return ClockChange(kind="gap", wall=_naive(moved))
    repeated = zone_walk.repeated_wall(rule, timetable.timezone, second)
    if repeated is None:
        return None
    fold = "first" if rule.policy.first_pass else "second"
    return ClockChange(kind="fold", wall=_naive(repeated), fold=fold)


def _naive(wall: int) -> datetime:
    return EPOCH.replace(tzinfo=None) + timedelta(seconds=wall)


def _checked_choice(field: str, value: str, allowed: Sequence[str]) -> str:
    if value in allowed:
        return value
    message = _("%(field)s %(value)r: not known. Choose one of %(allowed)s.")
    facts = {"field": _LABELS[field], "value": str(value)[:40], "allowed": ", ".join(allowed)}
    raise TimetableError(field, message % facts)


def _checked_every(every: int | None, unit: str) -> int:
    largest = MAX_CALENDAR_EVERY[unit]
    is_whole = isinstance(every, int) and not isinstance(every, bool)
    if is_whole and every is not None and 1 <= every <= largest:
        return every
    message = _("Every %(every)r %(unit)s: must be a whole number from 1 to %(largest)d.")
    facts = {"every": str(every)[:40], "unit": unit, "largest": largest}
    raise TimetableError("calendar_every", message % facts)


def _checked_start(start: datetime | None) -> datetime:
    if start is None:
        raise TimetableError("calendar_start", _("Start: missing. Give a local date and time."))
    if not isinstance(start, datetime) or start.tzinfo is not None:
        message = _("Start %(start)r: must be local date and time without a time zone.")
    elif start.second or start.microsecond:
        message = _("Start %(start)r: must be a whole minute. Leave out the seconds.")
    elif not _FIRST_YEAR <= start.year <= _LAST_YEAR:
        message = _("Start %(start)r: year must be from %(first)d to %(last)d.")
    else:
        return start
    facts = {"start": str(start)[:40], "first": _FIRST_YEAR, "last": _LAST_YEAR}
    raise TimetableError("calendar_start", message % facts)


def _checked_seconds(seconds: int | None) -> int:
    is_whole = isinstance(seconds, int) and not isinstance(seconds, bool)
    if is_whole and seconds is not None and 1 <= seconds <= MAX_INTERVAL_SECONDS:
        return seconds
    message = _("Interval %(seconds)r: must be a whole number of seconds from 1 to %(largest)d.")
    facts = {"seconds": str(seconds)[:40], "largest": MAX_INTERVAL_SECONDS}
    raise TimetableError("interval_seconds", message % facts)


def _checked_instant(field: str, at: datetime | None) -> datetime:
    if at is None:
        raise TimetableError(field, _("Time: missing. Give a date, a time and a time zone."))
    try:
        return as_utc(at)
    except (ValueError, AttributeError, OverflowError):
        message = _("Time %(at)r: must be an aware datetime. Give a date, a time and a time zone.")
        raise TimetableError(field, message % {"at": str(at)[:40]}) from None


def _occurring(expression: str) -> str:
    """Return the canonical rule. Raise TimetableError if it has no date within 30 years."""
    first = Rule(fields(expression), _ANY_POLICY).next_day(_FIRST_OCCURRENCE_FROM)
    if first is not None and first < _FIRST_OCCURRENCE_UNTIL:
        return expression
    expanded = fields(expression)
    day = min(expanded.days, default=0)
    if all(day > _longest(month) for month in expanded.months):
        message = _(
            "Cron rule %(rule)r: never runs, none of its months has a day %(day)d. "
            "Choose another day, or L for the last day of the month."
        )
    else:
        message = _(
            "Cron rule %(rule)r: never runs, no date fits its day, month and weekday. "
            "Choose another day or month."
        )
    raise TimetableError("cron", message % {"rule": expression, "day": day})


def _longest(month: int) -> int:
    return calendar.monthrange(2000, month)[1]


def _default_catchup(timetable: Timetable, due_from: datetime) -> timedelta:
    period = timetable.period_after(due_from)
    if period is None:
        return _LONGEST_CATCHUP
    return min(max(period, _SHORTEST_CATCHUP), _LONGEST_CATCHUP)


def span(timetable: Timetable, *, after: datetime, until: datetime) -> Span | None:
    """Return the instants with after < instant <= until, None if there are none.

    Costs months, not instants.
    """
    first = first_after(timetable, after, ends_at=until)
    last = latest(timetable, after=after, until=until)
    if first is None or last is None:
        return None
    return Span(first=first, last=last, count=timetable.count(after, until))
