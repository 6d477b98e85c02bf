"""How long a run may take, and what is to happen when: without a process."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from datetime import timedelta

import pytest

from distcron_app import job, registry
from distcron_app.errors import RunStopped, RunTimedOut
from distcron_app.executors.deadlines import Deadlines
from distcron_app.lifecycle import ClaimedRun
from distcron_app.runner import Outcome, execute
from tests.unit.test_context import HandClock, build
from tests.unit.test_retries import ERROR, NOW, POLICY, verdict
from tests.unit.test_runner import assignment

TOO_LONG = "it took longer than its limit of 3 s"


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_jobs", dict(registry._jobs))


# --- when a step is due -------------------------------------------------------------


def test_steps_come_in_their_order_and_once() -> None:
    deadlines = Deadlines()
    deadlines.put(1, "kill", 30.0)
    deadlines.put(2, "limit", 10.0)
    deadlines.put(1, "terminate", 20.0)
    assert deadlines.seconds_left(5.0) == 5.0
    assert deadlines.take(9.9) == []
    assert deadlines.take(20.0) == [(2, "limit"), (1, "terminate")]
    assert deadlines.seconds_left(35.0) == 0.0
    assert deadlines.take(35.0) == [(1, "kill")]
    assert deadlines.seconds_left(35.0) == float("inf")


def test_a_step_that_is_put_again_is_moved_and_a_run_that_ended_has_none() -> None:
    deadlines = Deadlines()
    deadlines.put(1, "limit", 10.0)
    deadlines.put(1, "limit", 12.0)
    deadlines.put(2, "limit", 11.0)
    deadlines.drop(2)
    assert deadlines.take(11.0) == []
    assert deadlines.take(12.0) == [(1, "limit")]


# --- how long an attempt may take ------------------------------------------------------


def claimed(
    limit: int | None, total: int | None, first_seconds_ago: float | None = None
) -> ClaimedRun:
    first = None if first_seconds_ago is None else NOW - timedelta(seconds=first_seconds_ago)
    return ClaimedRun(
        run_id=1,
        schedule_id=1,
        schedule_key="key",
        schedule_name="name",
        job="job",
        arguments={},
        delivery="at_most_once",
        scheduled_at=NOW,
        due_at=NOW,
        state="claimed",
        attempt=0,
        recoveries=0,
        max_attempts=1,
        fencing_token=1,
        owner_token="token",
        run_timeout_seconds=limit,
        total_timeout_seconds=total,
        first_started_at=first,
    )


@pytest.mark.parametrize(
    ("run", "seconds", "cause"),
    [
        (claimed(None, None), None, ""),
        (claimed(30, None), 30, "it took longer than its limit of 30 s"),
        (claimed(30, None, 500), 30, "it took longer than its limit of 30 s"),
        (claimed(None, 60), 60, "all attempts together took longer than 60 s"),
        (claimed(30, 60, 20), 30, "it took longer than its limit of 30 s"),
        (claimed(30, 60, 45), 15, "all attempts together took longer than 60 s"),
        (claimed(30, 60, 70), -10, "all attempts together took longer than 60 s"),
    ],
)
def test_an_attempt_may_take_its_limit_and_what_is_left_of_all(
    run: ClaimedRun, seconds: float | None, cause: str
) -> None:
    assert run.seconds_allowed(NOW) == (seconds, cause)


# --- whether another attempt follows ----------------------------------------------------


def test_a_timeout_is_tried_again_only_where_that_is_wanted() -> None:
    wanted = dataclasses.replace(POLICY, on_timeout=True)
    assert verdict(timed_out=True).why == "timeout"
    assert verdict(policy=wanted, timed_out=True).due_at == NOW + timedelta(seconds=10)
    # The filters of errors are for errors.
    filtered = dataclasses.replace(wanted, give_up_on=frozenset(ERROR))
    assert verdict(policy=filtered, timed_out=True).due_at is not None


def test_no_attempt_starts_when_the_time_of_all_is_over() -> None:
    assert verdict(stop_at=NOW + timedelta(seconds=10)).why == "total_timeout"
    assert verdict(stop_at=NOW + timedelta(seconds=11)).due_at is not None


# --- what the job sees and what its run becomes ------------------------------------------


def outcome_of(function: object, *, cause: str = "", after_seconds: float = 0.0) -> Outcome:
    """Run ``function`` as a job that is told to stop, when it has begun, for ``cause``."""
    clock = HandClock()
    context = build(clock=clock)

    def told(**given: object) -> object:
        if cause:
            context.cancel(cause, reason="timeout")
        clock.seconds += after_seconds
        return function(context)  # type: ignore[operator]

    job(name="test.job")(told)
    return execute(assignment(), context=context, output_limit_bytes=1000)


def test_check_raises_that_it_timed_out_and_the_run_has_failed() -> None:
    outcome = outcome_of(lambda context: context.check(), cause=TOO_LONG)
    assert (outcome.state, outcome.reason, outcome.exceptions) == ("failed", "timeout", ())
    assert outcome.error == f"RunTimedOut: Run 7: told to stop, {TOO_LONG}."


def test_a_job_that_returns_after_its_limit_has_failed_and_keeps_its_result() -> None:
    outcome = outcome_of(lambda context: "done", cause=TOO_LONG, after_seconds=12.3)
    assert (outcome.state, outcome.reason, outcome.result) == ("failed", "timeout", "done")
    assert outcome.error == (
        f"RunTimedOut: Run 7: told to stop, {TOO_LONG}. It ended by itself after 12.3 s"
    )


def test_a_job_that_raises_after_its_limit_has_timed_out_and_says_what_it_raised() -> None:
    def fail(context: object) -> None:
        raise OSError("no route")

    outcome = outcome_of(fail, cause=TOO_LONG, after_seconds=4.0)
    assert (outcome.state, outcome.reason) == ("failed", "timeout")
    assert outcome.error.endswith("It ended by itself after 4.0 s: OSError: no route")
    assert "no route" in outcome.traceback


def test_an_async_job_that_is_cancelled_before_it_awaits_stops_at_its_first_await() -> None:
    async def work(context: object) -> None:
        await asyncio.sleep(60)

    outcome = outcome_of(work, cause=TOO_LONG)
    assert (outcome.state, outcome.reason) == ("failed", "timeout")


def test_an_interrupt_that_comes_after_the_block_does_nothing() -> None:
    context = build()
    calls: list[str] = []
    with context.interrupted_by(lambda: calls.append("interrupt")):
        pass
    context.cancel("enough")
    assert calls == []


def test_an_interrupt_is_called_once_from_the_thread_that_cancels() -> None:
    context = build()
    calls: list[str] = []
    with context.interrupted_by(lambda: calls.append(threading.current_thread().name)):
        for name in ("first", "second"):
            thread = threading.Thread(target=context.cancel, args=["enough"], name=name)
            thread.start()
            thread.join()
    assert calls == ["first"]


# --- SIGTERM in a process of its own ----------------------------------------------------


def test_terminate_raises_in_the_job_only() -> None:
    context = build()
    context.cancel(TOO_LONG, reason="timeout")
    context.terminate("SIGTERM")
    with (
        pytest.raises(RunTimedOut, match=r"limit of 3 s; stopped by SIGTERM\.$"),
        context.in_job(),
    ):
        context.terminate("SIGTERM")
    context.terminate("SIGTERM")


def test_terminate_without_a_request_says_that_its_process_was_ended() -> None:
    outcome = outcome_of(lambda context: context.terminate("SIGTERM"))
    assert (outcome.state, outcome.reason) == ("failed", "worker_died")
    assert "its process received SIGTERM" in outcome.error


def test_a_job_may_end_well_while_it_is_being_terminated() -> None:
    def tidy(context: object) -> str:
        try:
            context.terminate("SIGTERM")  # type: ignore[attr-defined]
        except RunStopped:
            return "tidied up"
        return "not stopped"

    outcome = outcome_of(tidy)
    assert (outcome.state, outcome.result) == ("succeeded", "tidied up")
