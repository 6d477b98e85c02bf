"""Cron rules against the minute-by-minute oracle, around clock changes and over decades.

DISTCRON_ORACLE_TRIPLES sets how many (rule, zone, start) triples are compared.
"""

import os
import random
from bisect import bisect_left, bisect_right
from datetime import UTC, datetime, timedelta

import pytest
from croniter import croniter

from distcron_app import timetable
from tests import oracle

TRIPLES = int(os.environ.get("DISTCRON_ORACLE_TRIPLES", "20000"))
STARTS_PER_RULE = 10
WINDOW = 3 * oracle.DAY
ZONES = [
    "Asia/Jakarta",
    "America/New_York",
    "Europe/London",
    "Europe/Lisbon",
    "Australia/Lord_Howe",
    "Pacific/Chatham",
    "Antarctica/Troll",
    "Antarctica/Casey",
    "America/Santiago",
    "America/Sao_Paulo",
    "Africa/Casablanca",
    "Pacific/Apia",
    "America/St_Johns",
    "Asia/Kathmandu",
    "America/Nuuk",
    "Africa/Cairo",
    "America/Asuncion",
    "Asia/Tehran",
]


POLICIES = [("shift", "first")] * 3 + [
    (gap, fold) for gap in timetable.GAPS for fold in timetable.FOLDS
]


def at(minute: int) -> datetime:
    return oracle.EPOCH + timedelta(minutes=minute)


