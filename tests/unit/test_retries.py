"""Whether another attempt follows, and when."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest

from distcron_app.lifecycle.retries import RetryPolicy, Verdict, decide

NOW = datetime(2026, 1, 1, tzinfo=UTC)
POLICY = RetryPolicy(
    max_attempts=5,
    backoff="fixed",
    delays=(10.0,),
    longest=3600.0,
    jitter="none",
    retry_on=frozenset(),
    give_up_on=frozenset({"distcron_app.errors.GiveUp"}),
    stop_at_next=False,
)
ERROR = ("builtins.TimeoutError", "builtins.OSError", "builtins.Exception")


def verdict(attempt: int = 1, policy: RetryPolicy = POLICY, **given: object) -> Verdict:
    facts: dict[str, object] = {
        "exceptions": ERROR,
        "wanted_delay": None,
        "now": NOW,
        "next_run_at": None,
    }
    return decide(policy, attempt=attempt, **facts | given)  # type: ignore[arg-type]


def delay(attempt: int, **changes: object) -> float:
    policy = dataclasses.replace(POLICY, **changes)  # type: ignore[arg-type]
    due_at = verdict(attempt, policy).due_at
    assert due_at is not None
    return (due_at - NOW).total_seconds()


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 10), (2, 10), (4, 10)])
def test_fixed_waits_the_same_each_time(attempt: int, seconds: float) -> None:
    assert delay(attempt) == seconds


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 10), (2, 20), (3, 40), (4, 60)])
def test_exponential_doubles_up_to_the_longest(attempt: int, seconds: float) -> None:
    assert delay(attempt, backoff="exponential", longest=60.0) == seconds


def test_exponential_does_not_overflow() -> None:
    assert delay(1_000_000, backoff="exponential", max_attempts=2_000_000) == 3600


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 10), (2, 60), (3, 300), (4, 300)])
def test_a_list_is_used_in_order_and_its_last_one_again(attempt: int, seconds: float) -> None:
    assert delay(attempt, backoff="list", delays=(10.0, 60.0, 300.0)) == seconds


@pytest.mark.parametrize(("jitter", "low"), [("full", 0.0), ("equal", 5.0)])
def test_jitter_stays_within_its_bounds_and_varies(jitter: str, low: float) -> None:
    seen = [delay(1, jitter=jitter) for _ in range(200)]
    assert low <= min(seen) < max(seen) <= 10
    assert min(seen) < low + 2


def test_the_last_attempt_is_followed_by_none() -> None:
    assert verdict(4).due_at is not None
    assert verdict(5) == Verdict(due_at=None, why="attempts")


@pytest.mark.parametrize(
    ("retry_on", "give_up_on", "again"),
    [
        ((), (), True),
        (("builtins.OSError",), (), True),
        (("builtins.ValueError",), (), False),
        ((), ("builtins.OSError",), False),
        (("builtins.OSError",), ("builtins.TimeoutError",), False),
    ],
)
def test_filters_look_at_the_error_and_its_bases(
    retry_on: tuple[str, ...], give_up_on: tuple[str, ...], again: bool
) -> None:
    policy = dataclasses.replace(
        POLICY, retry_on=frozenset(retry_on), give_up_on=frozenset(give_up_on)
    )
    assert (verdict(1, policy).due_at is not None) is again


def test_give_up_ends_it_whatever_the_filters_say() -> None:
    names = ("distcron_app.errors.GiveUp", "builtins.Exception")
    assert verdict(exceptions=names) == Verdict(due_at=None, why="exception")


def test_retry_later_goes_before_the_backoff_and_before_retry_on() -> None:
    policy = dataclasses.replace(POLICY, retry_on=frozenset({"builtins.ValueError"}), jitter="full")
    found = verdict(1, policy, wanted_delay=90.0)
    assert found.due_at == NOW + timedelta(seconds=90)


def test_no_attempt_past_the_next_occurrence_where_so_chosen() -> None:
    policy = dataclasses.replace(POLICY, stop_at_next=True)
    soon, later = NOW + timedelta(seconds=10), NOW + timedelta(seconds=11)
    assert verdict(1, policy, next_run_at=soon) == Verdict(due_at=None, why="next_occurrence")
    assert verdict(1, policy, next_run_at=later).due_at == soon
    assert verdict(1, policy, next_run_at=None).due_at == soon
