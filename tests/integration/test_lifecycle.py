"""The claim, start, finish and recovery of runs, on whichever database TEST_DATABASE names."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import IntegrityError, connection, connections, transaction

from distcron_app import lifecycle, nodes
from distcron_app.conf import Config
from distcron_app.errors import ScheduleBusy
from distcron_app.instants import DatabaseNow, database_now
from distcron_app.lifecycle import CancelResult, ClaimedRun, Decision, Finished, Skip, Stops
from distcron_app.locks import new_owner_token
from distcron_app.models import Attempt, Node, Run, RunOutput, Schedule
from tests.factories import make_node, make_run, make_schedule

pytestmark = pytest.mark.django_db


def due_schedule(**values: Any) -> Schedule:
    """Return a schedule whose next instant is two seconds ago."""
    schedule = make_schedule(
        kind="interval", cron="", interval_seconds=60, interval_anchor=whole_second(), **values
    )
    Schedule.objects.filter(pk=schedule.pk).update(next_run_at=whole_second(-2))
    schedule.refresh_from_db()
    return schedule


def whole_second(offset: int = 0) -> datetime:
    return database_now().replace(microsecond=0) + timedelta(seconds=offset)


def make_due(schedule: Schedule, at: datetime) -> None:
    Schedule.objects.filter(pk=schedule.pk).update(next_run_at=at)
    schedule.refresh_from_db()


def decide(schedule: Schedule, **values: Any) -> Decision:
    seen = schedule.next_run_at
    assert seen is not None
    defaults: dict[str, Any] = {
        "schedule_id": schedule.pk,
        "version": schedule.version,
        "seen_next_run_at": seen,
        "next_run_at": seen + timedelta(minutes=1),
        "owner_token": new_owner_token(),
        "run_at": seen,
    }
    return Decision(**defaults | values)


def claimed_run(node: Node, **values: Any) -> ClaimedRun:
    (run,) = lifecycle.claim([decide(due_schedule(**values))], node.pk).runs
    return run


def started_run(node: Node, **values: Any) -> ClaimedRun:
    run = claimed_run(node, **values)
    if run.state == "claimed":
        assert lifecycle.start([run], node.pk) == {run.run_id}
    return run


def report(run: ClaimedRun, **values: Any) -> Finished:
    defaults: dict[str, Any] = {
        "run_id": run.run_id,
        "fencing_token": run.fencing_token,
        "owner_token": run.owner_token,
        "state": "succeeded",
        "finished_at": database_now(),
    }
    return Finished(**defaults | values)


def bury(node: Node) -> None:
    """Let the node's lease expire and have it declared dead."""
    Node.objects.filter(pk=node.pk).update(expires_at=DatabaseNow(timedelta(seconds=-1)))
    assert nodes.declare_dead() == [node.pk]


