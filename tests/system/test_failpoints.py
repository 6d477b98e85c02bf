"""Nodes that die by SIGKILL in the middle of each step of a run."""

from __future__ import annotations

import pytest

from tests.services import wait_for
from tests.system.app import failpoints
from tests.system.cluster import LEASE_SECONDS, PATIENCE_SECONDS, Cluster

pytestmark = pytest.mark.system

SCHEDULES = 12
PLACES = {
    "at_most_once": failpoints.NAMES,
    # Claim and start are one commit there, so there is no place of its own after the start.
    "at_least_once": tuple(name for name in failpoints.NAMES if name != "after_start"),
    # Its outcome is written by the worker.
    "transactional": (
        *(name for name in failpoints.NAMES if name != "in_finish"),
        *failpoints.COMMIT_NAMES,
    ),
}
# Writes into the database what the checker counts.
JOBS = {"transactional": "enter"}


@pytest.mark.parametrize("delivery", list(PLACES))
def test_a_node_may_die_at_any_step_and_every_occurrence_has_an_outcome(
    cluster: Cluster, delivery: str
) -> None:
    """OP-21: also between the lock, the claim and its commit."""
    cluster.start_node()
    doomed = {
        place: cluster.launch_node(
            DISTCRON_SYSTEM_FAILPOINT=place,
            DISTCRON_SYSTEM_FLAG=str(cluster.folder / f"died-{place}"),
        )
        for place in PLACES[delivery]
    }
    for node in doomed.values():
        node.wait_for_event("ready")
    for number in range(SCHEDULES):
        job = JOBS.get(delivery, "touch")
        cluster.add(f"each-second-{number}", job, every=1, delivery=delivery)

    wait_for(
        lambda: not any(node.is_running for node in doomed.values()),
        PATIENCE_SECONDS,
        "the death of every node that was to die",
    )
    cluster.pass_seconds(LEASE_SECONDS + 3)

    assert cluster.finish_and_check() == []
    assert {place: node.wait() for place, node in doomed.items()} == dict.fromkeys(doomed, -9)
    assert sorted(flag.name for flag in cluster.folder.glob("died-*")) == sorted(
        f"died-{place}" for place in PLACES[delivery]
    )
