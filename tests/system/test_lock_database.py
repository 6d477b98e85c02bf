"""Nodes whose lock database is behind a pooling proxy."""

from __future__ import annotations

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
