"""Rows and calls for the tests of ``schedulerctl``."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection

from distcron_app import lifecycle, nodes
from distcron_app.conf import Config
from distcron_app.instants import database_now
from distcron_app.locks import new_owner_token
from distcron_app.models import Node, Run, Schedule

FAR = datetime(2090, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Answer:
    """What a call of the command printed, and its exit code."""

    code: int
    out: str
    error: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def ctl(*words: str, encoding: str = "utf-8") -> Answer:
    """Call the command in this process; the text of its error counts as stderr."""
    raw, err = io.BytesIO(), io.StringIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    code = 0
    try:
        call_command("schedulerctl", *words, stdout=out, stderr=err)
    except CommandError as error:
        code = error.returncode
        err.write(str(error))
    out.flush()
    return Answer(code, raw.getvalue().decode(encoding), err.getvalue())


def make_schedule(key: str = "invoice-close", **fields: Any) -> Schedule:
    values: dict[str, Any] = {
        "name": key,
        "job": "project.demo.invoice_close",
        "arguments": {"batch": 5},
        "cron": "0 2 * * *",
        "timezone": "Asia/Jakarta",
    }
    schedule = Schedule(key=key, **(values | fields))
    schedule.save()
    return schedule


def make_run(schedule: Schedule, state: str, **fields: Any) -> Run:
    now = database_now()
    values: dict[str, Any] = {
        "schedule_name": schedule.name,
        "job": schedule.job,
        "arguments": schedule.arguments,
        "delivery": schedule.delivery,
        "due_at": now - timedelta(minutes=5),
        "owner_token": "f" * 32,
    }
    if state not in Run.OPEN_STATES:
        values["finished_at"] = now - timedelta(minutes=4, seconds=5)
    return Run.objects.create(schedule=schedule, state=state, **(values | fields))


def make_node(name: str = "web-1", *, heartbeat_age_seconds: float = 1.0, **fields: Any) -> Node:
    heartbeat_at = database_now() - timedelta(seconds=heartbeat_age_seconds)
    values: dict[str, Any] = {
        "host": "app-1",
        "pid": 3990,
        "version": "0.1.0",
        "started_at": datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        "heartbeat_at": heartbeat_at,
        "expires_at": heartbeat_at + timedelta(seconds=15),
        "slots": 16,
    }
    return Node.objects.create(name=name, **(values | fields))


@contextmanager
def node_that_finishes(state: str, **outcome: Any) -> Iterator[None]:
    """Let a node claim each queued run and report ``state`` for it, in a thread."""
    stopping = threading.Event()
    node_id = nodes.register(Config(processes=1, threads=1))

    def work() -> None:
        try:
            while not stopping.wait(0.02):
                queued = Run.objects.queued_due().values_list("pk", flat=True)
                tokens = {pk: new_owner_token() for pk in queued}
                claimed = lifecycle.claim_queued(tokens, node_id).runs
                started = lifecycle.start(claimed, node_id)
                lifecycle.finish(
                    [
                        lifecycle.Finished(
                            run_id=run.run_id,
                            fencing_token=run.fencing_token,
                            owner_token=run.owner_token,
                            state=state,
                            finished_at=database_now(),
                            **outcome,
                        )
                        for run in claimed
                        if run.run_id in started
                    ]
                )
        finally:
            connection.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
