"""Real nodes on real servers, and the means to break them.

    with Cluster(postgres) as cluster:
        cluster.add("billing", "touch", every=1)
        first, second = cluster.start_nodes(2)
        first.kill9()
        assert cluster.finish_and_check() == []

Each node is ``manage.py runscheduler`` in a process group of its own, so that its workers
are found, stopped and counted together with it, whoever their parent is by then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import tzdata

from distcron_app.lifecycle import TRANSITIONS
from tests.services import PostgresCluster, RedisServer, TcpProxy, redis_server, wait_for
from tests.system.checker import (
    AttemptRow,
    Evidence,
    Mark,
    Planned,
    RunRow,
    Transition,
    every,
    violations,
)
from tests.system.database import Database

# As tests.system.app.jobs writes it, whose app the tests do not install.
LEDGER = "ledger"

__all__ = ["SECONDS", "Cluster", "Node", "lock_key", "lock_keys", "manage", "urls_of"]

ROOT = Path(__file__).resolve().parents[2]
# How long the tests under load run; more finds more.
SECONDS = float(os.environ.get("DISTCRON_SYSTEM_SECONDS", "30"))
# The machine may be busy with other things: a wait this long means that it never comes.
PATIENCE_SECONDS = 60.0
LEASE_SECONDS = 3.0

_numbers = itertools.count(1)


def manage(
    environment: Mapping[str, str], *arguments: str, seconds: float = PATIENCE_SECONDS
) -> list[str]:
    """Run a management command to its end; return its lines."""
    done = subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def environment(database_url: str, redis_url: str = "", **more: str) -> dict[str, str]:
    """Return the environment of a command that works on these servers."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DISTCRON_")}
    return {
        **kept,
        "DJANGO_SETTINGS_MODULE": "tests.system.settings",
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        **more,
    }


class Node:
    """One ``runscheduler`` process with its workers."""

    def __init__(self, name: str, folder: Path, env: Mapping[str, str], *options: str) -> None:
        self.name = name
        self._log = folder / f"{name}.json"
        self._errors = folder / f"{name}.err"
        self._read_bytes = 0
        self._events: list[dict[str, Any]] = []
        with open(self._log, "wb") as log, open(self._errors, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "manage.py", "runscheduler", "--name", name, *options],
                cwd=ROOT,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=errors,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def __repr__(self) -> str:
        return f"<Node {self.name} pid {self.pid}>"

    @property
    def is_running(self) -> bool:
        """Return whether the node's own process has not ended."""
        return self._process.poll() is None

    @property
    def text(self) -> str:
        """Return what the node has printed."""
        return self._log.read_text() + self._errors.read_text()

    def members(self) -> list[int]:
        """Return the processes of the node's group that are alive, its own included."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[2]) == self.pid and fields[0] != "Z":
                        found.append(int(entry.name))
        return sorted(found)

    def workers(self) -> list[int]:
        """Return the worker processes: children of the template, which is the node's child."""
        return [pid for template in _children(self.pid) for pid in _children(template)]

    def cpu_seconds(self) -> float:
        """Return the processor time that the node and its workers have used so far."""
        ticks = 0
        for pid in self.members():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def events(self, name: str = "", **facts: Any) -> list[dict[str, Any]]:
        """Return the events so far, or those of one name whose facts are as given."""
        with open(self._log, "rb") as log:
            log.seek(self._read_bytes)
            complete, newline, _ = log.read().rpartition(b"\n")
        self._read_bytes += len(complete) + len(newline)
        self._events += [json.loads(line) for line in complete.splitlines() if line[:1] == b"{"]
        return [
            event
            for event in self._events
            if name in ("", event["event"])
            and all(event.get(key) == value for key, value in facts.items())
        ]

    def wait_for_event(self, name: str, **facts: Any) -> dict[str, Any]:
        """Return the first event of this name, waiting until there is one."""
        self._wait(lambda: self.events(name, **facts), f"{name!r} {facts or ''}")
        return self.events(name, **facts)[0]

    def ids(self) -> list[str]:
        """Return the ids under which the node was a member, the present one last."""
        return [event["node"] for event in self.events() if event["event"] in ("started", "fenced")]

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the node's own process."""
        self._process.send_signal(signum)

    def send_group(self, signum: signal.Signals) -> None:
        """Send a signal to the node and everything that it started."""
        os.killpg(self.pid, signum)

    def kill9(self) -> None:
        """End the node's own process as a power cut would, and wait for its end."""
        self._process.kill()
        self._process.wait(PATIENCE_SECONDS)

    def terminate(self) -> int:
        """Ask the node to drain; return its exit code."""
        self.send(signal.SIGTERM)
        return self.wait()

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Return the exit code, waiting for the end."""
        return self._process.wait(seconds)

    def close(self) -> None:
        """End what is left of the group; only this node's processes are in it."""
        if self.members():
            with contextlib.suppress(ProcessLookupError):
                self.send_group(signal.SIGKILL)
        self._process.wait(PATIENCE_SECONDS)

    def _wait(self, condition: Callable[[], Any], what: str) -> None:
        def ended_or_met() -> bool:
            return bool(condition()) or not self.is_running

        wait_for(ended_or_met, PATIENCE_SECONDS, f"{what} of {self}")
        assert condition(), f"{self} ended before {what}:\n{self.text[-4000:]}"


