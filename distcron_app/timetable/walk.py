"""Rules over the calendar: which wall minutes they name. Knows no zone and no clock change.

Wall time is counted in minutes or days since 1970, so that no aware datetime is ever
added to; ``zone_walk`` turns it into instants. Everything is safe to share between threads.
"""

from __future__ import annotations

import abc
import calendar
import functools
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from datetime import date
from typing import Protocol

from distcron_app.timetable.grammar import CronFields

__all__ = [
    "DAY_MINUTES",
    "EPOCH_ORDINAL",
    "EveryDays",
    "EveryMonths",
    "Policy",
    "Rule",
    "WallRule",
]

EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
DAY_MINUTES = 1440
_MAX_MONTHS = 600  # 29 February on a Monday is up to 40 years apart
_MAX_YEAR = 9990  # later dates overflow in some zone
_MIN_MONTH = 12 * 2  # January of year 2, for the same reason
_MonthKey = tuple[int, int, int]  # month 1..12, weekday of its first day, number of days


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a rule does at clock changes of less than three hours.

    ``shifts``: wall minutes inside a gap are made up for at its end. ``first_pass`` and
    ``second_pass``: which of two equal wall minutes of a fold are instants.
    """

    shifts: bool
    first_pass: bool
    second_pass: bool


class WallRule(Protocol):
    """A rule that names wall minutes. Two of them are equal only if they are the same."""

    def __hash__(self) -> int:
        """Return a number, so that a rule can be the key of a memo."""

    @property
    def policy(self) -> Policy:
        """What happens to wall minutes that do not exist or exist twice."""

    def next_wall(self, minute: int) -> int | None:
        """Return the first wall minute of the rule >= ``minute``; None if there is none."""

    def previous_wall(self, minute: int) -> int | None:
        """Return the last wall minute of the rule <= ``minute``; None if there is none."""

    def count_walls(self, first: int, last: int) -> int:
        """Return how many wall minutes of the rule are in first..last, both included."""

    def day_times(self, day: int) -> int:
        """Return the wall minutes of one day as bits 0..1439."""


class Rule:
    """A cron rule prepared for walking.

    Shared by threads: after __init__ it only fills ``_masks``, with equal values.
    """

    __slots__ = ("_fields", "_masks", "_times", "_times_mask", "policy")

    def __init__(self, expanded: CronFields, policy: Policy) -> None:
        self._fields = expanded
        self.policy = policy
        minutes = sorted(expanded.minutes)
        hours = sorted(expanded.hours)
        self._times = array("H", [hour * 60 + minute for hour in hours for minute in minutes])
        of_hour = sum(1 << minute for minute in minutes)
        self._times_mask = sum(of_hour << hour * 60 for hour in hours)
        self._masks: dict[_MonthKey, int] = {}  # days as bits; at most 91 keys

    def next_wall(self, minute: int) -> int | None:
        """Return the first matching wall minute >= ``minute``; None if 50 years have none."""
        day, rest = divmod(minute, DAY_MINUTES)
        if self._has_day(day):
            index = bisect_left(self._times, rest)
            if index < len(self._times):
                return day * DAY_MINUTES + self._times[index]
        found = self.next_day(day + 1)
        return None if found is None else found * DAY_MINUTES + self._times[0]

    def previous_wall(self, minute: int) -> int | None:
        """Return the last matching wall minute <= ``minute``; None if 50 years have none."""
        day, rest = divmod(minute, DAY_MINUTES)
        if self._has_day(day):
            index = bisect_right(self._times, rest)
            if index:
                return day * DAY_MINUTES + self._times[index - 1]
        found = self.previous_day(day - 1)
        return None if found is None else found * DAY_MINUTES + self._times[-1]

    def next_day(self, day: int) -> int | None:
        """Return the first matching day >= ``day``; None if 50 years have none."""
        number, month, key = _day(day)
        mask = self._mask(key) >> number << number
        if mask:
            return day - number + (mask & -mask).bit_length() - 1
        for later in range(month + 1, min(month + _MAX_MONTHS + 1, _MAX_YEAR * 12)):
            first, key = _month(later)
            mask = self._mask(key)
            if mask:
                return first + (mask & -mask).bit_length() - 2
        return None

    def previous_day(self, day: int) -> int | None:
        """Return the last matching day <= ``day``; None if 50 years have none."""
        number, month, key = _day(day)
        mask = self._mask(key) & ((2 << number) - 1)
        if mask:
            return day - number + mask.bit_length() - 1
        for earlier in range(month - 1, max(month - _MAX_MONTHS, _MIN_MONTH) - 1, -1):
            first, key = _month(earlier)
            mask = self._mask(key)
            if mask:
                return first + mask.bit_length() - 2
        return None

    def count_walls(self, first: int, last: int) -> int:
        """Return how many wall minutes match in first..last, both included."""
        if last < first:
            return 0
        start, end = divmod(first, DAY_MINUTES), divmod(last + 1, DAY_MINUTES)
        whole = self._count_days(start[0], end[0]) * len(self._times)
        return whole - self._count_before(*start) + self._count_before(*end)

    def day_times(self, day: int) -> int:
        """Return the matching minutes of one day as bits 0..1439."""
        return self._times_mask if self._has_day(day) else 0

    def _count_before(self, day: int, rest: int) -> int:
        return bisect_left(self._times, rest) if self._has_day(day) else 0

    def _count_days(self, first: int, end: int) -> int:
        """Return how many days match in first..end, the end excluded."""
        (start, start_month, start_key), (stop, stop_month, stop_key) = _day(first), _day(end)
        months = range(start_month, stop_month)
        total = sum(self._mask(_month(month)[1]).bit_count() for month in months)
        total -= (self._mask(start_key) & ((1 << start) - 1)).bit_count()
        return total + (self._mask(stop_key) & ((1 << stop) - 1)).bit_count()

    def _has_day(self, day: int) -> int:
        number, _month_number, key = _day(day)
        return self._mask(key) >> number & 1

    def _mask(self, key: _MonthKey) -> int:
        """Return the matching days of such a month as bits 1..31."""
        mask = self._masks.get(key)
        if mask is None:
            month, weekday, length = key
            mask = _day_mask(self._fields, weekday, length) if month in self._fields.months else 0
            self._masks[key] = mask
        return mask


class _Every(abc.ABC):
    """Numbered wall minutes: number 0 is the start, and nothing comes before it."""

    __slots__ = ("_every", "_start", "policy")

    def __init__(self, *, every: int, start: int, policy: Policy) -> None:
        self._every = every
        self._start = start
        self.policy = policy

    def next_wall(self, minute: int) -> int | None:
        """Return the first wall minute >= ``minute``; None beyond year 9990."""
        return self._wall(self._number(minute - 1) + 1)

    def previous_wall(self, minute: int) -> int | None:
        """Return the last wall minute <= ``minute``; None before the start."""
        number = self._number(minute)
        return None if number < 0 else self._wall(number)

    def count_walls(self, first: int, last: int) -> int:
        """Return how many wall minutes are in first..last, both included."""
        return max(0, self._number(last) - self._number(first - 1))

    def day_times(self, day: int) -> int:
        """Return the minutes of one day as bits 0..1439: one bit at most."""
        wall = self.next_wall(day * DAY_MINUTES)
        return 0 if wall is None or wall // DAY_MINUTES != day else 1 << wall % DAY_MINUTES

    @abc.abstractmethod
    def _number(self, minute: int) -> int:
        """Return the number of the last wall minute <= ``minute``; -1 before the start."""

    @abc.abstractmethod
    def _wall(self, number: int) -> int | None:
        """Return the wall minute of that number; None beyond the calendar."""


class EveryDays(_Every):
    """Every so many days from the wall minute ``start`` on."""

    __slots__ = ()

    def _number(self, minute: int) -> int:
        return max(-1, (minute - self._start) // (self._every * DAY_MINUTES))

    def _wall(self, number: int) -> int | None:
        wall = self._start + number * self._every * DAY_MINUTES
        return wall if wall < _LAST_WALL else None


class EveryMonths(_Every):
    """Every so many months from the wall minute ``start`` on, always on its day of the month.

    A month without that day has its last day instead. Each date is computed from the
    start, so that 31 January, 28 February, 31 March does not drift to the 28th.
    """

    __slots__ = ("_day", "_month", "_time")

    def __init__(self, *, every: int, start: int, policy: Policy) -> None:
        super().__init__(every=every, start=start, policy=policy)
        day, self._time = divmod(start, DAY_MINUTES)
        on = date.fromordinal(day + EPOCH_ORDINAL)
        self._day = on.day
        self._month = on.year * 12 + on.month - 1

    def _number(self, minute: int) -> int:
        on = date.fromordinal(minute // DAY_MINUTES + EPOCH_ORDINAL)
        number = (on.year * 12 + on.month - 1 - self._month) // self._every
        wall = self._wall(number) if number >= 0 else None
        return max(-1, number if wall is not None and wall <= minute else number - 1)

    def _wall(self, number: int) -> int | None:
        month = self._month + number * self._every
        if month >= _MAX_YEAR * 12:
            return None
        first, (_month_number, _weekday, length) = _month(month)
        return (first + min(self._day, length) - 1) * DAY_MINUTES + self._time


def _day_mask(expanded: CronFields, first_weekday: int, length: int) -> int:
    by_day = by_weekday = 0
    for day in range(1, length + 1):
        weekday = (first_weekday + day - 1) % 7
        if day in expanded.days or (expanded.last_day and day == length):
            by_day |= 1 << day
        if (
            weekday in expanded.weekdays
            or (weekday, (day + 6) // 7) in expanded.nth_weekdays
            or (weekday in expanded.last_weekdays and day + 7 > length)
        ):
            by_weekday |= 1 << day
    return by_day | by_weekday if expanded.day_or else by_day & by_weekday


@functools.lru_cache(maxsize=8192)
def _month(month: int) -> tuple[int, _MonthKey]:
    """Return the first day since 1970 and the key of a month counted from year 0."""
    year, index = divmod(month, 12)
    weekday, length = calendar.monthrange(year, index + 1)
    first = date(year, index + 1, 1).toordinal() - EPOCH_ORDINAL
    return first, (index + 1, (weekday + 1) % 7, length)


@functools.lru_cache(maxsize=16_384)
def _day(day: int) -> tuple[int, int, _MonthKey]:
    """Return the day of its month, the month counted from year 0, and the month's key."""
    on = date.fromordinal(day + EPOCH_ORDINAL)
    month = on.year * 12 + on.month - 1
    return on.day, month, _month(month)[1]


_LAST_WALL = (date(_MAX_YEAR, 1, 1).toordinal() - EPOCH_ORDINAL) * DAY_MINUTES
