"""Asks every Redis that carries locks: the alias of the gate levels, the instances of a quorum."""

from __future__ import annotations

import dataclasses
import ipaddress
import threading
from collections.abc import Callable, Iterator
from typing import Any

import redis
from django.utils.translation import gettext as _
from django_redis import get_redis_connection
from redis.cluster import RedisCluster
from redis.connection import SSLConnection

from distcron_app.clock import Clock
from distcron_app.conf import Config
from distcron_app.diagnosis.finding import OK, PROBLEM, Finding
from distcron_app.diagnosis.instances import (
    INSTANCE_JUDGEMENTS,
    Instance,
    judge_clock,
    judge_latency,
    judge_quorum,
    judge_stuck,
)
from distcron_app.errors import LockUnavailable
from distcron_app.locks import new_owner_token
from distcron_app.locks.redis import RedisLockBackend

__all__ = ["Progress", "look_at_redis"]

# Told the subject of a longer sample, and the share of it that is done.
Progress = Callable[[str, float], None]

_PINGS = 200
_LONGEST_SECONDS = 2.0  # of the usual sample, where Redis is far away
_PING_PAUSE_SECONDS = 0.01  # of a longer one
_PROBE_TTL_MS = 1000
_SETTINGS = (
    *("save", "stop-writes-on-bgsave-error", "min-replicas-to-write"),
    *("protected-mode", "bind", "requirepass"),
)


