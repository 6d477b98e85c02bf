"""Many nodes, one occurrence each time."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pytest

from distcron_app.lifecycle import TRANSITIONS
from tests.system.checker import violations
from tests.system.cluster import SECONDS, Cluster

pytestmark = pytest.mark.system

NODES = 10
SCHEDULES = 50


def observed(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Return what each process did about locks and rows, in its order."""
    by_pid = collections.defaultdict(list)
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        by_pid[entry["pid"]].append(entry)
    return by_pid


def claims_without_a_lock(entries: list[dict[str, Any]]) -> list[int]:
    """Return the schedules that a node asked the database for without holding their locks."""
    held: set[int] = set()
    wrong = []
    for entry in entries:
        if entry["event"] == "won":
            held.update(entry["schedules"])
        elif entry["event"] == "released":
            held.difference_update(entry["schedules"])
        elif entry["event"] == "claim":
            wrong += [pk for pk in entry["schedules"] if pk not in held]
    return wrong


def writes_beside_the_claim(entries: list[dict[str, Any]]) -> list[str]:
    """Return statements that changed schedules or inserted runs and were not a claim."""
    tables = ('UPDATE "distcron_schedule"', 'INSERT INTO "distcron_run"')
    return [entry["sql"] for entry in entries if entry["sql"].startswith(tables)]


def test_ten_nodes_run_each_occurrence_once_and_losers_leave_the_database_alone(
    cluster: Cluster,
) -> None:
    """OP-45: on PostgreSQL and Redis."""
    notes = cluster.folder / "observed"
    nodes = cluster.start_nodes(NODES, DISTCRON_SYSTEM_OBSERVER=str(notes))
    for number in range(SCHEDULES):
        cluster.add(f"each-second-{number}", "touch", every=1)

    cluster.pass_seconds(SECONDS)
    evidence = cluster.finish()

    assert violations(evidence, TRANSITIONS) == []
    by_pid = observed(notes)
    assert {pid: claims_without_a_lock(entries) for pid, entries in by_pid.items()} == {
        node.pid: [] for node in nodes
    }
    assert [writes_beside_the_claim(entries) for entries in by_pid.values()] == [[]] * NODES
    # It proves something only where nodes did lose at the lock, and said so.
    assert sum(len(node.events("stood_back")) for node in nodes) > 0
