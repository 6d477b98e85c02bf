"""What goes into a transition and what comes back."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Any

from distcron_app.context import ParentRun

__all__ = [
    "MAX_RECOVERIES",
    "TRANSITIONS",
    "Claimed",
    "ClaimedRun",
    "Decision",
    "Failure",
    "Finished",
    "Skip",
    "SkippedRun",
]

# A run whose nodes keep dying is probably what kills them; after this many it is lost.
MAX_RECOVERIES = 1

# From each state to where a run may go; "" is the insert.
TRANSITIONS: dict[str, frozenset[str]] = {
    "": frozenset({"queued", "claimed", "running", "skipped"}),
    "queued": frozenset({"claimed", "cancelled", "skipped"}),
    "claimed": frozenset({"running", "queued", "cancelled"}),
    "running": frozenset({"succeeded", "failed", "cancelled", "queued", "lost"}),
    "lost": frozenset({"succeeded", "failed", "cancelled", "queued"}),
    "succeeded": frozenset(),
    "failed": frozenset({"queued"}),
    "cancelled": frozenset({"queued"}),
    "skipped": frozenset(),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """An occurrence, or a span of them, that is decided not to run."""

    scheduled_at: datetime
    reason: str
    details: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a node wants to write for one due schedule, seen at ``version``.

    ``run_at`` is the occurrence to run, or None; it is held back until ``due_at`` where
    that is later (the schedule is spread). ``queue`` are further occurrences to run after it,
    each with the instant from which it may start. ``next_run_at`` is where the schedule stands
    afterwards; None means that no instant is left. With ``only_beside`` nothing is decided
    unless a run is active: the node holds no lock that would let it start another one.
    """

    schedule_id: int
    version: int
    seen_next_run_at: datetime
    next_run_at: datetime | None
    owner_token: str
    run_at: datetime | None = None
    due_at: datetime | None = None
    skips: tuple[Skip, ...] = ()
    queue: tuple[tuple[datetime, datetime], ...] = ()
    only_beside: bool = False

    @property
    def is_held_back(self) -> bool:
        """Return True where the run is queued until a later instant than the timetable's."""
        return self.due_at is not None and self.due_at != self.run_at


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedRun:
    """A run that this node owns; ``state`` is claimed, or running where the start came with it."""

    run_id: int
    schedule_id: int
    schedule_key: str
    schedule_name: str
    job: str
    arguments: dict[str, Any]
    delivery: str
    scheduled_at: datetime
    due_at: datetime
    state: str
    attempt: int
    recoveries: int
    max_attempts: int
    fencing_token: int
    owner_token: str
    isolation: str = "shared"
    run_timeout_seconds: int | None = None
    kill_grace_seconds: int = 10
    memory_limit_mb: int | None = None
    # The run whose end started this one.
    parent: ParentRun | None = None

    @property
    def attempts_left(self) -> int:
        """Return how many attempts may follow the one that this claim is for.

        A recovery uses up none: the run's node failed, and not its job.
        """
        number = self.attempt if self.state == "running" else self.attempt + 1
        return self.max_attempts - (number - self.recoveries)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a job raised: dotted names of its class and bases, and what RetryLater asked for."""

    exceptions: tuple[str, ...]
    retry_seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRun:
    """A row that this node wrote for an occurrence that does not run."""

    run_id: int
    schedule_key: str
    scheduled_at: datetime
    reason: str
    details: dict[str, Any] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """What one claim brought: the runs this node owns and the rows it skipped."""

    runs: tuple[ClaimedRun, ...] = ()
    skipped: tuple[SkippedRun, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The outcome of one attempt, as its node reports it."""

    run_id: int
    fencing_token: int
    owner_token: str
    state: str
    finished_at: datetime
    reason: str = ""
    result: Any = None
    error: str = ""
    output: str = ""
    traceback: str = ""
    # Set where another attempt may follow; the policy of the schedule decides.
    failure: Failure | None = None
