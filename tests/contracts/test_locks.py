from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks.file import FileLockBackend
from distcron_app.locks.memory import MemoryLockBackend
from project.service_urls import cache_settings
from tests.contracts.conftest import (
    LOCK_DATABASE,
    cluster_caches,
    lock_backend,
    sentinel_caches,
)
from tests.contracts.lock_contract import LONG, SHORT, LockContract, spawn_node, take
from tests.quorum import quorum_caches
from tests.services import wait_for


class RedisContract(LockContract):
    @pytest.fixture
    def server(self):
        """The server that holds the locks."""
        raise NotImplementedError

    @pytest.fixture
    def database(self):
        return LOCK_DATABASE

    @pytest.fixture
    def caches(self, server):
        return cache_settings(server.url_of(LOCK_DATABASE))

    @pytest.fixture
    def backend(self, server, database, caches, use_caches):
        with server.client(database) as client:
            client.flushdb()
        use_caches(caches)
        return lock_backend()

    @pytest.fixture
    def other(self, backend):
        return lock_backend("node-b")

    @pytest.fixture
    def node_settings(self, caches):
        return {"CACHES": caches, "DISTCRON": {"NAMESPACE": "test"}}

    def test_new_lock_shows_its_grant(self, backend):
        take(backend, "schedule:1", ttl_ms=5000)
        info = backend.inspect(["schedule:1"])["schedule:1"]
        assert (info.granted_ms, info.renewals) == (5000, 0)
        assert 0 <= info.age_ms < 1000

    def test_renewed_lock_shows_the_last_grant_and_the_age_since_the_first(self, backend):
        won = take(backend, "schedule:1", ttl_ms=5000)
        wait_for(lambda: backend.inspect(won)["schedule:1"].age_ms >= 30, what="an age of 30 ms")
        for _ in range(11):
            assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}
        info = backend.inspect(["schedule:1"])["schedule:1"]
        assert (info.granted_ms, info.renewals, info.note) == (60_000, 11, "node-a")
        assert 30 <= info.age_ms < 1000
        assert 59_000 < info.ttl_ms <= 60_000

    def test_holder_that_wakes_after_its_ttl_cannot_extend_the_next_one_s_lock(
        self, backend, other, server, database
    ):
        """OP-23: no extension without comparing the token."""
        late = take(backend, "schedule:1", ttl_ms=SHORT)["schedule:1"]
        self.wait_until_expired(late, backend)
        lease = take(other, "schedule:1", ttl_ms=10_000)["schedule:1"]
        assert backend.renew([late], LONG) == {}
        with server.client(database) as client:
            key = "{test:lock}:schedule:1"
            assert client.get(key).startswith(lease.owner_token.encode())
            assert client.pttl(key) <= 10_000

    def test_index_drops_what_expired(self, backend, server, database):
        lease = take(backend, "schedule:1", ttl_ms=SHORT)["schedule:1"]
        self.wait_until_expired(lease, backend)
        take(backend, "schedule:2")
        with server.client(database) as client:
            assert client.zrange("{test:lock}-index", 0, -1) == [b"{test:lock}:schedule:2"]

    def test_released_locks_leave_nothing_behind(self, backend, server, database):
        backend.release(take(backend, "schedule:1").values())
        take(backend, "schedule:2")
        backend.force_release("schedule:2")
        with server.client(database) as client:
            assert client.keys() == []


class TestRedisLocks(RedisContract):
    @pytest.fixture
    def server(self, shared_redis):
        return shared_redis


class TestValkeyLocks(RedisContract):
    @pytest.fixture
    def server(self, shared_valkey):
        return shared_valkey


class TestSentinelLocks(RedisContract):
    @pytest.fixture
    def server(self, shared_trio):
        return shared_trio.primary

    @pytest.fixture
    def caches(self, shared_trio):
        return sentinel_caches(shared_trio)


class TestClusterLocks(RedisContract):
    @pytest.fixture
    def server(self, shared_cluster):
        return shared_cluster.owner_of("{test:lock}")

    @pytest.fixture
    def database(self):
        return 0

    @pytest.fixture
    def caches(self, shared_cluster):
        return cluster_caches(shared_cluster)


class QuorumContract(LockContract):
    drift_seconds = 0.102
    level = "quorum"
    # Split votes make contention slow, and libfaketime makes the servers slow.
    rounds = 30
    instance_count = 3

    @pytest.fixture
    def farm(self, make_farm):
        return make_farm(self.instance_count)

    @pytest.fixture
    def backend(self, farm):
        return farm.backend(note="node-a")

    @pytest.fixture
    def other(self, farm):
        return farm.backend(note="node-b")

    @pytest.fixture
    def node_settings(self, farm):
        distcron = {
            "NAMESPACE": "test",
            "QUORUM_ALIASES": farm.aliases,
            "QUORUM_RETRIES": 0,
            "LOCK_TTL_SECONDS": 60,
            "HEARTBEAT_SECONDS": 5,
        }
        return {"CACHES": quorum_caches(farm.ports), "DISTCRON": distcron}

    def test_released_locks_leave_nothing_behind(self, backend, farm):
        backend.release(take(backend, "schedule:1").values())
        take(backend, "schedule:2")
        backend.force_release("schedule:2")
        for server in farm.servers:
            with server.client(LOCK_DATABASE) as client:
                assert client.keys() == [b"{test:lock}-born"]

    def test_ttl_longer_than_restarted_instances_are_kept_out_is_refused(self, backend):
        with pytest.raises(ValueError, match="Lock TTL: got 60001 ms"):
            take(backend, "schedule:1", ttl_ms=60_001)


