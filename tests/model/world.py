"""The state of the model: rows, locks and processes, and how one world becomes another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

__all__ = [
    "ACTIVE",
    "OPEN",
    "PLANTED",
    "Claim",
    "Owned",
    "Past",
    "Plan",
    "Process",
    "Row",
    "Schedule",
    "World",
    "breaking",
    "dropped",
    "forget_lease",
    "fresh_token",
    "held",
    "is_active",
    "is_locked",
    "is_of",
    "is_settled",
    "lock_row",
    "node_name",
    "owns",
    "renamed",
    "row_of",
    "rows_of",
    "run_name",
    "unlock",
    "with_past",
    "with_phase",
    "with_process",
    "with_row",
    "with_schedule",
]

# The tokens of each process are numbers of their own.
_TOKENS = 100
PLANTED = 1
ACTIVE = ("claimed", "running")
OPEN = ("queued", *ACTIVE)


class Row(NamedTuple):
    """A run; ``owner`` is (process, which of its lives), ``token`` 0 where there is none.

    ``starting`` while a start is committed whose COMMIT has not arrived: the row is locked.
    """

    state: str
    owner: tuple[int, int] | None = None
    token: int = 0
    fencing: int = 0
    attempt: int = 0
    recoveries: int = 0
    stop: bool = False
    starting: bool = False


class Claim(NamedTuple):
    """An open transaction that holds the schedule's row lock; ``sent`` once COMMIT is under way."""

    process: int
    life: int
    token: int
    kind: str
    occurrence: int
    row: int
    outcome: str
    sent: bool = False


class Schedule(NamedTuple):
    """A schedule's row, its lock's owner token (0: free), and what the invariants remember."""

    next: int = 0
    version: int = 0
    fencing: int = 0
    claim: Claim | None = None
    key: int = 0
    last_started: int = -1


class Plan(NamedTuple):
    """What the loop of a process is at; ``lease`` is "", "held" or "gone"."""

    stage: str
    schedule: int
    kind: str
    occurrence: int
    row: int = 0
    version: int = 0
    token: int = 0
    lease: str = ""


class Owned(NamedTuple):
    """A run that a process has, with the tokens of its claim."""

    schedule: int
    occurrence: int
    row: int
    fencing: int
    token: int
    lease: str
    phase: str


class Process(NamedTuple):
    """A ``runscheduler``: the leases of its node rows (the last one is its own), and its work."""

    up: bool = True
    leases: tuple[str, ...] = ("alive",)
    plan: Plan | None = None
    owned: tuple[Owned, ...] = ()

    @property
    def life(self) -> int:
        return len(self.leases) - 1


class Past(NamedTuple):
    """What happened to an occurrence: how often its job began, and a person asked again."""

    begun: int = 0
    again: int = 0


class World(NamedTuple):
    """Everything. Occurrences below ``now`` are due; ``broken`` names a broken invariant."""

    now: int
    schedules: tuple[Schedule, ...]
    runs: tuple[tuple[tuple[Row | None, ...], ...], ...]
    processes: tuple[Process, ...]
    past: tuple[tuple[Past, ...], ...]
    faults: int
    broken: str = ""


def rows_of(world: World, place: int) -> Iterator[tuple[int, int, Row | None]]:
    for occurrence, rows in enumerate(world.runs[place]):
        for index, row in enumerate(rows):
            yield occurrence, index, row


def is_active(row: Row | None) -> bool:
    """Return True for a run that keeps its schedule, also between two attempts."""
    if row is None:
        return False
    return row.state in ACTIVE or (row.state == "queued" and row.attempt > 0)


def owns(row: Row, owned: Owned) -> bool:
    return row.token == owned.token and row.fencing == owned.fencing


def is_of(row: Row | None, owner: tuple[int, int], token: int) -> bool:
    return row is not None and row.owner == owner and row.token == token


def is_locked(world: World, key: tuple[int, int, int]) -> bool:
    """Return True for a row that an open transaction has locked: writers wait for it."""
    row = world.runs[key[0]][key[1]][key[2]] if key[2] < len(world.runs[key[0]][key[1]]) else None
    claim = world.schedules[key[0]].claim
    is_claimed = (
        claim is not None and claim.kind == "queued" and (claim.occurrence, claim.row) == key[1:]
    )
    return is_claimed or (row is not None and row.starting)


def is_settled(process: Process) -> bool:
    """Return True where the loop waits for no answer and is in the middle of nothing."""
    return process.plan is None and not any(owned.phase == "starting" for owned in process.owned)


def held(process: Process, place: int) -> list[int]:
    """Return the owner tokens by which a live process rightly believes to hold the lock."""
    if not process.up:
        return []
    tokens = [
        owned.token for owned in process.owned if owned.schedule == place and owned.lease == "held"
    ]
    plan = process.plan
    if plan is not None and plan.schedule == place and plan.lease == "held":
        tokens.append(plan.token)
    return tokens


