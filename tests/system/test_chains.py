"""Chains on real nodes that die around the end of the parent: each child exactly once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services import wait_for
from tests.system.app.failpoints import IN_CHAIN
from tests.system.cluster import PATIENCE_SECONDS, Cluster

pytestmark = pytest.mark.system

PARENTS = 6
PLACES = ("after_effect", "in_finish", IN_CHAIN, "after_finish")


def add_chain(cluster: Cluster, number: int, **values: Any) -> None:
    """Add a parent of each second, and a follower of each of its ends."""
    parent = cluster.add(f"parent-{number}", "touch", every=1, **values)
    for event in ("succeeded", "failed", "skipped"):
        child = cluster.add(
            f"{event}-{number}", "touch", kind="manual", overlap="allow", planned=False
        )
        cluster.database.value(
            "INSERT INTO distcron_chainlink (schedule_id, event, follower_id) "
            "VALUES (%s, %s, %s) RETURNING id",
            [parent, event, child],
        )


@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
def test_each_end_starts_its_follower_once_wherever_nodes_die(
    cluster: Cluster, delivery: str
) -> None:
    cluster.start_node()
    doomed = [
        cluster.launch_node(
            DISTCRON_SYSTEM_FAILPOINT=place,
            DISTCRON_SYSTEM_FLAG=str(cluster.folder / f"died-{place}"),
        )
        for place in PLACES
    ]
    for node in doomed:
        node.wait_for_event("ready")
    for number in range(PARENTS):
        add_chain(cluster, number, delivery=delivery)
    wait_for(
        lambda: not any(node.is_running for node in doomed),
        PATIENCE_SECONDS,
        "the death of every node that was to die",
    )
    cluster.wait_for_run("parent-0", count=len(cluster.runs("parent-0")) + 2, state="succeeded")
    # Only the parents: a follower that is paused would skip what its parent's end has queued.
    cluster.database.rows(
        "UPDATE distcron_schedule SET state = 'paused', version = version + 1 "
        "WHERE key LIKE 'parent-%%' RETURNING id"
    )
    open_runs = "SELECT count(*) FROM distcron_run WHERE state IN ('queued', 'claimed', 'running')"
    wait_for(lambda: cluster.database.value(open_runs) == 0, PATIENCE_SECONDS, "the end of all")

    events = {"succeeded": "succeeded", "failed": "failed", "lost": "failed", "skipped": "skipped"}
    wanted: dict[tuple[int, str], int] = {}
    for number in range(PARENTS):
        for run in cluster.runs(f"parent-{number}"):
            wanted[run["id"], f"{events[run['state']]}-{number}"] = 1
            if run["late"]:
                # It was lost before its own node reported how it had ended.
                wanted[run["id"], f"failed-{number}"] = 1
    found: dict[tuple[int, str], int] = {}
    for run in cluster.runs(trigger="chain"):
        key = run["parent_id"], run["key"]
        found[key] = found.get(key, 0) + 1
    assert found == wanted
    children = cluster.runs(trigger="chain")
    assert {run["state"] for run in children} <= {"succeeded", "lost"}
    assert len([run for run in children if run["state"] == "succeeded"]) > 0
    assert sorted(flag.name for flag in cluster.folder.glob("died-*")) == sorted(
        f"died-{place}" for place in PLACES
    )
    if delivery == "at_most_once":
        assert any(run["state"] == "lost" for run in cluster.runs() if run["key"][0] == "p")
