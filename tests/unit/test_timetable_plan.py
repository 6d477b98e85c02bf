"""The misfire plan: what runs after a late start or an outage, and what comes next."""

import random
import time
from datetime import UTC, datetime, timedelta

import pytest

from distcron_app.timetable import Cron, Interval, Once, Plan, Span, plan

GRACE = timedelta(seconds=30)
DAILY = Cron(expression="0 3 * * *", timezone="UTC")
HOURLY = Cron(expression="0 * * * *", timezone="UTC")
EVERY_MINUTE = Cron(expression="* * * * *", timezone="America/New_York")


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def span(first: str, last: str, count: int) -> Span:
    return Span(first=utc(first), last=utc(last), count=count)


def test_instant_within_the_grace_runs() -> None:
    found = plan(
        DAILY, due_from=utc("2026-01-01T03:00"), now=utc("2026-01-01T03:00:30"), misfire_grace=GRACE
    )
    assert found == Plan(run=utc("2026-01-01T03:00"), next=utc("2026-01-02T03:00"))


def test_next_is_computed_from_the_planned_instant_and_not_from_the_clock() -> None:
    found = plan(
        Interval(seconds=1, anchor=utc("2026-01-01T00:00")),
        due_from=utc("2026-01-01T00:00:05"),
        now=utc("2026-01-01T00:00:20"),
        misfire_grace=GRACE,
    )
    assert found == Plan(run=utc("2026-01-01T00:00:05"), next=utc("2026-01-01T00:00:06"))


def test_late_instant_inside_the_window_runs_alone() -> None:
    found = plan(
        DAILY, due_from=utc("2026-01-01T03:00"), now=utc("2026-01-01T20:00"), misfire_grace=GRACE
    )
    assert found == Plan(run=utc("2026-01-01T03:00"), next=utc("2026-01-02T03:00"))


def test_older_instants_inside_the_window_are_coalesced_into_the_newest() -> None:
    found = plan(
        HOURLY,
        due_from=utc("2026-01-01T03:00"),
        now=utc("2026-01-01T07:30"),
        misfire_grace=GRACE,
        catchup_window=timedelta(hours=6),
    )
    assert found == Plan(
        run=utc("2026-01-01T07:00"),
        coalesced=span("2026-01-01T03:00", "2026-01-01T06:00", 4),
        next=utc("2026-01-01T08:00"),
    )


def test_instants_older_than_the_window_are_misfired() -> None:
    found = plan(
        HOURLY,
        due_from=utc("2026-01-01T03:00"),
        now=utc("2026-01-01T07:30"),
        misfire_grace=GRACE,
        catchup_window=timedelta(hours=2),
    )
    assert found == Plan(
        run=utc("2026-01-01T07:00"),
        coalesced=span("2026-01-01T06:00", "2026-01-01T06:00", 1),
        misfired=span("2026-01-01T03:00", "2026-01-01T05:00", 3),
        next=utc("2026-01-01T08:00"),
    )


def test_instant_exactly_as_old_as_the_window_still_runs() -> None:
    found = plan(
        DAILY,
        due_from=utc("2026-01-01T03:00"),
        now=utc("2026-01-01T05:00"),
        misfire_grace=GRACE,
        catchup_window=timedelta(hours=2),
    )
    assert found.run == utc("2026-01-01T03:00")
    assert found.misfired is None


def test_nothing_runs_if_all_are_older_than_the_window() -> None:
    found = plan(
        DAILY,
        due_from=utc("2026-01-01T03:00"),
        now=utc("2026-01-03T02:00"),
        misfire_grace=GRACE,
        catchup_window=timedelta(hours=1),
    )
    assert found == Plan(
        run=None,
        misfired=span("2026-01-01T03:00", "2026-01-02T03:00", 2),
        next=utc("2026-01-03T03:00"),
    )


def test_default_window_is_the_period() -> None:
    found = plan(
        HOURLY, due_from=utc("2026-01-01T03:00"), now=utc("2026-01-01T07:30"), misfire_grace=GRACE
    )
    assert found.run == utc("2026-01-01T07:00")
    assert found.coalesced is None
    assert found.misfired == span("2026-01-01T03:00", "2026-01-01T06:00", 4)


def test_default_window_is_at_least_5_minutes() -> None:
    found = plan(
        EVERY_MINUTE,
        due_from=utc("2026-01-01T03:00"),
        now=utc("2026-01-01T03:10"),
        misfire_grace=GRACE,
    )
    assert found == Plan(
        run=utc("2026-01-01T03:10"),
        coalesced=span("2026-01-01T03:05", "2026-01-01T03:09", 5),
        misfired=span("2026-01-01T03:00", "2026-01-01T03:04", 5),
        next=utc("2026-01-01T03:11"),
    )


