"""A lock on the very connection that a job writes through.

When the link is lost the server ends the session, and with it the lock and the writes: who
gets the lock afterwards can rely on nothing of the former holder being committed later. The
lock of the level ``database`` is held by the node and lives in another session, so that one
may end while the job goes on.
"""

from __future__ import annotations

from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from distcron_app.locks.advisory import session_locks

__all__ = ["EffectLock"]


class EffectLock:
    """The lock ``name`` of ``namespace`` in the session of ``connection``.

    Its keys are apart from those of all other locks. PostgreSQL frees it with the end of the
    transaction, which works behind proxies that pool transactions, too; MariaDB and MySQL
    with ``free`` or the end of the session. Other databases have no such lock.
    """

    def __init__(self, connection: BaseDatabaseWrapper, namespace: str, name: str) -> None:
        self._connection = connection
        self._key = self._key_of(namespace, name)

    def try_take(self) -> bool:
        """Take it if no other session has it; inside the transaction. Raise DatabaseError."""
        if self._connection.vendor == "postgresql":
            return bool(self._ask("SELECT pg_try_advisory_xact_lock(%s::bigint)"))
        return bool(self._ask("SELECT GET_LOCK(%s, 0)"))

    def free(self) -> None:
        """Give it back after the transaction has ended. Raise DatabaseError."""
        if self._connection.vendor == "mysql" and self._connection.connection is not None:
            self._ask("SELECT RELEASE_LOCK(%s)")

    def _key_of(self, namespace: str, name: str) -> Any:
        key = session_locks(self._connection.alias, namespace).key(f"effects:{name}")
        # A number of PostgreSQL stands beside what kind it is.
        return key[1] if isinstance(key, tuple) else key

    def _ask(self, sql: str) -> Any:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, [self._key])
            return cursor.fetchone()[0]