class TestClaim:
    def test_a_claim_moves_the_schedule_and_inserts_the_run(self) -> None:
        node = make_node()
        schedule = due_schedule(job="project.demo.invoice_close", arguments={"batch": 3})
        decision = decide(schedule)

        (run,) = lifecycle.claim([decision], node.pk).runs

        row = Run.objects.get()
        assert (row.pk, row.state, row.scheduled_at) == (run.run_id, "claimed", decision.run_at)
        assert (row.fencing_token, row.owner_token) == (1, decision.owner_token)
        assert (row.node_id, row.job, row.schedule_name) == (
            node.pk,
            schedule.job,
            schedule.name,
        )
        assert run.arguments == {"batch": 3}
        schedule.refresh_from_db()
        assert (schedule.next_run_at, schedule.fencing_token) == (decision.next_run_at, 1)

    def test_at_least_once_starts_with_the_claim(self) -> None:
        run = claimed_run(make_node(), delivery="at_least_once")
        row = Run.objects.get()
        assert (run.state, row.state, row.attempt) == ("running", "running", 1)
        assert row.started_at is not None

    def test_a_second_claim_of_the_same_occurrence_gets_nothing(self) -> None:
        schedule = due_schedule()
        first, second = make_node(), make_node()
        assert lifecycle.claim([decide(schedule)], first.pk).runs
        assert lifecycle.claim([decide(schedule)], second.pk) == lifecycle.Claimed()
        assert Run.objects.count() == 1

    def test_a_claim_seen_before_an_edit_gets_nothing(self) -> None:
        schedule = due_schedule()
        decision = decide(schedule)
        schedule.notes = "changed"
        schedule.save()
        assert lifecycle.claim([decision], make_node().pk) == lifecycle.Claimed()
        assert not Run.objects.exists()

    def test_a_claim_of_a_paused_schedule_gets_nothing(self) -> None:
        schedule = due_schedule()
        decision = decide(schedule)
        Schedule.objects.filter(pk=schedule.pk).update(
            state="paused", next_run_at=schedule.next_run_at, version=schedule.version
        )
        assert lifecycle.claim([decision], make_node().pk) == lifecycle.Claimed()

    def test_a_claim_of_a_deleted_schedule_gets_nothing(self) -> None:
        schedule = due_schedule()
        decision = decide(schedule)
        schedule.delete()
        assert lifecycle.claim([decision], make_node().pk) == lifecycle.Claimed()

    @pytest.mark.parametrize("state", ["dead", "left", "draining"])
    def test_a_node_that_is_not_active_claims_nothing(self, state: str) -> None:
        schedule = due_schedule()
        assert lifecycle.claim([decide(schedule)], make_node(state=state).pk).runs == ()
        schedule.refresh_from_db()
        assert schedule.next_run_at < database_now()

    def test_a_node_whose_lease_expired_claims_nothing(self) -> None:
        node = make_node(expires_at=whole_second(-1))
        assert lifecycle.claim([decide(due_schedule())], node.pk).runs == ()

    def test_an_instant_that_ran_before_is_not_run_again_after_the_cursor_moved_back(self) -> None:
        node = make_node()
        schedule = due_schedule()
        (run,) = lifecycle.claim([decide(schedule)], node.pk).runs
        lifecycle.start([run], node.pk)
        lifecycle.finish([report(run)])
        Schedule.objects.filter(pk=schedule.pk).update(next_run_at=run.scheduled_at)
        schedule.refresh_from_db()
        assert lifecycle.claim([decide(schedule)], node.pk).runs == ()
        assert Run.objects.count() == 1

    def test_an_active_run_makes_the_next_occurrence_skipped_with_its_number(self) -> None:
        node = make_node()
        schedule = due_schedule()
        (first,) = lifecycle.claim([decide(schedule)], node.pk).runs
        make_due(schedule, whole_second(-1))
        claimed = lifecycle.claim([decide(schedule)], node.pk)
        assert claimed.runs == ()
        (skipped,) = claimed.skipped
        assert (skipped.reason, skipped.details) == ("overlap", {"blocked_by": first.run_id})
        row = Run.objects.get(state="skipped")
        assert (row.reason, row.details) == ("overlap", {"blocked_by": first.run_id})
        assert row.owner_token == ""

    def test_a_run_that_waits_for_its_second_attempt_blocks_the_next_occurrence(self) -> None:
        schedule = due_schedule()
        waiting = make_run(schedule=schedule, state="queued", attempt=1)
        (skipped,) = lifecycle.claim([decide(schedule)], make_node().pk).skipped
        assert skipped.details == {"blocked_by": waiting.pk}

    def test_a_manual_run_that_has_not_started_does_not_block_the_timetable(self) -> None:
        schedule = due_schedule()
        make_run(schedule=schedule, state="queued")
        assert lifecycle.claim([decide(schedule)], make_node().pk).runs

    def test_skips_are_written_beside_the_run(self) -> None:
        schedule = due_schedule()
        skip = Skip(
            scheduled_at=whole_second(-600),
            reason="coalesced",
            details={"first_at": "a", "last_at": "b", "count": 9},
        )
        claimed = lifecycle.claim([decide(schedule, skips=(skip,))], make_node().pk)
        assert len(claimed.runs) == 1
        row = Run.objects.get(state="skipped")
        assert (row.scheduled_at, row.reason) == (skip.scheduled_at, "coalesced")
        assert row.details == {"first_at": "a", "last_at": "b", "count": 9}
        assert row.finished_at is not None

    def test_the_last_instant_leaves_the_schedule_finished(self) -> None:
        schedule = due_schedule()
        assert lifecycle.claim([decide(schedule, next_run_at=None)], make_node().pk).runs
        schedule.refresh_from_db()
        assert (schedule.state, schedule.next_run_at) == ("exhausted", None)
        assert schedule.state_reason

    def test_a_batch_is_claimed_together_and_losers_are_left_out(self) -> None:
        node = make_node()
        schedules = [due_schedule() for _ in range(5)]
        decisions = [decide(schedule) for schedule in schedules]
        lifecycle.claim(decisions[:2], make_node().pk)
        claimed = lifecycle.claim(decisions, node.pk)
        assert {run.schedule_id for run in claimed.runs} == {s.pk for s in schedules[2:]}

    def test_fencing_tokens_grow_with_every_claim(self) -> None:
        node = make_node()
        schedule = due_schedule()
        tokens = []
        for seconds_ago in (3, 2, 1):
            make_due(schedule, whole_second(-seconds_ago))
            (run,) = lifecycle.claim([decide(schedule)], node.pk).runs
            lifecycle.start([run], node.pk)
            lifecycle.finish([report(run)])
            tokens.append(run.fencing_token)
        assert tokens == [1, 2, 3]

    def test_the_number_of_statements_does_not_grow_with_the_batch(
        self, django_assert_max_num_queries: Any
    ) -> None:
        node = make_node()
        few = [decide(due_schedule()) for _ in range(2)]
        many = [decide(due_schedule()) for _ in range(40)]
        limit = {"postgresql": 4, "mysql": 10}.get(connection.vendor, 12)
        with django_assert_max_num_queries(limit):
            lifecycle.claim(few, node.pk)
        with django_assert_max_num_queries(limit):
            assert len(lifecycle.claim(many, node.pk).runs) == 40

    def test_names_and_arguments_outside_the_basic_plane_survive(self) -> None:
        run = claimed_run(
            make_node(), name="🚀 𝔅illing", job="project.demo.greet", arguments={"name": "🚀"}
        )
        assert (run.schedule_name, run.arguments) == ("🚀 𝔅illing", {"name": "🚀"})
        assert Run.objects.get().schedule_name == "🚀 𝔅illing"

    def test_read_back_finds_what_was_committed_and_nothing_else(self) -> None:
        node = make_node()
        run = claimed_run(node)
        found = lifecycle.read_back([run.owner_token, new_owner_token()], node.pk)
        assert found == [run]
        assert lifecycle.read_back([run.owner_token], make_node().pk) == []


