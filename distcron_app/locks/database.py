"""Locks held by a session of the database, for as long as the run that they guard.

The server frees a lock when the session that took it ends, however it ends, and not
before: a paused process keeps its locks. That is stricter than Redis, and intended. Within
the holder the TTL is honoured: an expired lease cannot be renewed, and the holder's next
call frees it.

At most one session holds a name while the database is one server that all nodes reach
directly. Not so behind a proxy that gives each transaction another session, which is
refused. A failover to a standby ends all sessions, and the locks with them: the holders
are told at their next renewal, and may until then run beside a new holder.

PostgreSQL: advisory locks, of which each database has its own. MariaDB and MySQL: GET_LOCK,
of which the server has one set, so that the database's name is part of the lock's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from django.utils.translation import gettext as _

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks.advisory import session_locks
from distcron_app.locks.base import Lease, LockBackend, LockInfo, checked_ttl, new_owner_token
from distcron_app.locks.session import BACKEND, LockSession, SessionLost, SessionMoved

__all__ = ["DatabaseLockBackend", "pooling_problem"]

# A database that is away is asked for a new session no more often than this, since each
# try may take several seconds.
_PAUSE_SECONDS = 1.0
# Other clients of a busy proxy may happen to keep the probe's two apart.
_PROBE_ROUNDS = 5


@dataclasses.dataclass(slots=True)
class _Held:
    lease: Lease
    key: Any
    granted_ms: int
    taken_at: float
    renewals: int = 0


class DatabaseLockBackend(LockBackend):
    """Locks in one session of the database ``alias``, opened by the first call that needs it.

    The session is this object's own, so all of its locks end together. A call costs one
    round trip, and one more where a lease has expired. A server that does not answer costs
    5 s, one that cannot be connected to 3 s and then nothing for a second.
    """

    name = BACKEND

    def __init__(
        self, alias: str, namespace: str, *, note: str = "", clock: Clock | None = None
    ) -> None:
        self._alias = alias
        self._note = note
        self._clock = clock or Clock()
        self._locks = session_locks(alias, namespace)
        self._session: LockSession | None = None
        self._is_direct = False
        self._failed: tuple[float, str] | None = None
        self._held: dict[str, _Held] = {}
        # The loop acquires and releases, the keeper renews, both through one session.
        self._mutex = threading.Lock()
        _instances.add(self)

    @property
    def state(self) -> str:  # type: ignore[override]
        """Return "open" while a database that gave no session is left alone for a moment."""
        return "closed" if self._refusal() is None else "open"

    def acquire(self, wanted: Mapping[str, str], ttl_ms: int) -> dict[str, Lease]:
        """Take the free locks, as ``LockBackend.acquire`` promises."""
        expires_at = self._clock.monotonic() + checked_ttl(ttl_ms) / 1000
        leases = {
            name: Lease(name=name, owner_token=token, expires_at=expires_at)
            for name, token in wanted.items()
        }
        with self._in_order():
            again = self._alive([lease for lease in leases.values() if self._is_ours(lease)])
            won = self._take([name for name in leases if name not in self._held])
            for name, key in won.items():
                self._held[name] = _Held(leases[name], key, ttl_ms, self._clock.monotonic())
            for name in again:
                self._held[name].lease = leases[name]
                self._held[name].granted_ms = ttl_ms
        return {name: lease for name, lease in leases.items() if name in won or name in again}

    def renew(self, leases: Collection[Lease], ttl_ms: int) -> dict[str, Lease]:
        """Extend the leases that have not expired and whose locks the session still has.

        When the session is over all its leases are lost, and never taken again by another
        session under the same lease: somebody else may have held the lock in between. A
        link that fails is the same: this side closes it, which ends the session, so the
        holder is told. LockUnavailable only where the session lives and the server refused
        the question; the locks are then still held.
        """
        expires_at = self._clock.monotonic() + checked_ttl(ttl_ms) / 1000
        try:
            with self._in_order():
                alive = self._alive([lease for lease in leases if self._is_ours(lease)])
                for name in alive:
                    held = self._held[name]
                    held.lease = dataclasses.replace(held.lease, expires_at=expires_at)
                    held.granted_ms = ttl_ms
                    held.renewals += 1
                return {
                    lease.name: self._held[lease.name].lease
                    for lease in leases
                    if lease.name in alive
                }
        except SessionLost:
            return {}

    def release(self, leases: Collection[Lease]) -> set[str]:
        """Give back the leases that are still ours."""
        with self._in_order():
            return self._free([lease.name for lease in leases if self._is_ours(lease)])

    def inspect(self, names: Collection[str]) -> dict[str, LockInfo]:
        """Return the holders of those names that are held.

        Owner token, TTL and age are known to the holder alone; of another's lock only the
        label of its node is known (PostgreSQL), or its user and host (MariaDB).
        """
        with self._in_order():
            keys = {name: self._locks.key(name) for name in names if name not in self._held}
            others = self._locks.holders(self._connected(), keys.values()) if keys else {}
            found = {name: others[key] for name, key in keys.items() if key in others}
            return {
                name: self._info(name, found.get(name, ""))
                for name in names
                if name in self._held or name in found
            }

    def held(self) -> list[LockInfo]:
        """Return the held locks of this namespace, as far as the server can list them.

        PostgreSQL lists those of schedules by name, and others as "#" and a number where
        this process never asked for the name. MariaDB lists none: this object's own.
        """
        with self._in_order():
            listed = self._locks.listed(self._connected())
            own = {held.key for held in self._held.values()}
            names = {self._locks.name(key): note for key, note in listed.items() if key not in own}
            names |= dict.fromkeys(self._held, "")
            return [self._info(name, names[name]) for name in sorted(names)]

    def force_release(self, name: str) -> bool:
        """End the session that holds ``name``: every lock of that node goes with it.

        There is no other way to take a lock from a session. A lock of this object is just
        given back. The server allows it to the same user, or to an administrator.
        """
        with self._in_order():
            if name in self._held:
                return name in self._free([name])
            return self._locks.end_holder(self._connected(), self._locks.key(name))

    def ping(self) -> float:
        """Return the seconds of one round trip."""
        with self._in_order():
            session = self._connected()
            started = self._clock.monotonic()
            session.ask("SELECT 1")
            return self._clock.monotonic() - started

    def close(self) -> None:
        """Release everything that this object holds, and end its session."""
        with self._mutex:
            # Freed before the end, which the server may notice a moment later.
            with contextlib.suppress(LockUnavailable):
                self._free(list(self._held))
            self._forget_session()

    def forget_inherited(self) -> None:
        """Leave the session to the parent of this forked child, with all its locks."""
        self._mutex = threading.Lock()
        self._held.clear()
        inherited, self._session = self._session, None
        if inherited is not None:
            inherited.abandon()

    def _take(self, names: Collection[str]) -> dict[str, Any]:
        # A session gets a lock that it has once more, so names that share a key exclude
        # each other here.
        taken = {held.key for held in self._held.values()}
        wanted: dict[Any, str] = {}
        for name in names:
            key = self._locks.key(name)
            if key not in taken:
                wanted.setdefault(key, name)
        if not wanted:
            return {}
        session = self._connected()
        try:
            won = self._locks.take(session, wanted)
        except SessionLost:
            raise
        except LockUnavailable:
            self._undo(session, wanted)
            raise
        return {name: key for key, name in wanted.items() if key in won}

    def _undo(self, session: LockSession, keys: Collection[Any]) -> None:
        """Free what the server may have granted before it refused the rest."""
        try:
            self._locks.free(session, keys)
        except LockUnavailable as error:
            raise SessionLost(self.name, error.cause) from error

    def _alive(self, leases: Collection[Lease]) -> set[str]:
        """Return the names that the session still holds; the others are struck off."""
        if not leases or self._session is None:
            return set()
        keys = {lease.name: self._held[lease.name].key for lease in leases}
        held = self._locks.held(self._session, keys.values())
        for name in [name for name, key in keys.items() if key not in held]:
            del self._held[name]
        return {name for name, key in keys.items() if key in held}

    def _free(self, names: Collection[str]) -> set[str]:
        if not names or self._session is None:
            return set()
        keys = {name: self._held[name].key for name in names}
        freed = self._locks.free(self._session, keys.values())
        for name in keys:
            del self._held[name]
        return {name for name, key in keys.items() if key in freed}

    def _is_ours(self, lease: Lease) -> bool:
        held = self._held.get(lease.name)
        return held is not None and held.lease.owner_token == lease.owner_token

    def _info(self, name: str, note: str) -> LockInfo:
        held = self._held.get(name)
        if held is None:
            return LockInfo(name=name, owner_token=None, note=note, ttl_ms=None)
        now = self._clock.monotonic()
        return LockInfo(
            name=name,
            owner_token=held.lease.owner_token,
            note=self._note,
            ttl_ms=max(0, round((held.lease.expires_at - now) * 1000)),
            granted_ms=held.granted_ms,
            age_ms=round((now - held.taken_at) * 1000),
            renewals=held.renewals,
        )

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        with self._mutex:
            try:
                now = self._clock.monotonic()
                self._free([n for n, held in self._held.items() if held.lease.expires_at <= now])
                yield
            except SessionLost:
                self._forget_session()
                raise

    def _connected(self) -> LockSession:
        if self._session is None:
            refusal = self._refusal()
            if refusal is not None:
                raise LockUnavailable(self.name, refusal)
            try:
                self._session = self._opened()
            except LockUnavailable as error:
                self._failed = (self._clock.monotonic(), error.cause)
                raise
        return self._session

    def _refusal(self) -> str | None:
        """Return why no session could be opened, for as long as none is to be tried."""
        if self._failed is None:
            return None
        failed_at, cause = self._failed
        return cause if self._clock.monotonic() - failed_at < _PAUSE_SECONDS else None

    def _opened(self) -> LockSession:
        if not self._is_direct:
            # Before any lock is trusted: also processes other than nodes take locks.
            problem = pooling_problem(self._alias)
            if problem:
                raise LockUnavailable(self.name, problem)
            self._is_direct = True
        session = LockSession(self._alias, label=self._note)
        try:
            self._locks.prepare(session)
        except LockUnavailable:
            session.close()
            raise
        return session

    def _forget_session(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None
        self._held.clear()


_instances: weakref.WeakSet[DatabaseLockBackend] = weakref.WeakSet()


def pooling_problem(alias: str) -> str:
    """Return why the connection of ``alias`` cannot carry locks, in words; empty when it can.

    Behind a proxy that pools transactions a session lock belongs to nobody in particular.
    The probe makes such a proxy show itself: a client takes a lock, a second one occupies a
    session of the server by a transaction, and then the first must still be where it was,
    the second must not get the lock too, and the first must be able to free it.

    Opens two sessions and changes no setting of them. A lock that nobody asks for may stay
    behind in a proxy that is refused. Raise LockUnavailable when the database does not
    answer, or gives no two sessions at once.
    """
    locks = session_locks(alias, new_owner_token())
    keys = [locks.key("probe")]
    with (
        contextlib.closing(LockSession(alias, label="probe")) as first,
        contextlib.closing(LockSession(alias, label="probe")) as second,
    ):
        try:
            is_sound = locks.take(first, keys) != set()
            for _round in range(_PROBE_ROUNDS):
                second.ask("BEGIN")
                is_sound &= locks.held(first, keys) != set()
                is_sound &= locks.take(second, keys) == set()
                second.ask("ROLLBACK")
            is_sound &= locks.free(first, keys) != set()
        except SessionMoved:
            is_sound = False
    if is_sound:
        return ""
    return _(
        "database %r is reached through a proxy that gives every transaction another session, "
        "such as PgBouncer in transaction mode. Two nodes would both hold one lock. Use session "
        "pooling there, or name an alias that connects directly in DISTCRON['LOCK_DATABASE']."
    ) % (alias)


def _forget_inherited() -> None:
    for backend in list(_instances):
        backend.forget_inherited()


os.register_at_fork(after_in_child=_forget_inherited)
