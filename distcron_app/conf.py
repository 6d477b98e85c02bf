"""``settings.DISTCRON``, read into one frozen typed object.

Every key has a default and a unit in its name. ``get_config()`` raises
ConfigurationError for the first thing that is wrong; ``problems()`` lists all of
them for the system check. Read at call time, never at import, so that
``override_settings`` works.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.core.signals import setting_changed
from django.utils.translation import gettext as _

from distcron_app.errors import ConfigurationError

__all__ = ["Config", "get_config", "problems"]

LOCK_BACKENDS = ("auto", "redis", "file", "memory", "none")
# What a lock level may be made of, besides the backend of the level "standard".
LEVEL_PARTS = ("redis", "redlock", "file", "memory", "database")
STANDARD = "standard"
_LEVEL_NAME = re.compile(r"[a-z][a-z0-9_-]{0,19}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of one deployment. Field names are the keys of ``DISTCRON`` in lower case."""

    # Prefix of every key in Redis; nodes with different namespaces do not exclude each other.
    namespace: str = "distcron"
    # auto: redis where the cache alias exists, else file. none: the database alone decides.
    lock_backend: str = "auto"
    # Cache alias of django-redis that belongs to the locks alone.
    redis_alias: str = "distcron"
    # Cache aliases of three or more independent Redis instances: the level "quorum".
    quorum_aliases: tuple[str, ...] = ()
    # Further tries of a quorum that was split between several contenders, and the pause
    # before each, give or take half of it.
    quorum_retries: int = 3
    quorum_retry_delay_ms: int = 200
    # Database alias of the level "critical"; no proxy that pools transactions in between.
    lock_database: str = "default"
    # Further levels by name, each a list of parts that must all be won, the first one first.
    lock_levels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # Where the file backend keeps its lock files; must be on a local disk.
    lock_directory: str = ""
    # Dead-man switch of a schedule's lock; renewed every third of it.
    lock_ttl_seconds: float = 15.0
    # A node whose heartbeat is older than this is dead.
    node_lease_seconds: float = 15.0
    heartbeat_seconds: float = 5.0
    # Later than this an occurrence is a misfire.
    misfire_grace_seconds: float = 30.0
    # Worker processes of a node, and threads in each.
    processes: int = 2
    threads: int = 8
    # How long SIGTERM waits for running jobs.
    drain_seconds: float = 25.0
    # Most occurrences claimed in one transaction.
    batch_size: int = 1000
    # Longest sleep of the loop, so the latest notice of an edit without a wake-up.
    poll_seconds: float = 1.0
    # Label of this node for people; identity is a fresh UUID per process.
    node_name: str = ""
    # Management commands that the job "distcron.management_command" may run.
    management_commands: tuple[str, ...] = ("clearsessions",)
    # Programs (absolute paths) that the job "distcron.shell_command" may run; empty: none.
    shell_commands: tuple[str, ...] = ()
    # Captured output kept per run; the rest is cut with a marker.
    output_limit_bytes: int = 262_144
    # How long the history stays; 0 is for ever. Failed and lost runs never shorter than others.
    keep_days: int = 30
    keep_failed_days: int = 90
    # Of each schedule, at most so many that failed or are lost, and so many others; 0: no limit.
    keep_succeeded: int = 0
    keep_failed: int = 0
    # Whether "migrate" makes rows of the schedules that code defines.
    sync_on_migrate: bool = True

    @property
    def label(self) -> str:
        """Return the node's label, by default the host name."""
        return self.node_name or socket.gethostname()

    @property
    def lock_path(self) -> str:
        """Return the folder of the file backend, one per operating-system user by default."""
        if self.lock_directory:
            return self.lock_directory
        return os.path.join(tempfile.gettempdir(), f"{self.namespace}-locks-{os.getuid()}")

    @property
    def effective_lock_backend(self) -> str:
        """Return ``lock_backend`` with ``auto`` resolved."""
        if self.lock_backend != "auto":
            return self.lock_backend
        return "redis" if self.redis_alias in settings.CACHES else "file"

    @property
    def levels(self) -> dict[str, tuple[str, ...]]:
        """Return every lock level of these settings with the parts it is made of.

        The names say what was configured; whether a level works here is checked elsewhere.
        """
        backend = self.effective_lock_backend
        gate = "redlock" if self.quorum_aliases else backend
        found: dict[str, tuple[str, ...]] = {STANDARD: (backend,)}
        if self.quorum_aliases:
            found["quorum"] = ("redlock",)
        found["critical"] = ("database",) if gate == "none" else (gate, "database")
        return found | dict(self.lock_levels)

    @property
    def slots(self) -> int:
        """Return how many runs this node executes at once."""
        return self.processes * self.threads


_FIELDS = {field.name.upper(): field for field in dataclasses.fields(Config)}
# (smallest, largest) of the numbers, in the unit of the key.
_RANGES: dict[str, tuple[float, float]] = {
    "LOCK_TTL_SECONDS": (1, 3600),
    "NODE_LEASE_SECONDS": (1, 3600),
    "HEARTBEAT_SECONDS": (0.1, 1200),
    "MISFIRE_GRACE_SECONDS": (1, 86_400),
    "PROCESSES": (1, 256),
    "THREADS": (1, 256),
    "DRAIN_SECONDS": (0, 86_400),
    "BATCH_SIZE": (1, 10_000),
    "POLL_SECONDS": (0.05, 60),
    "OUTPUT_LIMIT_BYTES": (0, 64 * 1024 * 1024),
    "KEEP_DAYS": (0, 36_500),
    "KEEP_FAILED_DAYS": (0, 36_500),
    "KEEP_SUCCEEDED": (0, 10_000_000),
    "KEEP_FAILED": (0, 10_000_000),
    "QUORUM_RETRIES": (0, 20),
    "QUORUM_RETRY_DELAY_MS": (1, 5000),
}


