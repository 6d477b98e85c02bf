"""Any order of claims, starts, ends, crashes, pauses, edits and people's actions.

The real dispatcher, lifecycle and sweep on the real database, driven by Hypothesis; after
each step every promise is looked at. Time passes by moving all rows into the past.

DISTCRON_MACHINE_EXAMPLES and DISTCRON_MACHINE_STEPS set how much is tried; with either of
them the examples are new each time.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any
from unittest import mock

import pytest
from django.db import OperationalError, connection, models, transaction
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from distcron_app import lifecycle, nodes, operations
from distcron_app.conf import Config
from distcron_app.dispatch import Dispatcher
from distcron_app.errors import ScheduleBusy
from distcron_app.instants import database_now
from distcron_app.leases import LeaseBook
from distcron_app.lifecycle import ClaimedRun, Decision, Failure, Finished
from distcron_app.locks import Level, new_owner_token, schedule_lock_name
from distcron_app.locks.memory import MemoryLockBackend
from distcron_app.maintenance import Sweeper
from distcron_app.models import Attempt, Node, Run, Schedule
from distcron_app.nodes import Vitals
from tests.factories import make_node, make_schedule
from tests.integration.test_dispatch import ManualClock

EXAMPLES = int(os.environ.get("DISTCRON_MACHINE_EXAMPLES", "20"))
STEPS = int(os.environ.get("DISTCRON_MACHINE_STEPS", "25"))
IS_DEEP = {"DISTCRON_MACHINE_EXAMPLES", "DISTCRON_MACHINE_STEPS"} & os.environ.keys()
CONFIG = Config(lock_backend="memory", lock_ttl_seconds=15, node_lease_seconds=15)
# More than a node can be without its loop, so that slow ones are declared dead.
UP_SECONDS = 3600.0
WHO: dict[str, Any] = {"actor": "siti", "via": "cli"}
FAILURE = Failure(exceptions=("builtins.OSError", "builtins.Exception"))
FINAL = ("succeeded", "failed", "cancelled", "skipped", "lost")
_TICK = timedelta(microseconds=1)
PICK = st.integers(min_value=0, max_value=7)


class Process:
    """A ``runscheduler`` without threads and workers: what it owns, and where each run is."""

    def __init__(self, backend: MemoryLockBackend, clock: ManualClock) -> None:
        self.node_id = make_node().pk
        self.leases = LeaseBook(15_000, clock=clock)
        self.dispatcher = Dispatcher(
            config=CONFIG,
            clock=clock,
            find_level=lambda name: Level(name=name, parts=("memory",), backend=backend),
            leases=self.leases,
        )
        self.sweeper = Sweeper(config=CONFIG, clock=clock)
        # It prunes at a random moment; here that is a rule of its own.
        self.sweeper._prune_at = math.inf
        self.owned: dict[int, ClaimedRun] = {}
        self.ready: list[int] = []
        self.executing: list[int] = []
        self.is_slow = False

    def forget(self, run_ids: list[int]) -> None:
        for run_id in run_ids:
            self.owned.pop(run_id, None)
        self.ready = [pk for pk in self.ready if pk in self.owned]
        self.executing = [pk for pk in self.executing if pk in self.owned]
        self.leases.let_go(run_ids)


class Machine(RuleBasedStateMachine):
    """Two schedules, three processes, and everything that may happen to them.

    No rule has a precondition: what there is depends on the clock of the database, and
    Hypothesis asks for the same choices when it tries again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._world = transaction.atomic()
        self._world.__enter__()
        self.clock = ManualClock()
        self.backend = MemoryLockBackend(clock=self.clock)
        # What stored instants are behind the machine's own time.
        self.moved = timedelta()
        self.schedules: list[int] = []
        self.processes = [Process(self.backend, self.clock) for _ in range(3)]
        self.stale: list[Decision] = []
        self.reports: list[Finished] = []
        # Per schedule: where its timetable began, and which instants have had their row.
        self.since: dict[int, datetime] = {}
        self.decided: dict[int, set[datetime]] = {}
        self.looked_at: set[int] = set()
        self.tokens: dict[int, int] = {}
        # Per run: its state when it was looked at last, how often its job began, may begin.
        self.states: dict[int, str] = {}
        self.begun: dict[int, int] = {}
        self.granted: dict[int, int] = {}
        # Runs that may leave a final state in this step.
        self.reopened: set[int] = set()
        self.may_prune = False

    def teardown(self) -> None:
        try:
            if self.schedules:
                self.drain()
        finally:
            transaction.set_rollback(True)
            self._world.__exit__(None, None, None)

    # --- what there is ------------------------------------------------------------------

    @initialize(
        policies=st.lists(
            st.fixed_dictionaries(
                {
                    "overlap": st.sampled_from(Schedule.Overlap.values),
                    "max_active": st.sampled_from([None, None, 2]),
                    "max_queued": st.sampled_from([1, 100]),
                    "delivery": st.sampled_from(Schedule.Delivery.values),
                    "max_attempts": st.sampled_from([1, 2]),
                    "misfire": st.sampled_from(Schedule.Misfire.values),
                    "on_resume": st.sampled_from(Schedule.OnResume.values),
                    "start_deadline_seconds": st.sampled_from([None, None, 20]),
                    "spread_seconds": st.sampled_from([0, 0, 4]),
                }
            ),
            min_size=2,
            max_size=2,
        )
    )
    def begin(self, policies: list[dict[str, Any]]) -> None:
        for values in policies:
            schedule = make_schedule(
                kind="interval",
                cron="",
                interval_seconds=10,
                interval_anchor=database_now().replace(microsecond=0),
                backoff="fixed",
                backoff_delays="3",
                backoff_jitter="none",
                keep_succeeded=1,
                keep_failed=1,
                catchup_max=3,
                **values,
            )
            self.schedules.append(schedule.pk)
            self.decided[schedule.pk] = set()
            self.tokens[schedule.pk] = 0
            self.begin_anew(schedule)
        self.time_passes(10)

    def begin_anew(self, schedule: Schedule) -> None:
        """The timetable was changed: instants count from where it is planned now."""
        assert schedule.planned_from is not None
        self.since[schedule.pk] = schedule.planned_from + self.moved

    def schedule(self, pick: int) -> Schedule:
        return Schedule.objects.get(pk=self.schedules[pick % len(self.schedules)])

    def process(self, pick: int, having: str = "") -> Process:
        some = [each for each in self.processes if not having or getattr(each, having)]
        some = some or self.processes
        return some[pick % len(some)]

    def run_of(self, pick: int, *states: str) -> Run | None:
        runs = list(Run.objects.filter(state__in=states).order_by("pk"))
        return runs[pick % len(runs)] if runs else None

    # --- time -----------------------------------------------------------------------------

    @rule(pick=PICK, seconds=st.sampled_from([3, 5, 10, 11, 12, 25, 70, 400]))
    def time_passes_and_nodes_work(self, pick: int, seconds: int) -> None:
        self.time_passes(seconds)
        for place in range(len(self.processes)):
            self.tick(pick + place, capacity=2, starts=True)

    @rule(seconds=st.sampled_from([1, 3, 5, 11, 12, 25, 70, 400]))
    def time_passes(self, seconds: int) -> None:
        for _ in range(0, seconds, 5):
            self.clock.ahead += min(seconds, 5)
            for process in self.processes:
                if not process.is_slow:
                    process.leases.renew()
        self.move_rows(timedelta(seconds=seconds))
        for process in self.processes:
            if not process.is_slow:
                self.beat(process)

    def move_rows(self, by: timedelta) -> None:
        """Let ``by`` pass: every stored instant is so much longer ago."""
        self.moved += by
        for model in (Run, Attempt, Node, Schedule):
            _move(model, by)
        for process in self.processes:
            for held in process.leases._holdings.values():
                held.since -= by
            process.dispatcher._database_time = database_now()
        self.stale = [_earlier(decision, by) for decision in self.stale]

    # --- what nodes do ----------------------------------------------------------------------

    @rule(pick=PICK, capacity=st.sampled_from([1, 4]), starts=st.booleans())
    def tick(self, pick: int, capacity: int, starts: bool) -> None:
        process = self.process(pick)
        if process.is_slow:
            return
        self.settle(process)
        queued = process.dispatcher.claim_queued(
            process.node_id, capacity, still_here=process.owned.keys()
        )
        self.accept(process, list(queued.runs))
        tick = process.dispatcher.tick(process.node_id, capacity)
        assert not tick.invalid
        self.accept(process, list(tick.claimed.runs))
        if starts:
            self.start(pick)

    @rule(pick=PICK, is_committed=st.booleans())
    def tick_without_answer(self, pick: int, is_committed: bool) -> None:
        process = self.process(pick)
        if process.is_slow:
            return
        self.settle(process)
        really = lifecycle.claim

        def lose(*args: Any) -> lifecycle.Claimed:
            if is_committed:
                really(*args)
            raise OperationalError("the answer is lost")

        with mock.patch.object(lifecycle, "claim", lose), contextlib.suppress(OperationalError):
            process.dispatcher.tick(process.node_id, 4)

    @rule(pick=PICK, node=PICK)
    def read_then_claim(self, pick: int, node: int) -> None:
        """A node reads what is due, is stopped, and claims it much later, without a lock."""
        if self.stale and pick % 2:
            self.claim_what_was_read(node)
        else:
            self.read(pick)

    @rule(pick=PICK)
    def history_goes_before_a_claim(self, pick: int) -> None:
        """What a stopped node has read runs elsewhere, and is pruned, before it goes on."""
        self.stale.clear()
        self.time_passes(15)
        self.read(pick)
        for _ in range(2):
            # Looked at as after any step: what is pruned later must have been seen.
            self.time_passes_and_nodes_work(pick, 10)
            self.the_promises_hold()
            for process in self.processes:
                while process.executing:
                    self.end_job(process, process.executing[0], "succeeded")
            self.the_promises_hold()
        self.prune()
        self.claim_what_was_read(pick)

    def claim_what_was_read(self, node: int) -> None:
        if self.stale:
            process = self.process(node)
            claimed = lifecycle.claim([self.stale.pop(0)], process.node_id)
            self.accept(process, list(claimed.runs))

    def read(self, pick: int) -> None:
        schedule = self.schedule(pick)
        seen = schedule.next_run_at
        if schedule.state == "active" and seen is not None and seen <= database_now():
            self.stale.append(
                Decision(
                    schedule_id=schedule.pk,
                    version=schedule.version,
                    seen_next_run_at=seen,
                    next_run_at=schedule.first_after(seen),
                    owner_token=new_owner_token(),
                    run_at=seen,
                )
            )

    @rule(pick=PICK)
    def start(self, pick: int) -> None:
        process = self.process(pick, "ready")
        runs = [process.owned[run_id] for run_id in process.ready]
        process.ready = []
        started = lifecycle.start(runs, process.node_id)
        for run in runs:
            if run.run_id in started:
                self.job_begins(process, run)
        process.forget([run.run_id for run in runs if run.run_id not in started])

    @rule(pick=PICK, what=st.sampled_from(["cancel", "release", "death"]))
    def something_comes_before_the_start(self, pick: int, what: str) -> None:
        self.tick(pick, capacity=1, starts=False)
        process = self.process(pick, "ready")
        if not process.ready:
            return
        run = process.owned[process.ready[0]]
        if what == "cancel":
            lifecycle.request_cancel([run.run_id], cause="by siti")
        elif what == "release":
            self.release(self.schedules.index(run.schedule_id))
        else:
            self.expire_lease(process)
            nodes.declare_dead()
            self.grant(lifecycle.recover().requeued)
        self.start(pick)

    @rule(pick=PICK, what=st.sampled_from(["release", "death"]))
    def a_run_is_taken_from_its_job(self, pick: int, what: str) -> None:
        """Its old attempt reports when others may have begun another one."""
        self.time_passes_and_nodes_work(pick, 10)
        self.the_promises_hold()
        process = self.process(pick, "executing")
        if not process.executing:
            return
        run_id = process.executing[0]
        if what == "release":
            self.release(self.schedules.index(process.owned[run_id].schedule_id))
        else:
            self.expire_lease(process)
            nodes.declare_dead()
            self.grant(lifecycle.recover().requeued)
        self.the_promises_hold()
        process.is_slow = True
        self.time_passes_and_nodes_work(pick, 3)
        self.the_promises_hold()
        self.end_job(process, run_id, "succeeded")
        process.is_slow = False
        self.beat(process)

    @rule(
        pick=PICK,
        which=PICK,
        end=st.sampled_from(
            ["succeeded", "succeeded", "failed", "failed", "given up", "unreported"]
        ),
    )
    def job_ends(self, pick: int, which: int, end: str) -> None:
        process = self.process(pick, "executing")
        if not process.executing:
            self.tick(pick, capacity=1, starts=True)
        else:
            self.end_job(process, process.executing[which % len(process.executing)], end)

    def end_job(self, process: Process, run_id: int, end: str) -> None:
        run = process.owned[run_id]
        failure = FAILURE if end == "failed" and run.attempts_left > 0 else None
        report = Finished(
            run_id=run.run_id,
            fencing_token=run.fencing_token,
            owner_token=run.owner_token,
            state="succeeded" if end == "succeeded" else "failed",
            finished_at=database_now(),
            failure=failure,
        )
        if end != "unreported":
            self.report(report)
        self.reports.append(report)
        process.forget([run.run_id])

    @rule(pick=PICK)
    def report_again(self, pick: int) -> None:
        """A report arrives whose answer was lost, or that was long on its way."""
        if self.reports:
            self.report(self.reports[pick % len(self.reports)])

    def worker_dies(self, pick: int) -> None:
        process = self.process(pick, "executing")
        if process.executing:
            run = process.owned[process.executing[0]]
            recovered = lifecycle.recover_owned(
                [run], reason="worker_died", unknown="failed", detail="signal 9"
            )
            self.grant(recovered.requeued)
            process.forget([run.run_id])

    def give_back(self, pick: int) -> None:
        process = self.process(pick, "ready")
        lifecycle.give_back([process.owned[run_id] for run_id in process.ready])
        process.forget(list(process.ready))

    @rule(pick=PICK)
    def sweep(self, pick: int) -> None:
        process = self.process(pick)
        if process.is_slow:
            return
        self.settle(process)
        gone = lifecycle.stops(list(process.owned.values())).gone
        process.leases.let_go(gone)
        process.forget([run_id for run_id in process.ready if run_id in gone])
        swept = process.sweeper.sweep(process.node_id, process.owned.keys(), UP_SECONDS)
        assert not swept.invalid
        self.grant(swept.recovered.requeued)

    @rule()
    def prune(self) -> None:
        lifecycle.prune()
        self.may_prune = True

    # --- what happens to nodes --------------------------------------------------------------

    @rule(
        pick=PICK,
        trouble=st.sampled_from(["crash", "stop_for_a_while", "wake", "worker_dies", "give_back"]),
    )
    def node_trouble(self, pick: int, trouble: str) -> None:
        getattr(self, trouble)(pick)

    def crash(self, pick: int) -> None:
        """A process ends with its jobs; another one starts under a new id."""
        self.expire_lease(self.process(pick))
        self.processes[pick % len(self.processes)] = Process(self.backend, self.clock)

    def stop_for_a_while(self, pick: int) -> None:
        self.process(pick).is_slow = True
        self.expire_lease(self.process(pick))

    def wake(self, pick: int) -> None:
        self.process(pick).is_slow = False
        self.beat(self.process(pick))

    def expire_lease(self, process: Process) -> None:
        ended = database_now() - timedelta(seconds=1)
        Node.objects.filter(pk=process.node_id).update(expires_at=ended)

    def beat(self, process: Process) -> None:
        if nodes.heartbeat(CONFIG, process.node_id, Vitals()):
            return
        self.settle(process)
        process.forget(list(process.ready))
        process.node_id = nodes.register(CONFIG)

    # --- what people do -----------------------------------------------------------------------

    @rule(
        pick=PICK,
        action=st.sampled_from(
            [
                *["pause", "resume", "edit", "next_run_at_goes_back"],
                *["run_now", "run_again", "cancel", "release"],
            ]
        ),
    )
    def a_person_acts(self, pick: int, action: str) -> None:
        getattr(self, action)(pick)

    def pause(self, pick: int) -> None:
        operations.pause([self.schedule(pick)], reason="migration", **WHO)

    def resume(self, pick: int) -> None:
        operations.resume([self.schedule(pick)], **WHO)

    def edit(self, pick: int) -> None:
        schedule = self.schedule(pick)
        seconds = (7, 10, 15)[pick % 3]
        is_change = schedule.interval_seconds != seconds
        schedule.interval_seconds, schedule.notes = seconds, "edited"
        schedule.save()
        if is_change:
            self.begin_anew(schedule)

    def next_run_at_goes_back(self, pick: int) -> None:
        """As by a hand in the database; to the newest instant, which is never pruned.

        A span that begins there then finds a row of its first instant, so from here on no
        instant of this timetable is asked for.
        """
        schedule = self.schedule(pick)
        newest = schedule.runs.aggregate(at=models.Max("scheduled_at"))["at"]
        if schedule.state == "active" and newest is not None:
            plain: models.QuerySet[Schedule] = models.QuerySet(Schedule)
            plain.filter(pk=schedule.pk, next_run_at__gt=newest).update(next_run_at=newest)
            self.since.pop(schedule.pk, None)

    def run_now(self, pick: int) -> None:
        with contextlib.suppress(ScheduleBusy):
            lifecycle.queue_manual(self.schedule(pick), by="siti", behind=pick % 4 > 1)

    def run_again(self, pick: int) -> None:
        run = self.run_of(pick, *Run.AGAIN_STATES)
        if run is not None:
            with contextlib.suppress(ScheduleBusy):
                assert lifecycle.queue_again(run.pk) is not None
                self.reopened.add(run.pk)
                self.grant([run.pk])

    def cancel(self, pick: int) -> None:
        run = self.run_of(pick, *Run.OPEN_STATES)
        if run is not None:
            lifecycle.request_cancel([run.pk], cause="by siti")

    def release(self, pick: int) -> None:
        schedule = self.schedule(pick)
        released = lifecycle.release(schedule.pk)
        self.grant(released.runs.requeued)
        self.backend.force_release(schedule_lock_name(schedule.pk))

    # --- what is remembered ---------------------------------------------------------------------

    def settle(self, process: Process) -> None:
        runs = process.dispatcher.settle(process.node_id)
        self.accept(process, runs, is_read_back=True)

    def accept(
        self, process: Process, runs: list[ClaimedRun], *, is_read_back: bool = False
    ) -> None:
        for run in runs:
            assert run.run_id not in process.owned, "a node has two attempts of one run"
            newest = self.tokens[run.schedule_id]
            # What is read back was claimed before, and others may have claimed since.
            assert is_read_back or run.fencing_token > newest, "an old fencing token"
            self.tokens[run.schedule_id] = max(newest, run.fencing_token)
            process.owned[run.run_id] = run
            if run.state == Run.State.RUNNING:
                self.job_begins(process, run)
            else:
                process.ready.append(run.run_id)

    def job_begins(self, process: Process, run: ClaimedRun) -> None:
        process.executing.append(run.run_id)
        begun = self.begun[run.run_id] = self.begun.get(run.run_id, 0) + 1
        may = 1 + self.granted.get(run.run_id, 0)
        assert begun <= may, f"run {run.run_id} ({run.delivery}) begins {begun} times, not {may}"

    def grant(self, run_ids: Any) -> None:
        """The job may begin once more: something said so, and the run is queued for it."""
        for run in Run.objects.filter(pk__in=list(run_ids), attempt__gt=0):
            self.granted[run.pk] = run.attempt

    def report(self, report: Finished) -> None:
        before = Run.objects.filter(pk=report.run_id).first()
        result = lifecycle.finish([report])
        owns = before is not None and (before.fencing_token, before.owner_token) == (
            report.fencing_token,
            report.owner_token,
        )
        is_taken = report.run_id not in result.rejected
        assert not is_taken or owns, "a report of somebody else was taken"
        if is_taken and before is not None and before.state == Run.State.LOST:
            self.reopened.add(report.run_id)
        self.grant(result.retried)

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def the_promises_hold(self) -> None:
        runs = list(Run.objects.filter(schedule__in=self.schedules))
        schedules = list(Schedule.objects.filter(pk__in=self.schedules))
        self.states_change_as_the_table_says(runs)
        self.attempts_are_within_their_number(runs)
        self.one_attempt_at_most_may_write(runs)
        for schedule in schedules:
            own = [run for run in runs if run.schedule_id == schedule.pk]
            self.every_instant_has_its_row(schedule, own)
            self.no_more_runs_are_active_than_may_be(schedule, own)
            assert schedule.fencing_token >= self.tokens[schedule.pk]

    def states_change_as_the_table_says(self, runs: list[Run]) -> None:
        now = {run.pk: str(run.state) for run in runs}
        for pk, state in self.states.items():
            if pk not in now:
                assert self.may_prune, f"run {pk} is gone"
                assert state in FINAL, f"run {pk} was {state} when it was pruned"
            elif now[pk] != state:
                assert now[pk] in _reachable(state), f"run {pk}: {state} to {now[pk]}"
                assert state not in FINAL or pk in self.reopened, f"run {pk} was {state}"
        self.states, self.may_prune = now, False
        self.reopened.clear()

    def attempts_are_within_their_number(self, runs: list[Run]) -> None:
        for run in runs:
            repeats = run.delivery in Schedule.REPEATING_DELIVERIES
            assert run.recoveries <= repeats
            assert run.attempt <= 1 + self.granted.get(run.pk, 0)

    def one_attempt_at_most_may_write(self, runs: list[Run]) -> None:
        states = (*Run.ACTIVE_STATES, Run.State.LOST)
        tokens = {
            run.pk: (run.fencing_token, run.owner_token) for run in runs if run.state in states
        }
        owners = [
            run_id
            for process in self.processes
            for run_id, run in process.owned.items()
            if tokens.get(run_id) == (run.fencing_token, run.owner_token)
        ]
        assert len(owners) == len(set(owners))

    def every_instant_has_its_row(self, schedule: Schedule, runs: list[Run]) -> None:
        decided = self.decided[schedule.pk]
        for run in runs:
            if run.pk not in self.looked_at:
                self.looked_at.add(run.pk)
                decided |= {at + self.moved for at in _instants(schedule, run)}
        since = self.since.get(schedule.pk)
        if schedule.next_run_at is None or since is None:
            return
        for at in _between(schedule, since - self.moved, schedule.next_run_at):
            assert at + self.moved in decided, f"{at} of {schedule.key} left no row"
        # What is before that is settled; pruned rows are remembered.
        self.since[schedule.pk] = schedule.next_run_at - _TICK + self.moved

    def no_more_runs_are_active_than_may_be(self, schedule: Schedule, runs: list[Run]) -> None:
        active = [
            run
            for run in runs
            if run.state in Run.ACTIVE_STATES or (run.state == Run.State.QUEUED and run.attempt)
        ]
        limit = schedule.active_limit
        assert limit is None or len(active) <= limit, f"{active} active of {schedule.overlap}"

    def drain(self) -> None:
        """Nothing fails any more: what is open comes to its end."""
        for pk in self.schedules:
            operations.pause([Schedule.objects.get(pk=pk)], reason="the end", **WHO)
        for process in self.processes:
            self.expire_lease(process)
        self.processes = [Process(self.backend, self.clock)]
        for _ in range(60):
            if not Run.objects.open().exists():
                return
            self.time_passes(20)
            self.sweep(0)
            self.tick(0, 4, starts=True)
            for _ in range(4):
                self.job_ends(0, 0, "succeeded")
        rows = list(Run.objects.open().values_list("pk", "state", "reason", "attempt", "due_at"))
        raise AssertionError(f"never ends: {rows}")


