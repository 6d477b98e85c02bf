"""One attempt of one run, in the calling thread.

``execute()`` turns an Assignment into an Outcome and never raises for what a job
does. Both values cross process borders as JSON-able lists. The runner writes no run
state and takes no decision about retries: whoever sent the assignment does.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import re
import reprlib
import subprocess
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Literal

from asgiref.sync import async_to_sync
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.translation import gettext as _

from distcron_app import registry
from distcron_app.arguments import mask
from distcron_app.capture import OutputBuffer, captured, clean_text
from distcron_app.context import JobContext, ParentRun, entered
from distcron_app.errors import InvalidArguments, RetryLater, RunStopped, UnknownJob

__all__ = ["Assignment", "Outcome", "execute"]

ERROR_LENGTH = 500
TRACEBACK_LIMIT_BYTES = 65_536
# Innermost frames kept; a deep recursion has hundreds of thousands.
FRAME_LIMIT = 100
# A larger or non-JSON result is kept as its short repr.
RESULT_LIMIT_BYTES = 65_536
RESULT_REPR_LENGTH = 500

# Frames of the machinery above the job, stripped from the top of a traceback.
_MACHINERY = re.compile(r"(distcron_app\.runner|asgiref|asyncio|concurrent\.futures)(\.|$)")

logger = logging.getLogger("distcron.runner")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = RESULT_REPR_LENGTH


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a worker needs to know to run one attempt. ``arguments`` are JSON."""

    run_id: int
    schedule_id: int
    schedule_key: str
    job: str
    arguments: dict[str, Any]
    scheduled_at: datetime
    attempt: int
    fencing_token: int
    is_recovery: bool = False
    parent: ParentRun | None = None

    def to_wire(self) -> list[Any]:
        """Return a JSON-able list that ``from_wire`` reads."""
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return [_plain(each) for each in values]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> Assignment:
        """Return the assignment that ``to_wire`` wrote."""
        fields = [field.name for field in dataclasses.fields(cls)]
        values = dict(zip(fields, wire, strict=True))
        parent = values["parent"] and ParentRun.from_wire(values["parent"])
        scheduled_at = datetime.fromisoformat(values["scheduled_at"])
        return cls(**{**values, "scheduled_at": scheduled_at, "parent": parent})

    def context(self, on_progress: Callable[[float, str], None] | None = None) -> JobContext:
        """Return a fresh context for this attempt. ``on_progress`` must not block."""
        return JobContext(
            run_id=self.run_id,
            schedule_id=self.schedule_id,
            schedule_key=self.schedule_key,
            job=self.job,
            scheduled_at=self.scheduled_at,
            attempt=self.attempt,
            fencing_token=self.fencing_token,
            is_recovery=self.is_recovery,
            parent=self.parent,
            on_progress=on_progress,
        )


def _plain(value: Any) -> Any:
    if isinstance(value, ParentRun):
        return value.to_wire()
    return value.isoformat() if isinstance(value, datetime) else value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended. All text is masked, storable and bounded.

    ``reason`` is empty for a success, else error, exit_code, job_not_found or
    invalid_arguments; for a job that stopped when its context told it to, its reason.
    ``result`` is JSON; another value is kept as ``{"repr": "..."}``. ``error`` is one
    line of at most 500 characters.
    """

    run_id: int
    fencing_token: int
    state: Literal["succeeded", "failed", "cancelled"]
    reason: str = ""
    result: Any = None
    error: str = ""
    traceback: str = ""
    output: str = ""
    # Dotted names of the error's class and its bases, and what RetryLater asked for.
    exceptions: tuple[str, ...] = ()
    retry_seconds: float | None = None

    def to_wire(self) -> list[Any]:
        """Return a JSON-able list that ``from_wire`` reads."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> Outcome:
        """Return the outcome that ``to_wire`` wrote."""
        values = dict(zip((f.name for f in dataclasses.fields(cls)), wire, strict=True))
        return cls(**{**values, "exceptions": tuple(values["exceptions"])})


