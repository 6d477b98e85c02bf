"""Says what is wrong with a history, from evidence that the scheduler does not control.

The evidence is what the jobs appended to files outside the database and Redis, the rows
of the runs, every change of their states as a trigger of the database saw it, and the
instants that were due by arithmetic of its own. ``violations`` returns one line for each
rule that was broken, and an empty list for a history that is as promised.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

__all__ = [
    "AttemptRow",
    "Evidence",
    "Mark",
    "Planned",
    "RunRow",
    "Transition",
    "every",
    "violations",
]

FINAL = frozenset({"succeeded", "failed", "cancelled", "skipped", "lost"})
OPEN = frozenset({"queued", "claimed", "running"})
SPAN_REASONS = frozenset({"misfire", "coalesced", "paused"})


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The instants of one schedule that were due while it was watched."""

    schedule_id: int
    delivery: str
    instants: tuple[datetime, ...]


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One row of the table of runs."""

    id: int
    schedule_id: int
    scheduled_at: datetime | None
    state: str
    reason: str = ""
    details: Mapping[str, Any] | None = None
    attempt: int = 1
    recoveries: int = 0
    fencing_token: int = 1
    late: bool = False


@dataclass(frozen=True, kw_only=True)
class AttemptRow:
    """One attempt that ended while its run went on."""

    run_id: int
    fencing_token: int
    reason: str = "node_died"
    late_state: str = ""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What a job wrote: ``begin`` at its first line, ``effect`` at its last, ``told`` when it
    was told to stop.

    ``began`` and ``ended`` are seconds of the host's monotonic clock, one clock for all
    processes; the two are the same but in an ``effect``.
    """

    kind: str
    schedule_id: int
    scheduled_at: datetime
    attempt: int
    fencing_token: int
    node_pid: int
    began: float
    ended: float

    @property
    def occurrence(self) -> tuple[int, datetime]:
        """Return what the mark is about."""
        return self.schedule_id, self.scheduled_at