class Cluster:
    """Nodes on one database, with a Redis of their own unless ``redis`` is False.

    ``redis`` may also be a server that was not started yet. ``quorum`` is the number of
    independent Redis instances behind the lock level "quorum". Without ``postgres`` the
    database is a SQLite file. ``template`` is the migrated database that each cluster gets
    a copy of.
    """

    def __init__(
        self,
        postgres: PostgresCluster | None,
        *,
        template: str,
        redis: RedisServer | bool = True,
        quorum: int = 0,
        config: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="distcron-system-"))
        self.nodes: list[Node] = []
        if isinstance(redis, bool):
            self.redis: RedisServer | None = redis_server() if redis else None
        else:
            self.redis = redis
        self.quorum = [redis_server() for _ in range(quorum)]
        self._postgres = postgres
        self._template = template
        self._name = f"system_{os.getpid()}_{next(_numbers)}"
        self._watched: dict[int, tuple[float, datetime, Planned]] = {}
        self._more = {
            "DISTCRON_SYSTEM_EFFECTS": str(self.folder / "effects"),
            "DISTCRON_SYSTEM_CONFIG": json.dumps(
                {"LOCK_DIRECTORY": str(self.folder / "locks"), **(config or {})}
            ),
            "DISTCRON_SYSTEM_QUORUM": urls_of(self.quorum),
            **(env or {}),
        }

    def __enter__(self) -> Self:
        for server in self._servers:
            server.start()
        self.database = Database(self._copy_of_the_template())
        self.env = environment(
            self.database.url, self.redis.url if self.redis else "", **self._more
        )
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.close()
        self.database.close()
        for server in self._servers:
            server.close()
        if self._postgres is not None:
            with self._postgres.connect("postgres") as connection:
                connection.execute(f'DROP DATABASE IF EXISTS "{self._name}" WITH (FORCE)')
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _servers(self) -> list[RedisServer]:
        return ([] if self.redis is None else [self.redis]) + self.quorum

    def _copy_of_the_template(self) -> str:
        if self._postgres is None:
            copy = self.folder / "db.sqlite3"
            shutil.copy(self._template, copy)
            return f"sqlite://{copy}"
        with self._postgres.connect("postgres") as connection:
            connection.execute(f'CREATE DATABASE "{self._name}" TEMPLATE "{self._template}"')
        return self._postgres.url.rpartition("/")[0] + "/" + self._name

    # --- nodes ------------------------------------------------------------------

    def start_node(self, *options: str, **more: str) -> Node:
        """Start one node and wait until it is a member; ``more`` goes to its environment."""
        (node,) = self.start_nodes(1, *options, **more)
        return node

    def start_nodes(self, count: int, *options: str, **more: str) -> list[Node]:
        """Start nodes and wait until all are members."""
        nodes = [self.launch_node(*options, **more) for _ in range(count)]
        for node in nodes:
            node.wait_for_event("started")
        return nodes

    def launch_node(self, *options: str, **more: str) -> Node:
        """Start one node without waiting for anything."""
        name = f"node-{len(self.nodes) + 1}"
        arguments = options if "--log" in options else ("--log", "json", *options)
        node = Node(name, self.folder, {**self.env, **more}, *arguments)
        self.nodes.append(node)
        return node

    # --- schedules and rows -------------------------------------------------------

    def add(self, key: str, job: str, *, every: float = 0, **values: Any) -> int:
        """Insert a schedule past the model, as an import would; return its id.

        ``every`` seconds from a whole second soon, or from ``first``. Where ``planned`` is
        False the nodes find its next instant by themselves.
        """
        first = values.pop("first", None) or next_second(1)
        planned = values.pop("planned", True)
        row = {
            "key": key,
            "name": key,
            "job": f"tests.system.app.{job}",
            "arguments": json.dumps(values.pop("arguments", {})),
            "kind": "interval" if every else "cron",
            "cron": "",
            "cron_canonical": "",
            "timezone": "UTC",
            "calendar_unit": "days",
            "calendar_action": "skip",
            "gap": "shift",
            "fold": "first",
            "spread_seconds": 0,
            "spread_by": "hashed",
            "spread_key": "",
            "runs_planned": 0,
            "planned_zones": tzdata.IANA_VERSION,
            "interval_seconds": every or None,
            "interval_anchor": first if every else None,
            "delivery": "at_most_once",
            "lock_level": "standard",
            "overlap": "skip",
            "max_queued": 100,
            "misfire": "run_latest",
            "catchup_max": 100,
            "max_attempts": 1,
            "backoff": "exponential",
            "backoff_delays": "10",
            "backoff_longest_seconds": 3600,
            "backoff_jitter": "full",
            "retry_on": "",
            "give_up_on": "",
            "retry_stops_at_next": False,
            "on_resume": "from_now",
            "kill_grace_seconds": 10,
            "retry_on_timeout": False,
            "isolation": "shared",
            "max_recoveries": 1,
            "concurrency_key": "",
            "queue": "default",
            "priority": 0,
            "notes": "",
            "defined_in": "",
            "state": "active",
            "state_reason": "",
            "state_by": "",
            "next_run_at": first if planned else None,
            "fencing_token": 0,
            "version": 1,
            "created_at": datetime.now(UTC),
            "updated_at": datetime.now(UTC),
            **values,
        }
        columns = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join("%s" for _ in row)
        schedule_id: int = self.database.value(
            f"INSERT INTO distcron_schedule ({columns}) VALUES ({marks}) RETURNING id",
            list(row.values()),
        )
        if every and planned:
            self.watch(key, every=every, first=first)
        return schedule_id

    def watch(self, key: str, *, every: float, first: datetime) -> None:
        """Check a schedule that was inserted by other means, from its instant ``first`` on."""
        row = self.schedule(key)
        at_once = row["max_active"] or (None if row["overlap"] == "allow" else 1)
        planned = Planned(schedule_id=row["id"], delivery=row["delivery"], at_once=at_once)
        self._watched[row["id"]] = (every, first, planned)

    def gate(self, name: str = "gate") -> Path:
        """Return the path of a file that lets jobs ``hold`` end once it exists."""
        return self.folder / name

    def schedule(self, key: str) -> dict[str, Any]:
        """Return one schedule."""
        (row,) = self.database.rows("SELECT * FROM distcron_schedule WHERE key = %s", [key])
        return row

    def runs(self, key: str = "", **columns: Any) -> list[dict[str, Any]]:
        """Return runs in their order, of one schedule or all, whose columns are as given."""
        wanted = {**({"s.key": key} if key else {}), **{f"r.{k}": v for k, v in columns.items()}}
        where = " AND ".join(f"{column} = %s" for column in wanted) or "1 = 1"
        return self.database.rows(
            "SELECT r.*, s.key FROM distcron_run r JOIN distcron_schedule s "
            f"ON s.id = r.schedule_id WHERE {where} ORDER BY r.id",
            list(wanted.values()),
        )

    def run(self, run_id: int) -> dict[str, Any]:
        """Return one run."""
        (row,) = self.runs(id=run_id)
        return row

    def attempts(self, run_id: int) -> list[dict[str, Any]]:
        """Return the ended attempts of a run."""
        return self.database.rows(
            "SELECT * FROM distcron_attempt WHERE run_id = %s ORDER BY number", [run_id]
        )

    def node_row(self, node_id: str) -> dict[str, Any]:
        """Return the row of one membership."""
        key = node_id.replace("-", "") if self.database.is_sqlite else node_id
        (row,) = self.database.rows("SELECT * FROM distcron_node WHERE id = %s", [key])
        return row

    def wait_for_run(self, key: str = "", count: int = 1, **columns: Any) -> dict[str, Any]:
        """Return the ``count``-th run of this kind, waiting until there is one."""
        what = f"run {count} of {key or 'any schedule'} {columns}"
        wait_for(lambda: len(self.runs(key, **columns)) >= count, PATIENCE_SECONDS, what)
        return self.runs(key, **columns)[count - 1]

    def marks(self) -> list[Mark]:
        """Return what the jobs wrote, in the order of the file."""
        path = self.folder / "effects"
        return [_mark(line) for line in path.read_text().splitlines()] if path.exists() else []

    def ledger(self) -> list[tuple[int, datetime]]:
        """Return the occurrence of each row that a job ``enter`` has committed."""
        rows = self.database.rows(
            "SELECT name FROM auth_group WHERE name LIKE %s ORDER BY id", [f"{LEDGER} %"]
        )
        words = (row["name"].split() for row in rows)
        return [(int(schedule), datetime.fromisoformat(at)) for _, schedule, at, _ in words]

    def pass_seconds(self, seconds: float) -> None:
        """Let the load run for so long, while every node stays alive."""
        until = time.monotonic() + seconds
        alive = [node for node in self.nodes if node.is_running]
        wait_for(lambda: time.monotonic() >= until, seconds + 5, "time to pass")
        for node in alive:
            assert node.is_running, f"{node} ended:\n{node.text[-4000:]}"

    # --- the end ---------------------------------------------------------------------

    def finish_and_check(self, *, lag_seconds: float = 5.0) -> list[str]:
        """Stop the load, drain, and return what is wrong with the history."""
        return violations(self.finish(lag_seconds=lag_seconds), TRANSITIONS)

    def finish(self, *, lag_seconds: float = 5.0) -> Evidence:
        """Stop the load, let everything end, drain the nodes and return the evidence.

        The schedules must not stand further back than ``lag_seconds``.
        """
        planned = self._stop_load(lag_seconds)
        self._wait_until_nothing_is_open()
        running = [node for node in self.nodes if node.is_running]
        for node in running:
            node.send(signal.SIGTERM)
        for node in running:
            assert node.wait() == 0, f"{node}:\n{node.text[-4000:]}"
        return dataclasses.replace(
            self.evidence(planned),
            lock_keys=self._locks_left(),
            processes=tuple(pid for node in self.nodes for pid in node.members()),
        )

    def evidence(self, planned: tuple[Planned, ...]) -> Evidence:
        """Return everything that is known now."""
        transitions = self.database.rows("SELECT * FROM system_transition ORDER BY id")
        return Evidence(
            planned=planned,
            runs=tuple(_made(RunRow, row) for row in self.runs()),
            marks=tuple(self.marks()),
            transitions=tuple(_made(Transition, row) for row in transitions),
            attempts=tuple(
                _made(AttemptRow, row)
                for row in self.database.rows("SELECT * FROM distcron_attempt ORDER BY id")
            ),
            ledger=tuple(self.ledger()),
        )

    def _stop_load(self, lag_seconds: float) -> tuple[Planned, ...]:
        rows = self.database.rows(
            "UPDATE distcron_schedule SET state = 'paused', version = version + 1 "
            "WHERE state = 'active' RETURNING id, next_run_at"
        )
        stood_at = {row["id"]: row["next_run_at"] for row in rows}
        now = datetime.now(UTC)
        planned = []
        for schedule_id, (seconds, first, watched) in self._watched.items():
            until = stood_at[schedule_id]
            behind = (now - until).total_seconds()
            assert behind < lag_seconds, f"Schedule {schedule_id} stands {behind:.1f} s back."
            planned.append(dataclasses.replace(watched, instants=every(seconds, first, until)))
        return tuple(planned)

    def _wait_until_nothing_is_open(self) -> None:
        def settled() -> bool:
            return not self._open_runs()

        try:
            wait_for(settled, PATIENCE_SECONDS, "the end of all runs")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._open_runs()}") from error

    def _open_runs(self) -> list[dict[str, Any]]:
        return self.database.rows(
            "SELECT s.key, r.id, r.state, r.reason, r.scheduled_at, r.due_at, r.attempt, r.node_id "
            "FROM distcron_run r LEFT JOIN distcron_schedule s ON s.id = r.schedule_id "
            "WHERE r.state IN ('queued', 'claimed', 'running') ORDER BY r.id LIMIT 50"
        )

    def _locks_left(self) -> tuple[str, ...]:
        """Return the locks in Redis that do not end by themselves within their TTL."""
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self._locks(), LEASE_SECONDS + 1)
        return self._locks()

    def _locks(self) -> tuple[str, ...]:
        running = [server for server in self._servers if server.is_running]
        return tuple(key for server in running for key in lock_keys(server))


