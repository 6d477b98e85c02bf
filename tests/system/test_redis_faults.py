"""Redis that forgets, hangs or is away: nothing runs twice, nothing is left out."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from tests.services import RedisServer, wait_for
from tests.system.cluster import PATIENCE_SECONDS, SECONDS, Cluster, Node

pytestmark = pytest.mark.system

SCHEDULES = 15
SLOW_SCHEDULES = 3
OUTAGE_SECONDS = SECONDS / 3


def under_load(cluster: Cluster, count: int) -> list[Node]:
    """Start nodes and give them schedules of each second, of both deliveries."""
    nodes = cluster.start_nodes(count)
    for number in range(SCHEDULES):
        delivery = "at_least_once" if number % 3 == 0 else "at_most_once"
        cluster.add(f"each-second-{number}", "touch", every=1, delivery=delivery)
    for number in range(SLOW_SCHEDULES):
        # Longer than its period: every second occurrence meets a run that is active.
        cluster.add(f"slow-{number}", "nap", every=1, arguments={"seconds": 1.4})
    cluster.wait_for_run(state="succeeded")
    return nodes


def flush(server: RedisServer) -> None:
    with server.client() as client:
        client.flushall()


def kill_and_start_empty(server: RedisServer) -> None:
    server.kill9()
    server.start()


@pytest.mark.parametrize("wipe", [flush, kill_and_start_empty])
def test_a_redis_that_forgets_its_locks_doubles_and_loses_nothing(
    cluster: Cluster, wipe: Callable[[RedisServer], None]
) -> None:
    """OP-35, F3, F5: nor does it start again what runs."""
    under_load(cluster, 3)
    assert cluster.redis is not None
    wiped = 0
    until = time.monotonic() + SECONDS / 4
    while time.monotonic() < until:
        # Right behind an instant, when locks are held, and at other moments.
        cluster.pass_seconds(0.17 + 0.1 * (wiped % 7))
        wipe(cluster.redis)
        wiped += 1

    assert wiped >= 5
    assert cluster.finish_and_check() == []
    assert len(cluster.runs(reason="overlap")) >= SLOW_SCHEDULES


@pytest.mark.parametrize(
    ("take_away", "give_back"),
    [(RedisServer.pause, RedisServer.resume), (RedisServer.stop, RedisServer.start)],
    ids=["hangs", "is-stopped"],
)
def test_without_redis_the_database_alone_decides_and_the_nodes_say_so(
    cluster: Cluster,
    take_away: Callable[[RedisServer], None],
    give_back: Callable[[RedisServer], None],
) -> None:
    """OP-85, F9: within a second of the instant, and again with Redis when it is back."""
    nodes = under_load(cluster, 2)
    assert cluster.redis is not None

    take_away(cluster.redis)
    gone_at = datetime.now(UTC)
    wait_for(lambda: all(alerts(cluster)), PATIENCE_SECONDS, "an alert of every node")
    assert [alert.split(":")[0] for alert in alerts(cluster)] == [
        "locks unavailable, the database decides alone"
    ] * 2
    cluster.pass_seconds(OUTAGE_SECONDS)
    give_back(cluster.redis)
    back_at = datetime.now(UTC)
    for node in nodes:
        assert len(node.events("locks_away")) >= 1
        node.wait_for_event("locks_back")
    assert (datetime.now(UTC) - back_at).total_seconds() < 5
    wait_for(lambda: not any(alerts(cluster)), PATIENCE_SECONDS, "the end of the alerts")
    claims_with_redis(cluster)

    assert cluster.finish_and_check() == []
    ran = [
        run
        for run in cluster.runs(state="succeeded")
        if gone_at < run["due_at"] < back_at and run["key"].startswith("each")
    ]
    assert len(ran) > SCHEDULES * OUTAGE_SECONDS / 2
    assert max(run["started_at"] - run["due_at"] for run in ran).total_seconds() < 3


def alerts(cluster: Cluster) -> list[str]:
    rows = cluster.database.rows("SELECT alert FROM distcron_node WHERE state = 'active'")
    return [row["alert"] for row in rows]


def claims_with_redis(cluster: Cluster) -> None:
    """Wait until a lock is seen in Redis again."""
    assert cluster.redis is not None
    with cluster.redis.client() as client:
        wait_for(
            lambda: client.keys("{distcron:lock}:*"), PATIENCE_SECONDS, "a lock in Redis again"
        )
