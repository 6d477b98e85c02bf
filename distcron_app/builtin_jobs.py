"""Jobs that come with the app: a management command, and a program.

Both run only what the settings list, checked when a schedule is saved and again at
each start, so that a person who edits schedules cannot choose code to run.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import select
import signal
import subprocess
from collections.abc import Iterator

from django.core.management import call_command
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from distcron_app import capture
from distcron_app.clock import Clock
from distcron_app.conf import get_config
from distcron_app.context import JobContext
from distcron_app.errors import InvalidArguments
from distcron_app.registry import job

__all__ = ["ProgramFailed", "management_command", "shell_command"]

MANAGEMENT_COMMAND = "distcron.management_command"
SHELL_COMMAND = "distcron.shell_command"

# The first lines of the docstrings, for the translators: the form of schedules shows them.
SUMMARIES = (
    gettext_noop("Run a management command of this project."),
    gettext_noop("Run a program, without a shell."),
)
# Between SIGTERM and SIGKILL.
STOP_GRACE_SECONDS = 5.0
# Longest time until an exit, a cancel or the timeout is noticed.
_POLL_SECONDS = 0.05
_READ_BYTES = 65_536
# All that a pipe can hold (1 MB); a detached descendant could write for ever.
_DRAIN_READS = 16


class ProgramFailed(subprocess.CalledProcessError):
    """The program ended with a code other than 0, or by a signal (a negative code)."""

    def __str__(self) -> str:
        if self.returncode < 0:
            return _("%(program)s: killed by signal %(signal)s.") % {
                "program": self.cmd,
                "signal": -self.returncode,
            }
        return _("%(program)s: exited with code %(code)s.") % {
            "program": self.cmd,
            "code": self.returncode,
        }


def _check_management_command(command: str, args: list[str] | None = None) -> None:
    allowed = get_config().management_commands
    if command not in allowed:
        _refuse(MANAGEMENT_COMMAND, "command", command, "MANAGEMENT_COMMANDS", allowed)


def _check_shell_command(argv: list[str], timeout_seconds: int | None = None) -> None:
    allowed = get_config().shell_commands
    program = argv[0] if argv else ""
    if program not in allowed or not os.path.isabs(program):
        _refuse(SHELL_COMMAND, "argv", program, "SHELL_COMMANDS", allowed)
    if timeout_seconds is not None and timeout_seconds < 1:
        message = _("must be at least 1 second, got %s.") % timeout_seconds
        raise InvalidArguments(SHELL_COMMAND, {"timeout_seconds": message})


def _refuse(name: str, parameter: str, value: str, setting: str, allowed: tuple[str, ...]) -> None:
    message = _("%(value)r is not allowed. Allowed: %(allowed)s. Add it to DISTCRON[%(setting)r].")
    facts = {"value": value, "allowed": ", ".join(allowed) or _("none"), "setting": setting}
    raise InvalidArguments(name, {parameter: message % facts})


@job(name=MANAGEMENT_COMMAND, validate=_check_management_command)
def management_command(command: str, args: list[str] | None = None) -> None:
    """Run a management command of this project.

    Args:
        command: Name of the command; the setting MANAGEMENT_COMMANDS lists the allowed ones.
        args: Words after the name, one item each, such as "--verbosity=2".
    """
    _check_management_command(command)
    stream = _CaptureStream()
    call_command(command, *(args or []), stdout=stream, stderr=stream, no_color=True)


@job(name=SHELL_COMMAND, validate=_check_shell_command)
def shell_command(ctx: JobContext, argv: list[str], timeout_seconds: int | None = None) -> None:
    """Run a program, without a shell.

    The program leads a process group of its own. The group is ended when the run is
    cancelled, when the time is over and when the program exits.

    Args:
        argv: Absolute path of the program, which the setting SHELL_COMMANDS must list,
            then its arguments, one item each.
        timeout_seconds: The program is ended after this time; empty for no limit.
    """
    _check_shell_command(argv, timeout_seconds)
    code = _run_program(ctx, argv, timeout_seconds)
    ctx.check()
    if code != 0:
        raise ProgramFailed(code, argv[0])


def _run_program(ctx: JobContext, argv: list[str], timeout_seconds: int | None) -> int:
    clock = Clock()
    deadline = None if timeout_seconds is None else clock.monotonic() + timeout_seconds
    with _started(argv) as program:
        while not program.has_exited():
            if ctx.cancelled:
                program.stop(clock)
            elif deadline is not None and clock.monotonic() >= deadline:
                program.stop(clock)
                message = _("%(program)s: still running after %(seconds)s s.")
                raise TimeoutError(message % {"program": argv[0], "seconds": timeout_seconds})
            else:
                program.relay(_POLL_SECONDS)
        return program.finish()


@contextlib.contextmanager
def _started(argv: list[str]) -> Iterator[_Program]:
    program = _Program(argv)
    try:
        yield program
    finally:
        program.finish()


class _Program:
    """A child process that leads its own session, with one pipe for all its output."""

    def __init__(self, argv: list[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._code: int | None = None
        self._output, child_end = os.pipe()
        try:
            self.pid = _spawn(argv, child_end)
        except BaseException:
            os.close(self._output)
            raise
        finally:
            os.close(child_end)
        os.set_blocking(self._output, False)
        self._at_end = False

    def has_exited(self) -> bool:
        """Tell whether the child ended. It stays unreaped, so its group id stays its own."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._code is not None or os.waitid(os.P_PID, self.pid, options) is not None

    def relay(self, seconds: float) -> None:
        """Pass on output for at most about ``seconds``."""
        readable, _w, _x = select.select([] if self._at_end else [self._output], [], [], seconds)
        if readable:
            self._read()

    def stop(self, clock: Clock) -> None:
        """End the group: SIGTERM, then SIGKILL after the grace. Output goes on meanwhile."""
        self._signal_group(signal.SIGTERM)
        deadline = clock.monotonic() + STOP_GRACE_SECONDS
        while not self.has_exited() and clock.monotonic() < deadline:
            self.relay(_POLL_SECONDS)
        self.finish()

    def finish(self) -> int:
        """Kill what is left of the group, reap the child and return its exit code."""
        if self._code is None:
            self._signal_group(signal.SIGKILL)
            _pid, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
            self._drain()
        return self._code

    def _signal_group(self, number: signal.Signals) -> None:
        # macOS answers EPERM for a group whose members have all ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _read(self) -> bool:
        try:
            chunk = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return False
        self._at_end = not chunk
        capture.write(self._decoder.decode(chunk, final=self._at_end))
        return bool(chunk)

    def _drain(self) -> None:
        # A descendant with a session of its own may hold the pipe open, so no wait for its end.
        for _turn in range(_DRAIN_READS):
            if self._at_end or not self._read():
                break
        os.close(self._output)
        capture.write(self._decoder.decode(b"", final=True))


def _spawn(argv: list[str], output: int) -> int:
    """Start ``argv``; unlike fork and exec with a hook, this is safe beside threads.

    In a process of the run's own it stays in that session, so that it is found and killed
    where the process is killed before it can end its program.
    """
    leads_session = os.getsid(0) == os.getpid()
    return os.posix_spawn(
        argv[0],
        argv,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
        ],
        **({"setpgroup": 0} if leads_session else {"setsid": True}),
        # A worker ignores or blocks signals that a program expects to end by.
        setsigmask=[],
        setsigdef=sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}),
    )


class _CaptureStream(io.TextIOBase):
    """A text stream into the run's output."""

    def write(self, text: str) -> int:
        capture.write(text)
        return len(text)

    def writable(self) -> bool:
        return True