def windows(zone: str, pick: random.Random) -> list[int]:
    """Return first minutes of windows around changes; any window where clocks never change."""
    days = oracle.change_days(zone, 1985, 2036)
    if not days:
        days = [pick.randrange(7_889_400, 34_712_640, oracle.DAY) for _ in range(4)]
    chosen = pick.sample(days, min(len(days), max(6, TRIPLES // 50_000)))
    return [day - oracle.DAY for day in chosen]


@pytest.mark.parametrize("zone", ZONES)
def test_next_previous_and_match_agree_with_a_minute_scan_around_clock_changes(zone: str) -> None:
    pick = random.Random(f"starts {zone}")
    first_minutes = windows(zone, pick)
    for _ in range(max(1, TRIPLES // len(ZONES) // STARTS_PER_RULE)):
        text, first = oracle.random_rule(pick), pick.choice(first_minutes)
        gap, fold = pick.choice(POLICIES)
        walls = oracle.walls(zone, first, WINDOW)
        indexes = oracle.occurrences(oracle.Rule(text), walls, gap=gap, fold=fold)
        rule = timetable.Cron(expression=text, timezone=zone, gap=gap, fold=fold)
        compare(rule, [at(first + index) for index in indexes], first, pick)


@pytest.mark.parametrize("zone", ZONES)
def test_calendar_interval_agrees_with_a_minute_scan_around_clock_changes(zone: str) -> None:
    pick = random.Random(f"calendar {zone}")
    first_minutes = windows(zone, pick)
    for _ in range(max(1, TRIPLES // len(ZONES) // 200)):
        first = pick.choice(first_minutes)
        walls = oracle.walls(zone, first, WINDOW)
        unit, every = pick.choice(timetable.UNITS), pick.randint(1, 3)
        day = pick.choice(walls) // oracle.DAY - pick.choice([0, 0, 0, 7, 14, 28, 31, 59, 61, 365])
        start = day * oracle.DAY + pick.choice(walls) % oracle.DAY
        gap, fold = pick.choice(POLICIES)
        scanned = oracle.Every(every, unit, start)
        indexes = oracle.occurrences(scanned, walls, gap=gap, fold=fold)
        rule = timetable.CalendarInterval(
            every=every,
            unit=unit,
            start=at(start).replace(tzinfo=None),
            timezone=zone,
            gap=gap,
            fold=fold,
        )
        compare(rule, [at(first + index) for index in indexes], first, pick)


def compare(
    rule: timetable.Timetable, runs: list[datetime], first: int, pick: random.Random
) -> None:
    """Check next, previous and match at random seconds of the window against its runs."""
    for _ in range(STARTS_PER_RULE):
        start = at(first) + timedelta(seconds=pick.randrange(WINDOW * 60))
        if pick.random() < 0.3 and runs:
            start = pick.choice(runs)
        index = bisect_right(runs, start)
        found = rule.next_after(start)
        if index == len(runs):
            assert found is None or found >= at(first + WINDOW), (rule, start)
        else:
            assert found == runs[index], (rule, start)
        index = bisect_left(runs, start)
        found = rule.previous_before(start)
        if index == 0:
            assert found is None or found < at(first), (rule, start)
        else:
            assert found == runs[index - 1], (rule, start)
        assert rule.matches(start) == (start in runs), (rule, start)


@pytest.mark.parametrize("zone", ZONES)
def test_count_between_and_latest_agree_with_a_minute_scan(zone: str) -> None:
    pick = random.Random(f"counts {zone}")
    first_minutes = windows(zone, pick)
    for _ in range(max(1, TRIPLES // len(ZONES) // 50)):
        text, first = oracle.random_rule(pick), pick.choice(first_minutes)
        gap, fold = pick.choice(POLICIES)
        walls = oracle.walls(zone, first, WINDOW)
        indexes = oracle.occurrences(oracle.Rule(text), walls, gap=gap, fold=fold)
        runs = [at(first + index) for index in indexes]
        start, end = sorted(at(first + pick.randrange(WINDOW)) for _ in range(2))
        expected = [run for run in runs if start < run <= end]
        rule = timetable.Cron(expression=text, timezone=zone, gap=gap, fold=fold)
        assert rule.count(start, end) == len(expected), (rule, start, end)
        assert timetable.Union((rule, rule)).count(start, end) == len(expected), (rule, start, end)
        newest = timetable.latest(rule, after=start, until=end)
        assert newest == (expected[-1] if expected else None), (rule, start, end)
        if len(expected) < 200:
            assert list(rule.between(start, end)) == expected, (rule, start, end)


@pytest.mark.parametrize("zone", ["America/New_York", "Antarctica/Casey", "Pacific/Apia"])
def test_two_readings_of_debian_agree_with_each_other(zone: str) -> None:
    pick = random.Random(f"readings {zone}")
    for first in windows(zone, pick)[:3]:
        walls = oracle.walls(zone, first, WINDOW)
        for _ in range(10):
            rule = oracle.Rule(oracle.random_rule(pick))
            if not rule.wildcard:
                marked = oracle.policed(rule, walls, gap="shift", fold="first")
                assert marked == oracle.occurrences(rule, walls)


def test_utc_agrees_with_a_day_scan_over_decades() -> None:
    pick = random.Random("calendar")
    for _ in range(300):
        text = oracle.random_rule(pick)
        start = pick.randrange(0, 80 * 365 * oracle.DAY)
        wall = oracle.Rule(text).next_wall(start, days=45 * 366)
        rule = timetable.Cron(expression=text, timezone="UTC")
        expected = None if wall is None else at(wall)
        assert rule.next_after(at(start)) == expected, (text, at(start))


def test_utc_agrees_with_croniter_where_one_day_field_is_free() -> None:
    pick = random.Random("croniter")
    compared = 0
    while compared < 150:
        text = oracle.random_rule(pick)
        fields = text.split()
        if fields[2] != "*" and fields[4] != "*":
            continue
        start = at(pick.randrange(0, 60 * 365 * oracle.DAY))
        try:
            expected = croniter(text.lower(), start).get_next(datetime)
        except ValueError:  # croniter finds no date
            continue
        rule = timetable.Cron(expression=text, timezone="UTC")
        assert rule.next_after(start) == expected, (text, start)
        compared += 1


def test_oracle_itself_sees_both_sides_of_a_gap() -> None:
    first = int(datetime(2026, 3, 8, 6, tzinfo=UTC).timestamp()) // 60
    walls = oracle.walls("America/New_York", first, 120)
    assert oracle.occurrences(oracle.Rule("30 2 * * *"), walls) == [60]
    assert oracle.occurrences(oracle.Rule("*/30 2 * * *"), walls) == []
