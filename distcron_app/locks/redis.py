"""Locks in one Redis, Valkey, Sentinel or Cluster through django-redis' raw client.

The cache API is never used: ``cache.clear()`` frees locks, ``cache.add()`` hides a dead
Redis, and values are pickled. What is stored, and how, is in ``scripts``.

At most one owner token holds a name while Redis keeps its data. A restart without
persistence or a failover may forget locks; the database decides then.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks import scripts
from distcron_app.locks.base import Lease, LockBackend, LockInfo, checked_ttl
from distcron_app.locks.link import Link

__all__ = ["RedisLockBackend"]

# Most abandoned tokens remembered: the largest batch of the settings.
_ABANDONED_LIMIT = 10_000
# How long the key of ping() lives.
_PROBE_TTL_MS = 1000


class RedisLockBackend(LockBackend):
    """Locks on the cache alias ``alias``; ``note`` is stored with each for people.

    A call costs one round trip. A Redis that is down or hung costs at most two socket
    timeouts, and one where the timeout is longer than 0.6 s.
    """

    name = "redis"

    def __init__(
        self, alias: str, namespace: str, *, note: str = "", clock: Clock | None = None
    ) -> None:
        self._namespace = namespace
        self._note = note.encode("utf-8", "replace")
        self._clock = clock or Clock()
        self._link = Link(alias, self.name, self._clock)
        self._abandoned: collections.deque[scripts.Owner] = collections.deque(
            maxlen=_ABANDONED_LIMIT
        )

    def acquire(self, wanted: Mapping[str, str], ttl_ms: int) -> dict[str, Lease]:
        """Take the free locks, as ``LockBackend.acquire`` promises."""
        sent_at = self._clock.monotonic()
        owners = list(wanted.items())
        try:
            answers = self._run(scripts.ACQUIRE, owners, str(checked_ttl(ttl_ms)), self._note)
        except LockUnavailable as error:
            self._abandon(owners, now=error.refused)
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
        members = self._link.command("ZRANGE", scripts.index_key(self._namespace), 0, -1)
        names = sorted(scripts.lock_name(self._namespace, member) for member in members)
        return list(self.inspect(names).values())

    def force_release(self, name: str) -> bool:
        """Delete the key of ``name`` and its entry in the index."""
        (deleted,) = self._run(scripts.FORCE_RELEASE, [(name, "")])
        return bool(deleted)

    def ping(self) -> float:
        """Return the seconds of one write: a Redis that only reads carries no locks."""
        sent_at = self._clock.monotonic()
        key = scripts.probe_key(self._namespace)
        self._link.command("SET", key, self._note, "PX", _PROBE_TTL_MS)
        return self._clock.monotonic() - sent_at

    def close(self) -> None:
        """Give the kept connection back; the pool belongs to django-redis."""
        self._link.close()

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
            replies = self._link.run([*cleaning, *calls])
        except LockUnavailable:
            self._abandoned.extend(abandoned)
            raise
        return list(itertools.chain.from_iterable(replies[len(cleaning) :]))

    def _abandon(self, owners: Iterable[scripts.Owner], *, now: bool) -> None:
        """Release tokens that may or may not have won; at once where Redis still answers."""
        self._abandoned.extend(owners)
        if now:
            with contextlib.suppress(LockUnavailable):
                self.release(())

    def _take_abandoned(self) -> list[scripts.Owner]:
        # One by one, so that a token that another thread adds meanwhile is never lost.
        taken = []
        with contextlib.suppress(IndexError):
            while self._abandoned:
                taken.append(self._abandoned.popleft())
        return taken


def _owners(leases: Iterable[Lease]) -> list[scripts.Owner]:
    return [(lease.name, lease.owner_token) for lease in leases]


def _leases(owners: list[scripts.Owner], flags: list[Any], expires_at: float) -> dict[str, Lease]:
    return {
        name: Lease(name=name, owner_token=token, expires_at=expires_at)
        for (name, token), ours in zip(owners, flags, strict=True)
        if ours
    }
