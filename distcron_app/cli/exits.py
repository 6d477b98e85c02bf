"""Exit codes, and which error leads to which of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management.base import CommandError
from django.db import InterfaceError, OperationalError, ProgrammingError
from django.utils.translation import gettext as _

from distcron_app.errors import (
    BackfillMovedOn,
    ConfigurationError,
    InvalidArguments,
    InvalidBackfill,
    LockUnavailable,
    RunMovedOn,
    ScheduleBusy,
    StaleVersion,
    TimetableError,
    UnknownJob,
)
from distcron_app.registry import WHOLE

__all__ = [
    "DEPENDENCY_DOWN",
    "FAILED",
    "INTERRUPTED",
    "LEASE_LOST",
    "NOT_FOUND",
    "REFUSED",
    "TIMED_OUT",
    "USAGE",
    "Exit",
    "busy_text",
    "errors_as_exits",
]

FAILED = 1  # the run failed, or the system is unhealthy
USAGE = 2
NOT_FOUND = 4
REFUSED = 5  # no permission, busy, or not confirmed
DEPENDENCY_DOWN = 6  # the database or the lock backend does not answer
TIMED_OUT = 7
LEASE_LOST = 8  # the lock ended before the command that it guards
INTERRUPTED = 130


class Exit(CommandError):
    """Ends the command with ``returncode``; the text is for stderr.

    ``hint`` is shown below the text, on a terminal only.
    """

    def __init__(self, returncode: int, text: object, *, hint: str = "") -> None:
        super().__init__(str(text), returncode=returncode)
        self.hint = hint


@contextmanager
def errors_as_exits() -> Iterator[None]:
    """Turn the errors that a person can mend into an Exit; let bugs through."""
    try:
        yield
    except tuple(_EXITS) as error:
        code, text = next(
            (code, text) for kind, (code, text) in _EXITS.items() if isinstance(error, kind)
        )
        raise Exit(code, text(error)) from error


def _arguments_text(error: InvalidArguments) -> str:
    return "; ".join(
        # The registry's name for what concerns all of them.
        f"{_('arguments') if parameter == WHOLE else parameter}: {message}"
        for parameter, message in error.problems.items()
    )


def busy_text(error: ScheduleBusy) -> str:
    """Return which run stands in the way."""
    facts = {"key": error.label, "run": error.blocked_by}
    return _("schedule %(key)r: busy, blocked by run %(run)d.") % facts


def _database_text(error: Exception) -> str:
    cause = str(error).strip().partition("\n")[0]
    return _("the database does not answer: %s") % cause


def _schema_text(error: Exception) -> str:
    cause = str(error).strip().partition("\n")[0]
    if not _is_missing_table(cause):
        return _("the database refused the query: %s") % cause
    return _("a table is missing: %s. Run: manage.py migrate") % cause


def _operational_text(error: Exception) -> str:
    return _schema_text(error) if _is_missing_table(str(error)) else _database_text(error)


def _is_missing_table(cause: str) -> bool:
    return any(text in cause for text in ("no such table", "does not exist", "doesn't exist"))


# A kind that is not here, such as IntegrityError, is a bug and keeps its traceback.
_EXITS: dict[type[Exception], tuple[int, Callable[[Any], str]]] = {
    TimetableError: (USAGE, str),
    InvalidArguments: (USAGE, _arguments_text),
    InvalidBackfill: (USAGE, str),
    UnknownJob: (NOT_FOUND, str),
    ScheduleBusy: (REFUSED, busy_text),
    RunMovedOn: (REFUSED, str),
    BackfillMovedOn: (REFUSED, str),
    StaleVersion: (REFUSED, str),
    ConfigurationError: (FAILED, str),
    LockUnavailable: (DEPENDENCY_DOWN, str),
    OperationalError: (DEPENDENCY_DOWN, _operational_text),
    InterfaceError: (DEPENDENCY_DOWN, _database_text),
    ProgrammingError: (DEPENDENCY_DOWN, _schema_text),
}
