"""The statements of locks that live in a database session, for PostgreSQL and MariaDB/MySQL.

Both know locks by name or number that belong to a session, are taken again by the same
session without an objection, and end with it. Who asks keeps count of what it holds.
"""

from __future__ import annotations

import abc
import hashlib
import itertools
import re
from collections.abc import Collection, Iterator
from typing import Any, Generic, TypeVar

from django.db import connections

from distcron_app.errors import LockUnavailable
from distcron_app.locks.base import schedule_id_of, schedule_lock_name
from distcron_app.locks.session import APPLICATION, BACKEND, LockSession

__all__ = ["SessionLocks", "session_locks"]

Key = TypeVar("Key")

# How long an operator waits for a session that was told to end.
_END_SECONDS = 2


class SessionLocks(abc.ABC, Generic[Key]):
    """Locks of one namespace; a ``Key`` is what the server knows a name by.

    Two names with one key exclude each other needlessly, and nothing worse.
    Every method that gets a session raises what ``LockSession.ask`` does.
    """

    @abc.abstractmethod
    def key(self, name: str) -> Key:
        """Return the key of a name."""

    @abc.abstractmethod
    def name(self, key: Key) -> str:
        """Return the name of a key, or "#" and its number where this process cannot know it."""

    @abc.abstractmethod
    def prepare(self, session: LockSession) -> None:
        """Let a new session live as long as its client does."""

    @abc.abstractmethod
    def take(self, session: LockSession, keys: Collection[Key]) -> set[Key]:
        """Take the locks that no other session has; raise SessionMoved behind a pool."""

    @abc.abstractmethod
    def held(self, session: LockSession, keys: Collection[Key]) -> set[Key]:
        """Return which of the keys the session holds; raise SessionMoved behind a pool."""

    @abc.abstractmethod
    def free(self, session: LockSession, keys: Collection[Key]) -> set[Key]:
        """Give the locks back; return those that the session held."""

    @abc.abstractmethod
    def holders(self, session: LockSession, keys: Collection[Key]) -> dict[Key, str]:
        """Return the holders, in words, of those keys that any session holds."""

    @abc.abstractmethod
    def listed(self, session: LockSession) -> dict[Key, str]:
        """Return the holders of all locks of the namespace that the server can list."""

    @abc.abstractmethod
    def end_holder(self, session: LockSession, key: Key) -> bool:
        """End the session that holds the key, unless it is this one; True when there was one.

        Raise LockUnavailable when it is still there after 2 s.
        """


# A key is (is a schedule, number): a schedule's id, or 64 bits of a hash as a signed number.
_Number = tuple[bool, int]
# The second half of a key that marks a session as one of a namespace; no schedule has it.
_MARK = 0xFFFF_FFFF
_NAMES_REMEMBERED = 10_000

# Client keepalives do not help the server: with these it notices within 20 s that a machine
# is gone. A session may be idle for as long as its client is.
_PREPARE = """
SELECT set_config('statement_timeout', '3s', false),
       set_config('idle_session_timeout', '0', false),
       set_config('tcp_keepalives_idle', '5', false),
       set_config('tcp_keepalives_interval', '5', false),
       set_config('tcp_keepalives_count', '3', false),
       set_config('tcp_user_timeout', '20000', false),
       pg_try_advisory_lock_shared(%s::int, -1),
       pg_is_in_recovery()
"""
# Functions in the list of a SELECT without WHERE, ORDER BY and LIMIT are called once a row.
_TAKE = """
SELECT wanted.paired, wanted.number, pg_backend_pid(),
       CASE WHEN wanted.paired THEN pg_try_advisory_lock(%s::int, wanted.number::int)
            ELSE pg_try_advisory_lock(wanted.number) END
FROM unnest(%s::bool[], %s::bigint[]) AS wanted (paired, number)
"""
_FREE = """
SELECT given.paired, given.number, pg_backend_pid(),
       CASE WHEN given.paired THEN pg_advisory_unlock(%s::int, given.number::int)
            ELSE pg_advisory_unlock(given.number) END
FROM unnest(%s::bool[], %s::bigint[]) AS given (paired, number)
"""
# objsubid is 2 for locks of two numbers and 1 for locks of one, which has its upper half in
# classid; both are unsigned here.
_LOCKS = """
FROM pg_locks AS lock
WHERE lock.locktype = 'advisory' AND lock.granted
  AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
_HELD = f"""
SELECT lock.objsubid, lock.classid::bigint, lock.objid::bigint, pg_backend_pid() {_LOCKS}
  AND lock.pid = pg_backend_pid()
