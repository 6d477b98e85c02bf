from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from django_redis import get_redis_connection

from distcron_app.clock import Clock
from distcron_app.locks.database import DatabaseLockBackend
from distcron_app.locks.redis import RedisLockBackend
from project.service_urls import cache_settings, database_settings
from tests.quorum import LOCK_DATABASE, farm, five_valkeys, make_farm
from tests.services import (
    MariaServer,
    PostgresCluster,
    RedisCluster,
    RedisServer,
    SentinelTrio,
    maria_server,
    postgres_cluster,
    redis_cluster,
    redis_server,
    sentinel_trio,
    valkey_server,
)

__all__ = ["LOCK_DATABASE", "farm", "five_valkeys", "make_farm"]


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """A Redis that no test breaks."""
    with redis_server() as server:
        yield server


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[RedisServer]:
    """A Valkey that no test breaks."""
    with valkey_server() as server:
        yield server


@pytest.fixture(scope="session")
def shared_trio() -> Iterator[SentinelTrio]:
    """A Sentinel trio that no test breaks."""
    with sentinel_trio() as trio:
        yield trio


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[RedisCluster]:
    """A Cluster of three primaries that no test breaks."""
    with redis_cluster() as cluster:
        yield cluster


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis for one test, which may break it."""
    with redis_server() as server:
        yield server


@pytest.fixture
def own_trio() -> Iterator[SentinelTrio]:
    """A Sentinel trio for one test."""
    with sentinel_trio() as trio:
        yield trio


@pytest.fixture
def own_cluster() -> Iterator[RedisCluster]:
    """A Cluster of three primaries without replicas for one test."""
    with redis_cluster() as cluster:
        yield cluster


@pytest.fixture
def use_caches(settings) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Put CACHES in force; the connections of the locks are closed after the test."""

    def use(caches: dict[str, Any]) -> None:
        settings.CACHES = caches
        settings.DISTCRON = {"LOCK_BACKEND": "redis", "NODE_NAME": "node-a"}

    yield use
    client = get_redis_connection("distcron")
    if hasattr(client, "connection_pool"):
        client.connection_pool.disconnect()


@pytest.fixture
def use_redis(use_caches) -> Callable[[str], None]:
    """Point the alias of the locks at a URL; its connections are closed after the test."""
    return lambda url: use_caches(cache_settings(url))


def sentinel_caches(trio: SentinelTrio) -> dict[str, Any]:
    """Return CACHES whose locks are kept by ``trio``."""
    # The name keeps the pool apart from that of another trio, since pools go by URL.
    caches = cache_settings(f"redis://{trio.SERVICE}/{LOCK_DATABASE}?client_name={id(trio)}")
    caches["distcron"]["OPTIONS"] |= {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "CONNECTION_POOL_CLASS": "redis.sentinel.SentinelConnectionPool",
        "SENTINELS": [("127.0.0.1", sentinel.port) for sentinel in trio.sentinels],
    }
    return caches


def cluster_caches(cluster: RedisCluster) -> dict[str, Any]:
    """Return CACHES whose locks are kept by ``cluster``."""
    caches = cache_settings(cluster.url)
    caches["distcron"]["OPTIONS"] |= {
        "CONNECTION_FACTORY": "distcron_app.locks.cluster.ClusterConnectionFactory",
        "CLUSTER_NODES": [("127.0.0.1", server.port) for server in cluster.servers[1:]],
    }
    return caches


def lock_backend(note: str = "node-a") -> RedisLockBackend:
    """Return a backend on the alias in force."""
    return RedisLockBackend("distcron", "test", note=note)


@pytest.fixture(scope="session")
def shared_postgres() -> Iterator[PostgresCluster]:
    """A PostgreSQL that no test breaks."""
    with postgres_cluster() as server:
        yield server


@pytest.fixture(scope="session")
def shared_maria() -> Iterator[MariaServer]:
    """A MariaDB that no test breaks."""
    with maria_server() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[PostgresCluster]:
    """A PostgreSQL for one test, which may break it."""
    with postgres_cluster() as server:
        yield server


@pytest.fixture
def use_database() -> Iterator[Callable[..., str]]:
    """Give the alias ``locks`` a URL; return the alias."""

    def use(url: str, **options: Any) -> str:
        given = {**connections.settings["default"], **database_settings(url, Path())}
        given["OPTIONS"] = {**given["OPTIONS"], **options}
        connections.settings["locks"] = given
        return "locks"

    yield use
    connections.settings.pop("locks", None)
    if hasattr(connections._connections, "locks"):
        connections["locks"].close()
        del connections["locks"]


@pytest.fixture
def start() -> Iterator[Callable[..., DatabaseLockBackend]]:
    """Make database backends that are closed after the test."""
    started = []

    def start(
        alias: str, namespace: str = "test", *, note: str = "node-a", clock: Clock | None = None
    ) -> DatabaseLockBackend:
        backend = DatabaseLockBackend(alias, namespace, note=note, clock=clock)
        started.append(backend)
        return backend

    yield start
    for backend in started:
        backend.close()
