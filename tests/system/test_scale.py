"""Sizes: how long pages take, how memory grows, and a thousand schedules at one instant.

``make test-scale`` measures what the cases name and takes about ten minutes; by default each
is smaller, and nothing about time or memory is asserted. DISTCRON_SCALE=1 says full size. The
numbers are printed as JSON lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest

from benchmarks.figures import percentile
from distcron_app.lifecycle import TRANSITIONS
from tests.services import wait_for
from tests.system.checker import violations
from tests.system.cluster import Cluster, manage, next_second
from tests.system.conftest import MakeCluster

pytestmark = pytest.mark.system

IS_FULL = os.environ.get("DISTCRON_SCALE") == "1"
# How long the scheduled minute of the thousand schedules is.
EVERY_SECONDS = int(os.environ.get("DISTCRON_SCALE_EVERY", "6"))
RUNS, LONG_RUNS = (1_000_000, 20_000) if IS_FULL else (20_000, 400)
OUTPUT_LENGTH = 20_000
SCHEDULES, INSTANTS = (1_000, 10) if IS_FULL else (100, 5)
TICKS, EXPRESSIONS, FAILURES = (100_000, 10_000, 10_000) if IS_FULL else (1_000, 1_000, 1_000)
LONGEST_PAGE_SECONDS = 1.0
MOST_GROWTH_MB = 20.0

FILL = """
INSERT INTO distcron_run ({columns})
SELECT {values} FROM distcron_run r
CROSS JOIN generate_series(1, %s) AS n
JOIN LATERAL (SELECT id, name FROM distcron_schedule ORDER BY id OFFSET n %% 100 LIMIT 1) s ON true
WHERE r.id = %s
"""
CHANGED = {
    "schedule_id": "s.id",
    "schedule_name": "s.name",
    "scheduled_at": "r.scheduled_at - n * interval '1 second'",
    "due_at": "r.scheduled_at - n * interval '1 second'",
    "claimed_at": "r.scheduled_at - n * interval '1 second'",
    "started_at": "r.scheduled_at - n * interval '1 second'",
    "finished_at": "r.scheduled_at - n * interval '1 second' + interval '50 ms'",
    "state": "CASE WHEN n %% 1000 < 20 THEN 'failed' WHEN n %% 1000 = 20 THEN 'lost'"
    " WHEN n %% 1000 < 51 THEN 'skipped' ELSE 'succeeded' END",
    "reason": "CASE WHEN n %% 1000 < 20 THEN 'error' WHEN n %% 1000 = 20 THEN 'node_died'"
    " WHEN n %% 1000 < 51 THEN 'overlap' ELSE '' END",
}


def fill(cluster: Cluster, schedules: Sequence[int]) -> dict[str, Any]:
    """Multiply a run that succeeded, and give some of them long output; return that run."""
    (template,) = cluster.runs("first")
    columns = [name for name in template if name not in ("id", "key")]
    values = [CHANGED.get(name, f'r."{name}"') for name in columns]
    sql = FILL.format(columns=", ".join(f'"{name}"' for name in columns), values=", ".join(values))
    cluster.database.rows("ALTER TABLE distcron_run DISABLE TRIGGER system_watch")
    cluster.database.rows(sql, [RUNS, template["id"]])
    cluster.database.rows(
        "INSERT INTO distcron_runoutput (run_id, output, traceback) "
        "SELECT id, repeat(md5(id::text), %s), '' FROM distcron_run WHERE id %% %s = 0 "
        "AND id <> %s",
        [OUTPUT_LENGTH // 32, RUNS // LONG_RUNS, template["id"]],
    )
    cluster.database.rows("VACUUM ANALYZE distcron_run, distcron_runoutput")
    return template


def test_pages_of_a_long_history_answer_quickly(make_cluster: MakeCluster) -> None:
    """OP-79: a list, a search, filters and the last page, each below a second."""
    cluster = make_cluster(config={"KEEP_DAYS": 0, "KEEP_FAILED_DAYS": 0})
    node = cluster.start_node()
    cluster.add("first", "touch", every=3600, first=next_second())
    cluster.wait_for_run("first", state="succeeded")
    node.terminate()
    ids = [cluster.add(f"s-{number:02}", "touch", every=3600) for number in range(99)]
    template = fill(cluster, ids)
    total = cluster.database.value("SELECT count(*) FROM distcron_run")
    long = cluster.database.value("SELECT max(run_id) FROM distcron_runoutput")

    pages = [
        "/cron/runs/",
        "/cron/runs/?state=failed",
        "/cron/runs/?state=lost&schedule=s-07",
        "/cron/runs/?state=cancelled",
        "/cron/runs/?schedule=s-42",
        "/cron/runs/?job=tests.system.app.touch",
        "/cron/runs/?job=tests.system.app.hold",
        f"/cron/runs/?before={template['id'] + total // 2}",
        f"/cron/runs/?after={template['id']}",
        f"/cron/runs/{long}/",
        "/cron/schedules/?q=s-42",
        f"/cron/schedules/{ids[42]}/",
        "/cron/",
        "/admin/distcron/run/",
        "/admin/distcron/run/?p=100",
        "/admin/distcron/run/?q=s-42",
        "/admin/distcron/run/?q=nobody",
        "/admin/distcron/run/?state__exact=lost",
        "/admin/distcron/run/?state__exact=cancelled",
        "/admin/distcron/run/?reason__exact=shutdown",
    ]
    call = f"from tests.system.app.loads import time_pages; time_pages(*{pages!r})"
    took = json.loads(manage(cluster.env, "shell", "-v", "0", "-c", call, seconds=600)[-1])

    print(json.dumps({"pages": {"runs": total, "longest_seconds": took}}))
    assert total >= RUNS
    if IS_FULL:
        assert {page: time for page, time in took.items() if time >= LONGEST_PAGE_SECONDS} == {}


def test_memory_does_not_grow_with_ticks_rules_or_failures(cluster: Cluster) -> None:
    """OP-81: after a warm-up."""
    call = f"from tests.system.app.loads import grow; grow({TICKS}, {EXPRESSIONS}, {FAILURES})"
    found = json.loads(manage(cluster.env, "shell", "-v", "0", "-c", call, seconds=3600)[-1])

    print(json.dumps({"memory": found}))
    if IS_FULL:
        assert found["all_mb"] < MOST_GROWTH_MB


def test_schedules_that_are_due_at_the_same_instant_neither_exclude_nor_starve_each_other(
    cluster: Cluster,
) -> None:
    """OP-83: on three nodes; the lag is reported."""
    cluster.start_nodes(3)
    first = next_second(5)
    for number in range(SCHEDULES):
        cluster.add(f"crowd-{number}", "touch", every=EVERY_SECONDS, first=first)

    done = "SELECT count(*) FROM distcron_run WHERE state = 'succeeded'"
    wait_for(
        lambda: cluster.database.value(done) >= SCHEDULES * INSTANTS,
        EVERY_SECONDS * INSTANTS + 120,
        "all runs",
    )
    evidence = cluster.finish(lag_seconds=EVERY_SECONDS + 5)

    runs = cluster.runs()
    lags = [lag(run["started_at"], run["due_at"]) for run in runs if run["started_at"]]
    broken = violations(evidence, TRANSITIONS)
    print(
        json.dumps(
            {
                "crowd": {
                    "schedules": SCHEDULES,
                    "every_seconds": EVERY_SECONDS,
                    "occurrences": sum(len(each.instants) for each in evidence.planned),
                    "runs": len([run for run in runs if run["state"] == "succeeded"]),
                    "not_succeeded": len([run for run in runs if run["state"] != "succeeded"]),
                    "violations": len(broken),
                    "lag_p50": round(percentile(lags, 50), 3),
                    "lag_p99": round(percentile(lags, 99), 3),
                    "lag_max": round(max(lags), 3),
                }
            }
        )
    )
    assert broken == []
    # Where the machine is too slow for the short minute, the next ones overlap.
    assert {run["reason"] for run in runs} <= ({""} if EVERY_SECONDS >= 60 else {"", "overlap"})
    assert len({run["node_id"] for run in runs}) == 3


def lag(started_at: datetime, due_at: datetime) -> float:
    return (started_at - due_at).total_seconds()
