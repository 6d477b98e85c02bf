"""What a person should know about a timetable or one of its instants, in the active language.

Marks are values with a code, so that pages, the command line and tests need not read
sentences. Pure: what only the database knows is passed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from distcron_app import timetable as timetables
from distcron_app.timetable import CalendarInterval, Cron, Never, Timetable
from distcron_app.timetable import grammar as cron_grammar
from distcron_app.timetable.calendars import Excluding
from distcron_app.wording.outlines import outline
from distcron_app.wording.phrases import clock_time, listed, long_date, or_words, ordinal

__all__ = ["CODES", "HERD", "RARE", "Mark", "mark", "marks"]

CODES = (
    "gap",
    "fold",
    "moved",
    "either",
    "uneven",
    "rare",
    "never",
    "missing_days",
    "herd",
    "overlap",
)
RARE = timedelta(days=400)
HERD = 20  # other schedules in one second that are worth a word

_SHORTEST_MONTH, _LONGEST_MONTH = 28, 31
_FIFTH = 5
_LOOKED_AT = 10  # instants from which the shortest period is taken
# Of minute, hour, month and weekday: how many values a field goes through before it starts over.
_CYCLES = {0: 60, 1: 24, 3: 12, 4: 7}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One thing to know: its ``code`` is one of CODES, its ``text`` a sentence."""

    code: str
    text: str


def marks(
    timetable: Timetable,
    at: datetime | None = None,
    *,
    after: datetime | None = None,
    herd: int = 0,
    p95: timedelta | None = None,
) -> list[Mark]:
    """Return the marks of the instant ``at`` or, without it, of the timetable itself.

    Of an instant: gap, fold, moved, and herd if ``herd`` other schedules start at the same
    second. Of the timetable: either, uneven, missing_days; and from ``after`` on never,
    rare, and overlap if 95 of 100 runs take up to ``p95`` and that is longer than the
    shortest of the next periods.
    """
    found = _of_timetable(timetable, after, p95) if at is None else _of_instant(timetable, at)
    return [*found, *_herd(herd)]


def mark(timetable: Timetable, at: datetime) -> str:
    """Return what a clock change does to the instant ``at`` of the timetable, or ""."""
    return next((one.text for one in _clock_marks(timetable, at)), "")


def _of_instant(timetable: Timetable, at: datetime) -> Iterator[Mark]:
    yield from _clock_marks(timetable, at)
    if not isinstance(timetable, Excluding) or timetable.timetable.matches(at):
        return
    if timetable.matches(at):
        yield Mark(code="moved", text=_("Moved here from an excluded day."))


def _clock_marks(timetable: Timetable, at: datetime) -> Iterator[Mark]:
    if isinstance(timetable, Excluding):
        timetable = timetable.timetable
    for rule in timetables.parts(timetable):
        change = timetables.clock_change(rule, at)
        if change is not None and isinstance(rule, (Cron, CalendarInterval)):
            local = at.astimezone(timetables.zone(rule.timezone))
            facts = {
                "wall": clock_time(change.wall.hour * 60 + change.wall.minute),
                "date": long_date(change.wall),
                "zone": rule.timezone,
                "time": clock_time(local.hour * 60 + local.minute),
            }
            yield Mark(code=change.kind, text=_change_message(change) % facts)
            return


def _change_message(change: timetables.ClockChange) -> str:
    if change.kind == "gap":
        return _("%(wall)s does not exist on %(date)s in %(zone)s: runs at %(time)s instead.")
    if change.fold == "first":
        return _("%(wall)s happens twice on %(date)s in %(zone)s: runs once, at the first.")
    return _("%(wall)s happens twice on %(date)s in %(zone)s: runs once, at the second.")


def _of_timetable(
    timetable: Timetable, after: datetime | None, p95: timedelta | None
) -> Iterator[Mark]:
    inner = timetable.timetable if isinstance(timetable, Excluding) else timetable
    for rule in timetables.parts(inner):
        if isinstance(rule, Cron):
            yield from _of_cron(rule.expression)
        elif isinstance(rule, CalendarInterval) and rule.unit == "months":
            yield from _clamped(rule)
    if after is not None and not isinstance(inner, Never):
        yield from _far_away(timetable, after)
        yield from _overlap(timetable, after, p95)


