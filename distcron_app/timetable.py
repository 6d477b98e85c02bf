"""All time maths: rules are checked here and turned into instants. The only user of croniter.

A timetable is a value (Cron, Interval or Once) that yields aware UTC instants. Pure: no
models, no settings, no clock; the same text, zone and ``tzdata_version()`` give the same
instants on every node. Croniter expands the fields of checked text; the walk over the
calendar and the clock changes is done here.

Cron follows Debian's cron at clock changes:

1. A rule is a wildcard if its minute or hour field starts with ``*``; otherwise it is fixed.
2. Wildcard: every UTC minute whose local time matches; nothing in a gap, both passes of a fold.
3. Fixed, gap under 3 h: the minutes jumped over run once, at the first minute after the gap.
4. Fixed, fold up to 3 h: only the first pass runs.
5. Larger jumps are corrections of the clock: nothing is made up, nothing is held back.
6. Day and weekday both restricted: either suffices (OR); if one starts with ``*``: both (AND).

Where a gap gives several minutes to one instant, that instant is one occurrence.
"""

from __future__ import annotations

import abc
import calendar
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from croniter import croniter
from django.utils.translation import gettext_lazy as _

from distcron_app import cron_calendar, cron_grammar
from distcron_app.cron_grammar import MAX_TEXT, CronFields, canonical
from distcron_app.errors import TimetableError
from distcron_app.zones import check_timezone, tzdata_version, zone

__all__ = [
    "EPOCH",
    "KINDS",
    "MAX_INTERVAL_SECONDS",
    "MAX_TEXT",
    "ClockChange",
    "Cron",
    "CronFields",
    "Interval",
    "Once",
    "Plan",
    "Span",
    "Timetable",
    "build",
    "canonical",
    "check_timezone",
    "clock_change",
    "fields",
    "first_after",
    "latest",
    "plan",
    "tzdata_version",
    "zone",
]

KINDS = ("cron", "interval", "once")
MAX_INTERVAL_SECONDS = 31_536_000  # 365 days
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_MICROSECOND = timedelta(microseconds=1)
# A fixed start makes the verdict the same at any time. 2000 to 2030 meet every pairing of
# date and weekday, leap days included, and no skipped leap year. In days since 1970.
_FIRST_OCCURRENCE_FROM = (date(2000, 1, 1) - EPOCH.date()).days
_FIRST_OCCURRENCE_UNTIL = (date(2030, 1, 1) - EPOCH.date()).days
_SHORTEST_CATCHUP = timedelta(minutes=5)
_LONGEST_CATCHUP = timedelta(hours=24)


