"""Servers of a benchmark's own: on free ports of the loopback, in temporary folders.

    with RedisServer() as server:
        redis.Redis.from_url(server.url).ping()

They are stopped by process id at the end of the ``with``, and their folders removed.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import psycopg
import redis

__all__ = ["PostgresServer", "RedisServer", "until"]

HOST = "127.0.0.1"
START_SECONDS = 60.0


class _Server:
    """A server process in a folder of its own."""

    def __init__(self, kind: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"distcron-bench-{kind}-"))
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it answers."""
        with open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                self.command(), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until(self._answers_or_ended, START_SECONDS, f"{self.command()[0]} on port {self.port}")
        if self._process.poll() is not None:
            raise SystemExit((self.folder / "log").read_text())

    def stop(self) -> None:
        """Stop it and remove its folder."""
        if self._process is not None:
            # Not SIGTERM: PostgreSQL would wait for its clients.
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self) -> list[str]:
        """Return the command line."""
        raise NotImplementedError

    def answers(self) -> bool:
        """Return whether a client gets an answer."""
        raise NotImplementedError

    def _answers_or_ended(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None or self.answers()


class RedisServer(_Server):
    """A redis-server without persistence."""

    def __init__(self) -> None:
        super().__init__("redis")

    @property
    def url(self) -> str:
        """Return the URL of database 0."""
        return f"redis://{HOST}:{self.port}/0"

    def command(self) -> list[str]:
        """Return the command line."""
        program = _program("redis-server", [])
        where = ["--bind", HOST, "--port", str(self.port), "--dir", str(self.folder)]
        return [program, *where, "--save", "", "--appendonly", "no"]

    def answers(self) -> bool:
        """Return whether PING is answered."""
        with contextlib.suppress(redis.RedisError), redis.Redis.from_url(self.url) as client:
            return bool(client.ping())
        return False


class PostgresServer(_Server):
    """A PostgreSQL with the database ``distcron``, fsync on, that logs every statement.

    As root it runs as the user postgres.
    """

    _SETTINGS = (
        "shared_buffers = 64MB",
        "max_connections = 200",
        "logging_collector = on",
        "log_destination = csvlog",
        "log_directory = statements",
        "log_filename = one",
        "log_rotation_age = 0",
        "log_rotation_size = 0",
        "log_timezone = UTC",
        "log_statement = all",
    )

    def __init__(self) -> None:
        super().__init__("postgres")
        self._data = self.folder / "data"

    @property
    def url(self) -> str:
        """Return the URL of the database."""
        return f"postgresql://postgres@{HOST}:{self.port}/distcron"

    @property
    def statements(self) -> Path:
        """Return the log of statements, in PostgreSQL's CSV format."""
        return self._data / "statements" / "one.csv"

    def start(self) -> None:
        """Create the cluster, run it and make the database."""
        if os.geteuid() == 0:
            owner = pwd.getpwnam("postgres")
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
        options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8"]
        subprocess.run(
            [*_as_postgres(), _postgres_program("initdb"), "-D", str(self._data), *options],
            check=True,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
        )
        with open(self._data / "postgresql.conf", "a") as file:
            file.write("\n".join([*self._SETTINGS, ""]))
        super().start()
        with self.connect("postgres") as connection:
            connection.execute("CREATE DATABASE distcron")

    def connect(self, database: str = "distcron") -> psycopg.Connection[Any]:
        """Return a new connection in autocommit, to be used in ``with``."""
        url = self.url.rpartition("/")[0]
        return psycopg.connect(f"{url}/{database}", autocommit=True, connect_timeout=2)

    def command(self) -> list[str]:
        """Return the command line."""
        where = ["-h", HOST, "-p", str(self.port), "-k", str(self.folder)]
        return [*_as_postgres(), _postgres_program("postgres"), "-D", str(self._data), *where]

    def answers(self) -> bool:
        """Return whether a connection is accepted."""
        with contextlib.suppress(psycopg.OperationalError), self.connect("postgres"):
            return True
        return False


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until the condition holds, looking every 20 ms; exit naming ``what`` after that."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"Waited {seconds:g} s in vain for {what}.")
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _as_postgres() -> Sequence[str]:
    # setpriv replaces itself by the server, so that signals reach it.
    if os.geteuid() != 0:
        return ()
    return ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")


def _postgres_program(name: str) -> str:
    return _program(name, sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True))


def _program(name: str, elsewhere: Sequence[Path]) -> str:
    found = shutil.which(name) or next(map(str, elsewhere), "")
    if not found:
        raise SystemExit(f"{name} is not installed. On Debian: apt-get install redis postgresql")
    return found
