from __future__ import annotations

import copy
import socket

import pytest
from django.core.exceptions import ValidationError
from django.db import connections
from django_redis.cache import RedisCache
from redis.backoff import NoBackoff
from redis.retry import Retry

from distcron_app.lock_checks import check_lock_settings
from distcron_app.locks import level_names
from project.service_urls import cache_settings, database_settings
from tests.factories import make_schedule

URL = "redis://127.0.0.1:1/9"


class OwnCache(RedisCache):
    """What a project may derive."""


@pytest.fixture
def caches(settings):
    """The good settings, which a test spoils in one place."""
    settings.DISTCRON = {"LOCK_BACKEND": "redis"}
    return copy.deepcopy(cache_settings(URL))


@pytest.fixture
def check(settings):
    """Put the caches in force and return what the check finds, by id, each at most once."""

    def check(caches=None):
        if caches is not None:
            settings.CACHES = caches
        found = check_lock_settings(None)
        by_id = {message.id: message for message in found}
        assert len(by_id) == len(found)
        return by_id

    return check


def locks_of(caches):
    return caches["distcron"]


def test_recommended_settings_pass(caches, check):
    assert check(caches) == {}


def test_no_connection_is_opened(caches, check, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert check(caches) == {}


def test_missing_alias(caches, check):
    del caches["distcron"]
    message = check(caches)["distcron.E010"]
    assert "CACHES['distcron'] is missing" in message.msg
    assert "django_redis.cache.RedisCache" in message.hint


def test_alias_of_django_itself(caches, check):
    locks_of(caches)["BACKEND"] = "django.core.cache.backends.redis.RedisCache"
    locks_of(caches)["OPTIONS"] = {}
    message = check(caches)["distcron.E011"]
    assert "'django.core.cache.backends.redis.RedisCache'" in message.msg
    assert "Use django_redis.cache.RedisCache" in message.hint


def test_backend_that_cannot_be_imported(caches, check):
    locks_of(caches)["BACKEND"] = "nowhere.Cache"
    assert set(check(caches)) == {"distcron.E011"}


def test_subclass_of_the_django_redis_cache_is_accepted(caches, check):
    locks_of(caches)["BACKEND"] = f"{__name__}.OwnCache"
    assert check(caches) == {}


def test_ignored_exceptions_on_the_alias(caches, check):
    locks_of(caches)["OPTIONS"]["IGNORE_EXCEPTIONS"] = True
    assert set(check(caches)) == {"distcron.E012"}


def test_ignored_exceptions_everywhere(caches, check, settings):
    settings.DJANGO_REDIS_IGNORE_EXCEPTIONS = True
    assert set(check(caches)) == {"distcron.E012"}


def test_ignored_exceptions_everywhere_but_here(caches, check, settings):
    settings.DJANGO_REDIS_IGNORE_EXCEPTIONS = True
    locks_of(caches)["OPTIONS"]["IGNORE_EXCEPTIONS"] = False
    assert check(caches) == {}


@pytest.mark.parametrize(
    "location",
    [
        "redis://127.0.0.1:1/9",
        "redis://localhost:1/9",
        "redis://LOCALHOST:1/9?socket_timeout=2",
        "redis://user:secret@127.0.0.1:1?db=9",
        ["redis://127.0.0.1:1/9"],
    ],
)
def test_database_shared_with_another_alias(caches, check, location):
    caches["pages"] = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location}
    message = check(caches)["distcron.E013"]
    assert "CACHES['distcron'] and CACHES['pages'] share one Redis database" in message.msg
    assert "database number of its own" in message.hint


def test_database_number_in_the_options_of_django_itself(caches, check):
    caches["pages"] = {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": "redis://127.0.0.1:1",
        "OPTIONS": {"db": 9},
    }
    assert set(check(caches)) == {"distcron.E013"}


@pytest.mark.parametrize(
    "location", ["redis://127.0.0.1:1/8", "redis://127.0.0.1:2/9", "redis://cache:1/9"]
)
def test_other_database_or_server_is_no_sharing(caches, check, location):
    caches["pages"] = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location}
    assert check(caches) == {}


@pytest.mark.parametrize("option", ["SOCKET_TIMEOUT", "SOCKET_CONNECT_TIMEOUT"])
def test_missing_time_limit(caches, check, option):
    # A URL of its own, since django-redis keeps one pool per URL for the whole process.
    locks_of(caches)["LOCATION"] = f"redis://127.0.0.1:1/9?client_name=without-{option}"
    del locks_of(caches)["OPTIONS"][option]
    message = check(caches)["distcron.E014"]
    assert message.msg == f"CACHES['distcron'] has no {option}. A hung Redis stops the node."
    assert message.hint == f"Set {option} to 0.5 in the OPTIONS of this alias."


