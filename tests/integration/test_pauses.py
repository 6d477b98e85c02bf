"""Pauses with an end, what becomes of their instants, and pauses after failures in a row."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.test import Client

from distcron_app import explanations, operations, signals
from distcron_app.cli import times
from distcron_app.clock import Clock
from distcron_app.conf import get_config
from distcron_app.instants import database_now
from distcron_app.lifecycle import failed_in_a_row
from distcron_app.maintenance import Sweeper, Swept
from distcron_app.models import AuditEntry, Run, Schedule
from tests.factories import make_run, make_schedule, make_user
from tests.integration.schedulerctl_builders import ctl
from tests.services import wait_for

pytestmark = pytest.mark.django_db

WHO: dict[str, Any] = {"actor": "siti", "via": "cli"}
HOUR = timedelta(hours=1)


def sweep(sweeper: Sweeper | None = None) -> Swept:
    sweeper = sweeper or Sweeper(config=get_config(), clock=Clock())
    return sweeper.sweep(uuid.uuid4(), (), 0.0)


def paused(*, ago: timedelta = HOUR, **values: Any) -> Schedule:
    """Return a schedule that was paused so long ago, and is not over by itself."""
    schedule = make_schedule(**{"kind": "interval", "interval_seconds": 60} | values)
    operations.pause([schedule], reason="migration", **WHO)
    start = database_now() - ago
    Schedule.objects.filter(pk=schedule.pk).update(planned_from=start, next_run_at=None)
    schedule.refresh_from_db()
    return schedule


def ended(schedule: Schedule, *states: str, **values: Any) -> list[Run]:
    now = database_now()
    rows = []
    for state in states:
        number = Run.objects.filter(schedule=schedule).count()
        rows.append(
            make_run(
                schedule=schedule,
                state=state,
                finished_at=now,
                **{"scheduled_at": now + timedelta(seconds=number), "error": "OSError: no route"}
                | values,
            )
        )
    return rows


class TestEnd:
    def test_a_pause_keeps_its_end_and_the_audit_shows_it(self) -> None:
        schedule = make_schedule()
        until = datetime(2090, 1, 1, tzinfo=UTC)
        operations.pause([schedule], reason="move", until=until, **WHO)
        schedule.refresh_from_db()
        assert (schedule.state, schedule.paused_until) == ("paused", until)
        after = AuditEntry.objects.get().after or {}
        assert after["paused_until"] == "2090-01-01T00:00:00+00:00"

    def test_an_end_that_is_over_is_refused(self) -> None:
        schedule = make_schedule()
        with pytest.raises(ValueError, match=r"Until: 2020-01-01 00:00:00\+00:00 is over"):
            operations.pause(
                [schedule], reason="move", until=datetime(2020, 1, 1, tzinfo=UTC), **WHO
            )
        assert Schedule.objects.get().state == "active"

    def test_the_sweep_resumes_what_is_over_and_says_so_in_the_audit(self) -> None:
        schedule = paused()
        Schedule.objects.update(paused_until=database_now() - timedelta(seconds=1))
        assert sweep().resumed == (schedule.key,)
        schedule.refresh_from_db()
        assert (schedule.state, schedule.paused_until, schedule.state_by) == (
            "active",
            None,
            "distcron",
        )
        entry = AuditEntry.objects.get(verb="resume")
        assert (entry.actor, entry.via, entry.reason) == (
            "distcron",
            "scheduler",
            "The pause is over.",
        )

    def test_the_sweep_leaves_a_pause_that_lasts_or_has_no_end(self) -> None:
        schedule = paused()
        other = paused()
        Schedule.objects.filter(pk=other.pk).update(paused_until=database_now() + HOUR)
        assert sweep().resumed == ()
        assert set(Schedule.objects.values_list("state", flat=True)) == {"paused"}
        assert schedule.paused_until is None

    def test_a_pause_by_hand_after_the_end_was_read_is_not_undone(self) -> None:
        schedule = paused()
        done = operations.resume([schedule], only_if=lambda row: False, **WHO)
        assert (done.changed, Schedule.objects.get().state) == ((), "paused")

    def test_resume_by_hand_takes_the_end_away(self) -> None:
        schedule = make_schedule()
        operations.pause([schedule], reason="move", until=database_now() + HOUR, **WHO)
        operations.resume([schedule], **WHO)
        assert Schedule.objects.get().paused_until is None

    def test_an_update_of_the_state_takes_the_end_away(self) -> None:
        schedule = make_schedule()
        operations.pause([schedule], reason="move", until=database_now() + HOUR, **WHO)
        Schedule.objects.update(state="active")
        Schedule.objects.update(state="paused")
        stored = Schedule.objects.get()
        assert (stored.paused_until, stored.state_by) == (None, "")


@pytest.mark.databases("postgresql", "mysql")  # SQLite has one writer at a time
@pytest.mark.django_db(transaction=True)
def test_two_nodes_resume_a_schedule_once() -> None:
    paused()
    Schedule.objects.update(paused_until=database_now() - timedelta(seconds=1))
    at_once(2, sweep)
    assert AuditEntry.objects.filter(verb="resume").count() == 1
    assert Run.objects.filter(reason="paused").count() == 1


@pytest.mark.databases("postgresql", "mysql")  # SQLite has one writer at a time
@pytest.mark.django_db(transaction=True)
def test_two_nodes_pause_a_failing_schedule_once() -> None:
    ended(make_schedule(auto_pause_after=1), "failed")
    at_once(2, sweep)
    assert AuditEntry.objects.filter(verb="pause").count() == 1


@pytest.mark.databases("postgresql", "mysql")  # SQLite has one writer at a time
@pytest.mark.django_db(transaction=True)
def test_a_pause_that_was_begun_anew_while_the_sweep_waited_is_not_undone() -> None:
    schedule = paused()
    Schedule.objects.update(paused_until=database_now() - timedelta(seconds=1))
    sweeping = threading.Thread(target=at_once, args=(1, sweep))
    with transaction.atomic():
        Schedule.objects.select_for_update().get(pk=schedule.pk)
        sweeping.start()
        wait_for(somebody_waits, 20, "the sweep to wait for the row")
        Schedule.objects.update(paused_until=None, state_reason="again")
    sweeping.join()
    stored = Schedule.objects.get()
    assert (stored.state, stored.state_reason) == ("paused", "again")


def somebody_waits() -> bool:
    """Return whether another session of this database waits for a row that is locked."""
    waiting = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND wait_event_type = 'Lock'",
        "mysql": "SELECT count(*) FROM information_schema.processlist WHERE db = database()"
        " AND id <> connection_id() AND info LIKE '%FOR UPDATE%'",
    }
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # Else the transaction sees what it saw at first.
            cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(waiting[connection.vendor])
        return bool(cursor.fetchone()[0])


def at_once(count: int, action: Callable[[], object]) -> None:
    barrier = threading.Barrier(count)
    problems: list[BaseException] = []

    def act() -> None:
        try:
            barrier.wait()
            action()
        except BaseException as error:
            problems.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=act) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


class TestInstants:
    def by_hand(self, schedule: Schedule) -> None:
        operations.resume([schedule], **WHO)

    def by_sweep(self, schedule: Schedule) -> None:
        Schedule.objects.filter(pk=schedule.pk).update(
            paused_until=database_now() - timedelta(seconds=1)
        )
        sweep()

    def by_list_action(self, schedule: Schedule) -> None:
        client = Client()
        client.force_login(
            make_user(
                "distcron.view_schedule", "distcron.change_schedule", "distcron.pause_schedule"
            )
        )
        form = {"ids": str(schedule.pk), "idempotency_key": "12345678", "confirm": "yes"}
        answer = client.post("/admin/distcron/schedule/act/resume/", form)
        assert answer.status_code == 302

    @pytest.mark.parametrize("way", ["by_hand", "by_sweep", "by_list_action"])
    def test_from_now_none_runs_and_one_row_says_which(self, way: str) -> None:
        schedule = paused(interval_anchor=datetime(2026, 1, 1, tzinfo=UTC))
        start = schedule.planned_from
        getattr(self, way)(schedule)
        row = Run.objects.get()
        stored = Schedule.objects.get()
        assert (row.state, row.reason, row.trigger) == ("skipped", "paused", "timetable")
        assert row.details is not None
        assert row.details["count"] == 60
        first, last = (
            datetime.fromisoformat(row.details[name]) for name in ("first_at", "last_at")
        )
        assert first == row.scheduled_at
        assert last - first == timedelta(minutes=59)
        assert start < first <= start + timedelta(minutes=1)
        assert stored.next_run_at == last + timedelta(minutes=1)

    @pytest.mark.parametrize("way", ["by_hand", "by_sweep", "by_list_action"])
    def test_misfire_leaves_them_to_the_policy_of_the_schedule(self, way: str) -> None:
        schedule = paused(interval_anchor=datetime(2026, 1, 1, tzinfo=UTC), on_resume="misfire")
        start = schedule.planned_from
        getattr(self, way)(schedule)
        stored = Schedule.objects.get()
        assert not Run.objects.exists()
        assert start < stored.next_run_at <= start + timedelta(minutes=1)

    def test_misfire_holds_for_an_update_of_the_state(self) -> None:
        schedule = paused(interval_anchor=datetime(2026, 1, 1, tzinfo=UTC), on_resume="misfire")
        start = schedule.planned_from
        Schedule.objects.update(state="active")
        sweep()
        assert start < Schedule.objects.get().next_run_at <= start + timedelta(minutes=1)

    def test_an_update_of_the_state_goes_on_from_now_by_default(self) -> None:
        paused(interval_anchor=datetime(2026, 1, 1, tzinfo=UTC))
        before = database_now()
        Schedule.objects.update(state="active")
        sweep()
        assert Schedule.objects.get().next_run_at > before

    def test_a_row_that_was_read_again_and_saved_as_active_goes_on_from_now(self) -> None:
        schedule = make_schedule(kind="interval", interval_seconds=60)
        operations.pause([schedule], reason="move", **WHO)
        start = database_now() - HOUR
        Schedule.objects.filter(pk=schedule.pk).update(planned_from=start, next_run_at=None)
        schedule.refresh_from_db()
        before = database_now()
        schedule.state = "active"
        schedule.save()
        sweep()
        assert Schedule.objects.get().next_run_at > before

    def test_an_edit_of_the_rule_with_the_resume_goes_on_from_now(self) -> None:
        schedule = paused(interval_anchor=datetime(2026, 1, 1, tzinfo=UTC), on_resume="misfire")
        before = database_now()
        schedule.state, schedule.interval_seconds = "active", 120
        schedule.save()
        assert Schedule.objects.get().next_run_at > before

    def test_a_pause_without_an_instant_leaves_no_row(self) -> None:
        schedule = paused(kind="cron", cron="0 0 1 1 *", ago=timedelta(seconds=1))
        operations.resume([schedule], **WHO)
        assert not Run.objects.exists()

    def test_one_instant_leaves_a_row_without_a_span(self) -> None:
        schedule = paused(kind="once", run_at=database_now() + HOUR)
        Schedule.objects.update(
            run_at=database_now() - HOUR / 2, planned_from=database_now() - HOUR
        )
        operations.resume([schedule], **WHO)
        row = Run.objects.get()
        assert (row.reason, row.details) == ("paused", None)
        assert Schedule.objects.get().state == "exhausted"

    def test_years_of_pause_cost_as_many_queries_as_a_minute(
        self, django_assert_num_queries: Any
    ) -> None:
        schedule = paused(ago=timedelta(days=1500), interval_seconds=1)
        with django_assert_num_queries(_queries_of_a_short_pause()):
            operations.resume([schedule], **WHO)
        details = Run.objects.get(schedule=schedule).details or {}
        assert 129_600_000 <= details["count"] <= 129_600_060

    def test_instants_that_were_decided_before_the_pause_are_not_counted_again(self) -> None:
        anchor = datetime(2026, 1, 1, tzinfo=UTC)
        schedule = paused(interval_anchor=anchor)
        at = schedule.first_after(schedule.planned_from + HOUR / 2)
        make_run(schedule=schedule, scheduled_at=at)
        operations.resume([schedule], **WHO)
        assert Run.objects.get(reason="paused").scheduled_at == schedule.first_after(at)

    def test_what_was_due_and_not_claimed_belongs_to_the_pause(self) -> None:
        schedule = make_schedule(kind="interval", interval_seconds=3600)
        due = schedule.next_run_at - timedelta(hours=1)
        Schedule.objects.filter(pk=schedule.pk).update(next_run_at=due)
        operations.pause([schedule], reason="move", **WHO)
        operations.resume([schedule], **WHO)
        assert Run.objects.get().scheduled_at == due

    def test_the_bounds_of_the_schedule_bound_the_row(self) -> None:
        anchor = datetime(2026, 1, 1, tzinfo=UTC)
        now = database_now()
        schedule = paused(interval_anchor=anchor, starts_at=now - HOUR / 2, ends_at=now - HOUR / 4)
        operations.resume([schedule], **WHO)
        row = Run.objects.get()
        assert (row.details or {})["count"] == 15
        assert row.scheduled_at >= now - HOUR / 2


def _queries_of_a_short_pause() -> int:
    from django.test.utils import CaptureQueriesContext

    schedule = paused(ago=timedelta(minutes=1), interval_seconds=1)
    with CaptureQueriesContext(connection) as queries:
        operations.resume([schedule], **WHO)
    return len(queries)


class TestAfterFailures:
    def test_the_last_failures_pause_the_schedule_and_say_why(self) -> None:
        schedule = make_schedule(auto_pause_after=3)
        ended(schedule, "succeeded", "failed", "lost", "failed")
        assert sweep().paused == (schedule.key,)
        schedule.refresh_from_db()
        assert (schedule.state, schedule.state_by, schedule.paused_until) == (
            "paused",
            "distcron",
            None,
        )
        assert schedule.state_reason == (
            "Paused after 3 failures in a row. The last one: OSError: no route"
        )
        entry = AuditEntry.objects.get()
        assert (entry.actor, entry.via, entry.verb) == ("distcron", "scheduler", "pause")

    @pytest.mark.parametrize(
        "states",
        [
            ("failed", "failed"),
            ("failed", "failed", "succeeded"),
            ("failed", "succeeded", "failed", "failed"),
            ("failed", "failed", "running"),
        ],
    )
    def test_fewer_failures_in_a_row_do_not(self, states: tuple[str, ...]) -> None:
        schedule = make_schedule(auto_pause_after=3)
        ended(schedule, *states)
        assert sweep().paused == ()
        assert Schedule.objects.get().state == "active"

    def test_skipped_and_cancelled_runs_are_no_outcome(self) -> None:
        schedule = make_schedule(auto_pause_after=2)
        ended(schedule, "failed", "skipped", "cancelled", "failed")
        assert sweep().paused == (schedule.key,)

    def test_runs_by_hand_do_not_count(self) -> None:
        schedule = make_schedule(auto_pause_after=2)
        ended(schedule, "failed")
        ended(schedule, "failed", trigger="manual", scheduled_at=None)
        assert sweep().paused == ()

    def test_a_schedule_that_does_not_want_it_is_left_alone(self) -> None:
        ended(make_schedule(), *["failed"] * 20)
        assert sweep().paused == ()

    def test_the_pause_ends_after_its_minutes(self) -> None:
        schedule = make_schedule(auto_pause_after=1, auto_pause_minutes=30)
        ended(schedule, "failed")
        before = database_now()
        sweep()
        schedule.refresh_from_db()
        length = schedule.paused_until - before
        assert timedelta(minutes=29, seconds=59) < length < timedelta(minutes=31)

    @pytest.mark.parametrize("way", ["operation", "update"])
    def test_counting_starts_anew_after_a_resume(self, way: str) -> None:
        schedule = make_schedule(auto_pause_after=2)
        ended(schedule, "failed", "failed")
        sweep()
        if way == "operation":
            operations.resume([schedule], **WHO)
        else:
            Schedule.objects.update(state="active")
        assert sweep().paused == ()
        ended(schedule, "failed")
        assert sweep().paused == ()
        ended(schedule, "failed")
        assert sweep().paused == (schedule.key,)

    def test_one_sweeper_judges_each_failure(self) -> None:
        schedule = make_schedule(auto_pause_after=2)
        sweeper = Sweeper(config=get_config(), clock=Clock())
        ended(schedule, "failed")
        assert sweep(sweeper).paused == ()
        ended(schedule, "failed")
        assert sweep(sweeper).paused == (schedule.key,)

    def test_a_failure_without_a_message_gives_its_reason(self) -> None:
        schedule = make_schedule(auto_pause_after=1)
        ended(schedule, "lost", error="", reason="node_died")
        sweep()
        assert Schedule.objects.get().state_reason == (
            "Paused after 1 failure. The last one: the node stopped without finishing the run"
        )

    def test_the_signal_is_sent(self) -> None:
        heard: list[dict[str, Any]] = []

        def hear(**facts: Any) -> None:
            heard.append(facts)

        schedule = make_schedule(auto_pause_after=1)
        ended(schedule, "failed")
        signals.schedule_paused.connect(hear)
        try:
            sweep()
        finally:
            signals.schedule_paused.disconnect(hear)
        assert [(facts["schedule_id"], facts["until"]) for facts in heard] == [(schedule.pk, None)]

    def test_the_newest_failure_is_returned(self) -> None:
        schedule = make_schedule()
        *_, newest = ended(schedule, "failed", "failed")
        assert failed_in_a_row(schedule, 2) == newest
        assert failed_in_a_row(schedule, 3) is None

    @pytest.mark.parametrize(
        ("field", "value", "problem"),
        [
            ("auto_pause_after", 0, "At least 1, or empty."),
            ("auto_pause_after", 101, "At most 100, or empty."),
            ("auto_pause_minutes", 525_601, "At most 525600, or empty."),
            ("auto_pause_minutes", 5, "Say after how many."),
        ],
    )
    def test_a_value_that_cannot_be_is_refused_at_its_field(
        self, field: str, value: int, problem: str
    ) -> None:
        schedule = make_schedule()
        if "how many" not in problem:
            schedule.auto_pause_after = 3
        setattr(schedule, field, value)
        with pytest.raises(ValidationError) as refused:
            schedule.full_clean()
        assert problem in str(refused.value.message_dict[field])


class TestShown:
    def test_the_page_asks_and_shows_the_end(self, admin_client: Client) -> None:
        schedule = make_schedule()
        url = f"{schedule.get_absolute_url()}pause/"
        assert "In the time zone Asia/Jakarta." in admin_client.get(url).text
        form = {"reason": "move", "idempotency_key": "12345678", "until": "2090-01-01T07:00"}
        assert admin_client.post(url, form).status_code == 302
        stored = Schedule.objects.get()
        assert stored.paused_until == datetime(2090, 1, 1, tzinfo=UTC)
        assert "A node resumes it:" in admin_client.get(schedule.get_absolute_url()).text

    def test_the_page_refuses_an_end_that_is_over(self, admin_client: Client) -> None:
        schedule = make_schedule()
        form = {"reason": "move", "idempotency_key": "12345678", "until": "2020-01-01T07:00"}
        answer = admin_client.post(f"{schedule.get_absolute_url()}pause/", form)
        assert answer.status_code == 400
        assert "It is over already." in answer.text
        assert Schedule.objects.get().state == "active"

    def test_the_admin_takes_an_end_in_the_zone_of_the_project(self, admin_client: Client) -> None:
        schedule = make_schedule()
        form = {
            "ids": str(schedule.pk),
            "idempotency_key": "12345678",
            "reason": "move",
            "until": "2090-01-01T07:00",
        }
        answer = admin_client.post("/admin/distcron/schedule/act/pause/", form)
        assert answer.status_code == 302
        assert Schedule.objects.get().paused_until is not None
        page = admin_client.get(f"/admin/distcron/schedule/{schedule.pk}/change/").text
        assert "until <time" in page

    def test_the_words_follow_the_policy(self) -> None:
        assert explanations.during_a_pause(Schedule()) == (
            "Instants that pass meanwhile are never run."
        )
        assert explanations.during_a_pause(Schedule(on_resume="misfire")) == (
            "Instants that pass meanwhile are decided on resume as after an outage: "
            "run the newest, fold the others into it."
        )


NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)  # 19:00 in Jakarta


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("+90s", "2026-11-30 12:01:30"),
        ("+2h", "2026-11-30 14:00:00"),
        ("+1d", "2026-12-01 12:00:00"),
        ("20:30", "2026-11-30 13:30:00"),
        ("18:00", "2026-12-01 11:00:00"),
        ("19:00", "2026-12-01 12:00:00"),
        ("2026-12-24", "2026-12-23 17:00:00"),
        ("2026-12-24T06:00", "2026-12-23 23:00:00"),
        ("2026-12-24T06:00+01:00", "2026-12-24 05:00:00"),
    ],
)
def test_the_end_of_a_pause_is_read(text: str, expected: str) -> None:
    at = times.parse_until(text, "Asia/Jakarta", NOON)
    assert at.strftime("%Y-%m-%d %H:%M:%S") == expected


@pytest.mark.parametrize("text", ["", "soon", "+h", "+2w", "-2h", "25:00", "2026-13-01"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        times.parse_until(text, "Asia/Jakarta", NOON)


class TestCommand:
    def test_pause_takes_a_length(self) -> None:
        schedule = make_schedule()
        before = database_now()
        answer = ctl("pause", schedule.key, "--reason", "move", "--until", "+2h")
        assert answer.code == 0, answer.error
        until = Schedule.objects.get().paused_until
        assert timedelta(hours=2) <= until - before < timedelta(hours=2, minutes=1)
        assert "UNTIL" in answer.lines[0]

    def test_pause_takes_the_time_of_the_schedules_zone(self) -> None:
        schedule = make_schedule()
        ctl("pause", schedule.key, "--reason", "move", "--until", "2090-01-01T07:00")
        assert Schedule.objects.get().paused_until == datetime(2090, 1, 1, tzinfo=UTC)
        facts = ctl("list", "--json").data["schedules"][0]
        assert (facts["state_by"][:4], facts["paused_until"]) == ("cli:", "2090-01-01T00:00:00Z")

    def test_a_time_of_day_is_the_next_one(self) -> None:
        schedule = make_schedule()
        ctl("pause", schedule.key, "--reason", "move", "--until", "18:00")
        ahead = Schedule.objects.get().paused_until - database_now()
        assert timedelta() < ahead <= timedelta(days=1)
        assert Schedule.objects.get().paused_until.hour == 11

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("soon", "--until: got 'soon'. Write +2h, 18:00 or 2027-03-12T06:00."),
            ("2020-01-01", "--until: 2019-12-31T17:00:00Z is over. Choose a later time."),
        ],
    )
    def test_what_is_no_time_to_come_is_refused(self, text: str, problem: str) -> None:
        schedule = make_schedule()
        answer = ctl("pause", schedule.key, "--reason", "move", "--until", text)
        assert (answer.code, Schedule.objects.get().state) == (2, "active")
        assert problem in answer.error

    def test_schedules_of_different_zones_need_a_zone(self) -> None:
        keys = [make_schedule().key, make_schedule(timezone="UTC").key]
        answer = ctl("pause", *keys, "--reason", "move", "--until", "18:00")
        assert answer.code == 2
        assert "Asia/Jakarta, UTC" in answer.error
        assert ctl("pause", *keys, "--reason", "move", "--until", "18:00", "--utc").code == 0
