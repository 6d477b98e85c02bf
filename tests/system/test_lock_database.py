"""The level "critical" on nodes: runs that must not overlap, and a proxy that would let them."""

from __future__ import annotations

import signal

import pytest

from tests.services import pgbouncer

EXIT_DEPENDENCY_DOWN = 6
REASON = "is reached through a proxy that gives every transaction another session"


@pytest.fixture
def behind(postgres, stack):
    """Start a PgBouncer; return the URL by which it leads to a cluster's database."""

    def behind(cluster, pool_mode):
        server = stack.enter_context(pgbouncer(postgres.port, pool_mode=pool_mode))
        return cluster.database.url.replace(f":{postgres.port}/", f":{server.port}/")

    return behind


@pytest.mark.parametrize("options", [(), ("--log", "text")], ids=["json", "text"])
def test_node_does_not_start_where_locks_of_a_schedule_would_not_hold(cluster, behind, options):
    cluster.add("ledger", "touch", every=3600, lock_level="critical")
    node = cluster.launch_node(*options, DATABASE_URL=behind(cluster, "transaction"))
    assert node.wait() == EXIT_DEPENDENCY_DOWN
    assert f"Lock level 'critical': database 'default' {REASON}" in node.text
    assert node.members() == []


def test_node_starts_where_the_locks_of_a_schedule_hold(cluster, behind):
    cluster.add("ledger", "touch", every=3600, lock_level="critical")
    node = cluster.start_node(DATABASE_URL=behind(cluster, "session"))
    assert node.events("lock_database_refused") == []


def test_node_warns_where_no_schedule_needs_the_locks(make_cluster, behind):
    cluster = make_cluster(config={"LOCK_LEVELS": {"ledger": ["database"]}})
    cluster.add("ledger", "touch", every=3600, lock_level="ledger", state="paused")
    node = cluster.start_node(DATABASE_URL=behind(cluster, "transaction"))
    warning = node.wait_for_event("lock_database_refused")
    assert REASON in warning["cause"]
    assert warning["levels"] == ["critical", "ledger"]


def test_node_asks_nothing_where_nobody_uses_the_locks(cluster, behind):
    node = cluster.start_node(DATABASE_URL=behind(cluster, "transaction"))
    assert node.events("lock_database_refused") == []


def test_paused_node_keeps_its_critical_schedule_from_all_others(cluster):
    first = cluster.start_node()
    cluster.add(
        "ledger",
        "hold",
        every=1,
        lock_level="critical",
        arguments={"gate": str(cluster.gate())},
    )
    cluster.wait_for_run("ledger", state="running")
    second = cluster.start_node()
    first.send_group(signal.SIGSTOP)
    # Redis forgets the gate and the node is taken for dead; its session lives.
    cluster.wait_for_run("ledger", state="lost", reason="node_died")
    cluster.add("tick", "touch", every=1)
    cluster.wait_for_run("tick", count=6, state="succeeded")
    assert cluster.runs("ledger", node_id=second.ids()[-1]) == []
    first.send_group(signal.SIGKILL)
    cluster.wait_for_run("ledger", node_id=second.ids()[-1], state="running")


def test_run_whose_session_was_ended_is_told(cluster):
    node = cluster.start_node()
    cluster.add("ledger", "obey", every=3600, lock_level="critical")
    run = cluster.wait_for_run("ledger", state="running")
    ended = cluster.database.rows(
        "SELECT pg_terminate_backend(pid) AS ended FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = %s",
        [f"distcron-lock {node.name}"],
    )
    assert ended == [{"ended": True}]
    told = cluster.wait_for_run("ledger", state="cancelled", id=run["id"])
    assert (told["reason"], told["late"]) == ("lease_lost", False)
