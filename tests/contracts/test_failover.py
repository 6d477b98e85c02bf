"""What a failover may cost: Sentinel and Cluster, with servers that die, hang and move."""

from __future__ import annotations

import time

import pytest
import redis.cluster

from distcron_app import wakeup
from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks import get_backend
from tests.contracts.conftest import (
    LOCK_DATABASE,
    cluster_caches,
    lock_backend,
    sentinel_caches,
)
from tests.contracts.lock_contract import LONG, take
from tests.services import redis_cluster, wait_for

KEY = "{test:lock}:schedule:1"
TAG = "{test:lock}"
# Two socket timeouts of 0.5 s, and a quarter for a busy machine.
ONE_CALL_SECONDS = 1.25


@pytest.fixture
def trio(own_trio, use_caches):
    use_caches(sentinel_caches(own_trio))
    return own_trio


@pytest.fixture
def lasting_cluster(shared_cluster, use_caches):
    """A Cluster that the test leaves as it was."""
    use_caches(cluster_caches(shared_cluster))
    with shared_cluster.owner_of(TAG).client() as client:
        client.flushdb()
    return shared_cluster


@pytest.fixture
def cluster(own_cluster, use_caches):
    use_caches(cluster_caches(own_cluster))
    return own_cluster


def answer(call):
    """Return what ``call`` gives, or None while the backend is away; each try is bounded."""
    started = time.monotonic()
    try:
        return call()
    except LockUnavailable:
        return None
    finally:
        assert time.monotonic() - started < ONE_CALL_SECONDS


def wait_for_key(servers, key=KEY, database=LOCK_DATABASE):
    for server in servers:
        with server.client(database) as client:
            wait_for(lambda client=client: client.exists(key), what="the replicated lock")


def lose_key(servers, key=KEY):
    """Leave the servers as a replica is that the last write did not reach."""
    for server in servers:
        with server.client(LOCK_DATABASE) as client:
            client.config_set("replica-read-only", "no")
            assert client.delete(key) == 1
            client.config_set("replica-read-only", "yes")


def test_sentinel_failover_keeps_a_replicated_lock(trio):
    backend, other = lock_backend(), lock_backend("node-b")
    won = take(backend, "schedule:1")
    wait_for_key(trio.replicas())
    trio.primary.kill9()
    started = time.monotonic()
    renewed = wait_for(lambda: answer(lambda: backend.renew(won.values(), LONG)), 20, "a failover")
    assert time.monotonic() - started < 10
    assert set(renewed) == {"schedule:1"}
    assert take(other, "schedule:1") == {}


def test_primary_promoted_without_the_key_gives_the_lock_to_another_and_not_to_two(trio):
    """OP-23, F17: the old holder's renewal fails, and the key keeps the other's token."""
    backend, other = lock_backend(), lock_backend("node-b")
    won = take(backend, "schedule:1")
    old, replicas = trio.primary, trio.replicas()
    wait_for_key(replicas)
    lose_key(replicas)
    old.kill9()
    taken = wait_for(lambda: answer(lambda: take(other, "schedule:1")), 20, "the other's lock")
    assert backend.renew(won.values(), LONG) == {}
    assert backend.release(won.values()) == set()
    with trio.wait_for_new_primary(old).client(LOCK_DATABASE) as client:
        assert client.get(KEY).startswith(taken["schedule:1"].owner_token.encode())


def test_after_a_failover_any_node_can_lock_within_the_ttl(trio):
    """OP-37, F17: also when the holder is gone, and again by the first one afterwards."""
    backend, other = lock_backend(), lock_backend("node-b")
    lease = take(backend, "schedule:1", ttl_ms=4000)["schedule:1"]
    wait_for_key(trio.replicas())
    trio.primary.kill9()
    won = wait_for(lambda: answer(lambda: take(other, "schedule:1")), 20, "the other's lock")
    assert lease.expires_at - 0.5 < Clock().monotonic() < lease.expires_at + 6
    assert other.release(won.values()) == {"schedule:1"}
    assert set(take(backend, "schedule:1")) == {"schedule:1"}


