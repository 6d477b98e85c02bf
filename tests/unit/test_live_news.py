"""What a worker passes on while jobs run: the newest, now and then, and nothing afterwards."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any

import pytest

from distcron_app import JobContext
from distcron_app.clock import Clock
from distcron_app.executors.live import LiveNews


class HandClock(Clock):
    """A clock that the test moves."""

    seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


class Bench:
    """Live news of one run whose output the test writes."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.sent: list[list[Any]] = []
        self.news = LiveNews(self.sent.append, clock=self.clock)
        self.text = ""
        self.context = JobContext(
            run_id=7,
            schedule_id=3,
            schedule_key="nightly",
            job="billing.nightly",
            scheduled_at=datetime(2026, 1, 31, 1, 0, tzinfo=UTC),
            attempt=1,
            fencing_token=12,
            on_checkpoint=lambda data: self.news.checkpoint(7, data),
        )
        self.context.attach_output(lambda: self.text, lambda: len(self.text))
        self.news.begin(self.context)

    def look_after(self, seconds: float) -> list[list[Any]]:
        """Let time pass and return what is sent then."""
        self.clock.seconds += seconds
        self.sent.clear()
        self.news.look()
        return list(self.sent)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_output_is_sent_a_second_after_the_begin_and_only_when_it_changed(bench: Bench) -> None:
    bench.text = "page 1\n"
    assert bench.look_after(0.5) == []
    assert bench.look_after(0.5) == [["output", 7, "page 1\n"]]
    assert bench.look_after(5) == []
    bench.text += "page 2\n"
    assert bench.look_after(0.25) == [["output", 7, "page 1\npage 2\n"]]
    bench.text += "page 3\n"
    assert bench.look_after(0.75) == []
    assert bench.look_after(0.25) == [["output", 7, "page 1\npage 2\npage 3\n"]]


def test_a_long_output_is_sent_less_often(bench: Bench) -> None:
    bench.text = "x" * 262_000
    assert len(bench.look_after(1)) == 1
    sent = 0
    for _ in range(40):
        bench.text += "."
        sent += len(bench.look_after(1))
    assert sent == 10


def test_a_first_checkpoint_is_sent_at_once_and_of_many_the_newest(bench: Bench) -> None:
    for page in range(1000):
        bench.context.checkpoint({"page": page})
    assert bench.sent == [["checkpoint", 7, {"page": 0}]]
    assert bench.look_after(0.25) == [["checkpoint", 7, {"page": 999}]]
    assert bench.look_after(5) == []


def test_the_checkpoint_that_is_held_is_sent_when_the_job_ends(bench: Bench) -> None:
    bench.context.checkpoint(1)
    bench.context.checkpoint(None)
    bench.news.end(7)
    assert bench.sent == [["checkpoint", 7, 1], ["checkpoint", 7, None]]


def test_nothing_is_sent_after_the_end(bench: Bench) -> None:
    bench.news.end(7)
    bench.text = "late\n"
    bench.context.checkpoint(2)
    assert bench.look_after(5) == []


def test_a_job_that_ends_while_its_output_is_read_sends_none(bench: Bench) -> None:
    def read() -> str:
        bench.news.end(7)
        return "late\n"

    bench.context.attach_output(read, lambda: 5)
    assert bench.look_after(5) == []


def test_it_does_not_wake_up_while_no_job_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    news = LiveNews(lambda _message: None)
    monkeypatch.setattr(news, "look", looked.set)
    threading.Thread(target=news.watch, daemon=True).start()
    assert looked.wait(0.6) is False
