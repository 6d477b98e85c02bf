"""Cron rules walked over the calendar and the clock changes of a zone, in whole seconds.

Works on integers only: UTC seconds, and wall time counted in seconds, minutes or days
since 1970, so that no aware datetime is ever added to. The clock-change rule is that of
``timetable``. Everything is safe to share between threads.
"""

from __future__ import annotations

import calendar
import functools
from array import array
from bisect import bisect_left, bisect_right
from datetime import date

from distcron_app.cron_grammar import CronFields
from distcron_app.zones import FIRST_SECOND, LAST_SECOND, Changes, changes_around

__all__ = ["EPOCH_ORDINAL", "Rule", "count_seconds", "moved_wall", "next_second", "repeated_wall"]

EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_DAY_MINUTES = 1440
_THREE_HOURS = 3 * 3600  # where Debian's cron stops taking a jump for a clock change
_MAX_MONTHS = 600  # 29 February on a Monday is up to 40 years apart
_MAX_YEAR = 9990  # later dates overflow in some zone


class Rule:
    """A rule prepared for walking wall time, which is counted in minutes or days since 1970.

    Shared by threads: after __init__ it only fills ``_masks``, with equal values.
    """

    __slots__ = ("_fields", "_masks", "times", "wildcard")

    def __init__(self, expanded: CronFields) -> None:
        self._fields = expanded
        self.wildcard = expanded.wildcard
        self.times = array(
            "H",
            [
                hour * 60 + minute
                for hour in sorted(expanded.hours)
                for minute in sorted(expanded.minutes)
            ],
        )
        # Days as bits, by (weekday of the first day, length of the month): 28 at most.
        self._masks: dict[tuple[int, int], int] = {}

    def next_wall(self, minute: int) -> int | None:
        """Return the first matching wall minute >= ``minute``; None if 50 years have none."""
        day, rest = divmod(minute, _DAY_MINUTES)
        if self._has_day(day):
            index = bisect_left(self.times, rest)
            if index < len(self.times):
                return day * _DAY_MINUTES + self.times[index]
        found = self.next_day(day + 1)
        return None if found is None else found * _DAY_MINUTES + self.times[0]

    def next_day(self, day: int) -> int | None:
        """Return the first matching day >= ``day``; None if 50 years have none."""
        start = date.fromordinal(day + EPOCH_ORDINAL)
        month = start.year * 12 + start.month - 1
        mask = self._mask(month) >> start.day << start.day
        for later in range(month + 1, month + _MAX_MONTHS + 2):
            if mask:
                return _month(later - 1)[0] + (mask & -mask).bit_length() - 2
            if later >= _MAX_YEAR * 12:
                break
            mask = self._mask(later)
        return None

    def count_walls(self, first: int, last: int) -> int:
        """Return how many wall minutes match in first..last, both included."""
        if last < first:
            return 0
        start, end = divmod(first, _DAY_MINUTES), divmod(last + 1, _DAY_MINUTES)
        whole = self._count_days(start[0], end[0]) * len(self.times)
        return whole - self._count_before(*start) + self._count_before(*end)

    def _count_before(self, day: int, rest: int) -> int:
        return bisect_left(self.times, rest) if self._has_day(day) else 0

    def _count_days(self, first: int, end: int) -> int:
        """Return how many days match in first..end, the end excluded."""
        start, stop = (date.fromordinal(day + EPOCH_ORDINAL) for day in (first, end))
        months = range(start.year * 12 + start.month - 1, stop.year * 12 + stop.month - 1)
        total = sum(self._mask(month).bit_count() for month in months)
        total -= (self._mask_of(start) & ((1 << start.day) - 1)).bit_count()
        return total + (self._mask_of(stop) & ((1 << stop.day) - 1)).bit_count()

    def _has_day(self, day: int) -> bool:
        on = date.fromordinal(day + EPOCH_ORDINAL)
        return bool(self._mask_of(on) >> on.day & 1)

    def _mask_of(self, on: date) -> int:
        return self._mask(on.year * 12 + on.month - 1)

    def _mask(self, month: int) -> int:
        """Return the matching days of a month as bits 1..31; ``month`` counts from year 0."""
        if month % 12 + 1 not in self._fields.months:
            return 0
        shape = _month(month)[1]
        mask = self._masks.get(shape)
        if mask is None:
            mask = self._masks[shape] = _day_mask(self._fields, *shape)
        return mask


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
def _month(month: int) -> tuple[int, tuple[int, int]]:
    """Return the month's first day since 1970 and its (weekday of that day, length)."""
    year, index = divmod(month, 12)
    weekday, length = calendar.monthrange(year, index + 1)
    return date(year, index + 1, 1).toordinal() - EPOCH_ORDINAL, ((weekday + 1) % 7, length)


