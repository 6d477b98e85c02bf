"""Locks in a real Redis for the tests of the page and of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.test import override_settings
from django_redis import get_redis_connection

from distcron_app.locks import get_backend, new_owner_token
from distcron_app.locks.redis import RedisLockBackend

NO_REDIS = {
    "distcron": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": "redis://127.0.0.1:1/0",  # nobody listens there
        "OPTIONS": {"SOCKET_TIMEOUT": 0.2, "SOCKET_CONNECT_TIMEOUT": 0.2},
    }
}
# Text that people may choose for a public lock.
ODD = "🦜 a/b|c?d&e=f#g%h"


@contextmanager
def redis_locks(**settings: object) -> Iterator[str]:
    """Let the locks be in the Redis of the tests, under a namespace of this test's own."""
    namespace = f"test-{new_owner_token()}"
    given = {"LOCK_BACKEND": "redis", "NAMESPACE": namespace, **settings}
    with override_settings(DISTCRON=given):
        yield namespace
        redis = get_redis_connection("distcron")
        for key in redis.scan_iter(f"*{namespace}*"):
            redis.delete(key)


def hold(name: str, token: str, *, holder: str, namespace: str, ttl_ms: int = 30_000) -> None:
    """Take a lock as the node ``holder`` would."""
    RedisLockBackend("distcron", namespace, note=holder).acquire({name: token}, ttl_ms)


def remove_ttl(name: str, namespace: str) -> None:
    """Do what only a foreign hand can do: let a lock live for ever."""
    redis = get_redis_connection("distcron")
    (key,) = (
        key
        for key in redis.scan_iter(f"*{namespace}*", _type="string")
        if key.decode().endswith(f":{name}")
    )
    redis.persist(key)


def is_held(name: str) -> bool:
    """Tell whether anybody holds the lock at the level "standard"."""
    return name in get_backend().inspect([name])
