"""The pool of worker processes: real forks, real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import io
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
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections
from django.test import override_settings

from distcron_app.console import TextConsole
from distcron_app.context import ParentRun
from distcron_app.executors import (
    Died,
    Ended,
    News,
    OverLimit,
    PoolBroken,
    ProcessPool,
    Progressed,
    Recycled,
    Stuck,
    UnsafeToFork,
    unsafe_to_fork,
)
from distcron_app.executors.frames import FrameReader, encode
from distcron_app.management.commands.runscheduler import _warn_of_threads
from distcron_app.runner import Assignment, Outcome
from tests.jobs import database_session
from tests.services import wait_for


@pytest.fixture
def make_pool() -> Iterator[Callable[..., ProcessPool]]:
    pools: list[ProcessPool] = []

    def make(**options: Any) -> ProcessPool:
        defaults = {"processes": 2, "threads": 2, "output_limit_bytes": 10_000}
        connections.close_all()  # of the tests before
        pool = ProcessPool(**{**defaults, **options})
        pool.start()
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.kill()


@pytest.fixture
def pool(make_pool: Callable[..., ProcessPool]) -> ProcessPool:
    return make_pool()


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
    )


def limited(run_id: int, job: str, **fields: Any) -> Assignment:
    """Return an assignment with limits; what is no field of it is an argument of the job."""
    known = {field.name for field in dataclasses.fields(Assignment)}
    arguments = {name: value for name, value in fields.items() if name not in known}
    limits = {name: value for name, value in fields.items() if name in known}
    return dataclasses.replace(
        assignment(run_id, job, **arguments), timeout_cause="it took too long", **limits
    )


def outcome_of(pool: ProcessPool, run_id: int) -> Outcome:
    return ended(collect(pool, lambda seen: run_id in ended(seen)))[run_id].outcome


def told_numbers(pool: ProcessPool) -> list[int]:
    """Return the numbers of the processes that a job told by its progress."""
    news = collect(pool, lambda seen: any(isinstance(item, Progressed) for item in seen))
    (told,) = [item for item in news if isinstance(item, Progressed)]
    return [int(word) for word in told.message.split()]


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


@pytest.mark.parametrize("own_process", [False, True])
def test_what_started_the_run_reaches_the_job(pool: ProcessPool, own_process: bool) -> None:
    parent = ParentRun(
        run_id=41,
        attempt=1,
        schedule_key="first",
        state="succeeded",
        reason="",
        scheduled_at=datetime(2026, 11, 29, 11, tzinfo=UTC),
    )
    pool.submit([limited(1, "tests.parent", parent=parent, own_process=own_process)])
    assert outcome_of(pool, 1).result == 41


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
    pool._spawn("shared")
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
    connections.close_all()
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


# --- limits: threads ------------------------------------------------------------


def test_a_job_in_a_thread_is_told_at_its_limit_and_fails_by_it(pool: ProcessPool) -> None:
    pool.submit([limited(1, "tests.heed", timeout_seconds=0.2)])
    news = collect(pool, lambda seen: bool(ended(seen)))
    assert OverLimit(1, "it took too long") in news
    outcome = ended(news)[1].outcome
    assert (outcome.state, outcome.reason) == ("failed", "timeout")
    assert outcome.error == "RunTimedOut: Run 1: told to stop, it took too long."


def test_a_job_that_ends_in_time_is_left_alone(pool: ProcessPool) -> None:
    pool.submit([limited(1, "tests.echo", text="quick", timeout_seconds=0.5)])
    assert outcome_of(pool, 1).state == "succeeded"
    assert pool.poll(0.6) == []


def test_an_async_job_is_cancelled_at_its_limit(pool: ProcessPool) -> None:
    pool.submit([limited(1, "tests.await", timeout_seconds=0.2)])
    outcome = outcome_of(pool, 1)
    assert (outcome.state, outcome.reason) == ("failed", "timeout")


def test_an_async_job_is_cancelled_for_a_person(pool: ProcessPool) -> None:
    pool.submit([assignment(1, "tests.await")])
    collect(pool, lambda seen: any(isinstance(item, Progressed) for item in seen))
    pool.cancel({1: "by siti: wrong data"}, reason="cancelled")
    outcome = outcome_of(pool, 1)
    assert (outcome.state, outcome.reason) == ("cancelled", "cancelled")


def test_an_async_job_that_swallows_its_cancel_is_as_one_that_never_looked(
    pool: ProcessPool,
) -> None:
    pool.submit([assignment(1, "tests.await", stubborn=True)])
    collect(pool, lambda seen: any(isinstance(item, Progressed) for item in seen))
    pool.cancel({1: "by siti: wrong data"}, reason="cancelled")
    outcome = outcome_of(pool, 1)
    assert (outcome.state, outcome.result) == ("succeeded", "ignored it")
    pool.submit([limited(2, "tests.await", stubborn=True, timeout_seconds=0.2)])
    outcome = outcome_of(pool, 2)
    assert (outcome.state, outcome.reason) == ("failed", "timeout")
    assert "It ended by itself after" in outcome.error
    assert outcome.result == "ignored it"


def test_a_thread_that_does_not_stop_keeps_its_slot_until_it_ends(
    pool: ProcessPool, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    pool.submit(
        [limited(1, "tests.deaf", gate=str(gate), timeout_seconds=0.1, kill_grace_seconds=0.2)]
    )
    news = collect(pool, lambda seen: any(isinstance(item, Stuck) for item in seen))
    assert [item for item in news if isinstance(item, Stuck)] == [Stuck(1, is_replaced=False)]
    assert (pool.free_slots, pool.stuck, pool.in_flight) == (3, 1, 1)
    pool.submit(assignment(number, text="beside it") for number in range(2, 30))
    assert len(ended(collect(pool, lambda seen: len(ended(seen)) == 28))) == 28
    gate.touch()
    outcome = outcome_of(pool, 1)
    assert (outcome.state, outcome.reason) == ("failed", "timeout")
    assert (pool.free_slots, pool.stuck) == (4, 0)


def test_a_worker_with_no_thread_left_is_replaced_once_and_ends_with_its_jobs(
    make_pool: Callable[..., ProcessPool], tmp_path: Path
) -> None:
    pool = make_pool(processes=1, threads=2)
    gate = tmp_path / "gate"

    def submit_deaf(first: int) -> list[News]:
        pool.submit(
            limited(
                number, "tests.deaf", gate=str(gate), timeout_seconds=0.1, kill_grace_seconds=0.1
            )
            for number in (first, first + 1)
        )
        return collect(pool, lambda seen: sum(1 for item in seen if isinstance(item, Stuck)) == 2)

    news = submit_deaf(1)
    assert [item.is_replaced for item in news if isinstance(item, Stuck)] == [False, True]
    assert (pool.free_slots, pool.in_flight) == (2, 2)
    # The second worker full of them is not replaced: the first one still costs its memory.
    news = submit_deaf(3)
    assert not any(item.is_replaced for item in news if isinstance(item, Stuck))
    assert (pool.free_slots, pool.in_flight) == (0, 4)
    gate.touch()
    assert len(ended(collect(pool, lambda seen: len(ended(seen)) == 4))) == 4
    collect(pool, lambda seen: len(pool._links) == 1)
    assert (pool.free_slots, pool.stuck) == (2, 0)


# --- limits: processes of their own -----------------------------------------------


def own(run_id: int, job: str, **fields: Any) -> Assignment:
    return limited(run_id, job, own_process=True, **fields)


def test_each_run_of_its_own_has_a_process_and_a_group_and_takes_one_slot(
    pool: ProcessPool,
) -> None:
    pool.submit([own(1, "tests.heed"), own(2, "tests.heed")])
    assert (pool.free_slots, pool.taken_slots) == (2, 2)
    pool.cancel({1: "enough", 2: "enough"}, reason="cancelled")
    collect(pool, lambda seen: len(ended(seen)) == 2)
    pool.submit([own(3, "tests.own_pid"), own(4, "tests.own_pid")])
    outcomes = ended(collect(pool, lambda seen: len(ended(seen)) == 2))
    first, second = (outcomes[number].outcome.result for number in (3, 4))
    assert first != second
    for pid in (first, second):
        wait_for_exit(pid)
    assert pool.free_slots == 4


def test_what_a_job_of_its_own_leaves_behind_ends_with_it(pool: ProcessPool) -> None:
    pool.submit([own(1, "tests.leave_child")])
    for pid in outcome_of(pool, 1).result:
        wait_for_exit(pid)


def test_sigterm_lets_a_deaf_job_clean_up_at_its_limit(pool: ProcessPool, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    pool.submit(
        [own(1, "tests.leave_trace", path=str(trace), timeout_seconds=0.1, kill_grace_seconds=1)]
    )
    outcome = outcome_of(pool, 1)
    assert trace.read_text() == "cleaned up"
    assert (outcome.state, outcome.reason) == ("failed", "timeout")
    assert outcome.error == (
        "RunTimedOut: Run 1: told to stop, it took too long; stopped by SIGTERM."
    )


@pytest.mark.parametrize(("reason", "state"), [("timeout", "failed"), ("cancelled", "cancelled")])
def test_a_job_that_ignores_sigterm_is_killed_with_its_children(
    pool: ProcessPool, reason: str, state: str
) -> None:
    timeout = 0.5 if reason == "timeout" else None
    pool.submit([own(1, "tests.fortify", timeout_seconds=timeout, kill_grace_seconds=1.0)])
    pids = told_numbers(pool)
    if reason == "cancelled":
        pool.cancel({1: "it took too long"}, reason="cancelled")
    outcome = outcome_of(pool, 1)
    for pid in pids:
        wait_for_exit(pid)
    assert (outcome.state, outcome.reason) == (state, reason)
    assert outcome.error.endswith("it took too long; killed by signal 9 (SIGKILL) after 1 s.")


def test_a_killed_process_of_its_own_leaves_nothing_in_other_groups(pool: ProcessPool) -> None:
    pool.submit([own(1, "tests.group_child")])
    pids = told_numbers(pool)
    os.kill(pids[0], signal.SIGKILL)
    collect(pool, lambda seen: any(isinstance(item, Died) for item in seen))
    for pid in pids:
        wait_for_exit(pid)


@override_settings(DISTCRON={"SHELL_COMMANDS": ("/bin/sleep",)})
def test_a_program_dies_with_the_process_of_its_run(
    make_pool: Callable[..., ProcessPool],
) -> None:
    pool = make_pool()
    seconds = f"3600.{os.getpid()}"  # found by it
    pool.submit([own(1, "distcron.shell_command", argv=["/bin/sleep", seconds])])
    (pid,) = wait_for(lambda: processes_with(seconds), what="the program")
    stat = Path(f"/proc/{pid}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    collect(pool, lambda seen: any(isinstance(item, Died) for item in seen))
    wait_for_exit(pid)


def processes_with(word: str) -> list[int]:
    """Return the processes that have ``word`` as an argument."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if word.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def test_a_job_of_its_own_that_holds_the_interpreter_ends_at_its_limit(
    pool: ProcessPool,
) -> None:
    pool.submit(
        [own(1, "tests.hold_interpreter", letters=40, timeout_seconds=0.3, kill_grace_seconds=0.2)]
    )
    outcome = outcome_of(pool, 1)
    assert (outcome.state, outcome.reason) == ("failed", "timeout")


