from __future__ import annotations

import os
import signal
import threading

import pytest

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks.breaker import Breaker
from distcron_app.locks.memory import MemoryLockBackend
from tests.services import wait_for


class HandClock(Clock):
    """Time moved by the test; a wait ends when the test lets time pass."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.waits: list[float] = []
        self._passed = threading.Semaphore(0)
        self.is_waiting = threading.Event()

    def monotonic(self) -> float:
        return self.seconds

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.waits.append(seconds)
        self.is_waiting.set()
        while not event.is_set():
            if self._passed.acquire(timeout=0.01):
                return event.is_set()
        return True

    def let_pass(self, seconds: float) -> None:
        assert self.is_waiting.wait(5)
        self.is_waiting.clear()
        self.seconds += seconds
        self._passed.release()


class Flaky(MemoryLockBackend):
    """A backend that can be taken away, and counts how often it was asked."""

    is_down = False
    refuses = False
    asked = 0

    def ping(self) -> float:
        self.asked += 1
        if self.is_down:
            raise LockUnavailable("memory", "taken away", refused=self.refuses)
        return 0.0


def probes():
    return [thread for thread in threading.enumerate() if thread.name == "distcron-lock-probe"]


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def backend():
    return Flaky()


@pytest.fixture
def breaker(backend, clock):
    breaker = Breaker(backend, clock=clock)
    yield breaker
    breaker.close()
    wait_for(lambda: not probes(), what="the end of the probe")


def fail(breaker, times):
    for _ in range(times):
        with pytest.raises(LockUnavailable):
            breaker.ping()


def take_away(breaker, backend, *, refuses=False):
    backend.is_down = True
    backend.refuses = refuses
    fail(breaker, 2)
    assert breaker.state == "open"


def test_one_failure_leaves_it_closed(breaker, backend):
    backend.is_down = True
    fail(breaker, 1)
    assert breaker.state == "closed"


def test_two_failures_in_a_row_open_it(breaker, backend, clock):
    clock.seconds = 107.0
    take_away(breaker, backend)
    assert breaker.since == 107.0


def test_one_failure_that_took_as_long_as_two_opens_it(breaker, backend, clock, monkeypatch):
    def hang() -> float:
        clock.seconds += 0.75
        raise LockUnavailable("memory", "no answer")

    monkeypatch.setattr(backend, "ping", hang)
    fail(breaker, 1)
    assert breaker.state == "open"


def test_success_between_two_failures_keeps_it_closed(breaker, backend):
    backend.is_down = True
    fail(breaker, 1)
    backend.is_down = False
    breaker.ping()
    backend.is_down = True
    fail(breaker, 1)
    assert breaker.state == "closed"


def test_open_breaker_does_not_ask(breaker, backend, clock):
    take_away(breaker, backend)
    clock.seconds += 30.9
    with pytest.raises(LockUnavailable, match=r"'memory': unavailable, not asked, down for 30\.9"):
        breaker.acquire({"schedule:1": "5eed"}, 1000)
    for call in (breaker.held, breaker.ping, lambda: breaker.renew([], 1000)):
        with pytest.raises(LockUnavailable, match="not asked"):
            call()
    assert backend.asked == 2


def test_thread_asks_once_a_second_until_it_answers(breaker, backend, clock):
    take_away(breaker, backend)
    for asked in (3, 4, 5):
        clock.let_pass(1.0)
        wait_for(lambda asked=asked: backend.asked == asked, what="the probe")
        assert breaker.state == "open"
    backend.is_down = False
    clock.let_pass(1.0)
    wait_for(lambda: breaker.state == "closed", what="the breaker to close")
    assert (breaker.since, clock.waits) == (104.0, [1.0] * 4)


def test_no_thread_while_it_is_closed(breaker, backend, clock):
    assert not probes()
    take_away(breaker, backend)
    assert [thread.daemon for thread in probes()] == [True]
    backend.is_down = False
    clock.let_pass(1.0)
    wait_for(lambda: not probes(), what="the end of the probe")


def test_no_caller_waits_for_a_probe_that_hangs(breaker, backend, clock, monkeypatch):
    take_away(breaker, backend)
    hangs, go_on = threading.Event(), threading.Event()

    def hang() -> float:
        hangs.set()
        assert go_on.wait(10)
        return 0.0

    monkeypatch.setattr(backend, "ping", hang)
    clock.let_pass(1.0)
    assert hangs.wait(5)
    with pytest.raises(LockUnavailable, match="not asked"):
        breaker.acquire({"schedule:1": "5eed"}, 1000)
    go_on.set()
    wait_for(lambda: breaker.state == "closed", what="the breaker to close")


def test_closed_again_it_takes_two_failures_to_open(breaker, backend, clock):
    take_away(breaker, backend)
    backend.is_down = False
    clock.let_pass(1.0)
    wait_for(lambda: breaker.state == "closed", what="the breaker to close")
    backend.is_down = True
    fail(breaker, 1)
    assert breaker.state == "closed"


def test_backend_that_refuses_is_still_asked_for_all_but_new_locks(breaker, backend):
    won = breaker.acquire({"schedule:1": "5eed", "schedule:2": "f00d"}, 60_000)
    take_away(breaker, backend, refuses=True)
    with pytest.raises(LockUnavailable, match="not asked"):
        breaker.acquire({"schedule:3": "5eed"}, 60_000)
    assert set(breaker.renew(won.values(), 60_000)) == {"schedule:1", "schedule:2"}
    assert breaker.release([won["schedule:1"]]) == {"schedule:1"}
    assert [info.name for info in breaker.held()] == ["schedule:2"]
    assert breaker.state == "open"


def test_closing_it_ends_the_thread(breaker, backend):
    take_away(breaker, backend)
    breaker.close()
    wait_for(lambda: not probes(), what="the end of the probe")
    assert breaker.state == "closed"


def test_forked_child_starts_closed(breaker, backend):
    take_away(breaker, backend)
    backend.is_down = False
    # As if a thread of the parent held it at the fork.
    with breaker._mutex:
        child = os.fork()
        if child == 0:
            # Ends a child that waits for a lock of its parent.
            signal.alarm(20)
            try:
                breaker.ping()
                backend.is_down = True
                fail(breaker, 2)
                os._exit(0 if breaker.state == "open" and probes() else 3)
            finally:
                os._exit(4)
    assert os.waitpid(child, 0)[1] == 0
    assert breaker.state == "open"


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
