"""Cron rules against the minute-by-minute oracle, around clock changes and over decades.

DISTCRON_ORACLE_TRIPLES sets how many (rule, zone, start) triples are compared.
"""

import os
import random
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
def test_next_after_agrees_with_a_minute_scan_around_clock_changes(zone: str) -> None:
    pick = random.Random(f"starts {zone}")
    first_minutes = windows(zone, pick)
    for _ in range(max(1, TRIPLES // len(ZONES) // STARTS_PER_RULE)):
        text, first = oracle.random_rule(pick), pick.choice(first_minutes)
        walls = oracle.walls(zone, first, WINDOW)
        runs = [first + index for index in oracle.occurrences(oracle.Rule(text), walls)]
        rule = timetable.Cron(expression=text, timezone=zone)
        for _ in range(STARTS_PER_RULE):
            start = at(first) + timedelta(seconds=pick.randrange(WINDOW * 60))
            expected = next((at(run) for run in runs if at(run) > start), None)
            found = rule.next_after(start)
            if expected is None:
                assert found is None or found >= at(first + WINDOW), (text, zone, start)
            else:
                assert found == expected, (text, zone, start)


@pytest.mark.parametrize("zone", ZONES)
def test_count_between_and_latest_agree_with_a_minute_scan(zone: str) -> None:
    pick = random.Random(f"counts {zone}")
    first_minutes = windows(zone, pick)
    for _ in range(max(1, TRIPLES // len(ZONES) // 50)):
        text, first = oracle.random_rule(pick), pick.choice(first_minutes)
        walls = oracle.walls(zone, first, WINDOW)
        runs = [at(first + index) for index in oracle.occurrences(oracle.Rule(text), walls)]
        start, end = sorted(at(first + pick.randrange(WINDOW)) for _ in range(2))
        expected = [run for run in runs if start < run <= end]
        rule = timetable.Cron(expression=text, timezone=zone)
        assert rule.count(start, end) == len(expected), (text, zone, start, end)
        newest = timetable.latest(rule, after=start, until=end)
        assert newest == (expected[-1] if expected else None), (text, zone, start, end)
        if len(expected) < 200:
            assert list(rule.between(start, end)) == expected, (text, zone, start, end)


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