def test_default_window_is_at_most_24_hours() -> None:
    monthly = Cron(expression="0 3 1 * *", timezone="UTC")
    due_from = utc("2026-01-01T03:00")
    late = plan(monthly, due_from=due_from, now=utc("2026-01-02T03:00"), misfire_grace=GRACE)
    later = plan(monthly, due_from=due_from, now=utc("2026-01-02T03:01"), misfire_grace=GRACE)
    assert (late.run, late.misfired) == (due_from, None)
    assert (later.run, later.misfired) == (None, span("2026-01-01T03:00", "2026-01-01T03:00", 1))


def test_once_runs_up_to_24_hours_late_and_never_again() -> None:
    at = utc("2026-01-01T03:00")
    found = plan(Once(at=at), due_from=at, now=utc("2026-01-02T02:00"), misfire_grace=GRACE)
    assert found == Plan(run=at, next=None)


def test_instants_after_ends_at_are_not_due() -> None:
    found = plan(
        HOURLY,
        due_from=utc("2026-01-01T03:00"),
        now=utc("2026-01-01T09:30"),
        misfire_grace=GRACE,
        catchup_window=timedelta(days=1),
        ends_at=utc("2026-01-01T05:00"),
    )
    assert found == Plan(
        run=utc("2026-01-01T05:00"),
        coalesced=span("2026-01-01T03:00", "2026-01-01T04:00", 2),
        next=None,
    )


def test_next_beyond_ends_at_is_none() -> None:
    found = plan(
        DAILY,
        due_from=utc("2026-01-01T03:00"),
        now=utc("2026-01-01T03:00:01"),
        misfire_grace=GRACE,
        ends_at=utc("2026-01-02T02:59"),
    )
    assert found == Plan(run=utc("2026-01-01T03:00"), next=None)


def test_nothing_is_due_before_the_first_instant() -> None:
    due_from = utc("2026-01-01T03:00")
    found = plan(DAILY, due_from=due_from, now=utc("2026-01-01T02:59"), misfire_grace=GRACE)
    assert found == Plan(run=None, next=due_from)


def test_schedule_that_ended_before_its_next_instant_has_nothing_left() -> None:
    found = plan(
        DAILY,
        due_from=utc("2026-01-05T03:00"),
        now=utc("2026-01-06T00:00"),
        misfire_grace=GRACE,
        ends_at=utc("2026-01-04T00:00"),
    )
    assert found == Plan(run=None, next=None)


def test_run_moved_by_a_gap_is_planned_once() -> None:
    found = plan(
        Cron(expression="15,45 2 * * *", timezone="America/New_York"),
        due_from=utc("2026-03-08T07:00"),
        now=utc("2026-03-08T12:00"),
        misfire_grace=GRACE,
        catchup_window=timedelta(hours=12),
    )
    assert found == Plan(run=utc("2026-03-08T07:00"), next=utc("2026-03-09T06:15"))


def test_naive_instants_are_refused() -> None:
    naive = datetime(2026, 1, 1)  # noqa: DTZ001
    with pytest.raises(ValueError, match="has no time zone"):
        plan(DAILY, due_from=naive, now=utc("2026-01-01T03:00"), misfire_grace=GRACE)


def test_week_of_a_once_a_second_interval_is_planned_within_50_ms() -> None:
    due_from = utc("2026-01-01T00:00")
    rule = Interval(seconds=1, anchor=due_from)
    began = time.thread_time()
    found = plan(rule, due_from=due_from, now=utc("2026-01-08T00:00"), misfire_grace=GRACE)
    assert time.thread_time() - began < 0.05
    assert found == Plan(
        run=utc("2026-01-08T00:00"),
        coalesced=span("2026-01-07T23:55", "2026-01-07T23:59:59", 300),
        misfired=span("2026-01-01T00:00", "2026-01-07T23:54:59", 604_500),
        next=utc("2026-01-08T00:00:01"),
    )


def test_year_of_a_per_minute_rule_is_planned_within_100_ms() -> None:
    began = time.thread_time()
    found = plan(
        EVERY_MINUTE,
        due_from=utc("2025-01-01T00:00"),
        now=utc("2026-01-01T00:00"),
        misfire_grace=GRACE,
        catchup_window=timedelta(days=2),
    )
    assert time.thread_time() - began < 0.1
    assert found == Plan(
        run=utc("2026-01-01T00:00"),
        coalesced=span("2025-12-30T00:00", "2025-12-31T23:59", 2880),
        misfired=span("2025-01-01T00:00", "2025-12-29T23:59", 522_720),
        next=utc("2026-01-01T00:01"),
    )


def test_every_due_instant_is_decided_upon_exactly_once() -> None:
    rule = Cron(expression="*/7 * * * *", timezone="Australia/Lord_Howe")
    due_from, now = utc("2026-04-04T10:07"), utc("2026-04-05T03:00")
    for minutes in (0, 1, 60, 600, 6000):
        found = plan(
            rule,
            due_from=due_from,
            now=now,
            misfire_grace=GRACE,
            catchup_window=timedelta(minutes=minutes),
        )
        decided = sum(part.count for part in (found.coalesced, found.misfired) if part)
        total = rule.count(due_from - timedelta(seconds=1), now)
        assert decided + (found.run is not None) == total