@pytest.mark.django_db(transaction=True)
def test_of_ten_threads_that_claim_the_same_batch_each_occurrence_has_one_winner() -> None:
    schedules = [due_schedule() for _ in range(8)]
    decisions = [[decide(schedule) for schedule in schedules] for _ in range(10)]
    members = [make_node() for _ in range(10)]
    barrier = threading.Barrier(10)
    won: list[ClaimedRun] = []
    errors: list[Exception] = []

    def compete(number: int) -> None:
        try:
            barrier.wait()
            won.extend(lifecycle.claim(decisions[number], members[number].pk).runs)
        except Exception as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=compete, args=[number]) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(run.schedule_id for run in won) == [schedule.pk for schedule in schedules]
    assert Run.objects.count() == 8


class TestConstraints:
    def test_one_row_per_occurrence(self) -> None:
        schedule = make_schedule()
        at = whole_second()
        make_run(schedule=schedule, scheduled_at=at)
        with pytest.raises(IntegrityError), transaction.atomic():
            make_run(schedule=schedule, scheduled_at=at)

    def test_manual_runs_have_no_occurrence_and_do_not_collide(self) -> None:
        schedule = make_schedule()
        make_run(schedule=schedule, scheduled_at=None)
        make_run(schedule=schedule, scheduled_at=None)
        assert Run.objects.count() == 2

    def test_an_unknown_state_is_refused(self) -> None:
        with pytest.raises(IntegrityError), transaction.atomic():
            make_run(state="sleeping")

    def test_a_claimed_run_without_an_owner_is_refused(self) -> None:
        with pytest.raises(IntegrityError), transaction.atomic():
            make_run(state="claimed", owner_token="")


