"""Spread, limits, calendars, several rules and zone data, through the claim."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError

from distcron_app import lifecycle
from distcron_app.clock import Clock
from distcron_app.instants import database_now
from distcron_app.locks.memory import MemoryLockBackend
from distcron_app.maintenance import Sweeper
from distcron_app.models import Calendar, CalendarEntry, Run, Schedule
from distcron_app.timetable import tzdata_version
from distcron_app.timetable.calendars import Event
from tests.factories import make_node, make_run, make_schedule
from tests.integration.test_dispatch import CONFIG, Member, due, whole_second

pytestmark = pytest.mark.django_db


@pytest.fixture
def member() -> Member:
    return Member(MemoryLockBackend())


def every_day_off(**values: Any) -> Calendar:
    """Return a calendar that excludes every weekday."""
    return Calendar.objects.create(name="closed", weekdays="1,2,3,4,5,6,7", **values)


class TestSpread:
    def test_a_spread_occurrence_is_queued_until_it_is_due(self, member: Member) -> None:
        schedule = due(every=3600, spread_seconds=3000, spread_key="tenant-7")
        assert member.tick().claimed == lifecycle.Claimed()
        run = Run.objects.get()
        assert (run.state, run.owner_token, run.node_id, run.claimed_at) == (
            "queued",
            "",
            None,
            None,
        )
        assert run.scheduled_at is not None
        assert timedelta(0) < run.due_at - run.scheduled_at < timedelta(seconds=3000)
        schedule.refresh_from_db()
        assert schedule.next_run_at == run.scheduled_at + timedelta(hours=1)

    def test_no_node_holds_the_lock_while_a_spread_occurrence_waits(self, member: Member) -> None:
        due(every=3600, spread_seconds=3000)
        member.tick()
        assert member.leases.schedules() == {}

    def test_all_nodes_agree_about_the_delay(self) -> None:
        schedule = make_schedule(spread_seconds=600, spread_by="random")
        at = datetime(2027, 1, 1, tzinfo=UTC)
        assert schedule.spread(at) == Schedule.objects.get(pk=schedule.pk).spread(at)
        assert schedule.spread(at) != schedule.spread(at + timedelta(days=1)) - timedelta(days=1)

    def test_schedules_with_one_key_start_together(self) -> None:
        first = make_schedule(spread_seconds=600, spread_key="tenant-7")
        second = make_schedule(spread_seconds=600, spread_key="tenant-7")
        other = make_schedule(spread_seconds=600)
        at = datetime(2027, 1, 1, tzinfo=UTC)
        assert first.spread(at) == second.spread(at) != other.spread(at)

    def test_when_it_is_due_it_is_claimed(self, member: Member) -> None:
        due(every=3600, spread_seconds=3000)
        member.tick()
        Run.objects.update(due_at=whole_second(-1), scheduled_at=whole_second(-5))
        (run,) = member.dispatcher.claim_queued(member.row.pk, 5).runs
        assert (run.state, run.fencing_token) == ("claimed", 2)

    def test_the_loop_wakes_when_the_next_one_is_due(self, member: Member) -> None:
        make_run(state="queued", due_at=database_now() + timedelta(seconds=0.6))
        assert member.dispatcher.claim_queued(member.row.pk, 5) == lifecycle.Claimed()
        assert 0.2 < member.dispatcher.queued_wait_seconds <= 0.6
        Run.objects.update(due_at=database_now() + timedelta(hours=1))
        member.dispatcher.claim_queued(member.row.pk, 5)
        assert member.dispatcher.queued_wait_seconds == CONFIG.poll_seconds

    def test_it_is_skipped_where_another_run_is_active_by_then(self, member: Member) -> None:
        schedule = due(every=3600, spread_seconds=3000)
        member.tick()
        Run.objects.update(due_at=whole_second(-1), scheduled_at=whole_second(-5))
        active = make_run(schedule=schedule, state="running", node=make_node())
        (skipped,) = member.dispatcher.claim_queued(member.row.pk, 5).skipped
        assert (skipped.reason, skipped.details) == ("overlap", {"blocked_by": active.pk})
        assert Run.objects.filter(state="skipped").count() == 1

    def test_it_is_skipped_where_its_schedule_was_paused_meanwhile(self, member: Member) -> None:
        schedule = due(every=3600, spread_seconds=3000)
        member.tick()
        Run.objects.update(due_at=whole_second(-1), scheduled_at=whole_second(-5))
        Schedule.objects.filter(pk=schedule.pk).update(state="paused")
        (skipped,) = member.dispatcher.claim_queued(member.row.pk, 5).skipped
        assert skipped.reason == "paused"

    def test_more_than_a_day_is_refused(self) -> None:
        schedule = make_schedule()
        schedule.spread_seconds = 86_401
        with pytest.raises(ValidationError) as caught:
            schedule.full_clean()
        assert set(caught.value.message_dict) == {"spread_seconds"}


class TestLimit:
    def test_after_its_last_run_the_schedule_is_finished(self, member: Member) -> None:
        schedule = due(every=1, seconds_ago=5, max_runs=2)
        for _ in range(2):
            (run,) = member.tick().claimed.runs
            member.finish(run)
        schedule.refresh_from_db()
        assert (schedule.state, schedule.runs_planned, schedule.next_run_at) == (
            "exhausted",
            2,
            None,
        )
        assert member.tick().claimed == lifecycle.Claimed()

    def test_an_occurrence_that_was_skipped_does_not_count(self, member: Member) -> None:
        schedule = due(max_runs=1)
        make_run(schedule=schedule, state="running", node=make_node())
        assert len(member.tick().claimed.skipped) == 1
        schedule.refresh_from_db()
        assert (schedule.state, schedule.runs_planned) == ("active", 0)

    def test_a_limit_below_what_ran_already_is_refused(self) -> None:
        schedule = make_schedule()
        schedule.runs_planned, schedule.max_runs = 3, 2
        with pytest.raises(ValidationError) as caught:
            schedule.full_clean()
        assert set(caught.value.message_dict) == {"max_runs"}

    def test_an_edit_does_not_wake_a_schedule_that_reached_its_limit(self, member: Member) -> None:
        schedule = due(max_runs=1)
        member.tick()
        schedule.refresh_from_db()
        schedule.notes = "changed"
        schedule.full_clean()
        schedule.save()
        assert (schedule.state, schedule.next_run_at) == ("exhausted", None)

    def test_no_more_instants_are_shown_than_will_run(self) -> None:
        schedule = make_schedule(max_runs=3)
        assert len(schedule.upcoming(10)) == 3

    def test_a_higher_limit_lets_a_finished_schedule_go_on(self, member: Member) -> None:
        schedule = due(max_runs=1)
        member.tick()
        schedule.refresh_from_db()
        assert schedule.state == "exhausted"
        schedule.max_runs = 5
        schedule.full_clean()
        schedule.save()
        assert (schedule.state, schedule.next_run_at is not None) == ("active", True)


class TestCalendars:
    def test_an_excluded_instant_leaves_a_row_with_its_reason(self, member: Member) -> None:
        schedule = due(every=3600, calendar=every_day_off())
        at = schedule.next_run_at
        (skipped,) = member.tick().claimed.skipped
        assert (skipped.reason, skipped.scheduled_at) == ("calendar", at)
        assert skipped.details is not None
        assert skipped.details["why"]
        schedule.refresh_from_db()
        assert at is not None
        assert schedule.next_run_at == at + timedelta(hours=1)

    def test_excluded_instants_of_an_outage_are_one_row(self, member: Member) -> None:
        due(every=60, seconds_ago=600, calendar=every_day_off())
        (skipped,) = member.tick().claimed.skipped
        assert skipped.details is not None
        assert skipped.details["count"] in (10, 11)

    def test_after_an_outage_the_newest_allowed_instant_counts(self, member: Member) -> None:
        newest = whole_second(-3600)
        closed = Calendar.objects.create(
            name="closed", weekdays=str(newest.isoweekday()), timezone="UTC"
        )
        due(every=86_400, seconds_ago=49 * 3600, calendar=closed)
        claimed = member.tick().claimed
        assert (claimed.runs, [row.reason for row in claimed.skipped]) == ((), ["misfire"])
        (skipped,) = member.tick().claimed.skipped
        assert skipped.reason == "calendar"
        assert abs(skipped.scheduled_at - newest) < timedelta(seconds=5)

    def test_other_days_run(self, member: Member) -> None:
        calendar = Calendar.objects.create(name="holidays")
        CalendarEntry.objects.create(
            calendar=calendar, first=date(2020, 1, 1), last=date(2020, 1, 2)
        )
        due(calendar=calendar)
        assert len(member.tick().claimed.runs) == 1

    def test_excluded_days_can_be_moved_to_the_next_allowed_one(self) -> None:
        weekend = Calendar.objects.create(name="weekend", weekdays="6,7", timezone="Asia/Jakarta")
        schedule = make_schedule(
            cron="0 9 * * *", timezone="Asia/Jakarta", calendar=weekend, calendar_action="next"
        )
        friday = datetime(2027, 1, 1, 3, tzinfo=UTC)
        assert schedule.first_after(friday) == datetime(2027, 1, 4, 2, tzinfo=UTC)

    def test_a_changed_calendar_plans_its_schedules_anew(self) -> None:
        calendar = Calendar.objects.create(name="holidays")
        schedule = make_schedule(calendar=calendar, calendar_action="next")
        calendar.replace_entries([Event(date(2027, 1, 1), date(2027, 1, 1), "New Year")])
        schedule.refresh_from_db()
        assert schedule.next_run_at is None
        node = make_node()
        Sweeper(config=CONFIG, clock=Clock()).sweep(node.pk, [], 0.0)
        schedule.refresh_from_db()
        assert schedule.next_run_at is not None
        assert calendar.entries.get().summary == "New Year"

    @pytest.mark.parametrize("weekdays", ["0", "8", "mon", "1;2"])
    def test_weekdays_that_do_not_exist_are_refused(self, weekdays: str) -> None:
        with pytest.raises(ValidationError) as caught:
            Calendar(name="x", weekdays=weekdays).full_clean()
        assert set(caught.value.message_dict) == {"weekdays"}


def test_another_calendar_by_a_queryset_update_plans_anew() -> None:
    schedule = make_schedule()
    Schedule.objects.filter(pk=schedule.pk).update(calendar=every_day_off())
    schedule.refresh_from_db()
    assert schedule.next_run_at is None


class TestRules:
    def test_several_rules_in_one_schedule_name_an_instant_once(self) -> None:
        schedule = make_schedule(cron="0 9 * * *\n0 9,17 * * *", timezone="UTC")
        start = datetime(2027, 1, 1, tzinfo=UTC)
        first = schedule.first_after(start)
        assert first == datetime(2027, 1, 1, 9, tzinfo=UTC)
        assert schedule.first_after(first) == datetime(2027, 1, 1, 17, tzinfo=UTC)

    def test_a_wrong_rule_among_several_is_named_by_its_line(self) -> None:
        schedule = make_schedule()
        schedule.cron = "0 9 * * *\n0 25 * * *"
        with pytest.raises(ValidationError) as caught:
            schedule.full_clean()
        (message,) = caught.value.message_dict["cron"]
        assert message.startswith("Line 2: Hour '25':")

    def test_the_typed_and_the_canonical_text_are_both_kept(self) -> None:
        schedule = make_schedule(cron="00 02 * * MON")
        schedule.refresh_from_db()
        assert (schedule.cron, schedule.cron_canonical) == ("00 02 * * MON", "0 2 * * mon")

    def test_every_month_from_the_31st_ends_with_the_month(self) -> None:
        schedule = make_schedule(
            kind="calendar",
            cron="",
            timezone="Asia/Jakarta",
            calendar_every=1,
            calendar_unit="months",
            calendar_date=date(2027, 1, 31),
            calendar_time=time(9, 0),
        )
        assert schedule.first_after(datetime(2027, 2, 1, tzinfo=UTC)) == datetime(
            2027, 2, 28, 2, tzinfo=UTC
        )
        assert schedule.first_after(datetime(2027, 3, 1, tzinfo=UTC)) == datetime(
            2027, 3, 31, 2, tzinfo=UTC
        )

    def test_the_gap_and_fold_of_a_schedule_are_its_own(self) -> None:
        before = datetime(2027, 3, 13, 12, tzinfo=UTC)
        values = {"cron": "30 2 * * *", "timezone": "America/New_York"}
        shifted, skipped = make_schedule(**values), make_schedule(**values, gap="skip")
        assert shifted.first_after(before) == datetime(2027, 3, 14, 7, tzinfo=UTC)
        assert skipped.first_after(before) == datetime(2027, 3, 15, 6, 30, tzinfo=UTC)


class TestZoneData:
    def test_what_was_planned_with_older_data_is_planned_anew(self) -> None:
        schedule = make_schedule()
        right = schedule.next_run_at
        Schedule.objects.filter(pk=schedule.pk).update(
            next_run_at=database_now() + timedelta(days=9), planned_zones="2019a"
        )
        node = make_node()
        Sweeper(config=CONFIG, clock=Clock()).sweep(node.pk, [], 0.0)
        schedule.refresh_from_db()
        assert (schedule.next_run_at, schedule.planned_zones) == (right, tzdata_version())

    def test_an_instant_of_the_past_does_not_come_back_with_newer_data(self) -> None:
        schedule = make_schedule(cron="* * * * *")
        long_ago = whole_second(-86_400)
        Schedule.objects.filter(pk=schedule.pk).update(
            next_run_at=database_now() + timedelta(days=9),
            planned_from=long_ago,
            planned_zones="2019a",
        )
        node = make_node()
        before = database_now()
        Sweeper(config=CONFIG, clock=Clock()).sweep(node.pk, [], 0.0)
        schedule.refresh_from_db()
        assert schedule.next_run_at is not None
        assert schedule.next_run_at > before

    def test_a_node_with_older_data_leaves_it_alone(self) -> None:
        schedule = make_schedule()
        Schedule.objects.filter(pk=schedule.pk).update(
            next_run_at=schedule.next_run_at, planned_zones="2999z"
        )
        node = make_node()
        Sweeper(config=CONFIG, clock=Clock()).sweep(node.pk, [], 0.0)
        schedule.refresh_from_db()
        assert schedule.planned_zones == "2999z"
