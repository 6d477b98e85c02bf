"""A timetable in words, in the active language.

``outline()`` reduces a rule to what will be said, from the same numbers that the instants
come from; ``describe()`` only puts an outline into words. A test compares outlines with
the rules they came from, so that a sentence cannot promise other times than will run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from django.utils.translation import gettext as _
from django.utils.translation import ngettext, pgettext

from distcron_app import timetable as timetables
from distcron_app.timetable import (
    CalendarInterval,
    Cron,
    Interval,
    Never,
    Once,
    Timetable,
    Union,
    WallTimetable,
)
from distcron_app.timetable.calendars import Excluding
from distcron_app.wording.marks import Mark, mark, marks
from distcron_app.wording.outlines import Grid, Outline, Steps, Times, even_step, outline
from distcron_app.wording.phrases import (
    MAX_ITEMS,
    SHORTEST_RUN,
    and_words,
    clock_time,
    exact_time,
    listed,
    long_date,
    month_name,
    nth_weekday,
    or_words,
    ordinal,
    rhythm,
    weekday_name,
)

__all__ = [
    "MAX_ITEMS",
    "Grid",
    "Mark",
    "Outline",
    "Steps",
    "Times",
    "describe",
    "mark",
    "marks",
    "outline",
]

_SHORTEST_MONTH = 28


def describe(timetable: Timetable, *, timezone: str = "UTC") -> str:
    """Return the timetable as a short sentence without a final stop.

    A single instant is said in ``timezone``. Rules of wall time mean their own zone, which
    is said only where the rules of a union differ in it.
    """
    if isinstance(timetable, Cron):
        return _policed(_cron_sentence(outline(timetable.expression)), timetable)
    if isinstance(timetable, CalendarInterval):
        return _policed(_calendar_sentence(timetable), timetable)
    if isinstance(timetable, Interval):
        return rhythm(timetable.seconds)
    if isinstance(timetable, Once):
        return _once_sentence(timetable, timezone)
    if isinstance(timetable, Never):
        return _("Only by hand or after another schedule")
    if isinstance(timetable, Union):
        return _union_sentence(timetable, timezone)
    if isinstance(timetable, Excluding):
        return _excluding_sentence(timetable, timezone)
    raise TypeError(f"Timetable {timetable!r}: has no words.")


def _policed(sentence: str, timetable: WallTimetable) -> str:
    """Return the sentence with what it does at clock changes, where that is not usual."""
    policy = timetable.rule.policy
    if isinstance(timetable, Cron) and timetables.fields(timetable.expression).wildcard:
        return sentence
    facts = {"rule": sentence}
    if policy.second_pass:
        if policy.first_pass:
            sentence = _("%(rule)s, at both of two equal times") % facts
        else:
            sentence = _("%(rule)s, at the second of two equal times") % facts
    if not policy.shifts:
        sentence = _("%(rule)s, not when the clocks skip the time") % {"rule": sentence}
    return sentence


def _calendar_sentence(timetable: CalendarInterval) -> str:
    start = timetable.start
    facts = {
        "rhythm": _calendar_rhythm(timetable),
        "time": clock_time(start.hour * 60 + start.minute),
        "weekday": weekday_name(start.isoweekday()),
        "day": ordinal(start.day),
        "start": long_date(start),
    }
    if timetable.unit == "weeks":
        return _("%(rhythm)s on %(weekday)s at %(time)s from %(start)s") % facts
    if timetable.unit == "days":
        return _("%(rhythm)s at %(time)s from %(start)s") % facts
    if start.day <= _SHORTEST_MONTH:
        return _("%(rhythm)s on the %(day)s at %(time)s from %(start)s") % facts
    message = _("%(rhythm)s on the %(day)s or else the last day at %(time)s from %(start)s")
    return message % facts


def _calendar_rhythm(timetable: CalendarInterval) -> str:
    count = timetable.every
    if timetable.unit == "days":
        return rhythm(count * 86_400)
    if timetable.unit == "weeks":
        one, many = (
            _("Every week"),
            ngettext("Every %(count)d week", "Every %(count)d weeks", count),
        )
    else:
        one = _("Every month")
        many = ngettext("Every %(count)d month", "Every %(count)d months", count)
    return one if count == 1 else many % {"count": count}


def _union_sentence(timetable: Union, timezone: str) -> str:
    rules = list(timetables.parts(timetable))
    zones = {rule.timezone for rule in rules if isinstance(rule, WallTimetable)}
    sentences = []
    for rule in rules:
        sentence = describe(rule, timezone=timezone)
        if len(zones) > 1 and isinstance(rule, WallTimetable):
            sentence = _("%(rule)s (%(zone)s)") % {"rule": sentence, "zone": rule.timezone}
        sentences.append(sentence)
    return pgettext("between the rules of one timetable", "; ").join(sentences)


def _excluding_sentence(timetable: Excluding, timezone: str) -> str:
    facts = {"rule": describe(timetable.timetable, timezone=timezone)}
    if timetable.action == "next":
        return _("%(rule)s, on excluded days moved to the next allowed day") % facts
    if timetable.action == "previous":
        return _("%(rule)s, on excluded days moved to the previous allowed day") % facts
    return _("%(rule)s, not on excluded days") % facts


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
    facts["days"] = _day_words(said, and_words)
    if said.dates == "days":
        return _day_sentence(said, facts)
    facts["weekdays"] = _weekday_words(said, or_words)
    if said.dates == "both":
        message = _("%(time)s on the %(days)s, only if that is %(weekdays)s")
    elif said.weekdays:
        message = _("%(time)s on the %(days)s or any %(weekdays)s")
    else:
        message = _("%(time)s on the %(days)s or the %(weekdays)s")
    return message % facts


def _weekday_sentence(said: Outline, facts: dict[str, str]) -> str:
    facts["weekdays"] = _weekday_words(said, and_words)
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
        return _("At %(times)s") % {"times": and_words(map(clock_time, time.minutes))}
    if isinstance(time, Grid):
        return _grid_words(time)
    every = rhythm(time.step * 60)
    if time.is_whole_day:
        return every
    facts = {"rhythm": every, "first": clock_time(time.first), "last": clock_time(time.last)}
    return _("%(rhythm)s from %(first)s to %(last)s") % facts


def _grid_words(grid: Grid) -> str:
    step = even_step(grid.minutes)
    if step and grid.minutes[0] == 0 and grid.minutes[-1] + step == 60:
        minutes = rhythm(step * 60)
    else:
        numbers = listed(grid.minutes, str, and_words)
        minutes = _("At minute %(minutes)s") % {"minutes": numbers}
    return _grid_sentence(minutes, grid.hours)


def _grid_sentence(minutes: str, hours: tuple[int, ...]) -> str:
    step = even_step(hours)
    facts = {"minutes": minutes, "first": f"{hours[0]:02d}", "last": f"{hours[-1]:02d}"}
    if len(hours) == 24:
        return _("%(minutes)s of every hour") % facts
    if step == 1 and len(hours) >= SHORTEST_RUN:
        return _("%(minutes)s of every hour from %(first)s to %(last)s") % facts
    if step and len(hours) > MAX_ITEMS:
        message = _("%(minutes)s, every %(step)d hours from %(first)s to %(last)s")
        return message % (facts | {"step": step})
    facts["hours"] = listed(hours, "{:02d}".format, and_words)
    return (
        ngettext("%(minutes)s in hour %(hours)s", "%(minutes)s in hours %(hours)s", len(hours))
        % facts
    )


def _day_words(said: Outline, join: Callable[[Iterable[str]], str]) -> str:
    last = [pgettext("day of the month", "last day")] if said.last_day else []
    return listed(said.days, ordinal, join, more=last)


def _weekday_words(said: Outline, join: Callable[[Iterable[str]], str]) -> str:
    special = [nth_weekday(nth, weekday) for weekday, nth in said.nth_weekdays]
    special += [nth_weekday(0, weekday) for weekday in said.last_weekdays]
    return listed(said.weekdays, weekday_name, join, more=special)


def _month_words(months: tuple[int, ...]) -> str:
    return listed(months, month_name, and_words)


def _once_sentence(once: Once, zone: str) -> str:
    at = once.at.astimezone(timetables.zone(zone))
    facts = {"time": exact_time(at), "date": long_date(at), "zone": zone}
    return _("Once at %(time)s on %(date)s (%(zone)s)") % facts