class TestStart:
    def test_a_start_is_committed_once(self) -> None:
        node = make_node()
        run = claimed_run(node)
        assert lifecycle.start([run], node.pk) == {run.run_id}
        assert lifecycle.start([run], node.pk) == set()
        row = Run.objects.get()
        assert (row.state, row.attempt) == ("running", 1)

    def test_a_draining_node_may_start_what_it_claimed(self) -> None:
        node = make_node()
        run = claimed_run(node)
        nodes.drain(node.pk)
        assert lifecycle.start([run], node.pk) == {run.run_id}

    def test_a_node_whose_lease_expired_starts_nothing(self) -> None:
        node = make_node()
        run = claimed_run(node)
        Node.objects.filter(pk=node.pk).update(expires_at=DatabaseNow(timedelta(seconds=-1)))
        assert lifecycle.start([run], node.pk) == set()
        assert Run.objects.get().state == "claimed"

    @pytest.mark.parametrize("change", [{"fencing_token": 99}, {"owner_token": "f" * 32}])
    def test_a_start_with_a_foreign_token_is_refused(self, change: dict[str, Any]) -> None:
        node = make_node()
        run = claimed_run(node)
        Run.objects.filter(pk=run.run_id).update(**change)
        assert lifecycle.start([run], node.pk) == set()

    def test_a_run_that_another_node_claimed_again_is_not_started_by_the_first(self) -> None:
        slow, quick = make_node(), make_node()
        run = claimed_run(slow)
        bury(slow)
        lifecycle.recover()
        (again,) = lifecycle.claim_queued({run.run_id: new_owner_token()}, quick.pk).runs
        assert again.fencing_token == run.fencing_token + 1
        # The slow node comes back to life without knowing: its start loses.
        Node.objects.filter(pk=slow.pk).update(
            state="active", expires_at=DatabaseNow(timedelta(minutes=1))
        )
        assert lifecycle.start([run], slow.pk) == set()
        assert lifecycle.start([again], quick.pk) == {run.run_id}