class _Instants(abc.ABC):
    """What every timetable can do. Instants in must be aware (ValueError), instants out are UTC."""

    __slots__ = ()

    @abc.abstractmethod
    def next_after(self, after: datetime) -> datetime | None:
        """Return the first instant strictly after ``after``; None if there is none any more."""

    @abc.abstractmethod
    def count(self, start: datetime, end: datetime) -> int:
        """Return how many instants have start < instant <= end, without listing them."""

    def between(
        self, start: datetime, end: datetime, *, limit: int | None = None
    ) -> Iterator[datetime]:
        """Yield the instants with start < instant <= end in order, at most ``limit``."""
        end = _utc(end)
        instant = self.next_after(start)
        while instant is not None and instant <= end and limit != 0:
            yield instant
            limit = None if limit is None else limit - 1
            instant = self.next_after(instant)

    def matches(self, at: datetime) -> bool:
        """Return whether ``at`` is exactly one of the instants."""
        at = _utc(at)
        return self.next_after(at - _MICROSECOND) == at

    def period_after(self, after: datetime) -> timedelta | None:
        """Return the distance of the next two instants; None if there are not two."""
        first = self.next_after(after)
        second = first and self.next_after(first)
        return second - first if first and second else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cron(_Instants):
    """A cron rule in a time zone; ``expression`` is canonical. Instants are whole seconds."""

    expression: str
    timezone: str

    def next_after(self, after: datetime) -> datetime | None:
        """Return the first instant strictly after ``after``; None beyond 50 years."""
        second = cron_calendar.next_second(_rule(self.expression), self.timezone, _second(after))
        return None if second is None else EPOCH + timedelta(seconds=second)

    def count(self, start: datetime, end: datetime) -> int:
        """Return how many instants have start < instant <= end; costs months, not instants."""
        return cron_calendar.count_seconds(
            _rule(self.expression), self.timezone, _second(start), _second(end)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval(_Instants):
    """Every ``seconds`` from ``anchor`` on, which is itself an instant. Knows no time zone."""

    seconds: int
    anchor: datetime

    def next_after(self, after: datetime) -> datetime | None:
        """Return the first instant strictly after ``after``."""
        try:
            return _utc(self.anchor) + (self._index(after) + 1) * timedelta(seconds=self.seconds)
        except OverflowError:
            return None

    def count(self, start: datetime, end: datetime) -> int:
        """Return how many instants have start < instant <= end."""
        return max(0, self._index(end) - self._index(start))

    def _index(self, at: datetime) -> int:
        """Return the number of the newest instant at or before ``at``; -1 before the anchor."""
        return max(-1, (_utc(at) - _utc(self.anchor)) // timedelta(seconds=self.seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Once(_Instants):
    """A single instant."""

    at: datetime

    def next_after(self, after: datetime) -> datetime | None:
        """Return the instant if it is still to come."""
        at = _utc(self.at)
        return at if at > _utc(after) else None

    def count(self, start: datetime, end: datetime) -> int:
        """Return 1 if start < instant <= end, else 0."""
        return int(_utc(start) < _utc(self.at) <= _utc(end))


Timetable = Cron | Interval | Once


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
    """

    run: datetime | None
    coalesced: Span | None = None
    misfired: Span | None = None
    next: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockChange:
    """What a clock change did to one instant; ``wall`` is naive local time of the zone.

    ``kind`` is "gap": the rule's wall time ``wall`` did not exist and runs now instead.
    Or "fold": the wall time ``wall`` happens twice and this is the first.
    """

    kind: str
    wall: datetime


def build(
    *,
    kind: str,
    cron: str = "",
    timezone: str = "UTC",
    interval_seconds: int | None = None,
    interval_anchor: datetime | None = None,
    run_at: datetime | None = None,
) -> Timetable:
    """Return the timetable that a schedule's columns describe; columns of other kinds are ignored.

    Raise TimetableError whose ``field`` is the parameter at fault. Without
    ``interval_anchor`` the interval counts from 1970-01-01 UTC.
    """
    check_timezone(timezone)
    if kind == "cron":
        return Cron(expression=_occurring(canonical(cron)), timezone=timezone)
    if kind == "interval":
        anchor = EPOCH if interval_anchor is None else interval_anchor
        return Interval(
            seconds=_checked_seconds(interval_seconds),
            anchor=_checked_instant("interval_anchor", anchor),
        )
    if kind == "once":
        return Once(at=_checked_instant("run_at", run_at))
    message = _("Kind %(kind)r: not known. Choose one of %(kinds)s.")
    raise TimetableError("kind", message % {"kind": str(kind)[:40], "kinds": ", ".join(KINDS)})


@functools.lru_cache(maxsize=16_384)
def fields(expression: str) -> CronFields:
    """Return the numbers that the rule means. Raise TimetableError if it is refused."""
    text = canonical(expression)
    columns = cron_grammar.terms(text)
    minute, hour, day, month, weekday = (
        ",".join(term.numeric for term in column if term.nth is None) or "*" for column in columns
    )
    numbers = _expanded(f"{minute} {hour} {day} {month} {weekday}")
    only_special = [all(term.nth is not None for term in column) for column in columns]
    starts_with_star = [column[0].numeric.startswith("*") for column in columns]
    return CronFields(
        minutes=numbers[0],
        hours=numbers[1],
        days=frozenset() if only_special[2] else numbers[2],
        months=numbers[3],
        weekdays=frozenset() if only_special[4] else numbers[4],
        last_day=any(term.nth == 0 for term in columns[2]),
        nth_weekdays=frozenset((term.number, term.nth) for term in columns[4] if term.nth),
        last_weekdays=frozenset(term.number for term in columns[4] if term.nth == 0),
        wildcard=starts_with_star[0] or starts_with_star[1],
        day_or=not starts_with_star[2] and not starts_with_star[4],
    )


def first_after(
    timetable: Timetable,
    after: datetime,
    *,
    starts_at: datetime | None = None,
    ends_at: datetime | None = None,
) -> datetime | None:
    """Return the first instant after ``after`` that has starts_at <= instant <= ends_at."""
    if starts_at is not None:
        after = max(_utc(after), _utc(starts_at) - _MICROSECOND)
    instant = timetable.next_after(after)
    if instant is None or (ends_at is not None and instant > _utc(ends_at)):
        return None
    return instant


def latest(timetable: Timetable, *, after: datetime, until: datetime) -> datetime | None:
    """Return the newest instant with after < instant <= until, by bisection."""
    high = end = _utc(until)
    newest = timetable.next_after(after)
    if newest is None or newest > end:
        return None
    low = newest
    while high - low > _MICROSECOND:
        middle = low + (high - low) / 2
        found = timetable.next_after(middle)
        if found is not None and found <= end:
            low = newest = found
        else:
            high = middle
    return newest


def plan(
    timetable: Timetable,
    *,
    due_from: datetime,
    now: datetime,
    misfire_grace: timedelta,
    catchup_window: timedelta | None = None,
    ends_at: datetime | None = None,
) -> Plan:
    """Decide about the due instants from ``due_from``, the oldest, to ``now``.

    1. If the oldest is at most ``misfire_grace`` late it runs; later ones stay due.
    2. Otherwise those older than ``catchup_window`` are misfired, the newest of the
       rest runs, and the others are coalesced into it.
    3. ``next`` is the first instant after those decided upon, computed from the planned
       instant and never from the clock; None beyond ``ends_at``.

    ``catchup_window`` defaults to the period of the timetable, at least 5 minutes and at
    most 24 h. Costs months of outage, not instants.
    """
    due_from, now = _utc(due_from), _utc(now)
    until = now if ends_at is None else min(now, _utc(ends_at))
    if due_from > until:
        return Plan(run=None, next=due_from if ends_at is None or due_from <= ends_at else None)
    if now - due_from <= misfire_grace:
        return Plan(run=due_from, next=first_after(timetable, due_from, ends_at=ends_at))
    if catchup_window is None:
        catchup_window = _default_catchup(timetable, due_from)
    before = due_from - _MICROSECOND
    cut = max(before, min(now - catchup_window - _MICROSECOND, until))
    run = latest(timetable, after=cut, until=until)
    return Plan(
        run=run,
        coalesced=_span(timetable, after=cut, until=run - _MICROSECOND) if run else None,
        misfired=_span(timetable, after=before, until=cut),
        next=first_after(timetable, until, ends_at=ends_at),
    )


def clock_change(timetable: Timetable, at: datetime) -> ClockChange | None:
    """Return what a clock change did to the instant ``at`` of the timetable, if anything.

    Only fixed cron rules are moved or held back; for every other timetable None.
    """
    if not isinstance(timetable, Cron) or not timetable.matches(at):
        return None
    rule, second = _rule(timetable.expression), _second(at)
    moved = cron_calendar.moved_wall(rule, timetable.timezone, second)
    if moved is not None:
        return ClockChange(kind="gap", wall=_naive(moved))
    repeated = cron_calendar.repeated_wall(rule, timetable.timezone, second)
    return None if repeated is None else ClockChange(kind="fold", wall=_naive(repeated))


def _utc(at: datetime) -> datetime:
    if at.tzinfo is None or at.utcoffset() is None:
        raise ValueError(f"Instant {at!r}: has no time zone. Pass an aware datetime.")
    return at.astimezone(UTC)


def _second(at: datetime) -> int:
    if at.tzinfo is not UTC:
        at = _utc(at)
    elapsed = at - EPOCH
    return elapsed.days * 86_400 + elapsed.seconds


def _naive(wall: int) -> datetime:
    return EPOCH.replace(tzinfo=None) + timedelta(seconds=wall)


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
        return _utc(at)
    except (ValueError, AttributeError, OverflowError):
        message = _("Time %(at)r: must be an aware datetime. Give a date, a time and a time zone.")
        raise TimetableError(field, message % {"at": str(at)[:40]}) from None


def _occurring(expression: str) -> str:
    """Return the canonical rule. Raise TimetableError if it has no date within 30 years."""
    first = _rule(expression).next_day(_FIRST_OCCURRENCE_FROM)
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


def _expanded(text: str) -> list[frozenset[int]]:
    """Return the numbers of five numeric fields, as croniter expands them."""
    columns, _nth = croniter.expand(text)
    found = []
    for field, column in zip(cron_grammar.FIELDS, columns, strict=True):
        every = range(field.first, field.top + 1)
        found.append(frozenset(every if column == ["*"] else map(int, column)))
    return found


@functools.lru_cache(maxsize=16_384)
def _rule(expression: str) -> cron_calendar.Rule:
    return cron_calendar.Rule(fields(expression))


def _default_catchup(timetable: Timetable, due_from: datetime) -> timedelta:
    period = timetable.period_after(due_from)
    if period is None:
        return _LONGEST_CATCHUP
    return min(max(period, _SHORTEST_CATCHUP), _LONGEST_CATCHUP)


def _span(timetable: Timetable, *, after: datetime, until: datetime) -> Span | None:
    first = first_after(timetable, after, ends_at=until)
    last = latest(timetable, after=after, until=until)
    if first is None or last is None:
        return None
    return Span(first=first, last=last, count=timetable.count(after, until))
