"""Queues, reserved slots, and short jobs beside long ones, on real nodes."""

from __future__ import annotations

import pytest

from tests.services import wait_for
from tests.system.cluster import PATIENCE_SECONDS, Cluster
from tests.system.conftest import MakeCluster

pytestmark = pytest.mark.system

NODES = "SELECT id, name, queues FROM distcron_node"


def test_each_node_runs_its_queues_and_one_without_the_option_runs_all(cluster: Cluster) -> None:
    first = cluster.start_node("--queues", "default")
    second = cluster.start_node("--queues", "reports,night")
    for queue in ("default", "reports", "night", "nobody"):
        cluster.add(queue, "touch", every=1, queue=queue)
    for queue in ("default", "reports", "night"):
        cluster.wait_for_run(queue, count=3, state="succeeded")
    assert cluster.runs("nobody") == []
    served = {row["name"]: row["queues"] for row in cluster.database.rows(NODES)}
    assert served == {first.name: ["default"], second.name: ["reports", "night"]}
    names = {str(row["id"]): row["name"] for row in cluster.database.rows(NODES)}
    for row in cluster.runs(state="succeeded"):
        assert row["key"] in served[names[str(row["node_id"])]]
    cluster.start_node()
    cluster.wait_for_run("nobody", state="succeeded")


def test_a_node_full_of_long_jobs_starts_a_high_priority_at_once(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(config={"RESERVED_SLOTS": 1})
    cluster.start_node("--processes", "1", "--threads", "3")
    gate = str(cluster.gate())
    for number in range(4):
        cluster.add(f"low-{number}", "hold", every=3600, arguments={"gate": gate})
    wait_for(lambda: len(cluster.runs(state="running")) == 2, PATIENCE_SECONDS, "two long runs")
    cluster.add("high", "touch", every=1, priority=50)
    for row in (cluster.wait_for_run("high", n, state="succeeded") for n in (1, 2, 3)):
        assert (row["started_at"] - row["due_at"]).total_seconds() < 1
    assert len(cluster.runs(state="running")) == 2
    cluster.gate().touch()


@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
def test_one_long_job_never_delays_the_others(cluster: Cluster, delivery: str) -> None:
    # One thread for the long job and one for all the others.
    cluster.start_node("--processes", "2", "--threads", "1")
    cluster.add("long", "hold", every=3600, arguments={"gate": str(cluster.gate())})
    cluster.wait_for_run("long", state="running")
    for number in range(4):
        cluster.add(f"short-{number}", "touch", every=1, delivery=delivery)
    for number in range(4):
        cluster.wait_for_run(f"short-{number}", count=5, state="succeeded")
    assert [row["state"] for row in cluster.runs("long")] == ["running"]
    cluster.gate().touch()


def test_a_job_that_holds_the_interpreter_delays_no_other_worker(cluster: Cluster) -> None:
    cluster.start_node("--processes", "2", "--threads", "2")
    cluster.add("hog", "hog", every=3600, arguments={"seconds": 8})
    cluster.wait_for_run("hog", state="running")
    cluster.add("short", "touch", every=1)
    rows = [cluster.wait_for_run("short", n, state="succeeded") for n in range(1, 6)]
    assert [row["state"] for row in cluster.runs("hog")] == ["running"]
    for row in rows:
        assert (row["finished_at"] - row["due_at"]).total_seconds() < 1.5
