"""Locks on real nodes at the strict levels: "quorum" over several Redis, and "critical".

Nothing that these guard starts without the lock, and a job is told before its lease ends.
"""

from __future__ import annotations

import collections
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.services import PostgresCluster, RedisServer, TcpProxy, tcp_proxy, wait_for
from tests.system.checker import Mark
from tests.system.cluster import (
    LEASE_SECONDS,
    PATIENCE_SECONDS,
    Cluster,
    Node,
    lock_key,
    manage,
    next_second,
    urls_of,
)
from tests.system.conftest import MakeCluster
from tests.system.test_node_faults import held_by, wait_for_begin

pytestmark = pytest.mark.system

EACH = 6


def guarded(cluster: Cluster, job: str, level: str, **values: Any) -> dict[str, Any]:
    """Start a job that ends at ``cluster.gate()``; return its run once it has begun."""
    arguments = {"gate": str(cluster.gate())}
    schedule = cluster.add(
        job, job, every=1, arguments=arguments, first=next_second(), lock_level=level, **values
    )
    run = cluster.wait_for_run(job, state="running")
    wait_for_begin(cluster, schedule)
    return run


def each_second(cluster: Cluster, level: str) -> None:
    for number in range(EACH):
        cluster.add(f"{level}-{number}", "touch", every=1, lock_level=level)
    cluster.wait_for_run(f"{level}-0", state="succeeded")


def mark_of(cluster: Cluster, kind: str, run: dict[str, Any]) -> Mark:
    """Return the first mark of a run's occurrence, waiting for it."""
    occurrence = (run["schedule_id"], run["scheduled_at"])

    def found() -> list[Mark]:
        return [m for m in cluster.marks() if (m.kind, m.occurrence) == (kind, occurrence)]

    return wait_for(found, PATIENCE_SECONDS, f"the mark {kind!r}")[0]


def votes(servers: list[RedisServer], run: dict[str, Any]) -> int:
    """Return on how many instances the lock of a run's schedule is that run's."""
    count = 0
    for server in servers:
        with server.client() as client:
            value = client.get(lock_key(run["schedule_id"])) or b""
        count += value.decode().startswith(run["owner_token"])  # type: ignore[union-attr]
    return count


def last_held(servers: list[RedisServer], run: dict[str, Any]) -> float:
    """Return the last monotonic second at which a majority held the lock of a run."""
    held_at = 0.0

    def ended() -> bool:
        nonlocal held_at
        now = time.monotonic()
        if votes(servers, run) <= len(servers) // 2:
            return True
        held_at = now
        return False

    wait_for(ended, PATIENCE_SECONDS, "the end of the lock")
    return held_at


def waits_of(nodes: list[Node], level: str) -> list[int]:
    """Return how often each node has said that the schedules of a level wait."""
    return [len(node.events("locks_away", level=level, waits=True)) for node in nodes]


def started_between(
    cluster: Cluster, prefix: str, since: datetime, until: datetime
) -> list[dict[str, Any]]:
    return [
        run
        for run in cluster.runs()
        if run["key"].startswith(prefix) and run["started_at"] and since < run["started_at"] < until
    ]


# --- quorum -------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "minority"), [(3, 1), (5, 2)])
def test_a_minority_that_dies_and_comes_back_empty_is_not_noticed(
    make_cluster: MakeCluster, count: int, minority: int
) -> None:
    """F14, F16, OP-37: a majority goes on, and who has forgotten does not vote for one TTL."""
    cluster = make_cluster(quorum=count)
    nodes = cluster.start_nodes(2)
    each_second(cluster, "quorum")
    run = guarded(cluster, "hold", "quorum")
    said = waits_of(nodes, "quorum")

    for server in cluster.quorum[:minority]:
        server.kill9()
    cluster.pass_seconds(2 * LEASE_SECONDS)
    assert votes(cluster.quorum[minority:], run) == count - minority
    for server in cluster.quorum[:minority]:
        server.start()
    cluster.pass_seconds(1)
    back = datetime.now(UTC)
    # Whoever is left is a majority with those that came back, once these vote again.
    wait_for(lambda: votes(cluster.quorum, run) == count, PATIENCE_SECONDS, "all votes again")

    assert waits_of(nodes, "quorum") == said
    assert started_between(cluster, "quorum", back, datetime.now(UTC)) != []
    assert {str(each["node_id"]) for each in cluster.runs()} == {node.ids()[0] for node in nodes}
    cluster.gate().touch()
    done = cluster.wait_for_run("hold", state="succeeded", id=run["id"])
    assert done["details"] is None
    assert cluster.finish_and_check() == []


