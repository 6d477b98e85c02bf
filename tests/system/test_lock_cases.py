"""Locks on real nodes at the level "standard": one Redis as a gate, the database decides.

Each test shows the case that its docstring names. ``tests/cases/operations.py`` lists all
cases with the tests that show them.
"""

from __future__ import annotations

import collections
import itertools
import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.services import (
    ClockedValkey,
    RedisServer,
    TcpProxy,
    faketime,
    redis_server,
    tcp_proxy,
    wait_for,
)
from tests.system.cluster import (
    PATIENCE_SECONDS,
    ROOT,
    Cluster,
    Node,
    lock_key,
    next_second,
)
from tests.system.conftest import MakeCluster
from tests.system.test_node_faults import held_by, wait_for_begin
from tests.system.test_redis_faults import under_load

pytestmark = pytest.mark.system

TTL_SECONDS = 3.0


@pytest.fixture
def proxy(cluster: Cluster, stack: ExitStack) -> TcpProxy:
    """A proxy before the Redis of ``cluster``."""
    assert cluster.redis is not None
    return stack.enter_context(tcp_proxy(cluster.redis.port))


def behind(proxy: TcpProxy) -> str:
    """Return the Redis URL of a node behind the proxy."""
    return f"redis://127.0.0.1:{proxy.port}/0"


def holder(server: RedisServer | None, schedule_id: int) -> str:
    """Return the owner token that holds a schedule's lock, or ""."""
    assert server is not None
    with server.client() as client:
        value = client.get(lock_key(schedule_id)) or b""
    return value.decode().partition("|")[0]  # type: ignore[union-attr]


def hold(cluster: Cluster, node: Node | None = None, **values: Any) -> dict[str, Any]:
    """Start a job that ends at ``cluster.gate()``; return its run once it has begun."""
    arguments = {"gate": str(cluster.gate())}
    schedule = cluster.add(
        "held", "hold", every=1, arguments=arguments, first=next_second(), **values
    )
    run = cluster.wait_for_run("held", state="running")
    wait_for_begin(cluster, schedule)
    if node is not None:
        assert str(run["node_id"]) == node.ids()[0]
    return run


def begins(cluster: Cluster, run: dict[str, Any]) -> int:
    """Return how often the job of a run's occurrence has begun, on any node."""
    occurrence = (run["schedule_id"], run["scheduled_at"])
    return len([m for m in cluster.marks() if (m.kind, m.occurrence) == ("begin", occurrence)])


def ran_between(cluster: Cluster, node: Node, since: datetime, until: datetime) -> int:
    """Return how many runs of ``each-second`` the node has started in a span of time and ended.

    Of the slow ones it decides the next occurrence without a lock of its own.
    """
    ids = node.ids()
    done = [run for run in cluster.runs(state="succeeded") if run["key"].startswith("each")]
    mine = [run for run in done if str(run["node_id"]) in ids]
    return len([run for run in mine if since < run["started_at"] < until])


def test_a_holder_that_wakes_after_its_ttl_does_not_extend_the_lock_of_the_next(
    cluster: Cluster,
) -> None:
    """OP-23: the next holder's token stays, and the first one is told."""
    nodes = cluster.start_nodes(2)
    run = hold(cluster)
    owner, other = held_by(cluster, run, nodes)

    owner.send_group(signal.SIGSTOP)
    successor = cluster.wait_for_run("held", state="running", node_id=other.ids()[-1])
    owner.send_group(signal.SIGCONT)
    told = owner.wait_for_event("lease_lost", run=run["id"])
    owner.wait_for_event("fenced")

    schedule = run["schedule_id"]
    assert told["cause"] == f"lock 'schedule:{schedule}' is held by another owner"
    until = time.monotonic() + 1.5 * TTL_SECONDS
    held = set()
    while time.monotonic() < until:
        held.add(holder(cluster.redis, schedule))
        cluster.pass_seconds(0.1)
    assert held == {successor["owner_token"]}
    cluster.gate().touch()
    assert cluster.finish_and_check() == []