def test_breaker_closes_by_itself_after_a_failover(trio):
    guarded = get_backend()
    won = take(guarded, "schedule:1")
    trio.primary.kill9()
    for _ in range(2):
        with pytest.raises(LockUnavailable):
            guarded.renew(won.values(), LONG)
    assert guarded.state == "open"
    wait_for(lambda: guarded.state == "closed", 20, "the breaker to close")
    guarded.renew(won.values(), LONG)
    guarded.close()


def test_planned_failover_is_followed_while_the_old_primary_still_takes_writes(trio):
    backend = lock_backend()
    take(backend, "schedule:1")
    old = trio.primary
    with trio.sentinels[0].client() as client:
        client.execute_command("SENTINEL FAILOVER", trio.SERVICE)
    started = time.monotonic()
    # The sentinels demote the old one some eight seconds later.
    with trio.wait_for_new_primary(old).client(LOCK_DATABASE) as client:

        def is_locked_there() -> bool:
            answer(lambda: take(backend, "schedule:2"))
            return bool(client.exists("{test:lock}:schedule:2"))

        wait_for(is_locked_there, 10, "a lock on the new primary")
    with old.client() as client:
        assert client.info("replication")["role"] == "master"
    assert time.monotonic() - started < 5


def test_locks_go_on_while_all_sentinels_are_gone(trio):
    backend = lock_backend()
    won = take(backend, "schedule:1")
    for sentinel in trio.sentinels:
        sentinel.kill9()
    later = time.monotonic() + 1.2
    wait_for(lambda: time.monotonic() > later, what="the next look at the sentinels")
    assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}


def test_sentinel_that_hangs_costs_one_time_limit(shared_trio, use_caches):
    use_caches(sentinel_caches(shared_trio))
    shared_trio.sentinels[0].pause()
    backend = lock_backend()
    started = time.monotonic()
    assert set(take(backend, "schedule:1")) == {"schedule:1"}
    assert time.monotonic() - started < ONE_CALL_SECONDS
    shared_trio.sentinels[0].resume()


def test_sentinels_that_are_all_gone_are_no_answer(trio):
    for sentinel in trio.sentinels:
        sentinel.kill9()
    backend = lock_backend()
    with pytest.raises(LockUnavailable, match="MasterNotFoundError") as caught:
        take(backend, "schedule:1")
    assert caught.value.refused is False


def test_wakeup_goes_on_after_a_failover(trio):
    calls = []
    listener = wakeup.Listener(lambda: calls.append(1))
    listener.start()
    assert listener.ready.wait(5)
    trio.primary.kill9()
    wait_for(lambda: not listener.ready.is_set(), what="the loss to be noticed")
    assert listener.ready.wait(20)
    wait_for(lambda: calls, what="the look after the reconnect")
    seen = len(calls)
    wakeup.announce()
    wait_for(lambda: len(calls) > seen, what="the announcement")
    listener.stop()


def test_cluster_goes_on_without_a_primary_of_other_slots(cluster):
    owner = cluster.owner_of(TAG)
    backend = lock_backend()
    won = take(backend, "schedule:1")
    lost = next(server for server in cluster.servers if server is not owner)
    lost.kill9()
    assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}
    assert set(take(backend, "schedule:2")) == {"schedule:2"}
    assert backend.release(won.values()) == {"schedule:1"}
    wait_for(lambda: _is_failed(owner, lost), 10, "the cluster to give the primary up")
    assert set(take(backend, "schedule:1")) == {"schedule:1"}


def test_cluster_without_the_primary_of_the_locks_is_unavailable_until_it_is_back(cluster):
    owner = cluster.owner_of(TAG)
    backend = lock_backend()
    take(backend, "schedule:1")
    owner.kill9()
    for _ in range(3):
        started = time.monotonic()
        with pytest.raises(LockUnavailable):
            take(backend, "schedule:2")
        assert time.monotonic() - started < ONE_CALL_SECONDS
    owner.start()
    won = wait_for(lambda: answer(lambda: take(backend, "schedule:2")), 10, "the primary")
    assert set(won) == {"schedule:2"}


def test_cluster_whose_primary_hangs_is_unavailable_in_bounded_time(lasting_cluster):
    owner = lasting_cluster.owner_of(TAG)
    backend = lock_backend()
    take(backend, "schedule:1")
    owner.pause()
    started = time.monotonic()
    with pytest.raises(LockUnavailable):
        take(backend, "schedule:2")
    assert time.monotonic() - started < ONE_CALL_SECONDS
    owner.resume()