class TestQuorumOfThree(QuorumContract):
    pass


class TestQuorumOfFive(QuorumContract):
    instance_count = 5


class TestMemoryLocks(LockContract):
    @pytest.fixture
    def backend(self):
        return MemoryLockBackend(note="node-a")

    @pytest.fixture
    def other(self, backend):
        return backend

    def test_ttl_follows_the_given_clock(self):
        class HandClock(Clock):
            seconds = 100.0

            def monotonic(self) -> float:
                return self.seconds

        clock = HandClock()
        backend = MemoryLockBackend(clock=clock)
        lease = take(backend, "schedule:1", ttl_ms=5000)["schedule:1"]
        clock.seconds = 104.999
        assert take(backend, "schedule:1") == {}
        clock.seconds = 105.0
        assert backend.renew([lease], 5000) == {}
        assert set(take(backend, "schedule:1")) == {"schedule:1"}


class TestFileLocks(LockContract):
    batch_size = 400

    @pytest.fixture
    def folder(self, tmp_path):
        return tmp_path / "locks"

    @pytest.fixture
    def backend(self, folder):
        backend = FileLockBackend(str(folder), note="node-a")
        yield backend
        backend.close()

    @pytest.fixture
    def other(self, folder):
        backend = FileLockBackend(str(folder), note="node-b")
        yield backend
        backend.close()

    @pytest.fixture
    def node_settings(self, folder):
        return {"DISTCRON": {"LOCK_BACKEND": "file", "LOCK_DIRECTORY": str(folder)}}

    def wait_until_expired(self, lease, holder):
        super().wait_until_expired(lease, holder)
        # Any call of the holder drops what has expired.
        holder.inspect([])

    @pytest.fixture
    def holder(self, node_settings):
        node = spawn_node(settings=node_settings, hold="schedule:1")
        assert node.stdout.readline() == "held\n"
        yield node
        node.kill()
        node.communicate()

    def test_folder_is_private(self, backend, folder):
        take(backend, "schedule:1")
        assert folder.stat().st_mode & 0o777 == 0o700

    def test_released_lock_leaves_no_file(self, backend, folder):
        backend.release(take(backend, "schedule:1").values())
        assert os.listdir(folder) == []

    def test_kill9_of_the_holder_frees_its_lock(self, holder, other):
        assert take(other, "schedule:1") == {}
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert other.held() == []
        assert set(take(other, "schedule:1")) == {"schedule:1"}

    def test_paused_holder_keeps_its_lock(self, holder, other):
        holder.send_signal(signal.SIGSTOP)
        assert take(other, "schedule:1") == {}
        holder.send_signal(signal.SIGCONT)

    def test_holder_keeps_an_expired_lock_until_its_next_call(self, backend, other):
        lease = take(backend, "schedule:1", ttl_ms=SHORT)["schedule:1"]
        LockContract.wait_until_expired(self, lease, backend)
        assert take(other, "schedule:1") == {}
        backend.inspect([])
        assert set(take(other, "schedule:1")) == {"schedule:1"}

    def test_forked_child_does_not_keep_the_lock(self, node_settings, other):
        node = spawn_node(settings=node_settings, hold="schedule:1", fork=True)
        assert node.stdout.readline() == "held\n"
        assert take(other, "schedule:1") == {}
        os.kill(node.pid, signal.SIGKILL)
        node.wait()
        try:
            # The child lets go of it when it runs first, which may be after its parent's end.
            wait_for(lambda: take(other, "schedule:1"), what="the lock")
        finally:
            # Ends the child, which waits for the end of its input.
            node.communicate()

    def test_deleted_file_loses_the_lease(self, backend, other, folder):
        won = take(backend, "schedule:1")
        (folder / "schedule:1.lock").unlink()
        assert set(take(other, "schedule:1")) == {"schedule:1"}
        assert backend.renew(won.values(), 1000) == {}
        assert backend.release(won.values()) == set()
        assert (folder / "schedule:1.lock").exists()

    def test_unreadable_content_still_shows_the_lock(self, backend, other, folder):
        take(backend, "schedule:1")
        Path(folder / "schedule:1.lock").write_text("{half a rec")
        (info,) = other.held()
        assert (info.owner_token, info.note, info.ttl_ms) == (None, "", None)

    def test_folder_that_others_can_write_is_refused(self, backend, folder):
        folder.mkdir()
        folder.chmod(0o777)
        with pytest.raises(LockUnavailable, match="can be written by everyone, mode 777"):
            take(backend, "schedule:1")

    def test_file_in_place_of_the_folder_is_refused(self, backend, folder):
        folder.write_text("")
        with pytest.raises(LockUnavailable, match="is not a folder"):
            take(backend, "schedule:1")

    def test_symbolic_link_in_place_of_the_folder_is_refused(self, backend, folder, tmp_path):
        folder.symlink_to(tmp_path)
        with pytest.raises(LockUnavailable, match="is not a folder"):
            take(backend, "schedule:1")

    def test_too_few_file_descriptors_take_nothing(self, backend, other, folder):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        names = [f"schedule:{number}" for number in range(200)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
        try:
            with pytest.raises(LockUnavailable, match="Too many open files"):
                take(backend, *names)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert list(take(other, *names)) == names
