"""Lock levels: what a schedule asks for by name, and which backends that is made of.

At a gate level (one Redis, files, memory) the locks keep nodes out of each other's way,
and the database goes on alone while the backend is away. A strict level (a quorum, a
database lock) stops what it guards until the lock can be had again.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Sequence

from django.core.signals import setting_changed
from django.db import connections
from django.utils.translation import gettext as _

from distcron_app.conf import STANDARD, Config, get_config
from distcron_app.errors import ConfigurationError
from distcron_app.locks.base import LockBackend
from distcron_app.locks.breaker import Breaker
from distcron_app.locks.combined import CombinedLockBackend
from distcron_app.locks.database import DatabaseLockBackend
from distcron_app.locks.file import FileLockBackend
from distcron_app.locks.link import pool_timeouts
from distcron_app.locks.memory import MemoryLockBackend
from distcron_app.locks.none import NoLockBackend
from distcron_app.locks.redis import RedisLockBackend
from distcron_app.locks.redlock import RedlockBackend

__all__ = [
    "Level",
    "close_backends",
    "get_backend",
    "get_level",
    "level_names",
    "level_problem",
    "part_backends",
]

# Parts that answer for the promise of their level, so nothing starts without them.
_STRICT_PARTS = frozenset({"redlock", "database"})
# Databases that have a lock for the length of a session.
_LOCKING_DATABASES = ("postgresql", "mysql")

_backends: dict[tuple[Config, tuple[str, ...], str], LockBackend] = {}
# The locks of all memory backends of this process, whatever their note.
_memory = MemoryLockBackend()
_mutex = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A level of these settings with its backend."""

    name: str
    parts: tuple[str, ...]
    backend: LockBackend

    @property
    def is_strict(self) -> bool:
        """Return True where nothing may start while the backend is away."""
        return not _STRICT_PARTS.isdisjoint(self.parts)


def get_level(name: str = STANDARD, *, note: str = "", config: Config | None = None) -> Level:
    """Return the level ``name`` of the settings in force, with this process' backend for it.

    The same backend for the same settings and ``note`` (what people see as the holder, by
    default the node's label), so that all threads share it. Raise ConfigurationError for
    a level that is not known or cannot work here. No network access.
    """
    wanted = config or get_config()
    problem = level_problem(name, wanted)
    if problem:
        raise ConfigurationError("LOCK_LEVELS", problem, "")
    parts = wanted.levels[name]
    with _mutex:
        return Level(name=name, parts=parts, backend=_backend(wanted, parts, note or wanted.label))


def part_backends(name: str, *, config: Config | None = None) -> dict[str, LockBackend]:
    """Return the backends that the level ``name`` is made of, by part and in their order.

    Levels share the backends of their parts, so that whoever looks at all of them asks
    each once. Raise ConfigurationError as ``get_level``. No network access.
    """
    wanted = config or get_config()
    parts = get_level(name, config=wanted).parts
    with _mutex:
        return {part: _backend(wanted, [part], wanted.label) for part in parts}


def get_backend(config: Config | None = None) -> LockBackend:
    """Return the backend of the level "standard"; see ``get_level``."""
    return get_level(config=config).backend


def level_names(config: Config | None = None) -> tuple[str, ...]:
    """Return the levels that a schedule may choose here, the default first."""
    wanted = config or get_config()
    return tuple(name for name in wanted.levels if not level_problem(name, wanted))


def level_problem(name: str, config: Config | None = None) -> str:
    """Return why the level ``name`` cannot be chosen here, in words; empty when it can.

    It reads the settings alone, so a Redis that is away is no problem.
    """
    wanted = config or get_config()
    parts = wanted.levels.get(name)
    if parts is None:
        known = ", ".join(level_names(wanted))
        if name == "quorum":
            return _(
                "Lock level 'quorum': needs three or more Redis instances. Name their cache "
                "aliases in DISTCRON['QUORUM_ALIASES'], or choose one of %s."
            ) % (known)
        return _("Lock level %(name)r: not known. Choose one of %(known)s.") % {
            "name": name,
            "known": known,
        }
    if "database" in parts:
        problem = _database_problem(name, wanted.lock_database)
        if problem:
            return problem
    if "redlock" in parts and not wanted.quorum_aliases:
        return _("Lock level %r: made of 'redlock', but DISTCRON['QUORUM_ALIASES'] is empty.") % (
            name
        )
    return ""


