"""Pauses that end by themselves or begin by themselves, and maintenance, on real nodes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.services import wait_for
from tests.system.cluster import PATIENCE_SECONDS, Cluster, manage

pytestmark = pytest.mark.system


def ctl(cluster: Cluster, *words: str) -> None:
    manage(cluster.env, "schedulerctl", *words)


def audit(cluster: Cluster, verb: str) -> list[dict[str, Any]]:
    return cluster.database.rows(
        "SELECT actor, via, reason FROM distcron_auditentry WHERE verb = %s ORDER BY id", [verb]
    )


def wait_for_state(cluster: Cluster, key: str, state: str) -> dict[str, Any]:
    def is_there() -> bool:
        return bool(cluster.schedule(key)["state"] == state)

    wait_for(is_there, PATIENCE_SECONDS, f"{key} to be {state}")
    return cluster.schedule(key)


def test_a_pause_ends_by_itself_and_none_of_its_instants_runs(cluster: Cluster) -> None:
    """OP-09: with three nodes, nothing from its commit on."""
    cluster.start_nodes(3)
    cluster.add("quick", "touch", every=1)
    cluster.wait_for_run("quick", state="succeeded")

    ctl(cluster, "pause", "quick", "--reason", "books", "--until", "+6s")
    paused = cluster.schedule("quick")
    assert (paused["state"], paused["state_reason"]) == ("paused", "books")
    resumed = wait_for_state(cluster, "quick", "active")
    cluster.wait_for_run("quick", count=len(cluster.runs("quick")) + 2)

    assert resumed["state_by"] == "distcron"
    assert resumed["paused_until"] is None
    assert resumed["state_at"] >= paused["paused_until"]
    (row,) = cluster.runs("quick", state="skipped")
    assert row["reason"] == "paused"
    assert row["details"]["count"] >= 5
    first, last = (datetime.fromisoformat(row["details"][name]) for name in ("first_at", "last_at"))
    ran = [run["scheduled_at"] for run in cluster.runs("quick") if run["state"] != "skipped"]
    assert [at for at in ran if first <= at <= last] == []
    assert [at for at in ran if paused["state_at"] < at <= paused["paused_until"]] == []
    assert audit(cluster, "resume") == [
        {"actor": "distcron", "via": "scheduler", "reason": "The pause is over."}
    ]
    # Every instant is accounted for.
    assert cluster.finish_and_check() == []


def test_after_a_pause_the_misfire_policy_decides_where_the_schedule_says_so(
    cluster: Cluster,
) -> None:
    cluster.start_nodes(2)
    cluster.add("quick", "touch", every=1, on_resume="misfire", misfire="run_all")
    cluster.wait_for_run("quick", state="succeeded")

    ctl(cluster, "pause", "quick", "--reason", "books", "--until", "+4s")
    paused = cluster.schedule("quick")
    resumed = wait_for_state(cluster, "quick", "active")
    cluster.wait_for_run("quick", count=len(cluster.runs("quick")) + 6)

    assert cluster.finish_and_check() == []
    late = [
        run["state"]
        for run in cluster.runs("quick")
        if paused["state_at"] < run["scheduled_at"] <= resumed["state_at"]
    ]
    assert len(late) >= 3
    assert set(late) == {"succeeded"}


def test_a_job_that_keeps_failing_is_paused_once(cluster: Cluster) -> None:
    cluster.start_nodes(3)
    cluster.add("bad", "fail", every=1, auto_pause_after=3)

    paused = wait_for_state(cluster, "bad", "paused")
    # One may have been claimed right before.
    wait_for(lambda: all(run["finished_at"] for run in cluster.runs("bad")), PATIENCE_SECONDS)
    failed = cluster.runs("bad", state="failed")
    cluster.pass_seconds(2.5)

    assert len(failed) >= 3
    assert cluster.runs("bad", state="failed") == failed
    assert paused["state_by"] == "distcron"
    assert paused["state_reason"].startswith("Paused after 3 failures in a row. The last one: ")
    assert "no route" in paused["state_reason"]
    assert len(audit(cluster, "pause")) == 1


def test_in_maintenance_nothing_is_claimed_and_what_runs_is_finished(cluster: Cluster) -> None:
    nodes = cluster.start_nodes(2)
    cluster.add("held", "hold", every=3600, arguments={"gate": str(cluster.gate())})
    cluster.add("quick", "touch", every=1)
    held = cluster.wait_for_run("held", state="running")
    cluster.wait_for_run("quick", state="succeeded")

    ctl(cluster, "maintenance", "on", "--reason", "database move")
    for node in nodes:
        node.wait_for_event("maintenance_on", reason="database move")
    newcomer = cluster.start_node()
    newcomer.wait_for_event("maintenance_on")
    before = [run["id"] for run in cluster.runs("quick")]
    cluster.gate().touch()
    wait_for(lambda: cluster.run(held["id"])["state"] == "succeeded", PATIENCE_SECONDS, "its end")
    cluster.pass_seconds(2.5)
    assert [run["id"] for run in cluster.runs("quick")] == before

    off_at = datetime.now(UTC)
    ctl(cluster, "maintenance", "off")
    cluster.wait_for_run("quick", count=len(before) + 2)
    assert all(run["claimed_at"] >= off_at for run in cluster.runs("quick")[len(before) :])
    for node in (*nodes, newcomer):
        node.wait_for_event("maintenance_off")
    assert cluster.finish_and_check(lag_seconds=10) == []
