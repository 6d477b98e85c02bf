"""Several backends as one, as the level "critical": a gate, then the database."""

from __future__ import annotations

import itertools

import pytest

from distcron_app.errors import LockUnavailable
from distcron_app.locks import get_level
from distcron_app.locks.combined import CombinedLockBackend
from distcron_app.locks.memory import MemoryLockBackend
from distcron_app.locks.redis import RedisLockBackend
from project.service_urls import cache_settings, database_settings
from tests.contracts.conftest import LOCK_DATABASE
from tests.contracts.lock_contract import LONG, LockContract, spawn_node, take

_namespaces = (f"combined{number}" for number in itertools.count())


class TestRedisAndDatabase(LockContract):
    @pytest.fixture
    def make(self, shared_redis, shared_postgres, use_redis, use_database, start, namespace):
        use_redis(shared_redis.url_of(LOCK_DATABASE))
        alias = use_database(shared_postgres.url)

        def make(note):
            gate = RedisLockBackend("distcron", namespace, note=note)
            return CombinedLockBackend([gate, start(alias, namespace, note=note)])

        return make

    @pytest.fixture
    def backend(self, make):
        return make("node-a")

    @pytest.fixture
    def other(self, make):
        return make("node-b")

    @pytest.fixture
    def node_settings(self, shared_redis, shared_postgres, namespace, tmp_path):
        return {
            "CACHES": cache_settings(shared_redis.url_of(LOCK_DATABASE)),
            "DATABASES": {"default": database_settings(shared_postgres.url, tmp_path)},
            "DISTCRON": {"NAMESPACE": namespace},
        }

    def wait_until_expired(self, lease, holder):
        super().wait_until_expired(lease, holder)
        # Redis forgets by itself, the session at any call of its holder.
        holder.ping()

    def test_three_processes_lose_no_increment(self, node_settings, tmp_path):
        counter = tmp_path / "counter"
        counter.write_text("0")
        nodes = [
            spawn_node(settings=node_settings, level="critical", counter=str(counter), times=100)
            for _ in range(3)
        ]
        for node in nodes:
            node.communicate(timeout=60)
        assert [node.returncode for node in nodes] == [0, 0, 0]
        assert counter.read_text() == "300"


@pytest.fixture
def gate():
    return MemoryLockBackend(note="gate")


@pytest.fixture
def namespace():
    return next(_namespaces)


@pytest.fixture
def database(shared_postgres, use_database, start, namespace):
    return start(use_database(shared_postgres.url), namespace)


@pytest.fixture
def stranger(database, start, namespace):
    """A session of another node."""
    return start("locks", namespace, note="node-b")


@pytest.fixture
def breakable(own_postgres, use_database, start):
    """A database that the test stops."""
    return start(use_database(own_postgres.url))


@pytest.fixture
def both(gate, database):
    return CombinedLockBackend([gate, database])


def names(backend):
    return [info.name for info in backend.held()]


def test_loser_at_the_database_gives_the_gate_back(both, gate, stranger):
    take(stranger, "schedule:1")
    assert take(both, "schedule:1") == {}
    assert names(gate) == []


def test_only_what_was_lost_at_the_database_is_given_back(both, gate, database, stranger):
    take(stranger, "schedule:2")
    assert set(take(both, "schedule:1", "schedule:2", "schedule:3")) == {"schedule:1", "schedule:3"}
    assert names(gate) == ["schedule:1", "schedule:3"]
    assert names(database) == ["schedule:1", "schedule:2", "schedule:3"]


def test_loser_at_the_gate_does_not_ask_the_database(gate, breakable, own_postgres):
    take(gate, "schedule:1")
    own_postgres.stop()
    assert take(CombinedLockBackend([gate, breakable]), "schedule:1") == {}


def test_lease_lost_at_the_database_ends_at_the_gate(both, gate, stranger):
    won = take(both, "schedule:1")
    stranger.force_release("schedule:1")
    assert both.renew(won.values(), LONG) == {}
    assert names(gate) == []


def test_lease_lost_at_the_gate_ends_at_the_database(both, gate, stranger):
    won = take(both, "schedule:1", "schedule:2")
    gate.force_release("schedule:1")
    assert set(both.renew(won.values(), LONG)) == {"schedule:2"}
    assert set(take(stranger, "schedule:1", "schedule:2")) == {"schedule:1"}


def test_database_that_is_away_gives_the_gate_back(gate, breakable, own_postgres):
    both = CombinedLockBackend([gate, breakable])
    own_postgres.stop()
    with pytest.raises(LockUnavailable):
        take(both, "schedule:1")
    assert names(gate) == []


def test_release_frees_the_gate_where_the_database_is_away(gate, breakable, own_postgres):
    both = CombinedLockBackend([gate, breakable])
    won = take(both, "schedule:1")
    own_postgres.stop()
    with pytest.raises(LockUnavailable):
        both.release(won.values())
    assert names(gate) == []


def test_lease_is_the_one_that_ends_first(both, gate, database):
    wanted = {"schedule:1": "5eed"}
    lease = both.acquire(wanted, LONG)["schedule:1"]
    first = gate.acquire(wanted, LONG + 5000)["schedule:1"]
    second = database.acquire(wanted, LONG + 5000)["schedule:1"]
    assert lease.expires_at < first.expires_at < second.expires_at
    renewed = both.renew([lease], LONG)["schedule:1"]
    assert lease.expires_at < renewed.expires_at < first.expires_at


def test_lock_that_only_the_database_knows_is_shown(both, stranger):
    take(both, "schedule:1")
    take(stranger, "schedule:2")
    assert [info.note for info in both.held()] == ["gate", "node-b"]
    found = both.inspect(["schedule:2", "schedule:1", "schedule:3"])
    assert {name: info.note for name, info in found.items()} == {
        "schedule:2": "node-b",
        "schedule:1": "gate",
    }


def test_force_release_ends_the_lock_in_every_part(both, gate, stranger):
    take(stranger, "schedule:1")
    take(gate, "schedule:1")
    assert both.force_release("schedule:1") is True
    assert set(take(both, "schedule:1")) == {"schedule:1"}


def test_level_critical_is_made_of_the_gate_and_the_database(own_postgres, use_database, settings):
    settings.DISTCRON = {"LOCK_BACKEND": "memory", "LOCK_DATABASE": use_database(own_postgres.url)}
    level = get_level("critical", note="node-a")
    assert (level.backend.name, level.is_strict) == ("memory+database", True)
    assert set(take(level.backend, "schedule:1")) == {"schedule:1"}
    # Forgets the backends of the level, which ends their session.
    settings.DISTCRON = {}
    with own_postgres.connect() as link:
        assert link.execute(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        ).fetchone() == (0,)
