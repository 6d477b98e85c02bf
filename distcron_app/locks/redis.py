"""Locks in one Redis (or Sentinel, or Valkey) through django-redis' raw client.

The cache API is never used: ``cache.clear()`` frees locks, ``cache.add()`` hides a dead
Redis, and values are pickled. A lock is a string key with a TTL, its value
``<owner token>|<note>``. A sorted set lists the keys by their expiry, so that
``held()`` needs neither KEYS nor SCAN.

At most one owner token holds a name while Redis keeps its data. A restart without
persistence or a failover may forget locks; the database decides then.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import redis
from django_redis import get_redis_connection

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks.base import Lease, LockBackend, LockInfo, checked_ttl

__all__ = ["RedisLockBackend", "pool_timeouts"]

# A script blocks Redis while it runs; 500 names take about 2 ms.
_CHUNK = 500
# A second try only while the whole call stays near one second.
_RETRY_WITHIN_SECONDS = 0.6
# Most abandoned tokens remembered: the largest batch of the settings.
_ABANDONED_LIMIT = 10_000

# KEYS[1] index; KEYS[2..n] lock keys
# ARGV[1] TTL in ms; ARGV[2] note; ARGV[3..n+1] owner tokens, in the order of the keys
# Returns 1 (won, or already held under this token) or 0 for each key.
# Atomic, since another node could set the key between GET and SET, and an index that
# misses a held key hides it from operators.
# SET comes first: with its memory full Redis refuses only a script's first write.
# pcall, since a planted key of another type must not fail the whole batch.
_ACQUIRE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expiry = string.format('%.0f', now + ARGV[1])
local won = {}
for i = 2, #KEYS do
  local token = ARGV[i + 1]
  local value = redis.pcall('GET', KEYS[i])
  won[i - 1] = 0
  if value == false then
    redis.call('SET', KEYS[i], token .. '|' .. ARGV[2], 'PX', ARGV[1], 'NX')
    won[i - 1] = 1
  elseif type(value) == 'string' and string.match(value, '^[^|]*') == token then
    redis.call('PEXPIRE', KEYS[i], ARGV[1])
    won[i - 1] = 1
  end
  if won[i - 1] == 1 then redis.call('ZADD', KEYS[1], expiry, KEYS[i]) end
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.0f', now))
return won
"""

# KEYS[1] index; KEYS[2..n] lock keys
# ARGV[1] TTL in ms; ARGV[2..n] owner tokens
# Returns 1 (extended) or 0 (gone, or somebody else's) for each key.
# Atomic, since the lock may expire and be won by another node between GET and PEXPIRE.
# PEXPIRE comes first: it needs no memory, and ZADD may then exceed the limit.
_RENEW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expiry = string.format('%.0f', now + ARGV[1])
local ours = {}
for i = 2, #KEYS do
  local value = redis.pcall('GET', KEYS[i])
  ours[i - 1] = 0
  if type(value) == 'string' and string.match(value, '^[^|]*') == ARGV[i] then
    redis.call('PEXPIRE', KEYS[i], ARGV[1])
    redis.call('ZADD', KEYS[1], expiry, KEYS[i])
    ours[i - 1] = 1
  end
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.0f', now))
return ours
"""

# KEYS[1] index; KEYS[2..n] lock keys
# ARGV[1..n-1] owner tokens
# Returns 1 (deleted) or 0 (gone, or somebody else's) for each key.
# Atomic, since between GET and DEL the lock may pass to another node, whose lock
# would then be deleted. Only commands that Redis accepts with its memory full.
_RELEASE = """
local released = {}
for i = 2, #KEYS do
  local value = redis.pcall('GET', KEYS[i])
  released[i - 1] = 0
  if type(value) == 'string' and string.match(value, '^[^|]*') == ARGV[i - 1] then
    redis.call('DEL', KEYS[i])
    redis.call('ZREM', KEYS[1], KEYS[i])
    released[i - 1] = 1
  end
end
return released
"""

# KEYS[1] index (unused, so that all scripts are called alike); KEYS[2..n] lock keys
# Returns for each key {value or false, TTL in ms}; -1 never expires, -2 absent.
# Atomic, so that value and TTL belong to the same owner.
_INSPECT = """
local found = {}
for i = 2, #KEYS do
  local value = redis.pcall('GET', KEYS[i])
  if type(value) ~= 'string' then value = false end
  found[i - 1] = {value, redis.call('PTTL', KEYS[i])}
