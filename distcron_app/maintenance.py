"""The sweep: what every node does every few seconds to mend what was left behind."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import models
from django.db.models import OuterRef, Subquery
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from distcron_app import lifecycle, nodes, operations, signals
from distcron_app.clock import Clock
from distcron_app.conf import Config
from distcron_app.instants import database_now
from distcron_app.lifecycle import Recovered
from distcron_app.models import Maintenance, Run, Schedule
from distcron_app.timetable import tzdata_version

__all__ = ["Sweeper", "Swept"]

logger = logging.getLogger("distcron.maintenance")

SWEEP_SECONDS = 2.0
# Rows of nodes that are long gone are forgotten about once in this many sweeps.
_FORGET_EVERY = 300
# A COMMIT that was not answered has landed by then or never will.
_STRAY_AFTER = timedelta(seconds=10)
_ADOPT_BATCH = 500
# Between two looks for history to prune, give or take half of it; while a batch comes out
# full, each sweep takes one. A node with work waiting for a slot prunes only now and then.
_PRUNE_SECONDS = 30.0
_PRUNE_BUSY_SECONDS = 600.0
_FAILURES = (Run.State.FAILED, Run.State.LOST)
# How the scheduler is called in the audit.
_ACTOR = "distcron"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What one sweep mended."""

    dead: tuple[UUID, ...] = ()
    recovered: Recovered = dataclasses.field(default_factory=Recovered)
    invalid: tuple[str, ...] = ()
    pruned: int = 0
    resumed: tuple[str, ...] = ()
    paused: tuple[str, ...] = ()
    maintenance: Maintenance | None = None


class Sweeper:
    """Declares nodes dead, recovers their runs, plans rows without an instant, prunes history.

    It resumes schedules whose pause is over, and pauses those that keep failing.
    """

    def __init__(self, *, config: Config, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._next_at = 0.0
        self._count = 0
        # Not at once: a node that starts has more urgent work, and a fleet starts together.
        self._prune_at = clock.monotonic() + _jittered(_PRUNE_SECONDS)
        self._prune_after = 0
        # Schedule to its newest outcome that was judged already.
        self._judged: dict[int, int] = {}

    def due(self) -> bool:
        """Return True when the next sweep should happen now."""
        return self._clock.monotonic() >= self._next_at

    def hasten(self) -> None:
        """Make the next sweep due at once: somebody edited a row."""
        self._next_at = 0.0

    def sweep(
        self, node_id: UUID, known_runs: Collection[int], database_up_seconds: float
    ) -> Swept:
        """Do one round. Nobody is declared dead before the database was up for a whole lease.

        After an outage every heartbeat is old, and its node deserves the time to renew it.
        """
        # Jitter: the nodes of a fleet must not sweep together.
        self._next_at = self._clock.monotonic() + _jittered(SWEEP_SECONDS)
        self._count += 1
        dead: list[UUID] = []
        if database_up_seconds >= self._config.node_lease_seconds:
            dead = nodes.declare_dead()
        recovered = lifecycle.recover()
        strays = lifecycle.settle_strays(node_id, known_runs, _STRAY_AFTER)
        lifecycle.cancel_without_schedule()
        lifecycle.expire()
        if self._count % _FORGET_EVERY == 0:
            nodes.forget()
        for dead_id in dead:
            signals.emit(signals.node_dead, node_id=dead_id)
        for run_id in recovered.lost + strays.lost:
            signals.emit(signals.run_lost, run_id=run_id)
        return Swept(
            dead=tuple(dead),
            recovered=Recovered(
                requeued=recovered.requeued + strays.requeued, lost=recovered.lost + strays.lost
            ),
            invalid=_adopt() + _plan_with_newer_zones(),
            pruned=self._prune(is_busy=len(known_runs) > self._config.slots),
            resumed=_resume_over(),
            paused=self._pause_failing(),
            maintenance=Maintenance.objects.on().first(),
        )

    def _prune(self, *, is_busy: bool) -> int:
        """Delete a batch of history where it is time to, and say how many runs went."""
        now = self._clock.monotonic()
        wait = _PRUNE_BUSY_SECONDS if is_busy else 0.0
        if now < self._prune_at + wait:
            return 0
        step = lifecycle.prune(self._prune_after)
        is_full = step.after == self._prune_after and step.count > 0
        self._prune_after = step.after or 0
        self._prune_at = now if is_full else now + _jittered(_PRUNE_SECONDS)
        return step.count

    def _pause_failing(self) -> tuple[str, ...]:
        """Pause schedules that failed as often in a row as they may; return their keys.

        Asked once for each new failure of a schedule that wants it, so that a finish costs
        nothing. The row is judged again under its lock, so that one node does it.
        """
        outcomes = Run.objects.filter(
            schedule=OuterRef("pk"),
            trigger__in=Run.AUTOMATIC_TRIGGERS,
            state__in=[Run.State.SUCCEEDED, *_FAILURES],
        ).order_by("-id")
        watched: models.QuerySet[Any] = Schedule.objects.watched().annotate(
            outcome_id=Subquery(outcomes.values("id")[:1]),
            outcome_state=Subquery(outcomes.values("state")[:1]),
        )
        failing: dict[int, int] = {}
        paused: list[str] = []
        for schedule in watched.filter(outcome_state__in=_FAILURES).order_by("pk"):
            failing[schedule.pk] = schedule.outcome_id
            if self._judged.get(schedule.pk) != schedule.outcome_id and _pause(schedule):
                paused.append(schedule.key)
        self._judged = failing
        return tuple(paused)


def _resume_over() -> tuple[str, ...]:
    """Resume schedules whose pause is over; return the keys of those that this node resumed."""
    over = list(Schedule.objects.pause_over().order_by("paused_until")[:_ADOPT_BATCH])
    if not over:
        return ()
    now = database_now()
    # Under the lock: another node may have done it, and a person may have paused it again.
    done = operations.resume(
        over,
        reason=_("The pause is over."),
        actor=_ACTOR,
        via="scheduler",
        only_if=lambda row: _is_over(row, now),
    )
    return tuple(schedule.key for schedule in done.changed)


def _is_over(schedule: Schedule, now: datetime) -> bool:
    end = schedule.paused_until
    return end is not None and end <= now and not schedule.waits_for_code


def _pause(schedule: Schedule) -> bool:
    """Pause the schedule if it failed as often in a row as it may; return whether this did it."""
    count = schedule.auto_pause_after or 0
    newest = lifecycle.failed_in_a_row(schedule, count)
    if newest is None:
        return False
    until = None
    if schedule.auto_pause_minutes:
        until = database_now() + timedelta(minutes=schedule.auto_pause_minutes)
    done = operations.pause(
        [schedule],
        reason=_failures_text(count, newest),
        actor=_ACTOR,
        via="scheduler",
        until=until,
        only_if=_still_fails,
    )
    for paused in done.changed:
        signals.emit(
            signals.schedule_paused,
            schedule_id=paused.pk,
            reason=paused.state_reason,
            until=paused.paused_until,
        )
    return bool(done.changed)


def _still_fails(schedule: Schedule) -> bool:
    count = schedule.auto_pause_after
    is_active = schedule.state == Schedule.State.ACTIVE
    return bool(is_active and count and lifecycle.failed_in_a_row(schedule, count))


def _failures_text(count: int, newest: Run) -> str:
    facts = {"count": count, "error": newest.error or newest.get_reason_display()}
    message = ngettext(
        "Paused after %(count)d failure. The last one: %(error)s",
        "Paused after %(count)d failures in a row. The last one: %(error)s",
        count,
    )
    return (message % facts)[: operations.REASON_LENGTH]


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.5, 1.5)  # noqa: S311 - no secret


