"""What a running job may ask about itself, and how it is told to stop.

The context of a run is shared by the thread that runs the job and the thread that
watches its lease, so every method may be called from any thread. Threads that a job
starts by itself do not inherit ``current_context()``; hand them the context.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from django.utils.translation import gettext as _

from distcron_app.clock import Clock
from distcron_app.errors import LeaseLost, RunStopped

__all__ = ["LEASE_LOST", "JobContext", "ParentRun", "current_context", "entered"]

# A person cannot follow faster, and each report costs a message to the parent.
PROGRESS_INTERVAL_SECONDS = 0.25
PROGRESS_MESSAGE_LENGTH = 200
LEASE_LOST = "lease_lost"

logger = logging.getLogger("distcron.context")

_current: contextvars.ContextVar[JobContext | None] = contextvars.ContextVar(
    "distcron_job_context", default=None
)


class _Shared:
    """The part of a context that changes, with the lock that guards it."""

    __slots__ = ("cause", "lock", "read_output", "reason", "reported", "reported_at", "stop")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.cause = self.reason = ""
        self.reported: tuple[float, str] | None = None
        self.reported_at = -math.inf
        self.read_output: Callable[[], str] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParentRun:
    """The run whose end started this one, as it was then.

    ``state`` is succeeded, failed, lost or skipped, ``reason`` says how. ``scheduled_at`` is
    its instant, aware UTC; ``result`` what its job returned, as JSON of at most 64 KB.
    """

    run_id: int
    attempt: int
    schedule_key: str
    state: str
    reason: str
    scheduled_at: datetime
    result: Any = None

    def to_wire(self) -> list[Any]:
        """Return a JSON-able list that ``from_wire`` reads."""
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return [each.isoformat() if isinstance(each, datetime) else each for each in values]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> ParentRun:
        """Return the value that ``to_wire`` wrote."""
        values = dict(zip((f.name for f in dataclasses.fields(cls)), wire, strict=True))
        return cls(**{**values, "scheduled_at": datetime.fromisoformat(values["scheduled_at"])})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobContext:
    """One attempt of one run, as its job sees it.

    ``scheduled_at`` is the instant that the timetable named, aware UTC; of a run that
    another schedule started, that of its ``parent``, which is None otherwise.
    ``fencing_token`` grows with every grant, so a receiver that remembers the
    largest one can refuse an older holder. ``on_progress`` must not block.
    """

    run_id: int
    schedule_id: int
    schedule_key: str
    job: str
    scheduled_at: datetime
    attempt: int
    fencing_token: int
    is_recovery: bool = False
    parent: ParentRun | None = None
    on_progress: Callable[[float, str], None] | None = dataclasses.field(default=None, repr=False)
    clock: Clock = dataclasses.field(default_factory=Clock, repr=False)
    _shared: _Shared = dataclasses.field(default_factory=_Shared, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.scheduled_at.tzinfo is None:
            raise ValueError(f"JobContext 'scheduled_at': must be aware, got {self.scheduled_at}.")

    @property
    def idempotency_key(self) -> str:
        """Name the occurrence: the same for every attempt and every recovery of it.

        Of a run that another schedule started it names the end of that one's run.
        """
        if self.parent is not None:
            return f"{self.schedule_id}:after:{self.parent.run_id}:{self.parent.attempt}"
        return f"{self.schedule_id}:{self.scheduled_at.astimezone(UTC).isoformat()}"

    @property
    def cancelled(self) -> bool:
        """Tell whether the job should stop as soon as it is safe."""
        return self._shared.stop.is_set()

    @property
    def cancel_cause(self) -> str:
        """Say why the job should stop; empty until it should."""
        return self._shared.cause

    @property
    def cancel_reason(self) -> str:
        """Return the reason of a run that stops now, such as ``lease_lost``; empty until then."""
        return self._shared.reason

    def cancel(self, cause: str, *, reason: str = LEASE_LOST) -> None:
        """Ask the job to stop. The first cause is kept, with its reason."""
        with self._shared.lock:
            if not self._shared.stop.is_set():
                self._shared.cause, self._shared.reason = cause, reason
                self._shared.stop.set()

    def check(self) -> None:
        """Raise RunStopped when the job should stop; call it wherever stopping is safe.

        It is a LeaseLost where the reason is that the run no longer holds its lock.
        """
        if self.cancelled:
            kind = LeaseLost if self.cancel_reason == LEASE_LOST else RunStopped
            raise kind(_("Run %d") % self.run_id, self.cancel_cause)

    def wait(self, seconds: float) -> None:
        """Block for ``seconds``; raise RunStopped at once when the job should stop."""
        self.clock.wait(self._shared.stop, seconds)
        self.check()

    def progress(self, percent: float, message: str = "") -> None:
        """Report how far the job is, 0 to 100, with at most 200 characters of text.

        At most four reports a second are passed on, except the one of 100; the others
        are dropped. It never blocks and never fails because of the receiver.
        """
        if isinstance(percent, bool) or not isinstance(percent, int | float):
            raise TypeError(_("Progress: must be a number from 0 to 100, got %r.") % (percent,))
        if not 0 <= percent <= 100:
            raise ValueError(_("Progress: must be from 0 to 100, got %r.") % (percent,))
        report = (float(percent), " ".join(message.split())[:PROGRESS_MESSAGE_LENGTH])
        if self.on_progress is not None and self._is_worth_sending(report):
            try:
                self.on_progress(*report)
            except Exception:
                logger.exception("progress_failed run=%s", self.run_id)

    def output(self) -> str:
        """Return what the job has written so far, with secrets masked."""
        read = self._shared.read_output
        return "" if read is None else read()

    def attach_output(self, read: Callable[[], str]) -> None:
        """Let ``output()`` answer from ``read``; the runner calls it before the job starts."""
        self._shared.read_output = read

    def _is_worth_sending(self, report: tuple[float, str]) -> bool:
        now = self.clock.monotonic()
        with self._shared.lock:
            if report == self._shared.reported:
                return False
            too_soon = now - self._shared.reported_at < PROGRESS_INTERVAL_SECONDS
            if too_soon and report[0] < 100:
                return False
            self._shared.reported, self._shared.reported_at = report, now
            return True


def current_context() -> JobContext | None:
    """Return the context of the job that runs here, sync or async; None outside a job."""
    return _current.get()


@contextlib.contextmanager
def entered(context: JobContext) -> Iterator[JobContext]:
    """Make ``context`` the current one for the block."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