def test_a_node_cut_off_from_redis_and_the_others_run_each_occurrence_once(
    cluster: Cluster, proxy: TcpProxy
) -> None:
    """OP-25, F10: two TTLs without Redis on one side, and with it on the other."""
    cut_off = cluster.start_node(REDIS_URL=behind(proxy))
    (other,) = under_load(cluster, 1)
    wait_for(lambda: cluster.runs(node_id=cut_off.ids()[0]), PATIENCE_SECONDS, "a run there")

    proxy.refuse()
    cut_off.wait_for_event("locks_away", level="standard", waits=False)
    gone_at = datetime.now(UTC)
    cluster.pass_seconds(2 * TTL_SECONDS)
    back_at = datetime.now(UTC)
    proxy.accept()
    cut_off.wait_for_event("locks_back", level="standard")

    assert other.events("locks_away") == []
    assert ran_between(cluster, cut_off, gone_at, back_at) > 0
    assert ran_between(cluster, other, gone_at, back_at) > 0
    assert cluster.finish_and_check() == []


def test_a_job_whose_lock_was_lost_succeeds_and_the_loss_is_noted_beside_it(
    cluster: Cluster, proxy: TcpProxy
) -> None:
    """OP-29: a lost lock is a note, no failure, and nobody else starts the occurrence."""
    owner = cluster.start_node(REDIS_URL=behind(proxy))
    run = hold(cluster, owner)
    schedule = run["schedule_id"]
    assert cluster.redis is not None
    cluster.start_node()

    proxy.refuse()
    wait_for(
        lambda: holder(cluster.redis, schedule) != run["owner_token"],
        PATIENCE_SECONDS,
        "the end of the lock",
    )
    with cluster.redis.client() as client:
        # As if the other node were in the middle of a claim.
        client.set(lock_key(schedule), "another|0|0|0|", px=60_000)
        proxy.accept()
        owner.wait_for_event("lease_lost", run=run["id"])
        client.delete(lock_key(schedule))
    cluster.wait_for_run("held", reason="overlap")
    cluster.gate().touch()
    done = cluster.wait_for_run("held", state="succeeded", id=run["id"])

    assert (done["reason"], done["result"], done["attempt"]) == ("", "held", 1)
    assert done["details"] == {"lease_lost": f"lock 'schedule:{schedule}' is held by another owner"}
    assert begins(cluster, run) == 1
    assert cluster.finish_and_check() == []


def test_a_lock_whose_release_did_not_arrive_ends_by_its_ttl(
    cluster: Cluster, proxy: TcpProxy
) -> None:
    """OP-31: the node that could not release leaves, and another goes on within the TTL."""
    owner = cluster.start_node(REDIS_URL=behind(proxy))
    run = hold(cluster, owner)
    other = cluster.start_node()

    proxy.refuse()
    owner.send(signal.SIGTERM)
    owner.wait_for_event("draining")
    cluster.gate().touch()
    cluster.wait_for_run("held", state="succeeded", id=run["id"])
    left = holder(cluster.redis, run["schedule_id"])
    assert owner.wait() == 0
    successor = cluster.wait_for_run("held", state="succeeded", node_id=other.ids()[0])

    assert left == run["owner_token"]
    waited = successor["started_at"] - cluster.run(run["id"])["finished_at"]
    assert waited.total_seconds() < TTL_SECONDS + 5
    assert cluster.finish_and_check() == []


def test_a_renewal_whose_link_breaks_is_made_up_for_within_the_ttl(
    cluster: Cluster, proxy: TcpProxy
) -> None:
    """OP-33: a job of many TTLs keeps its lock although links break under its renewals."""
    node = cluster.start_node(REDIS_URL=behind(proxy))
    run = hold(cluster, node)

    held = set()
    for number in range(3):
        proxy.drop_next_reply(b"schedule:")
        wait_for(lambda number=number: proxy.dropped > number, PATIENCE_SECONDS, "a renewal")  # type: ignore[misc]
        proxy.cut()
        until = time.monotonic() + TTL_SECONDS
        while time.monotonic() < until:
            held.add(holder(cluster.redis, run["schedule_id"]))
            cluster.pass_seconds(0.05)
    cluster.gate().touch()
    done = cluster.wait_for_run("held", state="succeeded", id=run["id"])

    assert held == {run["owner_token"]}
    assert node.events("lease_lost") == []
    assert done["details"] is None
    assert cluster.finish_and_check() == []


def test_a_node_that_comes_after_a_short_job_is_done_does_not_run_it_again(
    cluster: Cluster, proxy: TcpProxy
) -> None:
    """OP-43: it finds the lock free, and the occurrence taken.

    Two guards stand behind each other in the claim: the schedule has moved on
    (compare-and-set on ``next_run_at``), and the occurrence has its row (unique key).
    """
    assert_late_claims_are_refused(cluster, proxy)


