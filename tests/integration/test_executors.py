"""The pool of worker processes: real forks, real sockets, no database."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest

from distcron_app.executors import Died, Ended, PoolBroken, ProcessPool, Progressed
from distcron_app.executors.frames import FrameReader, encode
from distcron_app.runner import Assignment
from tests.services import wait_for

News = Ended | Progressed | Died


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool(processes=2, threads=2, output_limit_bytes=10_000)
    pool.start()
    yield pool
    pool.kill()


def assignment(run_id: int, job: str = "tests.echo", **arguments: object) -> Assignment:
    return Assignment(
        run_id=run_id,
        schedule_id=1,
        schedule_key="key",
        job=job,
        arguments=arguments,
        scheduled_at=datetime(2026, 11, 29, 12, tzinfo=UTC),
        attempt=1,
        fencing_token=run_id,
        is_recovery=False,
    )


def collect(
    pool: ProcessPool, enough: Callable[[list[News]], bool], seconds: float = 20
) -> list[News]:
    """Poll until ``enough`` is true of the news so far."""
    news: list[News] = []
    deadline = time.monotonic() + seconds
    while not enough(news):
        assert time.monotonic() < deadline, f"not enough news: {news}"
        news.extend(pool.poll(0.1))
    return news


def ended(news: list[News]) -> dict[int, Ended]:
    return {item.outcome.run_id: item for item in news if isinstance(item, Ended)}


def test_outcomes_come_back_with_result_and_output(pool: ProcessPool) -> None:
    pool.submit([assignment(1, text="hello 🚀")])
    news = collect(pool, lambda seen: bool(ended(seen)))
    outcome = ended(news)[1].outcome
    assert (outcome.state, outcome.result, outcome.output) == (
        "succeeded",
        "hello 🚀",
        "hello 🚀\n",
    )


def test_a_batch_is_spread_and_every_run_comes_back_once(pool: ProcessPool) -> None:
    pool.submit(assignment(number, text=str(number)) for number in range(500))
    news = collect(pool, lambda seen: len(seen) >= 500)
    assert sorted(ended(news)) == list(range(500))
    assert pool.in_flight == 0
    assert pool.free_slots == 4


def test_a_job_that_raises_is_a_failed_outcome(pool: ProcessPool) -> None:
    pool.submit([assignment(1, "tests.fail")])
    outcome = ended(collect(pool, lambda seen: bool(ended(seen))))[1].outcome
    assert (outcome.state, outcome.reason) == ("failed", "error")
    assert outcome.error == "ValueError: as asked"
    assert "tests/jobs.py" in outcome.traceback


def test_a_cancel_reaches_the_job(pool: ProcessPool) -> None:
    pool.submit([assignment(1, "tests.wait_for_cancel")])
    collect(pool, lambda seen: any(isinstance(item, Progressed) for item in seen))
    pool.cancel({1: "the lease is lost", 2: "nobody runs this"}, reason="lease_lost")
    outcome = ended(collect(pool, lambda seen: bool(ended(seen))))[1].outcome
    assert outcome.result == "stopped: the lease is lost"


def test_progress_is_told_while_the_job_runs(pool: ProcessPool) -> None:
    pool.submit([assignment(1, "tests.wait_for_cancel")])
    (told,) = collect(pool, lambda seen: any(isinstance(item, Progressed) for item in seen))
    assert told == Progressed(1, 50.0, "half")
    pool.cancel({1: "enough"}, reason="shutdown")
    collect(pool, lambda seen: bool(ended(seen)))


def test_a_message_that_no_database_keeps_arrives_as_one_that_it_does(pool: ProcessPool) -> None:
    pool.submit([assignment(1, "tests.report", text="🚀")])
    told, *_ = collect(pool, lambda seen: bool(ended(seen)))
    assert told == Progressed(1, 100.0, "🚀\ufffd\ufffd")


def test_a_killed_worker_is_reported_with_its_runs_and_replaced(pool: ProcessPool) -> None:
    pool.submit([assignment(7, "tests.kill_own_process")])
    news = collect(pool, lambda seen: any(isinstance(item, Died) for item in seen))
    (death,) = [item for item in news if isinstance(item, Died)]
    assert death.run_ids == (7,)
    assert "signal 9" in death.cause
    pool.submit(assignment(number, text="again") for number in range(20))
    assert len(ended(collect(pool, lambda seen: len(ended(seen)) == 20))) == 20


def test_a_worker_s_end_may_be_told_before_its_socket_is_read(
    pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect(pool, lambda _: all(link.pid for link in pool._links))
    select = pool._selector.select

    def both_at_once(seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        wait_for(lambda: len(select(0)) == 2, timeout=20, what="the two ends")
        return sorted(select(0), key=lambda each: each[0].fileobj is not pool._control)

    pool.submit([assignment(7, "tests.kill_own_process")])
    with monkeypatch.context() as patch:
        patch.setattr(pool._selector, "select", both_at_once)
        (death,) = pool.poll(1)
    assert isinstance(death, Died) and death.run_ids == (7,)
    pool.submit([assignment(8, text="again")])
    assert 8 in ended(collect(pool, lambda seen: bool(ended(seen))))


def test_a_pool_whose_template_left_requests_unread_is_broken(pool: ProcessPool) -> None:
    collect(pool, lambda _: all(link.pid for link in pool._links))
    os.kill(pool._template_pid, signal.SIGSTOP)
    pool._spawn()
    os.kill(pool._template_pid, signal.SIGKILL)
    with pytest.raises(PoolBroken):
        collect(pool, lambda _: False)


def test_a_worker_that_exits_by_itself_is_reported_with_its_code(pool: ProcessPool) -> None:
    pool.submit([assignment(7, "tests.exit_process")])
    news = collect(pool, lambda seen: any(isinstance(item, Died) for item in seen))
    (death,) = [item for item in news if isinstance(item, Died)]
    assert death.cause == "worker process ended with exit code 42"


def test_wake_ends_a_poll_from_another_thread(pool: ProcessPool) -> None:
    timer = threading.Timer(0.05, pool.wake)
    timer.start()
    before = time.monotonic()
    pool.poll(30)
    assert time.monotonic() - before < 10
    # Something else may have ended the poll; the pool must live until the timer has fired.
    timer.join()


def test_a_stopped_worker_does_not_block_its_node(pool: ProcessPool) -> None:
    pool.submit([assignment(1, "tests.own_pid"), assignment(2, "tests.own_pid")])
    outcomes = ended(collect(pool, lambda seen: len(ended(seen)) == 2))
    pids = {item.outcome.result for item in outcomes.values()}
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        # More than any socket buffer holds.
        pool.submit(assignment(number, text="x" * 15_000) for number in range(200))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert len(ended(collect(pool, lambda seen: len(ended(seen)) == 200))) == 200


def test_a_killed_template_breaks_the_pool_and_takes_the_workers_with_it() -> None:
    pool = ProcessPool(processes=2, threads=1, output_limit_bytes=1000)
    pool.start()
    pool.submit([assignment(1, "tests.own_pid"), assignment(2, "tests.own_pid")])
    outcomes = ended(collect(pool, lambda seen: len(ended(seen)) == 2))
    os.kill(pool._template_pid, signal.SIGKILL)
    with pytest.raises(PoolBroken):
        collect(pool, lambda seen: False)
    for item in outcomes.values():
        wait_for_exit(item.outcome.result)
    pool.kill()


def wait_for_exit(pid: int) -> None:
    def is_gone() -> bool:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_for(is_gone, timeout=10, what=f"process {pid} to end")


def test_when_the_node_is_killed_its_workers_end_with_it() -> None:
    script = textwrap.dedent(
        """
        import os, django
        django.setup()
        from tests.integration.test_executors import ProcessPool, assignment, collect, ended
        pool = ProcessPool(processes=2, threads=1, output_limit_bytes=1000)
        pool.start()
        pool.submit([assignment(1, "tests.own_pid"), assignment(2, "tests.own_pid")])
        outcomes = ended(collect(pool, lambda seen: len(ended(seen)) == 2))
        print(*(item.outcome.result for item in outcomes.values()), flush=True)
        pool.submit([assignment(3, "tests.wait_for_cancel")])
        pool.poll(60)
        pool.poll(60)
        """
    )
    node = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
    )
    assert node.stdout is not None
    pids = [int(word) for word in node.stdout.readline().split()]
    node.kill()
    node.wait()
    node.stdout.close()
    assert len(pids) == 2
    for pid in pids:
        wait_for_exit(pid)


def test_stop_signals_to_the_whole_group_leave_the_workers_running(pool: ProcessPool) -> None:
    pool.submit([assignment(1, "tests.own_pid")])
    pid = ended(collect(pool, lambda seen: bool(ended(seen))))[1].outcome.result
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, signum)
        os.kill(pool._template_pid, signum)
    pool.submit([assignment(2, text="still here")])
    assert 2 in ended(collect(pool, lambda seen: bool(ended(seen))))


def test_frames_survive_any_split() -> None:
    messages = [["run", [1, 2, 3]], "ü🚀", {"a": None}]
    data = b"".join(encode(message) for message in messages)
    for step in (1, 2, 3, 7, len(data)):
        reader = FrameReader()
        found = [
            message
            for start in range(0, len(data), step)
            for message in reader.feed(data[start : start + step])
        ]
        assert found == messages
