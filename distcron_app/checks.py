"""System checks of distcron; none of them needs a network.

Ids: E00x settings, W00x project settings, E01x and W01x the lock alias,
E02x the lock levels, E03x the schedules in code (in ``sync``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.utils.translation import gettext as _

from distcron_app import conf, timetable
from distcron_app.errors import TimetableError
from distcron_app.lock_checks import check_lock_settings

__all__ = [
    "check_database",
    "check_settings",
    "check_zone",
    "definition_problem",
    "definitions_tolerated",
]

E001 = "distcron.E001"
W002 = "distcron.W002"
W003 = "distcron.W003"
W004 = "distcron.W004"

_tolerated: ContextVar[bool] = ContextVar("_tolerated", default=False)


@register("distcron")
def check_settings(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Refuse unknown keys and unusable values of ``settings.DISTCRON``."""
    return [
        Error(f"DISTCRON[{problem.key!r}]: {problem.problem}", hint=problem.fix, id=E001)
        for problem in conf.problems()
    ]


register("distcron")(check_lock_settings)


@register("distcron")
def check_zone(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Warn where the project's zone differs per host or instants may be read as local time."""
    found: list[CheckMessage] = []
    try:
        timetable.check_timezone(settings.TIME_ZONE)
    except TimetableError as error:
        found.append(
            Warning(
                f"TIME_ZONE: {error}",
                hint=_("New schedules take this zone by default; name one such as 'Asia/Jakarta'."),
                id=W002,
            )
        )
    if not settings.USE_TZ:
        found.append(
            Warning(
                _("USE_TZ is False: other apps of this project see naive local times."),
                hint=_("distcron stores and computes in UTC all the same. Set USE_TZ = True."),
                id=W003,
            )
        )
    return found


@register("distcron")
def check_database(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Warn where SQLite would forget claims after a power loss, or shut out other nodes."""
    database = settings.DATABASES.get("default", {})
    if not str(database.get("ENGINE", "")).endswith("sqlite3"):
        return []
    options = database.get("OPTIONS", {})
    commands = str(options.get("init_command", "")).lower().replace(" ", "")
    lacking = [
        text
        for text, present in (
            ("journal_mode=WAL", "journal_mode=wal" in commands),
            ("synchronous=FULL", "synchronous=full" in commands),
            ('"transaction_mode": "IMMEDIATE"', options.get("transaction_mode") == "IMMEDIATE"),
        )
        if not present
    ]
    if not lacking:
        return []
    return [
        Warning(
            _("SQLite without %s: nodes may be locked out, or forget a claim after a power loss.")
            % ", ".join(lacking),
            hint='OPTIONS = {"transaction_mode": "IMMEDIATE", "timeout": 10, "init_command": '
            '"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"}',
            id=W004,
        )
    ]


def definition_problem(text: str, **facts: Any) -> CheckMessage:
    """Return what is wrong with a schedule in code: an error, or a warning to a node."""
    kind = Warning if _tolerated.get() else Error
    return kind(text, **facts)


@contextmanager
def definitions_tolerated() -> Iterator[None]:
    """Let schedules in code that cannot be used be warnings: they stop no node that starts.

    Their rows stay as they were, and the others are to go on.
    """
    before = _tolerated.set(True)
    try:
        yield
    finally:
        _tolerated.reset(before)