@dataclass(frozen=True, kw_only=True)
class Transition:
    """One change of a run's state, in the order of the trigger; ``before`` is "" at the insert."""

    run_id: int
    schedule_id: int
    before: str
    after: str
    fencing_token: int


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that is known about one history after its nodes have left."""

    planned: tuple[Planned, ...]
    runs: tuple[RunRow, ...]
    marks: tuple[Mark, ...]
    transitions: tuple[Transition, ...]
    attempts: tuple[AttemptRow, ...] = ()
    # The occurrence of each row that a job wrote into the database.
    ledger: tuple[tuple[int, datetime], ...] = ()
    lock_keys: tuple[str, ...] = ()
    processes: tuple[int, ...] = field(default=())

    def of_kind(self, kind: str) -> list[Mark]:
        """Return the begins, or the effects."""
        return [mark for mark in self.marks if mark.kind == kind]


def every(seconds: float, first: datetime, before: datetime) -> tuple[datetime, ...]:
    """Return the instants of an interval from ``first`` on that are earlier than ``before``."""
    instants: list[datetime] = []
    while first + len(instants) * timedelta(seconds=seconds) < before:
        instants.append(first + len(instants) * timedelta(seconds=seconds))
    return tuple(instants)


def violations(evidence: Evidence, allowed: Mapping[str, Iterable[str]]) -> list[str]:
    """Return what is broken; ``allowed`` maps each state to those it may change to."""
    return [
        *_starts_of_at_most_once(evidence),
        *_one_row_per_instant(evidence),
        *_marks_without_a_start(evidence),
        *_instants_without_an_effect(evidence),
        *_repeats_of_at_least_once(evidence),
        *_ledger_of_transactional(evidence),
        *_fencing_order(evidence),
        *_changes_of_final_states(evidence),
        *_overlaps(evidence),
        *_left_overs(evidence),
        *_changes_that_are_not_allowed(evidence, allowed),
    ]


def _starts_of_at_most_once(evidence: Evidence) -> Iterator[str]:
    careful = {each.schedule_id for each in evidence.planned if each.delivery == "at_most_once"}
    for kind in ("begin", "effect"):
        counts = collections.Counter(mark.occurrence for mark in evidence.of_kind(kind))
        for (schedule, at), count in sorted(counts.items()):
            if schedule in careful and count > 1:
                yield f"I1 schedule {schedule} at {at}: {count} times {kind}, at most once"


def _one_row_per_instant(evidence: Evidence) -> Iterator[str]:
    rows = collections.Counter[tuple[int, datetime]]()
    planned = {each.schedule_id: each.instants for each in evidence.planned}
    for run in evidence.runs:
        if run.scheduled_at is None:
            continue
        covered = _covered(run, planned.get(run.schedule_id, ()))
        stated = (run.details or {}).get("count", 1) if run.reason in SPAN_REASONS else 1
        if len(covered) != stated:
            yield f"I2 run {run.id}: says {stated} instants, the timetable has {len(covered)}"
        rows.update((run.schedule_id, at) for at in covered)
    for each in evidence.planned:
        for at in each.instants:
            if rows[each.schedule_id, at] != 1:
                yield f"I2 schedule {each.schedule_id} at {at}: {rows[each.schedule_id, at]} rows"


def _covered(run: RunRow, instants: tuple[datetime, ...]) -> list[datetime]:
    """Return the planned instants that a row stands for."""
    first = last = run.scheduled_at
    if run.reason in SPAN_REASONS and run.details:
        first = datetime.fromisoformat(run.details["first_at"])
        last = datetime.fromisoformat(run.details["last_at"])
    return [at for at in instants if first is not None and last and first <= at <= last]


def _marks_without_a_start(evidence: Evidence) -> Iterator[str]:
    occurrences = {run.id: (run.schedule_id, run.scheduled_at) for run in evidence.runs}
    started = {
        (*occurrences[change.run_id], change.fencing_token)
        for change in evidence.transitions
        if change.after == "running" and change.run_id in occurrences
    }
    for mark in evidence.marks:
        if (*mark.occurrence, mark.fencing_token) not in started:
            yield f"I3 {mark.kind} of {mark.occurrence}: no run started with its fencing token"


def _instants_without_an_effect(evidence: Evidence) -> Iterator[str]:
    effects = {mark.occurrence for mark in evidence.of_kind("effect")}
    known = {run.id: run for run in evidence.runs}
    for run in evidence.runs:
        if run.scheduled_at is None:
            continue
        has_effect = (run.schedule_id, run.scheduled_at) in effects
        if has_effect and run.state in ("skipped", "cancelled"):
            yield f"I4 run {run.id}: is {run.state} and had an effect"
        if not has_effect and (run.state not in FINAL - {"succeeded"} or not run.reason):
            yield f"I4 run {run.id}: no effect, is {run.state} for the reason {run.reason!r}"
        if run.reason == "overlap" and not _was_blocked(run, known):
            yield f"I4 run {run.id}: skipped for a run that is not of its schedule"


def _was_blocked(run: RunRow, known: Mapping[int, RunRow]) -> bool:
    blocker = known.get((run.details or {}).get("blocked_by", 0))
    return blocker is not None and blocker.schedule_id == run.schedule_id and blocker.id < run.id


def _repeats_of_at_least_once(evidence: Evidence) -> Iterator[str]:
    effects = collections.Counter(mark.occurrence for mark in evidence.of_kind("effect"))
    repeating = {each.schedule_id for each in evidence.planned if each.delivery == "at_least_once"}
    for run in evidence.runs:
        if run.schedule_id not in repeating or run.scheduled_at is None:
            continue
        count = effects[run.schedule_id, run.scheduled_at]
        if count == 0 and run.state not in ("failed", "lost", "skipped"):
            yield f"I5 run {run.id}: is {run.state} without an effect"
        if count > run.attempt or (run.attempt != run.recoveries + 1 and run.state != "skipped"):
            yield (
                f"I5 run {run.id}: {count} effects, {run.attempt} attempts, "
                f"{run.recoveries} recoveries"
            )


def _ledger_of_transactional(evidence: Evidence) -> Iterator[str]:
    rows = collections.Counter(evidence.ledger)
    together = {each.schedule_id for each in evidence.planned if each.delivery == "transactional"}
    for run in evidence.runs:
        if run.schedule_id not in together or run.scheduled_at is None:
            continue
        count = rows[run.schedule_id, run.scheduled_at]
        if count != (run.state == "succeeded"):
            yield f"I6 run {run.id}: is {run.state}, {count} rows in the ledger"


def _fencing_order(evidence: Evidence) -> Iterator[str]:
    latest: dict[int, int] = collections.defaultdict(int)
    for change in evidence.transitions:
        if change.after != "running":
            continue
        if change.fencing_token <= latest[change.schedule_id]:
            yield (
                f"I7 run {change.run_id}: started with fencing token {change.fencing_token} "
                f"after {latest[change.schedule_id]}"
            )
        latest[change.schedule_id] = max(latest[change.schedule_id], change.fencing_token)


def _changes_of_final_states(evidence: Evidence) -> Iterator[str]:
    for change in evidence.transitions:
        settled_late = change.before == "lost" and change.after in (
            "succeeded",
            "failed",
            "cancelled",
        )
        if change.before in FINAL and not settled_late:
            yield f"I8 run {change.run_id}: was {change.before} and became {change.after}"


def _overlaps(evidence: Evidence) -> Iterator[str]:
    """A job may run beside its schedule's next one only where its node was taken for dead."""
    excused = {
        (run.schedule_id, run.scheduled_at)
        for run in evidence.runs
        if run.recoveries or run.late or run.state == "lost"
    }
    by_schedule = collections.defaultdict(list)
    for mark in evidence.of_kind("effect"):
        by_schedule[mark.schedule_id].append(mark)
    for marks in by_schedule.values():
        marks.sort(key=lambda mark: mark.began)
        for earlier, later in itertools.pairwise(marks):
            if later.began < earlier.ended and earlier.occurrence not in excused:
                yield f"I9 {later.occurrence} began while {earlier.occurrence} was running"


def _left_overs(evidence: Evidence) -> Iterator[str]:
    for run in evidence.runs:
        if run.state in OPEN:
            yield f"I11 run {run.id}: is {run.state} after the drain"
    for key in evidence.lock_keys:
        yield f"I11 lock {key!r}: is held after the drain"
    for pid in evidence.processes:
        yield f"I11 process {pid}: is there after the drain"


def _changes_that_are_not_allowed(
    evidence: Evidence, allowed: Mapping[str, Iterable[str]]
) -> Iterator[str]:
    for change in evidence.transitions:
        if change.after not in allowed.get(change.before, ()):
            yield f"I12 run {change.run_id}: from {change.before!r} to {change.after!r}"
