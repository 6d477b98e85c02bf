"""Overlap, late occurrences and retries on real nodes."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from tests.services import wait_for
from tests.system.cluster import PATIENCE_SECONDS, Cluster, next_second

pytestmark = pytest.mark.system

OUTAGE = timedelta(hours=3)


def missed(cluster: Cluster, key: str, **values: Any) -> datetime:
    """Add a minutely schedule that nobody looked at for three hours; return its first instant."""
    first: datetime = next_second() - OUTAGE
    cluster.add(key, "touch", every=60, first=first, **values)
    return first


def covered(rows: list[dict[str, Any]]) -> int:
    """Return for how many instants the rows stand."""
    return sum((row["details"] or {}).get("count", 1) for row in rows)


def in_order(cluster: Cluster, key: str, count: int) -> list[dict[str, Any]]:
    """Return the runs that succeeded, by their instants, once there are so many."""
    cluster.wait_for_run(key, count=count, state="succeeded")
    rows = cluster.runs(key, state="succeeded")[:count]
    return sorted(rows, key=lambda row: row["scheduled_at"])


def assert_one_after_the_other(rows: list[dict[str, Any]]) -> None:
    for earlier, later in pairwise(rows):
        assert earlier["finished_at"] <= later["started_at"]


def test_after_three_hours_without_a_node_one_late_occurrence_runs(cluster: Cluster) -> None:
    first = missed(cluster, "late")
    cluster.start_nodes(3)
    done = cluster.wait_for_run("late", state="succeeded")
    rows = cluster.runs("late")

    assert first + timedelta(minutes=179) <= done["scheduled_at"]
    assert [row["reason"] for row in rows if row["id"] != done["id"]] == ["misfire", "coalesced"]
    between = (done["scheduled_at"] - first) / timedelta(minutes=1)
    assert covered(rows) == between + 1
    assert len([mark for mark in cluster.marks() if mark.kind == "effect"]) == 1


def test_all_late_ones_run_one_after_the_other_the_newest_of_many(cluster: Cluster) -> None:
    missed(cluster, "late", misfire="run_all", catchup_window_seconds=4 * 3600, catchup_max=5)
    cluster.start_nodes(3)
    rows = in_order(cluster, "late", 5)

    assert_one_after_the_other(rows)
    assert {
        (later["scheduled_at"] - earlier["scheduled_at"]) for earlier, later in pairwise(rows)
    } == {timedelta(minutes=1)}
    (dropped,) = cluster.runs("late", state="skipped")
    assert dropped["reason"] == "misfire"
    assert dropped["details"]["count"] >= 175


def test_occurrences_that_wait_run_in_their_order_and_the_queue_has_an_end(
    cluster: Cluster,
) -> None:
    cluster.start_nodes(2)
    gate = str(cluster.gate())
    cluster.add(
        "queue", "hold", every=1, overlap="queue_all", max_queued=2, arguments={"gate": gate}
    )
    skipped = cluster.wait_for_run("queue", state="skipped")
    assert (skipped["reason"], skipped["details"]["waiting"]) == ("overlap", 2)
    assert len(cluster.runs("queue", state="running")) == 1
    cluster.gate().touch()
    assert_one_after_the_other(in_order(cluster, "queue", 4))


def test_runs_side_by_side_are_spread_over_the_nodes_up_to_their_limit(cluster: Cluster) -> None:
    cluster.start_nodes(2)
    gate = str(cluster.gate())
    cluster.add("beside", "hold", every=1, overlap="allow", max_active=3, arguments={"gate": gate})
    cluster.wait_for_run("beside", state="skipped")
    assert len(cluster.runs("beside", state="running")) == 3
    cluster.gate().touch()
    cluster.wait_for_run("beside", count=4, state="succeeded")


@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
def test_a_job_that_fails_twice_succeeds_in_its_third_attempt(
    cluster: Cluster, delivery: str
) -> None:
    cluster.start_nodes(2)
    cluster.add(
        "stumble",
        "stumble",
        every=3600,
        delivery=delivery,
        arguments={"times": 2},
        max_attempts=3,
        backoff="fixed",
        backoff_delays="0.3",
        backoff_jitter="none",
    )
    done = cluster.wait_for_run("stumble", state="succeeded")

    assert (done["attempt"], done["result"], done["error"]) == (3, 3, "")
    attempts = cluster.attempts(done["id"])
    assert [(row["number"], row["reason"]) for row in attempts] == [(1, "error"), (2, "error")]
    assert {row["error"] for row in attempts} == {"OSError: no route to the bank"}
    tokens = [row["fencing_token"] for row in attempts] + [done["fencing_token"]]
    assert tokens == sorted(set(tokens))


def test_a_job_chooses_when_it_is_tried_again(cluster: Cluster) -> None:
    cluster.start_node()
    cluster.add(
        "later", "stumble", every=3600, arguments={"times": 1, "how": "later"}, max_attempts=2
    )
    done = cluster.wait_for_run("later", state="succeeded")
    (attempt,) = cluster.attempts(done["id"])
    assert done["started_at"] - attempt["ended_at"] >= timedelta(seconds=1.5)


def test_a_job_that_gives_up_is_not_tried_again(cluster: Cluster) -> None:
    cluster.start_node()
    cluster.add(
        "useless", "stumble", every=3600, arguments={"times": 9, "how": "give up"}, max_attempts=9
    )
    failed = cluster.wait_for_run("useless", state="failed")
    assert (failed["attempt"], failed["error"]) == (1, "GiveUp: useless")


def test_a_run_that_could_not_start_in_time_expires(cluster: Cluster) -> None:
    cluster.start_node()
    cluster.add(
        "held",
        "hold",
        every=1,
        overlap="queue_one",
        start_deadline_seconds=2,
        arguments={"gate": str(cluster.gate())},
    )
    expired = wait_for(
        lambda: cluster.runs("held", state="skipped", reason="expired"),
        PATIENCE_SECONDS,
        "a run that waited for too long",
    )
    assert expired[0]["finished_at"] - expired[0]["scheduled_at"] > timedelta(seconds=2)
    cluster.gate().touch()
