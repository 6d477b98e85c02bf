"""What the tests of sizes let a process of its own do; each function prints one JSON line."""

from __future__ import annotations

import gc
import itertools
import json
import resource
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from django.contrib.auth.models import User
from django.test import Client

from distcron_app import lifecycle, nodes
from distcron_app.clock import Clock
from distcron_app.conf import get_config
from distcron_app.dispatch import Dispatcher
from distcron_app.instants import database_now
from distcron_app.leases import LeaseBook
from distcron_app.lifecycle import Failure, Finished
from distcron_app.locks import Level
from distcron_app.locks.memory import MemoryLockBackend
from distcron_app.models import Schedule
from distcron_app.runner import Assignment, execute

PAGE_ROUNDS = 3
BATCH = 100


def time_pages(*paths: str) -> None:
    """Ask for each page as a superuser; print the longest time of some in seconds."""
    client = Client(SERVER_NAME="localhost")
    client.force_login(User.objects.create_superuser("measures"))
    took: dict[str, float] = {}
    client.get(paths[0])
    for path in paths:
        for _ in range(PAGE_ROUNDS):
            began = time.monotonic()
            answer = client.get(path)
            took[path] = max(took.get(path, 0.0), round(time.monotonic() - began, 3))
            assert answer.status_code == 200, f"{path}: {answer.status_code}"
    print(json.dumps(took))


def grow(ticks: int, expressions: int, failures: int) -> None:
    """Tick, compute distinct rules and fail runs, each twice; print the growth in MB.

    The first round warms up, with a tenth of it all; what the second adds counts.
    """
    work = _Work()
    for share in (10, 1):
        parts: dict[str, Callable[[int], None]] = {
            "ticks": work.tick,
            "expressions": work.compute,
            "failures": work.fail,
        }
        wanted = {"ticks": ticks, "expressions": expressions, "failures": failures}
        grown: dict[str, float] = {}
        for name, part in parts.items():
            before = _resident_mb()
            part(wanted[name] // share)
            grown[name] = round(_resident_mb() - before, 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(json.dumps({"grown_mb": grown, "all_mb": round(sum(grown.values()), 1), "peak": peak}))


def prune_without_end(pause_seconds: float) -> None:
    """Prune again and again, until somebody ends the process; print how many runs went."""
    never = threading.Event()
    pruned = after = 0
    while not never.wait(pause_seconds):
        step = lifecycle.prune(after)
        after = step.after or 0
        pruned += step.count
        print(pruned, flush=True)


def _resident_mb() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


class _Work:
    """A node without its loop."""

    def __init__(self) -> None:
        self._config = get_config()
        self._node_id = nodes.register(self._config)
        self._leases = LeaseBook(int(self._config.lock_ttl_seconds * 1000), clock=Clock())
        level = Level(name="standard", parts=("memory",), backend=MemoryLockBackend())
        self._dispatcher = Dispatcher(
            config=self._config,
            clock=Clock(),
            find_level=lambda name: level,
            leases=self._leases,
        )
        self._rules = (
            f"{minute} {hour} {day} {month} *"
            for month, day, hour, minute in itertools.product(
                range(1, 13), range(1, 29), range(24), range(60)
            )
        )
        # Nothing of it is due by itself.
        far = datetime(2090, 1, 1, tzinfo=UTC)
        self._schedules = [
            Schedule.objects.create(
                key=f"fails-{number}",
                name="fails",
                job="tests.system.app.fail",
                kind="once",
                run_at=far,
            )
            for number in range(BATCH)
        ]

    def tick(self, count: int) -> None:
        for _ in range(count):
            self._dispatcher.tick(self._node_id, 16)

    def compute(self, count: int) -> None:
        now = datetime(2026, 1, 1, tzinfo=UTC)
        for rule in itertools.islice(self._rules, count):
            Schedule(cron=rule, timezone="Asia/Jakarta").first_after(now)

    def fail(self, count: int) -> None:
        for _ in range(count // BATCH):
            nodes.heartbeat(self._config, self._node_id, nodes.Vitals())
            due = database_now() - timedelta(seconds=1)
            pks = [schedule.pk for schedule in self._schedules]
            Schedule.objects.filter(pk__in=pks).update(next_run_at=due, state="active")
            runs = self._dispatcher.tick(self._node_id, BATCH).claimed.runs
            started = lifecycle.start(runs, self._node_id)
            lifecycle.finish([self._failed(run) for run in runs if run.run_id in started])
            self._leases.let_go([run.run_id for run in runs])
            assert len(started) == BATCH

    def _failed(self, run: lifecycle.ClaimedRun) -> Finished:
        given = Assignment(
            run_id=run.run_id,
            schedule_id=run.schedule_id,
            schedule_key=run.schedule_key,
            job=run.job,
            arguments=run.arguments,
            scheduled_at=run.scheduled_at,
            attempt=1,
            fencing_token=run.fencing_token,
        )
        outcome = execute(given, context=given.context(), output_limit_bytes=10_000)
        facts: dict[str, Any] = {
            name: getattr(outcome, name)
            for name in ("run_id", "fencing_token", "state", "reason", "error", "traceback")
        }
        return Finished(
            owner_token=run.owner_token,
            finished_at=database_now(),
            failure=Failure(exceptions=outcome.exceptions),
            **facts,
        )