@pytest.mark.parametrize("guard", ["cursor", "unique_row"])
def test_either_guard_of_a_claim_alone_refuses_a_node_that_comes_late(
    cluster: Cluster, proxy: TcpProxy, guard: str
) -> None:
    """OP-43: without the other one."""
    take_out(cluster, guard)
    assert_late_claims_are_refused(cluster, proxy, DISTCRON_SYSTEM_WITHOUT=guard)


def test_without_both_guards_a_node_that_comes_late_runs_an_occurrence_again(
    cluster: Cluster, proxy: TcpProxy
) -> None:
    """OP-43: what the two tests above would find."""
    take_out(cluster, "unique_row")
    weak = {"DISTCRON_SYSTEM_WITHOUT": "cursor,unique_row"}
    cluster.start_node(**weak)
    cluster.start_node(REDIS_URL=behind(proxy), **weak)
    for number in range(8):
        cluster.add(f"each-second-{number}", "touch", every=1)

    until = time.monotonic() + PATIENCE_SECONDS
    while not doubled(cluster):
        assert time.monotonic() < until, "Nothing was doubled."
        arrive_late(proxy)

    assert {line.split()[0] for line in cluster.finish_and_check()} >= {"I1", "I2"}


def test_late_claims_of_what_was_pruned_meanwhile_are_refused(
    make_cluster: MakeCluster, stack: ExitStack
) -> None:
    """F45: the row that would have been in the way is gone, and the schedule has moved on."""
    cluster = make_cluster(config={"KEEP_SUCCEEDED": 1})
    assert cluster.redis is not None
    proxy = stack.enter_context(tcp_proxy(cluster.redis.port))
    seen = cluster.folder / "observed"
    cluster.start_node()
    cluster.start_node(REDIS_URL=behind(proxy), DISTCRON_SYSTEM_OBSERVER=str(seen))
    pruned = prune_beside(cluster, stack)
    schedules = [cluster.add(f"each-second-{number}", "touch", every=1) for number in range(8)]

    until = time.monotonic() + PATIENCE_SECONDS
    while len(refused(seen, schedules)) < 3:
        assert time.monotonic() < until, seen.read_text()[-4000:]
        arrive_late(proxy)
    evidence = cluster.finish()

    assert int(pruned.read_text().split()[-1]) > len(schedules)
    begun = collections.Counter(m.occurrence for m in evidence.of_kind("begin"))
    # Of what was pruned there is only what the jobs wrote and the database saw.
    inserted = {change.run_id for change in evidence.transitions if change.before == ""}
    assert len(begun) > len(evidence.runs)
    assert set(begun.values()) == {1}
    planned = sum(len(each.instants) for each in evidence.planned)
    assert len(inserted) <= planned


def prune_beside(cluster: Cluster, stack: ExitStack) -> Path:
    """Prune each 100 ms until the end of the test; return the file that says how many runs."""
    path = cluster.folder / "pruned"
    code = "from tests.system.app.loads import prune_without_end; prune_without_end(0.1)"
    with open(path, "wb") as file:
        pruner = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "manage.py", "shell", "-v", "0", "-c", code],
                cwd=ROOT,
                env=cluster.env,
                stdout=file,
            )
        )
    stack.callback(pruner.kill)
    wait_for(path.read_text, PATIENCE_SECONDS, "the first batch")
    return path


def take_out(cluster: Cluster, guard: str) -> None:
    """Take a guard of the claim out of the database, where it is one of the database."""
    if guard == "unique_row":
        cluster.database.rows("ALTER TABLE distcron_run DROP CONSTRAINT distcron_run_occurrence")


def doubled(cluster: Cluster) -> list[Any]:
    """Return the occurrences whose job has begun more than once."""
    begun = collections.Counter(m.occurrence for m in cluster.marks() if m.kind == "begin")
    return [occurrence for occurrence, count in begun.items() if count > 1]