def execute(assignment: Assignment, *, context: JobContext, output_limit_bytes: int) -> Outcome:
    """Run one attempt and return how it ended. It blocks for as long as the job does.

    Only KeyboardInterrupt passes through. Database connections that the job's code
    finds in this thread are usable, and no broken one, no expired one and no open
    transaction is left behind. A caller's own open transaction is left alone.
    """
    outer_transactions = _prepare_connections()
    try:
        with captured(output_limit_bytes) as output, entered(context):
            context.attach_output(lambda: mask(output.text(), assignment.arguments))
            facts = _attempt(assignment, context)
    finally:
        _tidy_connections(outer_transactions)
    return Outcome(
        run_id=assignment.run_id,
        fencing_token=assignment.fencing_token,
        output=mask(output.text(), assignment.arguments),
        **facts,
    )


def _attempt(assignment: Assignment, context: JobContext) -> dict[str, Any]:
    """Return the fields of the outcome that the job decides."""
    try:
        job = registry.get(assignment.job)
        values = job.check(assignment.arguments)
    except UnknownJob as error:
        return _failure("job_not_found", error, assignment)
    except InvalidArguments as error:
        return _failure("invalid_arguments", error, assignment)
    except Exception as error:  # noqa: BLE001 - the job's own validation is foreign code
        return _failure("error", error, assignment, with_traceback=True)
    if job.signature.context_parameter is not None:
        values[job.signature.context_parameter] = context
    return _call(job.function, values, assignment, context)


def _call(
    function: Callable[..., Any],
    values: dict[str, Any],
    assignment: Assignment,
    context: JobContext,
) -> dict[str, Any]:
    try:
        result = function(**values)
        if inspect.iscoroutine(result):
            # Unlike asyncio.run, it runs the ORM's calls in this thread, on its connections.
            result = async_to_sync(_awaited)(result)
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        if not error.code:
            return {"state": "succeeded"}
        return _failure("exit_code", error, assignment, with_traceback=True)
    except subprocess.CalledProcessError as error:
        return _failure("exit_code", error, assignment, with_traceback=True)
    except RunStopped as error:
        if not context.cancelled:
            # Of a lock that the job took by itself.
            return _failure("error", error, assignment, with_traceback=True)
        return _failure(context.cancel_reason, error, assignment) | {"state": "cancelled"}
    except BaseException as error:  # noqa: BLE001 - whatever a job raises ends this run only
        return _failure("error", error, assignment, with_traceback=True)
    return {"state": "succeeded", "result": _storable(result, assignment.arguments)}


async def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return await coroutine


def _failure(
    reason: str,
    error: BaseException,
    assignment: Assignment,
    *,
    with_traceback: bool = False,
) -> dict[str, Any]:
    arguments = assignment.arguments
    return {
        "state": "failed",
        "reason": reason,
        "error": _error_line(error, arguments),
        "traceback": _traceback_text(error, arguments) if with_traceback else "",
        "exceptions": _names_of(error) if with_traceback else (),
        "retry_seconds": error.delay_seconds if isinstance(error, RetryLater) else None,
    }


def _names_of(error: BaseException) -> tuple[str, ...]:
    """Return the dotted names of the error's class and its bases, the nearest first."""
    bases = [kind for kind in type(error).__mro__ if issubclass(kind, BaseException)]
    return tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in bases)[:20]


def _error_line(error: BaseException, arguments: Mapping[str, Any]) -> str:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        message = _("exit code %s") % error.code
    else:
        message = _text_of(error)
    # Cut before the search for secrets, which is slow on megabytes, and after it.
    line = f"{type(error).__name__}: {message[: 20 * ERROR_LENGTH]}".removesuffix(": ")
    line = " ".join(clean_text(mask(line, arguments)).split())
    return line if len(line) <= ERROR_LENGTH else line[: ERROR_LENGTH - 1] + "…"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - __str__ of a foreign exception
        return _("(its text cannot be read)")