def _move(model: type[models.Model], by: timedelta) -> None:
    """Move every instant of the rows back, also those inside of a run's details."""
    fields = [
        field
        for field in model._meta.concrete_fields
        if isinstance(field, models.DateTimeField) or field.name == "details"
    ]
    # The oldest first: an instant goes where another one has just been.
    order = "scheduled_at" if model is Run else "pk"
    rows: models.QuerySet[Any] = models.QuerySet(model)
    names = [field.attname for field in fields]
    changed = [
        [
            field.get_db_prep_save(_moved(value, by), connection)
            for field, value in zip(fields, values, strict=True)
        ]
        + [model._meta.pk.get_db_prep_save(pk, connection)]
        for pk, *values in rows.order_by(order).values_list("pk", *names)
    ]
    columns = ", ".join(f"{field.column} = %s" for field in fields)
    with connection.cursor() as cursor:
        cursor.executemany(f"UPDATE {model._meta.db_table} SET {columns} WHERE id = %s", changed)


def _moved(value: Any, by: timedelta) -> Any:
    if isinstance(value, datetime):
        return value - by
    if isinstance(value, dict) and "first_at" in value:
        ends = {name: datetime.fromisoformat(value[name]) - by for name in ("first_at", "last_at")}
        return value | {name: at.isoformat() for name, at in ends.items()}
    return value