def test_ticks_that_come_early_and_late_plan_every_slot_once() -> None:
    """OP-15: what is due counts, and never whether the clock shows the slot at a tick."""
    dice = random.Random(15)
    slots = [utc("2026-01-01T03:00") + timedelta(minutes=number) for number in range(60)]
    # A tick each 1.5 s or so: some wake right before the slot and then right after it.
    early = [slot + timedelta(seconds=dice.uniform(-1.5, 1.5)) for slot in slots]
    ticks = [at + timedelta(seconds=later) for at in early for later in (0, 1.5)]
    assert planned_at(ticks, slots[0]) == slots


def test_a_clock_that_steps_over_a_slot_or_back_before_it_runs_it_once() -> None:
    """OP-68: forward by 2 s right before the slot, and back by 2 s right after it."""
    slot = utc("2026-01-01T03:00")
    steps = [-1, 1, -1, 1, 59, 61, 59]
    found = planned_at([slot + timedelta(seconds=each) for each in steps], slot)
    assert found == [slot, slot + timedelta(minutes=1)]


def planned_at(ticks: list[datetime], due_from: datetime) -> list[datetime]:
    """Return what runs when a schedule of every minute is looked at at these instants."""
    runs = []
    at: datetime | None = due_from
    for now in ticks:
        assert at is not None
        found = plan(EVERY_MINUTE, due_from=at, now=now, misfire_grace=GRACE)
        assert (found.coalesced, found.misfired) == (None, None)
        runs += [found.run] if found.run else []
        at = found.next
    return runs


class TestMisfirePolicies:
    """The newest of four late instants is at 07:00, and it is 07:30."""

    @staticmethod
    def late(**values: object) -> Plan:
        return plan(
            HOURLY,
            due_from=utc("2026-01-01T04:00"),
            now=utc("2026-01-01T07:30"),
            misfire_grace=GRACE,
            catchup_window=timedelta(hours=6),
            **values,  # type: ignore[arg-type]
        )

    def test_run_all_runs_each_the_oldest_first(self) -> None:
        assert self.late(misfire="run_all") == Plan(
            run=utc("2026-01-01T04:00"),
            then=(utc("2026-01-01T05:00"), utc("2026-01-01T06:00"), utc("2026-01-01T07:00")),
            next=utc("2026-01-01T08:00"),
        )

    def test_run_all_keeps_the_newest_where_there_are_too_many(self) -> None:
        assert self.late(misfire="run_all", catchup_max=2) == Plan(
            run=utc("2026-01-01T06:00"),
            then=(utc("2026-01-01T07:00"),),
            misfired=span("2026-01-01T04:00", "2026-01-01T05:00", 2),
            next=utc("2026-01-01T08:00"),
        )

    def test_run_all_runs_no_more_than_the_schedule_has_left(self) -> None:
        assert self.late(misfire="run_all", max_runs=5, runs_so_far=3) == Plan(
            run=utc("2026-01-01T04:00"), then=(utc("2026-01-01T05:00"),), next=None
        )

    def test_run_all_looks_back_no_further_than_the_window(self) -> None:
        found = plan(
            HOURLY,
            due_from=utc("2026-01-01T04:00"),
            now=utc("2026-01-01T07:30"),
            misfire_grace=GRACE,
            misfire="run_all",
            catchup_window=timedelta(hours=1),
        )
        assert found == Plan(
            run=utc("2026-01-01T07:00"),
            misfired=span("2026-01-01T04:00", "2026-01-01T06:00", 3),
            next=utc("2026-01-01T08:00"),
        )

    def test_run_all_with_nothing_in_the_window_runs_nothing(self) -> None:
        found = plan(
            HOURLY,
            due_from=utc("2026-01-01T04:00"),
            now=utc("2026-01-01T07:30"),
            misfire_grace=GRACE,
            misfire="run_all",
            catchup_window=timedelta(minutes=10),
        )
        assert (found.run, found.then, found.misfired) == (
            None,
            (),
            span("2026-01-01T04:00", "2026-01-01T07:00", 4),
        )

    def test_skip_runs_none_of_them(self) -> None:
        assert self.late(misfire="skip") == Plan(
            run=None,
            misfired=span("2026-01-01T04:00", "2026-01-01T07:00", 4),
            next=utc("2026-01-01T08:00"),
        )

    def test_skip_leaves_due_what_is_within_the_grace(self) -> None:
        found = plan(
            EVERY_MINUTE,
            due_from=utc("2026-01-01T07:00"),
            now=utc("2026-01-01T07:30:20"),
            misfire_grace=GRACE,
            misfire="skip",
        )
        assert found == Plan(
            run=None,
            misfired=span("2026-01-01T07:00", "2026-01-01T07:29", 30),
            next=utc("2026-01-01T07:30"),
        )