def test_time_limit_in_the_url_counts(caches, check):
    locks_of(caches)["LOCATION"] += "?socket_timeout=0.4&socket_connect_timeout=0.4"
    del locks_of(caches)["OPTIONS"]["SOCKET_TIMEOUT"]
    del locks_of(caches)["OPTIONS"]["SOCKET_CONNECT_TIMEOUT"]
    assert check(caches) == {}


def test_long_time_limit(caches, check):
    locks_of(caches)["LOCATION"] += "?client_name=slow"
    locks_of(caches)["OPTIONS"]["SOCKET_TIMEOUT"] = 5
    message = check(caches)["distcron.W010"]
    assert "SOCKET_TIMEOUT of CACHES['distcron'] is 5 s, more than 1 s" in message.msg


@pytest.mark.parametrize(
    "location",
    [
        ["redis://127.0.0.1:1/9", "redis://127.0.0.2:1/9"],
        "redis://127.0.0.1:1/9,redis://127.0.0.2:1/9",
    ],
)
def test_several_servers(caches, check, location):
    locks_of(caches)["LOCATION"] = location
    assert set(check(caches)) == {"distcron.E015"}


@pytest.mark.parametrize("engine", ["cache", "cached_db"])
def test_sessions_on_the_alias(caches, check, settings, engine):
    settings.SESSION_ENGINE = f"django.contrib.sessions.backends.{engine}"
    settings.SESSION_CACHE_ALIAS = "distcron"
    assert set(check(caches)) == {"distcron.E016"}


def test_sessions_on_another_alias(caches, check, settings):
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.cache"
    settings.SESSION_CACHE_ALIAS = "default"
    assert check(caches) == {}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("CLIENT_CLASS", "django_redis.client.ShardClient"),
        ("CLIENT_CLASS", "nowhere.Client"),
        ("REDIS_CLIENT_CLASS", "redis.cluster.RedisCluster"),
    ],
)
def test_client_that_cannot_lock(caches, check, option, value):
    locks_of(caches)["OPTIONS"][option] = value
    message = check(caches)["distcron.E017"]
    assert "CACHES['distcron']" in message.msg


def test_client_for_a_cluster_is_named(caches, check):
    locks_of(caches)["OPTIONS"]["REDIS_CLIENT_CLASS"] = "redis.cluster.RedisCluster"
    assert check(caches)["distcron.E017"].hint.endswith(
        "set CONNECTION_FACTORY to distcron_app.locks.cluster.ClusterConnectionFactory."
    )


@pytest.fixture
def cluster(caches):
    """Good settings of a Cluster."""
    locks_of(caches)["LOCATION"] = "redis://127.0.0.1:7001"
    locks_of(caches)["OPTIONS"] |= {
        "CONNECTION_FACTORY": "distcron_app.locks.cluster.ClusterConnectionFactory",
        "CLUSTER_NODES": [("127.0.0.1", 7002), ("127.0.0.1", 7003)],
    }
    return caches