"""
_LISTED = f"""
SELECT lock.objsubid, lock.classid::bigint, lock.objid::bigint, lock.pid,
       (SELECT ARRAY[activity.application_name, activity.usename::text,
                     host(activity.client_addr)]
        FROM pg_stat_activity AS activity WHERE activity.pid = lock.pid)
{_LOCKS} AND (lock.objsubid = 1 OR lock.classid::bigint = %s)
"""  # noqa: S608
_END = f"""
SELECT pg_terminate_backend(lock.pid, {_END_SECONDS * 1000}) {_LOCKS}
  AND lock.pid <> pg_backend_pid()
  AND lock.objsubid = %s AND lock.classid::bigint = %s AND lock.objid::bigint = %s
"""


class _PostgreSQLLocks(SessionLocks[_Number]):
    """Advisory locks: of two numbers for schedules, which can be read back, of one for the rest."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._class = _hash(namespace, size=4) & 0x7FFF_FFFF
        self._names: dict[int, str] = {}

    def key(self, name: str) -> _Number:
        schedule_id = schedule_id_of(name)
        if schedule_id is not None and schedule_id < 2**31:
            return True, schedule_id
        if re.fullmatch("#[0-9a-f]{16}", name):
            return False, _signed(int(name[1:], 16))
        hashed = _signed(_hash(f"{self._namespace}\0{name}", size=8))
        if len(self._names) >= _NAMES_REMEMBERED:
            self._names.clear()
        self._names[hashed] = name
        return False, hashed

    def name(self, key: _Number) -> str:
        is_schedule, number = key
        if is_schedule:
            return schedule_lock_name(number)
        return self._names.get(number, f"#{number % 2**64:016x}")

    def prepare(self, session: LockSession) -> None:
        ((*_, is_standby),) = session.ask(_PREPARE, [self._class])
        if is_standby:
            session.close()
            # Locks of a standby are not those of its primary.
            raise LockUnavailable(BACKEND, "connected to a standby, not to the primary")

    def take(self, session: LockSession, keys: Collection[_Number]) -> set[_Number]:
        return self._done(session, _TAKE, keys)

    def free(self, session: LockSession, keys: Collection[_Number]) -> set[_Number]:
        return self._done(session, _FREE, keys)

    def held(self, session: LockSession, keys: Collection[_Number]) -> set[_Number]:
        found: set[_Number] = set()
        for *where, session_id in session.ask(_HELD):
            session.require_same(session_id)
            found.add(_number(*where))
        return found.intersection(keys)

    def holders(self, session: LockSession, keys: Collection[_Number]) -> dict[_Number, str]:
        return {key: note for key, _, note in self._locks(session) if key in keys}

    def listed(self, session: LockSession) -> dict[_Number, str]:
        locks = self._locks(session)
        # Locks of one number may be any application's; those of marked sessions are ours.
        members = {owner for key, owner, _ in locks if key == (True, _MARK)}
        return {
            (paired, number): note
            for (paired, number), owner, note in locks
            if (number != _MARK if paired else owner in members)
        }

    def end_holder(self, session: LockSession, key: _Number) -> bool:
        paired, number = key
        where = [2, self._class, number] if paired else [1, *divmod(number % 2**64, 2**32)]
        ended = [done for (done,) in session.ask(_END, where)]
        if not all(ended):
            raise LockUnavailable(BACKEND, f"the holder did not end within {_END_SECONDS} s")
        return bool(ended)

    def _done(self, session: LockSession, sql: str, keys: Collection[_Number]) -> set[_Number]:
        paired, numbers = [key[0] for key in keys], [key[1] for key in keys]
        done: set[_Number] = set()
        for pair, number, session_id, is_done in session.ask(sql, [self._class, paired, numbers]):
            session.require_same(session_id)
            if is_done:
                done.add((pair, number))
        return done

    def _locks(self, session: LockSession) -> list[tuple[_Number, int, str]]:
        return [
            (_number(kind, upper, lower), owner, _postgresql_holder(owner, *(facts or ())))
            for kind, upper, lower, owner, facts in session.ask(_LISTED, [self._class])
        ]