def look_at_redis(
    config: Config,
    *,
    database_offset: float | None = None,
    latency_seconds: float | None = None,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> Iterator[Finding]:
    """Yield the findings of every alias in use. Blocks for 200 round trips to each.

    ``database_offset`` is how many seconds the database's clock is ahead of this host's,
    None where it is not known. ``latency_seconds`` asks for a longer sample of each.
    """
    look = _Look(
        namespace=config.namespace,
        database_offset=database_offset,
        latency_seconds=latency_seconds,
        progress=progress,
        clock=clock or Clock(),
    )
    if any("redis" in parts for parts in config.levels.values()):
        yield from look.at(config.redis_alias, is_needed=True)
    for alias in config.quorum_aliases:
        yield from look.at(alias, is_needed=False)
    if config.quorum_aliases:
        instances = {alias: look.seen.get(alias) for alias in config.quorum_aliases}
        yield from judge_quorum(instances, config.lock_ttl_seconds)


class _UnusableAlias(Exception):
    """The settings of a cache alias give no client of Redis."""


@dataclasses.dataclass(kw_only=True)
class _Look:
    """One round over the aliases; ``seen`` has the instances that answered."""

    namespace: str
    database_offset: float | None
    latency_seconds: float | None
    progress: Progress | None
    clock: Clock
    seen: dict[str, Instance] = dataclasses.field(default_factory=dict)

    def at(self, alias: str, *, is_needed: bool) -> list[Finding]:
        """Return the findings of one alias, what had been seen before it went away included."""
        found: list[Finding] = []
        try:
            for subject, client in _servers(alias):
                self._at_server(alias, subject, client, found)
            found.extend(self._try_lock(alias))
        except _UnusableAlias as error:
            found.append(_unusable(alias, error))
        except redis.ResponseError as error:
            # With MISCONF already the health check of a new connection is refused.
            self.seen.pop(alias, None)
            found.append(_refused(alias, str(error)))
        except (redis.RedisError, OSError, LockUnavailable) as error:
            self.seen.pop(alias, None)
            found.append(_away(alias, error, is_needed=is_needed))
        return found

    def _at_server(self, alias: str, subject: str, client: Any, found: list[Finding]) -> None:
        instance = _instance(subject, client)
        self.seen[alias] = instance
        for judge in INSTANCE_JUDGEMENTS:
            found.extend(judge(instance))
        found.append(judge_latency(subject, self._latencies_ms(subject, client)))
        offset = self._clock_offset(client)
        if offset is not None:
            found.append(judge_clock(subject, offset))

    def _latencies_ms(self, subject: str, client: Any) -> list[float]:
        started = self.clock.monotonic()
        limit = self.latency_seconds or _LONGEST_SECONDS
        measured: list[float] = []
        while (elapsed := self.clock.monotonic() - started) < limit:
            sent_at = self.clock.monotonic()
            # With MISCONF Redis refuses PING as well: an answer, as quick as another.
            _asked(client.ping)
            measured.append((self.clock.monotonic() - sent_at) * 1000)
            if self.latency_seconds is not None:
                self._rest(subject, elapsed / limit)
            elif len(measured) >= _PINGS:
                break
        return measured

    def _rest(self, subject: str, share: float) -> None:
        """Leave Redis time for others between two pings of a long sample."""
        if self.progress is not None:
            self.progress(subject, share)
        self.clock.wait(threading.Event(), _PING_PAUSE_SECONDS)

    def _clock_offset(self, client: Any) -> float | None:
        """Return how many seconds this Redis is ahead of the database."""
        if self.database_offset is None:
            return None
        before = self.clock.now().timestamp()
        try:
            seconds, microseconds = client.time()
        except redis.ResponseError:
            return None
        after = self.clock.now().timestamp()
        theirs = float(seconds) + int(microseconds) / 1_000_000
        return theirs - (before + after) / 2 - self.database_offset

    def _try_lock(self, alias: str) -> list[Finding]:
        """Take and release one lock as a node does, and look for locks that never end."""
        backend = RedisLockBackend(alias, self.namespace, note="schedulerctl doctor")
        token = new_owner_token()
        try:
            won = backend.acquire({f"doctor:{token}": token}, _PROBE_TTL_MS)
            backend.release(won.values())
            stuck = [info.name for info in backend.held() if info.ttl_ms is None]
        except LockUnavailable as error:
            if not isinstance(error.__cause__, redis.ResponseError):
                raise
            return [_refused(alias, error.cause)]
        text = _("a lock was taken and released")
        return [
            Finding(code="redis.lock", level=OK, subject=alias, text=text),
            judge_stuck(alias, stuck),
        ]


def _servers(alias: str) -> Iterator[tuple[str, Any]]:
    """Yield what the alias leads to: one server, or each primary of a Cluster."""
    client = _client(alias)
    if not isinstance(client, RedisCluster):
        yield alias, client
        return
    primaries: list[Any] = client.get_primaries()  # type: ignore[no-untyped-call]
    for node in primaries:
        yield f"{alias} {node.host}:{node.port}", client.get_redis_connection(node)


def _client(alias: str) -> Any:
    try:
        return get_redis_connection(alias)
    except (redis.RedisError, OSError):
        raise
    except Exception as error:
        # Any class that CACHES names may refuse its options in its own way.
        raise _UnusableAlias(f"{type(error).__name__}: {error}") from error


def _instance(subject: str, client: Any) -> Instance:
    pool = client.connection_pool
    connection = pool.get_connection()
    try:
        host = getattr(connection, "host", None)
        port = getattr(connection, "port", None)
        path = getattr(connection, "path", "")
        is_encrypted = isinstance(connection, SSLConnection)
        has_credentials = bool(getattr(connection, "password", None))
    finally:
        pool.release(connection)
    settings = _settings(client)
    return Instance(
        subject=subject,
        address=f"{host}:{port}" if host else str(path),
        is_local=host is None or _is_loopback(host),
        is_encrypted=is_encrypted,
        has_password=_has_password(client, settings, has_credentials=has_credentials),
        info=_asked(client.info),
        config=settings,
    )


def _settings(client: Any) -> dict[str, str] | None:
    answer = _asked(lambda: client.config_get(*_SETTINGS))
    if not answer:
        return None
    return {_text(key): _text(value) for key, value in answer.items()}


def _has_password(
    client: Any, settings: dict[str, str] | None, *, has_credentials: bool
) -> bool | None:
    """Return whether the user "default", whom nobody has to name, is closed."""
    answer = _asked(lambda: client.acl_getuser("default"))
    if answer:
        flags = {_text(flag) for flag in answer.get("flags", ())}
        return "nopass" not in flags or "off" in flags
    if settings is not None and "requirepass" in settings:
        return bool(settings["requirepass"])
    # It answered without credentials; with some, nobody knows what it says to others.
    return None if has_credentials else False


def _asked(ask: Callable[[], Any]) -> Any:
    """Return the answer, or None where this server or its ACL refuses the command."""
    try:
        return ask()
    except redis.ResponseError:
        return None


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _away(alias: str, error: Exception, *, is_needed: bool) -> Finding:
    cause = error.cause if isinstance(error, LockUnavailable) else str(error).rstrip(".")
    return Finding(
        code="redis.answers",
        level=PROBLEM,
        subject=alias,
        text=_("does not answer: %s") % cause,
        consequence=_("Nodes work without these locks; the database alone decides.")
        if is_needed
        else _("The quorum has one vote less."),
        fix=_("Start it, or correct LOCATION of CACHES[%r].") % alias,
        is_outage=is_needed,
    )


def _unusable(alias: str, error: Exception) -> Finding:
    return Finding(
        code="redis.alias",
        level=PROBLEM,
        subject=alias,
        text=_("no Redis client, %s") % error,
        consequence=_("No lock works."),
        fix=_("Define CACHES[%r] with the backend django_redis.cache.RedisCache.") % alias,
    )


def _refused(alias: str, cause: str) -> Finding:
    return Finding(
        code="redis.lock",
        level=PROBLEM,
        subject=alias,
        text=_("a lock was refused: %s") % cause,
        consequence=_("Nodes work without these locks, and locks of your own code fail."),
        fix=_("The text above is Redis' own reason; the ACL must allow the scripts' commands."),
    )
