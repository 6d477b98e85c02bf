from __future__ import annotations

import threading

import pytest

from distcron_app import wakeup
from tests.contracts.conftest import LOCK_DATABASE
from tests.services import wait_for


@pytest.fixture
def listen():
    """Start listeners that are stopped after the test; each counts its calls."""
    started = []

    def start(on_wakeup=None):
        calls = []
        listener = wakeup.Listener(on_wakeup or (lambda: calls.append(1)))
        listener.start()
        started.append(listener)
        return listener, calls

    yield start
    for listener in started:
        listener.stop()


@pytest.fixture
def redis_of_one(own_redis, use_redis):
    use_redis(own_redis.url_of(LOCK_DATABASE))
    return own_redis


def test_announcement_reaches_all_listeners(redis_of_one, listen):
    first, first_calls = listen()
    second, second_calls = listen()
    assert first.ready.wait(5)
    assert second.ready.wait(5)
    wakeup.announce()
    wait_for(lambda: first_calls and second_calls, what="both calls")
    assert (first_calls, second_calls) == ([1], [1])


def test_listener_survives_a_restart_of_redis(redis_of_one, listen):
    listener, calls = listen()
    assert listener.ready.wait(5)
    redis_of_one.kill9()
    wait_for(lambda: not listener.ready.is_set(), what="the loss to be noticed")
    redis_of_one.start()
    assert listener.ready.wait(10)
    wait_for(lambda: calls == [1], what="the look after the reconnect")
    wakeup.announce()
    wait_for(lambda: calls == [1, 1], what="the announcement")


def test_listener_started_before_redis_finds_it(redis_of_one, listen):
    redis_of_one.kill9()
    listener, calls = listen()
    redis_of_one.start()
    assert listener.ready.wait(10)
    wait_for(lambda: calls == [1], what="the look after the connect")


def test_failing_callback_does_not_end_the_listener(redis_of_one, listen):
    outcomes = []

    def fail_first():
        outcomes.append(1)
        if len(outcomes) == 1:
            raise RuntimeError("first call")

    listener, _ = listen(fail_first)
    assert listener.ready.wait(5)
    wakeup.announce()
    wait_for(lambda: len(outcomes) == 1, what="the first call")
    wakeup.announce()
    wait_for(lambda: len(outcomes) == 2, what="the second call")


def test_other_namespaces_are_not_woken(redis_of_one, listen, settings):
    listener, calls = listen()
    assert listener.ready.wait(5)
    settings.DISTCRON = {**settings.DISTCRON, "NAMESPACE": "elsewhere"}
    wakeup.announce()
    settings.DISTCRON = {**settings.DISTCRON, "NAMESPACE": "distcron"}
    wakeup.announce()
    wait_for(lambda: calls, what="the second announcement")
    assert calls == [1]


def test_stop_ends_the_thread_promptly(redis_of_one, listen):
    listener, _ = listen()
    assert listener.ready.wait(5)
    listener.stop(timeout=1.0)
    assert not [t for t in threading.enumerate() if t.name == "distcron-wakeup"]


def test_announcement_without_redis_is_silent(redis_of_one):
    redis_of_one.kill9()
    wakeup.announce()


def test_nothing_listens_where_locks_are_files(settings, listen):
    settings.DISTCRON = {"LOCK_BACKEND": "file"}
    listener, _ = listen()
    wakeup.announce()
    assert not listener.ready.is_set()
    assert not [t for t in threading.enumerate() if t.name == "distcron-wakeup"]