def test_cluster_keeps_the_lock_on_a_promoted_replica(use_caches):
    with redis_cluster(replicas=1) as cluster:
        use_caches(cluster_caches(cluster))
        backend, other = lock_backend(), lock_backend("node-b")
        won = take(backend, "schedule:1")
        owner = cluster.owner_of(TAG)
        replica = cluster.servers[3 + cluster.servers.index(owner)]
        _wait_for_offset(replica, owner)
        owner.kill9()
        renewed = wait_for(
            lambda: answer(lambda: backend.renew(won.values(), LONG)), 20, "the failover"
        )
        assert set(renewed) == {"schedule:1"}
        assert take(other, "schedule:1") == {}
        assert cluster.wait_for_new_owner(TAG, owner) is replica


def test_cluster_is_found_through_another_node(own_cluster, use_caches):
    owner = own_cluster.owner_of(TAG)
    first = next(server for server in own_cluster.servers if server is not owner)
    own_cluster.servers.remove(first)
    own_cluster.servers.insert(0, first)
    use_caches(cluster_caches(own_cluster))
    first.kill9()
    assert set(take(lock_backend(), "schedule:1")) == {"schedule:1"}
    first.start()


def test_cluster_that_is_gone_is_no_answer(own_cluster, use_caches):
    use_caches(cluster_caches(own_cluster))
    for server in own_cluster.servers:
        server.kill9()
    with pytest.raises(LockUnavailable, match="RedisClusterException") as caught:
        take(lock_backend(), "schedule:1")
    assert caught.value.refused is False
    for server in own_cluster.servers:
        server.start()
    wait_for(lambda: answer(lambda: take(lock_backend(), "schedule:1")), 10, "the cluster")


def test_slot_that_moves_is_followed(cluster):
    backend = lock_backend()
    backend.release(take(backend, "schedule:1").values())
    old = cluster.owner_of(TAG)
    new = next(server for server in cluster.servers if server is not old)
    slot = redis.cluster.key_slot(TAG.encode())
    with new.client() as client:
        identity = client.execute_command("CLUSTER MYID").decode()
    for server in (new, old):
        with server.client() as client:
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", identity)
    assert set(take(backend, "schedule:1")) == {"schedule:1"}
    with new.client() as client:
        assert client.exists(KEY)


def test_slot_that_nobody_served_is_found_again(lasting_cluster):
    backend = lock_backend()
    take(backend, "schedule:1")
    slot = redis.cluster.key_slot(TAG.encode())
    owner = lasting_cluster.owner_of(TAG)
    for server in lasting_cluster.servers:
        with server.client() as client:
            client.execute_command("CLUSTER DELSLOTS", slot)
    for _ in range(2):
        with pytest.raises(LockUnavailable):
            take(backend, "schedule:2")
    with owner.client() as client:
        client.execute_command("CLUSTER ADDSLOTS", slot)
    wait_for(lambda: answer(lambda: take(backend, "schedule:2")), 10, "the slot")
    wait_for(lambda: lasting_cluster.is_complete(), 10, "all servers to know it")


def test_large_batch_after_script_flush_in_a_cluster(lasting_cluster):
    backend = lock_backend()
    names = [f"schedule:{number}" for number in range(1001)]
    won = take(backend, *names)
    with lasting_cluster.owner_of(TAG).client() as client:
        client.script_flush()
    assert list(backend.renew(won.values(), LONG)) == names


def test_wakeup_works_in_a_cluster(lasting_cluster):
    calls = []
    listener = wakeup.Listener(lambda: calls.append(1))
    listener.start()
    assert listener.ready.wait(5)
    wakeup.announce()
    wait_for(lambda: calls == [1], what="the announcement")
    listener.stop()


def _is_failed(asked, lost) -> bool:
    with asked.client() as client:
        nodes = client.execute_command("CLUSTER NODES")
    return any(
        f":{lost.port}" in name and "fail" in facts["flags"] for name, facts in nodes.items()
    )


def _wait_for_offset(replica, owner) -> None:
    with owner.client() as one, replica.client() as two:
        wait_for(
            lambda: (
                one.info("replication")["master_repl_offset"]
                == two.info("replication")["master_repl_offset"]
            ),
            what="the replica to have all writes",
        )
