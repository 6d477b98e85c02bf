"""Carries the calls of a lock backend to the Redis, Sentinel or Cluster of one cache alias."""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Sequence
from typing import Any, Protocol

import redis
from django.core.cache import caches
from django_redis import get_redis_connection
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import (
    ClusterDownError,
    NoScriptError,
    RedisClusterException,
    SlotNotCoveredError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, SentinelConnectionPool

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks.cluster import ClusterConnectionFactory
from distcron_app.locks.scripts import Call

__all__ = ["Link", "pool_timeouts"]

# A second try only while the whole call stays near one second.
_RETRY_WITHIN_SECONDS = 0.6
# How long a kept connection may go without asking the sentinels whether its server is
# still the primary. A planned failover leaves the old one writable for some 8 seconds.
_PRIMARY_SECONDS = 1.0
# And the pause after they did not answer, since asking may block.
_SENTINELS_AWAY_SECONDS = 30.0
# What redis-py raises when the request may not have been carried out.
_NO_ANSWER = (redis.ConnectionError, redis.TimeoutError, RedisClusterException, OSError)

_Words = Sequence[str | bytes | int]


class Link:
    """Runs scripts and commands on the cache alias ``alias``; ``name`` is the backend's.

    Everything is sent once more after a connection was lost, so only what may be repeated
    belongs here. A Redis that is down or hung costs at most two socket timeouts, and one
    where the timeout is longer than 0.6 s. Raise LockUnavailable for whatever Redis or
    the way to it has to say.

    One connection is kept out of the pool for whoever comes first: taking one from the
    pool for each call costs a third of the time of a lock. Who finds it taken takes
    another one from the pool. A forked child opens its own.
    """

    def __init__(self, alias: str, name: str, clock: Clock) -> None:
        self._alias = alias
        self._name = name
        self._clock = clock
        self._kept: collections.deque[_Route] = collections.deque()
        self._pid = os.getpid()

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """Return the answers of all calls, in one round trip.

        In two, when Redis has forgotten a script: after a restart, a failover or
        SCRIPT FLUSH.
        """
        answers = self._ask([_evalsha(call) for call in calls])
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        # None of these was executed; EVAL loads the script as well.
        for i, answer in zip(unknown, self._ask([_eval(calls[i]) for i in unknown]), strict=True):
            answers[i] = answer
        return [self._checked(answer) for answer in answers]

    def command(self, *words: str | bytes | int) -> Any:
        """Return the answer to one command."""
        (answer,) = self._ask([words])
        return self._checked(answer)

    def close(self) -> None:
        """Give the kept connection back to the pool."""
        with contextlib.suppress(IndexError):
            self._kept.pop().close()

    def _checked(self, answer: Any) -> Any:
        if isinstance(answer, redis.ResponseError):
            raise self._unavailable(answer) from answer
        return answer

    def _unavailable(self, error: Exception) -> LockUnavailable:
        cause = f"{type(error).__name__}: {error}".rstrip(".")
        refused = isinstance(error, redis.ResponseError) and not isinstance(error, ClusterDownError)
        return LockUnavailable(self._name, cause, refused=refused)

    def _ask(self, commands: Sequence[_Words]) -> list[Any]:
        """Return the answers; an error of Redis is an answer."""
        if not commands:
            return []
        started = self._clock.monotonic()
        try:
            try:
                return self._ask_once(commands, started)
            except _NO_ANSWER:
                now = self._clock.monotonic()
                if now - started > _RETRY_WITHIN_SECONDS:
                    raise
                return self._ask_once(commands, now)
        except (redis.RedisError, RedisClusterException, OSError) as error:
            raise self._unavailable(error) from error

    def _ask_once(self, commands: Sequence[_Words], now: float) -> list[Any]:
        route = self._take()
        try:
            answers = route.ask(commands, now)
        except BaseException:
            # An answer may still be on its way, and would pass for that to the next call.
            route.close(broken=True)
            raise
        if self._kept:
            route.close()
        else:
            self._kept.append(route)
        return answers

    def _take(self) -> _Route:
        if self._pid != os.getpid():
            self._kept.clear()
            self._pid = os.getpid()
        try:
            return self._kept.pop()
        except IndexError:
            return _route(self._alias)


def pool_timeouts(alias: str) -> tuple[float | None, float | None]:
    """Return (socket timeout, connect timeout) of the alias' pool in seconds.

    None where the pool leaves it to redis-py. Read from the pool that is really used:
    aliases with one URL share whichever pool was opened first. No network access.
    """
    client = getattr(caches[alias], "client", None)
    factory = getattr(client, "connection_factory", None)
    if isinstance(factory, ClusterConnectionFactory):
        return factory.timeouts
    options = get_redis_connection(alias).connection_pool.connection_kwargs
    return options.get("socket_timeout"), options.get("socket_connect_timeout")


class _Route(Protocol):
    def ask(self, commands: Sequence[_Words], now: float) -> list[Any]: ...

    def close(self, *, broken: bool = False) -> None: ...


class _ServerRoute:
    """A connection to one server, taken out of the pool until nobody uses it any more."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._is_closed = False
        self._connection = pool.get_connection()

    def __del__(self) -> None:
        # Also where get_connection() failed.
        if hasattr(self, "_connection"):
            self.close()

    def ask(self, commands: Sequence[_Words], now: float) -> list[Any]:
        connection = self._connection
        connection.send_packed_command(connection.pack_commands(commands))
        return [self._read() for _ in commands]

    def close(self, *, broken: bool = False) -> None:
        if self._is_closed:
            # Once more would take it from whoever got it out of the pool since.
            return
        self._is_closed = True
        if broken:
            self._connection.disconnect()
        self._pool.release(self._connection)

    def _read(self) -> Any:
        try:
            return self._connection.read_response()
        except redis.ResponseError as error:
            return error


class _SentinelRoute(_ServerRoute):
    """A connection to the primary that the sentinels name."""

    def __init__(self, pool: Any) -> None:
        # redis-py asks a Sentinel that hangs eleven times; the next one knows as well.
        for sentinel in pool.sentinel_manager.sentinels:
            sentinel.set_retry(Retry(NoBackoff(), 0))
        self._ask_sentinels_at = 0.0
        super().__init__(pool)

    def ask(self, commands: Sequence[_Words], now: float) -> list[Any]:
        if now >= self._ask_sentinels_at:
            self._follow_primary(now)
        return super().ask(commands, now)

    def _follow_primary(self, now: float) -> None:
        connection = self._connection
        self._ask_sentinels_at = now + _PRIMARY_SECONDS
        try:
            if self._pool.get_master_address() != (connection.host, connection.port):
                connection.disconnect()
                connection.connect()
        except MasterNotFoundError:
            # Nobody to ask, and the server itself may be well.
            self._ask_sentinels_at = now + _SENTINELS_AWAY_SECONDS


class _ClusterRoute:
    """The client of a Cluster, which finds the server of our slot by itself."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def ask(self, commands: Sequence[_Words], now: float) -> list[Any]:
        try:
            if len(commands) == 1:
                return [self._ask_one(commands[0])]
            with self._client.pipeline() as pipe:
                for words in commands:
                    pipe.execute_command(*words)
                return list(pipe.execute(raise_on_error=False))
        except SlotNotCoveredError:
            # redis-py would believe for ever that nobody serves the slot.
            self._client.nodes_manager.initialize()
            raise

    def close(self, *, broken: bool = False) -> None:
        """Do nothing: the client keeps the connections, and drops what broke."""

    def _ask_one(self, words: _Words) -> Any:
        try:
            return self._client.execute_command(*words)
        except redis.ResponseError as error:
            return error


def _route(alias: str) -> _Route:
    client: Any = get_redis_connection(alias)
    if isinstance(client, RedisCluster):
        return _ClusterRoute(client)
    pool = client.connection_pool
    return _SentinelRoute(pool) if isinstance(pool, SentinelConnectionPool) else _ServerRoute(pool)


def _evalsha(call: Call) -> _Words:
    return ("EVALSHA", call.script.sha, call.key_count, *call.values)


def _eval(call: Call) -> _Words:
    return ("EVAL", call.script.text, call.key_count, *call.values)
