"""``manage.py locked NAME -- command ...``: run any command under a lock."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from django.core.management.base import BaseCommand, CommandParser, DjangoHelpFormatter
from django.utils.translation import gettext as _

from distcron_app.cli.exits import DEPENDENCY_DOWN, LEASE_LOST, USAGE, Exit, errors_as_exits
from distcron_app.clock import Clock
from distcron_app.errors import LockNotAcquired
from distcron_app.locks import Held, NamedLock, lock

__all__ = ["Command"]

# What a shell says for a program that cannot be started, and adds to a signal's number.
_NOT_FOUND, _NOT_EXECUTABLE, _SIGNALLED = 127, 126, 128
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# How long a command that lost its lock may take to stop.
_KILL_SECONDS = 10.0
_LOOK_SECONDS = 0.25

_EXAMPLES = (
    "nightly -- echo done",
    "nightly --ttl 60 --wait 5 --busy-exit-code 75 -- sh -c 'echo one && echo two'",
)


class _Help(DjangoHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the examples as they are."""


class Command(BaseCommand):
    """Takes the lock, starts the command, passes signals on, and ends as the command does."""

    help = "Run any command under a lock."
    # It works without a database, and a crontab calls it for programs that know no Django.
    requires_system_checks: tuple[str, ...] = ()
    _typed: Sequence[str] = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Parse what stands before the first ``--``; what follows is the command as it is."""
        if "--" in argv:
            # Some versions of argparse would remove a further one, which is the command's.
            place = argv.index("--") + 1
            self._typed = argv[place:]
            argv = argv[: place + 1]
        super().run_from_argv(argv)

    def add_arguments(self, parser: CommandParser) -> None:
        parser.description = _("Run any command under a lock, without a shell.")
        parser.epilog = _epilog()
        parser.formatter_class = _Help
        parser.add_argument("name", metavar="NAME", help=_("Name of the lock."))
        parser.add_argument(
            "--ttl",
            type=_number,
            metavar="SECONDS",
            help=_(
                "How long the lock outlives a killed holder, 1 to 3600; the setting "
                "LOCK_TTL_SECONDS by default."
            ),
        )
        parser.add_argument(
            "--wait",
            type=_number,
            default=0.0,
            metavar="SECONDS",
            help=_("How long to wait for the lock while it is taken; 0 by default."),
        )
        parser.add_argument(
            "--level", default="standard", help=_("Lock level; standard by default.")
        )
        parser.add_argument(
            "--busy-exit-code",
            type=_exit_code,
            default=0,
            metavar="N",
            help=_("Exit code while the lock is taken, 0 to 255; 0 by default."),
        )
        parser.add_argument(
            "--on-lost",
            choices=["stop", "warn"],
            default="stop",
            help=_("What to do with the command when the lock is lost; stop by default."),
        )
        parser.add_argument(
            "command", nargs="+", metavar="COMMAND", help=_("The command and its arguments.")
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            with errors_as_exits():
                code = self._run(options)
        except Exit as error:
            # The label is part of the interface, as it is of schedulerctl.
            self.stderr.write(f"error: {error}")
            code = error.returncode
        if code:
            # Not sys.exit: a Django command is told its exit code by the error it raises.
            raise SystemExit(code)

    def _run(self, options: dict[str, Any]) -> int:
        words = self._typed or options["command"]
        try:
            with _guard(options, os.path.basename(words[0])) as held:
                return self._run_under(held, words, stops=options["on_lost"] == "stop")
        except LockNotAcquired as error:
            if options["verbosity"]:
                self.stderr.write(_busy_text(error))
            return int(options["busy_exit_code"])

    def _run_under(self, held: Held, words: Sequence[str], *, stops: bool) -> int:
        child = _Child(words)
        with child.signals():
            child.start()
            while not child.has_ended():
                if held.lost:
                    return self._after_loss(child, held, stops=stops)
        return child.code

    def _after_loss(self, child: _Child, held: Held, *, stops: bool) -> int:
        facts = {"name": held.name, "cause": held.cause}
        if not stops:
            text = _("lock %(name)r: lost, %(cause)s. The command goes on without it.")
            self.stderr.write(text % facts)
            child.wait()
            return child.code
        self.stderr.write(_("lock %(name)r: lost, %(cause)s. The command is told to stop.") % facts)
        child.stop()
        return LEASE_LOST


class _Child:
    """The command, in a process group of its own unless a terminal is its input."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        # On a terminal a group of its own would stop when it reads, and would not see Ctrl-C.
        self._has_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._early: list[int] = []
        self._clock = Clock()

    @property
    def code(self) -> int:
        """Return the exit code as a shell tells it."""
        code = 0 if self._process is None else self._process.returncode
        return code if code >= 0 else _SIGNALLED - code

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Pass signals on for the block, except those that this process was told to ignore."""
        known = {number: signal.getsignal(number) for number in _PASSED_ON}
        caught = [number for number, handler in known.items() if handler != signal.SIG_IGN]
        for number in caught:
            signal.signal(number, self._pass_on)
        try:
            yield
        finally:
            for number in caught:
                signal.signal(number, known[number])

    def start(self) -> None:
        """Start the command. Raise Exit where it cannot be started."""
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the command is the caller's
                self._words, process_group=None if self._has_terminal else 0
            )
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            raise Exit(
                _NOT_FOUND if missing else _NOT_EXECUTABLE,
                _("command %(word)r: cannot be started, %(cause)s.")
                % {"word": self._words[0], "cause": error.strerror},
            ) from error
        threading.Thread(target=self._reap, daemon=True).start()
        for number in self._early:
            self._send(number)

    def has_ended(self) -> bool:
        """Wait a moment for the end; signals are passed on meanwhile."""
        return self._clock.wait(self._ended, _LOOK_SECONDS)

    def wait(self) -> None:
        """Wait for the end as long as it takes; signals are passed on meanwhile."""
        while not self.has_ended():
            pass

    def stop(self) -> None:
        """Tell the command and what it started to stop; kill after ten seconds what is left."""
        kill_at = self._clock.monotonic() + _KILL_SECONDS
        self._send(signal.SIGTERM)
        # The command may end before what it started.
        while not (self.has_ended() and self._is_gone()):
            if self._clock.monotonic() >= kill_at:
                self._send(signal.SIGKILL)
                break
            self._clock.wait(threading.Event(), _LOOK_SECONDS)
        self.wait()

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait()
        self._ended.set()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._process is None:
            self._early.append(number)
        elif not (number == signal.SIGINT and self._has_terminal):
            # A terminal has sent Ctrl-C to the command as well.
            self._send(number)

    def _send(self, number: int) -> None:
        if self._process is None or (self._has_terminal and self._ended.is_set()):
            return
        with contextlib.suppress(ProcessLookupError):
            if self._has_terminal:
                os.kill(self._process.pid, number)
            else:
                os.killpg(self._process.pid, number)

    def _is_gone(self) -> bool:
        if self._process is None or self._has_terminal:
            return True
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return True
        return False


def _guard(options: dict[str, Any], program: str) -> NamedLock:
    try:
        return lock(
            options["name"],
            options["ttl"],
            wait=options["wait"],
            level=options["level"],
            program=program,
        )
    except ValueError as error:
        raise Exit(USAGE, error) from error


def _busy_text(error: LockNotAcquired) -> str:
    facts = {
        "name": error.name,
        "holder": error.holder,
        "since": (error.age_ms or 0) / 1000,
        "left": (error.ttl_ms or 0) / 1000,
    }
    if error.age_ms is not None and error.ttl_ms is not None:
        text = _(
            "lock %(name)r: held by %(holder)s since %(since).1f s, TTL left %(left).1f s. "
            "The command was not run."
        )
        return text % facts
    return _("%s The command was not run.") % error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        message = _("got %r. Write a number of seconds, as in 60 or 0.5")
        raise argparse.ArgumentTypeError(message % text) from None


def _exit_code(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text[:9]) <= 255:
        return int(text)
    message = _("got %(text)r, allowed %(low)d to %(high)d")
    raise argparse.ArgumentTypeError(message % {"text": text, "low": 0, "high": 255})


def _epilog() -> str:
    codes = (
        ("", _("what the command exits with; 128 and the number of the signal that ended it")),
        ("0", _("also while the lock is taken, unless --busy-exit-code says otherwise")),
        (str(USAGE), _("the command line is wrong")),
        (str(DEPENDENCY_DOWN), _("the lock backend does not answer")),
        (str(LEASE_LOST), _("the lock was lost, and the command was stopped")),
        (str(_NOT_EXECUTABLE), _("the command cannot be executed")),
        (str(_NOT_FOUND), _("the command is not found")),
    )
    return "\n".join(
        (
            _("examples:"),
            *(f"  %(prog)s {example}" for example in _EXAMPLES),
            _("exit codes:"),
            *(f"  {code:<4} {text}" for code, text in codes),
        )
    )
