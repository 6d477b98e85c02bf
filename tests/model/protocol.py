"""The claim and recovery protocol as a model: nodes, the database, the locks, and what fails.

It follows ``dispatch``, ``lifecycle`` (claim, outcome, recovery, cancel, pruning), ``nodes``
and ``scheduler``: each step of a node here is one call there, and a node may stop for ever,
or for as long as others need to do anything, between any two of them. Each database
statement or transaction is one step, except for the claim, which checks, then writes and
then commits. Guards can be left out, to show what each is for.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from distcron_app import models
from distcron_app.lifecycle.values import TRANSITIONS
from tests.model.explorer import Step
from tests.model.world import (
    ACTIVE,
    OPEN,
    PLANTED,
    Claim,
    Owned,
    Past,
    Plan,
    Process,
    Row,
    Schedule,
    World,
    breaking,
    dropped,
    forget_lease,
    fresh_token,
    held,
    is_active,
    is_locked,
    is_of,
    is_settled,
    lock_row,
    node_name,
    owns,
    renamed,
    row_of,
    rows_of,
    run_name,
    unlock,
    with_past,
    with_phase,
    with_process,
    with_row,
    with_schedule,
)

MAX_RECOVERIES: int = models.Schedule._meta.get_field("max_recoveries").default

__all__ = ["FAULTS", "GUARDS", "Protocol", "World"]

_OUTCOMES = ("succeeded", "failed", "cancelled")
# What may happen as often as the bound of the exploration allows.
FAULTS = frozenset(
    {
        "crash",  # a process ends between any two steps; its jobs end with it
        "slow",  # a node's lease expires although it lives: a pause, a partition
        "unanswered",  # the answer to a COMMIT is lost: done, not done, or done later
        "worker",  # the worker process of a job dies
        "edit",  # a person edits the schedule
        "edit_back",  # next_run_at goes back to the newest instant, written past the model
        "release",  # a person releases the lock of the schedule
        "cancel",  # a person cancels a run
        "again",  # a person runs one again that is lost, failed or cancelled
        "plant",  # somebody writes a lock without TTL
        "give_back",  # maintenance: what is claimed and not started goes back
    }
)
# What can be taken out of the protocol.
GUARDS = frozenset(
    {
        "unique row",
        "compare-and-set of next_run_at",
        "one transaction for next_run_at and row",
        "compare-and-set of the start",
        "tokens at the start",
        "lease at the start",
        "tokens at the finish",
        "state at the finish",
        "owner token at the release",
        "dead node before recovery",
        "delivery at the recovery",
        "limit of recoveries",
        "overlap",
        "recovery",
        "strays",
        "read back",
        "new instants only",
        "backstop",
        "growing fencing token",
    }
)


@dataclasses.dataclass(slots=True, kw_only=True)
class Protocol:
    """The protocol with ``without`` some of its guards, and what it has to live with."""

    processes: int = 2
    schedules: int = 1
    occurrences: int = 1
    delivery: str = "at_most_once"
    max_attempts: int = 1
    faults: int = 2
    kinds: frozenset[str] = frozenset({"crash", "slow", "unanswered"})
    # "fails": at any moment keys vanish (TTL, eviction, FLUSHALL) and it does not answer.
    # "away": it never answers, so that whatever the database allows happens.
    redis: str = "fails"
    prunes: bool = False
    without: frozenset[str] = frozenset()
    # Of the invariants only this one, where another one breaks earlier.
    only: str = ""
    # Each (state, state) that was written.
    written: set[tuple[str, str]] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        unknown = (self.without - GUARDS) | (self.kinds - FAULTS)
        if unknown:
            raise ValueError(f"unknown: {sorted(unknown)}")

    def initial(self) -> World:
        none: tuple[Row | None, ...] = ()
        return World(
            now=0,
            schedules=(Schedule(),) * self.schedules,
            runs=((none,) * self.occurrences,) * self.schedules,
            processes=(Process(),) * self.processes,
            past=((Past(),) * self.occurrences,) * self.schedules,
            faults=self.faults,
        )

    def is_end(self, world: World) -> bool:
        """Return True where every occurrence was due and decided, and nothing is open."""
        return world.now == self.occurrences and all(
            schedule.next == self.occurrences
            and schedule.claim is None
            and all(row is None or row.state not in OPEN for _, _, row in rows_of(world, number))
            for number, schedule in enumerate(world.schedules)
        )

    def steps(self, world: World) -> Iterator[Step[World]]:
        """Yield what may happen next."""
        if world.now < self.occurrences:
            yield Step(f"instant {world.now} comes", False, world._replace(now=world.now + 1))
        for number, process in enumerate(world.processes):
            if process.up:
                yield from self._loop(world, number, process)
                for owned in process.owned:
                    yield from self._owned(world, number, process, owned)
                yield from self._node(world, number, process)
            elif process.leases[-1] == "alive":
                yield self._lease_ends(world, number, is_fault=False)
        for number, schedule in enumerate(world.schedules):
            yield from self._database(world, number, schedule)
            yield from self._lock(world, number, schedule)
            if self.prunes:
                yield from self._prune(world, number, schedule)
        yield from self._sweep(world)
        if world.faults:
            yield from self._people(world)

    def twins(self, world: World) -> Iterator[World]:
        """Yield the same world with the processes under other names."""
        for order in list(itertools.permutations(range(self.processes)))[1:]:
            yield renamed(world, order)

    # --- the loop of a node: dispatch.py ------------------------------------------------

    def _loop(self, world: World, number: int, process: Process) -> Iterator[Step[World]]:
        plan = process.plan
        if plan is None:
            yield from self._read(world, number, process)
        elif plan.stage == "read":
            yield from self._acquire(world, number, process, plan)
        elif plan.stage == "asked":
            yield self._begin_claim(world, number, process, plan)
        elif plan.stage == "open":
            yield from self._commit(world, number, process, plan)
        elif plan.stage == "unanswered":
            yield self._settle_claim(world, number, process, plan)
        else:
            for how, after in self._let_go(world, plan.schedule, plan.token, plan.lease):
                yield Step(
                    f"{node_name(number)} lets its lock go{how}",
                    False,
                    with_process(after, number, process._replace(plan=None)),
                )

    def _read(self, world: World, number: int, process: Process) -> Iterator[Step[World]]:
        here = {owned.schedule for owned in process.owned}
        known = {owned[:3] for owned in process.owned}
        name = node_name(number)
        for place, schedule in enumerate(world.schedules):
            if schedule.next < world.now:
                plan = Plan("read", place, "due", schedule.next, version=schedule.version)
                yield Step(
                    f"{name} reads that {run_name(world, place, schedule.next)} is due",
                    False,
                    with_process(world, number, process._replace(plan=plan)),
                )
            for occurrence, index, row in rows_of(world, place):
                if row is None or row.state != "queued" or place in here:
                    continue
                if (place, occurrence, index) not in known:
                    plan = Plan("read", place, "queued", occurrence, index)
                    yield Step(
                        f"{name} reads that {run_name(world, place, occurrence)} is queued",
                        False,
                        with_process(world, number, process._replace(plan=plan)),
                    )

    def _acquire(
        self, world: World, number: int, process: Process, plan: Plan
    ) -> Iterator[Step[World]]:
        schedule = world.schedules[plan.schedule]
        token = fresh_token(world, number)
        asked = plan._replace(stage="asked", token=token)
        if any(owned.schedule == plan.schedule for owned in process.owned):
            # Its own run is active: nobody else decides what overlaps it.
            yield Step(
                f"{node_name(number)} holds the schedule already",
                False,
                with_process(world, number, process._replace(plan=asked)),
            )
            return
        if self.redis == "away":
            yield Step(
                f"{node_name(number)} finds no Redis",
                False,
                with_process(world, number, process._replace(plan=asked)),
            )
            return
        if schedule.key == 0:
            locked = with_schedule(world, plan.schedule, schedule._replace(key=token))
            held = process._replace(plan=asked._replace(lease="held"))
            yield Step(
                f"{node_name(number)} wins the lock", False, with_process(locked, number, held)
            )
        else:
            yield Step(
                f"{node_name(number)} loses at the lock and stands back",
                False,
                with_process(world, number, process._replace(plan=None)),
            )
        if (schedule.key and not self._lacks("backstop")) or self.redis == "fails":
            why = "is so late that it ignores the lock" if schedule.key else "finds no Redis"
            yield Step(
                f"{node_name(number)} {why}",
                False,
                with_process(world, number, process._replace(plan=asked)),
            )

    def _begin_claim(self, world: World, number: int, process: Process, plan: Plan) -> Step[World]:
        schedule = world.schedules[plan.schedule]
        outcome = ""
        if schedule.claim is None and process.leases[-1] == "alive":
            outcome = self._decided(world, process, plan)
        if not outcome:
            after = process._replace(plan=dropped(plan))
            return Step(
                f"{node_name(number)} is refused the claim",
                False,
                with_process(world, number, after),
            )
        claim = Claim(
            number, process.life, plan.token, plan.kind, plan.occurrence, plan.row, outcome
        )
        moved = schedule._replace(claim=claim)
        if "one transaction for next_run_at and row" in self.without and plan.kind == "due":
            moved = moved._replace(next=plan.occurrence + 1)
        opened = process._replace(plan=plan._replace(stage="open"))
        run = run_name(world, plan.schedule, plan.occurrence)
        return Step(
            f"{node_name(number)} writes the claim of {run} ({outcome})",
            False,
            with_process(with_schedule(world, plan.schedule, moved), number, opened),
        )

    def _decided(self, world: World, process: Process, plan: Plan) -> str:
        """Return what the claim writes under the schedule's row lock; "" where it is refused."""
        schedule = world.schedules[plan.schedule]
        rows = world.runs[plan.schedule][plan.occurrence]
        active = [
            (occurrence, index)
            for occurrence, index, row in rows_of(world, plan.schedule)
            if is_active(row)
        ]
        if "overlap" in self.without:
            active = []
        if plan.kind == "queued":
            row = rows[plan.row]
            if row is None or row.state != "queued":
                return ""
            others = [each for each in active if each != (plan.occurrence, plan.row)]
            return "" if others else "claim"
        has_moved = schedule.next != plan.occurrence
        if "compare-and-set of next_run_at" in self.without:
            has_moved = False
        if has_moved or schedule.version != plan.version:
            return ""
        if any(row is not None for row in rows) and "unique row" not in self.without:
            return "nothing, the row is there"
        return "skip" if active else "claim"

    def _commit(
        self, world: World, number: int, process: Process, plan: Plan
    ) -> Iterator[Step[World]]:
        name = node_name(number)
        applied, taken = self._land(world, plan.schedule)
        if taken is None:
            after = process._replace(plan=dropped(plan))
        else:
            after = process._replace(
                plan=None, owned=(*process.owned, taken._replace(lease=plan.lease))
            )
        yield Step(f"{name} commits", False, with_process(applied, number, after))
        if not self._may(world, "unanswered"):
            return
        waiting = process._replace(plan=plan._replace(stage="unanswered"))
        paid = world._replace(faults=world.faults - 1)
        applied, _ = self._land(paid, plan.schedule)
        schedule = paid.schedules[plan.schedule]
        assert schedule.claim is not None
        rolled_back = with_schedule(paid, plan.schedule, schedule._replace(claim=None))
        sent = schedule._replace(claim=schedule.claim._replace(sent=True))
        in_flight = with_schedule(paid, plan.schedule, sent)
        for how, ended in (
            ("commits, and the answer is lost", applied),
            ("loses its link before the commit", rolled_back),
            ("loses its link, and the commit is on its way", in_flight),
        ):
            yield Step(f"{name} {how}", True, with_process(ended, number, waiting))

    def _land(self, world: World, place: int) -> tuple[World, Owned | None]:
        """Apply the open claim of a schedule; return what its node owns by it, or None."""
        schedule = world.schedules[place]
        claim = schedule.claim
        assert claim is not None
        fencing = schedule.fencing + (not self._lacks("growing fencing token"))
        moved = schedule._replace(claim=None, fencing=fencing)
        if claim.kind == "due":
            moved = moved._replace(next=claim.occurrence + 1)
        world = with_schedule(world, place, moved)
        rows = world.runs[place][claim.occurrence]
        index = claim.row if claim.kind == "queued" else len(rows)
        owner = (claim.process, claim.life)
        if claim.outcome == "skip":
            return self._write(world, (place, claim.occurrence, index), Row("skipped")), None
        if claim.outcome != "claim":
            return world, None
        old = rows[index] if claim.kind == "queued" else Row("")
        assert old is not None
        starts = claim.kind == "due" and self.delivery == "at_least_once"
        new = old._replace(
            state="running" if starts else "claimed",
            owner=owner,
            token=claim.token,
            fencing=fencing,
            attempt=old.attempt + starts,
        )
        world = self._write(world, (place, claim.occurrence, index), new)
        if starts:
            world = self._started(world, place, fencing)
        phase = "started" if starts else "ready"
        return world, Owned(place, claim.occurrence, index, fencing, claim.token, "", phase)

    def _settle_claim(self, world: World, number: int, process: Process, plan: Plan) -> Step[World]:
        """Read back by token, as after a COMMIT that was not answered."""
        found = [
            Owned(
                plan.schedule,
                occurrence,
                index,
                row.fencing,
                plan.token,
                plan.lease,
                "ready" if row.state == "claimed" else "started",
            )
            for occurrence, index, row in rows_of(world, plan.schedule)
            if is_of(row, (number, process.life), plan.token)
            and row is not None
            and row.state in ACTIVE
        ]
        if not found and self._lacks("read back"):
            phase = "started" if self.delivery == "at_least_once" else "ready"
            place, fencing = plan.schedule, world.schedules[plan.schedule].fencing + 1
            lease = plan.lease
            found = [Owned(place, plan.occurrence, plan.row, fencing, plan.token, lease, phase)]
        if found:
            after = process._replace(plan=None, owned=(*process.owned, *found))
            return Step(
                f"{node_name(number)} reads its claim back",
                False,
                with_process(world, number, after),
            )
        after = process._replace(plan=dropped(plan))
        return Step(
            f"{node_name(number)} does not find its claim",
            False,
            with_process(world, number, after),
        )

    # --- a run that a node has: scheduler.py, lifecycle/outcome.py ------------------------

    def _owned(
        self, world: World, number: int, process: Process, owned: Owned
    ) -> Iterator[Step[World]]:
        name = f"{node_name(number)}{'' if len(process.leases) == 1 else ' (again)'}"
        run = run_name(world, owned.schedule, owned.occurrence)
        row = row_of(world, owned)

        def become(phase: str, world: World = world) -> World:
            return with_process(world, number, with_phase(process, owned, phase))

        if owned.phase == "ready":
            yield from self._start(world, number, process, owned)
        elif owned.phase == "starting":
            is_there = is_of(row, (number, process.life), owned.token)
            if is_there and row is not None and row.state in ACTIVE:
                phase = "ready" if row.state == "claimed" else "started"
                yield Step(f"{name} reads back that {run} is {row.state}", False, become(phase))
            else:
                yield Step(f"{name} does not find {run} any more", False, become("letting go"))
        elif owned.phase == "started":
            past = world.past[owned.schedule][owned.occurrence]
            begun = with_past(world, owned, past._replace(begun=past.begun + 1))
            if not world.runs[owned.schedule][owned.occurrence]:
                begun = breaking(begun, "no job begins without its row")
            yield Step(f"the job of {run} begins on {name}", False, become("executing", begun))
        elif owned.phase == "executing":
            yield Step(f"the job of {run} ends on {name}", False, become("succeeded"))
            if row is not None and row.stop and owns(row, owned):
                yield Step(f"the job of {run} stops on {name}", False, become("cancelled"))
            if self.max_attempts > 1:
                yield Step(f"the job of {run} fails on {name}", False, become("failed"))
            if self._may(world, "worker"):
                paid = world._replace(faults=world.faults - 1)
                done = self._settle_if_owned(paid, owned)
                yield Step(f"the worker of {run} dies on {name}", True, become("letting go", done))
                yield Step(
                    f"the worker of {run} dies on {name}, which cannot write it",
                    True,
                    become("letting go", paid),
                )
        elif owned.phase in _OUTCOMES:
            done, how = self._finish(world, owned)
            yield Step(f"{name} reports {run}: {how}", False, become("letting go", done))
            if self._may(world, "unanswered"):
                paid = done._replace(faults=done.faults - 1)
                yield Step(
                    f"{name} reports {run}: {how}, the answer is lost",
                    True,
                    with_process(paid, number, process),
                )
        else:
            rest = tuple(each for each in process.owned if each != owned)
            for how, after in self._let_go(world, owned.schedule, owned.token, owned.lease):
                yield Step(
                    f"{name} forgets {run}{how}",
                    False,
                    with_process(after, number, process._replace(owned=rest)),
                )

    def _start(
        self, world: World, number: int, process: Process, owned: Owned
    ) -> Iterator[Step[World]]:
        name, run = node_name(number), run_name(world, owned.schedule, owned.occurrence)
        row = row_of(world, owned)

        def become(phase: str, world: World) -> World:
            return with_process(world, number, with_phase(process, owned, phase))

        if is_locked(world, owned[:3]):
            return  # it waits
        if not self._may_start(process, owned, row):
            yield Step(f"{name} is refused the start of {run}", False, become("letting go", world))
            return
        started = self._start_row(world, owned)
        if process.leases[-1] == "dead":
            started = breaking(started, "a node that was declared dead starts nothing")
        yield Step(f"{name} commits the start of {run}", False, become("started", started))
        if self._may(world, "unanswered"):
            paid = world._replace(faults=world.faults - 1)
            started = started._replace(faults=paid.faults)
            key = (owned.schedule, owned.occurrence, owned.row)
            for how, after in (
                ("the answer is lost", started),
                ("the link breaks before", paid),
                ("the commit is on its way", lock_row(paid, key)),
            ):
                label = f"{name} sends the start of {run}, {how}"
                yield Step(label, True, become("starting", after))
        if self._may(world, "give_back"):
            paid = world._replace(faults=world.faults - 1)
            assert row is not None
            back = row
            if owns(row, owned) and row.state == "claimed":
                back = row._replace(state="queued", owner=None, token=0)
                paid = self._write(paid, (owned.schedule, owned.occurrence, owned.row), back)
            yield Step(f"{name} gives {run} back", True, become("letting go", paid))

    def _may_start(self, process: Process, owned: Owned, row: Row | None) -> bool:
        if row is None or (process.leases[-1] != "alive" and not self._lacks("lease at the start")):
            return False
        if self._lacks("compare-and-set of the start"):
            return True
        is_ours = owns(row, owned) or self._lacks("tokens at the start")
        return row.state == "claimed" and is_ours

    def _start_row(self, world: World, owned: Owned) -> World:
        key = (owned.schedule, owned.occurrence, owned.row)
        row = row_of(world, owned)
        assert row is not None
        fencing = row.fencing
        row = row._replace(state="running", attempt=row.attempt + 1, starting=False)
        world = self._started(self._write(world, key, row), owned.schedule, fencing)
        if not owns(row, owned):
            world = breaking(world, "only the owner of a claim starts it")
        return world

    def _started(self, world: World, place: int, fencing: int) -> World:
        schedule = world.schedules[place]
        if fencing <= schedule.last_started:
            world = breaking(world, "fencing tokens grow from start to start")
        return with_schedule(world, place, schedule._replace(last_started=fencing))

    def _finish(self, world: World, owned: Owned) -> tuple[World, str]:
        key = (owned.schedule, owned.occurrence, owned.row)
        row = row_of(world, owned)
        if not self._accepts(owned, row):
            return world, "refused"
        assert row is not None
        used = row.attempt - row.recoveries
        may_repeat = used < self.max_attempts and not row.stop and row.state == "running"
        if owned.phase == "failed" and may_repeat:
            retried = row._replace(state="queued", owner=None, token=0)
            return self._write(world, key, retried), "failed, to be tried again"
        late = ", late" if row.state == "lost" else ""
        is_owner = owns(row, owned)
        world = self._write(world, key, row._replace(state=owned.phase), is_owner=is_owner)
        if not is_owner:
            world = breaking(world, "only the owner of a run settles it")
        return world, f"{owned.phase}{late}"

    def _accepts(self, owned: Owned, row: Row | None) -> bool:
        """Return True where a report of ``owned`` would change the run."""
        if row is None:
            return False
        if row.state not in ("running", "lost") and not self._lacks("state at the finish"):
            return False
        return owns(row, owned) or self._lacks("tokens at the finish")

    def _settle_if_owned(self, world: World, owned: Owned) -> World:
        """A worker died and its node lives: ``recover_owned``."""
        key = (owned.schedule, owned.occurrence, owned.row)
        row = row_of(world, owned)
        if row is None or row.state != "running" or not owns(row, owned):
            return world
        return self._write(world, key, self._recovered(row, unknown="failed"))

    # --- membership: nodes.py, keeper.py ---------------------------------------------------

    def _node(self, world: World, number: int, process: Process) -> Iterator[Step[World]]:
        name, lease = node_name(number), process.leases[-1]
        if lease == "alive" and self._may(world, "slow"):
            yield self._lease_ends(world._replace(faults=world.faults - 1), number, is_fault=True)
        elif lease == "expired":
            renewed = process._replace(leases=(*process.leases[:-1], "alive"))
            yield Step(f"{name} renews its lease", False, with_process(world, number, renewed))
        elif lease == "dead" and is_settled(process):
            anew = process._replace(leases=(*process.leases, "alive"))
            for owned in process.owned:
                if owned.phase == "ready":
                    anew = with_phase(anew, owned, "letting go")
            yield Step(f"{name} goes on under a new id", False, with_process(world, number, anew))
        if self._may(world, "crash") and self._has_other(world, number):
            yield from self._crash(world._replace(faults=world.faults - 1), number, process)
        for owned in process.owned:
            schedule = world.schedules[owned.schedule]
            is_missing = schedule.key == 0 and owned.lease != "held" and self.redis != "away"
            if is_missing and owned.phase != "letting go":
                held = tuple(
                    each._replace(lease="held") if each == owned else each for each in process.owned
                )
                locked = with_schedule(world, owned.schedule, schedule._replace(key=owned.token))
                yield Step(
                    f"{name} takes the missing lock again",
                    False,
                    with_process(locked, number, process._replace(owned=held)),
                )

    def _lease_ends(self, world: World, number: int, *, is_fault: bool) -> Step[World]:
        process = world.processes[number]
        late = process._replace(leases=(*process.leases[:-1], "expired"))
        return Step(
            f"the lease of {node_name(number)} expires", is_fault, with_process(world, number, late)
        )

    def _crash(self, world: World, number: int, process: Process) -> Iterator[Step[World]]:
        gone = with_process(world, number, process._replace(up=False, plan=None, owned=()))
        if process.plan is None or process.plan.stage != "open":
            yield Step(f"{node_name(number)} crashes", True, gone)
            return
        place = process.plan.schedule
        schedule = gone.schedules[place]
        assert schedule.claim is not None
        rolled_back = with_schedule(gone, place, schedule._replace(claim=None))
        yield Step(f"{node_name(number)} crashes before its commit", True, rolled_back)
        sent = schedule._replace(claim=schedule.claim._replace(sent=True))
        yield Step(
            f"{node_name(number)} crashes, its commit is on its way",
            True,
            with_schedule(gone, place, sent),
        )

    def _has_other(self, world: World, number: int) -> bool:
        return any(process.up for other, process in enumerate(world.processes) if other != number)

    # --- the sweep: maintenance.py, lifecycle/recovery.py ---------------------------------

    def _sweep(self, world: World) -> Iterator[Step[World]]:
        for number, process in enumerate(world.processes):
            for life, lease in enumerate(process.leases):
                if lease == "expired":
                    leases = (*process.leases[:life], "dead", *process.leases[life + 1 :])
                    yield Step(
                        f"{node_name(number)} is declared dead",
                        False,
                        with_process(world, number, process._replace(leases=leases)),
                    )
        for place in range(self.schedules):
            for occurrence, index, row in rows_of(world, place):
                if row is None or row.state not in ACTIVE or row.owner is None or row.starting:
                    continue
                number, life = row.owner
                is_dead = world.processes[number].leases[life] == "dead"
                if (is_dead and not self._lacks("recovery")) or self._lacks(
                    "dead node before recovery"
                ):
                    yield self._recover(world, (place, occurrence, index), row)
                process = world.processes[number]
                known = {owned[:3] for owned in process.owned}
                if (
                    process.up
                    and life == process.life
                    and is_settled(process)
                    and (place, occurrence, index) not in known
                    and not self._lacks("strays")
                ):
                    recovered = self._recovered(row, unknown="lost")
                    yield Step(
                        f"{node_name(number)} finds {run_name(world, place, occurrence)} astray"
                        f" ({recovered.state})",
                        False,
                        self._write(world, (place, occurrence, index), recovered),
                    )

    def _recover(self, world: World, key: tuple[int, int, int], row: Row) -> Step[World]:
        recovered = self._recovered(row, unknown="lost")
        return Step(
            f"{run_name(world, key[0], key[1])} is recovered ({recovered.state})",
            False,
            self._write(world, key, recovered),
        )

    def _recovered(self, row: Row, *, unknown: str) -> Row:
        """What becomes of a run that is taken from its node: ``_settle``."""
        if row.state == "claimed":
            return row._replace(state="queued", owner=None, token=0)
        may_repeat = self.delivery == "at_least_once" and not row.stop
        if self._lacks("delivery at the recovery"):
            may_repeat = True
        if may_repeat and (row.recoveries < MAX_RECOVERIES or self._lacks("limit of recoveries")):
            return row._replace(state="queued", owner=None, token=0, recoveries=row.recoveries + 1)
        return row._replace(state=unknown)

    # --- the database and the locks --------------------------------------------------------

    def _database(self, world: World, place: int, schedule: Schedule) -> Iterator[Step[World]]:
        """A COMMIT that nobody waits for any more lands, or is rolled back."""
        claim = schedule.claim
        if claim is not None and claim.sent:
            landed, _ = self._land(world, place)
            yield Step(f"the commit of {node_name(claim.process)} lands", False, landed)
            yield Step(
                f"the commit of {node_name(claim.process)} is rolled back",
                False,
                with_schedule(world, place, schedule._replace(claim=None)),
            )
        for occurrence, index, row in rows_of(world, place):
            if row is not None and row.starting:
                key = (place, occurrence, index)
                owned = Owned(*key, row.fencing, row.token, "", "starting")
                landed = self._start_row(lock_row(world, key, False), owned)
                name = run_name(world, place, occurrence)
                yield Step(f"the start of {name} lands", False, landed)
                back = lock_row(world, key, False)
                yield Step(f"the start of {name} is rolled back", False, back)

    def _lock(self, world: World, place: int, schedule: Schedule) -> Iterator[Step[World]]:
        if schedule.key == 0:
            return
        is_held = schedule.key == PLANTED or any(
            schedule.key in held(process, place) for process in world.processes
        )
        if is_held and self.redis == "steady":
            return
        # TTL, eviction, FLUSHALL; the TTL of a lock that nobody renews ends for certain.
        yield Step("the lock vanishes", is_held, unlock(world, place))

    def _let_go(
        self, world: World, place: int, token: int, lease: str
    ) -> Iterator[tuple[str, World]]:
        """End a lock by comparing the owner token; or Redis is away, and its TTL does it."""
        schedule = world.schedules[place]
        if not lease or schedule.key == 0:
            yield "", world
            return
        if schedule.key != token and not self._lacks("owner token at the release"):
            yield ", the lock is another one's", world
            return
        released = with_schedule(world, place, schedule._replace(key=0))
        if schedule.key != token:
            released = breaking(released, "a lock is ended by its owner alone")
        yield "", released
        if self.redis == "fails":
            yield ", the lock stays", forget_lease(world, place, token)

    def _prune(self, world: World, place: int, schedule: Schedule) -> Iterator[Step[World]]:
        """Delete what ended, before next_run_at, and is not the newest instant."""
        newest = max(
            (occurrence for occurrence, _, row in rows_of(world, place) if row is not None),
            default=-1,
        )
        for occurrence, index, row in rows_of(world, place):
            is_over = row is not None and row.state not in OPEN
            limit = self.occurrences if self._lacks("new instants only") else schedule.next
            is_old = occurrence < newest or self._lacks("new instants only")
            if is_over and occurrence < limit and is_old:
                yield Step(
                    f"{run_name(world, place, occurrence)} is pruned",
                    False,
                    with_row(world, (place, occurrence, index), None),
                )

    # --- people ------------------------------------------------------------------------------

    def _people(self, world: World) -> Iterator[Step[World]]:
        world = world._replace(faults=world.faults - 1)
        for place, schedule in enumerate(world.schedules):
            if "plant" in self.kinds:
                planted = with_schedule(world, place, schedule._replace(key=PLANTED))
                if schedule.key == 0:
                    yield Step("somebody plants a lock", True, planted)
            if schedule.claim is None:  # else they wait for its row lock
                yield from self._person_on_schedule(world, place, schedule)
            for occurrence, index, row in rows_of(world, place):
                if row is not None and not is_locked(world, (place, occurrence, index)):
                    yield from self._person_on_run(world, (place, occurrence, index), row)

    def _person_on_schedule(
        self, world: World, place: int, schedule: Schedule
    ) -> Iterator[Step[World]]:
        if "edit" in self.kinds:
            edited = schedule._replace(version=schedule.version + 1)
            yield Step("a person edits", True, with_schedule(world, place, edited))
        if "edit_back" in self.kinds:
            there = [at for at, _, row in rows_of(world, place) if row is not None]
            if self._lacks("new instants only"):
                there = list(range(schedule.next))
            if there and max(there) < schedule.next:
                back = schedule._replace(next=max(there))
                label = f"next_run_at goes back to {run_name(world, place, max(there))}"
                yield Step(label, True, with_schedule(world, place, back))
        if "release" in self.kinds:
            yield from self._release(world, place, schedule)

    def _release(self, world: World, place: int, schedule: Schedule) -> Iterator[Step[World]]:
        fencing = schedule.fencing + 1
        after = with_schedule(world, place, schedule._replace(fencing=fencing))
        for occurrence, index, row in rows_of(world, place):
            if row is None or row.state not in ACTIVE:
                continue
            if row.starting:
                return
            taken = self._recovered(row, unknown="lost")
            if taken.state == "lost":
                taken = taken._replace(token=0, fencing=fencing)
            after = self._write(after, (place, occurrence, index), taken)
        yield Step("a person releases the lock", True, unlock(after, place))
        if schedule.key and self.redis == "fails":
            yield Step("a person releases the lock, Redis does not answer", True, after)

    def _person_on_run(
        self, world: World, key: tuple[int, int, int], row: Row
    ) -> Iterator[Step[World]]:
        run = run_name(world, key[0], key[1])
        if "cancel" in self.kinds and row.state in ("queued", "claimed"):
            cancelled = row._replace(state="cancelled", token=0)
            yield Step(f"a person cancels {run}", True, self._write(world, key, cancelled))
        if "cancel" in self.kinds and row.state == "running" and not row.stop:
            asked = with_row(world, key, row._replace(stop=True))
            yield Step(f"a person asks {run} to stop", True, asked)
        is_free = world.schedules[key[0]].claim is None and not any(
            is_active(other) for _, _, other in rows_of(world, key[0])
        )
        if "again" in self.kinds and row.state in ("failed", "cancelled", "lost") and is_free:
            past = world.past[key[0]][key[1]]
            again = row._replace(state="queued", owner=None, token=0, stop=False)
            after = self._write(world, key, again, is_person=True)
            owned = Owned(*key, 0, 0, "", "")
            after = with_past(after, owned, past._replace(again=past.again + 1))
            yield Step(f"a person runs {run} again", True, after)

    # --- invariants ----------------------------------------------------------------------------

    def broken(self, world: World) -> str:
        """Return which invariant does not hold, or ""."""
        for problem in self._problems(world):
            if self.only in ("", problem):
                return problem
        return ""

    def _problems(self, world: World) -> Iterator[str]:
        if world.broken:
            yield world.broken
        for place, schedule in enumerate(world.schedules):
            yield from self._problems_of(world, place, schedule)
        if world.faults == self.faults:
            for place in range(self.schedules):
                if any(row and row.state == "lost" for _, _, row in rows_of(world, place)):
                    yield "without a fault nothing is lost"

    def _problems_of(self, world: World, place: int, schedule: Schedule) -> Iterator[str]:
        rows = list(rows_of(world, place))
        if sum(is_active(row) for _, _, row in rows) > 1:
            same = len({occurrence for occurrence, _, row in rows if is_active(row)}) == 1
            beside = "never more active runs than the policy allows"
            yield "an occurrence has at most one claim" if same else beside
        for occurrence in range(schedule.next):
            if not world.runs[place][occurrence] and schedule.claim is None:
                yield "every instant that next_run_at has passed has its row"
        for occurrence, past in enumerate(world.past[place]):
            most = self.max_attempts + past.again
            if self.delivery == "at_least_once":
                most += MAX_RECOVERIES
            if past.begun > most:
                yield f"{self.delivery}: a job begins no more often than it may"
            if past.begun > 1 and world.faults == self.faults and self.max_attempts == 1:
                yield "without a fault a job begins once"
            if self._writers(world, place, occurrence) > 1:
                yield "at most one live attempt may still write"
        for process in world.processes:
            if any(token != schedule.key for token in held(process, place)):
                yield "a lock is ended by its owner alone"

    def _writers(self, world: World, place: int, occurrence: int) -> int:
        return sum(
            self._accepts(owned, row_of(world, owned))
            for process in world.processes
            for owned in process.owned
            if owned[:2] == (place, occurrence) and owned.phase in ("executing", *_OUTCOMES)
        )

    def _write(
        self,
        world: World,
        key: tuple[int, int, int],
        row: Row,
        *,
        is_owner: bool = False,
        is_person: bool = False,
    ) -> World:
        """Write a run; its change of state must be one that ``TRANSITIONS`` allows."""
        rows = world.runs[key[0]][key[1]]
        old = rows[key[2]] if key[2] < len(rows) else Row("")
        assert old is not None
        self.written.add((old.state, row.state))
        world = with_row(world, key, row)
        if row.state not in TRANSITIONS[old.state]:
            return breaking(world, f"{old.state} does not become {row.state}")
        if old.state not in ("", *OPEN) and not is_person:
            is_late_report = old.state == "lost" and is_owner
            if not is_late_report:
                return breaking(world, f"what is {old.state} stays so")
        return world

    def _may(self, world: World, kind: str) -> bool:
        return world.faults > 0 and kind in self.kinds

    def _lacks(self, guard: str) -> bool:
        return guard in self.without
