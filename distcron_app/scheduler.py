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

import collections
import logging
import random
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from django.db import DatabaseError, InterfaceError, close_old_connections, connection
from django.utils.translation import gettext as _

from distcron_app import lifecycle, nodes, signals
from distcron_app.clock import Clock
from distcron_app.conf import Config
from distcron_app.dispatch import Dispatcher, Tick
from distcron_app.errors import ConfigurationError
from distcron_app.executors import Died, Ended, PoolBroken, ProcessPool, Progressed
from distcron_app.keeper import Keeper
from distcron_app.leases import FindLevel, LeaseBook
from distcron_app.lifecycle import ClaimedRun, Failure, Finished, SkippedRun
from distcron_app.maintenance import Sweeper, Swept
from distcron_app.models import Run
from distcron_app.runner import Assignment, Outcome
from distcron_app.wakeup import Listener

__all__ = ["EXIT_BROKEN", "EXIT_CUT", "EXIT_INTERRUPTED", "Scheduler"]

logger = logging.getLogger("distcron.scheduler")

EXIT_BROKEN = 1
EXIT_CUT = 3  # the drain ended before the jobs did
EXIT_INTERRUPTED = 130

# Outcomes wait this long for company before they are written.
FLUSH_SECONDS = 0.05
FLUSH_ROWS = 500
PROGRESS_SECONDS = 1.0
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
        self._ready: collections.deque[ClaimedRun] = collections.deque()
        self._owned: dict[int, ClaimedRun] = {}
        self._starting: dict[str, ClaimedRun] = {}
        self._outcomes: list[Finished] = []
        self._flush_at = 0.0
        self._progress: dict[int, tuple[float, str]] = {}
        self._progress_at = 0.0
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
        # Runs that were told to stop, and lost leases that are not yet noted on their run.
        self._told: set[int] = set()
        self._unnoted: dict[int, str] = {}

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
            for news in self._pool.poll(wait):
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
        self._flush(force=self._draining_until is not None)
        self._settle()
        if self._keeper.fenced:
            self._start_anew()
        if self._woken.is_set():
            self._woken.clear()
            self._sweeper.hasten()
        if self._sweeper.due():
            self._sweep()
        if self._draining_until is not None or not self._keeper.may_claim:
            return min(FLUSH_SECONDS, self._config.poll_seconds)
        if self._in_maintenance:
            self._give_back_ready()
            return min(FLUSH_SECONDS, self._config.poll_seconds)
        self._start_ready()
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
        queued = self._dispatcher.claim_queued(
            node_id, self._capacity(), still_here=self._owned.keys()
        )
        self._accept(queued.runs)
        if self._outcomes and self._leases.schedules():
            # A finished run still blocks its schedule's next occurrence until it is written.
            self._flush(force=True)
        tick = self._dispatcher.tick(node_id, self._capacity())
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
        if self._woken.is_set() or (self._ready and self._pool.free_slots):
            return 0.0
        wait = min(
            tick.wait_seconds, self._dispatcher.queued_wait_seconds, self._config.poll_seconds
        )
        return min(wait, FLUSH_SECONDS) if self._outcomes else wait

    def _capacity(self) -> int:
        waiting = len(self._ready) + self._pool.in_flight
        ahead = min(self._config.batch_size, int(self._rate.per_second() * CLAIM_AHEAD_SECONDS))
        return max(0, self._config.slots + ahead - waiting)

    def _accept(self, runs: Iterable[ClaimedRun]) -> None:
        for run in runs:
            self._owned[run.run_id] = run
            if run.state == Run.State.RUNNING:
                self._hand_over([run])
            else:
                self._ready.append(run)

    def _start_ready(self) -> None:
        batch = [self._ready.popleft() for _ in range(min(len(self._ready), self._pool.free_slots))]
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
        self._pool.submit(_assignment(run) for run in runs)

    # --- news from the workers ------------------------------------------------

    def _take(self, news: Ended | Progressed | Died) -> None:
        if isinstance(news, Ended):
            self._ended(news.outcome)
        elif isinstance(news, Progressed):
            self._progress[news.run_id] = (news.percent, news.message)
        else:
            self._worker_died(news)

    def _ended(self, outcome: Outcome) -> None:
        run = self._owned.get(outcome.run_id)
        if run is None:
            return
        self._rate.count()
        self._progress.pop(outcome.run_id, None)
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
                failure=self._failure(run, outcome),
            )
        )

    def _failure(self, run: ClaimedRun, outcome: Outcome) -> Failure | None:
        """Return what decides about another attempt; None where there can be none."""
        if outcome.state != "failed" or not outcome.exceptions or run.attempts_left < 1:
            return None
        return Failure(exceptions=outcome.exceptions, retry_seconds=outcome.retry_seconds)

    def _worker_died(self, death: Died) -> None:
        self._report("worker_died", runs=death.run_ids, cause=death.cause)
        runs = [self._owned[run_id] for run_id in death.run_ids if run_id in self._owned]
        lifecycle_failed = {
            "reason": Run.Reason.WORKER_DIED,
            "unknown": Run.State.FAILED,
            "detail": death.cause,
        }
        try:
            lifecycle.recover_owned(runs, **lifecycle_failed)
        except (DatabaseError, InterfaceError) as error:
            # The sweep finds them: they are this node's and it no longer knows them.
            self._database_failed(error)
        self._forget(run.run_id for run in runs)

    def _flush(self, *, force: bool = False) -> None:
        self._flush_progress()
        if not self._outcomes:
            return
        full = len(self._outcomes) >= FLUSH_ROWS
        if not (force or full or self._clock.monotonic() >= self._flush_at):
            return
        reports = self._outcomes[: self._config.batch_size]
        self._repeat([report for report in reports if self._may_repeat(report)])
        result = lifecycle.finish(reports)
        del self._outcomes[: len(reports)]
        for report in reports:
            self._tell_finished(report, result)
        self._forget(report.run_id for report in reports)

    def _may_repeat(self, report: Finished) -> bool:
        """Return True for a job that stopped half-way although it is to run at least once."""
        delivery = self._owned[report.run_id].delivery
        is_half_done = report.state == Run.State.CANCELLED and report.reason != Run.Reason.CANCELLED
        return is_half_done and delivery == "at_least_once"

    def _repeat(self, reports: list[Finished]) -> None:
        """Queue the runs again; where that is used up, the report is what is left to say."""
        for report in reports:
            recovered = lifecycle.recover_owned(
                [self._owned[report.run_id]],
                reason=report.reason,
                unknown=Run.State.CANCELLED,
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

    def _flush_progress(self) -> None:
        now = self._clock.monotonic()
        if not self._progress or now < self._progress_at:
            return
        self._progress_at = now + PROGRESS_SECONDS
        progress, self._progress = self._progress, {}
        lifecycle.report_progress(progress, self._tokens(progress))

    def _tokens(self, run_ids: Iterable[int]) -> dict[int, tuple[int, str]]:
        owned = (self._owned[run_id] for run_id in run_ids if run_id in self._owned)
        return {run.run_id: (run.fencing_token, run.owner_token) for run in owned}

    def _forget(self, run_ids: Iterable[int]) -> None:
        gone = list(run_ids)
        for run_id in gone:
            self._owned.pop(run_id, None)
            self._unnoted.pop(run_id, None)
        self._told.difference_update(gone)
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
                self._ready.appendleft(before)

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
        if self._ready:
            lifecycle.give_back(list(self._ready))
            self._drop_ready()

    def _drop_ready(self) -> list[int]:
        """Forget what is claimed and not started; return the ids."""
        dropped = [run.run_id for run in self._ready]
        self._ready.clear()
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

    def _tell_lost(self, causes: dict[int, str]) -> None:
        self._pool.cancel(causes, reason=Run.Reason.LEASE_LOST)
        self._told |= causes.keys()
        for run_id, cause in causes.items():
            self._report("lease_lost", run=run_id, cause=cause)

    def _obey_stops(self) -> None:
        """Tell jobs to stop that were asked to, or whose run was taken from this node.

        The locks of those are let go, or the keeper would take a lock again that a person
        has just released.
        """
        stops = lifecycle.stops(list(self._owned.values()))
        asked = {run_id: cause for run_id, cause in stops.asked.items() if run_id not in self._told}
        self._pool.cancel(asked, reason=Run.Reason.CANCELLED)
        self._told |= asked.keys()
        for run_id, cause in asked.items():
            self._report("stop_asked", run=run_id, cause=cause)
        gone = stops.gone
        cause = "the run was taken from this node"
        self._tell_lost({run_id: cause for run_id in gone - self._told})
        self._leases.let_go(gone)
        waiting = [run for run in self._ready if run.run_id in gone]
        for run in waiting:
            self._ready.remove(run)
        self._forget(run.run_id for run in waiting)

    def _start_anew(self) -> None:
        """Go on under a fresh id: other nodes declared this one dead and took its runs over.

        What was claimed and not started is dropped, since others have it. Running jobs go
        on: their reports are guarded by their own tokens.
        """
        dropped = self._drop_ready()
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
        try:
            nodes.drain(self._keeper.node_id)
            lifecycle.give_back(list(self._ready))
        except (DatabaseError, InterfaceError) as error:
            # The row's lease ends by itself, and others recover what was claimed.
            self._database_failed(error)
        self._drop_ready()

    def _drained(self) -> int | None:
        """Return the exit code when the drain is over, else None."""
        idle = not self._pool.in_flight and not self._outcomes and not self._starting
        if idle:
            self._leave()
            return 0
        if self._clock.monotonic() < (self._draining_until or 0.0):
            return None
        return self._cut_short()

    def _cut_short(self) -> int:
        """Tell the jobs to stop, wait a moment, kill the rest and say what became of them."""
        causes = {run_id: "the node is stopping" for run_id in self._owned}
        self._pool.cancel(causes, reason=Run.Reason.SHUTDOWN)
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
        try:
            self._flush(force=True)
            cut = [run for run in self._owned.values() if run not in self._ready]
            if cut:
                self._report("cut", runs=[run.run_id for run in cut])
            lifecycle.give_back(list(self._ready))
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


def _assignment(run: ClaimedRun) -> Assignment:
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
        is_recovery=run.recoveries > 0,
        parent=run.parent,
    )
