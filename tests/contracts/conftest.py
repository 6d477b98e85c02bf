from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from django_redis import get_redis_connection

from project.service_urls import cache_settings
from tests.quorum import LOCK_DATABASE, farm, five_valkeys, make_farm
from tests.services import RedisServer, redis_server, valkey_server

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