def test_without_a_majority_what_it_guards_waits_and_the_rest_goes_on(
    make_cluster: MakeCluster,
) -> None:
    """F15: shown on every node; afterwards the newest occurrence runs."""
    cluster = make_cluster(quorum=3, config={"THREADS": 8, "MISFIRE_GRACE_SECONDS": 3})
    nodes = cluster.start_nodes(2)
    each_second(cluster, "quorum")
    each_second(cluster, "standard")
    heeding, deaf = guarded(cluster, "heed", "quorum"), guarded(cluster, "hold", "quorum")
    said = waits_of(nodes, "quorum")

    for server in cluster.quorum[:2]:
        server.kill9()
    mark_of(cluster, "told", heeding)
    wait_for(
        lambda: all(now > then for now, then in zip(waits_of(nodes, "quorum"), said, strict=True)),
        PATIENCE_SECONDS,
        "the word of every node",
    )
    gone_at = datetime.now(UTC)
    wait_for(
        lambda: (
            [alert.split(",")[0] for alert in alerts(cluster)]
            == ["lock level quorum unavailable"] * 2
        ),
        PATIENCE_SECONDS,
        "an alert of every node",
    )
    cluster.pass_seconds(LEASE_SECONDS)
    back_at = datetime.now(UTC)
    for server in cluster.quorum[:2]:
        server.start()
    for node in nodes:
        wait_for(
            lambda node=node: (  # type: ignore[misc]
                len(node.events("locks_back", level="quorum"))
                == len(node.events("locks_away", level="quorum"))
            ),
            PATIENCE_SECONDS,
            "the quorum",
        )
    wait_for(
        lambda: started_between(cluster, "quorum", back_at, datetime.now(UTC)),
        PATIENCE_SECONDS,
        "runs of what waited",
    )

    assert started_between(cluster, "quorum", gone_at, back_at) == []
    assert len(started_between(cluster, "standard", gone_at, back_at)) > EACH
    cluster.wait_for_run("quorum-0", reason="coalesced")
    told = cluster.wait_for_run("heed", state="cancelled", id=heeding["id"])
    assert (told["reason"], told["attempt"]) == ("lease_lost", 1)
    cluster.gate().touch()
    done = cluster.wait_for_run("hold", state="succeeded", id=deaf["id"])
    assert done["details"]["lease_lost"].startswith("lock 'schedule:")
    assert cluster.finish_and_check() == []


def alerts(cluster: Cluster) -> list[str]:
    rows = cluster.database.rows("SELECT alert FROM distcron_node WHERE state = 'active'")
    return [row["alert"] for row in rows]


@pytest.mark.parametrize("cut", [TcpProxy.refuse, TcpProxy.partition])
def test_a_holder_cut_off_from_the_quorum_is_told_before_its_lease_ends(
    make_cluster: MakeCluster, stack: ExitStack, cut: Callable[[TcpProxy], None]
) -> None:
    """OP-25: meanwhile nobody else gets the lock, and afterwards the other node goes on."""
    cluster = make_cluster(quorum=3)
    proxies = [stack.enter_context(tcp_proxy(server.port)) for server in cluster.quorum]
    owner = cluster.start_node(DISTCRON_SYSTEM_QUORUM=urls_of(proxies))
    run = guarded(cluster, "heed", "quorum")
    other = cluster.start_node()
    wait_for(lambda: votes(cluster.quorum, run) == 3, PATIENCE_SECONDS, "all votes")

    for proxy in proxies:
        cut(proxy)
    held_until = last_held(cluster.quorum, run)
    told = mark_of(cluster, "told", run)

    assert told.ended < held_until
    successor = cluster.wait_for_run("heed", state="running", node_id=other.ids()[0])
    assert mark_of(cluster, "begin", successor).began > held_until
    ended = cluster.run(run["id"])
    assert (ended["state"], ended["reason"]) == ("cancelled", "lease_lost")
    assert owner.is_running
    for proxy in proxies:
        proxy.close()
    cluster.gate().touch()
    assert cluster.finish_and_check() == []


CONTENDER = """
import pathlib, time
from distcron_app.conf import get_config
from distcron_app.errors import LockUnavailable
from distcron_app.locks import new_owner_token
from distcron_app.locks.redlock import RedlockBackend

config = get_config()
ttl_ms = int(config.lock_ttl_seconds * 1000)
backend = RedlockBackend(config.quorum_aliases, config.namespace, rejoin_ms=ttl_ms, retries=0)
won = {{}}
while not won:
    try:
        won = backend.acquire({{"schedule:{schedule}": new_owner_token()}}, ttl_ms)
    except LockUnavailable:
        pass
    pathlib.Path("{ready}").touch()
print(time.monotonic())
backend.release(won.values())
"""


def test_instances_that_forgot_a_lock_do_not_grant_it_again_within_its_ttl(
    make_cluster: MakeCluster, stack: ExitStack
) -> None:
    """F16: two of three are empty, and who asks for the lock must still wait for the holder."""
    cluster = make_cluster(quorum=3)
    proxies = [stack.enter_context(tcp_proxy(server.port)) for server in cluster.quorum]
    cluster.start_node(DISTCRON_SYSTEM_QUORUM=urls_of(proxies))
    run = guarded(cluster, "heed", "quorum")
    ready = cluster.gate("contends")
    code = CONTENDER.format(schedule=run["schedule_id"], ready=ready)
    executor = stack.enter_context(ThreadPoolExecutor(1))
    contender = executor.submit(manage, cluster.env, "shell", "-c", code)
    wait_for(ready.exists, PATIENCE_SECONDS, "a contender")

    # The holder's node cannot give them its lock again, as it would.
    for proxy in proxies[:2]:
        proxy.refuse()
    for server in cluster.quorum[:2]:
        server.kill9()
        server.start()
    told = mark_of(cluster, "told", run)

    won_at = float(contender.result()[-1])
    assert won_at > told.ended
    for proxy in proxies[:2]:
        proxy.accept()
    cluster.gate().touch()
    assert cluster.finish_and_check(lag_seconds=30) == []


