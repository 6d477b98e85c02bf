"""Nodes that are killed again and again under load; every occurrence is accounted for.

``make test-storm`` takes five minutes and 200 kills; DISTCRON_STORM_SECONDS and
DISTCRON_STORM_KILLS say otherwise, and DISTCRON_STORM_SEED repeats a choice of victims. The
numbers are printed as one JSON line.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest

from distcron_app.lifecycle import TRANSITIONS
from tests.services import wait_for
from tests.system.checker import Evidence, violations
from tests.system.cluster import LEASE_SECONDS, PATIENCE_SECONDS, SECONDS, Cluster, Node
from tests.system.conftest import MakeCluster

pytestmark = pytest.mark.system

STORM_SECONDS = float(os.environ.get("DISTCRON_STORM_SECONDS", SECONDS))
KILLS = int(os.environ.get("DISTCRON_STORM_KILLS", int(STORM_SECONDS / 1.5)))
SEED = int(os.environ.get("DISTCRON_STORM_SEED", random.randrange(10**6)))
NODES = 3
# What dies: the node's own process, all of its processes at once, or one worker.
TARGETS, WEIGHTS = ("node", "group", "worker"), (5, 3, 2)
QUIET_SECONDS = 3 * LEASE_SECONDS

DELIVERIES = ("at_most_once", "at_least_once")
OVERLAPS = ("skip", "queue_one", "queue_all", "replace", "allow")
MISFIRES = ("run_latest", "run_all", "skip")
RETRIES = {"max_attempts": 3, "backoff": "fixed", "backoff_delays": "0.2", "catchup_max": 5}
# Job, its arguments, and what else its schedule has; schedules take them in turn.
WORK: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("touch", {}, {}),
    ("nap", {"seconds": 0.3}, {"start_deadline_seconds": 4}),
    ("stumble", {"times": 1}, RETRIES),
    ("touch", {}, {"spread_seconds": 2}),
    ("nap", {"seconds": 1.3}, {"catchup_window_seconds": 2, "catchup_per_minute": 120}),
    ("fail", {}, RETRIES),
    ("touch", {}, {"catchup_window_seconds": 2}),
)


def add_load(cluster: Cluster) -> None:
    """Add a schedule for each combination of policies, and two whose jobs are replaced."""
    combinations = itertools.product(OVERLAPS, MISFIRES, DELIVERIES)
    for number, (overlap, misfire, delivery) in enumerate(combinations):
        job, arguments, values = WORK[number % len(WORK)]
        cluster.add(
            f"{overlap}-{misfire}-{delivery}",
            job,
            every=1 + number % 2,
            arguments=arguments,
            overlap=overlap,
            misfire=misfire,
            delivery=delivery,
            max_queued=3,
            misfire_grace_seconds=1,
            **values,
        )
    for delivery in DELIVERIES:
        arguments = {"gate": str(cluster.gate())}
        key = f"heed-{delivery}"
        cluster.add(key, "heed", every=2, arguments=arguments, overlap="replace", delivery=delivery)


class Storm:
    """Kills members of a fleet, and starts each node again at once under its old name."""

    def __init__(self, cluster: Cluster) -> None:
        self.kills: collections.Counter[str] = collections.Counter()
        self._cluster = cluster
        self._dice = random.Random(SEED)
        self.nodes = [self._launch(place) for place in range(NODES)]
        for node in self.nodes:
            node.wait_for_event("started")

    def rage(self) -> None:
        """Kill so often in that time, at random moments, whoever it meets."""
        began = time.monotonic()
        for number in range(KILLS):
            at = began + (number + self._dice.random()) * STORM_SECONDS / KILLS
            wait_for(lambda at=at: time.monotonic() >= at, STORM_SECONDS, "the moment")  # type: ignore[misc]
            self._strike(self._dice.randrange(NODES))

    def _strike(self, place: int) -> None:
        node = self.nodes[place]
        (target,) = self._dice.choices(TARGETS, WEIGHTS)
        workers = node.workers() if target == "worker" else []
        assert node.is_running, f"{node} ended by itself:\n{node.text[-4000:]}"
        if workers:
            os.kill(self._dice.choice(workers), signal.SIGKILL)
            self.kills["worker"] += 1
            return
        if target == "group":
            node.send_group(signal.SIGKILL)
            node.wait()
            self.kills["group"] += 1
        else:
            node.kill9()
            self.kills["node"] += 1
        self.nodes[place] = self._launch(place)

    def _launch(self, place: int) -> Node:
        return self._cluster.launch_node("--name", f"web-{place + 1}")


def wait_until_nothing_is_late(cluster: Cluster) -> None:
    late = (
        "SELECT count(*) FROM distcron_schedule WHERE state = 'active' "
        "AND next_run_at < clock_timestamp() - interval '2 seconds'"
    )
    wait_for(lambda: cluster.database.value(late) == 0, PATIENCE_SECONDS, "nothing to be late")


def summed(evidence: Evidence, broken: Sequence[str], kills: collections.Counter[str]) -> str:
    """Return what happened as one JSON line."""
    begins = evidence.of_kind("begin")
    return json.dumps(
        {
            "storm": {"seconds": STORM_SECONDS, "seed": SEED, "kills": dict(kills)},
            "schedules": len(evidence.planned),
            "occurrences": sum(len(each.instants) for each in evidence.planned),
            "rows": len(evidence.runs),
            "states": collections.Counter(
                f"{run.state} {run.reason}".strip() for run in evidence.runs
            ),
            "begins": len(begins),
            "effects": len(evidence.of_kind("effect")),
            "recoveries": sum(run.recoveries for run in evidence.runs),
            "retries": evidence.retries().total(),
            "lost": len([line for line in broken if line.endswith(": 0 rows")]),
            "doubled": len([line for line in broken if line.startswith("I1")]),
            "violations": len(broken),
        }
    )


def test_a_storm_of_kills_doubles_nothing_and_accounts_for_every_occurrence(
    make_cluster: MakeCluster,
) -> None:
    """OP-21, OP-50, F19: three nodes, each started again at once under its old name."""
    cluster = make_cluster(config={"THREADS": 8})
    storm = Storm(cluster)
    add_load(cluster)
    cluster.wait_for_run(state="succeeded")

    storm.rage()
    for node in storm.nodes:
        node.wait_for_event("started")
    cluster.pass_seconds(QUIET_SECONDS)
    wait_until_nothing_is_late(cluster)
    cluster.gate().touch()
    evidence = cluster.finish()

    broken = violations(evidence, TRANSITIONS)
    print(summed(evidence, broken, storm.kills))
    assert not broken, "\n".join(broken[:50])
    assert storm.kills.total() == KILLS
    # It proves something only where jobs were hit.
    assert [run for run in evidence.runs if run.state == "lost"]
    assert [run for run in evidence.runs if run.recoveries]
