"""From checked cron text to the numbers it means. The only user of croniter.

Croniter sees one checked field at a time, in digits, and never a date.
"""

from __future__ import annotations

import functools

from croniter import croniter

from distcron_app.timetable import grammar as cron_grammar
from distcron_app.timetable.grammar import CronFields, Term, canonical

__all__ = ["fields"]


# Few rules have any, and an empty set of its own costs each of the others 216 bytes.
_NONE: frozenset[int] = frozenset()
_NO_PAIRS: frozenset[tuple[int, int]] = frozenset()


@functools.lru_cache(maxsize=16_384)
def fields(expression: str) -> CronFields:
    """Return the numbers that the rule means. Raise TimetableError if it is refused."""
    columns = cron_grammar.terms(canonical(expression))
    minutes, hours, days, months, weekdays = map(_numbers, range(5), columns)
    starts_with_star = [column[0].numeric.startswith("*") for column in columns]
    return CronFields(
        minutes=minutes,
        hours=hours,
        days=days,
        months=months,
        weekdays=weekdays,
        last_day=any(term.nth == 0 for term in columns[2]),
        nth_weekdays=frozenset((term.number, term.nth) for term in columns[4] if term.nth)
        or _NO_PAIRS,
        last_weekdays=frozenset(term.number for term in columns[4] if term.nth == 0) or _NONE,
        wildcard=starts_with_star[0] or starts_with_star[1],
        day_or=not starts_with_star[2] and not starts_with_star[4],
    )


def _numbers(index: int, column: tuple[Term, ...]) -> frozenset[int]:
    """Return the numbers of a field, without those that L and # stand for."""
    text = ",".join(term.numeric for term in column if term.nth is None)
    return _expanded(index, text) if text else frozenset()


@functools.lru_cache(maxsize=4096)
def _expanded(index: int, text: str) -> frozenset[int]:
    """Return the numbers of one numeric field, as croniter expands it."""
    field = cron_grammar.FIELDS[index]
    texts = ["*"] * len(cron_grammar.FIELDS)
    texts[index] = text
    columns, _nth = croniter.expand(" ".join(texts))
    if "*" in columns[index]:  # alone, or what "0,*" leaves
        return frozenset(range(field.first, field.top + 1))
    return frozenset(map(int, columns[index]))
