"""``schedulerctl explain`` and its page: one true sentence per code, with literal instants."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from distcron_app import operations
from distcron_app.explained_instants import InstantAnswer, explain_instant
from distcron_app.instants import database_now
from distcron_app.locks.memory import MemoryLockBackend
from distcron_app.models import AuditEntry, Calendar, CalendarEntry, Schedule
from tests.integration.pages_rows import user
from tests.integration.schedulerctl_builders import FAR, ctl, make_node, make_run, make_schedule
from tests.integration.test_dispatch import Member, due

pytestmark = pytest.mark.django_db

CREATED = datetime(2026, 1, 1, tzinfo=UTC)
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)  # before any day on which the tests run
NOW = datetime(2026, 11, 30, 3, 0, tzinfo=UTC)
# 02:00 in Jakarta, a time that the rule of make_schedule names.
NIGHT = datetime(2026, 11, 27, 19, 0, tzinfo=UTC)
NEXT_NIGHT = datetime(2026, 11, 30, 19, 0, tzinfo=UTC)
WALL = datetime(2026, 11, 28, 2, 0)  # noqa: DTZ001 - NIGHT, as a person writes it


def old_schedule(key: str = "invoice-close", **fields: Any) -> Schedule:
    """Return a schedule that was created on 1 January and whose next instant is NEXT_NIGHT."""
    stored = {
        "created_at": CREATED,
        "updated_at": CREATED,
        "planned_from": CREATED,
        "next_run_at": NEXT_NIGHT,
    }
    past_the_form = (*stored, "runs_planned", "lock_level")
    after = {name: fields.pop(name) for name in past_the_form if name in fields}
    schedule = make_schedule(key, **fields)
    Schedule.objects.filter(pk=schedule.pk).update(**(stored | after))
    return Schedule.objects.get(pk=schedule.pk)


def asked(schedule: Schedule, when: datetime = NIGHT, now: datetime = NOW) -> InstantAnswer:
    return explain_instant(Schedule.objects.get(pk=schedule.pk), when, now=now)


def facts(answer: InstantAnswer) -> dict[str, Any]:
    return {fact.code: fact.value for fact in answer.facts}


def audited(schedule: Schedule, verb: str, at: datetime, **fields: Any) -> None:
    AuditEntry.objects.create(
        actor="ana",
        via="admin",
        verb=verb,
        object_type="schedule",
        object_id=str(schedule.pk),
        object_label=schedule.name,
        at=at,
        **fields,
    )


class TestARowExists:
    @pytest.mark.parametrize(
        ("state", "code", "sentence"),
        [
            ("succeeded", "ran", "The job ended without an error."),
            ("failed", "failed", "It failed: the job raised an error."),
            ("cancelled", "cancelled", "It was cancelled: the job raised an error."),
        ],
    )
    def test_a_run_that_ended_is_told_with_its_outcome(
        self, state: str, code: str, sentence: str
    ) -> None:
        schedule = old_schedule()
        run = make_run(schedule, state, scheduled_at=NIGHT, reason="error" * (code != "ran"))

        answer = asked(schedule)

        assert (answer.code, answer.sentence) == (code, sentence)
        assert facts(answer)["run"] == run.pk

    def test_a_run_that_waits_is_queued(self) -> None:
        schedule = old_schedule()
        make_run(schedule, "queued", scheduled_at=NIGHT, due_at=NIGHT, owner_token="")

        answer = asked(schedule)

        assert (answer.code, answer.sentence) == ("queued", "It waits for a node with a free slot.")

    def test_a_spread_run_waits_for_its_time(self) -> None:
        schedule, due_at = old_schedule(), NIGHT + timedelta(seconds=300)
        make_run(schedule, "queued", scheduled_at=NIGHT, due_at=due_at, owner_token="")

        answer = asked(schedule, now=NIGHT + timedelta(seconds=60))

        assert (answer.code, answer.sentence) == (
            "queued",
            "It waits for its time: the schedule spreads its starts.",
        )
        assert facts(answer)["due_at"] == due_at

    def test_an_active_run_is_running_on_its_node(self) -> None:
        schedule, node = old_schedule(), make_node("web-1", expires_at=FAR)
        make_run(schedule, "running", scheduled_at=NIGHT, node=node)

        answer = asked(schedule)

        assert answer.code == "running"
        assert answer.sentence == "The job is running on node web-1."

    def test_a_lost_run_says_that_nobody_knows(self) -> None:
        schedule, node = old_schedule(), make_node("web-1")
        make_run(
            schedule,
            "lost",
            reason="node_died",
            scheduled_at=NIGHT,
            node=node,
            delivery="at_most_once",
        )

        answer = asked(schedule)

        assert answer.code == "lost"
        assert answer.sentence == (
            "Node web-1 stopped reporting while the job was running. The job had started, so "
            "nobody knows whether its work was done. Its delivery is “at most once”, so no node "
            "starts it again."
        )

    def test_an_overlap_names_the_run_the_node_and_the_policy(self) -> None:
        schedule, node = old_schedule(), make_node("web-1")
        decided_at = datetime(2026, 11, 27, 19, 0, 0, 113_000, tzinfo=UTC)
        run = make_run(
            schedule,
            "skipped",
            reason="overlap",
            scheduled_at=NIGHT,
            details={"blocked_by": 88001},
            node=node,
            claimed_at=decided_at,
            finished_at=decided_at,
        )

        answer = asked(schedule, WALL)

        assert (answer.at, answer.code) == (NIGHT, "skipped_overlap")
        assert answer.sentence == "It did not run: the previous run was still active."
        assert facts(answer) == {
            "rule": "At 02:00 every day",
            "run": run.pk,
            "node": "web-1",
            "decided_at": decided_at,
            "finished_at": decided_at,
            "blocked_by": 88001,
            "policy": "overlap = skip",
            "change": "edit “while a run is still active” of the schedule, now skip",
            "advice": "If this repeats, the job takes longer than its timetable allows.",
        }

    @pytest.mark.parametrize(
        ("reason", "sentence"),
        [
            (
                "coalesced",
                "It did not run: a later occurrence that was due as well ran in its place.",
            ),
            ("misfire", "It did not run: when a node looked, it was too late to start."),
            ("calendar", "It did not run: a calendar excludes the day."),
        ],
    )
    def test_an_instant_inside_a_stretch_is_told_by_the_row_of_the_stretch(
        self, reason: str, sentence: str
    ) -> None:
        schedule = old_schedule()
        details = {
            "first_at": "2026-11-25T19:00:00+00:00",
            "last_at": "2026-11-27T19:00:00+00:00",
            "count": 3,
            "why": "Nyepi",
        }
        row = make_run(
            schedule,
            "skipped",
            reason=reason,
            scheduled_at=datetime(2026, 11, 25, 19, tzinfo=UTC),
            details=details,
        )

        answer = asked(schedule)

        assert (answer.code, answer.sentence) == (f"skipped_{reason}", sentence)
        assert facts(answer)["run"] == row.pk
        assert facts(answer)["occurrences"] == 3
        assert facts(answer)["last_at"] == NIGHT

    def test_the_first_instant_of_an_excluded_stretch_has_the_reason_of_its_day(self) -> None:
        schedule = old_schedule()
        details = {"why": "2026-11-28 is excluded: Nyepi"}
        make_run(schedule, "skipped", reason="calendar", scheduled_at=NIGHT, details=details)

        assert asked(schedule).sentence == "It did not run: 2026-11-28 is excluded: Nyepi."

    def test_an_instant_behind_the_stretch_is_not_told_by_it(self) -> None:
        schedule = old_schedule()
        make_run(
            schedule,
            "skipped",
            reason="misfire",
            scheduled_at=datetime(2026, 11, 24, 19, tzinfo=UTC),
            details={
                "first_at": "2026-11-24T19:00:00+00:00",
                "last_at": "2026-11-26T19:00:00+00:00",
                "count": 3,
            },
        )

        assert asked(schedule).code == "unknown"

    def test_a_stretch_of_another_rule_is_not_taken_for_the_answer(self) -> None:
        planned_anew = datetime(2026, 11, 29, tzinfo=UTC)
        schedule = old_schedule(planned_from=planned_anew)
        make_run(
            schedule,
            "skipped",
            reason="misfire",
            scheduled_at=datetime(2026, 11, 25, 19, tzinfo=UTC),
            finished_at=datetime(2026, 11, 28, tzinfo=UTC),
            details={
                "first_at": "2026-11-25T19:00:00+00:00",
                "last_at": "2026-11-27T19:00:00+00:00",
                "count": 49,
            },
        )

        assert asked(schedule).code == "before_edit"

    def test_a_misfire_while_no_node_was_alive_says_so(self) -> None:
        now = datetime(2026, 11, 27, 20, 0, tzinfo=UTC)
        stopped, started = NIGHT - timedelta(minutes=2), NIGHT + timedelta(minutes=7)
        schedule = old_schedule()
        make_node("web-1", state="left", started_at=CREATED, expires_at=stopped)
        make_node("web-2", started_at=started, expires_at=FAR)
        make_run(schedule, "skipped", reason="misfire", scheduled_at=NIGHT)

        answer = asked(schedule, now=now)

        assert answer.code == "skipped_misfire"
        assert answer.sentence == (
            "It did not run: no node was alive, and when one looked it was too late."
        )
        assert facts(answer)["no_node_from"] == stopped
        assert facts(answer)["no_node_until"] == started

    def test_nodes_that_may_be_forgotten_prove_no_gap(self) -> None:
        schedule = old_schedule()
        make_node("web-2", started_at=NIGHT + timedelta(minutes=7), expires_at=FAR)
        make_run(schedule, "skipped", reason="misfire", scheduled_at=NIGHT)

        answer = asked(schedule, now=NIGHT + timedelta(hours=25))

        assert answer.sentence == "It did not run: when a node looked, it was too late to start."
        assert "no_node_until" not in facts(answer)

    @pytest.mark.parametrize(
        ("reason", "sentence"),
        [
            (
                "expired",
                "It did not run: it could not start within the time its schedule allows.",
            ),
            ("paused", "It did not run: when it was due, its schedule was paused."),
        ],
    )
    def test_other_skips(self, reason: str, sentence: str) -> None:
        schedule = old_schedule()
        make_run(schedule, "skipped", reason=reason, scheduled_at=NIGHT)

        answer = asked(schedule)

        assert (answer.code, answer.sentence) == (f"skipped_{reason}", sentence)

    def test_a_row_is_told_even_where_the_rule_is_broken_by_now(self) -> None:
        schedule = old_schedule()
        make_run(schedule, "succeeded", scheduled_at=NIGHT)
        Schedule.objects.filter(pk=schedule.pk).update(cron="99 * * * *")

        assert asked(schedule).code == "ran"

    def test_an_instant_with_a_fraction_is_found_by_its_second(self) -> None:
        anchor = datetime(2026, 11, 27, 19, 0, 0, 250_000, tzinfo=UTC)
        schedule = old_schedule(
            kind="interval", cron="", interval_seconds=60, interval_anchor=anchor
        )
        make_run(schedule, "succeeded", scheduled_at=anchor)

        assert (asked(schedule).at, asked(schedule).code) == (anchor, "ran")


class TestTheRuleDoesNotPlanIt:
    def test_another_time_of_day_is_not_in_the_rule(self) -> None:
        answer = asked(old_schedule(), datetime(2026, 11, 27, 20, 0, tzinfo=UTC))

        assert answer.code == "not_in_rule"
        assert answer.sentence == (
            "It was never planned: the rule means “At 02:00 every day” (Asia/Jakarta)."
        )
        assert facts(answer)["before"] == NIGHT
        assert facts(answer)["after"] == datetime(2026, 11, 28, 19, 0, tzinfo=UTC)

    def test_a_rule_that_may_have_been_another_one_is_told_as_it_stands_now(self) -> None:
        resumed = datetime(2026, 11, 29, tzinfo=UTC)
        answer = asked(
            old_schedule(planned_from=resumed), datetime(2026, 11, 27, 20, 0, tzinfo=UTC)
        )

        assert answer.code == "not_in_rule"
        assert answer.sentence == (
            "No run is recorded. As the schedule stands now, "
            "the rule means “At 02:00 every day” (Asia/Jakarta)."
        )
        assert facts(answer)["planned_from"] == resumed

    def test_an_instant_to_come_that_the_rule_does_not_name(self) -> None:
        answer = asked(old_schedule(), datetime(2026, 12, 1, 20, 0, tzinfo=UTC))

        assert (answer.code, answer.sentence) == (
            "not_in_rule",
            "It will not run: the rule means “At 02:00 every day” (Asia/Jakarta).",
        )

    def test_before_the_first_day(self) -> None:
        starts_at = datetime(2026, 11, 28, tzinfo=UTC)
        answer = asked(old_schedule(starts_at=starts_at))

        assert (answer.code, answer.sentence) == (
            "before_start",
            "It was never planned: the instant is before the schedule's “not before”.",
        )
        assert facts(answer)["starts_at"] == starts_at

    def test_after_the_last_day(self) -> None:
        answer = asked(old_schedule(ends_at=datetime(2026, 11, 27, tzinfo=UTC)))

        assert (answer.code, answer.sentence) == (
            "after_end",
            "It was never planned: the instant is after the schedule's “not after”.",
        )

    def test_an_excluded_day(self) -> None:
        answer = asked(old_schedule(calendar=holiday()))

        assert (answer.code, answer.sentence) == (
            "calendar",
            "It did not run: 2026-11-28 is excluded: Stocktaking.",
        )
        assert facts(answer)["calendar"] == "Office"

    def test_an_occurrence_that_a_calendar_moves(self) -> None:
        answer = asked(old_schedule(calendar=holiday(), calendar_action="next"))

        assert (answer.code, answer.sentence) == (
            "calendar_moved",
            "It was never planned: the calendar excludes this day and moves its occurrences "
            "to another day.",
        )


def holiday() -> Calendar:
    calendar = Calendar.objects.create(name="Office", timezone="Asia/Jakarta")
    day = date(2026, 11, 28)
    CalendarEntry.objects.create(calendar=calendar, first=day, last=day, summary="Stocktaking")
    return calendar


class TestClockChanges:
    """New York: 02:00 to 03:00 does not exist on 8 March 2026; 01:00 comes twice on 1 November."""

    GAP = datetime(2026, 3, 8, 2, 30)  # noqa: DTZ001 - wall time
    FOLD = datetime(2026, 11, 1, 1, 30)  # noqa: DTZ001 - wall time

    def rule(self, cron: str, **fields: Any) -> Schedule:
        return old_schedule(cron=cron, timezone="America/New_York", **fields)

    def test_a_time_that_is_jumped_over_and_left_out(self) -> None:
        answer = asked(self.rule("30 2 * * *", gap="skip"), self.GAP)

        assert (answer.code, answer.sentence) == (
            "clock_gap",
            "It was never planned: the clocks jump over this time, and the rule leaves it out.",
        )
        assert facts(answer)["policy"] == "gap = skip"
        assert facts(answer)["wall_time"] == (
            "This wall time does not exist: the clocks jump over it."
        )

    def test_a_time_that_is_jumped_over_and_made_up_for(self) -> None:
        schedule = self.rule("30 2 * * *")
        make_run(schedule, "succeeded", scheduled_at=datetime(2026, 3, 8, 7, 0, tzinfo=UTC))

        answer = asked(schedule, self.GAP)

        assert (answer.at, answer.code) == (datetime(2026, 3, 8, 7, 0, tzinfo=UTC), "ran")
        assert facts(answer)["wall_time"] == (
            "This wall time does not exist: the clocks jump over it."
        )

    def test_a_time_that_is_jumped_over_and_not_in_the_rule(self) -> None:
        answer = asked(self.rule("45 4 * * *"), self.GAP)

        assert answer.code == "not_in_rule"

    def test_the_second_of_two_equal_times_is_held_back(self) -> None:
        answer = asked(self.rule("30 1 * * *"), datetime(2026, 11, 1, 6, 30, tzinfo=UTC))

        assert (answer.code, answer.sentence) == (
            "clock_fold",
            "It was never planned: the clocks show this time twice, and the rule runs at the "
            "other one.",
        )
        assert facts(answer)["policy"] == "fold = first"

    @pytest.mark.parametrize(
        ("fold", "hour", "note"),
        [
            ("first", 5, "This wall time happens twice; the first is meant."),
            ("second", 6, "This wall time happens twice; the second is meant."),
        ],
    )
    def test_a_wall_time_that_comes_twice_means_the_one_of_the_rule(
        self, fold: str, hour: int, note: str
    ) -> None:
        schedule = self.rule("30 1 * * *", fold=fold)
        at = datetime(2026, 11, 1, hour, 30, tzinfo=UTC)
        make_run(schedule, "succeeded", scheduled_at=at)

        answer = asked(schedule, self.FOLD)

        assert (answer.at, answer.code) == (at, "ran")
        assert facts(answer)["wall_time"] == note


class TestThePast:
    def test_before_the_schedule_was_created(self) -> None:
        created = datetime(2026, 11, 28, 8, 30, tzinfo=UTC)
        answer = asked(old_schedule(created_at=created, planned_from=created))

        assert (answer.code, answer.sentence) == (
            "before_creation",
            "It was never planned: the schedule was created later.",
        )
        assert facts(answer)["created_at"] == created

    def test_while_a_person_had_paused_it(self) -> None:
        paused, resumed = NIGHT - timedelta(hours=5), NIGHT + timedelta(hours=7)
        schedule = old_schedule(planned_from=resumed)
        active, held = {"state": "active"}, {"state": "paused"}
        audited(schedule, "pause", paused, before=active, after=held, reason="books closed")
        audited(schedule, "resume", resumed, before=held, after=active)

        answer = asked(schedule)

        assert (answer.code, answer.sentence) == (
            "paused",
            "It was not planned: ana had paused the schedule (books closed).",
        )
        assert facts(answer)["paused_from"] == paused
        assert facts(answer)["paused_until"] == resumed

    def test_before_the_pause_and_after_the_resume_it_was_not_paused(self) -> None:
        schedule = old_schedule(planned_from=NIGHT - timedelta(days=4))
        audited(schedule, "pause", NIGHT - timedelta(days=5), after={"state": "paused"})
        audited(schedule, "resume", NIGHT - timedelta(days=4), after={"state": "active"})

        assert asked(schedule).code == "unknown"
        assert asked(schedule, NIGHT - timedelta(days=6)).code == "before_edit"

    def test_a_real_pause_is_found_in_the_audit(self) -> None:
        schedule = old_schedule()
        operations.pause([schedule], reason="move", actor="cli:ana", via="cli")
        AuditEntry.objects.update(at=NIGHT - timedelta(hours=1))

        answer = asked(schedule)

        assert answer.sentence == "It was not planned: cli:ana had paused the schedule (move)."
        assert "paused_until" not in facts(answer)

    def test_a_pause_past_the_audit_is_read_from_the_row(self) -> None:
        schedule = old_schedule()
        Schedule.objects.filter(pk=schedule.pk).update(
            state="paused", state_by="ben", state_reason="fixture", state_at=NIGHT
        )

        assert asked(schedule).sentence == (
            "It was not planned: ben had paused the schedule (fixture)."
        )

    def test_before_the_rule_was_changed(self) -> None:
        edited = datetime(2026, 11, 29, 4, 0, tzinfo=UTC)
        schedule = old_schedule(planned_from=edited)
        audited(
            schedule, "change", edited, before={"cron": "0 4 * * *"}, after={"cron": "0 2 * * *"}
        )

        answer = asked(schedule)

        assert (answer.code, answer.sentence) == (
            "before_edit",
            "No run is recorded, and the timetable has been changed since.",
        )
        assert facts(answer)["edited_by"] == "ana"
        assert facts(answer)["edit"] == "cron: 0 4 * * * → 0 2 * * *"

    def test_a_change_before_the_instant_is_not_the_answer(self) -> None:
        edited = NIGHT - timedelta(days=1)
        schedule = old_schedule(planned_from=edited)
        audited(schedule, "change", edited, before={"cron": "0 4 * * *"}, after={"cron": "x"})

        assert asked(schedule).code == "unknown"

    def test_before_it_was_planned_anew_past_the_audit(self) -> None:
        anew = datetime(2026, 11, 29, 4, 0, tzinfo=UTC)
        answer = asked(old_schedule(planned_from=anew))

        assert (answer.code, answer.sentence) == (
            "before_edit",
            "No run is recorded: the schedule was planned anew later, and from then on only.",
        )
        assert facts(answer)["planned_from"] == anew

    def test_after_all_runs_were_used_up(self) -> None:
        schedule = old_schedule(max_runs=1, runs_planned=1, next_run_at=None)
        Schedule.objects.filter(pk=schedule.pk).write_plan(
            Schedule(state="exhausted", next_run_at=None)
        )
        make_run(schedule, "succeeded", scheduled_at=NIGHT - timedelta(days=1))

        answer = asked(schedule)

        assert (answer.code, answer.sentence) == (
            "beyond_max_runs",
            "It was never planned: the schedule had all of its runs already.",
        )

    def test_a_history_that_was_deleted(self) -> None:
        schedule = old_schedule(runs_planned=300)
        make_run(schedule, "succeeded", scheduled_at=NIGHT + timedelta(days=1))

        answer = asked(schedule)

        assert (answer.code, answer.sentence) == (
            "pruned",
            "Not known any more: the history of that time was deleted.",
        )
        assert facts(answer)["missing"] == 299
        assert facts(answer)["oldest_at"] == NIGHT + timedelta(days=1)

    def test_a_schedule_that_is_invalid_by_now(self) -> None:
        schedule = old_schedule()
        Schedule.objects.filter(pk=schedule.pk).mark_invalid("Job 'x': not registered.")

        answer = asked(schedule)

        assert (answer.code, answer.sentence) == (
            "invalid",
            "No run is recorded, and the schedule is invalid now: Job 'x': not registered.",
        )

    def test_a_rule_that_is_broken(self) -> None:
        schedule = old_schedule()
        Schedule.objects.filter(pk=schedule.pk).update(timezone="Mars/Base")

        answer = asked(schedule)

        assert answer.code == "invalid"
        assert answer.sentence.startswith(
            "The rule of the schedule is not valid, so it names no instants: "
        )
        assert "Mars/Base" in answer.sentence

    def test_what_nothing_proves_is_not_known(self) -> None:
        answer = asked(old_schedule())

        assert (answer.code, answer.sentence) == (
            "unknown",
            "Not known: today's rule names this instant, and no run of it is recorded.",
        )
        assert facts(answer)["next_run_at"] == NEXT_NIGHT


class TestDueAndToCome:
    def due(self, **fields: Any) -> InstantAnswer:
        schedule = old_schedule(next_run_at=NIGHT, **fields)
        return asked(schedule, now=NIGHT + timedelta(seconds=95))

    def test_due_without_a_node(self) -> None:
        answer = self.due()

        assert (answer.code, answer.sentence) == (
            "due_no_node",
            "It is due and waits: no node is alive.",
        )
        assert facts(answer)["late_seconds"] == 95
        assert facts(answer)["nodes_alive"] == 0

    def test_due_while_all_nodes_drain(self) -> None:
        make_node("web-1", state="draining", expires_at=FAR)

        answer = self.due()

        assert (answer.code, answer.sentence) == (
            "due_draining",
            "It is due and waits: all nodes alive are draining.",
        )

    def test_due_while_all_slots_are_taken(self) -> None:
        make_node("web-1", expires_at=FAR, slots=2, running=2)

        answer = self.due()

        assert (answer.code, answer.sentence) == (
            "due_busy",
            "It is due and waits: by their heartbeats, no node that takes runs has a free slot.",
        )

    def test_due_while_its_strict_lock_level_is_away(self) -> None:
        alert = "lock level critical unavailable, its schedules wait: no majority"
        make_node("web-1", expires_at=FAR, alert=alert)

        answer = self.due(lock_level="critical")

        assert (answer.code, answer.sentence) == (
            "due_lock_away",
            "It is due and waits: lock level critical unavailable, its schedules wait: "
            "no majority.",
        )

    def test_due_and_about_to_be_claimed(self) -> None:
        make_node("web-1", expires_at=FAR)

        answer = self.due()

        assert (answer.code, answer.sentence) == ("due", "It is due: no node has claimed it yet.")

    def test_still_to_come(self) -> None:
        answer = asked(old_schedule(spread_seconds=0), NEXT_NIGHT)

        assert (answer.code, answer.sentence) == ("future", "It is still to come.")
        assert facts(answer)["due_at"] == NEXT_NIGHT

    def test_to_come_while_paused(self) -> None:
        schedule = old_schedule()
        operations.pause([schedule], reason="move", actor="ana", via="cli")

        answer = asked(schedule, NEXT_NIGHT)

        assert (answer.code, answer.sentence) == (
            "paused",
            "It will not run unless resumed: ana has paused the schedule (move).",
        )

    def test_to_come_while_invalid(self) -> None:
        schedule = old_schedule()
        Schedule.objects.filter(pk=schedule.pk).mark_invalid("Job 'x': not registered.")

        assert asked(schedule, NEXT_NIGHT).sentence == (
            "It will not run: the schedule is invalid: Job 'x': not registered."
        )

    def test_to_come_when_finished(self) -> None:
        schedule = old_schedule()
        Schedule.objects.filter(pk=schedule.pk).write_plan(
            Schedule(state="exhausted", state_reason="No instant of the timetable is left.")
        )

        answer = asked(schedule, NEXT_NIGHT)

        assert (answer.code, answer.sentence) == (
            "exhausted",
            "It will not run: the schedule is finished. No instant of the timetable is left.",
        )

    def test_to_come_behind_the_last_run(self) -> None:
        schedule = old_schedule(max_runs=3, runs_planned=2)

        assert asked(schedule, NEXT_NIGHT).code == "future"
        later = asked(schedule, NEXT_NIGHT + timedelta(days=1))
        assert (later.code, later.sentence) == (
            "beyond_max_runs",
            "It will run only if an earlier one does not: the runs are used up before.",
        )


class TestTheCommand:
    def test_says_one_sentence_and_then_what_is_known(self) -> None:
        old_schedule(created_at=LONG_AGO, planned_from=LONG_AGO)

        answer = ctl("explain", "invoice-close", "--at", "2020-11-28 03:00")

        assert answer.code == 0
        assert answer.lines == [
            "Sat 28 Nov 2020 03:00 WIB  It was never planned: the rule means "
            "“At 02:00 every day” (Asia/Jakarta).",
            "  rule now: At 02:00 every day",
            "  nearest before: Sat 28 Nov 2020 02:00 WIB",
            "  nearest after: Sun 29 Nov 2020 02:00 WIB",
        ]

    def test_json_has_these_keys(self) -> None:
        old_schedule(created_at=LONG_AGO, planned_from=LONG_AGO)

        answer = ctl("explain", "invoice-close", "--at", "2020-11-27T20:00Z", "--json")

        assert answer.data == {
            "version": 1,
            "verb": "explain",
            "key": "invoice-close",
            "timezone": "Asia/Jakarta",
            "at": "2020-11-27T20:00:00Z",
            "code": "not_in_rule",
            "text": "It was never planned: the rule means “At 02:00 every day” (Asia/Jakarta).",
            "run": None,
            "state": None,
            "reason": None,
            "facts": {
                "rule": "At 02:00 every day",
                "before": "2020-11-27T19:00:00Z",
                "after": "2020-11-28T19:00:00Z",
            },
        }

    @pytest.mark.parametrize(
        ("at", "error"),
        [
            (
                "yesterday",
                "--at 'yesterday': not a date or time. "
                "Write 2027-03-12T06:00 or 2027-03-12T06:00Z.",
            ),
            ("0001-01-01", "--at '0001-01-01': year must be from 1970 to 2199."),
        ],
    )
    def test_a_time_that_is_none_is_refused(self, at: str, error: str) -> None:
        old_schedule(created_at=LONG_AGO, planned_from=LONG_AGO)

        answer = ctl("explain", "invoice-close", "--at", at)

        assert (answer.code, answer.out, answer.error) == (2, "", error)

    def test_an_unknown_schedule_is_not_found(self) -> None:
        assert ctl("explain", "nope", "--at", "2020-11-28").code == 4


class TestThePage:
    def opened(self, client: Client, schedule: Schedule, at: str, *abilities: str) -> Any:
        client.force_login(user("siti", "view_schedule", *abilities))
        return client.get(reverse("distcron:explain", args=[schedule.pk]), {"at": at})

    def test_answers_as_the_command_does(self, client: Client) -> None:
        schedule = old_schedule(created_at=LONG_AGO, planned_from=LONG_AGO)

        answer = self.opened(client, schedule, "2020-11-28T03:00")

        assert answer.status_code == 200
        assert (
            "It was never planned: the rule means “At 02:00 every day” (Asia/Jakarta)."
            in answer.text
        )

    def test_a_run_is_shown_to_those_who_may_see_runs(self, client: Client) -> None:
        schedule = old_schedule()
        run = make_run(schedule, "succeeded", scheduled_at=NIGHT)

        answer = self.opened(client, schedule, "2026-11-28T02:00", "view_run")

        assert "The job ended without an error." in answer.text
        assert reverse("distcron:run", args=[run.pk]) in answer.text

    def test_a_run_is_hidden_from_those_who_may_not(self, client: Client) -> None:
        schedule = old_schedule()
        make_run(schedule, "failed", reason="error", error="Boom", scheduled_at=NIGHT)

        answer = self.opened(client, schedule, "2026-11-28T02:00")

        assert "distcron.view_run" in answer.text
        assert "Boom" not in answer.text
        assert "It failed" not in answer.text

    def test_a_time_that_is_none_is_named(self, client: Client) -> None:
        answer = self.opened(client, old_schedule(), "yesterday")

        assert answer.status_code == 400
        assert "&#x27;yesterday&#x27;: not a date or time." in answer.text


class TestWhatTheClaimWrites:
    """Rows by the dispatcher itself: every due instant has an answer."""

    def test_after_an_outage_each_instant_is_told_by_its_row(self) -> None:
        schedule = due(seconds_ago=1200, catchup_window_seconds=610)
        first = schedule.next_run_at
        assert first is not None
        created = first - timedelta(days=2)
        Schedule.objects.filter(pk=schedule.pk).update(created_at=created, planned_from=created)
        Member(MemoryLockBackend()).tick()

        minutes = [first + timedelta(minutes=number) for number in range(21)]
        answers = [asked(schedule, at, database_now()) for at in minutes]

        # 20 to 11 minutes ago: older than the window. Then folded into the newest.
        assert [answer.code for answer in answers] == [
            *["skipped_misfire"] * 10,
            *["skipped_coalesced"] * 10,
            "running",
        ]
        assert [answer.at for answer in answers] == minutes


def test_five_questions_have_five_different_true_sentences() -> None:
    """E19: overlap, paused, misfire, node gap, rule mismatch."""
    now = NIGHT + timedelta(hours=3)
    schedule = old_schedule(cron="0 * * * *", next_run_at=NIGHT + timedelta(hours=4))
    hours = [NIGHT - timedelta(hours=ago) for ago in (4, 3, 2, 1)]
    make_node("web-1", state="left", started_at=CREATED, expires_at=hours[2])
    make_node("web-2", started_at=NIGHT, expires_at=FAR)
    make_run(
        schedule, "skipped", reason="overlap", scheduled_at=hours[0], details={"blocked_by": 1}
    )
    audited(schedule, "pause", hours[1] - timedelta(minutes=5), after={"state": "paused"})
    audited(schedule, "resume", hours[1] + timedelta(minutes=5), after={"state": "active"})
    make_run(schedule, "skipped", reason="misfire", scheduled_at=hours[2])
    make_run(schedule, "skipped", reason="misfire", scheduled_at=hours[3])

    found = [asked(schedule, at, now) for at in (*hours, NIGHT + timedelta(minutes=1))]

    assert [(answer.code, answer.sentence) for answer in found] == [
        ("skipped_overlap", "It did not run: the previous run was still active."),
        ("paused", "It was not planned: ana had paused the schedule (no reason given)."),
        ("skipped_misfire", "It did not run: when a node looked, it was too late to start."),
        (
            "skipped_misfire",
            "It did not run: no node was alive, and when one looked it was too late.",
        ),
        ("not_in_rule", "It was never planned: the rule means “Every hour” (Asia/Jakarta)."),
    ]
