"""The kinds of timetable: values that yield aware UTC instants.

Cron, CalendarInterval, Interval, Once, Never, and Union of any of them. Each answers next,
previous, between, count and does-it-match from the same rule. Pure: no models, no
settings, no clock. Everything is memoised within fixed bounds and safe to share
between threads.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from distcron_app.timetable import zone_walk
from distcron_app.timetable.fields import fields
from distcron_app.timetable.walk import EveryDays, EveryMonths, Policy, Rule, WallRule

__all__ = [
    "EPOCH",
    "FOLDS",
    "GAPS",
    "MICROSECOND",
    "UNITS",
    "CalendarInterval",
    "Cron",
    "Interval",
    "Never",
    "Once",
    "Timetable",
    "Union",
    "WallTimetable",
    "as_utc",
    "forget_instants",
    "mark_seconds",
    "parts",
    "parts_by_fraction",
    "second_of",
]

GAPS = ("shift", "skip")
FOLDS = ("first", "second", "both")
UNITS = ("days", "weeks", "months")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)

_MEMO = 32_768  # distinct (rule, zone, instant); less than 20 MB
_DAY = 86_400
_DIGITS = bytes.maketrans(b"01", b"\x00\x01")


class Timetable(abc.ABC):
    """What every timetable can do. Instants in must be aware (ValueError), instants out are UTC."""

    __slots__ = ()

    @abc.abstractmethod
    def next_after(self, after: datetime) -> datetime | None:
        """Return the first instant strictly after ``after``; None if there is none any more."""

    @abc.abstractmethod
    def previous_before(self, before: datetime) -> datetime | None:
        """Return the last instant strictly before ``before``; None if there is none."""

    @abc.abstractmethod
    def count(self, start: datetime, end: datetime) -> int:
        """Return how many instants have start < instant <= end."""

    def between(
        self, start: datetime, end: datetime, *, limit: int | None = None
    ) -> Iterator[datetime]:
        """Yield the instants with start < instant <= end in order, at most ``limit``."""
        end = as_utc(end)
        instant = self.next_after(start)
        while instant is not None and instant <= end and limit != 0:
            yield instant
            limit = None if limit is None else limit - 1
            instant = self.next_after(instant)

    def matches(self, at: datetime) -> bool:
        """Return whether ``at`` is exactly one of the instants."""
        at = as_utc(at)
        return self.next_after(at - MICROSECOND) == at

    def period_after(self, after: datetime) -> timedelta | None:
        """Return the distance of the next two instants; None if there are not two."""
        first = self.next_after(after)
        second = first and self.next_after(first)
        return second - first if first and second else None


class WallTimetable(Timetable):
    """A timetable that names wall minutes of a time zone. Instants are whole seconds."""

    __slots__ = ()

    timezone: str

    @property
    @abc.abstractmethod
    def rule(self) -> WallRule:
        """The rule, prepared for walking."""

    def next_after(self, after: datetime) -> datetime | None:
        """Return the first instant strictly after ``after``; None beyond 50 years."""
        return _next(self.rule, self.timezone, second_of(after))

    def previous_before(self, before: datetime) -> datetime | None:
        """Return the last instant strictly before ``before``; None beyond 50 years."""
        second = -(-(as_utc(before) - EPOCH) // timedelta(seconds=1))
        found = zone_walk.previous_second(self.rule, self.timezone, second)
        return None if found is None else _instant(found)

    def count(self, start: datetime, end: datetime) -> int:
        """Return how many instants have start < instant <= end; costs months, not instants."""
        return zone_walk.count_seconds(self.rule, self.timezone, second_of(start), second_of(end))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cron(WallTimetable):
    """A cron rule in a time zone; ``expression`` is canonical.

    ``gap`` and ``fold`` say what a fixed rule does with wall times that a clock change
    skips ("shift" to the end of the gap, "skip") and repeats ("first", "second", "both").
    Rules whose minute or hour starts with ``*`` follow the real clock whatever they say.
    """

    expression: str
    timezone: str
    gap: str = "shift"
    fold: str = "first"

    @property
    def rule(self) -> WallRule:
        """The rule, prepared for walking."""
        return _cron_rule(self.expression, self.gap, self.fold)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalendarInterval(WallTimetable):
    """Every so many days, weeks or months at the wall time of ``start``, the first of them.

    ``start`` is naive local time of the zone, a whole minute. A month that lacks its day
    has its last day instead, and later months are not moved by that. ``gap`` and ``fold``
    as for a cron rule of a fixed time.
    """

    every: int
    unit: str
    start: datetime
    timezone: str
    gap: str = "shift"
    fold: str = "first"

    @property
    def rule(self) -> WallRule:
        """The rule, prepared for walking."""
        return _calendar_rule(self.every, self.unit, self.start, self.gap, self.fold)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval(Timetable):
    """Every ``seconds`` from ``anchor`` on, which is itself an instant. Knows no time zone."""

    seconds: int
    anchor: datetime

    def next_after(self, after: datetime) -> datetime | None:
        """Return the first instant strictly after ``after``."""
        return self._instant(self._index(as_utc(after)) + 1)

    def previous_before(self, before: datetime) -> datetime | None:
        """Return the last instant strictly before ``before``; None before the anchor."""
        index = self._index(as_utc(before) - MICROSECOND)
        return None if index < 0 else self._instant(index)

    def count(self, start: datetime, end: datetime) -> int:
        """Return how many instants have start < instant <= end."""
        return max(0, self._index(as_utc(end)) - self._index(as_utc(start)))

    def _instant(self, index: int) -> datetime | None:
        try:
            return as_utc(self.anchor) + index * timedelta(seconds=self.seconds)
        except OverflowError:
            return None

    def _index(self, at: datetime) -> int:
        """Return the number of the newest instant at or before ``at``; -1 before the anchor."""
        return max(-1, (at - as_utc(self.anchor)) // timedelta(seconds=self.seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Once(Timetable):
    """A single instant."""

    at: datetime

    def next_after(self, after: datetime) -> datetime | None:
        """Return the instant if it is still to come."""
        at = as_utc(self.at)
        return at if at > as_utc(after) else None

    def previous_before(self, before: datetime) -> datetime | None:
        """Return the instant if it has passed."""
        at = as_utc(self.at)
        return at if at < as_utc(before) else None

    def count(self, start: datetime, end: datetime) -> int:
        """Return 1 if start < instant <= end, else 0."""
        return int(as_utc(start) < as_utc(self.at) <= as_utc(end))


@dataclass(frozen=True, slots=True)
class Never(Timetable):
    """No instant at all: of a schedule that runs by hand or after another one only."""

    def next_after(self, after: datetime) -> datetime | None:
        """Return None."""
        return None

    def previous_before(self, before: datetime) -> datetime | None:
        """Return None."""
        return None

    def count(self, start: datetime, end: datetime) -> int:
        """Return 0."""
        return 0


@dataclass(frozen=True, slots=True)
class Union(Timetable):
    """The instants of all ``rules``; one that several of them name is one instant."""

    rules: tuple[Timetable, ...]

    def next_after(self, after: datetime) -> datetime | None:
        """Return the first instant of any rule strictly after ``after``."""
        found = (rule.next_after(after) for rule in self.rules)
        return min((instant for instant in found if instant is not None), default=None)

    def previous_before(self, before: datetime) -> datetime | None:
        """Return the last instant of any rule strictly before ``before``."""
        found = (rule.previous_before(before) for rule in self.rules)
        return max((instant for instant in found if instant is not None), default=None)

    def count(self, start: datetime, end: datetime) -> int:
        """Return how many instants have start < instant <= end; costs days, not instants.

        Unless one of the rules is of another module: then it costs instants.
        """
        if not self.is_plain:
            return sum(1 for _instant in self.between(start, end))
        return sum(
            _count_distinct(
                group,
                second_of(start - microseconds * MICROSECOND),
                second_of(end - microseconds * MICROSECOND),
            )
            for microseconds, group in parts_by_fraction(self).items()
        )

    @property
    def is_plain(self) -> bool:
        """Whether all its rules are of the kinds of this module."""
        return all(isinstance(rule, (WallTimetable, Interval, Once)) for rule in parts(self))


def as_utc(at: datetime) -> datetime:
    """Return the aware instant in UTC. Raise ValueError if it is naive."""
    if at.tzinfo is None or at.utcoffset() is None:
        raise ValueError(f"Instant {at!r}: has no time zone. Pass an aware datetime.")
    return at.astimezone(UTC)


def second_of(at: datetime) -> int:
    """Return the whole seconds since 1970, fractions cut off downwards."""
    if at.tzinfo is not UTC:
        at = as_utc(at)
    elapsed = at - EPOCH
    return elapsed.days * _DAY + elapsed.seconds


def forget_instants() -> None:
    """Empty the memo of next instants, to measure without it."""
    _next.cache_clear()


@functools.lru_cache(maxsize=_MEMO)
def _next(rule: WallRule, timezone: str, after: int) -> datetime | None:
    found = zone_walk.next_second(rule, timezone, after)
    return None if found is None else _instant(found)


def _instant(second: int) -> datetime:
    if second >= 0:  # some systems refuse earlier timestamps
        return datetime.fromtimestamp(second, UTC)
    return EPOCH + timedelta(seconds=second)


@functools.lru_cache(maxsize=16_384)
def _cron_rule(expression: str, gap: str, fold: str) -> Rule:
    expanded = fields(expression)
    if expanded.wildcard:
        gap, fold = "skip", "both"
    return Rule(expanded, _policy(gap, fold))


@functools.lru_cache(maxsize=4096)
def _calendar_rule(every: int, unit: str, start: datetime, gap: str, fold: str) -> WallRule:
    minute = (start - EPOCH.replace(tzinfo=None)) // timedelta(minutes=1)
    policy = _policy(gap, fold)
    if unit == "months":
        return EveryMonths(every=every, start=minute, policy=policy)
    days = every * 7 if unit == "weeks" else every
    return EveryDays(every=days, start=minute, policy=policy)


@functools.lru_cache(maxsize=16)
def _policy(gap: str, fold: str) -> Policy:
    return Policy(
        shifts=gap == "shift",
        first_pass=fold in ("first", "both"),
        second_pass=fold in ("second", "both"),
    )


def parts(timetable: Timetable) -> Iterator[Timetable]:
    """Yield the rules of a union, unions within it resolved; another timetable as it is."""
    if isinstance(timetable, Union):
        for rule in timetable.rules:
            yield from parts(rule)
    else:
        yield timetable


def parts_by_fraction(timetable: Timetable) -> dict[int, list[Timetable]]:
    """Return the rules of a union by the microseconds that all their instants have.

    Instants of different groups are never the same.
    """
    groups: dict[int, list[Timetable]] = {}
    for rule in parts(timetable):
        groups.setdefault(_fraction(rule), []).append(rule)
    return groups


def _fraction(rule: Timetable) -> int:
    """Return the microseconds of the second that all instants of a rule have."""
    if isinstance(rule, Interval):
        return as_utc(rule.anchor).microsecond
    return as_utc(rule.at).microsecond if isinstance(rule, Once) else 0


def _count_distinct(rules: list[Timetable], start: int, end: int) -> int:
    if len(rules) == 1:
        rule = rules[0]
        shift = _fraction(rule) * MICROSECOND
        first, last = (EPOCH + timedelta(seconds=second) + shift for second in (start, end))
        return rule.count(first, last)
    return sum(
        mark_seconds(rules, since, min(since + _DAY, end)).count(1)
        for since in range(start, end, _DAY)
    )


def mark_seconds(rules: Iterable[Timetable], start: int, end: int) -> bytearray:
    """Return a byte for each second from start + 1 to end: 1 where a rule has an instant."""
    marks = bytearray(end - start)
    by_phase: dict[int, int] = {}
    for rule in rules:
        if isinstance(rule, WallTimetable):
            for second, bits in zone_walk.masks(rule.rule, rule.timezone, start, end):
                minute, phase = divmod(second - start - 1, 60)
                by_phase[phase] = by_phase.get(phase, 0) | bits << minute
    for phase, bits in by_phase.items():  # phases do not overlap, so none overwrites another
        ones = f"{bits:b}"[::-1].encode().translate(_DIGITS)
        marks[phase : phase + 60 * (len(ones) - 1) + 1 : 60] = ones
    for rule in rules:
        if isinstance(rule, Interval):
            anchor = second_of(rule.anchor) - start - 1
            first = anchor if anchor >= 0 else anchor % rule.seconds
            marks[first :: rule.seconds] = b"\x01" * len(range(first, end - start, rule.seconds))
        elif isinstance(rule, Once) and start < second_of(rule.at) <= end:
            marks[second_of(rule.at) - start - 1] = 1
    return marks
