"""Counts per minute against a listing of the same timetables."""

import random
import time
from datetime import UTC, datetime, timedelta

import pytest

from distcron_app.timetable import (
    CalendarInterval,
    Cron,
    Interval,
    Once,
    Timetable,
    Union,
    forecast,
)
from tests import oracle

ZONES = ["Asia/Jakarta", "UTC", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]
DAYS = [
    "2026-11-29T10:17:23",
    "2026-03-08T00:00",  # the gap of New York
    "2026-10-31T20:00",  # its fold
    "2026-04-04T10:00",  # the half-hour fold of Lord Howe
    "2026-10-03T10:00",  # and its gap
]


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def mixed(pick: random.Random, number: int) -> list[Timetable]:
    return [one(pick) for _ in range(number)]


def one(pick: random.Random) -> Timetable:
    zone = pick.choice(ZONES)
    kind = pick.random()
    if kind < 0.7:
        return Cron(
            expression=oracle.random_rule(pick), timezone=zone, fold=pick.choice(["first", "both"])
        )
    if kind < 0.8:
        anchor = utc("2026-03-08T05:00") + timedelta(seconds=pick.randrange(10**7))
        return Interval(seconds=pick.choice([7, 45, 60, 90, 300, 3600, 86_400]), anchor=anchor)
    if kind < 0.85:
        return Once(at=utc(pick.choice(DAYS)) + timedelta(seconds=pick.randrange(86_400)))
    if kind < 0.95:
        start = datetime(2026, 1, 31, pick.randrange(24), pick.randrange(60))  # noqa: DTZ001
        return CalendarInterval(every=1, unit="days", start=start, timezone=zone)
    return Union((one(pick), one(pick)))


@pytest.mark.parametrize("start", DAYS)
def test_counts_equal_a_listing_also_where_clocks_change(start: str) -> None:
    timetables = mixed(random.Random(start), 120)
    first = utc(start).replace(second=0)
    expected = [0] * 1440
    for timetable in timetables:
        before = timedelta(microseconds=1)
        for at in timetable.between(first - before, first + timedelta(days=1) - before):
            expected[(at - first) // timedelta(minutes=1)] += 1
    assert forecast.counts(timetables, utc(start)) == expected


def test_first_minute_is_the_one_that_start_is_in() -> None:
    hourly = Cron(expression="17 * * * *", timezone="UTC")
    found = forecast.counts([hourly, hourly], utc("2026-11-29T10:17:59.5"), hours=2)
    assert len(found) == 120
    assert [minute for minute, count in enumerate(found) if count] == [0, 60]
    assert sum(found) == 4


def test_no_timetable_is_no_occurrence() -> None:
    assert forecast.counts([], utc("2026-11-29T10:17"), hours=1) == [0] * 60


@pytest.mark.parametrize("hours", [0, -1, 745])
def test_span_outside_its_limits_is_refused(hours: int) -> None:
    with pytest.raises(ValueError, match="must be from 1 to 744"):
        forecast.counts([], utc("2026-11-29T10:17"), hours=hours)


def test_naive_start_is_refused() -> None:
    with pytest.raises(ValueError, match="has no time zone"):
        forecast.counts([], datetime(2026, 1, 1))  # noqa: DTZ001


def test_a_thousand_timetables_take_less_than_150_ms() -> None:
    timetables = mixed(random.Random("speed"), 1000)
    forecast.counts(timetables, utc(DAYS[0]))  # parses the rules and reads the zones
    spent = []
    for _ in range(3):
        began = time.thread_time()
        forecast.counts(timetables, utc(DAYS[0]))
        spent.append(time.thread_time() - began)
    assert min(spent) < 0.15
