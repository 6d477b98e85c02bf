"""Nodes that contend for one schedule, each a ``manage.py runscheduler`` of its own."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import redis
from psycopg.rows import class_row

from benchmarks.figures import Claim, machine, verdict
from benchmarks.servers import PostgresServer, RedisServer, until
from benchmarks.statements import losers_statements, read_statements, shape

__all__ = ["contend"]

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 180.0
# Longer than a node's lease: only then does a sweep do all that it does for ever after.
IDLE_SECONDS = 20.0
LEAD_SECONDS = 5
END_SECONDS = 60.0
_OPTIONS = ("--processes", "1", "--log", "json")

_ADD = """
from datetime import datetime
from distcron_app.models import Schedule
first, last = (datetime.fromisoformat(at) for at in ({first!r}, {last!r}))
schedule = Schedule(key="contended", name="contended", job="benchmarks.trace", kind="interval",
                    interval_seconds=1, interval_anchor=first, starts_at=first, ends_at=last)
schedule.full_clean()
schedule.save()
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A row of the history. A run that was skipped has no owner token."""

    scheduled_at: datetime
    state: str
    reason: str
    owner_token: str
    node: str

    @property
    def mark(self) -> tuple[str, str]:
        """Return the node and what only its statements about this run contain."""
        return self.node, self.owner_token or f"{self.scheduled_at.astimezone(UTC)}"


class _Nodes:
    """The nodes, their logs, and the file that their jobs write to."""

    def __init__(self, count: int, postgres: PostgresServer, server: RedisServer) -> None:
        self.names = [f"node-{number}" for number in range(1, count + 1)]
        self.folder = Path(tempfile.mkdtemp(prefix="distcron-bench-nodes-"))
        self.trace = self.folder / "trace"
        self._processes: list[subprocess.Popen[bytes]] = []
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DISTCRON_")}
        self._env = {
            **kept,
            "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
            "DATABASE_URL": postgres.url,
            "REDIS_URL": server.url,
            "DISTCRON_BENCH_TRACE": str(self.trace),
        }

    def manage(self, *arguments: str) -> None:
        """Run a management command to its end."""
        subprocess.run(
            [sys.executable, "manage.py", *arguments], cwd=ROOT, env=self._env, check=True
        )

    def start(self) -> None:
        """Start all and wait until each is a member."""
        for name in self.names:
            with open(self.folder / name, "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "manage.py", "runscheduler", "--name", name, *_OPTIONS],
                    cwd=ROOT,
                    # The log of statements then tells the nodes apart.
                    env={**self._env, "PGAPPNAME": name},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._processes.append(process)
        until(self._are_all_members, START_SECONDS, "the nodes")

    def _are_all_members(self) -> bool:
        for name, process in zip(self.names, self._processes, strict=True):
            if process.poll() is not None:
                raise SystemExit(f"{name} ended:\n{(self.folder / name).read_text()}")
        return self.count("started") == len(self.names)

    def count(self, event: str) -> int:
        """Return how often the nodes reported this event."""
        return sum(
            json.loads(line)["event"] == event
            for name in self.names
            for line in (self.folder / name).read_text().splitlines()
            if line.startswith("{") and line.endswith("}")
        )

    def drain(self) -> None:
        """Let the nodes end as a deployment would."""
        for process in self._processes:
            process.terminate()
        codes = [process.wait() for process in self._processes]
        if any(codes):
            raise SystemExit(f"The nodes ended with {codes}.")

    def close(self) -> None:
        """End what is left and remove the folder."""
        for process in self._processes:
            if process.poll() is None:
                # Each leads a group of its own; its workers are in it.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def contend(
    stack: contextlib.ExitStack,
    *,
    nodes: int,
    seconds: int,
    progress: Callable[[str], None],
    show: Callable[[str, Mapping[str, Mapping[str, float]]], None],
) -> dict[str, Any]:
    """Let nodes contend for a schedule that is due each second; return what they did."""
    progress("P8: starting the servers")
    server = stack.enter_context(RedisServer())
    postgres = stack.enter_context(PostgresServer())
    contenders = _Nodes(nodes, postgres, server)
    stack.callback(contenders.close)
    contenders.manage("migrate", "--verbosity", "0")
    facts = machine(**_versions(server, postgres))
    progress(f"P8: starting {nodes} nodes")
    contenders.start()
    progress("P8: what the nodes send while nothing is due")
    upkeep = _upkeep(contenders, postgres)
    progress(f"P8: {nodes} nodes contend for {seconds} s")
    expected = _add_schedule(contenders, seconds)
    _wait_for_the_end(postgres, expected[-1])
    statements = read_statements(postgres.statements, contenders.names)
    contenders.drain()
    runs = _runs(postgres)
    strays = losers_statements(statements, upkeep, [run.mark for run in runs])
    counted = {
        **_counted(runs, contenders.trace, expected),
        "losers_statements": len(strays),
        "lost_at_the_lock": contenders.count("stood_back"),
    }
    show(f"P8, {nodes} nodes", {"distcron": counted})
    return {
        **facts,
        "nodes": nodes,
        "seconds": seconds,
        **counted,
        "not_succeeded": [
            f"{run.scheduled_at.astimezone(UTC)} {run.node}: {run.state} {run.reason}"
            for run in runs
            if run.state != "succeeded"
        ],
        "statements": len(statements),
        "losers_examples": [f"{one.at} {one.node}: {shape(one.sql)[:120]}" for one in strays[:5]],
        **verdict(_claims(counted, seconds)),
    }


def _upkeep(nodes: _Nodes, postgres: PostgresServer) -> set[str]:
    """Return the shapes of what the nodes have sent without anything being due."""
    time.sleep(IDLE_SECONDS)
    return {shape(one.sql) for one in read_statements(postgres.statements, nodes.names)}


def _add_schedule(nodes: _Nodes, seconds: int) -> list[datetime]:
    """Add the schedule; return the instants that it is due at."""
    first = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=LEAD_SECONDS)
    instants = [first + timedelta(seconds=number) for number in range(seconds)]
    code = _ADD.format(first=first.isoformat(), last=instants[-1].isoformat())
    nodes.manage("shell", "--verbosity", "0", "--command", code)
    return instants


def _wait_for_the_end(postgres: PostgresServer, last: datetime) -> None:
    """Wait until every run has ended, and the losers of the last instant have seen so."""
    # Asking before that would only be load.
    time.sleep(max(0.0, (last - datetime.now(UTC)).total_seconds()))
    until(lambda: _is_over(postgres), END_SECONDS, "the last run")
    time.sleep(1.0)


def _is_over(postgres: PostgresServer) -> bool:
    with postgres.connect() as connection:
        row = connection.execute(
            "SELECT NOT EXISTS (SELECT FROM distcron_schedule WHERE next_run_at IS NOT NULL) "
            "AND NOT EXISTS (SELECT FROM distcron_run "
            "                WHERE state IN ('queued', 'claimed', 'running'))"
        ).fetchone()
    return bool(row and row[0])


def _runs(postgres: PostgresServer) -> list[_Run]:
    with postgres.connect() as connection:
        connection.row_factory = class_row(_Run)
        return connection.execute(
            "SELECT r.scheduled_at, r.state, r.reason, r.owner_token, n.name AS node "
            "FROM distcron_run r JOIN distcron_node n ON n.id = r.node_id"
        ).fetchall()


def _counted(runs: Sequence[_Run], trace: Path, expected: Sequence[datetime]) -> dict[str, int]:
    """Return the runs that succeeded, and what was doubled and lost by the jobs' own trace.

    An instant is lost where neither the trace nor a row of the history speaks of it; a row
    that says why it was skipped makes the runs too few.
    """
    lines = trace.read_text().splitlines() if trace.exists() else []
    executed = collections.Counter(map(datetime.fromisoformat, lines))
    return {
        "runs": sum(run.state == "succeeded" for run in runs),
        "doubled": executed.total() - len(executed) + len(set(executed) - set(expected)),
        "lost": len(set(expected) - set(executed) - {run.scheduled_at for run in runs}),
    }


def _claims(counted: Mapping[str, int], seconds: int) -> list[Claim]:
    return [
        Claim(what="runs", value=counted["runs"], limit=seconds, at_least=True),
        Claim(what="doubled", value=counted["doubled"], limit=0),
        Claim(what="lost", value=counted["lost"], limit=0),
        Claim(what="statements by losers", value=counted["losers_statements"], limit=0),
    ]


def _versions(server: RedisServer, postgres: PostgresServer) -> dict[str, str]:
    with postgres.connect() as connection, redis.Redis.from_url(server.url) as client:
        (text,) = connection.execute("SHOW server_version").fetchone() or ("",)
        return {
            "redis-server": str(client.info("server")["redis_version"]),
            "postgresql": re.split(r"\s", text)[0],
        }
