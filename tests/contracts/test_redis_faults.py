"""Redis that dies, hangs, forgets, fills up, or is touched by other hands."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest
from django.core.cache import caches
from django_redis import get_redis_connection

from distcron_app.errors import ConfigurationError, LockUnavailable
from distcron_app.locks import Lease, get_backend, schedule_lock_name
from distcron_app.locks.redis import RedisLockBackend
from project.service_urls import cache_settings
from tests.contracts.conftest import LOCK_DATABASE
from tests.contracts.lock_contract import LONG, take
from tests.services import redis_server, tcp_proxy, wait_for

KEY = "{test:lock}:schedule:1"
UNKNOWN = Lease(name="schedule:1", owner_token="f00d", expires_at=0.0)


@pytest.fixture
def backend(own_redis, use_redis):
    use_redis(own_redis.url_of(LOCK_DATABASE))
    return RedisLockBackend("distcron", "test", note="node-a")


@pytest.fixture
def client(own_redis):
    with own_redis.client(LOCK_DATABASE) as client:
        yield client


@pytest.fixture
def proxy(own_redis):
    with tcp_proxy(own_redis.port) as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy, use_caches):
    """A backend behind the proxy; a link that is cut needs no time limit."""
    return _behind(proxy, use_caches, seconds=2.0)


@pytest.fixture
def hasty(proxy, use_caches):
    """A backend behind the proxy that waits half a second."""
    return _behind(proxy, use_caches, seconds=0.5)


def _behind(proxy, use_caches, *, seconds):
    caches = cache_settings(f"redis://127.0.0.1:{proxy.port}/{LOCK_DATABASE}")
    caches["distcron"]["OPTIONS"]["SOCKET_TIMEOUT"] = seconds
    use_caches(caches)
    backend = RedisLockBackend("distcron", "test", note="node-a")
    # Redis knows the scripts from here on: the next reply is that of a script that ran.
    won = take(backend, "schedule:0")
    backend.renew(won.values(), LONG)
    backend.release(won.values())
    return backend


def test_acquire_whose_reply_is_lost_still_wins(proxied, proxy, client):
    proxy.drop_next_reply(b"EVAL")
    won = take(proxied, "schedule:1")
    assert proxy.dropped == 1
    assert client.get(KEY).startswith(won["schedule:1"].owner_token.encode())


def test_renew_whose_reply_is_lost_still_renews(proxied, proxy):
    """OP-33: the lease of a long job outlives a connection that is lost once."""
    won = take(proxied, "schedule:1")
    proxy.drop_next_reply(b"EVAL")
    assert set(proxied.renew(won.values(), LONG)) == {"schedule:1"}
    assert proxy.dropped == 1


def test_release_whose_reply_is_lost_still_releases(proxied, proxy, client):
    """OP-31: within the call."""
    won = take(proxied, "schedule:1")
    proxy.drop_next_reply(b"EVAL")
    proxied.release(won.values())
    assert proxy.dropped == 1
    assert client.get(KEY) is None


def test_renew_over_a_connection_that_was_cut_still_renews(proxied, proxy):
    """OP-33"""
    won = take(proxied, "schedule:1")
    proxy.cut()
    assert set(proxied.renew(won.values(), LONG)) == {"schedule:1"}


def test_release_that_failed_can_be_tried_again_with_the_same_lease(proxied, proxy, client):
    """OP-31: the error says that Redis was not reached, and the token is not forgotten."""
    won = take(proxied, "schedule:1")
    proxy.refuse()
    with pytest.raises(LockUnavailable, match="'redis': unavailable, ConnectionError: Error 111"):
        proxied.release(won.values())
    assert client.exists(KEY)
    proxy.accept()
    assert proxied.release(won.values()) == {"schedule:1"}
    assert not client.exists(KEY)


def test_call_that_is_interrupted_does_not_answer_the_next_one(proxied, proxy):
    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    proxied.acquire({"schedule:1": "5eed"}, LONG)
    before = signal.signal(signal.SIGALRM, interrupt)
    proxy.delay_seconds = 0.3
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(Interrupted):
            proxied.inspect(["schedule:2"])
    finally:
        signal.signal(signal.SIGALRM, before)
    proxy.delay_seconds = 0
    assert set(proxied.inspect(["schedule:1"])) == {"schedule:1"}


def test_reply_that_never_comes_is_asked_for_once_more(hasty, proxy):
    proxy.drop_next_reply(b"EVAL", hang=True)
    assert set(take(hasty, "schedule:1")) == {"schedule:1"}
    assert proxy.dropped == 1


def test_tokens_of_a_failed_acquire_are_released_at_the_next_contact(hasty, proxy, client):
    proxy.delay_seconds = 1.5
    with pytest.raises(LockUnavailable):
        take(hasty, "schedule:1")
    wait_for(lambda: client.get(KEY), what="the lock that nobody knows of")
    proxy.delay_seconds = 0
    proxy.cut()
    take(hasty, "schedule:2")
    assert client.get(KEY) is None


def test_one_batch_is_one_round_trip(hasty, proxy):
    proxy.delay_seconds = 0.2
    started = time.monotonic()
    assert len(take(hasty, *map(schedule_lock_name, range(1, 1201)))) == 1200
    assert time.monotonic() - started < 0.4


def test_script_flush_changes_nothing(backend, client):
    """F11."""
    names = [schedule_lock_name(number) for number in range(1001)]
    won = take(backend, *names)
    client.script_flush()
    assert len(backend.renew(won.values(), LONG)) == 1001
    client.script_flush()
    assert len(backend.release(won.values())) == 1001


def test_flushall_loses_the_lease(backend, client):
    won = take(backend, "schedule:1")
    client.flushall()
    assert backend.renew(won.values(), LONG) == {}
    assert backend.held() == []


def test_dead_redis_is_unavailable_at_once(backend, own_redis):
    take(backend, "schedule:1")
    own_redis.kill9()
    started = time.monotonic()
    with pytest.raises(LockUnavailable, match="Lock backend 'redis': unavailable, Connection"):
        take(backend, "schedule:2")
    assert time.monotonic() - started < 0.5


@pytest.mark.parametrize(
    "call",
    [
        lambda backend: backend.held(),
        lambda backend: backend.inspect(["schedule:1"]),
        lambda backend: backend.force_release("schedule:1"),
        lambda backend: backend.ping(),
        lambda backend: backend.release([UNKNOWN]),
        lambda backend: backend.renew([UNKNOWN], LONG),
    ],
)
def test_every_call_reports_a_dead_redis(backend, own_redis, call):
    own_redis.kill9()
    with pytest.raises(LockUnavailable):
        call(backend)


def test_restarted_redis_is_used_again(backend, own_redis):
    won = take(backend, "schedule:1")
    own_redis.kill9()
    own_redis.start()
    assert backend.renew(won.values(), LONG) == {}
    assert set(take(backend, "schedule:1")) == {"schedule:1"}


def test_restart_with_append_only_file_keeps_the_lock(use_redis):
    with redis_server("--appendfsync", "always", appendonly=True) as server:
        use_redis(server.url_of(LOCK_DATABASE))
        backend = RedisLockBackend("distcron", "test")
        won = take(backend, "schedule:1")
        server.kill9()
        server.start()
        assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}


@pytest.mark.parametrize("call", ["acquire", "renew", "release"])
def test_hung_redis_is_unavailable_within_a_second(backend, own_redis, call):
    leases = take(backend, "schedule:1").values()
    own_redis.pause()
    started = time.monotonic()
    with pytest.raises(LockUnavailable, match="Timeout"):
        if call == "acquire":
            take(backend, "schedule:2")
        elif call == "renew":
            backend.renew(leases, LONG)
        else:
            backend.release(leases)
    assert time.monotonic() - started < 1.2


def test_hung_redis_costs_the_loop_one_second_once(backend, own_redis):
    guarded = get_backend()
    leases = take(guarded, "schedule:1").values()
    own_redis.pause()
    started = time.monotonic()
    for call in (
        lambda: take(guarded, "schedule:2"),
        lambda: guarded.renew(leases, LONG),
        lambda: guarded.release(leases),
        guarded.held,
    ):
        with pytest.raises(LockUnavailable):
            call()
    assert time.monotonic() - started < 1.25
    own_redis.resume()
    wait_for(lambda: guarded.state == "closed", what="the breaker to close by itself")
    assert set(guarded.renew(leases, LONG)) == {"schedule:1"}


def test_breaker_opens_and_heals(backend, own_redis):
    guarded = get_backend()
    guarded.ping()
    own_redis.pause()
    with pytest.raises(LockUnavailable):
        take(guarded, "schedule:1")
    assert guarded.state == "open"
    started = time.monotonic()
    with pytest.raises(LockUnavailable, match="not asked, down for 0"):
        take(guarded, "schedule:1")
    assert time.monotonic() - started < 0.05
    own_redis.resume()
    wait_for(lambda: guarded.state == "closed", what="the breaker to close")
    assert set(take(guarded, "schedule:1")) == {"schedule:1"}


def test_clearing_the_default_cache_frees_no_lock(backend, own_redis, settings):
    """F6."""
    settings.CACHES = {
        **settings.CACHES,
        "default": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": own_redis.url_of(1),
        },
    }
    won = take(backend, "schedule:1")
    caches["default"].set("page", "content")
    caches["default"].clear()
    assert caches["default"].get("page") is None
    assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}
    get_redis_connection("default").connection_pool.disconnect()


def test_values_are_plain_text(backend, client):
    lease = take(backend, "schedule:1")["schedule:1"]
    seconds, microseconds = client.time()
    token, granted_at, *rest = client.get(KEY).decode().split("|")
    assert (token, rest) == (lease.owner_token, ["60000", "0", "node-a"])
    assert 0 <= seconds * 1000 + microseconds // 1000 - int(granted_at) < 1000


def test_keys_are_built_from_ids(backend, client):
    take(backend, schedule_lock_name(42))
    assert sorted(client.keys()) == [b"{test:lock}-index", b"{test:lock}:schedule:42"]


def test_every_lock_has_a_ttl(backend, client):
    take(backend, "schedule:1", ttl_ms=5000)
    assert 0 < client.pttl(KEY) <= 5000


def test_namespaces_do_not_exclude_each_other(backend):
    take(backend, "schedule:1")
    stranger = RedisLockBackend("distcron", "other")
    assert set(take(stranger, "schedule:1")) == {"schedule:1"}
    assert [info.name for info in stranger.held()] == ["schedule:1"]


def test_planted_key_of_another_type_blocks_only_its_name(backend, client):
    client.rpush(KEY, "planted")
    assert set(take(backend, "schedule:1", "schedule:2")) == {"schedule:2"}
    info = backend.inspect(["schedule:1"])["schedule:1"]
    assert (info.owner_token, info.ttl_ms) == (None, None)


def test_planted_key_without_ttl_can_be_force_released(backend, client):
    client.set(KEY, "planted")
    assert backend.inspect(["schedule:1"])["schedule:1"].ttl_ms is None
    assert take(backend, "schedule:1") == {}
    assert backend.force_release("schedule:1") is True
    assert set(take(backend, "schedule:1")) == {"schedule:1"}


def test_planted_pickle_is_never_loaded(backend, client):
    # cbuiltins.exec: loading it would raise in this test.
    client.set(KEY, b"cbuiltins\nexec\n(S'raise SystemExit(3)'\ntR.")
    assert take(backend, "schedule:1") == {}
    assert "builtins" in backend.inspect(["schedule:1"])["schedule:1"].owner_token


@pytest.fixture
def fill(client):
    def fill() -> None:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", client.info("memory")["used_memory"] - 1)

    return fill


def test_full_redis_refuses_to_acquire(backend, fill):
    fill()
    with pytest.raises(LockUnavailable, match="OutOfMemoryError"):
        take(backend, "schedule:1")


def test_full_redis_still_renews_and_releases(backend, client, fill):
    won = take(backend, "schedule:1")
    fill()
    assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}
    assert backend.release(won.values()) == {"schedule:1"}
    assert client.get(KEY) is None


def test_full_redis_behind_the_breaker_still_renews_and_releases(backend, fill):
    guarded = get_backend()
    won = take(guarded, "schedule:1")
    fill()
    for _ in range(2):
        with pytest.raises(LockUnavailable, match="OutOfMemoryError"):
            take(guarded, "schedule:2")
    assert guarded.state == "open"
    assert set(guarded.renew(won.values(), LONG)) == {"schedule:1"}
    assert guarded.release(won.values()) == {"schedule:1"}
    guarded.close()


@pytest.fixture
def spoil(client, own_redis, fill):
    """Make Redis refuse writes, and still answer."""

    def misconf() -> None:
        client.config_set("save", "3600 1")
        # A folder in the place of the file: even root cannot rename a file onto it.
        (own_redis.folder / "dump.rdb").mkdir()
        (own_redis.folder / "dump.rdb" / "in-the-way").touch()
        client.config_set("shutdown-on-sigterm", "nosave force")
        client.set("dirty", "1")
        client.bgsave()
        wait_for(
            lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err",
            what="the failed save",
        )

    def no_authority() -> None:
        client.execute_command("ACL SETUSER default -@all +info")

    return {
        "MISCONF": misconf,
        "OutOfMemoryError": fill,
        "ReadOnlyError": lambda: client.replicaof("127.0.0.1", 1),
        "NoPermissionError": no_authority,
    }


@pytest.mark.parametrize(
    "error", ["MISCONF", "OutOfMemoryError", "ReadOnlyError", "NoPermissionError"]
)
def test_redis_that_refuses_is_an_alarm_and_a_lost_race_is_none(backend, spoil, error):
    """OP-41: "not acquired" and "Redis refused" are two results."""
    take(backend, "schedule:1")
    assert take(backend, "schedule:1") == {}
    spoil[error]()
    with pytest.raises(LockUnavailable, match=error) as caught:
        take(backend, "schedule:2")
    assert caught.value.refused is True
    with pytest.raises(LockUnavailable, match=error):
        backend.ping()


def test_redis_that_wants_a_password_is_unavailable(backend, client):
    take(backend, "schedule:1")
    client.config_set("requirepass", "secret")
    client.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(LockUnavailable, match="AuthenticationError"):
        take(backend, "schedule:2")


def test_redis_that_loads_its_data_is_unavailable_and_then_keeps_the_locks(use_redis):
    """F11."""
    slow = ("--key-load-delay", "5000", "--loading-process-events-interval-bytes", "1024")
    with redis_server("--appendfsync", "always", *slow, appendonly=True) as server:
        use_redis(server.url_of(LOCK_DATABASE))
        backend = RedisLockBackend("distcron", "test")
        won = take(backend, "schedule:1")
        with server.client(LOCK_DATABASE) as client, client.pipeline() as pipe:
            for number in range(300):
                pipe.set(f"other:{number}", "x" * 100)
            pipe.execute()
            client.bgrewriteaof()
            wait_for(
                lambda: not client.info("persistence")["aof_rewrite_in_progress"], what="the file"
            )
        server.kill9()
        starting = threading.Thread(target=server.start)
        starting.start()
        wait_for(lambda: "BusyLoadingError" in _refusal(backend), 20, "an answer while it loads")
        starting.join()
        assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}


def test_lock_that_redis_evicted_is_noticed_as_lost(backend, client):
    won = take(backend, "schedule:1")
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 1_000_000)

    def is_evicted() -> bool:
        for number in range(200):
            client.set(f"page:{time.monotonic_ns()}:{number}", "x" * 1000)
        return not client.exists(KEY)

    wait_for(is_evicted, 20, "the eviction")
    assert backend.renew(won.values(), LONG) == {}
    client.config_set("maxmemory", 0)
    assert set(take(backend, "schedule:1")) == {"schedule:1"}


def test_kept_connection_is_one_and_goes_back_to_the_pool(backend):
    pool = get_redis_connection("distcron").connection_pool
    take(backend, "schedule:1")
    take(backend, "schedule:2")
    in_use = len(pool._in_use_connections)
    backend.close()
    assert (in_use, len(pool._in_use_connections)) == (1, 0)
    forgotten = RedisLockBackend("distcron", "test")
    take(forgotten, "schedule:3")
    del forgotten
    gc.collect()
    assert len(pool._in_use_connections) == 0


def test_connection_that_broke_is_given_back_once(proxied, proxy):
    """Else another thread would get it out of the pool and read the answers of the first."""
    take(proxied, "schedule:1")
    proxy.cut()
    take(proxied, "schedule:2")
    gc.collect()
    pool = get_redis_connection("distcron").connection_pool
    assert (len(pool._in_use_connections), pool._available_connections) == (1, [])


def test_forked_child_does_not_use_its_parent_s_connection(backend):
    won = take(backend, "schedule:1")
    child = os.fork()
    if child == 0:
        # Ends a child that waits for a lock of its parent.
        signal.alarm(20)
        try:
            for number in range(200):
                backend.acquire({f"child:{number}": "c"}, LONG)
            names = [info.name for info in backend.held()]
            os._exit(0 if len(names) == 201 else 3)
        finally:
            os._exit(4)
    for _ in range(200):
        assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}
    assert os.waitpid(child, 0)[1] == 0
    assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}


def test_node_label_that_is_no_text_is_stored_readably(backend):
    strange = RedisLockBackend("distcron", "test", note="a\udcff|b")
    take(strange, "schedule:1")
    assert strange.inspect(["schedule:1"])["schedule:1"].note == "a?|b"


def test_alias_without_time_limit_is_refused(own_redis, settings):
    settings.CACHES = {
        "distcron": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": own_redis.url_of(3)}
    }
    settings.DISTCRON = {"LOCK_BACKEND": "redis"}
    with pytest.raises(ConfigurationError, match="has no time limit"):
        get_backend()


def test_missing_alias_is_refused(settings):
    settings.CACHES = {}
    settings.DISTCRON = {"LOCK_BACKEND": "redis"}
    with pytest.raises(ConfigurationError, match="'distcron' has no usable Redis client"):
        get_backend()


def _refusal(backend) -> str:
    try:
        backend.ping()
    except LockUnavailable as error:
        return str(error)
    return ""
