"""Run one node until it is told to stop."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
from typing import Any, TextIO, cast

import django
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import (
    DEFAULT_DB_ALIAS,
    DatabaseError,
    InterfaceError,
    connection,
    connections,
)
from django.db.migrations.executor import MigrationExecutor
from django.utils import formats
from django.utils.translation import gettext as _

import distcron_app
from distcron_app.checks import definitions_tolerated
from distcron_app.clock import Clock
from distcron_app.conf import Config, get_config
from distcron_app.console import JsonConsole, TextConsole
from distcron_app.errors import LockUnavailable
from distcron_app.executors import ProcessPool
from distcron_app.locks import (
    LockBackend,
    close_backends,
    get_backend,
    get_level,
    level_problem,
    pooling_problem,
)
from distcron_app.models import Schedule
from distcron_app.scheduler import Scheduler

EXIT_DEPENDENCY_DOWN = 6

# The scheduler's own connections; jobs have theirs in other processes.
CONNECT_TIMEOUT_SECONDS = 3
_POSTGRES_SESSION = (
    "SET statement_timeout = '10s'; SET lock_timeout = '5s'; "
    "SET idle_in_transaction_session_timeout = '10s'; SET synchronous_commit = on"
)

EXAMPLES = """
  python manage.py runscheduler
  python manage.py runscheduler --processes 4 --threads 8 --log json
