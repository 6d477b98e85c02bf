"""The context of a running job: cancel, progress, and how it is found."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta, timezone

import pytest

from distcron_app import JobContext, current_context
from distcron_app.clock import Clock
from distcron_app.context import EarlierAttempt, entered
from distcron_app.errors import LeaseLost

EARLIER = EarlierAttempt(number=1, node="web-2", reason="node_died", progress_percent=40.0)


class HandClock(Clock):
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


def build(**changes) -> JobContext:
    facts = {
        "run_id": 7,
        "schedule_id": 3,
        "schedule_key": "nightly",
        "job": "billing.nightly",
        "scheduled_at": datetime(2026, 1, 31, 1, 0, tzinfo=UTC),
        "attempt": 1,
        "fencing_token": 12,
    }
    return JobContext(**{**facts, **changes})


def test_idempotency_key_names_schedule_and_instant_in_utc():
    jakarta = timezone(timedelta(hours=7))
    context = build(scheduled_at=datetime(2026, 1, 31, 8, 0, tzinfo=jakarta))
    assert context.idempotency_key == "3:2026-01-31T01:00:00+00:00"


def test_idempotency_key_is_the_same_for_a_recovery():
    first = build(attempt=1)
    assert build(attempt=2, recovered_from=EARLIER).idempotency_key == first.idempotency_key


def test_naive_instant_is_refused():
    with pytest.raises(ValueError, match="must be aware"):
        build(scheduled_at=datetime(2026, 1, 31, 1, 0))  # noqa: DTZ001


def test_facts_cannot_be_changed():
    with pytest.raises(AttributeError):
        build().fencing_token = 13


def test_check_passes_until_cancelled():
    context = build()
    context.check()
    assert context.cancelled is False


def test_check_raises_lease_lost_with_the_first_cause():
    context = build()
    context.cancel("the node was fenced")
    context.cancel("timeout")
    with pytest.raises(LeaseLost, match="Run 7: lease lost, the node was fenced"):
        context.check()


def test_wait_ends_at_once_when_another_thread_cancels():
    context = build()
    started = threading.Event()
    ended: list[BaseException] = []

    def sleeper() -> None:
        started.set()
        try:
            context.wait(600)
        except LeaseLost as error:
            ended.append(error)

    thread = threading.Thread(target=sleeper)
    thread.start()
    assert started.wait(5)
    context.cancel("operator")
    thread.join(5)
    assert [error.cause for error in ended] == ["operator"]


def test_wait_returns_when_the_time_is_over():
    assert build().wait(0) is None


def test_progress_passes_at_most_four_reports_a_second():
    clock, seen = HandClock(), []
    context = build(clock=clock, on_progress=lambda percent, text: seen.append(percent))
    for step in range(40):
        context.progress(step)
        clock.seconds += 0.0625
    assert seen == [0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0, 32.0, 36.0]


def test_progress_of_100_is_never_dropped_and_sent_once():
    seen = []
    context = build(clock=HandClock(), on_progress=lambda *report: seen.append(report))
    context.progress(99, "almost")
    context.progress(100, "done")
    context.progress(100, "done")
    assert seen == [(99.0, "almost"), (100.0, "done")]


@pytest.mark.parametrize("percent", [-0.1, 100.1, float("nan"), float("inf")])
def test_progress_outside_0_to_100_is_refused(percent):
    with pytest.raises(ValueError, match="from 0 to 100"):
        build().progress(percent)


@pytest.mark.parametrize("percent", ["50", None, True])
def test_progress_that_is_no_number_is_refused(percent):
    with pytest.raises(TypeError, match="number from 0 to 100"):
        build().progress(percent)


def test_progress_message_is_one_bounded_line():
    seen = []
    build(on_progress=lambda *report: seen.append(report)).progress(5, "a\nb " + "x" * 500)
    assert seen == [(5.0, "a b " + "x" * 196)]


def test_failing_progress_receiver_does_not_fail_the_job(caplog):
    def broken(percent: float, message: str) -> None:
        raise OSError("pipe closed")

    build(on_progress=broken).progress(5)
    assert "progress_failed run=7" in caplog.text


def test_progress_is_throttled_across_threads():
    seen = []
    context = build(clock=HandClock(), on_progress=lambda percent, text: seen.append(percent))
    threads = [
        threading.Thread(target=lambda: [context.progress(n) for n in range(50)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(seen) == 1


def test_current_context_is_none_outside_a_job():
    assert current_context() is None


def test_current_context_is_found_inside_and_gone_after():
    context = build()
    with entered(context):
        assert current_context() is context
    assert current_context() is None


def test_current_context_is_found_in_async_code():
    async def inner() -> JobContext | None:
        await asyncio.sleep(0)
        return await asyncio.create_task(asyncio.to_thread(current_context))

    context = build()
    with entered(context):
        assert asyncio.run(inner()) is context


def test_two_threads_have_contexts_of_their_own():
    both_inside = threading.Barrier(2)
    found: dict[int, int | None] = {}

    def work(run_id: int) -> None:
        with entered(build(run_id=run_id)):
            both_inside.wait(5)
            current = current_context()
            found[run_id] = current.run_id if current else None

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert found == {1: 1, 2: 2}


# Checkpoints and earlier attempts


def test_a_checkpoint_is_passed_on_as_it_was():
    told = []
    context = build(on_checkpoint=told.append)
    data = {"pages": [1, 2]}
    context.checkpoint(data)
    data["pages"].append(3)
    context.checkpoint(("a", 1))
    assert told == [{"pages": [1, 2]}, ["a", 1]]


@pytest.mark.parametrize("data", [{1, 2}, object(), float("nan"), {"at": datetime.now(UTC)}])
def test_a_checkpoint_that_is_not_json_is_refused(data):
    told = []
    with pytest.raises(TypeError, match=r"Checkpoint of run 7: .* Give it what JSON can hold\."):
        build(on_checkpoint=told.append).checkpoint(data)
    assert told == []


def test_a_checkpoint_has_a_limit_that_its_error_names():
    told = []
    context = build(on_checkpoint=told.append)
    context.checkpoint("x" * 65_534)
    with pytest.raises(ValueError, match=r"run 7: 65537 bytes of JSON, at most 65536\."):
        context.checkpoint("x" * 65_535)
    with pytest.raises(ValueError, match=r"at most 65536"):
        context.checkpoint("é" * 40_000)
    assert len(told) == 1


def test_a_checkpoint_with_a_lone_surrogate_is_taken():
    told = []
    build(on_checkpoint=told.append).checkpoint("\ud800")
    assert told == ["\ud800"]


def test_without_a_node_to_tell_a_checkpoint_is_still_checked():
    build().checkpoint(1)
    with pytest.raises(TypeError):
        build().checkpoint({1})


def test_a_recovery_knows_the_attempt_that_was_cut_off():
    context = build(attempt=2, recovered_from=EARLIER)
    assert context.is_recovery is True
    assert context.recovered_from.node == "web-2"
    assert build(attempt=2, last_checkpoint=3).is_recovery is False