# --- critical -----------------------------------------------------------------------


def end_lock_session(postgres: PostgresCluster, cluster: Cluster, node: Node) -> int:
    """End the session that holds the locks of a node, as a failover would; return how many."""
    with postgres.connect("postgres") as connection:
        rows = connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = %s AND datname = %s",
            [f"distcron-lock {node.name}", cluster.database.url.rpartition("/")[2]],
        ).fetchall()
    return len(rows)


def test_a_holder_whose_lock_session_ends_is_told_and_nobody_runs_beside_it(
    cluster: Cluster, postgres: PostgresCluster
) -> None:
    """F32: the end of the session ends the lock, and the job hears of it."""
    nodes = cluster.start_nodes(2)
    run = guarded(cluster, "heed", "critical", delivery="at_least_once")
    owner, _ = held_by(cluster, run, nodes)

    assert end_lock_session(postgres, cluster, owner) == 1
    told = mark_of(cluster, "told", run)
    wait_for_begin(cluster, run["schedule_id"], count=2)
    again = cluster.wait_for_run("heed", state="running", id=run["id"])
    (attempt,) = cluster.attempts(run["id"])
    cluster.gate().touch()
    done = cluster.wait_for_run("heed", state="succeeded", id=run["id"])

    began = [mark.began for mark in cluster.marks() if mark.kind == "begin"]
    assert sorted(began)[1] > told.ended
    assert (attempt["reason"], done["attempt"]) == ("lease_lost", 2)
    assert again["fencing_token"] > run["fencing_token"]
    assert cluster.finish_and_check() == []


def test_a_stopped_node_keeps_its_critical_lock_and_nobody_else_starts(cluster: Cluster) -> None:
    """F32, OP-27: its lease is over and its run is taken for lost; the lock outlives both."""
    nodes = cluster.start_nodes(2)
    run = guarded(cluster, "hold", "critical")
    owner, other = held_by(cluster, run, nodes)

    owner.send_group(signal.SIGSTOP)
    cluster.wait_for_run("hold", state="lost", id=run["id"])
    cluster.pass_seconds(2 * LEASE_SECONDS)
    begun = collections.Counter(mark.node_pid for mark in cluster.marks())
    owner.send_group(signal.SIGCONT)
    cluster.gate().touch()
    settled = cluster.wait_for_run("hold", state="succeeded", id=run["id"])
    owner.wait_for_event("fenced")
    later = cluster.wait_for_run("hold", 2, state="succeeded")

    assert begun == {owner.pid: 1}
    assert settled["late"] is True
    assert later["fencing_token"] > run["fencing_token"]
    assert other.is_running
    assert cluster.finish_and_check(lag_seconds=30) == []


def test_a_stopped_node_that_wakes_after_another_got_its_lock_is_told(
    cluster: Cluster, postgres: PostgresCluster
) -> None:
    """F32: the lock goes on where its session was ended; who wakes has the smaller token."""
    nodes = cluster.start_nodes(2)
    run = guarded(cluster, "heed", "critical")
    owner, other = held_by(cluster, run, nodes)

    owner.send_group(signal.SIGSTOP)
    assert end_lock_session(postgres, cluster, owner) == 1
    successor = cluster.wait_for_run("heed", state="running", node_id=other.ids()[0])
    owner.send_group(signal.SIGCONT)
    mark_of(cluster, "told", run)
    owner.wait_for_event("fenced")

    assert successor["fencing_token"] > run["fencing_token"]
    assert cluster.run(successor["id"])["state"] == "running"
    cluster.gate().touch()
    cluster.wait_for_run("heed", state="succeeded", id=successor["id"])
    assert cluster.finish_and_check() == []


def test_a_killed_node_s_critical_lock_ends_with_it(cluster: Cluster) -> None:
    """OP-37: another node goes on within the lease and five seconds."""
    nodes = cluster.start_nodes(2)
    run = guarded(cluster, "hold", "critical")
    owner, other = held_by(cluster, run, nodes)

    owner.kill9()
    killed_at = time.monotonic()
    successor = cluster.wait_for_run("hold", state="running", node_id=other.ids()[0])

    assert time.monotonic() - killed_at < LEASE_SECONDS + 5
    assert successor["scheduled_at"] > run["scheduled_at"]
    assert cluster.run(run["id"])["state"] == "lost"
    cluster.gate().touch()
    assert cluster.finish_and_check() == []
