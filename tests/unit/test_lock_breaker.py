from __future__ import annotations

import pytest

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks.breaker import Breaker
from distcron_app.locks.memory import MemoryLockBackend


class HandClock(Clock):
    """Time moved by the test."""

    seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


class Flaky(MemoryLockBackend):
    """A backend that can be taken away, and counts how often it was asked."""

    is_down = False
    asked = 0

    def ping(self) -> float:
        self.asked += 1
        if self.is_down:
            raise LockUnavailable("memory", "taken away")
        return 0.0


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def backend():
    return Flaky()


@pytest.fixture
def breaker(backend, clock):
    return Breaker(backend, clock=clock)


def fail(breaker, times):
    for _ in range(times):
        with pytest.raises(LockUnavailable):
            breaker.ping()


def test_one_failure_leaves_it_closed(breaker, backend):
    backend.is_down = True
    fail(breaker, 1)
    assert breaker.state == "closed"


def test_two_failures_in_a_row_open_it(breaker, backend, clock):
    clock.seconds = 107.0
    backend.is_down = True
    fail(breaker, 2)
    assert (breaker.state, breaker.since) == ("open", 107.0)


def test_success_between_two_failures_keeps_it_closed(breaker, backend):
    backend.is_down = True
    fail(breaker, 1)
    backend.is_down = False
    breaker.ping()
    backend.is_down = True
    fail(breaker, 1)
    assert breaker.state == "closed"


def test_open_breaker_does_not_ask(breaker, backend, clock):
    backend.is_down = True
    fail(breaker, 2)
    clock.seconds += 0.9
    with pytest.raises(LockUnavailable, match=r"'memory': unavailable, not asked, down for 0\.9 s"):
        breaker.acquire({"schedule:1": "5eed"}, 1000)
    assert backend.asked == 2


def test_open_breaker_asks_once_per_second(breaker, backend, clock):
    backend.is_down = True
    fail(breaker, 2)
    for seconds in (100.5, 101.0, 101.5, 101.9, 102.0, 102.5):
        clock.seconds = seconds
        fail(breaker, 1)
    assert backend.asked == 4


def test_next_probe_waits_a_second_after_one_that_hung(breaker, backend, clock, monkeypatch):
    backend.is_down = True
    fail(breaker, 2)

    def hang() -> float:
        backend.asked += 1
        clock.seconds += 3.0
        raise LockUnavailable("memory", "no answer")

    monkeypatch.setattr(backend, "ping", hang)
    clock.seconds = 101.0
    fail(breaker, 1)
    clock.seconds = 104.9
    fail(breaker, 1)
    assert backend.asked == 3


def test_successful_probe_closes_it(breaker, backend, clock):
    backend.is_down = True
    fail(breaker, 2)
    backend.is_down = False
    clock.seconds = 101.0
    assert breaker.ping() == 0.0
    assert (breaker.state, breaker.since) == ("closed", 101.0)


def test_closed_again_it_takes_two_failures_to_open(breaker, backend, clock):
    backend.is_down = True
    fail(breaker, 2)
    backend.is_down = False
    clock.seconds = 101.0
    breaker.ping()
    backend.is_down = True
    fail(breaker, 1)
    assert breaker.state == "closed"


def test_every_call_reaches_the_backend(breaker):
    won = breaker.acquire({"schedule:1": "5eed", "schedule:2": "f00d"}, 60_000)
    assert set(breaker.renew(won.values(), 60_000)) == {"schedule:1", "schedule:2"}
    assert set(breaker.inspect(["schedule:1"])) == {"schedule:1"}
    assert [info.name for info in breaker.held()] == ["schedule:1", "schedule:2"]
    assert breaker.force_release("schedule:2") is True
    assert breaker.release(won.values()) == {"schedule:1"}


def test_error_of_the_caller_does_not_count(breaker):
    for _ in range(2):
        with pytest.raises(ValueError, match="Lock TTL"):
            breaker.acquire({"schedule:1": "5eed"}, 0)
    assert breaker.state == "closed"
