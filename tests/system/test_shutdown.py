"""What a stop signal does to a node and to the jobs that it runs."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.services import wait_for
from tests.system.cluster import PATIENCE_SECONDS, Cluster, Node, next_second

pytestmark = pytest.mark.system


def busy_node(cluster: Cluster, *options: str, delivery: str = "at_most_once") -> Node:
    """Return a node that runs a job which does not end by itself, beside quick ones."""
    node = cluster.start_node(*options)
    cluster.add(
        "held",
        "hold",
        every=3600,
        delivery=delivery,
        arguments={"gate": str(cluster.gate())},
        first=next_second(),
    )
    cluster.add("quick", "touch", every=1)
    cluster.wait_for_run("held", state="running")
    cluster.wait_for_run("quick", state="succeeded")
    wait_for(lambda: has_begun(cluster), PATIENCE_SECONDS, "the begin of the job")
    return node


def has_begun(cluster: Cluster) -> bool:
    held = cluster.schedule("held")["id"]
    return any(mark.schedule_id == held for mark in cluster.marks())


def assert_it_has_left(cluster: Cluster, node: Node) -> None:
    """Nothing of the node is left: no process, no lock, no membership, no owned run."""
    wait_for(lambda: not node.members(), 5, "the end of the node's processes")
    assert cluster.redis is not None
    with cluster.redis.client() as client:
        assert client.keys("{distcron:lock}:*") == []
    row = cluster.node_row(node.ids()[-1])
    assert (row["state"], row["running"]) == ("left", 0)
    open_runs = [run["id"] for state in ("claimed", "running") for run in cluster.runs(state=state)]
    assert open_runs == []


def held_run(cluster: Cluster) -> dict[str, Any]:
    (run,) = cluster.runs("held")
    return run


def test_sigterm_lets_running_jobs_finish_and_claims_nothing_more(cluster: Cluster) -> None:
    node = busy_node(cluster)

    node.send(signal.SIGTERM)
    node.wait_for_event("draining")
    claimed = [run["id"] for run in cluster.runs()]
    stands_at = cluster.schedule("quick")["next_run_at"]
    cluster.pass_seconds(2.5)

    assert [run["id"] for run in cluster.runs()] == claimed
    assert cluster.schedule("quick")["next_run_at"] == stands_at
    assert cluster.node_row(node.ids()[0])["state"] == "draining"
    assert held_run(cluster)["state"] == "running"
    cluster.gate().touch()
    assert node.wait() == 0
    assert held_run(cluster)["state"] == "succeeded"
    assert_it_has_left(cluster, node)


def test_what_a_draining_node_leaves_is_claimed_by_another(cluster: Cluster) -> None:
    node = busy_node(cluster)
    successor = cluster.start_node()

    node.send(signal.SIGTERM)
    node.wait_for_event("draining")
    cluster.wait_for_run("quick", count=2, state="succeeded", node_id=successor.ids()[0])
    cluster.gate().touch()

    assert node.wait() == 0
    assert str(held_run(cluster)["node_id"]) == node.ids()[0]
    assert cluster.finish_and_check(lag_seconds=3600) == []


def test_a_signal_to_the_whole_process_group_lets_the_running_job_finish(
    cluster: Cluster,
) -> None:
    """OP-88."""
    node = busy_node(cluster)

    node.send_group(signal.SIGTERM)
    node.wait_for_event("draining")
    cluster.gate().touch()

    assert node.wait() == 0
    assert held_run(cluster)["state"] == "succeeded"
    assert node.events("worker_died") == []
    assert_it_has_left(cluster, node)


def test_a_second_sigterm_stops_at_once_and_says_that_the_run_is_lost(cluster: Cluster) -> None:
    node = busy_node(cluster)

    node.send(signal.SIGTERM)
    node.wait_for_event("draining")
    node.send(signal.SIGTERM)

    assert node.wait() == 130
    run = held_run(cluster)
    assert (run["state"], run["reason"]) == ("lost", "shutdown")
    assert run["error"] == "cut off by a second stop signal"
    assert_it_has_left(cluster, node)


def test_a_drain_that_is_shorter_than_the_job_cuts_it_off(cluster: Cluster) -> None:
    node = busy_node(cluster, "--drain-seconds", "0.5")

    assert node.terminate() == 3
    run = held_run(cluster)
    assert (run["state"], run["reason"]) == ("lost", "shutdown")
    assert run["error"] == "cut off by the end of the drain"
    assert_it_has_left(cluster, node)


def test_a_job_that_was_cut_off_is_attempted_again_where_delivery_allows(cluster: Cluster) -> None:
    node = busy_node(cluster, "--drain-seconds", "0.5", delivery="at_least_once")

    assert node.terminate() == 3
    run = held_run(cluster)
    assert (run["state"], run["reason"]) == ("queued", "recovery")
    assert_it_has_left(cluster, node)
    cluster.gate().touch()
    cluster.start_node()
    done = cluster.wait_for_run("held", state="succeeded")

    assert (done["attempt"], done["recoveries"]) == (2, 1)
    (attempt,) = cluster.attempts(done["id"])
    assert (attempt["number"], attempt["reason"]) == (1, "shutdown")


@pytest.mark.parametrize(
    ("delivery", "ends_as"),
    [("at_most_once", ("cancelled", "shutdown")), ("at_least_once", ("queued", "recovery"))],
)
def test_a_job_that_stops_when_it_is_told_leaves_no_doubt(
    cluster: Cluster, delivery: str, ends_as: tuple[str, str]
) -> None:
    node = cluster.start_node("--drain-seconds", "0.5")
    cluster.add("obedient", "obey", every=3600, delivery=delivery)
    cluster.wait_for_run("obedient", state="running")
    wait_for(lambda: cluster.marks(), PATIENCE_SECONDS, "the begin of the job")

    assert node.terminate() == 0
    (run,) = cluster.runs("obedient")
    assert (run["state"], run["reason"]) == ends_as
    assert_it_has_left(cluster, node)