def _adopt() -> tuple[str, ...]:
    """Plan active rows that have no next instant; return the keys of those that cannot run.

    They were made or changed past the model's ``save()``. One bad row is marked and does
    not stop the others; a row that was edited meanwhile is left for the next sweep.
    """
    invalid: list[str] = []
    for schedule in Schedule.objects.unplanned().order_by("pk")[:_ADOPT_BATCH]:
        unplanned = Schedule.objects.unplanned().filter(pk=schedule.pk, version=schedule.version)
        schedule.plan_next(schedule.planning_start(database_now()))
        if schedule.state == Schedule.State.INVALID:
            unplanned.mark_invalid(schedule.state_reason)
            invalid.append(schedule.key)
        else:
            unplanned.write_plan(schedule)
    return tuple(invalid)


def _plan_with_newer_zones() -> tuple[str, ...]:
    """Compute again what was computed with older zone data, and is not due yet.

    Only a node with newer data does it, so that nodes that differ do not undo each other.
    """
    outdated = Schedule.objects.planned_before(tzdata_version())
    invalid: list[str] = []
    for schedule in outdated.order_by("pk")[:_ADOPT_BATCH]:
        unchanged = outdated.filter(pk=schedule.pk, version=schedule.version)
        now = database_now()
        # Never from where planning began long ago: its history may have been pruned.
        schedule.plan_next(max(now, schedule.planning_start(now)))
        if schedule.state == Schedule.State.INVALID:
            unchanged.mark_invalid(schedule.state_reason)
            invalid.append(schedule.key)
        else:
            unchanged.write_plan(schedule)
    return tuple(invalid)