"""


class Command(BaseCommand):
    """Start worker processes, then claim and run due occurrences until a signal."""

    help = "Run one scheduler node: claims due occurrences and runs their jobs."
    requires_system_checks = "__all__"

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        return super().create_parser(
            prog_name,
            subcommand,
            epilog=_epilog(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **kwargs,
        )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.description = _(
            "Run one scheduler node: claims due occurrences and runs their jobs."
        )
        parser.add_argument("--processes", type=_count, help=_("worker processes of this node"))
        parser.add_argument("--threads", type=_count, help=_("threads in each worker process"))
        parser.add_argument("--name", help=_("label of this node for people; default: host name"))
        parser.add_argument(
            "--drain-seconds", type=float, help=_("how long a stop waits for running jobs")
        )
        parser.add_argument("--log", choices=["text", "json"], default="text")

    def check(self, *args: Any, **options: Any) -> None:
        """Run the system checks; a schedule in code that cannot be used is only a warning."""
        with definitions_tolerated():
            super().check(*args, **options)

    def handle(self, *args: Any, **options: Any) -> None:
        config = _config(options)
        console = self._console(options)
        if isinstance(console, TextConsole):
            console.say(
                f"distcron {distcron_app.__version__} · Django {django.get_version()} · "
                f"Python {platform.python_version()} · {config.label}, pid {os.getpid()}"
            )
        # Before any connection or thread: the workers are forked from here.
        connections.close_all()
        pool = ProcessPool(
            processes=config.processes,
            threads=config.threads,
            output_limit_bytes=config.output_limit_bytes,
        )
        pool.start()
        try:
            _limit_connections()
            self._introduce(console, config, get_backend(config))
            _check_lock_database(console, config)
        except BaseException:
            pool.kill()
            raise
        code = Scheduler(
            config=config,
            pool=pool,
            find_level=lambda name: get_level(name, config=config),
            report=console,
            clock=Clock(),
        ).run()
        close_backends()
        if code:
            # Not sys.exit: a Django command is told its exit code by the error it raises.
            raise SystemExit(code)

    def _console(self, options: dict[str, Any]) -> TextConsole | JsonConsole:
        stream = cast(TextIO, self.stdout._out)
        if options["log"] == "json":
            return JsonConsole(stream)
        plain = options["no_color"] or "NO_COLOR" in os.environ
        colour = options["force_color"] or (stream.isatty() and not plain)
        return TextConsole(stream, time_zone=settings.TIME_ZONE, colour=colour)

    def _introduce(
        self, console: TextConsole | JsonConsole, config: Config, backend: LockBackend
    ) -> None:
        """Say what this node works with; refuse to start without a migrated database."""
        clock = Clock()
        try:
            before = clock.monotonic()
            connection.ensure_connection()
            executor = MigrationExecutor(connection)
            answer_ms = (clock.monotonic() - before) * 1000
            targets = [node for node in executor.loader.graph.leaf_nodes() if node[0] == "distcron"]
            if executor.migration_plan(targets):
                raise CommandError(
                    _("The tables are not up to date. Run: python manage.py migrate"),
                    returncode=EXIT_DEPENDENCY_DOWN,
                )
            counts = {
                state: Schedule.objects.filter(state=state).count() for state in Schedule.State
            }
        except (DatabaseError, InterfaceError) as error:
            raise CommandError(
                _("Database unreachable: %s") % str(error).strip(),
                returncode=EXIT_DEPENDENCY_DOWN,
            ) from error
        locks = _describe_locks(backend)
        if isinstance(console, JsonConsole):
            console("ready", database=connection.vendor, locks=locks, schedules=counts)
            return
        console.say(
            f"  {connection.display_name} {_version()} · {answer_ms:.0f} ms · "
            + _("locks: %s") % locks
        )
        console.say(
            "  "
            + _("%(active)d schedules active, %(paused)d paused, %(invalid)d invalid")
            % {state.value: count for state, count in counts.items()}
            + " · "
            + _("%(processes)d processes of %(threads)d threads")
            % {"processes": config.processes, "threads": config.threads}
            + f" · {settings.TIME_ZONE}"
        )
        if connection.vendor == "sqlite":
            console.say("  ! " + _("SQLite: for the nodes of one machine only."))
        console.say(
            "  "
            + _("stop with Ctrl-C (drains up to %g s; twice stops at once)") % config.drain_seconds
        )


def _check_lock_database(console: TextConsole | JsonConsole, config: Config) -> None:
    """Refuse to start where the locks of an active schedule would not hold; else warn of it.

    The level "critical" is always there, so nothing is asked before anybody uses it.
    """
    levels = [
        name
        for name, parts in config.levels.items()
        if "database" in parts and not level_problem(name, config)
    ]
    active = Schedule.objects.filter(state=Schedule.State.ACTIVE)
    used = sorted(set(active.filter(lock_level__in=levels).values_list("lock_level", flat=True)))
    if not levels or not (used or _names_lock_database(config)):
        return
    problem = _lock_database_problem(config.lock_database)
    if not problem:
        return
    text = _("Lock level %(levels)s: %(problem)s") % {
        "levels": ", ".join(map(repr, used or levels)),
        "problem": problem,
    }
    if used:
        raise CommandError(text, returncode=EXIT_DEPENDENCY_DOWN)
    if isinstance(console, JsonConsole):
        console("lock_database_refused", cause=problem, levels=levels)
    else:
        console.say(f"  ! {text}")


def _names_lock_database(config: Config) -> bool:
    """Return True where somebody wrote settings for locks of the database."""
    made_of_it = any("database" in parts for _name, parts in config.lock_levels)
    return made_of_it or config.lock_database != DEFAULT_DB_ALIAS


def _lock_database_problem(alias: str) -> str:
    try:
        return pooling_problem(alias)
    except LockUnavailable as error:
        return _("database %(alias)r gives no lock: %(cause)s.") % {
            "alias": alias,
            "cause": error.cause,
        }


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 256:
        message = _("got %(text)r, allowed %(low)d to %(high)d")
        raise argparse.ArgumentTypeError(message % {"text": value, "low": 1, "high": 256})
    return value


def _epilog() -> str:
    signals = _(
        "SIGTERM or SIGINT drains: nothing new is claimed, running jobs finish, exit 0.\n"
        "A second signal stops at once. SIGUSR1 prints what the node is doing.\n"
        "exit codes: 0 drained, 1 broken, 2 usage, 3 jobs were cut off at the end of the drain,\n"
        "6 database unreachable, not migrated, or without locks that a schedule needs, at start,\n"
        "130 stopped at once."
    )
    return f"{_('examples:')}{EXAMPLES}\n{signals}"


def _config(options: dict[str, Any]) -> Config:
    given = {
        "processes": options["processes"],
        "threads": options["threads"],
        "node_name": options["name"],
        "drain_seconds": options["drain_seconds"],
    }
    return dataclasses.replace(
        get_config(), **{key: value for key, value in given.items() if value is not None}
    )


def _limit_connections() -> None:
    """Bound how long this process waits for the database, so that a hang is noticed."""
    from django.db.backends.signals import connection_created

    options = connections.settings["default"].setdefault("OPTIONS", {})
    if connection.vendor in ("postgresql", "mysql"):
        options.setdefault("connect_timeout", CONNECT_TIMEOUT_SECONDS)
    if connection.vendor == "postgresql":
        options.setdefault("tcp_user_timeout", 10_000)
        options.setdefault("keepalives_idle", 5)
        options.setdefault("keepalives_interval", 2)
        options.setdefault("keepalives_count", 3)
    connection_created.connect(_prepare_session, dispatch_uid="distcron")


def _prepare_session(*, connection: Any, **_: Any) -> None:
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(_POSTGRES_SESSION)


def _describe_locks(backend: LockBackend) -> str:
    try:
        seconds = backend.ping()
    except LockUnavailable as error:
        return _("%(backend)s away (%(cause)s), the database decides alone") % {
            "backend": backend.name,
            "cause": error.cause,
        }
    return f"{backend.name} {formats.number_format(seconds * 1000, 1)} ms"


def _version() -> str:
    return ".".join(str(part) for part in connection.get_database_version())
