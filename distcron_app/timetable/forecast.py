"""How many occurrences each of the coming minutes has, for many timetables at once.

Nothing is walked from instant to instant: a cron rule's day is a number with one bit per
minute, and the days of all rules are added up bit by bit. Pure: no models, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from distcron_app.timetable import zone_walk
from distcron_app.timetable.kinds import (
    EPOCH,
    MICROSECOND,
    Interval,
    Timetable,
    Union,
    WallTimetable,
    as_utc,
    mark_seconds,
    parts_by_fraction,
    second_of,
)

__all__ = ["MAX_HOURS", "counts"]

MAX_HOURS = 24 * 31
_MINUTE_MICROSECONDS = 60_000_000


def counts(timetables: Iterable[Timetable], start: datetime, *, hours: int = 24) -> list[int]:
    """Return how many instants each minute has, from the minute that ``start`` is in.

    Minute ``i`` holds the instants from 60 * i seconds, included, to 60 * (i + 1),
    excluded. Raise ValueError if ``start`` is naive or ``hours`` is not 1 to MAX_HOURS.
    """
    if not 1 <= hours <= MAX_HOURS:
        raise ValueError(f"Hours {hours!r}: must be from 1 to {MAX_HOURS}.")
    first = second_of(start) // 60 * 60
    total = _Totals(first, hours * 60)
    for timetable in timetables:
        total.add(timetable)
    return total.result()


class _Totals:
    """Counts per minute that are being added up.

    ``_planes[k]`` holds binary digit k of the count of each minute, one bit per minute, so
    that a rule is added to all minutes by a few operations on long integers.
    """

    def __init__(self, first: int, minutes: int) -> None:
        self._first = first
        self._end = first + minutes * 60
        self._minutes = minutes
        self._planes: list[int] = []
        self._others = [0] * minutes

    def add(self, timetable: Timetable) -> None:
        if isinstance(timetable, WallTimetable):
            self._add_walls(timetable)
        elif isinstance(timetable, Interval):
            self._add_interval(timetable)
        elif isinstance(timetable, Union) and timetable.is_plain:
            self._add_union(timetable)
        else:
            self._add_listed(timetable)

    def result(self) -> list[int]:
        found = self._others[:]
        for power, plane in enumerate(self._planes):
            for minute, digit in enumerate(f"{plane:b}"[::-1]):
                if digit == "1":
                    found[minute] += 1 << power
        return found

    def _add_walls(self, timetable: WallTimetable) -> None:
        carry = 0
        walked = zone_walk.masks(timetable.rule, timetable.timezone, self._first - 1, self._end - 1)
        for second, bits in walked:
            carry |= bits << (second - self._first) // 60
        for power, plane in enumerate(self._planes):
            self._planes[power], carry = plane ^ carry, plane & carry
            if not carry:
                return
        self._planes.append(carry)

    def _add_interval(self, timetable: Interval) -> None:
        if timetable.seconds < 60:
            self._add_quick_interval(timetable)
            return
        anchor = (as_utc(timetable.anchor) - self._start) // MICROSECOND
        step = timetable.seconds * 1_000_000
        first = anchor if anchor >= 0 else anchor % step
        for at in range(first, self._minutes * _MINUTE_MICROSECONDS, step):
            self._others[at // _MINUTE_MICROSECONDS] += 1

    def _add_quick_interval(self, timetable: Interval) -> None:
        """Add an interval that has several instants in each minute."""
        anchor = (as_utc(timetable.anchor) - self._start) // MICROSECOND
        step = timetable.seconds * 1_000_000
        # How many instants come before each minute: -(-x // step) is x / step rounded up.
        before = [
            max(0, -((anchor - minute * _MINUTE_MICROSECONDS) // step))
            for minute in range(self._minutes + 1)
        ]
        for minute in range(self._minutes):
            self._others[minute] += before[minute + 1] - before[minute]

    def _add_union(self, timetable: Union) -> None:
        # A fraction cut off an instant leaves it in its minute.
        for group in parts_by_fraction(timetable).values():
            marks = mark_seconds(group, self._first - 1, self._end - 1)
            for minute in range(self._minutes):
                self._others[minute] += marks.count(1, minute * 60, minute * 60 + 60)

    def _add_listed(self, timetable: Timetable) -> None:
        end = self._start + timedelta(minutes=self._minutes)
        for at in timetable.between(self._start - MICROSECOND, end - MICROSECOND):
            self._others[(at - self._start) // timedelta(minutes=1)] += 1

    @property
    def _start(self) -> datetime:
        return EPOCH + timedelta(seconds=self._first)
