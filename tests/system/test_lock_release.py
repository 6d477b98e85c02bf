"""A person releases a lock under a running job; somebody else takes one: what becomes of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.services import wait_for
from tests.system.cluster import PATIENCE_SECONDS, ROOT, Cluster, Node, next_second

pytestmark = pytest.mark.system

# The holder is told by the wake-up at once, and by the sweep at the latest.
TOLD_SECONDS = 3.0
# Twice a third of the TTL of the system tests.
RENEWED_WITHIN_SECONDS = 2.0


def lock_key(cluster: Cluster, key: str) -> str:
    """Return the key in Redis of the schedule's lock, whatever its hash tag."""
    assert cluster.redis is not None
    name = f":schedule:{cluster.schedule(key)['id']}"
    with cluster.redis.client() as client:
        (found,) = (each for each in map(_text, client.keys("*")) if each.endswith(name))
    return found


def holder_of(cluster: Cluster, lock: str) -> str:
    """Return the value of the lock's key, empty where nobody holds it."""
    assert cluster.redis is not None
    with cluster.redis.client() as client:
        return _text(client.get(lock) or b"")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def release(cluster: Cluster, key: str) -> dict[str, Any]:
    """Release the schedule's lock from the command line; return what it did."""
    words = ["schedulerctl", "locks", "release", key, "--reason", "test", "--yes", "--json"]
    done = subprocess.run(
        [sys.executable, "manage.py", *words],
        cwd=ROOT,
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    released: dict[str, Any] = json.loads(done.stdout)["released"]
    return released


def started(cluster: Cluster, key: str, job: str, **values: Any) -> dict[str, Any]:
    """Add a schedule whose job has begun; return its run."""
    cluster.add(key, job, every=3600, first=next_second(), **values)
    run = cluster.wait_for_run(key, state="running")
    wait_for(cluster.marks, PATIENCE_SECONDS, "the begin of the job")
    return run


def test_a_released_job_is_told_and_its_run_is_lost(cluster: Cluster) -> None:
    node = cluster.start_node()
    run = started(cluster, "obedient", "obey")
    lock = lock_key(cluster, "obedient")
    assert holder_of(cluster, lock) != ""

    released = release(cluster, "obedient")
    released_at = time.monotonic()
    wait_for(
        lambda: cluster.attempts(run["id"])[0]["late_state"],
        PATIENCE_SECONDS,
        "the report of the job that was told to stop",
    )
    told_after = time.monotonic() - released_at

    assert released["was_held"] is True
    assert (released["lost"], released["requeued"]) == ([run["id"]], [])
    assert told_after < TOLD_SECONDS
    after = cluster.run(run["id"])
    assert (after["state"], after["reason"]) == ("lost", "released")
    assert released["fencing_token"] == cluster.schedule("obedient")["fencing_token"]
    assert released["fencing_token"] > run["fencing_token"]
    (attempt,) = cluster.attempts(run["id"])
    assert (attempt["reason"], attempt["late_state"]) == ("released", "cancelled")
    assert node.events("lease_lost", run=run["id"])
    never_taken_again(cluster, lock)


def test_a_deaf_job_that_was_released_reports_in_vain(cluster: Cluster) -> None:
    node = cluster.start_node()
    run = started(cluster, "deaf", "hold", arguments={"gate": str(cluster.gate())})
    lock = lock_key(cluster, "deaf")

    release(cluster, "deaf")
    node.wait_for_event("lease_lost", run=run["id"])
    never_taken_again(cluster, lock)
    cluster.gate().touch()
    wait_for(
        lambda: cluster.attempts(run["id"])[0]["late_state"],
        PATIENCE_SECONDS,
        "the late report",
    )

    after = cluster.run(run["id"])
    assert (after["state"], after["reason"], after["result"]) == ("lost", "released", None)
    assert cluster.attempts(run["id"])[0]["late_state"] == "succeeded"


def test_a_released_run_that_may_repeat_runs_again_under_a_larger_token(cluster: Cluster) -> None:
    cluster.start_nodes(2)
    gate = cluster.gate()
    run = started(
        cluster, "repeats", "hold", arguments={"gate": str(gate)}, delivery="at_least_once"
    )

    released = release(cluster, "repeats")
    wait_for(lambda: cluster.run(run["id"])["attempt"] == 2, PATIENCE_SECONDS, "the second attempt")
    second = cluster.run(run["id"])
    # Only the second attempt may end for now; then the first reports late.
    gate.with_name(f"{gate.name}-2").touch()
    done = cluster.wait_for_run("repeats", state="succeeded")
    gate.touch()
    wait_for(
        lambda: cluster.attempts(run["id"])[0]["late_state"],
        PATIENCE_SECONDS,
        "the late report of the first attempt",
    )

    assert released["requeued"] == [run["id"]]
    assert (done["id"], done["attempt"], done["result"]) == (run["id"], 2, "held")
    assert second["fencing_token"] > released["fencing_token"] > run["fencing_token"]
    (first,) = cluster.attempts(run["id"])
    assert (first["reason"], first["late_state"]) == ("released", "succeeded")
    assert cluster.run(run["id"])["state"] == "succeeded"


def test_a_node_alone_runs_a_released_run_again_once_its_first_attempt_has_ended(
    cluster: Cluster,
) -> None:
    node = cluster.start_node()
    gate = cluster.gate()
    run = started(cluster, "alone", "hold", arguments={"gate": str(gate)}, delivery="at_least_once")

    release(cluster, "alone")
    node.wait_for_event("lease_lost", run=run["id"])
    cluster.pass_seconds(1)
    waiting = cluster.run(run["id"])
    gate.with_name(f"{gate.name}-1").touch()
    wait_for(lambda: cluster.run(run["id"])["attempt"] == 2, PATIENCE_SECONDS, "the second attempt")
    (first,) = cluster.attempts(run["id"])
    gate.touch()
    done = cluster.wait_for_run("alone", state="succeeded")

    assert (waiting["state"], waiting["attempt"]) == ("queued", 1)
    assert (first["reason"], first["late_state"]) == ("released", "succeeded")
    assert (done["attempt"], done["result"]) == (2, "held")
    assert done["fencing_token"] > run["fencing_token"]
    assert [mark.kind for mark in cluster.marks()] == ["begin", "effect", "begin", "effect"]


def test_a_lock_that_somebody_else_took_is_a_warning_beside_the_success(
    cluster: Cluster,
) -> None:
    node: Node = cluster.start_node()
    run = started(cluster, "robbed", "hold", arguments={"gate": str(cluster.gate())})
    lock = lock_key(cluster, "robbed")
    assert cluster.redis is not None
    with cluster.redis.client() as client:
        client.set(lock, "0" * 32 + "|somebody else", px=60_000)
    node.wait_for_event("lease_lost", run=run["id"])
    wait_for(
        lambda: cluster.run(run["id"])["details"], PATIENCE_SECONDS, "the note that it was lost"
    )
    cluster.gate().touch()
    done = cluster.wait_for_run("robbed", state="succeeded")

    assert (done["id"], done["result"]) == (run["id"], "held")
    details = done["details"]
    details = json.loads(details) if isinstance(details, str) else details
    assert "is held by another owner" in details["lease_lost"]
    assert holder_of(cluster, lock).endswith("|somebody else")
    assert len(cluster.runs("robbed")) == 1


def never_taken_again(cluster: Cluster, lock: str) -> None:
    """Watch the key for longer than the node takes to renew its leases."""
    until = time.monotonic() + RENEWED_WITHIN_SECONDS
    while time.monotonic() < until:
        assert holder_of(cluster, lock) == ""
        cluster.pass_seconds(0.1)