def _number(kind: int, upper: int, lower: int) -> _Number:
    return (True, lower) if kind == 2 else (False, _signed(upper << 32 | lower))


def _postgresql_holder(
    owner: int, application: str | None = None, user: str | None = None, host: str | None = None
) -> str:
    if application and application.startswith(APPLICATION):
        return application.removeprefix(APPLICATION).strip()
    facts = [application, user and f"user {user}", f"pid {owner}", host]
    return ", ".join(fact for fact in facts if fact)


# Each name is an expression of the statement, and a row of more than 4,096 has no place.
_CHUNK = 1000
_PLAIN = re.compile("[a-z0-9_.:-]{1,64}")


class _MySQLLocks(SessionLocks[str]):
    """GET_LOCK of MariaDB and MySQL: names of the whole server, which cannot be listed."""

    def __init__(self, namespace: str, database: str) -> None:
        self._prefix = f"{database}.{namespace}:".lower()

    def key(self, name: str) -> str:
        plain = self._prefix + name
        # Names are at most 64 characters, and MySQL compares them without regard to case.
        return plain if _PLAIN.fullmatch(plain) else f"distcron.{_hash(plain, size=16):032x}"

    def name(self, key: str) -> str:
        return f"#{key}"

    def prepare(self, session: LockSession) -> None:
        # The longest that there is, one year: a paused client keeps its locks.
        session.ask("SET SESSION wait_timeout = 31536000")

    def take(self, session: LockSession, keys: Collection[str]) -> set[str]:
        return {key for key, answer in _each(session, "GET_LOCK(%s, 0)", keys) if answer == 1}

    def held(self, session: LockSession, keys: Collection[str]) -> set[str]:
        owners = _each(session, "IS_USED_LOCK(%s)", keys)
        return {key for key, owner in owners if owner == session.id}

    def free(self, session: LockSession, keys: Collection[str]) -> set[str]:
        return {key for key, answer in _each(session, "RELEASE_LOCK(%s)", keys) if answer == 1}

    def holders(self, session: LockSession, keys: Collection[str]) -> dict[str, str]:
        owners = {key: owner for key, owner in _each(session, "IS_USED_LOCK(%s)", keys) if owner}
        rows = session.ask("SELECT id, user, host FROM information_schema.processlist")
        people = {
            number: f"user {user}, connection {number}, {host}" for number, user, host in rows
        }
        return {key: people.get(owner, f"connection {owner}") for key, owner in owners.items()}

    def listed(self, session: LockSession) -> dict[str, str]:
        return {}

    def end_holder(self, session: LockSession, key: str) -> bool:
        ((_, owner),) = _each(session, "IS_USED_LOCK(%s)", [key])
        if owner is None or owner == session.id:
            return False
        session.ask("KILL %s", [owner])
        # KILL only tells it to end. Waiting for the lock shows that it has.
        taken = list(_each(session, f"GET_LOCK(%s, {_END_SECONDS})", [key]))
        self.free(session, [key for key, answer in taken if answer == 1])
        if owner in dict(_each(session, "IS_USED_LOCK(%s)", [key])).values():
            raise LockUnavailable(BACKEND, f"the holder did not end within {_END_SECONDS} s")
        return True


def _each(
    session: LockSession, call: str, keys: Collection[str]
) -> Iterator[tuple[str, int | None]]:
    """Yield each key with what the function returned for it; one statement for 1,000 of them."""
    remaining = iter(keys)
    while names := list(itertools.islice(remaining, _CHUNK)):
        calls = ", ".join([call] * len(names))
        ((session_id, *answers),) = session.ask(f"SELECT CONNECTION_ID(), {calls}", names)
        session.require_same(session_id)
        yield from zip(names, answers, strict=True)


def session_locks(alias: str, namespace: str) -> SessionLocks[Any]:
    """Return the locks that the database ``alias`` has, which must be one that has any."""
    if connections[alias].vendor == "postgresql":
        return _PostgreSQLLocks(namespace)
    return _MySQLLocks(namespace, str(connections.settings[alias]["NAME"]))


def _hash(text: str, *, size: int) -> int:
    given = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(given, digest_size=size).digest())


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