class TestFinish:
    def test_an_outcome_is_stored_with_its_text(self) -> None:
        node = make_node()
        run = started_run(node)
        result = lifecycle.finish(
            [
                report(
                    run,
                    state="failed",
                    reason="error",
                    error="ValueError: no",
                    result={"rows": 3},
                    output="line\n",
                    traceback="Traceback …",
                )
            ]
        )
        assert (result.accepted, result.late, result.rejected) == ({run.run_id}, set(), set())
        row = Run.objects.get()
        assert (row.state, row.reason, row.error) == ("failed", "error", "ValueError: no")
        assert (row.result, row.late) == ({"rows": 3}, False)
        text = RunOutput.objects.get()
        assert (text.output, text.traceback) == ("line\n", "Traceback …")

    def test_the_same_report_twice_changes_nothing(self) -> None:
        run = started_run(make_node())
        lifecycle.finish([report(run)])
        again = lifecycle.finish([report(run, state="failed")])
        assert again.rejected == {run.run_id}
        assert Run.objects.get().state == "succeeded"

    def test_a_finish_of_a_run_that_never_started_is_refused(self) -> None:
        run = claimed_run(make_node())
        assert lifecycle.finish([report(run)]).rejected == {run.run_id}
        assert Run.objects.get().state == "claimed"

    @pytest.mark.parametrize("change", [{"fencing_token": 99}, {"owner_token": "f" * 32}])
    def test_a_finish_with_a_foreign_token_is_refused(self, change: dict[str, Any]) -> None:
        run = started_run(make_node())
        Run.objects.filter(pk=run.run_id).update(**change)
        assert lifecycle.finish([report(run)]).rejected == {run.run_id}
        assert Run.objects.get().state == "running"

    def test_a_lost_run_is_settled_by_the_late_report_of_its_owner(self) -> None:
        node = make_node()
        run = started_run(node)
        bury(node)
        assert lifecycle.recover().lost == (run.run_id,)
        result = lifecycle.finish([report(run)])
        assert result.late == {run.run_id}
        row = Run.objects.get()
        assert (row.state, row.late, row.reason) == ("succeeded", True, "")

    def test_a_superseded_report_changes_no_run_and_is_noted_on_its_attempt(self) -> None:
        slow, quick = make_node(), make_node()
        run = started_run(slow, delivery="at_least_once")
        bury(slow)
        lifecycle.recover()
        (again,) = lifecycle.claim_queued({run.run_id: new_owner_token()}, quick.pk).runs
        lifecycle.start([again], quick.pk)
        assert lifecycle.finish([report(run)]).rejected == {run.run_id}
        row = Run.objects.get()
        assert (row.state, row.attempt, row.node_id) == ("running", 2, quick.pk)
        attempt = Attempt.objects.get()
        assert (attempt.number, attempt.node_id, attempt.reason) == (1, slow.pk, "node_died")
        assert attempt.late_state == "succeeded"
        assert attempt.late_at is not None

    def test_a_batch_mixes_accepted_and_rejected_reports(self) -> None:
        node = make_node()
        good, bad = started_run(node), started_run(node)
        result = lifecycle.finish([report(good), report(bad, fencing_token=99)])
        assert (result.accepted, result.rejected) == ({good.run_id}, {bad.run_id})

    def test_an_end_before_the_start_is_stored_as_the_start(self) -> None:
        run = started_run(make_node())
        lifecycle.finish([report(run, finished_at=whole_second(-3600))])
        row = Run.objects.get()
        assert row.finished_at == row.started_at

    def test_progress_is_stored_while_running_and_not_afterwards(self) -> None:
        run = started_run(make_node())
        tokens = {run.run_id: (run.fencing_token, run.owner_token)}
        lifecycle.report_progress({run.run_id: (58.0, "batch 290/500")}, tokens)
        row = Run.objects.get()
        assert (row.progress_percent, row.progress_message) == (58.0, "batch 290/500")
        lifecycle.finish([report(run)])
        lifecycle.report_progress({run.run_id: (60.0, "late")}, tokens)
        row.refresh_from_db()
        assert (row.state, row.progress_percent) == ("succeeded", 100)