def get_config() -> Config:
    """Return the settings in force. Raise ConfigurationError for the first problem."""
    return _load()


def problems(given: Mapping[str, Any] | None = None) -> list[ConfigurationError]:
    """Return everything that is wrong with ``settings.DISTCRON`` (or ``given``)."""
    return _read(_given() if given is None else given)[1]


@functools.lru_cache(maxsize=1)
def _load() -> Config:
    config, found = _read(_given())
    if found:
        raise found[0]
    return config


def _given() -> Mapping[str, Any]:
    return getattr(settings, "DISTCRON", {})


def _read(given: object) -> tuple[Config, list[ConfigurationError]]:
    if not isinstance(given, Mapping):
        problem = ConfigurationError(
            "*",
            _("must be a dict, got %s.") % type(given).__name__,
            _("Write DISTCRON = {...}."),
        )
        return Config(), [problem]
    values: dict[str, Any] = {}
    found: list[ConfigurationError] = []
    for key, value in given.items():
        try:
            values[str(key).lower()] = _checked(str(key), value)
        except ConfigurationError as error:
            found.append(error)
    config = Config(**values) if not found else Config()
    found.extend(_contradictions(config))
    return config, found


def _checked(key: str, value: Any) -> Any:
    if key not in _FIELDS:
        nearest = difflib.get_close_matches(key.upper(), _FIELDS, n=1, cutoff=0.5)
        fix = _("Did you mean %r?") % nearest[0] if nearest else _known_keys()
        raise ConfigurationError(key, _("is not a known setting."), fix)
    default = _FIELDS[key].default
    if key == "LOCK_LEVELS":
        return _checked_levels(key, value)
    if isinstance(default, tuple):
        return _checked_names(key, value)
    accepted: tuple[type, ...] = (int, float) if isinstance(default, float) else (type(default),)
    # To Python a bool is a number; to a person it is not.
    if not isinstance(value, accepted) or isinstance(value, bool) != isinstance(default, bool):
        raise ConfigurationError(
            key,
            _("must be %(type)s, got %(value)r (%(given)s).")
            % {"type": accepted[-1].__name__, "value": value, "given": type(value).__name__},
            _("The default is %r.") % (default,),
        )
    if key == "LOCK_BACKEND" and value not in LOCK_BACKENDS:
        raise ConfigurationError(
            key, _("got %r.") % value, _("Choose one of %s.") % ", ".join(LOCK_BACKENDS)
        )
    low, high = _RANGES.get(key, (None, None))
    number: Any = value
    if low is not None and high is not None and not low <= number <= high:
        raise ConfigurationError(
            key,
            _("got %(value)r, allowed %(low)g to %(high)g.")
            % {"value": value, "low": low, "high": high},
            _("The default is %r.") % (default,),
        )
    return value


def _checked_names(key: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and all(isinstance(item, str) and item for item in value):
        return tuple(value)
    raise ConfigurationError(
        key,
        _("must be a list of strings, got %r.") % (value,),
        _('Write ["one", "two"], or [] for none.'),
    )


def _checked_levels(key: str, value: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            key,
            _("must be a dict of level name to list of parts, got %r.") % (value,),
            _('Write {"critical": ["redlock", "database"]}.'),
        )
    return tuple((_level_name(key, name), _parts(key, name, value[name])) for name in value)


def _level_name(key: str, name: object) -> str:
    if not isinstance(name, str) or not _LEVEL_NAME.fullmatch(name):
        raise ConfigurationError(
            key,
            _("got the level name %r.") % (name,),
            _("Use lower-case letters, digits, '-' and '_', at most 20."),
        )
    if name == STANDARD:
        raise ConfigurationError(
            key,
            _("the level %r is made of LOCK_BACKEND alone.") % name,
            _("Set LOCK_BACKEND, or choose another name."),
        )
    return name


def _parts(key: str, name: str, value: Any) -> tuple[str, ...]:
    parts = _checked_names(key, value)
    unknown = [part for part in parts if part not in LEVEL_PARTS]
    if not parts or unknown or len(set(parts)) < len(parts):
        raise ConfigurationError(
            key,
            _("level %(name)r is made of %(parts)r.") % {"name": name, "parts": list(parts)},
            _("Name one or more of %s, each once.") % ", ".join(LEVEL_PARTS),
        )
    return parts


def _known_keys() -> str:
    return _("Known keys: %s.") % ", ".join(_FIELDS)


def _contradictions(config: Config) -> list[ConfigurationError]:
    found = []
    if config.heartbeat_seconds * 2 > config.node_lease_seconds:
        found.append(
            ConfigurationError(
                "HEARTBEAT_SECONDS",
                _("%(heartbeat)g s leaves no second try within NODE_LEASE_SECONDS (%(lease)g s).")
                % {"heartbeat": config.heartbeat_seconds, "lease": config.node_lease_seconds},
                _("Make it at most half of the lease."),
            )
        )
    if not config.namespace or not config.namespace.isascii() or set(config.namespace) & set("{} "):
        found.append(
            ConfigurationError(
                "NAMESPACE",
                _("got %r.") % config.namespace,
                _("Use ASCII letters, digits, '-' and '_': it is part of every Redis key."),
            )
        )
    return found


def _forget(*, setting: str, **_facts: object) -> None:
    if setting in ("DISTCRON", "CACHES"):
        _load.cache_clear()


setting_changed.connect(_forget)
