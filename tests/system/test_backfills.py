"""A backfill on real nodes, beside the timetable of its schedule."""

from __future__ import annotations

import json
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from tests.services import wait_for
from tests.system.cluster import PATIENCE_SECONDS, Cluster, manage, next_second

pytestmark = pytest.mark.system

COUNT = 12


def ctl(cluster: Cluster, *words: str) -> dict[str, Any]:
    """Call ``schedulerctl`` in a process of its own; return its JSON."""
    found: dict[str, Any] = json.loads("\n".join(manage(cluster.env, "schedulerctl", *words)))
    return found


def is_done(cluster: Cluster, number: int) -> bool:
    facts = ctl(cluster, "backfills", "show", str(number), "--json")["backfill"]
    return bool(facts["state"] == "done")


def begin(cluster: Cluster, key: str, *words: str, **values: Any) -> dict[str, Any]:
    """Add a schedule that is due each second, and backfill ``COUNT`` instants of last minute."""
    first = next_second() - timedelta(minutes=1)
    cluster.add(key, values.pop("job", "touch"), every=1, first=first, planned=False, **values)
    last = first + timedelta(seconds=COUNT - 1)
    span = ("--from", first.isoformat(), "--to", last.isoformat())
    answer = ctl(cluster, "backfill", key, *span, *words, "--yes", "--json")
    assert answer["plan"]["runs"] == COUNT
    found: dict[str, Any] = answer["backfill"]
    return found


def test_a_backfill_runs_in_order_and_takes_nothing_from_the_timetable(cluster: Cluster) -> None:
    cluster.start_nodes(3)
    backfill = begin(cluster, "late")
    wait_for(lambda: is_done(cluster, backfill["id"]), PATIENCE_SECONDS, "the end of the backfill")

    rows = cluster.runs("late", trigger="backfill")
    rows.sort(key=lambda row: row["nominal_at"])
    assert [row["state"] for row in rows] == ["succeeded"] * COUNT
    for earlier, later in pairwise(rows):
        assert earlier["finished_at"] <= later["started_at"]
        assert later["nominal_at"] - earlier["nominal_at"] == timedelta(seconds=1)
    told = {mark.scheduled_at for mark in cluster.marks() if mark.kind == "effect"}
    assert {row["nominal_at"] for row in rows} <= told
    cluster.wait_for_run("late", trigger="timetable", count=2, state="succeeded")
    assert cluster.runs("late", trigger="timetable", reason="overlap", state="skipped") == []


def test_a_cancelled_backfill_starts_nothing_more(cluster: Cluster) -> None:
    cluster.start_nodes(2)
    gate = cluster.gate()
    # Its timetable is over, so that nothing but the backfill holds it.
    over = next_second() - timedelta(seconds=30)
    backfill = begin(cluster, "held", job="hold", ends_at=over, arguments={"gate": str(gate)})
    cluster.wait_for_run("held", trigger="backfill", state="running")
    words = ("cancel", str(backfill["id"]), "--reason", "wrong range", "--let-run", "--yes")
    answer = ctl(cluster, "backfills", *words, "--json")
    assert answer["cancelled"] == COUNT - 1
    gate.touch()
    cluster.wait_for_run("held", trigger="backfill", state="succeeded")
    states = [row["state"] for row in cluster.runs("held", trigger="backfill")]
    assert sorted(states) == ["cancelled"] * (COUNT - 1) + ["succeeded"]
