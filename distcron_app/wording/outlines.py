"""What is to be said about a cron rule, as a structure that can be tested.

Made from the same numbers that the instants come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from distcron_app import timetable as timetables
from distcron_app.wording.phrases import MAX_ITEMS

__all__ = ["Grid", "Outline", "Steps", "Times", "even_step", "outline"]

_DAY_MINUTES = 1440


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """A few times of day, in minutes since midnight."""

    minutes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Every ``step`` minutes from the minute of day ``first`` to ``last``, both included."""

    step: int
    first: int
    last: int

    @property
    def is_whole_day(self) -> bool:
        """Return whether the rhythm starts at midnight and goes on evenly past the next."""
        return self.first == 0 and self.last + self.step == _DAY_MINUTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Each of ``minutes`` in each of ``hours``."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What is said about a cron rule. Weekdays count from Monday = 1 to Sunday = 7.

    ``dates`` tells which of the day fields count: "all" (every day), "days", "weekdays",
    "either" (OR) or "both" (AND). ``months`` is empty for all.
    """

    time: Times | Steps | Grid
    dates: str
    days: tuple[int, ...]
    last_day: bool
    weekdays: tuple[int, ...]
    nth_weekdays: tuple[tuple[int, int], ...]
    last_weekdays: tuple[int, ...]
    months: tuple[int, ...]


def outline(expression: str) -> Outline:
    """Return what to say about a rule. Raise TimetableError if it is refused."""
    found = timetables.fields(expression)
    any_day, any_weekday = len(found.days) == 31, len(found.weekdays) == 7
    if found.day_or:
        dates = "all" if any_day or any_weekday else "either"
    elif any_day or any_weekday:
        dates = "all" if any_day and any_weekday else "weekdays" if any_day else "days"
    else:
        dates = "both"
    return Outline(
        time=_time(sorted(found.minutes), sorted(found.hours)),
        dates=dates,
        days=tuple(sorted(found.days)),
        last_day=found.last_day,
        weekdays=tuple(sorted(map(_from_monday, found.weekdays))),
        nth_weekdays=tuple(sorted((_from_monday(day), nth) for day, nth in found.nth_weekdays)),
        last_weekdays=tuple(sorted(map(_from_monday, found.last_weekdays))),
        months=tuple(sorted(found.months)) if len(found.months) < 12 else (),
    )


def _from_monday(weekday: int) -> int:
    return weekday or 7


def _time(minutes: Sequence[int], hours: Sequence[int]) -> Times | Steps | Grid:
    times = [hour * 60 + minute for hour in hours for minute in minutes]
    if len(times) <= MAX_ITEMS:
        return Times(minutes=tuple(times))
    step = even_step(times)
    # "At minute 15 of every hour" says more than "every hour from 00:15 to 23:15".
    is_few_of_every_hour = len(hours) == 24 and len(minutes) <= MAX_ITEMS and minutes[0] > 0
    if step and not is_few_of_every_hour:
        return Steps(step=step, first=times[0], last=times[-1])
    return Grid(minutes=tuple(minutes), hours=tuple(hours))


def even_step(numbers: Sequence[int]) -> int:
    """Return the distance of neighbours if it is the same everywhere, else 0."""
    steps = {later - earlier for earlier, later in pairwise(numbers)}
    return steps.pop() if len(steps) == 1 else 0
