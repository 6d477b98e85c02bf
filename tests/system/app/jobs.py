"""Jobs that leave a trace outside the database and Redis.

Each appends a line when it begins and a line when it has had its effect, by one write to
a file opened with O_APPEND, so that lines of many processes never mix.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from django.contrib.auth.models import Group
from django.db import transaction

from distcron_app import GiveUp, JobContext, RetryLater, job
from distcron_app.errors import RunStopped
from tests.system.app import failpoints

LOOK_SECONDS = 0.02
# The first word in the name of a group that a transactional job wrote.
LEDGER = "ledger"


@contextlib.contextmanager
def traced(context: JobContext) -> Iterator[None]:
    """Write the begin before the block and the effect after it, unless it raises."""
    began = time.monotonic()
    _append("begin", context, began, began)
    failpoints.reach("in_job")
    yield
    _append("effect", context, began, time.monotonic())
    failpoints.reach("after_effect")


def _append(kind: str, context: JobContext, began: float, ended: float) -> None:
    at = context.scheduled_at.isoformat()
    facts = [kind, context.schedule_id, at, context.attempt, context.fencing_token]
    line = " ".join(map(str, [*facts, failpoints.NODE_PID, os.getpid(), began, ended]))
    file = os.open(
        os.environ["DISTCRON_SYSTEM_EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
    )
    try:
        os.write(file, line.encode() + b"\n")
    finally:
        os.close(file)


def _wait_for(gate: str, attempt: int) -> None:
    """Wait for the file that lets every attempt go on, or the one for this attempt."""
    never = threading.Event()
    while not (Path(gate).exists() or Path(f"{gate}-{attempt}").exists()):
        never.wait(LOOK_SECONDS)


@job
def touch(context: JobContext) -> str:
    """Do next to nothing."""
    with traced(context):
        return "touched"


@job
def fail(context: JobContext) -> None:
    """Raise an error."""
    with traced(context):
        raise OSError("no route")


@job
def hold(context: JobContext, gate: str) -> str:
    """Work until the file ``gate``, or ``gate-<attempt>``, exists; deaf to requests to stop."""
    with traced(context):
        _wait_for(gate, context.attempt)
        return "held"


@job
def nap(context: JobContext, seconds: float) -> str:
    """Do nothing for so long, deaf to every request to stop."""
    with traced(context):
        threading.Event().wait(seconds)
        return "slept"


@job
def hog(context: JobContext, seconds: float) -> float:
    """Hold the interpreter until one single call took ``seconds``; return how long it took."""
    with traced(context):
        letters, took = 20, 0.0
        while took < seconds:
            # Each letter doubles the time of the call.
            letters += 1
            began = time.monotonic()
            re.match(r"(a+)+$", "a" * letters + "b")
            took = time.monotonic() - began
        return took


@job
def obey(context: JobContext) -> None:
    """Do nothing until it is told to stop, and stop then."""
    with traced(context):
        while True:
            context.wait(60)


@job
def heed(context: JobContext, gate: str) -> str:
    """Work until the file ``gate`` exists; when told to stop before, write "told" and stop."""
    with traced(context):
        try:
            while not Path(gate).exists():
                context.wait(LOOK_SECONDS)
        except RunStopped:
            now = time.monotonic()
            _append("told", context, now, now)
            raise
        return "heeded"


@job
def stumble(context: JobContext, times: int, how: str = "error") -> int:
    """Fail in so many attempts; return the number of the one that does not."""
    with traced(context):
        if context.attempt > times:
            return context.attempt
        if how == "later":
            raise RetryLater(1.5, "not yet")
        if how == "give up":
            raise GiveUp("useless")
        raise OSError("no route to the bank")


@job
def greet(context: JobContext, text: str, gate: str) -> str:
    """Write and return ``text`` once the file ``gate`` exists."""
    with traced(context):
        _wait_for(gate, context.attempt)
        print(text)
        return text


@job
def enter(context: JobContext, gate: str = "", dies: str = "") -> int:
    """Write a row of the ledger, and go on once the file ``gate`` exists.

    With ``dies`` "after" the first attempt takes its worker with it once it is committed.
    """
    with traced(context):
        at = context.scheduled_at.isoformat()
        entry = Group.objects.create(name=f"{LEDGER} {context.schedule_id} {at} {context.attempt}")
        if gate:
            _wait_for(gate, context.attempt)
        if dies == "after" and context.attempt == 1:
            transaction.on_commit(lambda: os.kill(os.getpid(), signal.SIGKILL))
        return int(entry.pk)


@job
def publish(context: JobContext, gate: str) -> list[object]:
    """Tell how far it is in every way, go on at the file ``gate``; return what it went on with."""
    with traced(context):
        print(f"attempt {context.attempt} began")
        context.progress(30, "page 3")
        context.checkpoint({"page": 3, "attempt": context.attempt})
        _wait_for(gate, context.attempt)
        earlier = context.recovered_from
        facts = earlier and [earlier.number, earlier.node, earlier.reason, earlier.progress_message]
        return [context.last_checkpoint, facts]


@job
async def dream(context: JobContext) -> None:
    """Await for an hour without a look at the context."""
    with traced(context):
        await asyncio.sleep(3600)


@job
def fortress(context: JobContext) -> None:
    """Ignore SIGTERM, with a child process that does as well, and tell both numbers."""
    with traced(context):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with subprocess.Popen(["sleep", "600"]) as child:
            context.progress(1, f"{os.getpid()} {child.pid}")


@job
def whoami(context: JobContext, gate: str) -> int:
    """Tell the number of this process, and return it once the file ``gate`` exists."""
    with traced(context):
        context.progress(1, str(os.getpid()))
        _wait_for(gate, context.attempt)
        return os.getpid()


@job
def eat(context: JobContext, megabytes: int) -> int:
    """Use that much memory."""
    with traced(context):
        return len(bytearray(megabytes * 1024 * 1024))
