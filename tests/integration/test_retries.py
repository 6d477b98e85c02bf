"""A failed attempt that is followed by another one, through the finish of a batch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError

from distcron_app import lifecycle
from distcron_app.errors import ScheduleBusy
from distcron_app.instants import database_now
from distcron_app.lifecycle import ClaimedRun, Failure, Finished
from distcron_app.locks import new_owner_token
from distcron_app.models import Attempt, Node, Run, Schedule
from tests.factories import make_node, make_schedule
from tests.integration.test_overlap import claim, due

pytestmark = pytest.mark.django_db

FAILURE = Failure(exceptions=("builtins.OSError", "builtins.Exception"))


def started(node: Node, **values: Any) -> ClaimedRun:
    defaults: dict[str, Any] = {"max_attempts": 3, "backoff": "fixed", "backoff_jitter": "none"}
    (run,) = claim(due(**defaults | values), node).runs
    if run.state == "claimed":
        lifecycle.start([run], node.pk)
    return run


def failed(run: ClaimedRun, **values: Any) -> Finished:
    defaults: dict[str, Any] = {
        "run_id": run.run_id,
        "fencing_token": run.fencing_token,
        "owner_token": run.owner_token,
        "state": "failed",
        "reason": "error",
        "error": "OSError: no route",
        "finished_at": database_now(),
        "failure": FAILURE,
    }
    return Finished(**defaults | values)


def again(node: Node, run_id: int) -> ClaimedRun:
    """Claim and start the next attempt at once."""
    Run.objects.filter(pk=run_id).update(due_at=database_now() - timedelta(seconds=1))
    (run,) = lifecycle.claim_queued({run_id: new_owner_token()}, node.pk).runs
    lifecycle.start([run], node.pk)
    return run


def test_a_failed_attempt_is_recorded_and_the_run_queued_again() -> None:
    run = started(make_node())
    before = database_now()
    result = lifecycle.finish([failed(run)])
    row = Run.objects.get()
    assert (row.state, row.reason, row.error, row.owner_token) == (
        "queued",
        "retry",
        "OSError: no route",
        "",
    )
    assert timedelta(seconds=9) < row.due_at - before < timedelta(seconds=12)
    assert result.retried == {run.run_id: row.due_at}
    assert (result.accepted, result.rejected) == (frozenset(), frozenset())
    attempt = Attempt.objects.get()
    assert (attempt.number, attempt.reason, attempt.error) == (1, "error", "OSError: no route")


def test_each_attempt_has_a_larger_fencing_token_and_the_same_instant() -> None:
    node = make_node()
    first = started(node)
    lifecycle.finish([failed(first)])
    second = again(node, first.run_id)
    assert second.fencing_token > first.fencing_token
    assert (second.scheduled_at, second.attempt) == (first.scheduled_at, 1)


def test_after_the_last_attempt_the_run_has_failed() -> None:
    node = make_node()
    run = started(node, max_attempts=2)
    lifecycle.finish([failed(run)])
    run = again(node, run.run_id)
    assert run.attempts_left == 0
    assert lifecycle.finish([failed(run)]).accepted == {run.run_id}
    row = Run.objects.get()
    assert (row.state, row.attempt) == ("failed", 2)


def test_a_run_that_succeeds_in_the_second_attempt_has_succeeded() -> None:
    node = make_node()
    run = started(node)
    lifecycle.finish([failed(run)])
    run = again(node, run.run_id)
    success = failed(run, state="succeeded", reason="", error="", failure=None)
    assert lifecycle.finish([success]).accepted == {run.run_id}
    assert Run.objects.get().error == ""


def test_a_report_that_was_superseded_queues_nothing() -> None:
    run = started(make_node())
    lifecycle.release(run.schedule_id)
    assert lifecycle.finish([failed(run)]).rejected == {run.run_id}
    assert Run.objects.get().state == "lost"


def test_a_run_that_was_asked_to_stop_is_not_tried_again() -> None:
    run = started(make_node())
    lifecycle.request_cancel([run.run_id], cause="by siti")
    assert lifecycle.finish([failed(run)]).accepted == {run.run_id}
    assert Run.objects.get().state == "failed"


def test_a_recovery_uses_up_no_attempt() -> None:
    node = make_node()
    run = started(node, max_attempts=2, delivery="at_least_once")
    lifecycle.recover_owned([run], reason="worker_died", unknown="failed", detail="")
    run = again(node, run.run_id)
    assert (run.recoveries, run.attempts_left) == (1, 1)
    assert set(lifecycle.finish([failed(run)]).retried) == {run.run_id}


def test_while_a_run_waits_for_its_attempt_it_keeps_its_schedule() -> None:
    node = make_node()
    run = started(node)
    lifecycle.finish([failed(run)])
    schedule = Schedule.objects.get()
    (skipped,) = claim(schedule, node).skipped
    assert (skipped.reason, skipped.details) == ("overlap", {"blocked_by": run.run_id})


def test_one_failure_of_a_batch_is_retried_and_the_others_are_written() -> None:
    node = make_node()
    bad, good = started(node), started(node)
    success = failed(good, state="succeeded", reason="", error="", failure=None)
    result = lifecycle.finish([failed(bad), success])
    assert (set(result.retried), result.accepted) == ({bad.run_id}, {good.run_id})


def test_without_failures_a_finish_costs_no_more_queries(
    django_assert_max_num_queries: Any,
) -> None:
    run = started(make_node())
    success = failed(run, state="succeeded", reason="", error="", failure=None)
    with django_assert_max_num_queries(6):
        lifecycle.finish([success])


class TestAgain:
    """A person starts a run again that did not end well."""

    @pytest.mark.parametrize("state", ["failed", "cancelled", "lost"])
    def test_the_same_run_is_queued_with_one_more_attempt(self, state: str) -> None:
        node = make_node()
        run = started(node, max_attempts=1)
        Run.objects.filter(pk=run.run_id).update(state=state, reason="error", error="boom")
        queued = lifecycle.queue_again(run.run_id)
        assert queued is not None
        assert (queued.pk, queued.state, queued.reason) == (run.run_id, "queued", "again")
        attempt = Attempt.objects.get()
        assert (attempt.number, attempt.error) == (1, "boom")
        second = again(node, run.run_id)
        assert second.attempts_left < 1
        assert lifecycle.finish([failed(second, failure=None)]).accepted == {run.run_id}
        assert Run.objects.get().attempt == 2

    @pytest.mark.parametrize("state", ["succeeded", "skipped", "queued"])
    def test_any_other_run_is_left_alone(self, state: str) -> None:
        run = started(make_node())
        Run.objects.filter(pk=run.run_id).update(state=state)
        assert lifecycle.queue_again(run.run_id) is None
        assert Run.objects.get().state == state

    def test_it_is_refused_while_another_run_is_active(self) -> None:
        node = make_node()
        run = started(node)
        Run.objects.filter(pk=run.run_id).update(state="failed")
        schedule = Schedule.objects.get()
        (active,) = claim(schedule, node).runs
        with pytest.raises(ScheduleBusy, match=f"blocked by run {active.run_id}"):
            lifecycle.queue_again(run.run_id)

    def test_a_late_report_of_the_attempt_before_changes_nothing(self) -> None:
        run = started(make_node())
        Run.objects.filter(pk=run.run_id).update(state="lost")
        lifecycle.queue_again(run.run_id)
        assert lifecycle.finish([failed(run, failure=None)]).rejected == {run.run_id}
        assert Run.objects.get().state == "queued"


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("backoff_delays", "soon", "Write numbers from 0 to 2592000"),
        ("backoff_delays", "", "Write numbers from 0 to 2592000"),
        ("backoff_delays", "10, 60", "Several pauses are for the choice"),
        ("retry_on", "Timeout", "'Timeout' is no dotted name"),
        ("give_up_on", "os.system('x')", "is no dotted name"),
        ("max_attempts", 0, "At least 1, or empty"),
    ],
)
def test_a_policy_that_cannot_be_used_names_its_field(
    field: str, value: object, problem: str
) -> None:
    schedule = make_schedule()
    setattr(schedule, field, value)
    with pytest.raises(ValidationError) as refused:
        schedule.full_clean()
    assert problem in str(refused.value.message_dict[field])
