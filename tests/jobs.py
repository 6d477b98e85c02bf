"""Jobs that the tests run."""

from __future__ import annotations

import os
import signal

from distcron_app import JobContext, job
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


@job(name="tests.report")
def report(ctx: JobContext, text: str) -> None:
    """Report ``text`` as its progress, with characters that no database keeps."""
    ctx.progress(100, text + "\x00\ud83d")
