"""Jobs that the tests run."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

from django.db import connection

from distcron_app import JobContext, current_context, job
from distcron_app.errors import LeaseLost


@job(name="tests.echo")
def echo(text: str) -> str:
    """Print and return the text."""
    print(text)
    return text


@job(name="tests.fail")
def fail() -> None:
    """Raise an error."""
    raise ValueError("as asked")


@job(name="tests.own_pid")
def own_pid() -> int:
    """Return the process that runs this."""
    return os.getpid()


@job(name="tests.kill_own_process")
def kill_own_process() -> None:
    """End the worker as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


@job(name="tests.exit_process")
def exit_process() -> None:
    """End the worker from inside."""
    os._exit(42)


@job(name="tests.wait_for_cancel")
def wait_for_cancel(ctx: JobContext) -> str:
    """Run until told to stop."""
    ctx.progress(50, "half")
    try:
        ctx.wait(3600)
    except LeaseLost as error:
        return f"stopped: {error.cause}"
    return "was not stopped"


@job(name="tests.heed")
def heed(ctx: JobContext) -> None:
    """Run until told to stop, and stop by the error that says so."""
    ctx.progress(1, "waits")
    ctx.wait(3600)


@job(name="tests.deaf")
def deaf(ctx: JobContext, gate: str) -> str:
    """Run until the file ``gate`` exists, whatever anybody asks."""
    ctx.progress(1, "waits")
    while not Path(gate).exists():
        threading.Event().wait(0.01)
    return "through"


@job(name="tests.await")
async def await_for_ever(stubborn: bool = False) -> str:
    """Await for an hour; a stubborn one ignores that it is cancelled."""
    context = current_context()
    assert context is not None
    context.progress(1, "waits")
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        if not stubborn:
            raise
    return "ignored it"


@job(name="tests.leave_trace")
def leave_trace(ctx: JobContext, path: str) -> None:
    """Wait for an hour, deaf, and write to a file when something ends it."""
    ctx.progress(1, "waits")
    try:
        threading.Event().wait(3600)
    finally:
        Path(path).write_text("cleaned up")


@job(name="tests.fortify")
def fortify(ctx: JobContext) -> None:
    """Ignore SIGTERM, in a child process as well, and tell both numbers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "3600"])
    ctx.progress(1, f"{os.getpid()} {child.pid}")
    while True:
        time.sleep(60)


@job(name="tests.parent")
def parent_of(ctx: JobContext) -> int | None:
    """Return the number of the run whose end started this one."""
    return ctx.parent and ctx.parent.run_id


@job(name="tests.leave_pid")
def leave_pid(ctx: JobContext) -> None:
    """Tell the number of this process and wait, deaf."""
    ctx.progress(1, str(os.getpid()))
    threading.Event().wait(3600)


@job(name="tests.leave_child")
def leave_child() -> list[int]:
    """Return while a child process goes on."""
    return [os.getpid(), subprocess.Popen(["sleep", "3600"]).pid]


@job(name="tests.group_child")
def group_child(ctx: JobContext) -> None:
    """Wait beside a child process that has a group of its own."""
    child = subprocess.Popen(["sleep", "3600"], process_group=0)
    ctx.progress(1, f"{os.getpid()} {child.pid}")
    child.wait()


@job(name="tests.allocate")
def allocate(megabytes: int) -> int:
    """Use that much memory."""
    return len(bytearray(megabytes * 1024 * 1024))


@job(name="tests.hold_interpreter")
def hold_interpreter(letters: int) -> None:
    """Let no other thread of the process run for a while; each letter doubles it."""
    re.match(r"(a+)+$", "a" * letters + "b")


@job(name="tests.database_session")
def database_session() -> int:
    """Return the number of the session in the database."""
    with connection.cursor() as cursor:
        is_postgres = connection.vendor == "postgresql"
        cursor.execute("SELECT pg_backend_pid()" if is_postgres else "SELECT connection_id()")
        (number,) = cursor.fetchone()
    return int(number)


@job(name="tests.report")
def report(ctx: JobContext, text: str) -> None:
    """Report ``text`` as its progress, with characters that no database keeps."""
    ctx.progress(100, text + "\x00\ud83d")
