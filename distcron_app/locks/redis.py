"""Locks in one Redis (or Sentinel, or Valkey) through django-redis' raw client.

The cache API is never used: ``cache.clear()`` frees locks, ``cache.add()`` hides a dead
Redis, and values are pickled. What is stored, and how, is in ``scripts``.

At most one owner token holds a name while Redis keeps its data. A restart without
persistence or a failover may forget locks; the database decides then.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import redis
from django_redis import get_redis_connection

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks import scripts
from distcron_app.locks.base import Lease, LockBackend, LockInfo, checked_ttl

__all__ = ["RedisLockBackend", "pool_timeouts"]

# A second try only while the whole call stays near one second.
_RETRY_WITHIN_SECONDS = 0.6
# Most abandoned tokens remembered: the largest batch of the settings.
_ABANDONED_LIMIT = 10_000


class RedisLockBackend(LockBackend):
    """Locks on the cache alias ``alias``; ``note`` is stored with each for people.

    A call costs one round trip. A Redis that is down or hung costs at most two socket
    timeouts, and one where the timeout is longer than 0.6 s.
    """

    name = "redis"

    def __init__(
        self, alias: str, namespace: str, *, note: str = "", clock: Clock | None = None
    ) -> None:
        self._alias = alias
        self._namespace = namespace
        self._note = note.encode("utf-8", "replace")
        self._clock = clock or Clock()
        self._abandoned: collections.deque[scripts.Owner] = collections.deque(
            maxlen=_ABANDONED_LIMIT
        )
        self._mutex = threading.Lock()

    def acquire(self, wanted: Mapping[str, str], ttl_ms: int) -> dict[str, Lease]:
        """Take the free locks, as ``LockBackend.acquire`` promises."""
        sent_at = self._clock.monotonic()
        owners = list(wanted.items())
        try:
            answers = self._run(scripts.ACQUIRE, owners, str(checked_ttl(ttl_ms)), self._note)
        except LockUnavailable as error:
            self._abandon(owners, now=isinstance(error.__cause__, redis.ResponseError))
            raise
        won = [scripts.holder(answer) is None for answer in answers]
        return _leases(owners, won, sent_at + ttl_ms / 1000)

    def renew(self, leases: Collection[Lease], ttl_ms: int) -> dict[str, Lease]:
        """Extend the leases whose token Redis still holds."""
        sent_at = self._clock.monotonic()
        owners = _owners(leases)
        ours = self._run(scripts.RENEW, owners, str(checked_ttl(ttl_ms)))
        return _leases(owners, ours, sent_at + ttl_ms / 1000)

    def release(self, leases: Collection[Lease]) -> set[str]:
        """Delete the keys that hold our token.

        A name whose first reply was lost is missing from the answer, though released.
        """
        owners = _owners(leases)
        released = self._run(scripts.RELEASE, owners)
        return {name for (name, _), done in zip(owners, released, strict=True) if done}

    def inspect(self, names: Collection[str]) -> dict[str, LockInfo]:
        """Return the holders of those names that are held."""
        asked = list(names)
        answers = self._run(scripts.INSPECT, [(name, "") for name in asked])
        return scripts.infos(asked, answers)

    def held(self) -> list[LockInfo]:
        """Return the locks of this namespace in two round trips, without KEYS or SCAN."""
        with self._answering():
            members = self._client().zrange(scripts.index_key(self._namespace), 0, -1)
        prefix = scripts.lock_key(self._namespace, "")
        names = sorted(_text(member).removeprefix(prefix) for member in members)
        return list(self.inspect(names).values())

    def force_release(self, name: str) -> bool:
        """Delete the key of ``name`` and its entry in the index."""
        (deleted,) = self._run(scripts.FORCE_RELEASE, [(name, "")])
        return bool(deleted)

    def ping(self) -> float:
        """Return the seconds of one PING."""
        sent_at = self._clock.monotonic()
        with self._answering():
            self._client().ping()
        return self._clock.monotonic() - sent_at

    def close(self) -> None:
        """Do nothing: the connections belong to django-redis' pool."""

    def _client(self) -> Any:
        return get_redis_connection(self._alias)

    def _run(
        self, script: scripts.Script, owners: list[scripts.Owner], *head: str | bytes
    ) -> list[Any]:
        """Run ``script`` over all owners in one round trip; return its flattened replies.

        Tokens of an earlier acquire whose fate is unknown are released on the way.
        """
        abandoned = self._take_abandoned()
        cleaning = list(scripts.calls(scripts.RELEASE, self._namespace, abandoned))
        calls = list(scripts.calls(script, self._namespace, owners, *head))
        try:
            with self._answering():
                replies = self._execute([*cleaning, *calls])
        except LockUnavailable:
            self._abandoned.extend(abandoned)
            raise
        return list(itertools.chain.from_iterable(replies[len(cleaning) :]))

    def _execute(self, calls: list[scripts.Call]) -> list[Any]:
        """Send the calls; once more after a lost link, since every script may be repeated."""
        if not calls:
            return []
        started = self._clock.monotonic()
        try:
            return self._send(calls)
        except (redis.ConnectionError, redis.TimeoutError, OSError):
            if self._clock.monotonic() - started > _RETRY_WITHIN_SECONDS:
                raise
            return self._send(calls)

    def _send(self, calls: list[scripts.Call]) -> list[Any]:
        # EVAL for the first call of a script loads it for the EVALSHAs behind it: one
        # round trip also after SCRIPT FLUSH, a restart or a failover.
        seen: set[str] = set()
        with self._client().pipeline(transaction=False) as pipe:
            for call in calls:
                if call.script.sha in seen:
                    pipe.evalsha(call.script.sha, call.key_count, *call.values)
                else:
                    pipe.eval(call.script.text, call.key_count, *call.values)
                    seen.add(call.script.sha)
            replies: list[Any] = pipe.execute()
        return replies

    def _abandon(self, owners: Iterable[scripts.Owner], *, now: bool) -> None:
        """Release tokens that may or may not have won; at once where Redis still answers."""
        self._abandoned.extend(owners)
        if now:
            with contextlib.suppress(LockUnavailable):
                self.release(())

    def _take_abandoned(self) -> list[scripts.Owner]:
        with self._mutex:
            taken = list(self._abandoned)
            self._abandoned.clear()
        return taken

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, OSError) as error:
            cause = f"{type(error).__name__}: {error}".rstrip(".")
            raise LockUnavailable(self.name, cause) from error


def pool_timeouts(alias: str) -> tuple[float | None, float | None]:
    """Return (socket timeout, connect timeout) of the alias' pool in seconds.

    None where the pool leaves it to redis-py. Read from the pool that is really used:
    aliases with one URL share whichever pool was opened first. No network access.
    """
    options = get_redis_connection(alias).connection_pool.connection_kwargs
    return options.get("socket_timeout"), options.get("socket_connect_timeout")


def _owners(leases: Iterable[Lease]) -> list[scripts.Owner]:
    return [(lease.name, lease.owner_token) for lease in leases]


def _leases(owners: list[scripts.Owner], flags: list[Any], expires_at: float) -> dict[str, Lease]:
    return {
        name: Lease(name=name, owner_token=token, expires_at=expires_at)
        for (name, token), ours in zip(owners, flags, strict=True)
        if ours
    }


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
