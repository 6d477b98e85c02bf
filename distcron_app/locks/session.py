"""A database session that belongs to the locks alone, and what became of it.

Locks of a database live as long as the session that took them, so it is never one of the
ORM's: those are pooled, shared, recycled and closed. It is built by Django's own backend
from the same settings, and runs nothing but the statements of the locks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from django.db import Error, connections

from distcron_app.errors import LockUnavailable

__all__ = ["BACKEND", "LockSession", "SessionLost", "SessionMoved"]

BACKEND = "database"
APPLICATION = "distcron-lock"
_CONNECT_SECONDS = 3
# The server gives up a statement after 3 s; a server that says nothing is left after 5 s.
_ANSWER_SECONDS = 5


class SessionLost(LockUnavailable):
    """The session is over, and with it everything that it held."""


class SessionMoved(SessionLost):
    """Another session of the server answered: there is a proxy in between that pools."""


class LockSession:
    """An open session of the database ``alias``; ``label`` is shown as its owner.

    ``id`` is the server's number of it. Opening raises LockUnavailable, and takes at most
    3 s to connect and 5 s for the first answer. Not for several threads at once.
    """

    def __init__(self, alias: str, *, label: str = "") -> None:
        self._wrapper = _own_wrapper(alias, label)
        self.vendor: str = self._wrapper.vendor
        try:
            with self._wrapper.wrap_database_errors:
                self._wrapper.connection = self._wrapper.get_new_connection(
                    self._wrapper.get_connection_params()
                )
        except Error as error:
            raise LockUnavailable(BACKEND, _words(error)) from error
        try:
            with self._bounded():
                # Django's connect() would ask the server for more, without a time limit.
                self._wrapper._set_autocommit(True)
                self.id = self._identify()
        except Error as error:
            self.close()
            raise LockUnavailable(BACKEND, _words(error)) from error

    def ask(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of one statement, one round trip, at most 5 s.

        Raise SessionLost when the session is over, and LockUnavailable when the server
        refused the statement and everything that is held stays held.
        """
        try:
            with self._bounded():
                return self._execute(sql, params)
        except Error as error:
            raise self._failure(_words(error)) from error

    def require_same(self, session_id: int) -> None:
        """Raise SessionMoved when the server's number of the session that answered is another."""
        if session_id != self.id:
            self.close()
            raise SessionMoved(BACKEND, f"session {session_id} answered in place of {self.id}")

    def close(self) -> None:
        """End the session; the server frees what it held."""
        connection, self._wrapper.connection = self._wrapper.connection, None
        # A link that is broken already cannot be closed politely.
        with contextlib.suppress(self._wrapper.Database.Error, OSError):
            if connection is not None:
                connection.close()

    def abandon(self) -> None:
        """Let go of a parent's session in a forked child, without a word to the server.

        The child's copy of the socket would keep the session alive when the parent dies,
        and the driver would say goodbye on it when its object is deleted.
        """
        with contextlib.suppress(Error, OSError):
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, self._descriptor(), inheritable=False)
            os.close(nowhere)

    def _execute(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        # Not the wrapper's cursor: with DEBUG on that keeps every statement.
        with self._wrapper.wrap_database_errors, self._wrapper.connection.cursor() as cursor:
            cursor.execute(sql, params or None)
            return list(cursor.fetchall()) if cursor.description else []

    def _identify(self) -> int:
        ((number,),) = self._execute(_IDENTIFY[self.vendor], ())
        return int(number)

    def _failure(self, cause: str) -> LockUnavailable:
        with contextlib.suppress(Error), self._bounded():
            if self._identify() == self.id:
                return LockUnavailable(BACKEND, cause)
        self.close()
        return SessionLost(BACKEND, cause)

    def _descriptor(self) -> int:
        # Asked anew each time: a driver that closed the socket lets its number be used again.
        connection = self._wrapper.connection
        with self._wrapper.wrap_database_errors:
            # PyMySQL has no fileno().
            return int(getattr(connection, "_sock", connection).fileno())

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        """Cut the link to a server that does not answer; the driver then sees its end."""
        if self.vendor != "postgresql":
            # The drivers of MySQL have read_timeout.
            yield
            return
        link = socket.socket(fileno=os.dup(self._descriptor()))
        timer = threading.Timer(_ANSWER_SECONDS, _cut, [link])
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            link.close()


_IDENTIFY = {"postgresql": "SELECT pg_backend_pid()", "mysql": "SELECT CONNECTION_ID()"}


def _own_wrapper(alias: str, label: str) -> Any:
    given = connections.settings[alias]
    model = connections[alias]
    options = {key: value for key, value in given["OPTIONS"].items() if key != "pool"}
    return type(model)(
        {**given, "OPTIONS": options | _OPTIONS[model.vendor](label)},
        alias=alias,
    )


def _postgresql_options(label: str) -> dict[str, Any]:
    # The server would print other characters as "?" as well.
    name = "".join(letter if " " <= letter <= "~" else "?" for letter in label)
    return {
        "application_name": f"{APPLICATION} {name}".strip(),
        "connect_timeout": _CONNECT_SECONDS,
        "keepalives": 1,
        "keepalives_idle": 5,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 15_000,
    }


def _mysql_options(label: str) -> dict[str, Any]:
    return {
        "connect_timeout": _CONNECT_SECONDS,
        "read_timeout": _ANSWER_SECONDS,
        "write_timeout": _ANSWER_SECONDS,
    }


_OPTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "postgresql": _postgresql_options,
    "mysql": _mysql_options,
}


def _cut(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def _words(error: Error) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
