from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from django_redis import get_redis_connection

from distcron_app.clock import Clock
from distcron_app.locks.database import DatabaseLockBackend
from project.service_urls import cache_settings, database_settings
from tests.services import (
    MariaServer,
    PostgresCluster,
    RedisServer,
    maria_server,
    postgres_cluster,
    redis_server,
    valkey_server,
)

LOCK_DATABASE = 9


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


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis for one test, which may break it."""
    with redis_server() as server:
        yield server


@pytest.fixture
def use_redis(settings) -> Iterator[Callable[[str], None]]:
    """Point the alias of the locks at a URL; its connections are closed after the test."""

    def use(url: str) -> None:
        settings.CACHES = cache_settings(url)
        settings.DISTCRON = {"LOCK_BACKEND": "redis", "NODE_NAME": "node-a"}

    yield use
    get_redis_connection("distcron").connection_pool.disconnect()


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
