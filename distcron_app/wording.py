"""A timetable in words, in the active language.

``outline()`` reduces a rule to what will be said, from the same numbers that the instants
come from; ``describe()`` only puts an outline into words. A test compares outlines with
the rules they came from, so that a sentence cannot promise other times than will run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from django.utils.dates import MONTHS, WEEKDAYS
from django.utils.translation import gettext as _
from django.utils.translation import ngettext, pgettext

from distcron_app import timetable as timetables
from distcron_app.timetable import Cron, Interval, Once, Timetable

__all__ = ["MAX_ITEMS", "Grid", "Outline", "Steps", "Times", "describe", "mark", "outline"]

MAX_ITEMS = 5  # longer lists end in "and N more"
_SHORTEST_RUN = 3  # neighbours that are said as "1 to 3"
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


def describe(timetable: Timetable, *, timezone: str = "UTC") -> str:
    """Return the timetable as a short sentence without a final stop.

    A single instant is said in ``timezone``; a cron rule always means its own zone.
    """
    if isinstance(timetable, Cron):
        return _cron_sentence(outline(timetable.expression))
    if isinstance(timetable, Interval):
        return _rhythm(timetable.seconds)
    return _once_sentence(timetable, timezone)


def mark(timetable: Timetable, at: datetime) -> str:
    """Return what a clock change does to the instant ``at`` of the timetable, or ""."""
    change = timetables.clock_change(timetable, at)
    if change is None or not isinstance(timetable, Cron):
        return ""
    local = at.astimezone(timetables.zone(timetable.timezone))
    facts = {
        "wall": _clock_time(change.wall.hour * 60 + change.wall.minute),
        "date": _date(change.wall),
        "zone": timetable.timezone,
        "time": _clock_time(local.hour * 60 + local.minute),
    }
    if change.kind == "gap":
        message = _("%(wall)s does not exist on %(date)s in %(zone)s: runs at %(time)s instead.")
    else:
        message = _("%(wall)s happens twice on %(date)s in %(zone)s: runs once, at the first.")
    return message % facts


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
    step = _step(times)
    # "At minute 15 of every hour" says more than "every hour from 00:15 to 23:15".
    is_few_of_every_hour = len(hours) == 24 and len(minutes) <= MAX_ITEMS and minutes[0] > 0
    if step and not is_few_of_every_hour:
        return Steps(step=step, first=times[0], last=times[-1])
    return Grid(minutes=tuple(minutes), hours=tuple(hours))


def _step(numbers: Sequence[int]) -> int:
    """Return the distance of neighbours if it is the same everywhere, else 0."""
    steps = {later - earlier for earlier, later in pairwise(numbers)}
    return steps.pop() if len(steps) == 1 else 0


def _cron_sentence(said: Outline) -> str:
    sentence = _dated(said, _time_words(said.time))
    if said.months and said.dates != "days":
        facts = {"rule": sentence, "months": _month_words(said.months)}
        return _("%(rule)s, in %(months)s") % facts
    return sentence


def _dated(said: Outline, time: str) -> str:
    """Return the sentence without its months, except where dates are said with them."""
    facts = {"time": time, "days": "", "weekdays": "", "months": ""}
    if said.dates == "all":
        is_obvious = not isinstance(said.time, Times)
        return time if is_obvious else _("%(time)s every day") % facts
    if said.dates == "weekdays":
        return _weekday_sentence(said, facts)
    facts["days"] = _day_words(said, _and)
    if said.dates == "days":
        return _day_sentence(said, facts)
    facts["weekdays"] = _weekday_words(said, _or)
    if said.dates == "both":
        message = _("%(time)s on the %(days)s, only if that is %(weekdays)s")
    elif said.weekdays:
        message = _("%(time)s on the %(days)s or any %(weekdays)s")
    else:
        message = _("%(time)s on the %(days)s or the %(weekdays)s")
    return message % facts


def _weekday_sentence(said: Outline, facts: dict[str, str]) -> str:
    facts["weekdays"] = _weekday_words(said, _and)
    if not said.weekdays:
        message = _("%(time)s on the %(weekdays)s of the month")
    elif len(said.weekdays) > 1:
        message = _("%(time)s, %(weekdays)s")
    elif isinstance(said.time, Times):
        message = _("%(time)s every %(weekdays)s")
    else:
        message = _("%(time)s on %(weekdays)s")
    return message % facts


def _day_sentence(said: Outline, facts: dict[str, str]) -> str:
    if said.months:
        facts["months"] = _month_words(said.months)
        return _("%(time)s on the %(days)s of %(months)s") % facts
    if said.last_day:
        return _("%(time)s on the %(days)s of the month") % facts
    return _("%(time)s on the %(days)s") % facts


def _time_words(time: Times | Steps | Grid) -> str:
    if isinstance(time, Times):
        return _("At %(times)s") % {"times": _and(map(_clock_time, time.minutes))}
    if isinstance(time, Grid):
        return _grid_words(time)
    rhythm = _rhythm(time.step * 60)
    if time.is_whole_day:
        return rhythm
    facts = {"rhythm": rhythm, "first": _clock_time(time.first), "last": _clock_time(time.last)}
    return _("%(rhythm)s from %(first)s to %(last)s") % facts


def _grid_words(grid: Grid) -> str:
    step = _step(grid.minutes)
    if step and grid.minutes[0] == 0 and grid.minutes[-1] + step == 60:
        minutes = _rhythm(step * 60)
    else:
        numbers = _listed(grid.minutes, str, _and)
        minutes = _("At minute %(minutes)s") % {"minutes": numbers}
    return _grid_sentence(minutes, grid.hours)


def _grid_sentence(minutes: str, hours: tuple[int, ...]) -> str:
    step = _step(hours)
    facts = {"minutes": minutes, "first": f"{hours[0]:02d}", "last": f"{hours[-1]:02d}"}
    if len(hours) == 24:
        return _("%(minutes)s of every hour") % facts
    if step == 1 and len(hours) >= _SHORTEST_RUN:
        return _("%(minutes)s of every hour from %(first)s to %(last)s") % facts
    if step and len(hours) > MAX_ITEMS:
        message = _("%(minutes)s, every %(step)d hours from %(first)s to %(last)s")
        return message % (facts | {"step": step})
    facts["hours"] = _listed(hours, "{:02d}".format, _and)
    return (
        ngettext("%(minutes)s in hour %(hours)s", "%(minutes)s in hours %(hours)s", len(hours))
        % facts
    )


def _day_words(said: Outline, join: Callable[[Iterable[str]], str]) -> str:
    last = [pgettext("day of the month", "last day")] if said.last_day else []
    return _listed(said.days, _ordinal, join, more=last)


def _weekday_words(said: Outline, join: Callable[[Iterable[str]], str]) -> str:
    special = [_nth_weekday(nth, weekday) for weekday, nth in said.nth_weekdays]
    special += [_nth_weekday(0, weekday) for weekday in said.last_weekdays]
    return _listed(said.weekdays, _weekday, join, more=special)


def _month_words(months: tuple[int, ...]) -> str:
    return _listed(months, lambda month: str(MONTHS[month]), _and)


def _listed(
    numbers: Sequence[int],
    name: Callable[[int], str],
    join: Callable[[Iterable[str]], str],
    *,
    more: Sequence[str] = (),
) -> str:
    """Return the numbers by name, runs as "1 to 3", then ``more``; at most MAX_ITEMS items."""
    runs = _runs(numbers)
    kept = runs[: max(0, MAX_ITEMS - len(more))] if len(runs) + len(more) > MAX_ITEMS else runs
    items = [_run_words(name, first, last) for first, last in kept] + list(more[:MAX_ITEMS])
    rest = sum(last - first + 1 for first, last in runs[len(kept) :])
    rest += max(0, len(more) - MAX_ITEMS)
    if not rest:
        return join(items)
    facts = {"items": ", ".join(items), "count": rest}
    return ngettext("%(items)s and %(count)d more", "%(items)s and %(count)d more", rest) % facts


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, last) of stretches without a hole; short ones as single numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    split: list[tuple[int, int]] = []
    for first, last in runs:
        if last - first + 1 >= _SHORTEST_RUN:
            split.append((first, last))
        else:
            split.extend((number, number) for number in range(first, last + 1))
    return split


def _run_words(name: Callable[[int], str], first: int, last: int) -> str:
    if first == last:
        return name(first)
    return _("%(first)s to %(last)s") % {"first": name(first), "last": name(last)}


def _and(items: Iterable[str]) -> str:
    *before, last = items
    if not before:
        return last
    if len(before) == 1:
        return _("%(first)s and %(last)s") % {"first": before[0], "last": last}
    return _("%(items)s and %(last)s") % {"items": ", ".join(before), "last": last}


def _or(items: Iterable[str]) -> str:
    *before, last = items
    if not before:
        return last
    if len(before) == 1:
        return _("%(first)s or %(last)s") % {"first": before[0], "last": last}
    return _("%(items)s or %(last)s") % {"items": ", ".join(before), "last": last}


def _ordinal(day: int) -> str:
    if day % 10 == 1 and day != 11:
        message = pgettext("day of the month", "%(day)dst")
    elif day % 10 == 2 and day != 12:
        message = pgettext("day of the month", "%(day)dnd")
    elif day % 10 == 3 and day != 13:
        message = pgettext("day of the month", "%(day)drd")
    else:
        message = pgettext("day of the month", "%(day)dth")
    return message % {"day": day}


def _weekday(weekday: int) -> str:
    return str(WEEKDAYS[weekday - 1])


def _nth_weekday(nth: int, weekday: int) -> str:
    messages = (
        _("last %(weekday)s"),
        _("first %(weekday)s"),
        _("second %(weekday)s"),
        _("third %(weekday)s"),
        _("fourth %(weekday)s"),
        _("fifth %(weekday)s"),
    )
    return messages[nth] % {"weekday": _weekday(weekday)}


def _clock_time(minute: int) -> str:
    facts = {"hour": minute // 60, "minute": minute % 60}
    return pgettext("time of day", "%(hour)02d:%(minute)02d") % facts


def _exact_time(at: datetime) -> str:
    if not at.second:
        return _clock_time(at.hour * 60 + at.minute)
    facts = {"hour": at.hour, "minute": at.minute, "second": at.second}
    return pgettext("time of day", "%(hour)02d:%(minute)02d:%(second)02d") % facts


def _date(on: datetime) -> str:
    facts = {"day": on.day, "month": MONTHS[on.month], "year": on.year}
    return pgettext("date", "%(day)d %(month)s %(year)d") % facts


def _rhythm(seconds: int) -> str:
    """Return "Every 5 minutes" in the largest unit that fits."""
    if seconds % 86_400 == 0:
        one, count = _("Every day"), seconds // 86_400
        many = ngettext("Every %(count)d day", "Every %(count)d days", count)
    elif seconds % 3600 == 0:
        one, count = _("Every hour"), seconds // 3600
        many = ngettext("Every %(count)d hour", "Every %(count)d hours", count)
    elif seconds % 60 == 0:
        one, count = _("Every minute"), seconds // 60
        many = ngettext("Every %(count)d minute", "Every %(count)d minutes", count)
    else:
        one, count = _("Every second"), seconds
        many = ngettext("Every %(count)d second", "Every %(count)d seconds", count)
    return one if count == 1 else many % {"count": count}


def _once_sentence(once: Once, zone: str) -> str:
    at = once.at.astimezone(timetables.zone(zone))
    facts = {"time": _exact_time(at), "date": _date(at), "zone": zone}
    return _("Once at %(time)s on %(date)s (%(zone)s)") % facts