def _minute_from(wall: int) -> int:
    """Return the first whole minute at or after the wall second."""
    return -(-wall // 60)


def next_second(rule: Rule, timezone: str, after: int) -> int | None:
    """Return the first UTC second > ``after`` at which the rule runs."""
    after = max(after, FIRST_SECOND)
    second = after
    while second < LAST_SECOND:
        known = changes_around(timezone, after, second)
        found = _walk(rule, known, after)
        if found is None or found < known.until:
            return found
        second = found  # beyond the table: walk again with one that reaches it
    return None


def moved_wall(rule: Rule, timezone: str, second: int) -> int | None:
    """Return the wall second inside a gap that ``rule`` makes up for at ``second``, or None."""
    known = changes_around(timezone, second, second)
    index = bisect_left(known.at, second)
    if rule.wildcard or index == len(known.at) or known.at[index] != second:
        return None
    skipped = rule.next_wall(_minute_from(known.ends[index]))
    if skipped is None or not 0 < known.starts[index] - known.ends[index] < _THREE_HOURS:
        return None
    return skipped * 60 if skipped * 60 < known.starts[index] else None


def repeated_wall(rule: Rule, timezone: str, second: int) -> int | None:
    """Return the wall second of ``second`` if a fold repeats it and ``rule`` sits that out."""
    known = changes_around(timezone, second, second)
    index = bisect_right(known.at, second)
    wall = second + known.offsets[index]
    if rule.wildcard or index == len(known.at) or not _is_held_back(known, index):
        return None
    return wall if known.starts[index] <= wall else None


def _walk(rule: Rule, known: Changes, after: int) -> int | None:
    index = bisect_right(known.at, after)
    bound = after + known.offsets[index] + 1
    if index and _is_held_back(known, index - 1) and not rule.wildcard:
        bound = max(bound, known.ends[index - 1])  # the first pass has run up to there
    wall = rule.next_wall(_minute_from(bound))
    while wall is not None and index < len(known.at) and wall * 60 >= known.ends[index]:
        gap = known.starts[index] - known.ends[index]
        if gap > 0 and wall * 60 < known.starts[index]:
            if not rule.wildcard and gap < _THREE_HOURS:
                return known.at[index]
            wall = rule.next_wall(_minute_from(known.starts[index]))
        elif gap < 0 and (rule.wildcard or not _is_held_back(known, index)):
            wall = rule.next_wall(_minute_from(known.starts[index]))
        index += 1
    return None if wall is None else wall * 60 - known.offsets[index]


def _is_held_back(known: Changes, index: int) -> bool:
    """Return whether change ``index`` is a fold whose second pass fixed rules sit out."""
    return 0 < known.ends[index] - known.starts[index] <= _THREE_HOURS


def count_seconds(rule: Rule, timezone: str, start: int, end: int) -> int:
    """Return how many UTC seconds with start < second <= end run the rule."""
    start, end = max(start, FIRST_SECOND), min(end, LAST_SECOND)
    if end <= start:
        return 0
    known = changes_around(timezone, start, end)
    total = 0
    for index in range(bisect_right(known.at, start), bisect_right(known.at, end) + 1):
        begins = known.at[index - 1] if index else start
        stops = known.at[index] if index < len(known.at) else end + 1
        total += _count_stretch(rule, known, index, max(start + 1, begins), min(end + 1, stops))
        if index and start < begins:
            total += _replays(rule, known, index - 1)
    return total


def _count_stretch(rule: Rule, known: Changes, index: int, first: int, stop: int) -> int:
    """Return the matches of one stretch in first..stop, UTC seconds, the stop excluded."""
    low = first + known.offsets[index]
    if index and _is_held_back(known, index - 1) and not rule.wildcard:
        low = max(low, known.ends[index - 1])
    return rule.count_walls(_minute_from(low), _minute_from(stop + known.offsets[index]) - 1)


def _replays(rule: Rule, known: Changes, index: int) -> int:
    """Return 1 if change ``index`` is a gap after which the rule runs only to catch up."""
    start, end = known.starts[index], known.ends[index]
    if rule.wildcard or not 0 < start - end < _THREE_HOURS:
        return 0
    skipped = rule.count_walls(_minute_from(end), _minute_from(start) - 1)
    return int(
        bool(skipped) and not (start % 60 == 0 and rule.next_wall(start // 60) == start // 60)
    )