def _of_cron(expression: str) -> Iterator[Mark]:
    if outline(expression).dates == "either":
        text = _("Day or weekday: it runs on dates that fit either of them, not only both.")
        yield Mark(code="either", text=text)
    columns = cron_grammar.terms(timetables.canonical(expression))
    for index, column in enumerate(columns):
        for term in column:
            yield from _uneven(index, term.text)
    yield from _missing_days(expression)
    if any(term.nth == _FIFTH for term in columns[4]):
        text = _("Months without a fifth such weekday are left out.")
        yield Mark(code="missing_days", text=text)


def _uneven(index: int, term: str) -> Iterator[Mark]:
    """Yield a mark for a step over a whole field that does not fit into it."""
    start, _slash, step = term.partition("/")
    if start != "*" or not step or int(step) == 1:
        return
    facts = {"field": cron_grammar.FIELDS[index].label, "term": term, "step": int(step)}
    if index not in _CYCLES:
        message = _("%(field)s %(term)s starts over every month, so its last step is shorter.")
        yield Mark(code="uneven", text=message % facts)
        return
    cycle = _CYCLES[index]
    if cycle % int(step):
        facts["last"] = cycle - (cycle - 1) // int(step) * int(step)
        message = _("%(field)s %(term)s starts over: its last step is %(last)d, not %(step)d.")
        yield Mark(code="uneven", text=message % facts)


def _missing_days(expression: str) -> Iterator[Mark]:
    """Yield a mark for days that are written out and that some month of the rule lacks."""
    column = cron_grammar.terms(timetables.canonical(expression))[2]
    months = timetables.fields(expression).months
    days = sorted(
        {
            term.number
            for term in column
            if term.numeric.isdigit() and any(term.number > _shortest(month) for month in months)
        }
    )
    if days:
        message = _("Months without a %(days)s are left out. L is the last day of any month.")
        facts = {"days": listed(days, ordinal, or_words)}
        yield Mark(code="missing_days", text=message % facts)


def _shortest(month: int) -> int:
    """Return how many days a month has at least."""
    if month == 2:
        return _SHORTEST_MONTH
    return _LONGEST_MONTH - (month in (4, 6, 9, 11))


def _clamped(rule: CalendarInterval) -> Iterator[Mark]:
    if rule.start.day > _SHORTEST_MONTH:
        message = _("In months without a %(day)s it runs on their last day.")
        facts = {"day": ordinal(rule.start.day)}
        yield Mark(code="missing_days", text=message % facts)


def _far_away(timetable: Timetable, after: datetime) -> Iterator[Mark]:
    following = timetable.next_after(after)
    if following is None:
        yield Mark(code="never", text=_("Never runs again."))
    elif following - after > RARE:
        message = _("Runs rarely: next on %(date)s (UTC).")
        yield Mark(code="rare", text=message % {"date": long_date(following)})


def _overlap(timetable: Timetable, after: datetime, p95: timedelta | None) -> Iterator[Mark]:
    if p95 is None:
        return
    starts: list[datetime] = []
    instant = timetable.next_after(after)
    while instant is not None and len(starts) <= _LOOKED_AT:
        starts.append(instant)
        instant = timetable.next_after(instant)
    periods = [later - earlier for earlier, later in pairwise(starts)]
    if periods and min(periods) < p95:
        message = _("Runs take up to %(taken)d s, but the next one starts after %(period)d s.")
        facts = {"taken": p95.total_seconds(), "period": min(periods).total_seconds()}
        yield Mark(code="overlap", text=message % facts)


def _herd(others: int) -> Iterator[Mark]:
    if others >= HERD:
        message = ngettext(
            "%(count)d other schedule starts at the same second.",
            "%(count)d other schedules start at the same second.",
            others,
        )
        yield Mark(code="herd", text=message % {"count": others})
