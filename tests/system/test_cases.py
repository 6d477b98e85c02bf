"""Faults that other schedulers were reported for, one test each."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tests.services import PostgresCluster, wait_for
from tests.system.cluster import PATIENCE_SECONDS, Cluster, Node, manage, next_second
from tests.system.conftest import MakeCluster

pytestmark = pytest.mark.system

BULK = """
from distcron_app.models import Schedule
def row(key, **values):
    given = {"kind": "interval", "interval_seconds": 1, "timezone": "UTC", **values}
    return Schedule(key=key, name=key, **{"job": "tests.system.app.touch", **given})
good = [row(f"good-{number}") for number in range(10)]
bad = [
    row("bad-date", kind="cron", cron="0 0 31 2 *"),
    row("bad-zone", kind="cron", cron="* * * * *", timezone="Mars/Phobos"),
    row("bad-job", job=""),
]
Schedule.objects.bulk_create(bad[:2] + good[:5] + bad[2:] + good[5:])
"""


def test_connections_dropped_while_idle_and_during_a_job_cost_nothing(
    cluster: Cluster, postgres: PostgresCluster
) -> None:
    """OP-55: the node goes on, and the job's result is stored."""
    node = cluster.start_node()
    cluster.pass_seconds(1)
    assert postgres.terminate_backends() >= 2
    cluster.add(
        "held", "hold", every=3600, arguments={"gate": str(cluster.gate())}, first=next_second()
    )
    run = cluster.wait_for_run("held", state="running")
    wait_for(cluster.marks, PATIENCE_SECONDS, "the begin of the job")

    assert postgres.terminate_backends() >= 2
    cluster.gate().touch()
    done = cluster.wait_for_run("held", state="succeeded")

    assert (done["id"], done["result"], done["attempt"]) == (run["id"], "held", 1)
    assert len(node.ids()) == 1
    assert cluster.finish_and_check(lag_seconds=3600) == []


def test_four_nodes_on_sqlite_run_five_hundred_occurrences_once(
    make_sqlite_cluster: MakeCluster,
) -> None:
    """OP-45, OP-57: on SQLite and file locks, which a node names as for one machine."""
    cluster = make_sqlite_cluster()
    nodes = cluster.start_nodes(3)
    readable = cluster.launch_node("--log", "text")
    wait_for(lambda: "is active" in readable.text, PATIENCE_SECONDS, "the fourth node")
    for number in range(50):
        cluster.add(f"each-second-{number}", "touch", every=1)

    cluster.wait_for_run(count=500, state="succeeded")

    assert "SQLite: for the nodes of one machine only." in readable.text
    assert [node for node in (*nodes, readable) if not node.is_running] == []
    assert cluster.finish_and_check(lag_seconds=10) == []
    assert "database is locked" not in "".join(node.text for node in cluster.nodes)
    assert len({run["node_id"] for run in cluster.runs()}) == 4


def test_bad_rows_are_marked_and_the_good_ones_among_them_run(cluster: Cluster) -> None:
    """OP-70: on a running node."""
    cluster.start_node()
    manage(cluster.env, "shell", "-c", BULK)

    for number in range(10):
        cluster.wait_for_run(f"good-{number}", count=2, state="succeeded")
        first = cluster.runs(f"good-{number}")[0]["scheduled_at"]
        assert first.microsecond == 0
        cluster.watch(f"good-{number}", every=1, first=first)
    for key in ("bad-date", "bad-zone", "bad-job"):
        wait_for(
            lambda key=key: cluster.schedule(key)["state"] == "invalid",  # type: ignore[misc]
            PATIENCE_SECONDS,
            f"the verdict about {key}",
        )
    reasons = {
        key: cluster.schedule(key)["state_reason"] for key in ("bad-date", "bad-zone", "bad-job")
    }

    assert "never runs" in reasons["bad-date"]
    assert "Mars/Phobos" in reasons["bad-zone"]
    assert reasons["bad-job"]
    assert {run["key"] for run in cluster.runs()} == {f"good-{number}" for number in range(10)}
    assert cluster.finish_and_check() == []


def test_a_finished_and_a_paused_schedule_at_the_head_block_nobody(cluster: Cluster) -> None:
    """OP-72."""
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    cluster.add("paused", "touch", every=1, first=long_ago, state="paused")
    cluster.add("spent", "touch", kind="once", run_at=long_ago, first=long_ago, state="exhausted")
    soon = next_second(3)
    cluster.add("once", "touch", kind="once", run_at=soon, first=soon)
    for key in ("follows", "follows-too"):
        cluster.add(key, "touch", every=1, first=soon)
    cluster.start_node()

    for key in ("follows", "follows-too"):
        cluster.wait_for_run(key, count=3, state="succeeded")

    (once,) = cluster.runs("once")
    assert (once["state"], once["scheduled_at"]) == ("succeeded", soon)
    assert cluster.schedule("once")["state"] == "exhausted"
    assert cluster.runs("paused") == []
    assert cluster.runs("spent") == []


def test_a_name_and_arguments_beyond_the_basic_plane_run_like_others(cluster: Cluster) -> None:
    """OP-74: saved, run and logged; the lock's key has the id."""
    name = "🚀" + "𝒜𝓁𝓅𝒽𝒶" * 39 + "𝒜𝓁𝓅𝒽"
    assert len(name) == 200
    node = cluster.start_node()
    schedule = cluster.add(
        "rocket",
        "greet",
        every=3600,
        name=name,
        arguments={"text": "🚀 𝒜𝓁𝓅𝒽𝒶", "gate": str(cluster.gate())},
        first=next_second(),
    )
    cluster.wait_for_run("rocket", state="running")
    assert cluster.redis is not None
    with cluster.redis.client() as client:
        wait_for(lambda: client.keys("{distcron:lock}:*"), PATIENCE_SECONDS, "the lock")
        keys = client.keys("{distcron:lock}:*")
    cluster.gate().touch()
    run = cluster.wait_for_run("rocket", state="succeeded")

    assert keys == [f"{{distcron:lock}}:schedule:{schedule}".encode()]
    assert (run["schedule_name"], run["result"]) == (name, "🚀 𝒜𝓁𝓅𝒽𝒶")
    output = cluster.database.value(
        "SELECT output FROM distcron_runoutput WHERE run_id = %s", [run["id"]]
    )
    assert output == "🚀 𝒜𝓁𝓅𝒽𝒶\n"
    node.wait_for_event("run_finished", run=run["id"], state="succeeded")


def test_restarts_run_nothing_again(cluster: Cluster) -> None:
    """OP-19: neither after a drain nor after a crash."""
    node = cluster.start_node()
    cluster.add("hourly", "touch", every=3600, first=next_second())
    done = cluster.wait_for_run("hourly", state="succeeded")

    for number, end in enumerate((Node.terminate, Node.kill9, Node.terminate)):
        end(node)
        node = cluster.start_node()
        cluster.add(f"after-{number}", "touch", every=3600, first=next_second())
        cluster.wait_for_run(f"after-{number}", state="succeeded")

    assert [run["id"] for run in cluster.runs("hourly")] == [done["id"]]
    assert cluster.finish_and_check(lag_seconds=3600) == []