def dropped(plan: Plan) -> Plan | None:
    """Return what is left of a claim that came to nothing: a lock to let go, or nothing."""
    return plan._replace(stage="letting go") if plan.lease else None


def with_phase(process: Process, owned: Owned, phase: str) -> Process:
    """Return the process with the run in another phase; without it where no lock is left."""
    changed = (each._replace(phase=phase) if each == owned else each for each in process.owned)
    kept = tuple(each for each in changed if each.phase != "letting go" or each.lease)
    return process._replace(owned=kept)


def fresh_token(world: World, number: int) -> int:
    """Return a token that nothing refers to any more: as good as a random one."""
    used = {schedule.key for schedule in world.schedules}
    used |= {schedule.claim.token for schedule in world.schedules if schedule.claim}
    used |= {row.token for runs in world.runs for rows in runs for row in rows if row}
    used |= {owned.token for process in world.processes for owned in process.owned}
    used |= {process.plan.token for process in world.processes if process.plan}
    return next(token for token in itertools.count(_TOKENS * (number + 1)) if token not in used)


def node_name(number: int) -> str:
    return "ABC"[number]


def run_name(world: World, place: int, occurrence: int) -> str:
    prefix = "xy"[place] if len(world.schedules) > 1 else "run"
    return f"{prefix}{occurrence}"


def with_process(world: World, number: int, process: Process) -> World:
    before = world.processes
    return world._replace(processes=(*before[:number], process, *before[number + 1 :]))


def with_schedule(world: World, place: int, schedule: Schedule) -> World:
    before = world.schedules
    return world._replace(schedules=(*before[:place], schedule, *before[place + 1 :]))


def with_row(world: World, key: tuple[int, int, int], row: Row | None) -> World:
    place, occurrence, index = key
    runs = world.runs[place]
    rows = runs[occurrence]
    rows = (*rows[:index], row, *rows[index + 1 :])
    runs = (*runs[:occurrence], rows, *runs[occurrence + 1 :])
    return world._replace(runs=(*world.runs[:place], runs, *world.runs[place + 1 :]))


def with_past(world: World, owned: Owned, past: Past) -> World:
    of_schedule = world.past[owned.schedule]
    of_schedule = (
        *of_schedule[: owned.occurrence],
        past,
        *of_schedule[owned.occurrence + 1 :],
    )
    before = world.past
    return world._replace(
        past=(*before[: owned.schedule], of_schedule, *before[owned.schedule + 1 :])
    )


def renamed(world: World, order: tuple[int, ...]) -> World:
    """Return the world in which process n is called ``order[n]``."""

    def token(old: int) -> int:
        if old < _TOKENS:
            return old
        return (order[old // _TOKENS - 1] + 1) * _TOKENS + old % _TOKENS

    def row(old: Row | None) -> Row | None:
        if old is None or (old.owner is None and not old.token):
            return old
        owner = old.owner and (order[old.owner[0]], old.owner[1])
        return old._replace(owner=owner, token=token(old.token))

    def schedule(old: Schedule) -> Schedule:
        claim = old.claim
        if claim is not None:
            claim = claim._replace(process=order[claim.process], token=token(claim.token))
        return old._replace(key=token(old.key), claim=claim)

    def process(old: Process) -> Process:
        plan = old.plan and old.plan._replace(token=token(old.plan.token))
        owned = tuple(each._replace(token=token(each.token)) for each in old.owned)
        return old._replace(plan=plan, owned=owned)

    places = sorted(range(len(order)), key=order.__getitem__)
    return world._replace(
        schedules=tuple(map(schedule, world.schedules)),
        runs=tuple(tuple(tuple(map(row, rows)) for rows in runs) for runs in world.runs),
        processes=tuple(process(world.processes[place]) for place in places),
    )


def lock_row(world: World, key: tuple[int, int, int], starting: bool = True) -> World:
    row = world.runs[key[0]][key[1]][key[2]]
    assert row is not None
    return with_row(world, key, row._replace(starting=starting))


def unlock(world: World, place: int) -> World:
    """Take the lock away from whoever holds it, without telling."""
    schedule = world.schedules[place]
    return forget_lease(with_schedule(world, place, schedule._replace(key=0)), place, schedule.key)


def forget_lease(world: World, place: int, token: int) -> World:
    """Mark a lease as one that its process may not rely on any more."""
    for number, process in enumerate(world.processes):
        if token not in held(process, place):
            continue
        owned = tuple(
            each._replace(lease="gone") if each[0] == place and each.token == token else each
            for each in process.owned
        )
        plan = process.plan
        if plan is not None and plan.token == token:
            plan = plan._replace(lease="gone")
        world = with_process(world, number, process._replace(owned=owned, plan=plan))
    return world


def breaking(world: World, invariant: str) -> World:
    return world if world.broken else world._replace(broken=invariant)


def row_of(world: World, owned: Owned) -> Row | None:
    """Return the run that a process has; None where it was pruned, or never was."""
    rows = world.runs[owned.schedule][owned.occurrence]
    return rows[owned.row] if owned.row < len(rows) else None