def assert_late_claims_are_refused(cluster: Cluster, proxy: TcpProxy, **more: str) -> None:
    """Let a node come late again and again, until enough of its claims were refused."""
    seen = cluster.folder / "observed"
    cluster.start_node(**more)
    late = cluster.start_node(REDIS_URL=behind(proxy), DISTCRON_SYSTEM_OBSERVER=str(seen), **more)
    schedules = [cluster.add(f"each-second-{number}", "touch", every=1) for number in range(8)]

    until = time.monotonic() + PATIENCE_SECONDS
    while len(refused(seen, schedules)) < 3:
        assert time.monotonic() < until, seen.read_text()[-4000:]
        arrive_late(proxy)

    assert late.events("locks_away") == []
    assert cluster.finish_and_check() == []


def arrive_late(proxy: TcpProxy) -> None:
    """Hold back what a node asks Redis for at the next whole second, until others are done."""
    instant = next_second()
    held_back = [instant - timedelta(seconds=0.05), instant + timedelta(seconds=0.35)]
    wait_for(lambda: datetime.now(UTC) >= held_back[0], what="the instant")
    proxy.partition()
    wait_for(lambda: datetime.now(UTC) >= held_back[1], what="the end of the job")
    proxy.heal()


def refused(seen: Path, schedules: list[int]) -> list[dict[str, Any]]:
    """Return claims under locks that were won, all of whose occurrences another node had."""
    entries = [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []
    mine = [entry for entry in entries if set(entry["schedules"]) & set(schedules)]
    return [
        claim
        for won, claim, released in zip(mine, mine[1:], mine[2:], strict=False)
        # What is given back at once was won for a claim that came too late.
        if [won["event"], claim["event"], released["event"]] == ["won", "claim", "released"]
        and won["schedules"] == claim["schedules"] == released["schedules"]
    ]


def test_the_death_of_the_busiest_node_right_before_many_are_due_costs_none_of_them(
    cluster: Cluster,
) -> None:
    """OP-47: 59 occurrences of one instant, 59 runs, each once."""
    busiest = cluster.start_node()
    for number in range(3):
        arguments = {"gate": str(cluster.gate("never"))}
        cluster.add(f"held-{number}", "hold", every=3600, arguments=arguments, first=next_second())
    cluster.wait_for_run(count=3, state="running")
    cluster.start_nodes(2)
    midnight = next_second(3)
    for number in range(59):
        cluster.add(f"midnight-{number}", "touch", every=3600, first=midnight)

    last_moment = midnight - timedelta(seconds=0.3)
    wait_for(lambda: datetime.now(UTC) >= last_moment, 10, "the last moment before midnight")
    busiest.kill9()
    for number in range(59):
        cluster.wait_for_run(f"midnight-{number}", state="succeeded")

    at_midnight = [m for m in cluster.marks() if m.scheduled_at == midnight]
    assert collections.Counter(mark.kind for mark in at_midnight) == {"begin": 59, "effect": 59}
    assert len(cluster.runs(scheduled_at=midnight)) == 59
    cluster.wait_for_run("held-2", state="lost")
    assert cluster.finish_and_check(lag_seconds=3600) == []


def test_an_append_only_redis_that_is_killed_doubles_and_loses_nothing(
    make_cluster: MakeCluster,
) -> None:
    """F4: it comes back with the locks of the past."""
    cluster = make_cluster(redis=redis_server("--appendfsync", "always", appendonly=True))
    under_load(cluster, 2)
    assert cluster.redis is not None
    for number in range(4):
        cluster.pass_seconds(0.6 + 0.27 * number)
        cluster.redis.kill9()
        cluster.redis.start()
    assert cluster.finish_and_check() == []


def test_a_redis_that_evicts_locks_doubles_and_loses_nothing(make_cluster: MakeCluster) -> None:
    """F7: locks that vanish in the middle of their runs."""
    small = redis_server("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-random")
    cluster = make_cluster(redis=small)
    under_load(cluster, 2)
    with small.client() as client:
        until = time.monotonic() + 3 * TTL_SECONDS
        for number in itertools.count():
            client.set(f"flood:{number % 5000}", b"x" * 2000)
            if time.monotonic() > until:
                break
        evicted = client.info("stats")["evicted_keys"]  # type: ignore[index]
    assert evicted > 1000
    assert cluster.finish_and_check() == []


def test_a_redis_that_refuses_writes_is_shown_and_the_database_decides(cluster: Cluster) -> None:
    """F8, OP-41: full under noeviction is an alarm, and stops nothing."""
    nodes = under_load(cluster, 2)
    assert cluster.redis is not None
    with cluster.redis.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        gone_at = datetime.now(UTC)
        for node in nodes:
            assert "OutOfMemory" in node.wait_for_event("locks_away", waits=False)["cause"]
        cluster.pass_seconds(2)
        back_at = datetime.now(UTC)
        client.config_set("maxmemory", 0)
    for node in nodes:
        node.wait_for_event("locks_back")
        assert ran_between(cluster, node, gone_at, back_at) > 0
    assert cluster.finish_and_check() == []


def test_a_redis_that_is_slow_and_drops_links_doubles_and_loses_nothing(
    cluster: Cluster, proxy: TcpProxy
) -> None:
    """F10: from 50 ms to 2 s, resets, replies that are cut or never come."""
    cluster.start_nodes(2, REDIS_URL=behind(proxy))
    cluster.start_node()
    under_load(cluster, 0)
    for delay_seconds in (0.05, 0.4, 2.0):
        proxy.delay_seconds = delay_seconds
        cluster.pass_seconds(1)
        proxy.drop_next_reply()
        cluster.pass_seconds(1)
        proxy.drop_next_reply(hang=True)
        cluster.pass_seconds(1)
        proxy.cut()
    proxy.delay_seconds = 0.0
    assert proxy.dropped >= 3
    assert cluster.finish_and_check() == []


def test_a_planted_lock_without_ttl_delays_its_schedule_and_never_stops_it(
    cluster: Cluster,
) -> None:
    """F12: within 20 s the database decides alone, each time."""
    cluster.start_nodes(2)
    first = next_second(2)
    schedule = cluster.add("planted", "touch", every=1, first=first)
    other = cluster.add("free", "touch", every=1, first=first)
    assert cluster.redis is not None
    with cluster.redis.client() as client:
        client.set(lock_key(schedule), "planted")
        runs = [cluster.wait_for_run("planted", count, state="succeeded") for count in (1, 2)]
        assert client.get(lock_key(schedule)) == b"planted"
        client.delete(lock_key(schedule))

    assert TTL_SECONDS < (runs[0]["started_at"] - first).total_seconds() < 20
    assert [run["started_at"] - run["due_at"] < timedelta(seconds=20) for run in runs] == [True] * 2
    (early, *_) = cluster.runs("free", schedule_id=other)
    assert early["started_at"] < runs[0]["started_at"]
    assert cluster.finish_and_check() == []


def test_steps_of_the_clock_of_redis_double_and_lose_nothing(make_cluster: MakeCluster) -> None:
    """F13: forward, all locks end at once; back, they live longer than their TTL."""
    clocked = ClockedValkey()
    cluster = make_cluster(redis=clocked)
    under_load(cluster, 2)
    for seconds in (90, -90, 3600, -3600, 86_400, 0):
        clocked.set_clock(seconds)
        cluster.pass_seconds(1.3)
    assert cluster.finish_and_check() == []


def test_nodes_whose_clocks_are_wrong_start_in_time_and_double_nothing(cluster: Cluster) -> None:
    """F36, OP-54, OP-68: off by minutes and an hour, one of them stepping; the database's clock
    counts, also for who is dead."""
    clock, late_clock = cluster.folder / "clock", cluster.folder / "late-clock"
    clock.write_text("+300")
    late_clock.write_text("-3600")
    nodes = [
        cluster.start_node(**faketime(clock)),
        cluster.start_node(**faketime(late_clock)),
        *under_load(cluster, 1),
    ]
    clock.write_text("-3600")
    cluster.pass_seconds(2)
    clock.write_text("+300")
    cluster.pass_seconds(2)
    alerts = cluster.database.rows("SELECT alert FROM distcron_node WHERE alert <> ''")

    assert len(alerts) == 2
    assert all("host clock is off by" in row["alert"] for row in alerts)
    assert [event for node in nodes for event in node.events("node_dead")] == []
    assert [len(node.ids()) for node in nodes] == [1] * len(nodes)
    assert [node for node in nodes if not cluster.runs(node_id=node.ids()[0])] == []
    touched = [run for run in cluster.runs(state="succeeded") if run["key"].startswith("each")]
    lateness = [run["started_at"] - run["due_at"] for run in touched]
    assert timedelta(0) <= min(lateness)
    assert max(lateness) < timedelta(seconds=3)
    assert cluster.finish_and_check() == []