class TestRecovery:
    def test_a_claimed_run_of_a_dead_node_is_queued_again(self) -> None:
        node = make_node()
        run = claimed_run(node)
        bury(node)
        assert lifecycle.recover().requeued == (run.run_id,)
        row = Run.objects.get()
        assert (row.state, row.owner_token, row.node_id, row.attempt) == ("queued", "", None, 0)
        assert not Attempt.objects.exists()

    def test_a_running_run_that_must_not_repeat_is_lost(self) -> None:
        node = make_node()
        run = started_run(node)
        bury(node)
        assert lifecycle.recover().lost == (run.run_id,)
        row = Run.objects.get()
        assert (row.state, row.reason) == ("lost", "node_died")
        assert row.finished_at is not None

    def test_a_running_run_that_may_repeat_is_queued_with_its_attempt_on_record(self) -> None:
        node = make_node()
        run = started_run(node, delivery="at_least_once")
        bury(node)
        assert lifecycle.recover().requeued == (run.run_id,)
        row = Run.objects.get()
        assert (row.state, row.reason, row.recoveries) == ("queued", "recovery", 1)
        assert Attempt.objects.get().fencing_token == run.fencing_token

    def test_a_run_whose_nodes_keep_dying_is_lost(self) -> None:
        first, second = make_node(), make_node()
        run = started_run(first, delivery="at_least_once")
        bury(first)
        lifecycle.recover()
        (again,) = lifecycle.claim_queued({run.run_id: new_owner_token()}, second.pk).runs
        lifecycle.start([again], second.pk)
        bury(second)
        assert lifecycle.recover().lost == (run.run_id,)

    def test_runs_of_a_node_that_is_alive_are_left_alone(self) -> None:
        started_run(make_node())
        assert lifecycle.recover() == lifecycle.Recovered()

    def test_runs_that_a_node_left_behind_are_recovered(self) -> None:
        node = make_node()
        run = claimed_run(node)
        nodes.leave(node.pk)
        assert lifecycle.recover().requeued == (run.run_id,)

    def test_given_back_runs_are_queued_and_can_be_claimed_by_another_node(self) -> None:
        node, other = make_node(), make_node()
        run = claimed_run(node)
        assert lifecycle.give_back([run]) == 1
        (again,) = lifecycle.claim_queued({run.run_id: new_owner_token()}, other.pk).runs
        assert (again.scheduled_at, again.attempt) == (run.scheduled_at, 0)

    def test_a_run_that_started_cannot_be_given_back(self) -> None:
        run = started_run(make_node())
        assert lifecycle.give_back([run]) == 0

    def test_a_run_whose_worker_died_failed_with_the_cause(self) -> None:
        run = started_run(make_node())
        recovered = lifecycle.recover_owned(
            [run], reason="worker_died", unknown="failed", detail="killed by signal 9"
        )
        assert recovered.failed == (run.run_id,)
        row = Run.objects.get()
        assert (row.state, row.reason, row.error) == (
            "failed",
            "worker_died",
            "killed by signal 9",
        )

    def test_a_run_that_the_node_does_not_know_is_settled_after_a_while(self) -> None:
        node = make_node()
        known, stray = claimed_run(node), claimed_run(node)
        Run.objects.update(claimed_at=DatabaseNow(timedelta(seconds=-60)))
        recovered = lifecycle.settle_strays(node.pk, {known.run_id}, timedelta(seconds=10))
        assert recovered.requeued == (stray.run_id,)

    def test_queued_runs_of_a_deleted_schedule_are_cancelled(self) -> None:
        schedule = make_schedule()
        run = lifecycle.queue_manual(schedule, by="operator")
        schedule.delete()
        assert lifecycle.cancel_without_schedule() == 1
        run.refresh_from_db()
        assert (run.state, run.reason) == ("cancelled", "deleted")


class TestRelease:
    """A person releases the lock of a schedule."""

    def test_a_running_run_that_must_not_repeat_is_lost(self) -> None:
        run = started_run(make_node())
        released = lifecycle.release(run.schedule_id)
        assert (released.runs.lost, released.fencing_token) == ((run.run_id,), 2)
        row = Run.objects.get()
        assert (row.state, row.reason, row.fencing_token, row.owner_token) == (
            "lost",
            "released",
            2,
            "",
        )

    def test_the_late_report_of_the_holder_is_refused_and_noted(self) -> None:
        run = started_run(make_node())
        lifecycle.release(run.schedule_id)
        assert lifecycle.finish([report(run)]).rejected == {run.run_id}
        assert Run.objects.get().state == "lost"
        attempt = Attempt.objects.get()
        assert (attempt.fencing_token, attempt.reason, attempt.late_state) == (
            run.fencing_token,
            "released",
            "succeeded",
        )

    def test_a_running_run_that_may_repeat_is_queued_again(self) -> None:
        run = started_run(make_node(), delivery="at_least_once")
        assert lifecycle.release(run.schedule_id).runs.requeued == (run.run_id,)
        (again,) = lifecycle.claim_queued({run.run_id: new_owner_token()}, make_node().pk).runs
        assert again.fencing_token == 3

    def test_a_claimed_run_can_no_longer_start_and_is_queued_again(self) -> None:
        node = make_node()
        run = claimed_run(node)
        assert lifecycle.release(run.schedule_id).runs.requeued == (run.run_id,)
        assert lifecycle.start([run], node.pk) == set()
        assert Run.objects.get().state == "queued"

    def test_a_schedule_without_an_active_run_only_gets_a_larger_token(self) -> None:
        schedule = make_schedule()
        version = schedule.version
        assert lifecycle.release(schedule.pk).fencing_token == 1
        schedule.refresh_from_db()
        assert (schedule.fencing_token, schedule.version) == (1, version)

    def test_runs_of_other_schedules_are_left_alone(self) -> None:
        node = make_node()
        run, other = started_run(node), started_run(node)
        lifecycle.release(run.schedule_id)
        assert Run.objects.get(pk=other.run_id).state == "running"