def _traceback_text(error: BaseException, arguments: Mapping[str, Any]) -> str:
    """Format ``error`` with its innermost frames, in memory bounded by the limit."""
    own = _without_machinery(error.__traceback__)
    buffer = OutputBuffer(TRACEBACK_LIMIT_BYTES)
    try:
        depth = sum(1 for _frame in traceback.walk_tb(own))
        if depth > FRAME_LIMIT:
            buffer.write(_("[%s outer frames cut]") % (depth - FRAME_LIMIT) + "\n")
        formatted = traceback.TracebackException(
            type(error), error, own, limit=-FRAME_LIMIT, compact=True
        )
        for line in formatted.format():
            buffer.write(line)
    except Exception as problem:  # noqa: BLE001 - such as no memory left
        logger.warning("traceback_failed error=%s", type(problem).__name__)
        buffer.write(_("(the traceback cannot be formatted)") + "\n")
    return mask(buffer.text(), arguments)


def _without_machinery(top: TracebackType | None) -> TracebackType | None:
    current = top
    while current is not None and _MACHINERY.match(
        str(current.tb_frame.f_globals.get("__name__", ""))
    ):
        current = current.tb_next
    return current


def _storable(result: object, arguments: Mapping[str, Any]) -> Any:
    if result is None:
        return None
    try:
        text = json.dumps(result, allow_nan=False)
        if len(text) <= RESULT_LIMIT_BYTES:
            return _cleaned(json.loads(text), arguments)
    except (TypeError, ValueError, RecursionError, MemoryError):
        pass
    return {"repr": _cleaned(_short_repr(result), arguments)}


def _cleaned(value: Any, arguments: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return clean_text(mask(value, arguments))
    if isinstance(value, list):
        return [_cleaned(item, arguments) for item in value]
    if isinstance(value, dict):
        return {_cleaned(key, arguments): _cleaned(item, arguments) for key, item in value.items()}
    return value


def _short_repr(value: object) -> str:
    try:
        return _SHORT.repr(value)[:RESULT_REPR_LENGTH]
    except Exception:  # noqa: BLE001 - __repr__ of a foreign value
        return f"<{type(value).__name__}>"


def _prepare_connections() -> set[str]:
    """Close connections that died while idle; return the aliases inside a transaction."""
    for connection in _idle_connections():
        _close_unless_healthy(connection)
    return {each.alias for each in connections.all(initialized_only=True) if each.in_atomic_block}


def _tidy_connections(outer_transactions: set[str]) -> None:
    for connection in connections.all(initialized_only=True):
        if connection.alias in outer_transactions:
            continue
        try:
            _tidy(connection)
        except Exception:
            logger.exception("connection_not_closed alias=%s", connection.alias)


def _tidy(connection: BaseDatabaseWrapper) -> None:
    if connection.in_atomic_block:
        logger.warning("transaction_left_open alias=%s", connection.alias)
        _discard(connection)
    else:
        connection.close_if_unusable_or_obsolete()


def _discard(connection: BaseDatabaseWrapper) -> None:
    """Drop a connection with everything the job left in it; the server rolls back."""
    # close() inside a block only marks the connection for the block's end, which never comes.
    connection.in_atomic_block = False
    connection.savepoint_ids = []
    connection.run_on_commit = []
    connection.close()
    del connections[connection.alias]


def _idle_connections() -> Iterator[BaseDatabaseWrapper]:
    for connection in connections.all(initialized_only=True):
        if connection.connection is not None and not connection.in_atomic_block:
            yield connection


def _close_unless_healthy(connection: BaseDatabaseWrapper) -> None:
    try:
        connection.close_if_unusable_or_obsolete()
        # CONN_HEALTH_CHECKS may be off; a job must not meet a dead link in any case.
        if connection.connection is not None and not connection.is_usable():
            connection.close()
    except Exception:
        logger.exception("connection_not_checked alias=%s", connection.alias)
