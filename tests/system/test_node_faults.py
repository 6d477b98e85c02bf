"""Nodes and workers that are killed, paused or kept busy."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.services import wait_for
from tests.system.cluster import LEASE_SECONDS, PATIENCE_SECONDS, Cluster, Node, next_second

pytestmark = pytest.mark.system


def held_by(cluster: Cluster, run: dict[str, object], nodes: list[Node]) -> tuple[Node, Node]:
    """Return the node that runs ``run``, and the other one."""
    cluster_ids = {str(run["node_id"])}
    (owner,) = [node for node in nodes if cluster_ids & set(node.ids())]
    (other,) = [node for node in nodes if node is not owner]
    return owner, other


def wait_for_begin(cluster: Cluster, schedule_id: int, count: int = 1) -> None:
    """Wait until a job of the schedule has begun."""
    wait_for(
        lambda: (
            len([m for m in cluster.marks() if (m.kind, m.schedule_id) == ("begin", schedule_id)])
            >= count
        ),
        PATIENCE_SECONDS,
        "the begin of a job",
    )


def test_a_killed_node_loses_its_at_most_once_run_and_others_take_the_next_occurrence(
    cluster: Cluster,
) -> None:
    nodes = cluster.start_nodes(2)
    schedule = cluster.add(
        "held", "hold", every=1, arguments={"gate": str(cluster.gate())}, first=next_second()
    )
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)
    owner, other = held_by(cluster, run, nodes)
    workers = owner.workers()
    assert len(workers) == 1

    owner.kill9()
    killed_at = time.monotonic()
    wait_for(lambda: not owner.members(), 5, "the end of the dead node's workers")
    successor = cluster.wait_for_run("held", state="running", node_id=other.ids()[-1])

    assert time.monotonic() - killed_at < LEASE_SECONDS + 5
    assert successor["scheduled_at"] > run["scheduled_at"]
    lost = cluster.run(run["id"])
    assert (lost["state"], lost["reason"], lost["attempt"]) == ("lost", "node_died", 1)
    assert cluster.attempts(run["id"]) == []
    cluster.gate().touch()
    assert cluster.finish_and_check() == []


def test_a_killed_node_s_at_least_once_run_is_attempted_again_elsewhere(cluster: Cluster) -> None:
    nodes = cluster.start_nodes(2)
    schedule = cluster.add(
        "held",
        "hold",
        every=1,
        delivery="at_least_once",
        arguments={"gate": str(cluster.gate())},
        first=next_second(),
    )
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)
    owner, other = held_by(cluster, run, nodes)

    owner.kill9()
    killed_at = time.monotonic()
    wait_for_begin(cluster, schedule, count=2)
    assert time.monotonic() - killed_at < LEASE_SECONDS + 5
    cluster.gate().touch()
    done = cluster.wait_for_run("held", state="succeeded", id=run["id"])

    assert (done["attempt"], done["recoveries"]) == (2, 1)
    assert str(done["node_id"]) == other.ids()[-1]
    (attempt,) = cluster.attempts(run["id"])
    assert (attempt["number"], attempt["reason"]) == (1, "node_died")
    assert str(attempt["node_id"]) == owner.ids()[0]
    assert attempt["late_state"] == ""
    assert cluster.finish_and_check() == []


def test_a_node_that_comes_back_at_once_under_its_old_name_is_another_one(
    cluster: Cluster,
) -> None:
    """OP-50: its orphans do not look alive, and are recovered within the lease."""
    owner = cluster.start_node("--name", "web-1")
    schedule = cluster.add(
        "held",
        "hold",
        every=3600,
        delivery="at_least_once",
        arguments={"gate": str(cluster.gate())},
        first=next_second(),
    )
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)

    owner.kill9()
    again = cluster.start_node("--name", "web-1")
    # Nobody is declared dead before the only judge has seen the database for a lease.
    back_at = time.monotonic()
    wait_for_begin(cluster, schedule, count=2)

    assert time.monotonic() - back_at < LEASE_SECONDS + 5
    assert again.ids() != owner.ids()
    names = [cluster.node_row(each.ids()[0])["name"] for each in (owner, again)]
    assert names == ["web-1", "web-1"]
    assert cluster.node_row(owner.ids()[0])["state"] == "dead"
    cluster.gate().touch()
    done = cluster.wait_for_run("held", state="succeeded", id=run["id"])
    assert (done["attempt"], done["recoveries"]) == (2, 1)
    assert str(done["node_id"]) == again.ids()[0]
    assert cluster.finish_and_check(lag_seconds=3600) == []


def test_a_node_paused_past_its_lease_settles_its_lost_run_by_a_late_report(
    cluster: Cluster,
) -> None:
    """OP-27: it does not crash, starts nothing on the old lease, and goes on."""
    nodes = cluster.start_nodes(2)
    schedule = cluster.add(
        "held", "hold", every=1, arguments={"gate": str(cluster.gate())}, first=next_second()
    )
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)
    owner, other = held_by(cluster, run, nodes)

    owner.send_group(signal.SIGSTOP)
    lost = cluster.wait_for_run("held", state="lost", id=run["id"])
    assert (lost["reason"], lost["late"]) == ("node_died", False)
    cluster.gate().touch()
    cluster.wait_for_run("held", state="succeeded", node_id=other.ids()[-1])
    owner.send_group(signal.SIGCONT)
    settled = cluster.wait_for_run("held", state="succeeded", id=run["id"])

    assert (settled["late"], settled["attempt"]) == (True, 1)
    assert settled["fencing_token"] == run["fencing_token"]
    owner.wait_for_event("run_finished", run=run["id"], late=True)
    assert_it_goes_on_under_a_new_id(cluster, owner)
    assert cluster.finish_and_check() == []


def test_a_node_paused_past_its_lease_cannot_finish_a_run_that_was_attempted_again(
    cluster: Cluster,
) -> None:
    nodes = cluster.start_nodes(2)
    schedule = cluster.add(
        "held",
        "hold",
        every=1,
        delivery="at_least_once",
        arguments={"gate": str(cluster.gate())},
        first=next_second(),
    )
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)
    owner, other = held_by(cluster, run, nodes)

    owner.send_group(signal.SIGSTOP)
    wait_for_begin(cluster, schedule, count=2)
    second = cluster.wait_for_run("held", state="running", id=run["id"])
    cluster.gate("gate-1").touch()
    owner.send_group(signal.SIGCONT)
    owner.wait_for_event("report_rejected", run=run["id"])

    assert cluster.run(run["id"]) == second
    assert (second["attempt"], str(second["node_id"])) == (2, other.ids()[-1])
    (attempt,) = cluster.attempts(run["id"])
    assert (attempt["reason"], attempt["late_state"]) == ("node_died", "succeeded")
    assert attempt["late_at"] > second["started_at"]
    cluster.gate().touch()
    done = cluster.wait_for_run("held", state="succeeded", id=run["id"])
    assert (done["attempt"], done["fencing_token"], done["late"]) == (
        2,
        second["fencing_token"],
        False,
    )
    assert_it_goes_on_under_a_new_id(cluster, owner)
    assert cluster.finish_and_check() == []


def assert_it_goes_on_under_a_new_id(cluster: Cluster, node: Node) -> None:
    """The old id stays dead and claims nothing; the node claims under the new one."""
    node.wait_for_event("fenced")
    old, new = node.ids()
    claimed = [run["id"] for run in cluster.runs(node_id=old)]
    cluster.wait_for_run(node_id=new)
    assert cluster.node_row(old)["state"] == "dead"
    assert cluster.node_row(new)["state"] == "active"
    assert [run["id"] for run in cluster.runs(node_id=old)] == claimed


@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
def test_a_paused_parent_whose_workers_go_on_is_taken_for_dead_and_starts_nothing_more(
    cluster: Cluster, delivery: str
) -> None:
    """F21: the job runs to its end; its report counts only where nobody began it again."""
    nodes = cluster.start_nodes(2)
    schedule = cluster.add(
        "held",
        "hold",
        every=1,
        delivery=delivery,
        arguments={"gate": str(cluster.gate())},
        first=next_second(),
    )
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)
    owner, other = held_by(cluster, run, nodes)

    owner.send(signal.SIGSTOP)
    other.wait_for_event("node_dead")
    if delivery == "at_least_once":
        wait_for_begin(cluster, schedule, count=2)
    else:
        cluster.wait_for_run("held", state="lost", id=run["id"])
    cluster.gate("gate-1").touch()
    wait_for(lambda: effects_of(cluster, run) == [1], PATIENCE_SECONDS, "the end of the old job")
    cluster.gate().touch()
    successor = cluster.wait_for_run("held", state="succeeded", node_id=other.ids()[-1])
    owner.send(signal.SIGCONT)

    if delivery == "at_least_once":
        assert successor["id"] == run["id"]
        owner.wait_for_event("report_rejected", run=run["id"])
        assert effects_of(cluster, run) == [1, 2]
    else:
        settled = cluster.wait_for_run("held", state="succeeded", id=run["id"])
        assert (settled["late"], settled["attempt"]) == (True, 1)
        assert effects_of(cluster, run) == [1]
    assert_it_goes_on_under_a_new_id(cluster, owner)
    assert cluster.finish_and_check() == []


def effects_of(cluster: Cluster, run: dict[str, object]) -> list[int]:
    """Return the attempts of a run that had their effect."""
    occurrence = (run["schedule_id"], run["scheduled_at"])
    found = [mark for mark in cluster.marks() if mark.occurrence == occurrence]
    return sorted(mark.attempt for mark in found if mark.kind == "effect")


def test_nodes_that_were_all_paused_past_their_leases_repeat_nothing(cluster: Cluster) -> None:
    nodes = cluster.start_nodes(2)
    schedule = cluster.add(
        "held",
        "hold",
        every=3600,
        delivery="at_least_once",
        arguments={"gate": str(cluster.gate())},
        first=next_second(),
    )
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)

    for node in nodes:
        node.send_group(signal.SIGSTOP)
    wait_for(lambda: alive_count(cluster) == 0, PATIENCE_SECONDS, "the end of both leases")
    for node in nodes:
        node.send_group(signal.SIGCONT)
    wait_for(lambda: alive_count(cluster) == 2, PATIENCE_SECONDS, "both heartbeats")
    cluster.pass_seconds(LEASE_SECONDS)
    cluster.gate().touch()
    done = cluster.wait_for_run("held", state="succeeded", id=run["id"])

    assert (done["attempt"], done["recoveries"]) == (1, 0)
    assert [len(node.ids()) for node in nodes] == [1, 1]
    assert cluster.finish_and_check(lag_seconds=3600) == []


def alive_count(cluster: Cluster) -> int:
    """Return how many members have a lease that has not ended."""
    count: int = cluster.database.value(
        "SELECT count(*) FROM distcron_node WHERE state = 'active' "
        "AND expires_at > clock_timestamp()"
    )
    return count


def test_a_job_that_holds_the_interpreter_past_the_lease_does_not_make_its_node_look_dead(
    cluster: Cluster,
) -> None:
    nodes = cluster.start_nodes(2)
    cluster.add("hog", "hog", every=3600, arguments={"seconds": LEASE_SECONDS})
    wait_for(lambda: cluster.runs("hog", state="succeeded"), 60, "the end of the job")
    (done,) = cluster.runs("hog")

    assert done["result"] >= LEASE_SECONDS
    assert (done["attempt"], done["late"]) == (1, False)
    assert [event for node in nodes for event in node.events("node_dead")] == []
    assert [node.ids() for node in nodes if len(node.ids()) != 1] == []
    assert cluster.finish_and_check(lag_seconds=3600) == []


def test_a_killed_worker_fails_its_at_most_once_run_at_once_and_is_replaced(
    cluster: Cluster,
) -> None:
    node = cluster.start_node()
    schedule = cluster.add(
        "held", "hold", every=1, arguments={"gate": str(cluster.gate())}, first=next_second()
    )
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)
    (worker,) = node.workers()

    os.kill(worker, signal.SIGKILL)
    killed_at = time.monotonic()
    failed = cluster.wait_for_run("held", state="failed", id=run["id"])
    assert time.monotonic() - killed_at < LEASE_SECONDS
    assert (failed["reason"], failed["attempt"]) == ("worker_died", 1)
    assert "signal 9 (SIGKILL)" in failed["error"]
    cluster.gate().touch()
    cluster.wait_for_run("held", state="succeeded")

    (replaced,) = node.workers()
    assert replaced != worker
    assert len(node.ids()) == 1
    assert cluster.finish_and_check() == []


def test_a_killed_worker_s_at_least_once_run_is_attempted_again(cluster: Cluster) -> None:
    node = cluster.start_node()
    schedule = cluster.add(
        "held",
        "hold",
        every=1,
        delivery="at_least_once",
        arguments={"gate": str(cluster.gate())},
        first=next_second(),
    )
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)
    (worker,) = node.workers()

    os.kill(worker, signal.SIGKILL)
    killed_at = time.monotonic()
    wait_for_begin(cluster, schedule, count=2)
    assert time.monotonic() - killed_at < LEASE_SECONDS
    cluster.gate().touch()
    done = cluster.wait_for_run("held", state="succeeded", id=run["id"])

    assert (done["attempt"], done["recoveries"]) == (2, 1)
    (attempt,) = cluster.attempts(run["id"])
    assert (attempt["number"], attempt["reason"]) == (1, "worker_died")
    assert len(node.ids()) == 1
    assert cluster.finish_and_check() == []