class TestStops:
    def test_a_run_that_is_still_ours_is_not(self) -> None:
        node = make_node()
        runs = [claimed_run(node), started_run(node)]
        assert lifecycle.stops(runs) == Stops(gone=frozenset(), asked={})

    def test_a_released_and_a_recovered_run_are(self) -> None:
        node = make_node()
        lost, repeated = started_run(node), started_run(node, delivery="at_least_once")
        lifecycle.release(lost.schedule_id)
        bury(node)
        lifecycle.recover()
        assert lifecycle.stops([lost, repeated]).gone == {lost.run_id, repeated.run_id}

    def test_a_lost_run_is_still_its_owners(self) -> None:
        node = make_node()
        run = started_run(node)
        bury(node)
        lifecycle.recover()
        assert lifecycle.stops([run]).gone == set()

    def test_a_run_that_another_node_owns_now_is(self) -> None:
        node = make_node()
        run = claimed_run(node)
        lifecycle.give_back([run])
        lifecycle.claim_queued({run.run_id: new_owner_token()}, make_node().pk)
        assert lifecycle.stops([run]).gone == {run.run_id}


class TestCancel:
    def test_a_queued_and_a_claimed_run_are_cancelled_at_once(self) -> None:
        node = make_node()
        claimed = claimed_run(node)
        queued = lifecycle.queue_manual(make_schedule(), by="siti")
        result = lifecycle.request_cancel([claimed.run_id, queued.pk], cause="by siti: wrong data")
        assert result.cancelled == (claimed.run_id, queued.pk)
        assert {(run.state, run.reason, run.error) for run in Run.objects.all()} == {
            ("cancelled", "cancelled", "by siti: wrong data")
        }
        assert lifecycle.start([claimed], node.pk) == set()

    def test_a_running_one_is_asked_once_and_its_node_learns_the_cause(self) -> None:
        run = started_run(make_node())
        assert lifecycle.request_cancel([run.run_id], cause="by siti").asked == (run.run_id,)
        assert lifecycle.request_cancel([run.run_id], cause="by budi").asked == ()
        assert lifecycle.stops([run]) == Stops(gone=frozenset(), asked={run.run_id: "by siti"})
        assert Run.objects.get().state == "running"

    def test_a_run_that_was_asked_may_still_succeed(self) -> None:
        run = started_run(make_node())
        lifecycle.request_cancel([run.run_id], cause="by siti")
        assert lifecycle.finish([report(run)]).accepted == {run.run_id}
        assert Run.objects.get().state == "succeeded"

    def test_a_final_run_is_left_alone(self) -> None:
        run = started_run(make_node())
        lifecycle.finish([report(run)])
        assert lifecycle.request_cancel([run.run_id], cause="by siti") == CancelResult()
        assert Run.objects.get().state == "succeeded"

    def test_a_run_that_was_asked_to_stop_is_not_run_again_after_a_crash(self) -> None:
        node = make_node()
        run = started_run(node, delivery="at_least_once")
        lifecycle.request_cancel([run.run_id], cause="by siti")
        bury(node)
        assert lifecycle.recover().lost == (run.run_id,)


class TestLeaseLost:
    def test_the_loss_is_noted_and_the_run_still_succeeds(self) -> None:
        run = started_run(make_node())
        tokens = {run.run_id: (run.fencing_token, run.owner_token)}
        lifecycle.note_lease_lost({run.run_id: "held by another owner"}, tokens)
        assert lifecycle.finish([report(run)]).accepted == {run.run_id}
        row = Run.objects.get()
        assert (row.state, row.details) == ("succeeded", {"lease_lost": "held by another owner"})

    def test_a_run_that_moved_on_is_left_alone(self) -> None:
        run = started_run(make_node())
        lifecycle.finish([report(run)])
        tokens = {run.run_id: (run.fencing_token, run.owner_token)}
        lifecycle.note_lease_lost({run.run_id: "held by another owner"}, tokens)
        assert Run.objects.get().details is None


