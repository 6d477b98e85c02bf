"""Counts, from the rows alone, whether each instant of a schedule ran exactly once."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta

from distcron_app.models import Run, Schedule

__all__ = ["Tally", "Verdict"]

# An instant without a finished run after this long is a miss.
PATIENCE = timedelta(seconds=20)
_RULE = ("state", "kind", "interval_seconds", "interval_anchor")


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one instant; ``node`` is the label of the node that ran it."""

    scheduled_at: datetime
    is_exact: bool
    node: str
    detail: str


class Tally:
    """Checks the instants of one interval schedule in order, from ``start`` on.

    An instant counts as exact when it has one run, which succeeded at its first attempt.
    """

    def __init__(self, schedule: Schedule, start: datetime) -> None:
        self._schedule = schedule
        self._step = timedelta(seconds=schedule.interval_seconds or 1)
        self._next = self._first_instant(start)
        self.exact = 0
        self.missed = 0

    @property
    def total(self) -> int:
        """Return how many instants were judged."""
        return self.exact + self.missed

    @property
    def next_at(self) -> datetime:
        """Return the instant that is judged next."""
        return self._next

    def skip_to(self, start: datetime) -> None:
        """Go on counting from ``start``; what lies between is nobody's miss."""
        self._schedule.refresh_from_db()
        self._step = timedelta(seconds=self._schedule.interval_seconds or 1)
        self._next = self._first_instant(start)

    def was_edited(self) -> bool:
        """Return True when a person changed the rule or paused it since it was read."""
        stored = Schedule.objects.filter(pk=self._schedule.pk).values(*_RULE).first()
        return bool(stored != {name: getattr(self._schedule, name) for name in _RULE})

    def judge(self, now: datetime) -> list[Verdict]:
        """Return the verdicts that are possible by ``now``; none while it is paused."""
        verdicts: list[Verdict] = []
        if self._schedule.state != Schedule.State.ACTIVE:
            return verdicts
        while self._next <= now:
            verdict = self._verdict(now)
            if verdict is None:
                break
            self.exact += verdict.is_exact
            self.missed += not verdict.is_exact
            verdicts.append(verdict)
            self._next += self._step
        return verdicts

    def _first_instant(self, start: datetime) -> datetime:
        anchor = self._schedule.interval_anchor or start
        return anchor + self._step * (-(-(start - anchor) // self._step))

    def _verdict(self, now: datetime) -> Verdict | None:
        runs = list(
            Run.objects.filter(
                schedule_id=self._schedule.pk, scheduled_at=self._next
            ).select_related("node")
        )
        is_settled = bool(runs) and all(run.is_final for run in runs)
        if not is_settled and now - self._next < PATIENCE:
            return None
        states = ", ".join(f"{run.state} (attempt {run.attempt})" for run in runs) or "no run"
        exact = [run for run in runs if run.state == Run.State.SUCCEEDED and run.attempt == 1]
        node = runs[0].node.name if runs and runs[0].node else ""
        return Verdict(self._next, len(runs) == len(exact) == 1, node, states)
