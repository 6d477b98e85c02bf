"""The exceptions of distcron; each stores the facts that it prints.

DistcronError
├── ConfigurationError      a setting cannot be used
├── TimetableError          a rule or time zone is refused (also a ValueError)
├── JobError
│   ├── UnknownJob          no job is registered under that name
│   ├── DuplicateJob        two callables claim one name
│   └── InvalidArguments    arguments do not fit the job's signature (also a ValueError)
├── LockError
│   ├── LockNotAcquired     somebody else holds the lock: a normal outcome
│   ├── LockUnavailable     the lock backend did not answer, or refused: an alarm
│   └── LeaseLost           the lock ended before its holder did (also a RunStopped)
├── RetryLater              raised by a job: try again after so long
├── GiveUp                  raised by a job: it failed, and another attempt is useless
├── RunStopped              the run was told to stop, by a person or as its node stops
├── StaleVersion            somebody else saved the row first
├── ChainCycle              a link would let a schedule start itself in the end
├── RunMovedOn              the run is in another state than a person took it to be
└── ScheduleBusy            a run is active and the overlap policy refuses another
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

__all__ = [
    "ChainCycle",
    "ConfigurationError",
    "DistcronError",
    "DuplicateJob",
    "GiveUp",
    "InvalidArguments",
    "JobError",
    "LeaseLost",
    "LockError",
    "LockNotAcquired",
    "LockUnavailable",
    "RetryLater",
    "RunMovedOn",
    "RunStopped",
    "ScheduleBusy",
    "StaleVersion",
    "TimetableError",
    "UnknownJob",
]


_LONGEST_DELAY_SECONDS = 30 * 86_400


class DistcronError(Exception):
    """Base of every exception here; do not raise it directly."""


class ConfigurationError(DistcronError):
    """A key of ``settings.DISTCRON`` is unknown or its value cannot be used."""

    def __init__(self, key: str, problem: str, fix: str) -> None:
        super().__init__(f"DISTCRON[{key!r}]: {problem} {fix}")
        self.key = key
        self.problem = problem
        self.fix = fix


class TimetableError(DistcronError, ValueError):
    """A timetable is refused; ``field`` is the model field that is wrong.

    ``message`` may be a lazy translation. ``token`` is the part of the text at
    fault, ``position`` its offset in the canonical text, or None.
    """

    def __init__(
        self, field: str, message: object, *, token: str = "", position: int | None = None
    ) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message
        self.token = token
        self.position = position

    def __str__(self) -> str:
        return str(self.message)


class JobError(DistcronError):
    """Base of what can be wrong with a job's name or arguments."""


class UnknownJob(JobError):
    """No job is registered under ``name``; ``nearest`` lists similar names."""

    def __init__(self, name: str, nearest: tuple[str, ...] = ()) -> None:
        text = _("Job %(name)r: not registered.")
        if nearest:
            text = _("Job %(name)r: not registered. Did you mean %(nearest)s?")
        super().__init__(text % {"name": name, "nearest": ", ".join(map(repr, nearest))})
        self.name = name
        self.nearest = nearest


class DuplicateJob(JobError):
    """Two callables were registered under one name."""

    def __init__(self, name: str, first: str, second: str) -> None:
        super().__init__(
            f"Job {name!r}: registered by {first} and again by {second}. Give one another name."
        )
        self.name = name


class InvalidArguments(JobError, ValueError):
    """Arguments do not fit the job's signature; ``problems`` maps parameter to message."""

    def __init__(self, name: str, problems: Mapping[str, object]) -> None:
        listed = "; ".join(f"{parameter}: {message}" for parameter, message in problems.items())
        super().__init__(_("Job %(name)r: %(problems)s") % {"name": name, "problems": listed})
        self.name = name
        self.problems = dict(problems)


class LockError(DistcronError):
    """Base of what can go wrong with a lock backend."""


