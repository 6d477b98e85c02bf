"""System checks of the lock settings: mistakes that would let a job run twice, or never.

They read ``CACHES`` and build the connection pool, and never open a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning
from django.db import DEFAULT_DB_ALIAS
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _
from django_redis.client import DefaultClient
from redis.connection import parse_url
from redis.retry import Retry

from distcron_app.conf import Config, get_config
from distcron_app.errors import ConfigurationError
from distcron_app.locks.cluster import ClusterConnectionFactory
from distcron_app.locks.file import directory_problem
from distcron_app.locks.levels import level_problem
from distcron_app.locks.link import pool_timeouts

__all__ = ["check_lock_settings"]

ALIAS_MISSING = "distcron.E010"
BACKEND_WITHOUT_CLIENT = "distcron.E011"
EXCEPTIONS_IGNORED = "distcron.E012"
DATABASE_SHARED = "distcron.E013"
NO_TIME_LIMIT = "distcron.E014"
SEVERAL_SERVERS = "distcron.E015"
SESSIONS_ON_ALIAS = "distcron.E016"
CLIENT_UNSUPPORTED = "distcron.E017"
DIRECTORY_UNSUITABLE = "distcron.E018"
TOO_FEW_INSTANCES = "distcron.E019"
EVEN_INSTANCES = "distcron.E020"
SERVER_TWICE = "distcron.E021"
INSTANCE_REPLICATED = "distcron.E022"
LEVEL_UNSUITABLE = "distcron.E023"
LOCK_DATABASE_MISSING = "distcron.E024"
LOCK_DATABASE_UNSUITABLE = "distcron.E025"
SLOW_TIME_LIMIT = "distcron.W010"
NO_POOL_SIZE = "distcron.W011"
PICKLE = "distcron.W012"
TTL_TOO_SHORT = "distcron.W013"
RETRIES = "distcron.W014"

_REDIS_CACHE = "django_redis.cache.RedisCache"
_CLUSTER_FACTORY = "distcron_app.locks.cluster.ClusterConnectionFactory"
_JSON = "django_redis.serializers.json.JSONSerializer"
# Longest socket timeout with which a hung Redis costs a tick about one second.
_TIMEOUT_LIMIT_SECONDS = 1.0
# A lease is renewed every third of its TTL.
_RENEWALS_PER_TTL = 3
# Two instances survive no failure: their quorum is both.
_FEWEST_INSTANCES = 3


def check_lock_settings(app_configs: object, **kwargs: object) -> list[CheckMessage]:
    """Return what is wrong with the settings of the lock backend in force.

    Nothing when ``settings.DISTCRON`` itself is refused: that has checks of its own.
    """
    try:
        config = get_config()
    except ConfigurationError:
        return []
    found = [*_check_ttl(config), *_check_lock_database(config)]
    if config.effective_lock_backend == "redis":
        found.extend(_check_redis(config.redis_alias))
    if config.quorum_aliases:
        found.extend(_check_quorum(config.quorum_aliases))
    if config.effective_lock_backend == "file":
        found.extend(_check_directory(config.lock_path))
    return found


def _check_ttl(config: Config) -> Iterator[CheckMessage]:
    if config.lock_ttl_seconds < _RENEWALS_PER_TTL * config.poll_seconds:
        yield Warning(
            _(
                "DISTCRON['LOCK_TTL_SECONDS'] is %(ttl)g s, less than three times POLL_SECONDS "
                "(%(poll)g s). Leases may expire before the loop renews them."
            )
            % {"ttl": config.lock_ttl_seconds, "poll": config.poll_seconds},
            hint=_("Raise LOCK_TTL_SECONDS or lower POLL_SECONDS."),
            id=TTL_TOO_SHORT,
        )


def _check_lock_database(config: Config) -> Iterator[CheckMessage]:
    """Check the database of the levels that are made of it, without asking it anything.

    The level "critical" as it comes is just not offered where the database has no such lock.
    """
    alias = config.lock_database
    if alias not in settings.DATABASES:
        yield Error(
            _("DISTCRON['LOCK_DATABASE'] is %(alias)r, which is not in DATABASES.")
            % {"alias": alias},
            hint=_("Name one of %s.") % ", ".join(settings.DATABASES),
            id=LOCK_DATABASE_MISSING,
        )
        return
    named = [name for name, parts in config.lock_levels if "database" in parts]
    for name in named:
        problem = level_problem(name, config)
        if problem:
            yield Error(
                f"DISTCRON['LOCK_LEVELS']: {problem}",
                hint=_("Name a PostgreSQL or MariaDB in DISTCRON['LOCK_DATABASE']."),
                id=LEVEL_UNSUITABLE,
            )
    problem = level_problem("critical", config)
    if alias != DEFAULT_DB_ALIAS and not named and problem:
        yield Error(
            f"DISTCRON['LOCK_DATABASE']: {problem}",
            hint=_("Name a PostgreSQL or MariaDB in DISTCRON['LOCK_DATABASE']."),
            id=LOCK_DATABASE_UNSUITABLE,
        )


def _check_directory(path: str) -> Iterator[CheckMessage]:
    problem = directory_problem(path)
    if problem:
        yield Error(
            _("DISTCRON['LOCK_DIRECTORY']: %(problem)s. No file lock can be taken there.")
            % {"problem": problem},
            hint=_(
                "Name a folder on a local disk that belongs to this user alone, mode 700, or to "
                "the users of one group, mode 2770."
            ),
            id=DIRECTORY_UNSUITABLE,
        )


def _check_quorum(aliases: Sequence[str]) -> Iterator[CheckMessage]:
    for alias in dict.fromkeys(aliases):
        if _is_replicated(settings.CACHES.get(alias, {})):
            yield _instance_replicated(alias)
        else:
            yield from _check_redis(alias, setting="QUORUM_ALIASES")
    yield from _check_instance_count(len(aliases))
    yield from _check_distinct_servers(aliases)


def _is_replicated(given: Mapping[str, Any]) -> bool:
    return _is_cluster(given) or "SentinelClient" in _options(given).get("CLIENT_CLASS", "")


def _instance_replicated(alias: str) -> CheckMessage:
    return Error(
        _(
            "DISTCRON['QUORUM_ALIASES']: CACHES[%(alias)r] is a Redis Cluster or behind Sentinel. "
            "A failover forgets locks, and the quorum would count that vote."
        )
        % {"alias": alias},
        hint=_("Name one server as redis://host:port/db, without replicas that take over."),
        id=INSTANCE_REPLICATED,
    )


def _check_instance_count(count: int) -> Iterator[CheckMessage]:
    if count < _FEWEST_INSTANCES:
        yield Error(
            _(
                "DISTCRON['QUORUM_ALIASES'] names %(count)d Redis instances. With fewer than "
                "three, one that fails stops every lock."
            )
            % {"count": count},
            hint=_("Name three or five, each a server of its own."),
            id=TOO_FEW_INSTANCES,
        )
    elif count % 2 == 0:
        yield Error(
            _(
                "DISTCRON['QUORUM_ALIASES'] names %(count)d Redis instances. An even number "
                "survives no more failures than %(fewer)d, and splits its votes more often."
            )
            % {"count": count, "fewer": count - 1},
            hint=_("Remove one alias, or add one."),
            id=EVEN_INSTANCES,
        )


def _check_distinct_servers(aliases: Sequence[str]) -> Iterator[CheckMessage]:
    first_with: dict[str, str] = {}
    for alias in aliases:
        for server in map(_server, _locations(settings.CACHES.get(alias, {}))):
            if server in first_with:
                yield _server_twice(alias, first_with[server], server)
            first_with.setdefault(server, alias)


def _server_twice(alias: str, other: str, server: str) -> CheckMessage:
    return Error(
        _(
            "DISTCRON['QUORUM_ALIASES']: %(alias)r and %(other)r are one Redis server, "
            "%(server)s. Its failure takes two votes at once."
        )
        % {"alias": alias, "other": other, "server": server},
        hint=_("Give each alias a server of its own, not a database number alone."),
        id=SERVER_TWICE,
    )


def _check_redis(alias: str, *, setting: str = "REDIS_ALIAS") -> Iterator[CheckMessage]:
    if alias not in settings.CACHES:
        yield _alias_missing(alias, setting)
        return
    given = settings.CACHES[alias]
    if not _has_raw_client(given):
        yield _backend_without_client(alias, given)
        return
    found = [message for check in _ALIAS_CHECKS for message in check(alias, given)]
    yield from found
    # A client class that is refused above would only be reported once more.
    if CLIENT_UNSUPPORTED not in {message.id for message in found}:
        yield from _check_pool(alias)


def _alias_missing(alias: str, setting: str) -> CheckMessage:
    if setting == "QUORUM_ALIASES":
        return Error(
            _(
                "CACHES[%(alias)r] is missing, but DISTCRON['QUORUM_ALIASES'] names it. "
                "No lock of the quorum works."
            )
            % {"alias": alias},
            hint=_("Add the alias with the backend %(backend)s, or remove it from QUORUM_ALIASES.")
            % {"backend": _REDIS_CACHE},
            id=ALIAS_MISSING,
        )
    return Error(
        _("CACHES[%(alias)r] is missing, but DISTCRON['LOCK_BACKEND'] is 'redis'. No lock works.")
        % {"alias": alias},
        hint=_(
            "Add the alias with the backend %(backend)s and a database number of its own, "
            "name another one in DISTCRON['REDIS_ALIAS'], or set LOCK_BACKEND to 'file'."
        )
        % {"backend": _REDIS_CACHE},
        id=ALIAS_MISSING,
    )


def _backend_without_client(alias: str, given: Mapping[str, Any]) -> CheckMessage:
    return Error(
        _(
            "CACHES[%(alias)r]['BACKEND'] is %(backend)r, which gives no raw Redis client. "
            "No lock works."
        )
        % {"alias": alias, "backend": given.get("BACKEND")},
        hint=_("Use %(backend)s; Django's own Redis cache has no raw client.")
        % {"backend": _REDIS_CACHE},
        id=BACKEND_WITHOUT_CLIENT,
    )


def _has_raw_client(given: Mapping[str, Any]) -> bool:
    try:
        backend = import_string(given["BACKEND"])
    except (ImportError, KeyError):
        return False
    return isinstance(backend, type) and issubclass(backend, import_string(_REDIS_CACHE))


def _check_ignored_exceptions(alias: str, given: Mapping[str, Any]) -> Iterator[CheckMessage]:
    everywhere = getattr(settings, "DJANGO_REDIS_IGNORE_EXCEPTIONS", False)
    if _options(given).get("IGNORE_EXCEPTIONS", everywhere):
        yield Error(
            _(
                "IGNORE_EXCEPTIONS is on for CACHES[%(alias)r]. A dead Redis then looks like a "
                "lock that somebody else holds."
            )
            % {"alias": alias},
            hint=_("Set IGNORE_EXCEPTIONS to False in the OPTIONS of this alias."),
            id=EXCEPTIONS_IGNORED,
        )


def _check_servers(alias: str, given: Mapping[str, Any]) -> Iterator[CheckMessage]:
    if len(_locations(given)) > 1:
        yield Error(
            _(
                "CACHES[%(alias)r]['LOCATION'] lists several servers. Locks are read where they "
                "were not written, and two nodes may hold the same one."
            )
            % {"alias": alias},
            hint=_("Name one server, or use Redis Sentinel."),
            id=SEVERAL_SERVERS,
        )


def _check_client_class(alias: str, given: Mapping[str, Any]) -> Iterator[CheckMessage]:
    options = _options(given)
    client = options.get("CLIENT_CLASS", "django_redis.client.DefaultClient")
    redis_client = options.get("REDIS_CLIENT_CLASS", "redis.client.Redis")
    supported = _is_subclass(client, DefaultClient) and "ShardClient" not in client
    if not supported or "Cluster" in redis_client:
        yield Error(
            _("CACHES[%(alias)r] uses %(client)s, which cannot carry locks on a batch of names.")
            % {"alias": alias, "client": client if not supported else redis_client},
            hint=_(
                "Remove CLIENT_CLASS and REDIS_CLIENT_CLASS, or use the SentinelClient. For a "
                "Redis Cluster set CONNECTION_FACTORY to %(factory)s."
            )
            % {"factory": _CLUSTER_FACTORY},
            id=CLIENT_UNSUPPORTED,
        )
    elif _is_cluster(given):
        yield from _check_cluster(alias, given)


def _check_cluster(alias: str, given: Mapping[str, Any]) -> Iterator[CheckMessage]:
    client = _options(given).get("CLIENT_CLASS", "")
    local = [location for location in _locations(given) if location.startswith("unix://")]
    if "SentinelClient" in client or local:
        yield Error(
            _("CACHES[%(alias)r] names a Redis Cluster and %(other)s. Only one can carry locks.")
            % {"alias": alias, "other": local[0] if local else client},
            hint=_("Remove CLIENT_CLASS, and name a node as redis://host:port in LOCATION."),
            id=CLIENT_UNSUPPORTED,
        )
    elif any(number != 0 for _server, number in _databases(given)):
        yield Error(
            _("CACHES[%(alias)r] names a database number, but a Redis Cluster has only 0.")
            % {"alias": alias},
            hint=_("Write LOCATION as redis://host:port, and keep caches out of this Cluster."),
            id=CLIENT_UNSUPPORTED,
        )


def _check_sentinels(alias: str, given: Mapping[str, Any]) -> Iterator[CheckMessage]:
    limits = _options(given).get("SENTINEL_KWARGS")
    if limits is not None and not {"socket_timeout", "socket_connect_timeout"} <= set(limits):
        yield Error(
            _(
                "SENTINEL_KWARGS of CACHES[%(alias)r] has no socket_timeout or no "
                "socket_connect_timeout. A sentinel that hangs stops the node."
            )
            % {"alias": alias},
            hint=_("Set both to 0.2, or leave SENTINEL_KWARGS out to use those of the alias."),
            id=NO_TIME_LIMIT,
        )


def _check_shared_database(alias: str, given: Mapping[str, Any]) -> Iterator[CheckMessage]:
    ours = _databases(given)
    for other, settings_of_other in settings.CACHES.items():
        if other != alias and ours & _databases(settings_of_other):
            yield Error(
                _(
                    "CACHES[%(alias)r] and CACHES[%(other)r] share one Redis database. "
                    "cache.clear() on either frees all locks, and both use the connection "
                    "limits of whichever was opened first."
                )
                % {"alias": alias, "other": other},
                hint=_("Give CACHES[%(alias)r] a database number of its own, as in redis://host/9.")
                % {"alias": alias},
                id=DATABASE_SHARED,
            )


def _check_sessions(alias: str, given: Mapping[str, Any]) -> Iterator[CheckMessage]:
    in_cache = settings.SESSION_ENGINE in (
        "django.contrib.sessions.backends.cache",
        "django.contrib.sessions.backends.cached_db",
    )
    if in_cache and alias == settings.SESSION_CACHE_ALIAS:
        yield Error(
            _(
                "SESSION_CACHE_ALIAS is %(alias)r, the alias of the locks. Clearing it logs "
                "everybody out and frees all locks."
            )
            % {"alias": alias},
            hint=_("Keep sessions on another alias with another database number."),
            id=SESSIONS_ON_ALIAS,
        )


def _check_serializer(alias: str, given: Mapping[str, Any]) -> Iterator[CheckMessage]:
    serializer = _options(given).get("SERIALIZER", "pickle, the default")
    if "pickle" in str(serializer).lower():
        yield Warning(
            _(
                "CACHES[%(alias)r] uses pickle. Whoever can write to this Redis can run code in "
                "every process that reads the cache."
            )
            % {"alias": alias},
            hint=_("Set SERIALIZER to %(json)s in its OPTIONS.") % {"json": _JSON},
            id=PICKLE,
        )


def _check_pool_size(alias: str, given: Mapping[str, Any]) -> Iterator[CheckMessage]:
    in_url = any("max_connections=" in location for location in _locations(given))
    if not in_url and "max_connections" not in _pool_options(given):
        yield Warning(
            _(
                "CACHES[%(alias)r] does not limit its connections. Many nodes may use up the "
                "connections of Redis, and locks fail under load."
            )
            % {"alias": alias},
            hint=_(
                "Set max_connections in OPTIONS['CONNECTION_POOL_KWARGS'], 20 is enough for a node."
            ),
            id=NO_POOL_SIZE,
        )


def _check_retries(alias: str, given: Mapping[str, Any]) -> Iterator[CheckMessage]:
    retry = _pool_options(given).get("retry")
    count = retry.get_retries() if isinstance(retry, Retry) else 0
    if count:
        yield Warning(
            _(
                "CACHES[%(alias)r] retries %(count)d times. A hung Redis delays every tick by as "
                "many time limits."
            )
            % {"alias": alias, "count": count},
            hint=_("Remove retry from OPTIONS['CONNECTION_POOL_KWARGS']; locks retry by token."),
            id=RETRIES,
        )


def _check_pool(alias: str) -> Iterator[CheckMessage]:
    try:
        timeouts = pool_timeouts(alias)
    except Exception as error:  # noqa: BLE001
        # Any class that CACHES names may refuse its options in its own way.
        yield Error(
            _("CACHES[%(alias)r] cannot be used, %(error)s. No lock works.")
            % {"alias": alias, "error": f"{type(error).__name__}: {error}"},
            hint=_("Correct LOCATION and OPTIONS of this alias."),
            id=CLIENT_UNSUPPORTED,
        )
        return
    yield from _check_time_limits(alias, timeouts)


def _check_time_limits(
    alias: str, timeouts: tuple[float | None, float | None]
) -> Iterator[CheckMessage]:
    for option, seconds in zip(("SOCKET_TIMEOUT", "SOCKET_CONNECT_TIMEOUT"), timeouts, strict=True):
        hint = _("Set %(option)s to 0.5 in the OPTIONS of this alias.") % {"option": option}
        facts = {"alias": alias, "option": option, "seconds": seconds}
        if seconds is None:
            yield Error(
                _("CACHES[%(alias)r] has no %(option)s. A hung Redis stops the node.") % facts,
                hint=hint,
                id=NO_TIME_LIMIT,
            )
        elif seconds > _TIMEOUT_LIMIT_SECONDS:
            yield Warning(
                _(
                    "%(option)s of CACHES[%(alias)r] is %(seconds)g s, more than 1 s. "
                    "A hung Redis delays every tick by as much."
                )
                % facts,
                hint=hint,
                id=SLOW_TIME_LIMIT,
            )


def _options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    return given.get("OPTIONS") or {}


def _pool_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    return _options(given).get("CONNECTION_POOL_KWARGS") or {}


def _locations(given: Mapping[str, Any]) -> list[str]:
    location = given.get("LOCATION") or ()
    if isinstance(location, str):
        location = location.replace(";", ",").split(",")
    return [str(item).strip() for item in location if str(item).strip()]


def _databases(given: Mapping[str, Any]) -> set[tuple[str, int]]:
    """Return (server, database number) of each Redis location of one alias."""
    options = _options(given)
    default = options.get("db", options.get("DB", _pool_options(given).get("db", 0)))
    others = options.get("CLUSTER_NODES", ()) if _is_cluster(given) else ()
    return {(_server(f"redis://{host}:{port}"), 0) for host, port in others} | {
        (_server(location), int(_parsed(location).get("db", default)))
        for location in _locations(given)
        if location.startswith(("redis://", "rediss://", "unix://"))
    }


def _server(location: str) -> str:
    parsed = _parsed(location)
    if "path" in parsed:
        return str(parsed["path"])
    host = str(parsed.get("host", "localhost"))
    local = host in ("localhost", "127.0.0.1", "::1")
    return f"{'localhost' if local else host.lower()}:{parsed.get('port', 6379)}"


def _parsed(location: str) -> dict[str, Any]:
    try:
        return dict(parse_url(location))  # type: ignore[no-untyped-call]
    except ValueError:
        # Reported when the pool is built; here only the host matters.
        return {"host": urlsplit(location).hostname or "localhost"}


def _is_cluster(given: Mapping[str, Any]) -> bool:
    everywhere = getattr(settings, "DJANGO_REDIS_CONNECTION_FACTORY", "")
    factory = _options(given).get("CONNECTION_FACTORY") or everywhere
    return _is_subclass(factory, ClusterConnectionFactory)


def _is_subclass(path: str, base: type) -> bool:
    try:
        found = import_string(path)
    except ImportError:
        return False
    return isinstance(found, type) and issubclass(found, base)


_Check = Callable[[str, Mapping[str, Any]], Iterator[CheckMessage]]
_ALIAS_CHECKS: tuple[_Check, ...] = (
    _check_ignored_exceptions,
    _check_servers,
    _check_client_class,
    _check_sentinels,
    _check_shared_database,
    _check_sessions,
    _check_serializer,
    _check_pool_size,
    _check_retries,
)
