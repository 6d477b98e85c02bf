"""A run is told to stop under a real node: by a person, and by a newer occurrence."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.services import wait_for
from tests.system.cluster import PATIENCE_SECONDS, ROOT, Cluster, next_second

pytestmark = pytest.mark.system

# The node is told by the wake-up at once, and by the sweep at the latest.
TOLD_SECONDS = 3.0


def ctl(cluster: Cluster, *words: str) -> dict[str, Any]:
    """Run a verb of schedulerctl; return its JSON."""
    done = subprocess.run(
        [sys.executable, "manage.py", "schedulerctl", *words, "--json"],
        cwd=ROOT,
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_job_that_looks_is_cancelled_and_its_run_may_run_again(cluster: Cluster) -> None:
    node = cluster.start_node()
    cluster.add("obedient", "obey", every=3600, first=next_second())
    run = cluster.wait_for_run("obedient", state="running")
    wait_for(cluster.marks, PATIENCE_SECONDS, "the begin of the job")

    answer = ctl(cluster, "cancel", str(run["id"]), "--reason", "wrong data")
    asked_at = time.monotonic()
    cancelled = cluster.wait_for_run("obedient", state="cancelled")
    told_after = time.monotonic() - asked_at

    assert answer["outcome"] == "asked"
    assert told_after < TOLD_SECONDS
    assert (cancelled["id"], cancelled["reason"]) == (run["id"], "cancelled")
    assert cancelled["cancel_cause"].endswith(": wrong data")
    assert cancelled["error"].startswith(f"RunStopped: Run {run['id']}: told to stop, by ")
    assert node.events("stop_asked", run=run["id"])

    ctl(cluster, "again", str(run["id"]))
    second = cluster.wait_for_run("obedient", state="running")
    assert (second["id"], second["attempt"]) == (run["id"], 2)
    assert second["cancel_requested_at"] is None
    assert second["fencing_token"] > run["fencing_token"]


def test_a_run_queued_behind_an_active_one_starts_when_that_is_cancelled(
    cluster: Cluster,
) -> None:
    cluster.start_nodes(2)
    cluster.add("busy", "obey", every=3600, first=next_second())
    first = cluster.wait_for_run("busy", state="running")
    wait_for(cluster.marks, PATIENCE_SECONDS, "the begin of the job")

    behind = ctl(cluster, "run", "busy", "--behind")["run"]
    cluster.pass_seconds(1.5)
    waiting = cluster.run(behind["id"])
    ctl(cluster, "cancel", str(first["id"]), "--reason", "enough")
    started = cluster.wait_for_run("busy", state="running", id=behind["id"])

    assert (waiting["state"], waiting["reason"]) == ("queued", "overlap")
    ended = cluster.run(first["id"])
    assert ended["state"] == "cancelled"
    assert started["started_at"] >= ended["finished_at"]


def test_a_newer_occurrence_replaces_the_active_run(cluster: Cluster) -> None:
    cluster.start_nodes(2)
    # Long enough for the old one to stop before a third comes due on a busy machine.
    cluster.add("replaced", "obey", every=10, first=next_second(), overlap="replace")
    first = cluster.wait_for_run("replaced", state="running")
    second = cluster.wait_for_run("replaced", 2)
    new = cluster.wait_for_run("replaced", id=second["id"], attempt=1)

    old = cluster.run(first["id"])
    assert (old["state"], old["reason"]) == ("cancelled", "cancelled")
    assert old["cancel_cause"] == "a newer occurrence replaces it"
    assert (new["scheduled_at"] - old["scheduled_at"]).total_seconds() == 10
    assert new["started_at"] >= old["finished_at"]