class LockUnavailable(LockError):
    """The backend did not answer in time, or refused to write.

    It says nothing about who owns the lock: the request may have been carried out.
    ``refused`` is True where the backend answered with an error, so it is not gone.
    """

    def __init__(self, backend: str, cause: str, *, refused: bool = False) -> None:
        text = _("Lock backend %(backend)r: unavailable, %(cause)s.")
        super().__init__(text % {"backend": backend, "cause": cause})
        self.backend = backend
        self.cause = cause
        self.refused = refused


class LockNotAcquired(LockError):
    """Somebody else holds the lock; ``holder`` is its label.

    ``ttl_ms`` (what is left of its TTL) and ``age_ms`` are None where they are not known.
    """

    def __init__(
        self, name: str, holder: str = "", ttl_ms: int | None = None, *, age_ms: int | None = None
    ) -> None:
        text = _("Lock %(name)r: held by somebody else.")
        if holder:
            text = _("Lock %(name)r: held by %(holder)s.")
        if holder and ttl_ms is not None:
            text = _("Lock %(name)r: held by %(holder)s, TTL left %(seconds).1f s.")
        super().__init__(text % {"name": name, "holder": holder, "seconds": (ttl_ms or 0) / 1000})
        self.name = name
        self.holder = holder
        self.ttl_ms = ttl_ms
        self.age_ms = age_ms


class RunStopped(DistcronError):
    """Whatever ``label`` names (such as "Run 12") was told to stop, for ``cause``."""

    text = gettext_lazy("%(label)s: told to stop, %(cause)s.")

    def __init__(self, label: str, cause: str) -> None:
        super().__init__(self.text % {"label": label, "cause": cause})
        self.label = label
        self.cause = cause


class LeaseLost(RunStopped, LockError):
    """The lease ended before its holder did; the holder's later writes may be refused."""

    text = gettext_lazy("%(label)s: lease lost, %(cause)s. Stop as soon as it is safe.")


class RetryLater(DistcronError):
    """Raised by a job that wants another attempt after ``delay``, seconds or a timedelta.

    It uses up one of the schedule's attempts; with none left the run has failed.
    """

    def __init__(self, delay: float | timedelta, message: str = "") -> None:
        seconds = delay.total_seconds() if isinstance(delay, timedelta) else float(delay)
        if not 0 <= seconds <= _LONGEST_DELAY_SECONDS:
            text = _("RetryLater: got %(delay)r, allowed 0 s to 30 days.")
            raise ValueError(text % {"delay": delay})
        super().__init__(message or _("again in %g s") % seconds)
        self.delay_seconds = seconds


class GiveUp(DistcronError):
    """Raised by a job that failed for good: no further attempt, whatever the policy says."""


class StaleVersion(DistcronError):
    """The row was saved by somebody else since it was read; nothing was written."""

    def __init__(self, label: str, seen: int) -> None:
        text = _(
            "Schedule %(label)r: changed by somebody else since version %(seen)s was read. "
            "Reload it, compare, and save again."
        )
        super().__init__(text % {"label": label, "seen": seen})
        self.label = label
        self.seen = seen


class ChainCycle(DistcronError):
    """A link would let a schedule start itself in the end; ``keys`` is the way there and back."""

    def __init__(self, keys: Sequence[str]) -> None:
        text = _("This closes a cycle: %(way)s. Choose another schedule, or remove another link.")
        super().__init__(text % {"way": " → ".join(keys)})
        self.keys = tuple(keys)


class RunMovedOn(DistcronError):
    """A run is in another state by now than the one that was acted upon; nothing was changed."""

    def __init__(self, run_id: int, problem: str) -> None:
        super().__init__(_("Run %(run)d: %(problem)s") % {"run": run_id, "problem": problem})
        self.run_id = run_id
        self.problem = problem


class ScheduleBusy(DistcronError):
    """A run of the schedule is active and its overlap policy allows no second one."""

    def __init__(self, label: str, blocked_by: int) -> None:
        text = _("Schedule %(label)r: busy, blocked by run %(run)s.")
        super().__init__(text % {"label": label, "run": blocked_by})
        self.label = label
        self.blocked_by = blocked_by
