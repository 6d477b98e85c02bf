"""Limits of runs and processes of their own, under real nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.services import wait_for
from tests.system.cluster import PATIENCE_SECONDS, Cluster, next_second
from tests.system.conftest import MakeCluster
from tests.system.test_cancel import ctl

pytestmark = pytest.mark.system


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def wait_until_gone(pids: list[int]) -> None:
    for pid in pids:
        wait_for(lambda pid=pid: is_gone(pid), PATIENCE_SECONDS, f"the end of process {pid}")


def numbers(cluster: Cluster, key: str) -> list[int]:
    """Return the processes that a running job told by its progress."""

    def told() -> list[dict[str, Any]]:
        return [row for row in cluster.runs(key, state="running") if row["progress_message"]]

    wait_for(told, PATIENCE_SECONDS, f"the processes of {key}")
    return [int(word) for word in told()[0]["progress_message"].split()]


@pytest.mark.parametrize(
    ("job", "isolation"), [("obey", "shared"), ("dream", "shared"), ("obey", "own")]
)
def test_a_job_over_its_limit_has_failed_and_is_not_tried_again(
    cluster: Cluster, job: str, isolation: str
) -> None:
    node = cluster.start_node()
    cluster.add(
        "limited",
        job,
        every=3600,
        first=next_second(),
        isolation=isolation,
        run_timeout_seconds=1,
        max_attempts=3,
        delivery="at_least_once",
    )
    run = cluster.wait_for_run("limited", state="failed")
    assert (run["reason"], run["attempt"]) == ("timeout", 1)
    assert run["error"] == (
        f"RunTimedOut: Run {run['id']}: told to stop, it took longer than its limit of 1 s."
    )
    assert 1.0 <= (run["finished_at"] - run["started_at"]).total_seconds() < 5
    assert node.events("over_limit", run=run["id"])


def test_a_timeout_is_tried_again_where_that_is_wanted_until_the_whole_time_is_used_up(
    cluster: Cluster,
) -> None:
    cluster.start_node()
    cluster.add(
        "again",
        "obey",
        every=3600,
        first=next_second(),
        run_timeout_seconds=1,
        total_timeout_seconds=3,
        retry_on_timeout=True,
        max_attempts=9,
        backoff="fixed",
        backoff_delays="0.5",
        backoff_jitter="none",
    )
    run = cluster.wait_for_run("again", state="failed")
    assert run["reason"] == "timeout"
    attempts = cluster.attempts(run["id"])
    assert {row["reason"] for row in attempts} == {"timeout"}
    # 1 s, a pause of 0.5 s, 1 s, a pause of 0.5 s: what is left after that is no whole second.
    assert run["attempt"] in (2, 3)
    assert (run["finished_at"] - run["first_started_at"]).total_seconds() < 6


def test_a_thread_that_does_not_stop_is_shown_and_nothing_runs_beside_it(cluster: Cluster) -> None:
    node = cluster.start_node("--processes", "1", "--threads", "2")
    gate = cluster.gate()
    cluster.add(
        "deaf",
        "hold",
        every=1,
        arguments={"gate": str(gate)},
        run_timeout_seconds=1,
        kill_grace_seconds=1,
    )
    cluster.add("other", "touch", every=1)
    stuck = node.wait_for_event("stuck")
    run = cluster.run(stuck["run"])
    assert run["state"] == "running"
    assert run["over_limit_at"] is not None
    wait_for(
        lambda: "does not stop" in cluster.node_row(node.ids()[-1])["alert"],
        PATIENCE_SECONDS,
        "the alert of the node",
    )
    # The other slot goes on, and the schedule's own occurrences do not pass it.
    done = len(cluster.runs("other", state="succeeded"))
    cluster.wait_for_run("other", done + 2, state="succeeded")
    assert len(cluster.runs("deaf", state="running")) == 1
    gate.touch()
    failed = cluster.wait_for_run("deaf", id=run["id"], state="failed")
    assert failed["reason"] == "timeout"
    assert "It ended by itself after" in failed["error"]
    assert cluster.finish_and_check() == []


def test_a_worker_full_of_threads_that_do_not_stop_costs_the_node_no_slot(cluster: Cluster) -> None:
    node = cluster.start_node("--processes", "1", "--threads", "1")
    gate = cluster.gate()
    cluster.add(
        "deaf",
        "hold",
        every=3600,
        first=next_second(),
        arguments={"gate": str(gate)},
        run_timeout_seconds=1,
        kill_grace_seconds=0,
    )
    stuck = node.wait_for_event("stuck")
    assert stuck["replaced"] is True
    cluster.add("other", "touch", every=1)
    cluster.wait_for_run("other", 2, state="succeeded")
    assert cluster.run(stuck["run"])["state"] == "running"
    gate.touch()
    cluster.wait_for_run("deaf", state="failed")
    assert cluster.finish_and_check() == []


@pytest.mark.parametrize("why", ["timeout", "cancelled"])
def test_a_job_of_its_own_that_ignores_sigterm_dies_with_its_children(
    cluster: Cluster, why: str
) -> None:
    cluster.start_node()
    limit = {"run_timeout_seconds": 2} if why == "timeout" else {}
    cluster.add(
        "fortress",
        "fortress",
        every=3600,
        first=next_second(),
        isolation="own",
        kill_grace_seconds=2,
        **limit,
    )
    pids = numbers(cluster, "fortress")
    if why == "cancelled":
        (run,) = cluster.runs("fortress")
        ctl(cluster, "cancel", str(run["id"]), "--reason", "enough")
    state = "failed" if why == "timeout" else "cancelled"
    ended = cluster.wait_for_run("fortress", state=state)
    assert ended["reason"] == why
    assert ended["error"].endswith("killed by signal 9 (SIGKILL) after 2 s.")
    wait_until_gone(pids)


def test_a_cancelled_job_of_its_own_that_never_looks_gets_sigterm(cluster: Cluster) -> None:
    cluster.start_node()
    cluster.add(
        "nap",
        "nap",
        every=3600,
        first=next_second(),
        isolation="own",
        kill_grace_seconds=4,
        arguments={"seconds": 600},
    )
    run = cluster.wait_for_run("nap", state="running")
    wait_for(cluster.marks, PATIENCE_SECONDS, "the begin of the job")
    ctl(cluster, "cancel", str(run["id"]), "--reason", "enough")
    ended = cluster.wait_for_run("nap", state="cancelled")
    assert ended["reason"] == "cancelled"
    assert ended["error"].endswith(": enough; stopped by SIGTERM.")


@pytest.mark.parametrize(
    ("delivery", "state"), [("at_most_once", "failed"), ("at_least_once", "succeeded")]
)
def test_a_killed_process_of_its_own_ends_its_run_alone(
    cluster: Cluster, delivery: str, state: str
) -> None:
    cluster.start_node()
    gate = cluster.gate()
    for key, isolation in (("killed", "own"), ("spared", "own"), ("thread", "shared")):
        cluster.add(
            key,
            "whoami",
            every=3600,
            first=next_second(),
            isolation=isolation,
            delivery=delivery,
            arguments={"gate": str(gate)},
        )
    victim, *others = [numbers(cluster, key)[0] for key in ("killed", "spared", "thread")]
    assert len({victim, *others}) == 3
    os.kill(victim, signal.SIGKILL)
    if state == "succeeded":
        wait_for(lambda: cluster.runs("killed", attempt=2), PATIENCE_SECONDS, "the second attempt")
        gate.touch()
    ended = cluster.wait_for_run("killed", state=state)
    if state == "failed":
        assert (ended["reason"], ended["attempt"]) == ("worker_died", 1)
        assert "killed by signal 9 (SIGKILL), possibly out of memory" in ended["error"]
        gate.touch()
    spared = [cluster.wait_for_run(key, state="succeeded") for key in ("spared", "thread")]
    assert [run["result"] for run in spared] == others
    assert cluster.finish_and_check() == []


def test_a_process_of_its_own_that_a_stranger_terminates_runs_again_where_it_may(
    cluster: Cluster,
) -> None:
    cluster.start_node()
    gate = cluster.gate()
    cluster.add(
        "stranger",
        "whoami",
        every=3600,
        first=next_second(),
        isolation="own",
        delivery="at_least_once",
        arguments={"gate": str(gate)},
    )
    (pid,) = numbers(cluster, "stranger")
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: cluster.runs("stranger", attempt=2), PATIENCE_SECONDS, "the second attempt")
    gate.touch()
    done = cluster.wait_for_run("stranger", state="succeeded")
    (attempt,) = cluster.attempts(done["id"])
    assert (attempt["reason"], done["recoveries"]) == ("worker_died", 1)
    assert cluster.finish_and_check() == []


def test_a_job_beyond_its_memory_limit_fails_and_says_so(cluster: Cluster) -> None:
    cluster.start_node()
    cluster.add(
        "eat",
        "eat",
        every=3600,
        first=next_second(),
        isolation="own",
        memory_limit_mb=300,
        arguments={"megabytes": 500},
    )
    failed = cluster.wait_for_run("eat", state="failed")
    assert failed["error"] == "MemoryError: the limit of its process is 300 MB"


def test_a_killed_node_leaves_no_process_of_its_jobs_behind(cluster: Cluster) -> None:
    node = cluster.start_node()
    cluster.add("fortress", "fortress", every=3600, first=next_second(), isolation="own")
    pids = numbers(cluster, "fortress")
    node.kill9()
    wait_until_gone(pids)


def test_a_drain_that_is_cut_short_ends_processes_of_their_own(cluster: Cluster) -> None:
    node = cluster.start_node("--drain-seconds", "0.5")
    cluster.add("fortress", "fortress", every=3600, first=next_second(), isolation="own")
    pids = numbers(cluster, "fortress")
    assert node.terminate() == 3
    (run,) = cluster.runs("fortress")
    assert (run["state"], run["reason"]) == ("lost", "shutdown")
    wait_until_gone(pids)


def test_a_thread_over_its_limit_that_is_cut_off_has_timed_out(cluster: Cluster) -> None:
    node = cluster.start_node("--drain-seconds", "0.5")
    cluster.add(
        "deaf",
        "hold",
        every=3600,
        first=next_second(),
        delivery="at_least_once",
        arguments={"gate": str(cluster.gate())},
        run_timeout_seconds=1,
    )
    node.wait_for_event("over_limit")
    assert node.terminate() == 3
    (run,) = cluster.runs("deaf")
    assert (run["state"], run["reason"], run["attempt"]) == ("failed", "timeout", 1)


def test_workers_are_recycled_under_load_and_nothing_is_lost(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(config={"WORKER_MAX_RUNS": 15})
    nodes = cluster.start_nodes(2)
    for number in range(8):
        cluster.add(f"touch-{number}", "touch", every=1)
        cluster.add(f"own-{number}", "touch", every=2, isolation="own")
    wait_for(
        lambda: sum(len(node.events("worker_recycled")) for node in nodes) >= 4,
        PATIENCE_SECONDS,
        "workers to be recycled",
    )
    assert [event for node in nodes for event in node.events("worker_died")] == []
    assert cluster.finish_and_check() == []