def test_a_lost_lease_tells_a_process_of_its_own_and_kills_nothing(
    pool: ProcessPool, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    pool.submit([own(1, "tests.deaf", gate=str(gate), kill_grace_seconds=0.0)])
    collect(pool, lambda seen: any(isinstance(item, Progressed) for item in seen))
    pool.cancel({1: "the lease is lost"}, reason="lease_lost")
    assert pool.poll(0.3) == []
    gate.touch()
    assert outcome_of(pool, 1).result == "through"


def test_a_killed_process_of_its_own_harms_no_other_run(pool: ProcessPool, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    pool.submit([own(1, "tests.deaf", gate=str(gate)), assignment(2, "tests.deaf", gate=str(gate))])
    pool.submit([own(7, "tests.kill_own_process")])
    news = collect(pool, lambda seen: any(isinstance(item, Died) for item in seen))
    (death,) = [item for item in news if isinstance(item, Died)]
    assert death == Died(
        (7,), "the job's own process killed by signal 9 (SIGKILL), possibly out of memory"
    )
    gate.touch()
    outcomes = ended(collect(pool, lambda seen: len(ended(seen)) == 2))
    assert {item.outcome.result for item in outcomes.values()} == {"through"}


def test_a_process_of_its_own_that_a_stranger_stops_says_so(pool: ProcessPool) -> None:
    pool.submit([own(1, "tests.leave_pid")])
    (pid,) = told_numbers(pool)
    os.kill(pid, signal.SIGTERM)
    outcome = outcome_of(pool, 1)
    assert (outcome.state, outcome.reason) == ("failed", "worker_died")
    assert "its process received SIGTERM" in outcome.error


def test_memory_beyond_the_limit_is_an_error_that_names_it(pool: ProcessPool) -> None:
    # The process is a fork of the one that runs the tests, whose memory counts as well.
    pool.submit([own(1, "tests.allocate", megabytes=3000, memory_limit_mb=2000)])
    outcome = outcome_of(pool, 1)
    assert (outcome.state, outcome.reason) == ("failed", "error")
    assert outcome.error == "MemoryError: the limit of its process is 2000 MB"
    pool.submit([own(2, "tests.allocate", megabytes=100, memory_limit_mb=2000)])
    assert outcome_of(pool, 2).state == "succeeded"


def test_when_the_pool_is_killed_the_children_of_its_jobs_end_as_well(
    make_pool: Callable[..., ProcessPool],
) -> None:
    connections.close_all()
    pool = ProcessPool(processes=1, threads=1, output_limit_bytes=1000)
    pool.start()
    pool.submit([own(1, "tests.fortify")])
    pids = told_numbers(pool)
    pool.kill()
    for pid in pids:
        wait_for_exit(pid)


def test_when_the_template_is_killed_the_children_of_its_jobs_end_as_well() -> None:
    connections.close_all()
    pool = ProcessPool(processes=1, threads=1, output_limit_bytes=1000)
    pool.start()
    pool.submit([own(1, "tests.fortify")])
    pids = told_numbers(pool)
    os.kill(pool._template_pid, signal.SIGKILL)
    with pytest.raises(PoolBroken):
        collect(pool, lambda seen: False)
    pool.kill()
    for pid in pids:
        wait_for_exit(pid)


# --- recycling --------------------------------------------------------------------


def test_a_worker_is_replaced_after_its_runs_and_none_is_lost(
    make_pool: Callable[..., ProcessPool],
) -> None:
    pool = make_pool(max_runs=20)
    pool.submit(assignment(number, "tests.own_pid") for number in range(100))
    news = collect(
        pool,
        lambda seen: len(ended(seen)) == 100 and len(pool._links) == 2,
    )
    recycled = [item for item in news if isinstance(item, Recycled)]
    assert [(item.runs, item.cause) for item in recycled] == [(20, "after 20 runs")] * 4
    assert not any(isinstance(item, Died) for item in news)
    assert len({item.outcome.result for item in ended(news).values()}) == 6


def test_a_worker_finishes_what_it_has_while_another_takes_its_place(
    make_pool: Callable[..., ProcessPool], tmp_path: Path
) -> None:
    pool = make_pool(processes=1, threads=2, max_runs=1)
    gate = tmp_path / "gate"
    pool.submit([assignment(1, "tests.deaf", gate=str(gate))])
    assert pool.free_slots == 1
    pool.submit([assignment(2, text="at once")])
    assert outcome_of(pool, 2).result == "at once"
    gate.touch()
    assert outcome_of(pool, 1).result == "through"


def test_a_worker_that_uses_too_much_memory_is_replaced(
    make_pool: Callable[..., ProcessPool],
) -> None:
    pool = make_pool(processes=1, threads=1, max_memory_mb=1)
    news = collect(pool, lambda seen: any(isinstance(item, Recycled) for item in seen))
    (recycled,) = [item for item in news if isinstance(item, Recycled)]
    assert recycled.cause.endswith(" MB")
    pool.submit([assignment(1, text="still here")])
    assert outcome_of(pool, 1).result == "still here"


# --- what a fork would share ---------------------------------------------------------


@pytest.mark.django_db
def test_a_pool_refuses_to_start_beside_an_open_connection() -> None:
    connection.ensure_connection()
    with pytest.raises(UnsafeToFork, match="database connection 'default'"):
        ProcessPool(processes=1, threads=1, output_limit_bytes=1000).start()


def test_threads_are_named_before_a_fork() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="tracer")
    thread.start()
    try:
        assert "thread 'tracer'" in unsafe_to_fork()
        said = io.StringIO()
        _warn_of_threads(TextConsole(said, time_zone="UTC", colour=False))
        assert "Started before the workers are forked, and may block them: " in said.getvalue()
        assert "thread 'tracer'" in said.getvalue()
    finally:
        gate.set()
        thread.join()


@pytest.mark.databases("postgresql", "mysql")
@pytest.mark.django_db(transaction=True)
def test_every_process_has_a_database_session_of_its_own(
    make_pool: Callable[..., ProcessPool],
) -> None:
    pool = make_pool(processes=2, threads=1)
    ours = database_session()
    pool.submit(
        [
            assignment(1, "tests.database_session"),
            assignment(2, "tests.database_session"),
            own(3, "tests.database_session"),
            own(4, "tests.database_session"),
        ]
    )
    outcomes = ended(collect(pool, lambda seen: len(ended(seen)) == 4))
    theirs = {item.outcome.result for item in outcomes.values()}
    assert len(theirs | {ours}) == 5


# --- more runs than slots ------------------------------------------------------------


def test_runs_of_their_own_beyond_the_slots_wait_for_one(
    make_pool: Callable[..., ProcessPool],
) -> None:
    pool = make_pool(processes=1, threads=2)
    pool.submit(own(number, "tests.heed") for number in (1, 2, 3, 4))
    collect(pool, lambda seen: sum(isinstance(item, Progressed) for item in seen) == 2)
    assert (pool.free_slots, pool.taken_slots, pool.in_flight) == (0, 4, 4)
    pool.cancel({4: "enough"}, reason="cancelled")
    outcome = outcome_of(pool, 4)
    assert (outcome.state, outcome.reason) == ("cancelled", "cancelled")
    assert outcome.error == "RunStopped: Run 4: told to stop, enough; it had not begun."
    pool.cancel({1: "enough", 2: "enough"}, reason="cancelled")
    collect(pool, lambda seen: Progressed(3, 1.0, "waits") in seen)
    pool.cancel({3: "enough"}, reason="cancelled")
    outcome_of(pool, 3)
    assert (pool.free_slots, pool.in_flight) == (2, 0)
