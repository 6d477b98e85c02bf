"""Transactional jobs and what jobs told, on real nodes that are killed, paused and cut off."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.services import PostgresCluster, wait_for
from tests.system.cluster import PATIENCE_SECONDS, Cluster, next_second
from tests.system.test_node_faults import (
    assert_it_goes_on_under_a_new_id,
    held_by,
    wait_for_begin,
)

pytestmark = pytest.mark.system

SCHEDULES = 8
FAULT_SECONDS = 12.0


def held(cluster: Cluster, job: str = "enter", **values: object) -> int:
    """Add a schedule whose job waits for the gate after it has written; return its id."""
    options = {"delivery": "transactional", "first": next_second(), **values}
    return cluster.add("held", job, every=1, arguments={"gate": str(cluster.gate())}, **options)


def entries(cluster: Cluster, run: dict[str, object]) -> int:
    """Return how many rows of the ledger the occurrence of a run has."""
    return cluster.ledger().count((run["schedule_id"], run["scheduled_at"]))  # type: ignore[arg-type]


def test_a_node_that_is_killed_between_the_writes_and_the_outcome_leaves_one_effect(
    cluster: Cluster,
) -> None:
    nodes = cluster.start_nodes(2)
    schedule = held(cluster)
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)
    owner, other = held_by(cluster, run, nodes)

    owner.kill9()
    wait_for_begin(cluster, schedule, count=2)
    assert cluster.ledger() == []
    cluster.gate().touch()
    done = cluster.wait_for_run("held", state="succeeded", id=run["id"])

    assert (done["attempt"], done["recoveries"]) == (2, 1)
    assert str(done["node_id"]) == other.ids()[-1]
    assert entries(cluster, run) == 1
    assert cluster.finish_and_check() == []


def test_a_worker_that_is_killed_between_the_writes_and_the_outcome_leaves_one_effect(
    cluster: Cluster,
) -> None:
    node = cluster.start_node()
    schedule = held(cluster)
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)

    os.kill(node.workers()[0], signal.SIGKILL)
    wait_for_begin(cluster, schedule, count=2)
    assert cluster.ledger() == []
    cluster.gate().touch()
    done = cluster.wait_for_run("held", state="succeeded", id=run["id"])

    assert (done["attempt"], entries(cluster, run)) == (2, 1)
    assert cluster.finish_and_check() == []


def test_a_worker_that_dies_after_the_commit_has_succeeded(cluster: Cluster) -> None:
    node = cluster.start_node()
    cluster.add(
        "dies",
        "enter",
        every=3600,
        delivery="transactional",
        arguments={"dies": "after"},
        first=next_second(),
    )
    node.wait_for_event("worker_died")
    finished = node.wait_for_event("run_finished")
    run = cluster.run(finished["run"])

    assert (finished["state"], run["state"], run["attempt"]) == ("succeeded", "succeeded", 1)
    assert run["result"] is not None
    assert entries(cluster, run) == 1
    assert cluster.finish_and_check(lag_seconds=3600) == []


def test_a_node_paused_past_its_lease_commits_nothing_when_it_wakes(cluster: Cluster) -> None:
    nodes = cluster.start_nodes(2)
    schedule = held(cluster)
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)
    owner, other = held_by(cluster, run, nodes)

    owner.send_group(signal.SIGSTOP)
    wait_for_begin(cluster, schedule, count=2)
    cluster.gate("gate-2").touch()
    done = cluster.wait_for_run("held", state="succeeded", id=run["id"])
    assert entries(cluster, run) == 1
    cluster.gate("gate-1").touch()
    owner.send_group(signal.SIGCONT)
    owner.wait_for_event("report_rejected", run=run["id"], reason="stale")

    assert cluster.run(run["id"]) == done
    assert (done["attempt"], str(done["node_id"])) == (2, other.ids()[-1])
    assert entries(cluster, run) == 1
    (attempt,) = cluster.attempts(run["id"])
    assert (attempt["reason"], attempt["late_state"]) == ("node_died", "failed")
    assert_it_goes_on_under_a_new_id(cluster, owner)
    cluster.gate().touch()
    assert cluster.finish_and_check() == []


def test_a_lost_run_commits_nothing_when_its_node_wakes(cluster: Cluster) -> None:
    """What a person saw as lost has written nothing and never will."""
    nodes = cluster.start_nodes(2)
    schedule = held(cluster, max_recoveries=0)
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)
    owner, _other = held_by(cluster, run, nodes)

    owner.send_group(signal.SIGSTOP)
    cluster.wait_for_run("held", state="lost", id=run["id"])
    cluster.gate().touch()
    owner.send_group(signal.SIGCONT)
    settled = cluster.wait_for_run("held", state="failed", id=run["id"])

    assert (settled["reason"], settled["late"]) == ("stale", True)
    assert entries(cluster, run) == 0
    assert cluster.finish_and_check() == []


def test_with_its_sessions_terminated_again_and_again_every_success_has_one_effect(
    cluster: Cluster, postgres: PostgresCluster
) -> None:
    cluster.start_nodes(2)
    for number in range(SCHEDULES):
        cluster.add(
            f"each-{number}",
            "enter",
            every=1,
            delivery="transactional",
            max_attempts=3,
            backoff_delays="0.2",
        )
    cluster.wait_for_run("each-0", state="succeeded")
    terminated = 0
    until = time.monotonic() + FAULT_SECONDS
    while time.monotonic() < until:
        terminated += postgres.terminate_backends()
        cluster.pass_seconds(0.4)

    assert terminated > 20
    # Each retry is an attempt, so the rule about attempts does not hold here.
    assert cluster.finish_and_check(lag_seconds=10) == []
    assert len(cluster.ledger()) > SCHEDULES


def test_a_critical_run_holds_a_lock_on_the_connection_that_it_writes_through(
    cluster: Cluster,
) -> None:
    """Besides the lock of its node, which lives in another session."""
    held_locks = (
        "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) "
        "WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted "
        "AND a.application_name NOT LIKE 'distcron-lock%%' AND a.xact_start IS NOT NULL"
    )
    cluster.start_node()
    schedule = held(cluster, lock_level="critical")
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)
    wait_for(lambda: cluster.database.value(held_locks) == 1, PATIENCE_SECONDS, "the lock")
    cluster.gate().touch()
    cluster.wait_for_run("held", state="succeeded", id=run["id"])

    assert entries(cluster, run) == 1
    assert cluster.finish_and_check() == []
    assert cluster.database.value(held_locks) == 0


def test_transactional_jobs_work_on_sqlite(make_sqlite_cluster) -> None:  # type: ignore[no-untyped-def]
    cluster = make_sqlite_cluster()
    cluster.start_nodes(2)
    for number in range(4):
        cluster.add(f"each-{number}", "enter", every=1, delivery="transactional")
    cluster.wait_for_run("each-3", count=3, state="succeeded")

    assert cluster.finish_and_check() == []


# What jobs tell


def test_a_killed_node_s_run_keeps_what_it_told_and_its_recovery_goes_on_from_there(
    cluster: Cluster,
) -> None:
    nodes = cluster.start_nodes(2)
    schedule = held(cluster, "publish", delivery="at_least_once")
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)
    owner, _other = held_by(cluster, run, nodes)
    assert text_of(cluster, run, "attempt 1 began\n")
    wait_for(lambda: cluster.run(run["id"])["checkpoint"], PATIENCE_SECONDS, "the checkpoint")
    assert cluster.run(run["id"])["progress_message"] == "page 3"

    owner.kill9()
    wait_for_begin(cluster, schedule, count=2)
    # The attempt that goes on began with an empty output of its own.
    assert text_of(cluster, run, "attempt 2 began\n")
    cluster.gate().touch()
    done = cluster.wait_for_run("held", state="succeeded", id=run["id"])

    checkpoint = {"page": 3, "attempt": 1}
    assert done["result"] == [checkpoint, [1, owner.name, "node_died", "page 3"]]
    assert done["checkpoint"] is None
    assert cluster.finish_and_check() == []


def test_a_lost_run_and_one_whose_worker_died_keep_their_output(cluster: Cluster) -> None:
    node = cluster.start_node()
    cluster.add("first", "publish", every=3600, arguments={"gate": "/nowhere"}, first=next_second())
    first = cluster.wait_for_run("first", state="running")
    assert text_of(cluster, first, "attempt 1 began\n")
    os.kill(node.workers()[0], signal.SIGKILL)
    failed = cluster.wait_for_run("first", state="failed")
    assert (failed["checkpoint"], failed["reason"]) == ({"page": 3, "attempt": 1}, "worker_died")
    assert text_of(cluster, first, "attempt 1 began\n")

    cluster.start_node()
    cluster.add("second", "publish", every=3600, arguments={"gate": "/nowhere"})
    second = cluster.wait_for_run("second", state="running")
    assert text_of(cluster, second, "attempt 1 began\n")
    owner, _other = held_by(cluster, second, cluster.nodes)
    owner.kill9()
    cluster.wait_for_run("second", state="lost")
    assert text_of(cluster, second, "attempt 1 began\n")


def text_of(cluster: Cluster, run: dict[str, object], wanted: str) -> bool:
    """Wait until the stored output of a run is this."""
    sql = "SELECT output FROM distcron_runoutput WHERE run_id = %s"

    def is_there() -> bool:
        return [row["output"] for row in cluster.database.rows(sql, [run["id"]])] == [wanted]

    wait_for(is_there, PATIENCE_SECONDS, f"the output {wanted!r}")
    return True
