"""Locks: leases on batches of names, in Redis, in files, in memory, or none at all."""

from __future__ import annotations

import os
import threading

from django.core.signals import setting_changed
from django.utils.translation import gettext as _

from distcron_app.conf import Config, get_config
from distcron_app.errors import ConfigurationError
from distcron_app.locks.base import (
    Lease,
    LockBackend,
    LockInfo,
    new_owner_token,
    schedule_lock_name,
)
from distcron_app.locks.breaker import Breaker
from distcron_app.locks.file import FileLockBackend
from distcron_app.locks.memory import MemoryLockBackend
from distcron_app.locks.none import NoLockBackend
from distcron_app.locks.redis import RedisLockBackend, pool_timeouts

__all__ = [
    "Lease",
    "LockBackend",
    "LockInfo",
    "get_backend",
    "new_owner_token",
    "schedule_lock_name",
]

_backends: dict[Config, LockBackend] = {}
_mutex = threading.Lock()


def get_backend(config: Config | None = None) -> LockBackend:
    """Return this process' backend for ``config``, by default for the settings in force.

    The same object for the same settings, so that all threads share its breaker. Raise
    ConfigurationError when the Redis alias cannot carry locks. No network access.
    """
    wanted = config or get_config()
    with _mutex:
        if wanted not in _backends:
            _backends[wanted] = _build(wanted)
        return _backends[wanted]


def _build(config: Config) -> LockBackend:
    kind = config.effective_lock_backend
    if kind == "redis":
        _require_timeouts(config.redis_alias)
        return Breaker(RedisLockBackend(config.redis_alias, config.namespace, note=config.label))
    if kind == "file":
        return FileLockBackend(config.lock_path, note=config.label)
    if kind == "memory":
        return MemoryLockBackend(note=config.label)
    return NoLockBackend()


def _require_timeouts(alias: str) -> None:
    try:
        timeouts = pool_timeouts(alias)
    except Exception as error:
        raise ConfigurationError(
            "REDIS_ALIAS",
            _("cache alias %(alias)r has no usable Redis client, %(kind)s: %(error)s.")
            % {"alias": alias, "kind": type(error).__name__, "error": error},
            _("Define it in CACHES with the backend django_redis.cache.RedisCache."),
        ) from error
    if None in timeouts:
        raise ConfigurationError(
            "REDIS_ALIAS",
            _("cache alias %r has no time limit, so a hung Redis would stop the node.") % alias,
            _("Set SOCKET_TIMEOUT and SOCKET_CONNECT_TIMEOUT to 0.5 in its OPTIONS."),
        )


def _forget(*, setting: str, **_facts: object) -> None:
    if setting in ("DISTCRON", "CACHES"):
        with _mutex:
            for backend in _backends.values():
                backend.close()
            _backends.clear()


def _start_afresh() -> None:
    # A forked child holds none of its parent's locks, and its copy of the mutex may
    # be locked by a thread that it does not have.
    global _mutex
    _mutex = threading.Lock()
    _backends.clear()


setting_changed.connect(_forget)
os.register_at_fork(after_in_child=_start_afresh)
