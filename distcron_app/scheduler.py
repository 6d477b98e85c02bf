"""The node: one loop that claims, starts and finishes, and one thread that keeps it alive.

The loop owns the claims, the workers and every write about runs. The keeper thread owns
the heartbeat and the leases, on a connection of its own, so that a slow tick does not
make the node look dead. Jobs run in worker processes, so that a job that holds the
interpreter does not either.

Order of one turn: (1) take what the workers report; (2) write outcomes, then release
their leases; (3) settle claims whose COMMIT was not answered; (4) sweep when it is due;
(5) claim queued and due work; (6) commit starts for free slots and hand them over;
(7) wait for news, for the next instant, or to be woken.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from django.db import DatabaseError, InterfaceError, close_old_connections, connection
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from distcron_app import executors, lifecycle, nodes, signals
from distcron_app.clock import Clock
from distcron_app.conf import Config
from distcron_app.context import EarlierAttempt
from distcron_app.dispatch import Dispatcher, Tick
from distcron_app.errors import ConfigurationError, RunTimedOut
from distcron_app.executors import (
    Died,
    Ended,
    OverLimit,
    PoolBroken,
    ProcessPool,
    Recycled,
    Stuck,
)
from distcron_app.keeper import Keeper
from distcron_app.leases import FindLevel, LeaseBook
from distcron_app.lifecycle import ClaimedRun, Failure, Finished, SkippedRun
from distcron_app.maintenance import Sweeper, Swept
from distcron_app.models import Run, Schedule
from distcron_app.news import News
from distcron_app.runner import TRANSACTIONAL, Assignment, Outcome
from distcron_app.wakeup import Listener

__all__ = ["EXIT_BROKEN", "EXIT_CUT", "EXIT_INTERRUPTED", "Scheduler"]

logger = logging.getLogger("distcron.scheduler")

EXIT_BROKEN = 1
EXIT_CUT = 3  # the drain ended before the jobs did
EXIT_INTERRUPTED = 130

# Outcomes wait this long for company before they are written.
FLUSH_SECONDS = 0.05
FLUSH_ROWS = 500
# Work is claimed ahead for this long at the rate of the last seconds, never more.
CLAIM_AHEAD_SECONDS = 0.5
# A node with enough claimed work reads the due schedules only this often.
LOOK_SECONDS = 0.25
BACKOFF_SECONDS = (0.2, 2.0)
# After a cancel at the end of the drain, jobs have this long before they are killed.
CANCEL_GRACE_SECONDS = 2.0
# A node whose host clock is off by more than this says so; the database's clock decides.
CLOCK_OFFSET_ALERT_MS = 2000

Report = Callable[..., None]


class Scheduler:
    """One node. ``report(event, **facts)`` is told everything that a person may want to see.

    ``pool`` must have been started before; ``run`` blocks until the node has left.
    """

    def __init__(
        self,
        *,
        config: Config,
        pool: ProcessPool,
        find_level: FindLevel,
        report: Report,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._report = report
        self._clock = clock or Clock()
        self._find_level = find_level
        self._leases = LeaseBook(int(config.lock_ttl_seconds * 1000), clock=self._clock)
        self._dispatcher = Dispatcher(
            config=config, clock=self._clock, find_level=find_level, leases=self._leases
        )
        self._sweeper = Sweeper(config=config, clock=self._clock)
        self._keeper = Keeper(
            config=config, clock=self._clock, leases=self._leases, on_change=pool.wake
        )
        # What waits for a free slot: by priority, then as it came.
        self._ready: list[ClaimedRun] = []
        # Runs in flight that may not use the reserved slots.
        self._ordinary: set[int] = set()
        self._owned: dict[int, ClaimedRun] = {}
        self._starting: dict[str, ClaimedRun] = {}
        self._outcomes: list[Finished] = []
        self._flush_at = 0.0
        self._news = News(self._clock)
        self._rate = _Rate(self._clock)
        self._look_at = 0.0
        self._woken = threading.Event()
        self._stop_signals = 0
        self._status_wanted = False
        self._draining_until: float | None = None
        self._database_cause = ""
        self._failures = 0
        self._away: dict[str, str] = {}
        self._in_maintenance = False
        # Runs that were told to stop, with cause and reason, those of them that a person asked
        # to stop, and lost leases that are not yet noted on their run.
        self._told: dict[int, tuple[str, str]] = {}
        self._asked: set[int] = set()
        self._unnoted: dict[int, str] = {}
        # Runs over their limit, and those of which the row does not say it yet.
        self._over_limit: set[int] = set()
        self._unnoted_over: set[int] = set()

    def run(self) -> int:
        """Register, loop until a signal, drain, leave; return the exit code."""
        self._install_signals()
        node_id = nodes.register(self._config)
        self._keeper.begin(node_id)
        listener = Listener(self._on_wakeup)
        listener.start()
        try:
            self._report("started", node=node_id)
            return self._loop()
        except PoolBroken as error:
            self._report("pool_broken", error=str(error))
            self._abandon(Run.Reason.WORKER_DIED, Run.State.FAILED, str(error))
            return EXIT_BROKEN
        finally:
            listener.stop()
            self._keeper.end()

    def status(self) -> dict[str, Any]:
        """Return what the node is doing, for a person or a signal handler."""
        return {
            "node": str(self._keeper.node_id),
            "claimed": len(self._ready),
            "running": self._pool.in_flight,
            "unwritten": len(self._outcomes),
            "draining": self._draining_until is not None,
            "database": self._database_cause or "up",
            "locks": "; ".join(f"{name}: {why}" for name, why in self._away.items()) or "up",
        }

    # --- the loop -----------------------------------------------------------

    def _loop(self) -> int:
        wait = 0.0
        while True:
            for news in self._pool.poll(min(wait, self._news.wait_seconds)):
                self._take(news)
            if self._status_wanted:
                self._status_wanted = False
                self._report("status", **self.status())
            if self._stop_signals >= 2:
                return self._stop_at_once()
            if self._stop_signals and self._draining_until is None:
                self._begin_drain()
            try:
                wait = self._turn()
                self._database_answered()
            except (DatabaseError, InterfaceError) as error:
                wait = self._database_failed(error)
            if self._draining_until is not None:
                code = self._drained()
                if code is not None:
                    return code

    def _turn(self) -> float:
        """Do what there is to do; return how long to wait for news afterwards."""
        close_old_connections()
        self._keeper.ticked()
        self._keeper.running = self._pool.in_flight
        self._cancel_lost()
        self._note_over_limit()
        self._flush(force=self._draining_until is not None)
        self._settle()
        if self._keeper.fenced:
            self._start_anew()
        if self._woken.is_set():
            self._woken.clear()
            self._sweeper.hasten()
        if self._sweeper.due():
            self._sweep()
        if self._in_maintenance:
            self._give_back_ready()
        if self._keeper.may_claim:
            self._start_ready()
        is_idle = self._draining_until is not None or self._in_maintenance
        if is_idle or not self._keeper.may_claim:
            return min(FLUSH_SECONDS, self._config.poll_seconds)
        if self._has_enough():
            return min(FLUSH_SECONDS, self._config.poll_seconds)
        tick = self._claim()
        self._start_ready()
        return self._wait_after(tick)

    def _has_enough(self) -> bool:
        """Return True while there is claimed work for every slot; then look up only now and then.

        Now and then, since occurrences of the schedules that run here are decided here.
        """
        now = self._clock.monotonic()
        if len(self._ready) >= self._config.slots and now < self._look_at:
            return True
        self._look_at = now + LOOK_SECONDS
        return False

    def _claim(self) -> Tick:
        node_id = self._keeper.node_id
        if self._outcomes and self._leases.schedules():
            # A finished run still blocks what waits behind it until it is written.
            self._flush(force=True)
        capacity, reserved = self._capacity()
        queued = self._dispatcher.claim_queued(
            node_id, capacity, reserved=reserved, still_here=self._owned.keys()
        )
        self._accept(queued.runs)
        capacity, reserved = self._capacity()
        tick = self._dispatcher.tick(node_id, capacity, reserved=reserved)
        self._accept(tick.claimed.runs)
        self._keeper.lag_ms = round(max(0.0, tick.lag_seconds) * 1000)
        self._tell_decisions(queued.skipped + tick.claimed.skipped, tick)
        self._tell_locks()
        return tick

    def _tell_decisions(self, skipped: Iterable[SkippedRun], tick: Tick) -> None:
        for run in skipped:
            self._report(
                "skipped",
                schedule=run.schedule_key,
                reason=run.reason,
                run=run.run_id,
                scheduled_at=run.scheduled_at,
                details=run.details,
            )
        for key in tick.stood_back:
            self._report("stood_back", schedule=key)
        for key in tick.invalid:
            self._report("invalid", schedule=key)

    def _wait_after(self, tick: Tick) -> float:
        if self._woken.is_set() or self._can_start():
            return 0.0
        wait = min(
            tick.wait_seconds, self._dispatcher.queued_wait_seconds, self._config.poll_seconds
        )
        return min(wait, FLUSH_SECONDS) if self._outcomes else wait

    def _capacity(self) -> tuple[int, int]:
        """Return how many runs may be claimed, and how many more of the reserved priority."""
        waiting = len(self._ready) + self._pool.taken_slots
        ahead = min(self._config.batch_size, int(self._rate.per_second() * CLAIM_AHEAD_SECONDS))
        free = max(0, self._config.slots + ahead - waiting)
        urgent = self._pool.in_flight - len(self._ordinary)
        urgent += sum(map(self._is_urgent, self._ready))
        capacity = max(0, free - max(0, self._config.reserved_slots - urgent))
        return capacity, free - capacity

    def _is_urgent(self, run: ClaimedRun) -> bool:
        """Return True for a run that may use the reserved slots."""
        return run.priority >= self._config.reserved_priority

    def _accept(self, runs: Iterable[ClaimedRun]) -> None:
        for run in runs:
            self._owned[run.run_id] = run
            bisect.insort_right(self._ready, run, key=_order)

    @property
    def _ordinary_room(self) -> int:
        """Return how many more runs below the reserved priority may take a slot."""
        # Those of a worker that was replaced take none any more.
        abandoned = self._pool.in_flight - self._pool.taken_slots
        taken = len(self._ordinary) - abandoned
        return self._config.slots - self._config.reserved_slots - taken

    def _can_start(self) -> bool:
        if not self._ready or not self._pool.free_slots:
            return False
        return self._is_urgent(self._ready[0]) or self._ordinary_room > 0

    def _next_ready(self) -> list[ClaimedRun]:
        """Take what has a slot now, no more than there are free threads."""
        free, room = self._pool.free_slots, self._ordinary_room
        batch: list[ClaimedRun] = []
        left: list[ClaimedRun] = []
        for run in self._ready:
            is_urgent = self._is_urgent(run)
            if len(batch) < free and (is_urgent or room > 0):
                batch.append(run)
                room -= not is_urgent
            else:
                left.append(run)
        self._ready = left
        return batch

    def _start_ready(self) -> None:
        batch = self._next_ready() if self._can_start() else []
        # Those whose start came with the claim have waited for a thread only.
        self._hand_over([run for run in batch if run.state == Run.State.RUNNING])
        batch = [run for run in batch if run.state != Run.State.RUNNING]
        if not batch:
            return
        # Until the answer comes nobody knows whether these have started.
        self._starting = {run.owner_token: run for run in batch}
        started = lifecycle.start(batch, self._keeper.node_id)
        self._starting = {}
        self._hand_over([run for run in batch if run.run_id in started])
        refused = [run.run_id for run in batch if run.run_id not in started]
        if refused:
            self._report("start_refused", runs=refused)
            self._forget(refused)

    def _hand_over(self, runs: list[ClaimedRun]) -> None:
        for run in runs:
            self._report(
                "run_started",
                run=run.run_id,
                schedule=run.schedule_key,
                scheduled_at=run.scheduled_at,
                due_at=run.due_at,
                attempt=run.attempt + (run.state != Run.State.RUNNING),
            )
        self._ordinary.update(run.run_id for run in runs if not self._is_urgent(run))
        self._pool.submit(self._assignments(runs))
        for run in runs:
            if run.run_id in self._told:
                # It was told while it waited for a thread, where no job could hear it.
                cause, reason = self._told[run.run_id]
                self._pool.cancel({run.run_id: cause}, reason=reason)

    def _assignments(self, runs: list[ClaimedRun]) -> Iterator[Assignment]:
        """Yield what to execute; a run whose attempts have used up their time has failed."""
        now = self._keeper.database_time()
        for run in runs:
            seconds, cause = run.seconds_allowed(now)
            if seconds is not None and seconds <= 0:
                self._ended(_out_of_time(run, cause))
            else:
                yield _assignment(run, self._effect_lock(run), seconds, cause)

    def _effect_lock(self, run: ClaimedRun) -> str:
        """Return the lock to hold where the job writes, "" where the level has none for it."""
        grant = self._leases.grant_of(run.run_id)
        if run.delivery != TRANSACTIONAL or grant is None or "database" not in grant.level.parts:
            return ""
        return grant.name if grant.is_exclusive else f"run:{run.run_id}"

    # --- news from the workers ------------------------------------------------

    def _take(self, news: executors.News) -> None:
        if isinstance(news, Ended):
            self._ended(news.outcome)
        elif isinstance(news, Died):
            self._worker_died(news)
        elif isinstance(news, OverLimit):
            self._went_over_limit(news)
        elif isinstance(news, Stuck):
            self._report("stuck", run=news.run_id, replaced=news.is_replaced)
        elif isinstance(news, Recycled):
            self._report("worker_recycled", pid=news.pid, runs=news.runs, cause=news.cause)
        else:
            self._news.take(news)

    def _went_over_limit(self, news: OverLimit) -> None:
        if news.run_id in self._owned:
            self._over_limit.add(news.run_id)
            self._unnoted_over.add(news.run_id)
            self._report("over_limit", run=news.run_id, cause=news.cause)

    def _ended(self, outcome: Outcome) -> None:
        self._ordinary.discard(outcome.run_id)
        run = self._owned.get(outcome.run_id)
        if run is None:
            return
        self._rate.count()
        self._news.ended(outcome.run_id, succeeded=outcome.state == "succeeded")
        self._over_limit.discard(outcome.run_id)
        if not self._outcomes:
            self._flush_at = self._clock.monotonic() + FLUSH_SECONDS
        self._outcomes.append(
            Finished(
                run_id=run.run_id,
                fencing_token=run.fencing_token,
                owner_token=run.owner_token,
                state=outcome.state,
                reason=outcome.reason,
                finished_at=self._keeper.database_time(),
                result=outcome.result,
                error=outcome.error,
                output=outcome.output,
                traceback=outcome.traceback,
                committed=outcome.committed,
                failure=self._failure(run, outcome),
            )
        )

    def _failure(self, run: ClaimedRun, outcome: Outcome) -> Failure | None:
        """Return what decides about another attempt; None where there can be none."""
        timed_out = outcome.reason == Run.Reason.TIMEOUT
        may_retry = outcome.state == "failed" and (timed_out or outcome.exceptions)
        if not may_retry or run.attempts_left < 1:
            return None
        return Failure(
            exceptions=outcome.exceptions,
            retry_seconds=outcome.retry_seconds,
            timed_out=timed_out,
        )

    def _worker_died(self, death: Died) -> None:
        self._report("worker_died", runs=death.run_ids, cause=death.cause)
        self._ordinary.difference_update(death.run_ids)
        runs = [self._owned[run_id] for run_id in death.run_ids if run_id in self._owned]
        lifecycle_failed = {
            "reason": Run.Reason.WORKER_DIED,
            "unknown": Run.State.FAILED,
            "detail": death.cause,
        }
        try:
            self._news.write(self._tokens, now=death.run_ids)
            recovered = lifecycle.recover_owned(runs, **lifecycle_failed)
        except (DatabaseError, InterfaceError) as error:
            # The sweep finds them: they are this node's and it no longer knows them.
            self._database_failed(error)
            self._forget(run.run_id for run in runs)
            return
        settled = {*recovered.requeued, *recovered.lost, *recovered.failed}
        committed = [
            run for run in runs if run.delivery == TRANSACTIONAL and run.run_id not in settled
        ]
        for run in committed:
            # Its worker died between the commit and the report.
            self._ended(
                Outcome(
                    run_id=run.run_id,
                    fencing_token=run.fencing_token,
                    state="succeeded",
                    committed=True,
                )
            )
        self._forget(run.run_id for run in runs if run not in committed)

    def _flush(self, *, force: bool = False) -> None:
        self._news.write(self._tokens)
        if not self._outcomes:
            return
        full = len(self._outcomes) >= FLUSH_ROWS
        if not (force or full or self._clock.monotonic() >= self._flush_at):
            return
        reports = self._outcomes[: self._config.batch_size]
        # What they told last, as long as the runs are still running.
        self._news.write(self._tokens, now={report.run_id for report in reports})
        self._repeat([report for report in reports if self._may_repeat(report)])
        result = lifecycle.finish(reports)
        del self._outcomes[: len(reports)]
        for report in reports:
            self._tell_finished(report, result)
        self._forget(report.run_id for report in reports)

    def _may_repeat(self, report: Finished) -> bool:
        """Return True for a job that stopped half-way although it is to run at least once."""
        delivery = self._owned[report.run_id].delivery
        was_stopped = report.state == Run.State.CANCELLED or report.reason == Run.Reason.WORKER_DIED
        is_half_done = was_stopped and report.reason != Run.Reason.CANCELLED
        return is_half_done and delivery in Schedule.REPEATING_DELIVERIES

    def _repeat(self, reports: list[Finished]) -> None:
        """Queue the runs again; where that is used up, the report is what is left to say."""
        for report in reports:
            recovered = lifecycle.recover_owned(
                [self._owned[report.run_id]],
                reason=report.reason,
                unknown=report.state,
                detail=report.error,
            )
            if recovered.requeued:
                self._report("recovered", requeued=recovered.requeued, lost=())

    def _tell_finished(self, report: Finished, result: lifecycle.FinishResult) -> None:
        run = self._owned[report.run_id]
        if report.run_id in result.retried:
            self._report(
                "retry_planned",
                run=report.run_id,
                schedule=run.schedule_key,
                error=report.error,
                due_at=result.retried[report.run_id],
            )
            return
        rejected = report.run_id in result.rejected
        late = report.run_id in result.late
        self._report(
            "report_rejected" if rejected else "run_finished",
            run=report.run_id,
            schedule=run.schedule_key,
            state=report.state,
            reason=report.reason,
            error=report.error,
            late=late,
        )
        if not rejected:
            signals.emit(
                signals.run_finished,
                run_id=report.run_id,
                schedule_id=run.schedule_id,
                state=report.state,
                reason=report.reason,
                late=late,
            )

    def _tokens(self, run_ids: Iterable[int]) -> dict[int, tuple[int, str]]:
        owned = (self._owned[run_id] for run_id in run_ids if run_id in self._owned)
        return {run.run_id: (run.fencing_token, run.owner_token) for run in owned}

    def _forget(self, run_ids: Iterable[int]) -> None:
        gone = list(run_ids)
        for run_id in gone:
            self._owned.pop(run_id, None)
            self._unnoted.pop(run_id, None)
            self._told.pop(run_id, None)
        for known in (self._asked, self._over_limit, self._unnoted_over):
            known.difference_update(gone)
        self._news.forget(gone)
        self._leases.let_go(gone)

    # --- mending ----------------------------------------------------------------

    def _settle(self) -> None:
        node_id = self._keeper.node_id
        self._accept(self._dispatcher.settle(node_id))
        if not self._starting:
            return
        pending, self._starting = self._starting, {}
        found = {run.owner_token: run for run in lifecycle.read_back(list(pending), node_id)}
        for token, before in pending.items():
            run = found.get(token)
            if run is None:
                self._forget([before.run_id])
            elif run.state == Run.State.RUNNING:
                # The start was committed and its answer lost; nothing has been executed.
                self._hand_over([run])
            else:
                bisect.insort_left(self._ready, before, key=_order)

    def _sweep(self) -> None:
        self._obey_stops()
        swept: Swept = self._sweeper.sweep(
            self._keeper.node_id, set(self._owned), self._keeper.database_up_seconds
        )
        for dead in swept.dead:
            self._report("node_dead", node=dead)
        if swept.recovered.requeued or swept.recovered.lost:
            self._report("recovered", requeued=swept.recovered.requeued, lost=swept.recovered.lost)
        for key in swept.invalid:
            self._report("invalid", schedule=key)
        if swept.pruned:
            self._report("pruned", runs=swept.pruned)
        for key in swept.resumed:
            self._report("resumed", schedule=key)
        for key in swept.paused:
            self._report("paused", schedule=key)
        self._obey_maintenance(swept)

    def _obey_maintenance(self, swept: Swept) -> None:
        switch = swept.maintenance
        if switch is not None and not self._in_maintenance:
            self._report("maintenance_on", by=switch.by, reason=switch.reason, until=switch.until)
        elif switch is None and self._in_maintenance:
            self._report("maintenance_off")
        self._in_maintenance = switch is not None

    def _give_back_ready(self) -> None:
        waiting = self._unstarted()
        if waiting:
            lifecycle.give_back(waiting)
            self._drop(waiting)

    def _unstarted(self) -> list[ClaimedRun]:
        """Return what is claimed and not started; what started with its claim is not among it."""
        return [run for run in self._ready if run.state != Run.State.RUNNING]

    def _drop(self, runs: Iterable[ClaimedRun]) -> list[int]:
        """Forget runs that wait for a slot; return their ids."""
        dropped = [run.run_id for run in runs]
        self._ready = [run for run in self._ready if run.run_id not in dropped]
        self._forget(dropped)
        return dropped

    def _cancel_lost(self) -> None:
        lost = {
            run_id: cause
            for run_id, cause in self._keeper.take_lost().items()
            if run_id in self._owned
        }
        self._tell_lost(lost)
        self._unnoted |= lost
        if self._unnoted:
            lifecycle.note_lease_lost(self._unnoted, self._tokens(self._unnoted))
            self._unnoted = {}

    def _note_over_limit(self) -> None:
        if self._unnoted_over:
            lifecycle.note_over_limit(self._tokens(self._unnoted_over))
            self._unnoted_over.clear()

    def _tell_lost(self, causes: dict[int, str]) -> None:
        self._pool.cancel(causes, reason=Run.Reason.LEASE_LOST)
        self._told |= {run: (cause, Run.Reason.LEASE_LOST) for run, cause in causes.items()}
        for run_id, cause in causes.items():
            self._report("lease_lost", run=run_id, cause=cause)

    def _obey_stops(self) -> None:
        """Tell jobs to stop that were asked to, or whose run was taken from this node.

        The locks of those are let go, or the keeper would take a lock again that a person
        has just released.
        """
        stops = lifecycle.stops(list(self._owned.values()))
        # Even one that was told before: in a process of its own it is killed now.
        asked = {pk: cause for pk, cause in stops.asked.items() if pk not in self._asked}
        self._pool.cancel(asked, reason=Run.Reason.CANCELLED)
        self._told |= {run: (cause, Run.Reason.CANCELLED) for run, cause in asked.items()}
        self._asked |= asked.keys()
        for run_id, cause in asked.items():
            self._report("stop_asked", run=run_id, cause=cause)
        gone = stops.gone
        cause = "the run was taken from this node"
        self._tell_lost({run_id: cause for run_id in gone - self._told.keys()})
        self._leases.let_go(gone)
        self._drop([run for run in self._ready if run.run_id in gone])

    def _start_anew(self) -> None:
        """Go on under a fresh id: other nodes declared this one dead and took its runs over.

        What was claimed and not started is dropped, since others have it. Running jobs go
        on: their reports are guarded by their own tokens.
        """
        dropped = self._drop(self._ready)
        node_id = nodes.register(self._config)
        self._keeper.begin(node_id)
        self._report("fenced", node=node_id, dropped=dropped)

    def _database_answered(self) -> None:
        self._failures = 0
        if self._database_cause:
            self._database_cause = ""
            self._report("database_back")

    def _database_failed(self, error: Exception) -> float:
        """Close the broken connection; return how long to back off, with jitter."""
        connection.close()
        cause = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        if not self._database_cause:
            self._report("database_away", cause=cause)
        self._database_cause = cause
        self._failures += 1
        low, high = BACKOFF_SECONDS
        pause: float = min(high, low * 2 ** min(self._failures, 8))
        return pause * random.uniform(0.5, 1.0)  # noqa: S311

    def _tell_locks(self) -> None:
        away = dict(self._dispatcher.away)
        for name in away.keys() - self._away.keys():
            waits = self._waits(name)
            self._report("locks_away", level=name, cause=away[name], waits=waits)
        for name in self._away.keys() - away.keys():
            self._report("locks_back", level=name)
        self._away = away
        alerts = [self._alert(name, cause) for name, cause in away.items()]
        if abs(self._keeper.clock_offset_ms) > CLOCK_OFFSET_ALERT_MS:
            alerts.append(_("host clock is off by %d ms") % self._keeper.clock_offset_ms)
        if self._pool.stuck:
            alerts.append(_stuck_alert(self._pool.stuck))
        self._keeper.alert = "; ".join(alerts)

    def _waits(self, name: str) -> bool:
        """Return True where what the level guards stays due until its lock is back."""
        try:
            return self._find_level(name).is_strict
        except ConfigurationError:
            return True

    def _alert(self, name: str, cause: str) -> str:
        facts = {"level": name, "cause": cause}
        if self._waits(name):
            return _("lock level %(level)s unavailable, its schedules wait: %(cause)s") % facts
        return _("locks unavailable, the database decides alone: %(cause)s") % facts

    # --- stopping -----------------------------------------------------------------

    def _install_signals(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_stop_signal)
        signal.signal(signal.SIGUSR1, self._on_status_signal)
        signal.set_wakeup_fd(self._pool.wake_fd, warn_on_full_buffer=False)

    def _on_stop_signal(self, signum: int, frame: FrameType | None) -> None:
        self._stop_signals += 1

    def _on_status_signal(self, signum: int, frame: FrameType | None) -> None:
        # Only a flag: the handler may interrupt a report that holds the console's lock.
        self._status_wanted = True

    def _on_wakeup(self) -> None:
        self._woken.set()
        self._pool.wake()

    def _begin_drain(self) -> None:
        """Stop claiming; give back what has not started; the rest may finish."""
        self._draining_until = self._clock.monotonic() + self._config.drain_seconds
        self._report("draining", running=self._pool.in_flight, seconds=self._config.drain_seconds)
        waiting = self._unstarted()
        try:
            nodes.drain(self._keeper.node_id)
            lifecycle.give_back(waiting)
        except (DatabaseError, InterfaceError) as error:
            # The row's lease ends by itself, and others recover what was claimed.
            self._database_failed(error)
        self._drop(waiting)

    def _drained(self) -> int | None:
        """Return the exit code when the drain is over, else None."""
        idle = not (self._pool.in_flight or self._outcomes or self._starting or self._ready)
        if idle:
            self._leave()
            return 0
        if self._clock.monotonic() < (self._draining_until or 0.0):
            return None
        return self._cut_short()

    def _cut_short(self) -> int:
        """Tell the jobs to stop, wait a moment, kill the rest and say what became of them."""
        causes = {run_id: "the node is stopping" for run_id in self._owned}
        self._pool.cancel(causes, reason=Run.Reason.SHUTDOWN, within=CANCEL_GRACE_SECONDS)
        deadline = self._clock.monotonic() + CANCEL_GRACE_SECONDS
        while self._pool.in_flight and self._clock.monotonic() < deadline:
            for news in self._pool.poll(FLUSH_SECONDS):
                self._take(news)
        in_time = not self._pool.in_flight
        settled = self._abandon(
            Run.Reason.SHUTDOWN, Run.State.LOST, "cut off by the end of the drain"
        )
        return 0 if in_time and settled else EXIT_CUT

    def _stop_at_once(self) -> int:
        self._abandon(Run.Reason.SHUTDOWN, Run.State.LOST, "cut off by a second stop signal")
        return EXIT_INTERRUPTED

    def _abandon(self, reason: str, unknown: str, detail: str) -> bool:
        """Kill the workers, then settle what they ran: only then is it known to be dead.

        Return False when the database did not take it; other nodes then recover the runs.
        """
        self._pool.kill()
        settled = True
        for run_id in self._over_limit & self._owned.keys():
            self._ended(_cut_over_limit(self._owned[run_id], detail))
        try:
            self._flush(force=True)
            waiting = self._unstarted()
            cut = [run for run in self._owned.values() if run not in waiting]
            if cut:
                self._report("cut", runs=[run.run_id for run in cut])
            lifecycle.give_back(waiting)
            self._news.write(self._tokens, now=self._owned.keys())
            lifecycle.recover_owned(cut, reason=reason, unknown=unknown, detail=detail)
        except (DatabaseError, InterfaceError) as error:
            self._database_failed(error)
            settled = False
        self._forget(list(self._owned))
        self._leave(kill=False)
        return settled

    def _leave(self, *, kill: bool = True) -> None:
        if kill:
            self._pool.kill()
        try:
            nodes.leave(self._keeper.node_id)
        except (DatabaseError, InterfaceError) as error:
            self._database_failed(error)
        self._report("left", node=self._keeper.node_id)


class _Rate:
    """Runs that ended per second, over the last half second."""

    WINDOW_SECONDS = 0.5

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock.monotonic()
        self._count = 0
        self._last = 0.0

    def count(self) -> None:
        self._count += 1

    def per_second(self) -> float:
        now = self._clock.monotonic()
        elapsed = now - self._since
        if elapsed >= self.WINDOW_SECONDS:
            self._last, self._count, self._since = self._count / elapsed, 0, now
        return self._last


def _order(run: ClaimedRun) -> int:
    return -run.priority


def _assignment(run: ClaimedRun, effect_lock: str, seconds: float | None, cause: str) -> Assignment:
    started_with_claim = run.state == Run.State.RUNNING
    return Assignment(
        run_id=run.run_id,
        schedule_id=run.schedule_id,
        schedule_key=run.schedule_key,
        job=run.job,
        arguments=run.arguments,
        scheduled_at=run.scheduled_at,
        attempt=run.attempt if started_with_claim else run.attempt + 1,
        fencing_token=run.fencing_token,
        owner_token=run.owner_token,
        delivery=run.delivery,
        effect_lock=effect_lock,
        recovered_from=_recovered_from(run),
        last_checkpoint=run.checkpoint,
        parent=run.parent,
        own_process=run.isolation == Schedule.Isolation.OWN,
        timeout_seconds=seconds,
        timeout_cause=cause,
        kill_grace_seconds=run.kill_grace_seconds,
        memory_limit_mb=run.memory_limit_mb,
    )


def _recovered_from(run: ClaimedRun) -> EarlierAttempt | None:
    earlier = run.earlier
    if earlier is None or earlier.reason not in Run.CUT_OFF_REASONS:
        return None
    return EarlierAttempt(**dataclasses.asdict(earlier), checkpoint=run.checkpoint)


def _out_of_time(run: ClaimedRun, cause: str) -> Outcome:
    """Return the outcome of an attempt that does not begin."""
    return _timed_out(run, f"{cause}; this attempt did not begin")


def _cut_over_limit(run: ClaimedRun, detail: str) -> Outcome:
    """Return the outcome of a job that was over its limit and was killed with its worker."""
    return _timed_out(run, f"it took longer than its limit; {detail}")


def _timed_out(run: ClaimedRun, cause: str) -> Outcome:
    told = RunTimedOut(_("Run %d") % run.run_id, cause)
    return Outcome(
        run_id=run.run_id,
        fencing_token=run.fencing_token,
        state="failed",
        reason=Run.Reason.TIMEOUT,
        error=f"{RunTimedOut.__name__}: {told}",
    )


def _stuck_alert(count: int) -> str:
    message = ngettext(
        "%d job is over its limit in a thread that does not stop; it keeps its slot",
        "%d jobs are over their limit in threads that do not stop; they keep their slots",
        count,
    )
    return message % count
