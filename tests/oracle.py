"""A second, slow reading of the cron rule, to check the fast one against.

It shares no code with the app: its own parser, zone data through zoneinfo, and a
simulation of Debian's cron that looks at one minute after the other. Minutes are
integers since 1970, UTC or wall time.
"""

from __future__ import annotations

import calendar
import random
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from importlib import resources
from zoneinfo import ZoneInfo

DAY = 1440
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NAMES = {
    **{name: str(i + 1) for i, name in enumerate("jan feb mar apr may jun jul aug".split())},  # noqa: SIM905
    **{"sep": "9", "oct": "10", "nov": "11", "dec": "12"},
    **{"sun": "0", "mon": "1", "tue": "2", "wed": "3", "thu": "4", "fri": "5", "sat": "6"},
}


class Rule:
    """A parsed rule that answers for one wall minute."""

    def __init__(self, expression: str) -> None:
        minute, hour, self._day, month, self._weekday = expression.lower().split()
        self.wildcard = minute[0] == "*" or hour[0] == "*"
        self._both = self._day[0] == "*" or self._weekday[0] == "*"
        self._months = plain(month, 1, 12)
        self._days = plain(self._day, 1, 31)
        self._weekdays = {number % 7 for number in plain(self._weekday, 0, 7)}
        minutes, hours = plain(minute, 0, 59), plain(hour, 0, 23)
        self._times = [h in hours and m in minutes for h in range(24) for m in range(60)]
        self._known: dict[int, bool] = {}

    def matches(self, wall: int) -> bool:
        """Return whether the rule names this wall minute."""
        return self._times[wall % DAY] and self.matches_day(wall // DAY)

    def matches_day(self, day: int) -> bool:
        """Return whether the rule names this day, counted from 1970."""
        if day not in self._known:
            self._known[day] = self._names(date(1970, 1, 1) + timedelta(days=day))
        return self._known[day]

    def next_wall(self, after: int, days: int) -> int | None:
        """Return the first wall minute > ``after``, looking ``days`` ahead, one by one."""
        for day in range(after // DAY, after // DAY + days):
            if self.matches_day(day):
                for wall in range(max(day * DAY, after + 1), (day + 1) * DAY):
                    if self._times[wall % DAY]:
                        return wall
        return None

    def _names(self, on: date) -> bool:
        if on.month not in self._months:
            return False
        by_day, by_weekday = self._names_day(on), self._names_weekday(on)
        return by_day and by_weekday if self._both else by_day or by_weekday

    def _names_day(self, on: date) -> bool:
        is_last = on.day == calendar.monthrange(on.year, on.month)[1]
        return on.day in self._days or (is_last and "l" in self._day.split(","))

    def _names_weekday(self, on: date) -> bool:
        weekday = on.isoweekday() % 7
        nth = (on.day - 1) // 7 + 1
        is_last = (on + timedelta(days=7)).month != on.month
        return weekday in self._weekdays or any(
            weekday == _weekday_of(term) and (term[-1] == str(nth) if "#" in term else is_last)
            for term in self._weekday.split(",")
            if "#" in term or term[0] == "l"
        )


def _weekday_of(term: str) -> int:
    name = term.partition("#")[0] if "#" in term else term[1:]
    return int(NAMES.get(name, name)) % 7


def plain(field: str, low: int, high: int) -> set[int]:
    """Return the numbers of a field, without those that L and # stand for."""
    numbers: set[int] = set()
    for term in field.split(","):
        if "#" in term or (term[0] == "l"):
            continue
        span, _, step = term.partition("/")
        if span == "*":
            first, last = low, high if high != 7 else 6
        else:
            ends = [int(NAMES.get(end, end)) for end in span.split("-")]
            first, last = ends[0], ends[-1]
        numbers.update(range(first, last + 1, int(step or 1)))
    return numbers


class Every:
    """Every N days, weeks or months from a wall minute on, asked minute by minute."""

    wildcard = False

    def __init__(self, every: int, unit: str, start: int) -> None:
        self._every, self._unit, self._start = every, unit, start
        self._first = date(1970, 1, 1) + timedelta(days=start // DAY)

    def matches(self, wall: int) -> bool:
        """Return whether this wall minute is one of them."""
        if wall < self._start or wall % DAY != self._start % DAY:
            return False
        on = date(1970, 1, 1) + timedelta(days=wall // DAY)
        if self._unit != "months":
            return (on - self._first).days % (
                self._every * (7 if self._unit == "weeks" else 1)
            ) == 0
        months = (on.year - self._first.year) * 12 + on.month - self._first.month
        is_last = (on + timedelta(days=1)).day == 1
        on_its_day = on.day == self._first.day or (is_last and on.day < self._first.day)
        return months % self._every == 0 and on_its_day


def occurrences(
    rule: Rule | Every, walls: list[int], *, gap: str = "shift", fold: str = "first"
) -> list[int]:
    """Return the indexes of the minutes at which the rule runs under its policies."""
    if rule.wildcard:
        return [index for index, wall in enumerate(walls) if rule.matches(wall)]
    if (gap, fold) == ("shift", "first"):
        return _debian(rule, walls)
    return policed(rule, walls, gap=gap, fold=fold)


def policed(rule: Rule | Every, walls: list[int], *, gap: str, fold: str) -> list[int]:
    """Return the indexes at which a fixed rule runs: passes of folds marked, gaps made up for."""
    found, held_back = set(), set()
    for index in range(1, len(walls)):
        jump = walls[index] - walls[index - 1] - 1
        skipped = range(walls[index] - jump, walls[index]) if 0 < jump < 180 else ()
        if gap == "shift" and any(map(rule.matches, skipped)):
            found.add(index)
        if -180 <= jump < 0 and fold == "first":
            held_back.update(range(index, index - jump))
        if -180 <= jump < 0 and fold == "second":
            held_back.update(range(index + jump, index))
    found.update(
        index for index, wall in enumerate(walls) if index not in held_back and rule.matches(wall)
    )
    return sorted(found)


def _debian(rule: Rule | Every, walls: list[int]) -> list[int]:
    """Return the indexes of the minutes at which Debian's cron runs the rule.

    ``walls`` is the wall clock read once a minute; a jump of less than 3 h forward is made
    up for, one of up to 3 h back is sat out by fixed rules, and a larger one is a
    correction. Several runs within one minute count once.
    """
    found = []
    reached = walls[0] - 1
    for index, wall in enumerate(walls):
        skipped = wall - reached - 1
        if 0 < skipped < 180:
            due = any(rule.matches(missed) for missed in range(reached + 1, wall + 1))
        else:
            if skipped >= 180 or skipped < -180:
                reached = wall - 1
            due = wall > reached and rule.matches(wall)
        reached = max(reached, wall)
        if due:
            found.append(index)
    return found


@lru_cache(maxsize=64)
def zone(name: str) -> ZoneInfo:
    """Return the zone from the tzdata package, whatever the system has."""
    with resources.files("tzdata.zoneinfo").joinpath(*name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


@lru_cache(maxsize=256)
def walls(name: str, first: int, count: int) -> list[int]:
    """Return the wall minute of each of ``count`` UTC minutes from ``first`` on."""
    naive_epoch = EPOCH.replace(tzinfo=None)
    minute = timedelta(minutes=1)
    return [
        (datetime.fromtimestamp(at * 60, zone(name)).replace(tzinfo=None) - naive_epoch) // minute
        for at in range(first, first + count)
    ]


@lru_cache(maxsize=64)
def change_days(name: str, first_year: int, last_year: int) -> list[int]:
    """Return the first UTC minute of each day within which the zone's offset changes."""
    day = int(datetime(first_year, 1, 1, tzinfo=UTC).timestamp()) // 60
    end = int(datetime(last_year, 1, 1, tzinfo=UTC).timestamp()) // 60
    offset = None
    found = []
    while day < end:
        seen = datetime.fromtimestamp(day * 60, zone(name)).utcoffset()
        if offset is not None and seen != offset:
            found.append(day - DAY)
        offset = seen
        day += DAY
    return found


def random_rule(pick: random.Random) -> str:
    """Return a valid rule, dense around the hours at which clocks change."""
    minute = pick.choice(["*", f"*/{pick.randint(2, 31)}", _some(pick, 0, 59), _some(pick, 0, 59)])
    few = [_some(pick, 0, 4), _some(pick, 0, 4), _some(pick, 0, 23), "23", "22,23,0", "1-3"]
    hour = pick.choice(["*", f"*/{pick.randint(2, 9)}", "0-23", *few])
    day = pick.choice(["*"] * 6 + [f"*/{pick.randint(2, 9)}", _some(pick, 1, 31), "1-31", "L"])
    weekday = pick.choice(
        ["*"] * 6
        + [_some(pick, 0, 7), f"*/{pick.randint(2, 3)}", "1-7", "sat,sun"]
        + [f"{pick.randint(0, 7)}#{pick.randint(1, 5)}", f"L{pick.randint(0, 7)}"]
    )
    month = pick.choice(["*"] * 6 + [_some(pick, 1, 12), "*/3", "mar,oct", "3-4,9-11"])
    return f"{minute} {hour} {day} {month} {weekday}"


def _some(pick: random.Random, low: int, high: int) -> str:
    one = pick.randint(low, high)
    if pick.random() < 0.4:
        return str(one)
    if pick.random() < 0.5:
        items = [str(pick.randint(low, high)) for _ in range(pick.randint(2, 4))]
        return ",".join([*items, "*"] if pick.random() < 0.05 else items)
    first = pick.randint(low, high - 1)
    last = pick.randint(first + 1, high)
    step = pick.randint(1, last - first)
    return f"{first}-{last}" + (f"/{step}" if step > 1 else "")