def _database_problem(name: str, alias: str) -> str:
    if alias not in connections.settings:
        return _(
            "Lock level %(name)r: DISTCRON['LOCK_DATABASE'] is %(alias)r, which is not in "
            "DATABASES. Name one of %(known)s."
        ) % {"name": name, "alias": alias, "known": ", ".join(connections.settings)}
    if connections[alias].vendor not in _LOCKING_DATABASES:
        return _(
            "Lock level %(name)r: needs a lock of the database for the length of a run, which "
            "%(database)s does not have. Use PostgreSQL or MariaDB, or the level 'standard'."
        ) % {"name": name, "database": connections[alias].display_name}
    return ""


def _backend(config: Config, parts: Sequence[str], note: str) -> LockBackend:
    key = (config, tuple(parts), note)
    if key not in _backends:
        if len(parts) == 1:
            _backends[key] = _BUILDERS[parts[0]](config, note)
        else:
            _backends[key] = CombinedLockBackend([_backend(config, [part], note) for part in parts])
    return _backends[key]


def _redis(config: Config, note: str) -> LockBackend:
    _require_timeouts("REDIS_ALIAS", config.redis_alias)
    return Breaker(RedisLockBackend(config.redis_alias, config.namespace, note=note))


def _redlock(config: Config, note: str) -> LockBackend:
    return Breaker(_quorum(config, note))


def _quorum(config: Config, note: str) -> RedlockBackend:
    for alias in config.quorum_aliases:
        _require_timeouts("QUORUM_ALIASES", alias)
    return RedlockBackend(
        config.quorum_aliases,
        config.namespace,
        rejoin_ms=int(config.lock_ttl_seconds * 1000),
        retries=config.quorum_retries,
        retry_delay_ms=config.quorum_retry_delay_ms,
        note=note,
    )


_BUILDERS: dict[str, Callable[[Config, str], LockBackend]] = {
    "redis": _redis,
    "redlock": _redlock,
    "file": lambda config, note: FileLockBackend(config.lock_path, note=note),
    "memory": lambda config, note: MemoryLockBackend(note=note, beside=_memory),
    "none": lambda config, note: NoLockBackend(),
    "database": lambda config, note: DatabaseLockBackend(
        config.lock_database, config.namespace, note=note
    ),
}


def _require_timeouts(key: str, alias: str) -> None:
    try:
        timeouts = pool_timeouts(alias)
    except Exception as error:
        raise ConfigurationError(
            key,
            _("cache alias %(alias)r has no usable Redis client, %(kind)s: %(error)s.")
            % {"alias": alias, "kind": type(error).__name__, "error": error},
            _("Define it in CACHES with the backend django_redis.cache.RedisCache."),
        ) from error
    if None in timeouts:
        raise ConfigurationError(
            key,
            _("cache alias %r has no time limit, so a hung Redis would stop the node.") % alias,
            _("Set SOCKET_TIMEOUT and SOCKET_CONNECT_TIMEOUT to 0.5 in its OPTIONS."),
        )


def close_backends() -> None:
    """Give back what the backends of this process hold; the next use builds them anew."""
    with _mutex:
        for backend in _backends.values():
            backend.close()
        _backends.clear()


def _forget(*, setting: str, **_facts: object) -> None:
    if setting in ("DISTCRON", "CACHES", "DATABASES"):
        close_backends()


def _start_afresh() -> None:
    # A forked child holds none of its parent's locks, and its copy of the mutex may
    # be locked by a thread that it does not have.
    global _memory, _mutex
    _memory = MemoryLockBackend()
    _mutex = threading.Lock()
    _backends.clear()


setting_changed.connect(_forget)
os.register_at_fork(after_in_child=_start_afresh)