class TestManual:
    def test_a_manual_run_is_queued_and_claimed(self) -> None:
        schedule = make_schedule(arguments={"batch": 1})
        run = lifecycle.queue_manual(schedule, by="operator", arguments={"batch": 2})
        assert (run.state, run.trigger, run.triggered_by) == ("queued", "manual", "operator")
        assert run.scheduled_at is None
        (claimed,) = lifecycle.claim_queued({run.pk: new_owner_token()}, make_node().pk).runs
        assert (claimed.state, claimed.arguments) == ("claimed", {"batch": 2})
        assert claimed.scheduled_at == run.due_at

    @pytest.mark.parametrize("state", ["queued", "claimed", "running"])
    def test_a_busy_schedule_names_the_run_that_blocks(self, state: str) -> None:
        schedule = make_schedule()
        blocking = make_run(schedule=schedule, state=state)
        with pytest.raises(ScheduleBusy) as caught:
            lifecycle.queue_manual(schedule, by="operator")
        assert caught.value.blocked_by == blocking.pk

    def test_a_queued_run_waits_while_another_run_is_active(self) -> None:
        schedule = make_schedule()
        waiting = make_run(schedule=schedule, state="queued")
        make_run(schedule=schedule, state="running")
        assert lifecycle.claim_queued({waiting.pk: new_owner_token()}, make_node().pk).runs == ()
        waiting.refresh_from_db()
        assert waiting.state == "queued"

    def test_of_two_queued_runs_of_a_schedule_the_older_is_claimed(self) -> None:
        schedule = make_schedule()
        older = make_run(schedule=schedule, state="queued")
        newer = make_run(schedule=schedule, state="queued")
        tokens = {older.pk: new_owner_token(), newer.pk: new_owner_token()}
        claimed = lifecycle.claim_queued(tokens, make_node().pk).runs
        assert [run.run_id for run in claimed] == [older.pk]

    def test_a_queued_run_is_not_claimed_by_a_node_that_is_unknown(self) -> None:
        run = lifecycle.queue_manual(make_schedule(), by="operator")
        assert lifecycle.claim_queued({run.pk: new_owner_token()}, uuid4()) == lifecycle.Claimed()


class TestNodes:
    def test_a_node_declared_dead_can_never_renew_its_lease(self) -> None:
        node = make_node()
        bury(node)
        assert nodes.heartbeat(Config(), node.pk, nodes.Vitals()) is False
        node.refresh_from_db()
        assert node.state == "dead"

    def test_a_heartbeat_extends_the_lease_by_the_clock_of_the_database(self) -> None:
        node = make_node(expires_at=whole_second(1))
        assert nodes.heartbeat(Config(), node.pk, nodes.Vitals(running=3, alert="x" * 400)) is True
        node.refresh_from_db()
        remaining = (node.expires_at - database_now()).total_seconds()
        assert 13 < remaining <= 15.1
        assert (node.running, len(node.alert)) == (3, 300)

    def test_each_death_is_declared_by_one_caller(self) -> None:
        make_node(expires_at=whole_second(-10))
        assert len(nodes.declare_dead()) == 1
        assert nodes.declare_dead() == []

    def test_a_node_within_the_grace_is_left_alive(self) -> None:
        make_node(expires_at=whole_second(-2))
        assert nodes.declare_dead(grace_seconds=60) == []

    def test_nodes_that_left_long_ago_are_forgotten_unless_they_own_a_run(self) -> None:
        old = whole_second(-90_000)
        gone = make_node(state="left", heartbeat_at=old)
        owner = make_node(state="left", heartbeat_at=old)
        make_run(state="running", node=owner)
        alive = make_node()
        assert nodes.forget() == 1
        assert set(Node.objects.values_list("pk", flat=True)) == {owner.pk, alive.pk}
        assert not Node.objects.filter(pk=gone.pk).exists()


def test_every_transition_of_the_table_starts_and_ends_in_a_known_state() -> None:
    known = {state.value for state in Run.State}
    assert set(lifecycle.TRANSITIONS) - {""} == known
    assert {target for targets in lifecycle.TRANSITIONS.values() for target in targets} <= known