def _earlier(decision: Decision, by: timedelta) -> Decision:
    at, then = decision.seen_next_run_at - by, decision.next_run_at
    return Decision(
        schedule_id=decision.schedule_id,
        version=decision.version,
        seen_next_run_at=at,
        next_run_at=None if then is None else then - by,
        owner_token=decision.owner_token,
        run_at=at,
    )


def _reachable(state: str) -> set[str]:
    """Return where a run may be after one step: it may be recovered and expire in the same."""
    once = lifecycle.TRANSITIONS[state]
    return set(once).union(*(lifecycle.TRANSITIONS[after] for after in once))


def _instants(schedule: Schedule, run: Run) -> list[datetime]:
    """Return the instants that a row stands for, which has just been written."""
    if run.scheduled_at is None:
        return []
    if not run.details or "count" not in run.details:
        return [run.scheduled_at]
    first, last = (datetime.fromisoformat(run.details[name]) for name in ("first_at", "last_at"))
    instants = [first, *_between(schedule, first, last), last]
    assert (run.scheduled_at, run.details["count"]) == (first, len(instants))
    return instants


def _between(schedule: Schedule, after: datetime, before: datetime) -> Iterator[datetime]:
    at = schedule.first_after(after)
    while at is not None and at < before:
        yield at
        at = schedule.first_after(at)


@pytest.mark.django_db
def test_whatever_happens_in_whichever_order_the_promises_hold() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            derandomize=not IS_DEEP,
            # Shrinking takes minutes: not where somebody waits for it.
            phases=[Phase.generate, Phase.shrink] if IS_DEEP else [Phase.generate],
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
