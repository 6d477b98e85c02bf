"""Schedules with one concurrency key, on three real nodes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.services import wait_for
from tests.system.cluster import PATIENCE_SECONDS, Cluster
from tests.system.conftest import MakeCluster

pytestmark = pytest.mark.system


def add_pair(cluster: Cluster, text: str, **values: object) -> list[str]:
    """Add two schedules every second whose key has the same argument; return their keys."""
    keys = [f"{text}-{number}" for number in (1, 2)]
    for key in keys:
        cluster.add(
            key,
            "greet",
            every=1,
            arguments={"text": text, "gate": str(cluster.gate(text))},
            concurrency_key="mail-{text}",
            **values,
        )
    return keys


def started(cluster: Cluster, scope: str) -> list[dict[str, object]]:
    rows = [row for row in cluster.runs(concurrency_key=scope) if row["started_at"]]
    return sorted(rows, key=lambda row: row["started_at"])


@pytest.mark.parametrize("redis", [True, False])
def test_two_schedules_of_a_key_never_run_beside_each_other(
    make_cluster: MakeCluster, redis: bool
) -> None:
    cluster = make_cluster(redis=redis, config={} if redis else {"LOCK_BACKEND": "none"})
    cluster.start_nodes(3)
    cluster.gate("acme").touch()
    first, second = add_pair(cluster, "acme", overlap="queue_all")
    for key in (first, second):
        cluster.wait_for_run(key, count=8, state="succeeded")
    for earlier, later in pairwise(started(cluster, "mail-acme")):
        if later["finished_at"] is not None:
            assert earlier["finished_at"] <= later["started_at"]


def test_other_arguments_run_beside_it_and_the_blocked_one_names_the_run(
    cluster: Cluster,
) -> None:
    cluster.start_nodes(3)
    acme, globex = add_pair(cluster, "acme"), add_pair(cluster, "globex")
    for scope in ("mail-acme", "mail-globex"):
        wait_for(
            lambda scope=scope: len(cluster.runs(concurrency_key=scope, state="running")) == 1,
            PATIENCE_SECONDS,
            f"a run of {scope}",
        )
    for keys, scope in ((acme, "mail-acme"), (globex, "mail-globex")):
        (running,) = cluster.runs(concurrency_key=scope, state="running")
        (other,) = [key for key in keys if key != running["key"]]
        skipped = cluster.wait_for_run(other, count=2, state="skipped")
        assert skipped["reason"] == "overlap"
        assert skipped["details"]["blocked_by"] == running["id"]
        assert len(cluster.runs(concurrency_key=scope, state="running")) == 1
        cluster.gate(scope.removeprefix("mail-")).touch()
    for keys in (acme, globex):
        for key in keys:
            cluster.wait_for_run(key, state="succeeded")
