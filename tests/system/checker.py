"""Says what is wrong with a history, from evidence that the scheduler does not control.

The evidence is what the jobs appended to files outside the database and Redis, the rows
of the runs, every change of their states as a trigger of the database saw it, and the
instants that were due by arithmetic of its own. ``violations`` returns one line for each
rule that was broken, and an empty list for a history that is as promised.
"""

from __future__ import annotations

import collections
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
# Why an attempt ended without its job having ended; after any other reason it was a retry.
CRASHES = frozenset({"node_died", "worker_died", "shutdown", "lease_lost", "released"})


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The instants of one schedule that were due while it was watched.

    ``at_once`` is how many of its runs may be active at a time; None means any number.
    """

    schedule_id: int
    delivery: str
    instants: tuple[datetime, ...] = ()
    at_once: int | None = 1


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

    def retries(self) -> collections.Counter[int]:
        """Return by run how many of its attempts failed and were followed by another."""
        return collections.Counter(
            attempt.run_id for attempt in self.attempts if attempt.reason not in CRASHES
        )


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
    retries = evidence.retries()
    tried_again = {(run.schedule_id, run.scheduled_at): retries[run.id] for run in evidence.runs}
    for kind in ("begin", "effect"):
        counts = collections.Counter(mark.occurrence for mark in evidence.of_kind(kind))
        for (schedule, at), count in sorted(counts.items()):
            allowed = 1 + (tried_again.get((schedule, at), 0) if kind == "begin" else 0)
            if schedule in careful and count > allowed:
                yield f"I1 schedule {schedule} at {at}: {count} times {kind}, at most {allowed}"


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
    by_token = {(*mark.occurrence, mark.fencing_token) for mark in evidence.of_kind("effect")}
    known = {run.id: run for run in evidence.runs}
    queued = {each.run_id for each in evidence.transitions if each.after == "queued"}
    for run in evidence.runs:
        if run.scheduled_at is None:
            continue
        has_effect = (run.schedule_id, run.scheduled_at) in effects
        # An attempt that was recovered may have had one before the last was told to stop.
        had_last = (run.schedule_id, run.scheduled_at, run.fencing_token) in by_token
        if (has_effect and run.state == "skipped") or (had_last and run.state == "cancelled"):
            yield f"I4 run {run.id}: is {run.state} and had an effect"
        if not has_effect and (run.state not in FINAL - {"succeeded"} or not run.reason):
            yield f"I4 run {run.id}: no effect, is {run.state} for the reason {run.reason!r}"
        if run.reason == "overlap" and not _was_blocked(run, known, run.id in queued):
            yield f"I4 run {run.id}: no earlier run of its schedule in its way, {run.details}"


def _was_blocked(run: RunRow, known: Mapping[int, RunRow], was_queued: bool) -> bool:
    """What was decided at once is blocked by an older run; what was queued, also by a newer."""
    details = run.details or {}
    blocker = known.get(details.get("blocked_by") or 0)
    if blocker is None:
        # A newer one that need not wait took the place of what waited.
        return was_queued and bool(details.get("replaced"))
    return blocker.schedule_id == run.schedule_id and (blocker.id < run.id or was_queued)


def _repeats_of_at_least_once(evidence: Evidence) -> Iterator[str]:
    effects = collections.Counter(mark.occurrence for mark in evidence.of_kind("effect"))
    repeating = {each.schedule_id for each in evidence.planned if each.delivery == "at_least_once"}
    retries = evidence.retries()
    for run in evidence.runs:
        if run.schedule_id not in repeating or run.scheduled_at is None:
            continue
        count = effects[run.schedule_id, run.scheduled_at]
        if count == 0 and run.state not in ("failed", "lost", "skipped", "cancelled"):
            yield f"I5 run {run.id}: is {run.state} without an effect"
        ended = run.recoveries + retries[run.id]
        # What was cancelled or skipped while it was queued began no further attempt.
        is_explained = run.attempt == ended + 1 or (
            run.attempt == ended and run.state in ("cancelled", "skipped")
        )
        if count > run.attempt or not is_explained:
            yield (
                f"I5 run {run.id}: {count} effects, {run.attempt} attempts, "
                f"{run.recoveries} recoveries, {retries[run.id]} retries"
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
    """Tokens grow from start to start; side by side, runs may start in another order."""
    side_by_side = {each.schedule_id for each in evidence.planned if each.at_once != 1}
    latest: dict[int, int] = collections.defaultdict(int)
    started: set[tuple[int, int]] = set()
    for change in evidence.transitions:
        if change.after != "running":
            continue
        schedule, token = change.schedule_id, change.fencing_token
        is_older = token <= latest[schedule] and schedule not in side_by_side
        if is_older or (schedule, token) in started:
            yield f"I7 run {change.run_id}: started with fencing token {token} " + (
                f"after {latest[schedule]}" if is_older else "for the second time"
            )
        latest[schedule] = max(latest[schedule], token)
        started.add((schedule, token))


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
    """A job may run beside its schedule's others up to their limit.

    One whose node was taken for dead does not count: it may run on.
    """
    excused = {
        (run.schedule_id, run.scheduled_at)
        for run in evidence.runs
        if run.recoveries or run.late or run.state == "lost"
    }
    limits = {each.schedule_id: each.at_once for each in evidence.planned}
    by_schedule = collections.defaultdict(list)
    for mark in evidence.of_kind("effect"):
        by_schedule[mark.schedule_id].append(mark)
    for schedule, marks in by_schedule.items():
        limit = limits.get(schedule, 1)
        active: list[Mark] = []
        for mark in sorted(marks, key=lambda mark: mark.began):
            active = [each for each in active if mark.began < each.ended]
            if limit is not None and len(active) >= limit:
                yield f"I9 {mark.occurrence} began while {active[0].occurrence} was running"
            if mark.occurrence not in excused:
                active.append(mark)


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