def lock_key(schedule_id: int) -> str:
    """Return the key of a schedule's lock in Redis."""
    return f"{{distcron:lock}}:schedule:{schedule_id}"


def lock_keys(server: RedisServer) -> list[str]:
    """Return the keys of all locks that a Redis holds."""
    with server.client() as client:
        return sorted(key.decode() for key in client.keys("{distcron:lock}:*"))


def urls_of(servers: Iterable[RedisServer | TcpProxy]) -> str:
    """Return what DISTCRON_SYSTEM_QUORUM holds for these instances, or proxies before them."""
    return json.dumps([f"redis://127.0.0.1:{server.port}/0" for server in servers])


def next_second(seconds_ahead: int = 0) -> datetime:
    """Return the next whole second, or one so many seconds later."""
    return datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=1 + seconds_ahead)


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def _mark(line: str) -> Mark:
    kind, schedule, at, attempt, token, node, _worker, began, ended = line.split()
    return Mark(
        kind=kind,
        schedule_id=int(schedule),
        scheduled_at=datetime.fromisoformat(at),
        attempt=int(attempt),
        fencing_token=int(token),
        node_pid=int(node),
        began=float(began),
        ended=float(ended),
    )


def _made(kind: type[Any], row: Mapping[str, Any]) -> Any:
    return kind(**{field.name: row[field.name] for field in dataclasses.fields(kind)})