end
return found
"""

_Owner = tuple[str, str]
# A script, how many of the values are keys, and the values.
_Call = tuple[str, int, list[str | bytes]]


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
        self._abandoned: collections.deque[_Owner] = collections.deque(maxlen=_ABANDONED_LIMIT)
        self._mutex = threading.Lock()

    def acquire(self, wanted: Mapping[str, str], ttl_ms: int) -> dict[str, Lease]:
        """Take the free locks, as ``LockBackend.acquire`` promises."""
        sent_at = self._clock.monotonic()
        owners = list(wanted.items())
        try:
            won = self._run(_ACQUIRE, owners, str(checked_ttl(ttl_ms)), self._note)
        except LockUnavailable as error:
            self._abandon(owners, now=isinstance(error.__cause__, redis.ResponseError))
            raise
        return _leases(owners, won, sent_at + ttl_ms / 1000)

    def renew(self, leases: Collection[Lease], ttl_ms: int) -> dict[str, Lease]:
        """Extend the leases whose token Redis still holds."""
        sent_at = self._clock.monotonic()
        owners = _owners(leases)
        ours = self._run(_RENEW, owners, str(checked_ttl(ttl_ms)))
        return _leases(owners, ours, sent_at + ttl_ms / 1000)

    def release(self, leases: Collection[Lease]) -> set[str]:
        """Delete the keys that hold our token.

        A name whose first reply was lost is missing from the answer, though released.
        """
        owners = _owners(leases)
        released = self._run(_RELEASE, owners)
        return {name for (name, _), done in zip(owners, released, strict=True) if done}

    def inspect(self, names: Collection[str]) -> dict[str, LockInfo]:
        """Return the holders of those names that are held."""
        found = self._run(_INSPECT, [(name, "") for name in names])
        return {
            name: _info(name, value, ttl_ms)
            for name, (value, ttl_ms) in zip(names, found, strict=True)
            if ttl_ms != -2
        }

    def held(self) -> list[LockInfo]:
        """Return the locks of this namespace in two round trips, without KEYS or SCAN."""
        with self._answering():
            members = self._client().zrange(self._index_key, 0, -1)
        prefix = self._key("")
        names = sorted(_text(member).removeprefix(prefix) for member in members)
        return list(self.inspect(names).values())

    def force_release(self, name: str) -> bool:
        """Delete the key of ``name`` and its entry in the index, in one transaction."""
        with self._answering(), self._client().pipeline(transaction=True) as pipe:
            pipe.delete(self._key(name))
            pipe.zrem(self._index_key, self._key(name))
            deleted, _ = pipe.execute()
        return bool(deleted)

    def ping(self) -> float:
        """Return the seconds of one PING."""
        sent_at = self._clock.monotonic()
        with self._answering():
            self._client().ping()
        return self._clock.monotonic() - sent_at

    def close(self) -> None:
        """Do nothing: the connections belong to django-redis' pool."""

    @property
    def _index_key(self) -> str:
        return f"{self._namespace}:{{lock}}-index"

    def _key(self, name: str) -> str:
        # One hash tag, so that a batch stays in one slot of a Redis Cluster.
        return f"{self._namespace}:{{lock}}:{name}"

    def _client(self) -> Any:
        return get_redis_connection(self._alias)

    def _run(self, script: str, owners: list[_Owner], *head: str | bytes) -> list[Any]:
        """Run ``script`` over all owners in one round trip; return its flattened replies.

        Tokens of an earlier acquire whose fate is unknown are released on the way.
        """
        abandoned = self._take_abandoned()
        cleaning = list(self._calls(_RELEASE, abandoned, ()))
        calls = list(self._calls(script, owners, head))
        try:
            with self._answering():
                replies = self._execute([*cleaning, *calls])
        except LockUnavailable:
            self._abandoned.extend(abandoned)
            raise
        return list(itertools.chain.from_iterable(replies[len(cleaning) :]))

    def _calls(
        self, script: str, owners: list[_Owner], head: tuple[str | bytes, ...]
    ) -> Iterator[_Call]:
        for start in range(0, len(owners), _CHUNK):
            chunk = owners[start : start + _CHUNK]
            keys = [self._index_key, *(self._key(name) for name, _ in chunk)]
            yield script, len(keys), [*keys, *head, *(token for _, token in chunk)]

    def _execute(self, calls: list[_Call]) -> list[Any]:
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

    def _send(self, calls: list[_Call]) -> list[Any]:
        # EVAL for the first call of a script loads it for the EVALSHAs behind it: one
        # round trip also after SCRIPT FLUSH, a restart or a failover.
        seen: set[str] = set()
        with self._client().pipeline(transaction=False) as pipe:
            for script, key_count, rest in calls:
                if script in seen:
                    pipe.evalsha(_sha(script), key_count, *rest)
                else:
                    pipe.eval(script, key_count, *rest)
                    seen.add(script)
            replies: list[Any] = pipe.execute()
        return replies

    def _abandon(self, owners: Iterable[_Owner], *, now: bool) -> None:
        """Release tokens that may or may not have won; at once where Redis still answers."""
        self._abandoned.extend(owners)
        if now:
            with contextlib.suppress(LockUnavailable):
                self.release(())

    def _take_abandoned(self) -> list[_Owner]:
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


def _sha(script: str) -> str:
    # The name that Redis gives a script, not a protection.
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def _owners(leases: Iterable[Lease]) -> list[_Owner]:
    return [(lease.name, lease.owner_token) for lease in leases]


def _leases(owners: list[_Owner], flags: list[Any], expires_at: float) -> dict[str, Lease]:
    return {
        name: Lease(name=name, owner_token=token, expires_at=expires_at)
        for (name, token), ours in zip(owners, flags, strict=True)
        if ours
    }


def _info(name: str, value: bytes | str | None, ttl_ms: int) -> LockInfo:
    token, _, note = _text(value or b"").partition("|")
    return LockInfo(
        name=name,
        owner_token=token or None,
        note=note,
        ttl_ms=None if ttl_ms < 0 else ttl_ms,
    )


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
