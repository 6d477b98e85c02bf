"""The forecast reads schedules as the scheduler does: one count for each occurrence."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from distcron_app import history
from distcron_app.models import Calendar, Schedule
from tests.factories import make_schedule

pytestmark = pytest.mark.django_db

NOW = datetime(2090, 3, 5, 9, 17, 23, tzinfo=UTC)
START = NOW.replace(second=0)
MINUTE = timedelta(minutes=1)


def walked(schedule: Schedule, hours: int) -> list[int]:
    """Return the counts by asking the schedule for one instant after the other."""
    found = [0] * (hours * 60)
    at = schedule.first_after(START - timedelta(seconds=1 + schedule.spread_seconds))
    left = None if schedule.max_runs is None else schedule.max_runs - schedule.runs_planned
    while at is not None and at < START + hours * 60 * MINUTE and left != 0:
        due_at = schedule.spread(at)
        if START <= due_at < START + hours * 60 * MINUTE and not schedule.excluded(at):
            found[(due_at - START) // MINUTE] += 1
            left = None if left is None else left - 1
        at = schedule.first_after(at)
    return found


@pytest.mark.parametrize(
    "values",
    [
        {"cron": "*/7 * * * *"},
        {"cron": "0 9 * * *\n*/20 10-12 * * *"},
        {"kind": "interval", "cron": "", "interval_seconds": 45, "interval_anchor": NOW},
        {"kind": "once", "cron": "", "run_at": NOW + timedelta(hours=3)},
        {"cron": "*/5 * * * *", "starts_at": NOW + timedelta(hours=2)},
        {"cron": "*/5 * * * *", "ends_at": NOW + timedelta(hours=2)},
        {"cron": "*/5 * * * *", "spread_seconds": 900, "spread_key": "tenant-7"},
        {"cron": "*/5 * * * *", "spread_seconds": 900, "spread_by": "random"},
        {"cron": "30 2 * * *", "gap": "skip", "timezone": "America/New_York"},
    ],
    ids=str,
)
def test_each_kind_is_counted_as_it_runs(values: dict[str, Any]) -> None:
    schedule = make_schedule(**{"timezone": "UTC"} | values)
    found = history.forecast(NOW, 24)
    assert list(found.counts) == walked(schedule, 24)
    assert found.total


def test_excluded_days_are_not_counted() -> None:
    make_schedule(
        cron="* * * * *", calendar=Calendar.objects.create(name="x", weekdays="7", timezone="UTC")
    )
    # 5 March 2090 is a Sunday, until midnight UTC.
    assert list(history.forecast(NOW, 24).counts) == [0] * (14 * 60 + 43) + [1] * (9 * 60 + 17)


def test_days_that_are_moved_are_counted_where_they_run() -> None:
    weekend = Calendar.objects.create(name="x", weekdays="7", timezone="UTC")
    make_schedule(cron="0 12 * * *", timezone="UTC", calendar=weekend, calendar_action="next")
    found = history.forecast(NOW, 48)
    assert found.busiest(9) == [(datetime(2090, 3, 6, 12, tzinfo=UTC), 1)]


def test_no_more_than_the_runs_that_are_left_are_counted() -> None:
    schedule = make_schedule(cron="* * * * *", timezone="UTC", max_runs=5)
    Schedule.objects.filter(pk=schedule.pk).update(runs_planned=2, next_run_at=START)
    assert list(history.forecast(NOW, 1).counts) == [1, 1, 1] + [0] * 57


@pytest.mark.parametrize("state", ["paused", "invalid", "exhausted"])
def test_only_active_schedules_count(state: str) -> None:
    schedule = make_schedule(cron="* * * * *")
    Schedule.objects.filter(pk=schedule.pk).update(state=state)
    found = history.forecast(NOW, 1)
    assert (found.total, found.schedules) == (0, 0)


def test_a_broken_row_does_not_stop_the_others() -> None:
    make_schedule(cron="* * * * *")
    broken = make_schedule()
    Schedule.objects.filter(pk=broken.pk).update(cron="gone", next_run_at=NOW)
    assert history.forecast(NOW, 1).total == 60


def test_hours_follow_the_clock_of_the_zone() -> None:
    make_schedule(cron="* * * * *")
    hours = history.forecast(NOW, 2).by_hour(ZoneInfo("Asia/Kolkata"))
    # 09:17 UTC is 14:47 in Kolkata: 13 minutes are left of that hour.
    assert hours == [
        (START, 13),
        (START + 13 * MINUTE, 60),
        (START + 73 * MINUTE, 47),
    ]


def test_an_hour_that_comes_twice_is_two_hours() -> None:
    make_schedule(cron="* * * * *")
    fold = datetime(2027, 11, 7, 5, tzinfo=UTC)
    hours = history.forecast(fold, 2).by_hour(ZoneInfo("America/New_York"))
    assert hours == [(fold, 60), (fold + timedelta(hours=1), 60)]


def test_the_busiest_minutes_come_first_and_the_earlier_of_equal_ones() -> None:
    for _number in range(2):
        make_schedule(cron="30 10 * * *", timezone="UTC")
    make_schedule(cron="0 10,11,12 * * *", timezone="UTC")
    assert history.forecast(NOW).busiest(3) == [
        (datetime(2090, 3, 5, 10, 30, tzinfo=UTC), 2),
        (datetime(2090, 3, 5, 10, 0, tzinfo=UTC), 1),
        (datetime(2090, 3, 5, 11, 0, tzinfo=UTC), 1),
    ]


def test_a_thousand_schedules_are_counted_by_one_query_in_less_than_300_ms(
    django_assert_num_queries: Any,
) -> None:
    numbers = random.Random(7)
    zones = ("Asia/Jakarta", "America/New_York", "Australia/Lord_Howe", "UTC")
    Schedule.objects.bulk_create(
        Schedule(
            key=f"s{number}",
            name="x",
            job="project.demo.heartbeat",
            cron=f"{numbers.randrange(60)} {numbers.choice(('*', '*/2', '3', '8-17'))} * * *",
            timezone=numbers.choice(zones),
        )
        for number in range(1000)
    )
    took = []
    for _attempt in range(3):
        began = time.perf_counter()
        with django_assert_num_queries(1):
            found = history.forecast(NOW)
        took.append(time.perf_counter() - began)
    assert found.schedules == 1000
    assert min(took) < 0.3
