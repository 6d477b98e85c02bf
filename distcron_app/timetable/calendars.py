"""Days on which nothing shall run, and timetables that keep clear of them.

``Exclusions`` says why an instant is excluded; ``Excluding`` is a timetable without such
instants, or with each moved to the next or previous allowed day at the same wall time.
Pure: no models, no settings, no clock.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta

from django.utils.dates import WEEKDAYS
from django.utils.translation import gettext as _

from distcron_app.errors import TimetableError
from distcron_app.timetable import zone_walk
from distcron_app.timetable.ical import MAX_EVENTS, MAX_FILE, Event, parse_ical
from distcron_app.timetable.kinds import EPOCH, MICROSECOND, Timetable, WallTimetable, as_utc, parts
from distcron_app.timetable.rules import clock_change
from distcron_app.timetable.walk import Policy
from distcron_app.timetable.zones import check_timezone, zone

__all__ = [
    "ACTIONS",
    "MAX_EVENTS",
    "MAX_FILE",
    "MAX_SHIFT_DAYS",
    "Event",
    "Excluding",
    "Exclusions",
    "parse_ical",
]

ACTIONS = ("skip", "next", "previous")
MAX_SHIFT_DAYS = 366  # no allowed day this near: the instant is left out

_DAY = timedelta(days=1)
_GIVE_UP = timedelta(days=50 * 366)  # as far as a cron rule is searched
# The search stays this far inside the calendar, so that no date of it overflows.
_EARLIEST = datetime(60, 1, 1, tzinfo=UTC)
_LATEST = datetime(9940, 1, 1, tzinfo=UTC)
_NAIVE_EPOCH = EPOCH.replace(tzinfo=None)
_REMEMBERED_DAYS = 64
_SHIFT_FIRST = Policy(shifts=True, first_pass=True, second_pass=False)


@dataclass(frozen=True, kw_only=True)
class Exclusions:
    """Excluded local days of ``timezone``: dates, weekdays (Monday = 1 to Sunday = 7), ranges.

    Ranges include both ends. ``events`` are ranges with a name, as ``parse_ical`` returns
    them. Raise TimetableError for a weekday that is not 1 to 7 or a range that runs backwards.
    """

    dates: frozenset[date] = frozenset()
    weekdays: frozenset[int] = frozenset()
    ranges: tuple[tuple[date, date], ...] = ()
    timezone: str = "UTC"
    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        check_timezone(self.timezone)
        for weekday in self.weekdays:
            if weekday not in range(1, 8):
                message = _("Weekday %(weekday)r: must be from 1, Monday, to 7, Sunday.")
                raise TimetableError("weekdays", message % {"weekday": str(weekday)[:40]})
        for first, last in self.ranges:
            if first > last:
                message = _("Range %(first)s to %(last)s: runs backwards. Exchange its ends.")
                raise TimetableError("ranges", message % {"first": first, "last": last})

    def excluded(self, at: datetime) -> str:
        """Return why the instant is excluded, in the active language; "" if it is allowed."""
        return self.excluded_day(self.day_of(at))

    def excluded_day(self, day: date) -> str:
        """Return why a local day is excluded, in the active language; "" if it is allowed."""
        facts: dict[str, object] = {"date": day.isoformat()}
        event = self._named.covering(day)
        if event is not None and event.summary:
            return _("%(date)s is excluded: %(name)s") % (facts | {"name": event.summary})
        if day in self.dates:
            return _("%(date)s is excluded") % facts
        found = event or self._ranges.covering(day)
        if found is not None:
            facts |= {"first": found.first.isoformat(), "last": found.last.isoformat()}
            return _("%(date)s is excluded: %(first)s to %(last)s is") % facts
        if day.isoweekday() in self.weekdays:
            facts["weekday"] = WEEKDAYS[day.weekday()]
            return _("%(date)s is excluded: every %(weekday)s is") % facts
        return ""

    def allows(self, day: date) -> bool:
        """Return whether a local day is not excluded."""
        return not (
            day.isoweekday() in self.weekdays
            or day in self.dates
            or self._named.covering(day)
            or self._ranges.covering(day)
        )

    def day_of(self, at: datetime) -> date:
        """Return the local day that the instant is in."""
        return as_utc(at).astimezone(zone(self.timezone)).date()

    @functools.cached_property
    def _named(self) -> _Spans:
        return _Spans(self.events)

    @functools.cached_property
    def _ranges(self) -> _Spans:
        return _Spans([Event(first, last, "") for first, last in self.ranges])


class _Spans:
    """Ranges of days, to be asked for one that covers a day. Never changes."""

    __slots__ = ("_firsts", "_reaching")

    def __init__(self, events: Iterable[Event]) -> None:
        ordered = sorted(events)
        self._firsts = [event.first for event in ordered]
        # Of all that begin no later than each, the one that lasts longest.
        self._reaching = list(itertools.accumulate(ordered, _later_ending))

    def covering(self, day: date) -> Event | None:
        """Return a range that the day is in, or None."""
        index = bisect_right(self._firsts, day) - 1
        if index < 0 or self._reaching[index].last < day:
            return None
        return self._reaching[index]


def _later_ending(one: Event, other: Event) -> Event:
    return other if other.last > one.last else one


@dataclass(frozen=True, kw_only=True)
class Excluding(Timetable):
    """A timetable that keeps clear of excluded days.

    ``action`` "skip" leaves their instants out. "next" and "previous" move each to the
    nearest allowed day in that direction, at the same wall time, by the clock-change rule
    of the timetable; one that lands on another is the same instant. Instants without an
    allowed day within MAX_SHIFT_DAYS are left out.

    Moving costs the instants of the excluded days around, remembered per allowed day.
    """

    timetable: Timetable
    exclusions: Exclusions
    action: str = "skip"
    _known: dict[date, list[datetime]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            message = _("Action %(action)r: not known. Choose one of %(allowed)s.")
            facts = {"action": str(self.action)[:40], "allowed": ", ".join(ACTIONS)}
            raise TimetableError("exclusion_action", message % facts)

    def next_after(self, after: datetime) -> datetime | None:
        """Return the first instant strictly after ``after``; None beyond 50 years."""
        after = max(as_utc(after), _EARLIEST)
        if after >= _LATEST:
            return None
        day = self.exclusions.day_of(after) - _DAY
        # A fold at midnight puts instants of one day between those of the next.
        near = [at for later in range(3) for at in self._on(day + later * _DAY) if at > after]
        if near:
            return min(near)
        return next((self._on(one)[0] for one in self._days(day + 2 * _DAY, 1)), None)

    def previous_before(self, before: datetime) -> datetime | None:
        """Return the last instant strictly before ``before``; None beyond 50 years."""
        before = min(as_utc(before), _LATEST)
        if before <= _EARLIEST:
            return None
        day = self.exclusions.day_of(before) + _DAY
        near = [at for back in range(3) for at in self._on(day - back * _DAY) if at < before]
        if near:
            return max(near)
        return next((self._on(one)[-1] for one in self._days(day - 2 * _DAY, -1)), None)

    def count(self, start: datetime, end: datetime) -> int:
        """Return how many instants have start < instant <= end; costs instants."""
        return sum(1 for _instant in self.between(start, end))

    def left_out(self, start: datetime, end: datetime) -> Iterator[tuple[datetime, str]]:
        """Yield the instants with start < instant <= end that do not run at all, and why."""
        for at in self.timetable.between(start, end):
            reason = self.exclusions.excluded(at)
            if reason and self._target(self.exclusions.day_of(at)) is None:
                yield at, reason

    def _days(self, day: date, sign: int) -> Iterator[date]:
        """Yield the days with instants beyond ``day``, later for sign 1, earlier for -1."""
        return (found for found in self._candidates(day, sign) if self._on(found))

    def _candidates(self, day: date, sign: int) -> Iterator[date]:
        """Yield the allowed days beyond ``day`` that may have instants, in order."""
        last = min(max(day + sign * _GIVE_UP, _EARLIEST.date()), _LATEST.date())
        if self._shift == sign and not self.exclusions.allows(day):
            target = self._allowed(day, sign)  # the rest of the excluded days lands there
            if target is not None:
                yield target
                day = target
        while (last - day).days * sign > 0:
            at = self._beyond(day, sign)
            if at is None:
                return
            found = self.exclusions.day_of(at)
            target = found if self.exclusions.allows(found) else self._target(found)
            if target is not None and (target - day).days * sign > 0:
                yield target
                day = target
            else:  # it lands on a day that is done, or nowhere: so does the rest of the run
                free = self._allowed(found, sign)
                run = MAX_SHIFT_DAYS if free is None else abs((free - found).days) - 1
                day = found + sign * run * _DAY

    @property
    def _shift(self) -> int:
        return {"skip": 0, "next": 1, "previous": -1}[self.action]

    def _target(self, day: date) -> date | None:
        """Return the day that the instants of an excluded day are moved to, or None."""
        return self._allowed(day, self._shift) if self._shift else None

    def _allowed(self, day: date, sign: int) -> date | None:
        """Return the nearest allowed day beyond ``day``, or None within MAX_SHIFT_DAYS."""
        for distance in range(1, MAX_SHIFT_DAYS + 1):
            if self.exclusions.allows(day + sign * distance * _DAY):
                return day + sign * distance * _DAY
        return None

    def _beyond(self, day: date, sign: int) -> datetime | None:
        """Return the nearest instant of the timetable whose local day is beyond ``day``."""
        midnight = day + _DAY if sign > 0 else day
        first, last = self._reached(midnight)
        at: datetime | None
        if sign > 0:
            at = self.timetable.next_after(EPOCH + timedelta(seconds=first) - MICROSECOND)
        else:
            at = self.timetable.previous_before(EPOCH + timedelta(seconds=last))
        # Around a fold at midnight the edge is inside the day.
        step = self.timetable.next_after if sign > 0 else self.timetable.previous_before
        while at is not None and (self.exclusions.day_of(at) - day).days * sign <= 0:
            at = step(at)
        return at

    def _on(self, day: date) -> list[datetime]:
        """Return the instants of one local day in order, those moved there included."""
        found = self._known.get(day)
        if found is None:
            found = sorted(set(self._own(day)) | set(self._moved(day)))
            if len(self._known) >= _REMEMBERED_DAYS:
                self._known.clear()
            self._known[day] = found
        return found

    def _own(self, day: date) -> list[datetime]:
        return self._listed(day, day) if self.exclusions.allows(day) else []

    def _moved(self, day: date) -> Iterator[datetime]:
        """Yield the instants that are moved to the local day."""
        back = -self._shift
        if not back or not self.exclusions.allows(day):
            return
        free = self._allowed(day, back)
        run = MAX_SHIFT_DAYS if free is None else abs((free - day).days) - 1
        if not run:
            return
        first, last = sorted((day + back * _DAY, day + back * run * _DAY))
        times = {self._wall_time(at) for at in self._listed(first, last)}
        policy = _policy_of(self.timetable)
        for at in times:
            wall = datetime.combine(day, at.replace(microsecond=0)) - _NAIVE_EPOCH
            second = wall // timedelta(seconds=1)
            for found in zone_walk.seconds_of_wall(self.exclusions.timezone, second, policy):
                yield EPOCH + timedelta(seconds=found, microseconds=at.microsecond)

    def _listed(self, first: date, last: date) -> list[datetime]:
        """Return the timetable's own instants of the local days first..last."""
        start = EPOCH + timedelta(seconds=self._reached(first)[0]) - MICROSECOND
        end = EPOCH + timedelta(seconds=self._reached(last + _DAY)[1])
        return [
            at
            for at in self.timetable.between(start, end)
            if first <= self.exclusions.day_of(at) <= last
        ]

    def _wall_time(self, at: datetime) -> time:
        """Return the local time of an instant; of one that a gap has moved, the time meant."""
        for rule in parts(self.timetable):
            is_local = isinstance(rule, WallTimetable) and rule.timezone == self.exclusions.timezone
            change = clock_change(rule, at) if is_local else None
            if change is not None and change.kind == "gap":
                return change.wall.time()
        return at.astimezone(zone(self.exclusions.timezone)).time()

    def _reached(self, day: date) -> tuple[int, int]:
        """Return the first and last UTC second at which the local day begins."""
        wall = (day - _NAIVE_EPOCH.date()).days * 86_400
        return zone_walk.reached(self.exclusions.timezone, wall)


def _policy_of(timetable: Timetable) -> Policy:
    for rule in parts(timetable):
        if isinstance(rule, WallTimetable):
            return rule.rule.policy
    return _SHIFT_FIRST