def test_cluster_passes_without_a_connection(cluster, check, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert check(cluster) == {}


def test_cluster_without_time_limit(cluster, check):
    del locks_of(cluster)["OPTIONS"]["SOCKET_TIMEOUT"]
    assert "has no SOCKET_TIMEOUT" in check(cluster)["distcron.E014"].msg


def test_cluster_with_a_database_number(cluster, check):
    locks_of(cluster)["LOCATION"] += "/9"
    message = check(cluster)["distcron.E017"]
    assert message.msg == (
        "CACHES['distcron'] names a database number, but a Redis Cluster has only 0."
    )


@pytest.mark.parametrize(
    ("location", "client", "named"),
    [
        ("unix:///run/redis.sock", "django_redis.client.DefaultClient", "unix:///run/redis.sock"),
        ("redis://a:1", "django_redis.client.SentinelClient", "django_redis.client.SentinelClient"),
    ],
)
def test_cluster_that_is_something_else_too(cluster, check, location, client, named):
    locks_of(cluster)["LOCATION"] = location
    locks_of(cluster)["OPTIONS"]["CLIENT_CLASS"] = client
    message = check(cluster)["distcron.E017"]
    assert message.msg == (
        f"CACHES['distcron'] names a Redis Cluster and {named}. Only one can carry locks."
    )


def test_cache_on_another_node_of_the_same_cluster(cluster, check):
    cluster["default"] = {**locks_of(cluster), "LOCATION": "redis://localhost:7003"}
    assert "distcron.E013" in check(cluster)


@pytest.fixture
def trio(caches):
    """Good settings of a Sentinel trio."""
    locks_of(caches)["LOCATION"] = "redis://locks/9"
    locks_of(caches)["OPTIONS"] |= {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "CONNECTION_POOL_CLASS": "redis.sentinel.SentinelConnectionPool",
        "SENTINELS": [("127.0.0.1", port) for port in (7001, 7002, 7003)],
    }
    return caches


def test_sentinel_passes_without_a_connection(trio, check, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert check(trio) == {}


@pytest.mark.parametrize("limits", [{"password": "x"}, {"socket_timeout": 0.2}])
def test_sentinels_without_time_limit(trio, check, limits):
    locks_of(trio)["OPTIONS"]["SENTINEL_KWARGS"] = limits
    assert "A sentinel that hangs stops the node." in check(trio)["distcron.E014"].msg


def test_sentinels_with_time_limits(trio, check):
    limits = {"socket_timeout": 0.2, "socket_connect_timeout": 0.2, "password": "x"}
    locks_of(trio)["OPTIONS"]["SENTINEL_KWARGS"] = limits
    assert check(trio) == {}


def test_location_that_is_no_redis_url(caches, check):
    locks_of(caches)["LOCATION"] = "127.0.0.1:6379"
    message = check(caches)["distcron.E017"]
    assert "Redis URL must specify one of the following schemes" in message.msg
    assert message.hint == "Correct LOCATION and OPTIONS of this alias."


def test_pool_without_size(caches, check):
    del locks_of(caches)["OPTIONS"]["CONNECTION_POOL_KWARGS"]["max_connections"]
    assert set(check(caches)) == {"distcron.W011"}


@pytest.mark.parametrize("serializer", [None, "django_redis.serializers.pickle.PickleSerializer"])
def test_pickle(caches, check, serializer):
    del locks_of(caches)["OPTIONS"]["SERIALIZER"]
    if serializer:
        locks_of(caches)["OPTIONS"]["SERIALIZER"] = serializer
    message = check(caches)["distcron.W012"]
    assert message.hint == (
        "Set SERIALIZER to django_redis.serializers.json.JSONSerializer in its OPTIONS."
    )


def test_retries(caches, check):
    locks_of(caches)["OPTIONS"]["CONNECTION_POOL_KWARGS"]["retry"] = Retry(NoBackoff(), 3)
    message = check(caches)["distcron.W014"]
    assert "CACHES['distcron'] retries 3 times" in message.msg


def test_ttl_shorter_than_three_polls(caches, check, settings):
    settings.DISTCRON = {"LOCK_TTL_SECONDS": 5, "POLL_SECONDS": 2.0}
    message = check(caches)["distcron.W013"]
    assert "LOCK_TTL_SECONDS'] is 5 s, less than three times POLL_SECONDS (2 s)" in message.msg


def test_redis_alias_is_not_checked_where_locks_are_files(caches, check, settings, tmp_path):
    settings.DISTCRON = {"LOCK_BACKEND": "file", "LOCK_DIRECTORY": str(tmp_path / "locks")}
    del caches["distcron"]
    assert check(caches) == {}


def test_unsuitable_lock_folder(check, settings, tmp_path):
    tmp_path.chmod(0o777)
    settings.DISTCRON = {"LOCK_BACKEND": "file", "LOCK_DIRECTORY": str(tmp_path)}
    message = check()["distcron.E018"]
    assert "can be written by everyone, mode 777" in message.msg


def test_refused_settings_have_checks_of_their_own(check, settings):
    settings.DISTCRON = {"LOCK_BACKEND": "zookeeper"}
    assert check() == {}


class TestQuorum:
    @pytest.fixture
    def caches(self, settings):
        settings.DISTCRON = {"LOCK_BACKEND": "file", "QUORUM_ALIASES": ["r1", "r2", "r3"]}
        caches = copy.deepcopy(cache_settings(""))
        for number in (1, 2, 3):
            url = f"redis://127.0.0.{number}:1/9"
            caches[f"r{number}"] = copy.deepcopy(cache_settings(url))["distcron"]
        caches["r1"]["LOCATION"] = "redis://locks-1:1/9"
        return caches

    def test_three_servers_pass(self, caches, check):
        assert check(caches) == {}

    def test_missing_alias(self, caches, check):
        del caches["r2"]
        message = check(caches)["distcron.E010"]
        assert "CACHES['r2'] is missing, but DISTCRON['QUORUM_ALIASES'] names it" in message.msg

    def test_alias_without_raw_client(self, caches, check):
        caches["r2"] = caches["default"]
        assert set(check(caches)) == {"distcron.E011"}

    def test_ignored_exceptions(self, caches, check):
        caches["r3"]["OPTIONS"]["IGNORE_EXCEPTIONS"] = True
        assert "CACHES['r3']" in check(caches)["distcron.E012"].msg

    def test_no_time_limit(self, caches, check):
        caches["r3"]["LOCATION"] = "redis://127.0.0.77:1/9"
        del caches["r3"]["OPTIONS"]["SOCKET_TIMEOUT"]
        assert "CACHES['r3'] has no SOCKET_TIMEOUT" in check(caches)["distcron.E014"].msg

    def test_two_instances(self, caches, check, settings):
        settings.DISTCRON = {"LOCK_BACKEND": "file", "QUORUM_ALIASES": ["r1", "r2"]}
        message = check(caches)["distcron.E019"]
        assert "names 2 Redis instances" in message.msg

    def test_even_number(self, caches, check, settings):
        caches["r4"] = copy.deepcopy(caches["r3"])
        caches["r4"]["LOCATION"] = "redis://127.0.0.4:1/9"
        settings.DISTCRON = {"LOCK_BACKEND": "file", "QUORUM_ALIASES": ["r1", "r2", "r3", "r4"]}
        message = check(caches)["distcron.E020"]
        assert "An even number survives no more failures than 3" in message.msg

    def test_two_databases_of_one_server(self, caches, check):
        caches["r3"]["LOCATION"] = "redis://LOCKS-1:1/8"
        message = check(caches)["distcron.E021"]
        assert "'r3' and 'r1' are one Redis server, locks-1:1" in message.msg

    def test_one_alias_twice(self, caches, check, settings):
        settings.DISTCRON = {"LOCK_BACKEND": "file", "QUORUM_ALIASES": ["r1", "r2", "r1"]}
        message = check(caches)["distcron.E021"]
        assert "'r1' and 'r1' are one Redis server" in message.msg

    def test_sentinel_is_no_independent_instance(self, caches, check):
        caches["r3"]["OPTIONS"] |= {
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
            "SENTINELS": [("127.0.0.3", 1)],
        }
        message = check(caches)["distcron.E022"]
        assert "CACHES['r3']" in message.msg


@pytest.fixture
def sqlite_alias(db, tmp_path):
    """A SQLite as the alias ``files``, for as long as the test."""
    connections.settings["files"] = {
        **connections.settings["default"],
        **database_settings("", tmp_path),
    }
    yield "files"
    del connections.settings["files"]


def test_level_of_database_locks_on_a_database_without(caches, check, settings, sqlite_alias):
    settings.DISTCRON = {
        "LOCK_DATABASE": sqlite_alias,
        "LOCK_LEVELS": {"ledger": ["database"], "quick": ["redis", "memory"]},
    }
    found = check(caches)
    assert set(found) == {"distcron.E023"}
    assert found["distcron.E023"].msg == (
        "DISTCRON['LOCK_LEVELS']: Lock level 'ledger': needs a lock of the database for the "
        "length of a run, which SQLite does not have. Use PostgreSQL or MariaDB, or the level "
        "'standard'."
    )


def test_lock_database_that_is_not_there(caches, check, settings):
    settings.DISTCRON = {"LOCK_DATABASE": "ledger", "LOCK_LEVELS": {"strict": ["database"]}}
    found = check(caches)
    assert set(found) == {"distcron.E024"}
    assert found["distcron.E024"].msg == (
        "DISTCRON['LOCK_DATABASE'] is 'ledger', which is not in DATABASES."
    )
    assert found["distcron.E024"].hint == "Name one of default."


def test_lock_database_without_locks(caches, check, settings, sqlite_alias):
    settings.DISTCRON = {"LOCK_DATABASE": sqlite_alias}
    found = check(caches)
    assert set(found) == {"distcron.E025"}
    assert "which SQLite does not have" in found["distcron.E025"].msg


def test_level_that_the_database_cannot_carry_is_refused_at_save(settings, sqlite_alias):
    settings.DISTCRON = {"LOCK_DATABASE": sqlite_alias}
    schedule = make_schedule()
    schedule.lock_level = "critical"
    with pytest.raises(ValidationError) as refused:
        schedule.full_clean()
    assert refused.value.message_dict == {
        "lock_level": [
            "Lock level 'critical': needs a lock of the database for the length of a run, which "
            "SQLite does not have. Use PostgreSQL or MariaDB, or the level 'standard'."
        ]
    }
    assert "critical" not in level_names()


def test_level_of_a_lock_database_that_is_not_there_is_refused_at_save(settings, db):
    settings.DISTCRON = {"LOCK_DATABASE": "ledger"}
    schedule = make_schedule()
    schedule.lock_level = "critical"
    with pytest.raises(ValidationError) as refused:
        schedule.full_clean()
    assert refused.value.message_dict == {
        "lock_level": [
            "Lock level 'critical': DISTCRON['LOCK_DATABASE'] is 'ledger', which is not in "
            "DATABASES. Name one of default."
        ]
    }
    assert "critical" not in level_names()
