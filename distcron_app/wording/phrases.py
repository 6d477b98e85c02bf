"""Parts of sentences in the active language: lists, days, times, dates, rhythms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from django.utils.dates import MONTHS, WEEKDAYS
from django.utils.translation import gettext as _
from django.utils.translation import ngettext, pgettext

__all__ = [
    "MAX_ITEMS",
    "SHORTEST_RUN",
    "and_words",
    "clock_time",
    "exact_time",
    "listed",
    "long_date",
    "month_name",
    "nth_weekday",
    "or_words",
    "ordinal",
    "rhythm",
    "weekday_name",
]

MAX_ITEMS = 5  # longer lists end in "and N more"
SHORTEST_RUN = 3  # neighbours that are said as "1 to 3"


def listed(
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
        if last - first + 1 >= SHORTEST_RUN:
            split.append((first, last))
        else:
            split.extend((number, number) for number in range(first, last + 1))
    return split


def _run_words(name: Callable[[int], str], first: int, last: int) -> str:
    if first == last:
        return name(first)
    return _("%(first)s to %(last)s") % {"first": name(first), "last": name(last)}


def and_words(items: Iterable[str]) -> str:
    *before, last = items
    if not before:
        return last
    if len(before) == 1:
        return _("%(first)s and %(last)s") % {"first": before[0], "last": last}
    return _("%(items)s and %(last)s") % {"items": ", ".join(before), "last": last}


def or_words(items: Iterable[str]) -> str:
    *before, last = items
    if not before:
        return last
    if len(before) == 1:
        return _("%(first)s or %(last)s") % {"first": before[0], "last": last}
    return _("%(items)s or %(last)s") % {"items": ", ".join(before), "last": last}


def ordinal(day: int) -> str:
    if day % 10 == 1 and day != 11:
        message = pgettext("day of the month", "%(day)dst")
    elif day % 10 == 2 and day != 12:
        message = pgettext("day of the month", "%(day)dnd")
    elif day % 10 == 3 and day != 13:
        message = pgettext("day of the month", "%(day)drd")
    else:
        message = pgettext("day of the month", "%(day)dth")
    return message % {"day": day}


def weekday_name(weekday: int) -> str:
    return str(WEEKDAYS[weekday - 1])


def nth_weekday(nth: int, weekday: int) -> str:
    messages = (
        _("last %(weekday)s"),
        _("first %(weekday)s"),
        _("second %(weekday)s"),
        _("third %(weekday)s"),
        _("fourth %(weekday)s"),
        _("fifth %(weekday)s"),
    )
    return messages[nth] % {"weekday": weekday_name(weekday)}


def clock_time(minute: int) -> str:
    facts = {"hour": minute // 60, "minute": minute % 60}
    return pgettext("time of day", "%(hour)02d:%(minute)02d") % facts


def exact_time(at: datetime) -> str:
    if not at.second:
        return clock_time(at.hour * 60 + at.minute)
    facts = {"hour": at.hour, "minute": at.minute, "second": at.second}
    return pgettext("time of day", "%(hour)02d:%(minute)02d:%(second)02d") % facts


def long_date(on: datetime) -> str:
    facts = {"day": on.day, "month": MONTHS[on.month], "year": on.year}
    return pgettext("date", "%(day)d %(month)s %(year)d") % facts


def rhythm(seconds: int) -> str:
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


def month_name(month: int) -> str:
    """Return the name of a month, 1 to 12."""
    return str(MONTHS[month])
