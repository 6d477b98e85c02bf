"""Who holds which lock, whether that is as it should be, and what a release would do.

The page and the command line read the same. The locks come from the backends, each asked
once however many levels use it, and without a walk over its keys; who they belong to comes
from the database, by the same few queries for any number of locks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Protocol, runtime_checkable

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from distcron_app.conf import STANDARD
from distcron_app.errors import ConfigurationError, LockUnavailable
from distcron_app.lifecycle import runs_again
from distcron_app.locks import (
    LockBackend,
    LockInfo,
    is_scope_lock,
    level_names,
    named_lock_name,
    part_backends,
    schedule_id_of,
    schedule_lock_name,
    scope_lock_name,
)
from distcron_app.locks.breaker import Breaker
from distcron_app.models import Node, Run, Schedule
from distcron_app.nodes import ALIVE, computed_state

__all__ = [
    "EXPIRES",
    "HEALTHY",
    "STUCK",
    "Follow",
    "HeldLock",
    "Holdings",
    "LevelState",
    "follows",
    "held_locks",
    "lock_name_of",
    "lock_named",
    "lock_of",
    "matching",
]

HEALTHY, EXPIRES, STUCK = "healthy", "expires", "stuck"

# Held by a session of the database, so they have no TTL and end with it.
_SESSION_PARTS = frozenset({"database"})
_PUBLIC = named_lock_name("")
_MOST_IDS = 5_000  # below the limit of parameters of any database
_PREFIX_LENGTH = 8


class Member(Protocol):
    """One of the independent servers of a backend; ``cause`` says why it is not "up"."""

    alias: str
    state: str
    cause: str


@runtime_checkable
class _Quorate(Protocol):
    def members(self) -> Sequence[Member]: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LevelState:
    """A lock level and whether its backend answers; ``ping_ms`` is None where it does not.

    ``members`` are the servers of a quorum, empty where there is one server.
    """

    name: str
    backend: str
    ping_ms: float | None = None
    problem: str = ""
    members: tuple[Member, ...] = ()

    @property
    def answers(self) -> bool:
        """Return True where the locks of the level are known."""
        return self.ping_ms is not None

    @property
    def answer_text(self) -> str:
        """Return how fast it answers, in whole milliseconds, so that the text stays still."""
        return _("answers in %d ms") % math.ceil(self.ping_ms or 0)

    @property
    def quorum(self) -> int:
        """Return how many members must grant a lock; 0 where there is one server."""
        return len(self.members) // 2 + 1 if self.members else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldLock:
    """A lock with its holder, as people see it.

    ``info`` is None where an active run should hold it and the lock was not seen: its
    backend does not answer, or it is gone. ``node_state`` is that of ``nodes.computed_state``,
    empty where no node is known. ``in_session`` is True where a session of the database
    holds it.
    """

    name: str
    level: str
    info: LockInfo | None = None
    schedule: Schedule | None = None
    run: Run | None = None
    node: Node | None = None
    node_state: str = ""
    verdict: str = ""
    why: str = ""
    in_session: bool = False
    # Where it guards a scope: the key with its arguments; the schedule is one of them then.
    concurrency_key: str = ""

    @property
    def handle(self) -> str:
        """Return what people call it on the command line: a schedule's key, else its name."""
        return self.name if self.schedule is None else self.schedule.key

    @property
    def label(self) -> str:
        """Return what it guards: a schedule's name, or the text that code chose."""
        if self.schedule is not None:
            return self.schedule.name
        return self.concurrency_key or self.name.removeprefix(_PUBLIC)

    @property
    def names(self) -> tuple[str, ...]:
        """Return what a person may type for it, the shortest that says it all first."""
        if self.schedule is None:
            return (self.label, self.name)
        return (self.handle, self.name, self.label)

    @property
    def owner_prefix(self) -> str:
        """Return the first characters of the owner token; empty where it cannot be read."""
        token = self.info.owner_token if self.info else None
        return (token or "")[:_PREFIX_LENGTH]

    @property
    def holder_is_alive(self) -> bool | None:
        """Return whether the node that holds it lives; None where no node is known."""
        return self.node_state in ALIVE if self.node_state else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The levels, and the locks that are held at those that answer, the worst first."""

    levels: tuple[LevelState, ...]
    locks: tuple[HeldLock, ...]

    @property
    def unknown(self) -> tuple[LevelState, ...]:
        """Return the levels whose locks are not known."""
        return tuple(level for level in self.levels if not level.answers)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """What the release of a lock would do: to its holder, its run and its fencing token."""

    holder: str
    run: str = ""
    fencing: str = ""
    session: str = ""

    def __iter__(self) -> Iterator[str]:
        found = (self.holder, self.run, self.fencing, self.session)
        return iter(text for text in found if text)


def held_locks(now: datetime, *, level: str = "") -> Holdings:
    """Return the locks of every level that works here; ``now`` is the database's time.

    A level that does not answer and that no schedule asks for is left out, unless it is
    ``level``.
    Blocks for one or two calls to each backend. One that does not answer makes its levels
    unknown and hides no other. Raise ConfigurationError where the settings are refused.
    """
    active = _active(Run.objects.all())
    levels = [_composed(name) for name in level_names()]
    parts: dict[str, _Part] = {}
    for part, backend in _distinct(levels):
        names = set(_expected(part, levels, active))
        if part in _SESSION_PARTS:
            # It knows a lock by a number, and the name once that was asked for.
            names.update(*(each.locks for each in parts.values()))
        parts[part] = _listed(backend, sorted(names))
    return _holdings(_used(levels, parts, level), parts, active, now)


def lock_named(name: str, now: datetime) -> Holdings:
    """Return what is known of one lock, by its full name.

    Blocks for two calls to each backend of its levels. Raise ConfigurationError where the
    settings are refused.
    """
    if is_scope_lock(name):
        active = [run for run in _active(_keyed_runs()) if lock_name_of(run) == name]
        return _at_levels(level_names(), name, active, now)
    schedule = Schedule.objects.filter(pk=schedule_id_of(name) or 0).first()
    if schedule is not None:
        return _of(schedule, schedule_lock_name(schedule.pk), now)
    return _at_levels(level_names(), name, (), now)


def lock_of(schedule: Schedule, now: datetime) -> Holdings:
    """Return what is known of a schedule's lock, or that of its scope, at the schedule's level.

    It is among the locks while a run is active, even where it was not seen. Blocks and
    raises as ``lock_named``.
    """
    key = schedule.scope()
    return _of(schedule, scope_lock_name(key) if key else schedule_lock_name(schedule.pk), now)


def lock_name_of(run: Run) -> str:
    """Return the name of the lock under which a run is, where one at most is active."""
    if run.concurrency_key:
        return scope_lock_name(run.concurrency_key)
    return schedule_lock_name(run.schedule_id or 0)


def _of(schedule: Schedule, name: str, now: datetime) -> Holdings:
    runs = _keyed_runs() if is_scope_lock(name) else Run.objects.filter(schedule=schedule)
    active = [run for run in _active(runs) if lock_name_of(run) == name]
    found = _at_levels([schedule.lock_level], name, active, now)
    if found.locks or not active:
        return found
    return dataclasses.replace(found, locks=(_unseen(name, active[-1], now),))


def _keyed_runs() -> QuerySet[Run]:
    return Run.objects.exclude(concurrency_key="")


def matching(held: Holdings, wanted: str, level: str = "") -> list[HeldLock]:
    """Return the locks that a person may mean by ``wanted``, at ``level`` if one is given.

    The full name of a lock comes before a schedule's key and a public lock's text.
    """
    there = [lock for lock in held.locks if level in ("", lock.level)]
    named = [lock for lock in there if lock.name == wanted]
    return named or [
        lock
        for lock in there
        if wanted == lock.handle or (lock.schedule is None and wanted == lock.label)
    ]


def follows(lock: HeldLock) -> Follow:
    """Return what ends and what begins when a person releases ``lock`` now."""
    session = ""
    if lock.in_session:
        session = _("Its database session is ended, and every other lock in it is lost as well.")
    if lock.schedule is None:
        return Follow(
            session=session,
            holder=_(
                "Whoever holds it learns of this when it renews, at most a third of its TTL "
                "from now. Until then somebody else may hold it as well."
            ),
        )
    token = lock.schedule.fencing_token + 1
    return Follow(
        holder=_holder_text(lock, token),
        run=_run_text(lock.run),
        fencing=_("The fencing token becomes %d.") % token,
        session=session,
    )


def _holder_text(lock: HeldLock, token: int) -> str:
    facts = {"node": lock.node.name if lock.node else "", "token": token}
    if lock.run is None:
        return _("No run is active under this lock.")
    if lock.holder_is_alive:
        return (
            _(
                "Node %(node)s is alive and will lose the lock: its job is told to stop, and "
                "what it reports with a fencing token below %(token)d is refused."
            )
            % facts
        )
    if lock.node is not None:
        return _("Node %(node)s is dead.") % facts
    return _("Nobody knows whether its holder is alive.")


def _run_text(run: Run | None) -> str:
    if run is None:
        return ""
    if runs_again(run, run.schedule.max_recoveries if run.schedule else 0):
        return _("Its run %d will be queued again.") % run.pk
    return _("Its run %d will be shown as lost, and no node starts it again.") % run.pk


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Composed:
    """A level with the backends of its parts, or the problem that it has none."""

    name: str
    backends: Mapping[str, LockBackend] = dataclasses.field(default_factory=dict)
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one backend answered."""

    backend: str
    locks: Mapping[str, LockInfo] = dataclasses.field(default_factory=dict)
    ping_ms: float | None = None
    problem: str = ""
    members: tuple[Member, ...] = ()


def _at_levels(names: Collection[str], lock: str, active: Sequence[Run], now: datetime) -> Holdings:
    levels = [_composed(name) for name in names]
    parts = {part: _inspected(backend, [lock]) for part, backend in _distinct(levels)}
    return _holdings(levels, parts, active, now)


def _composed(name: str) -> _Composed:
    try:
        return _Composed(name=name, backends=part_backends(name))
    except ConfigurationError as error:
        return _Composed(name=name, problem=error.problem)


def _distinct(levels: Iterable[_Composed]) -> Iterable[tuple[str, LockBackend]]:
    """Return each backend once by its part, those that cannot list every name last."""
    found = {part: each for level in levels for part, each in level.backends.items()}
    return sorted(found.items(), key=lambda item: item[0] in _SESSION_PARTS)


def _expected(part: str, levels: Iterable[_Composed], active: Iterable[Run]) -> Iterable[str]:
    """Return the locks that active runs hold at levels with ``part``."""
    names = {level.name for level in levels if part in level.backends}
    return [
        lock_name_of(run)
        for run in active
        if run.schedule is not None and run.schedule.lock_level in names
    ]


def _used(levels: Sequence[_Composed], parts: Mapping[str, _Part], named: str) -> list[_Composed]:
    """Leave out the levels that do not answer and that neither a schedule nor a person names."""
    silent = {level.name for level in levels if not _level_state(level, parts).answers}
    kept = {STANDARD, named}
    if not silent <= kept:
        kept.update(Schedule.objects.order_by().values_list("lock_level", flat=True).distinct())
    return [level for level in levels if level.name not in silent or level.name in kept]


def _listed(backend: LockBackend, expected: Collection[str]) -> _Part:
    """Read all locks of a backend, those that it cannot list by the names that are expected."""
    return _asked(backend, lambda: [*_found(backend, expected), *backend.held()])


def _inspected(backend: LockBackend, names: Collection[str]) -> _Part:
    return _asked(backend, lambda: _found(backend, names))


def _found(backend: LockBackend, names: Collection[str]) -> Iterable[LockInfo]:
    return backend.inspect(names).values() if names else ()


def _asked(backend: LockBackend, read: Callable[[], Iterable[LockInfo]]) -> _Part:
    try:
        return _Part(
            backend=backend.name,
            locks={info.name: info for info in read()},
            ping_ms=backend.ping() * 1000,
            members=_members(backend),
        )
    except LockUnavailable as error:
        return _Part(backend=backend.name, problem=error.cause, members=_members(backend))


def _members(backend: LockBackend) -> tuple[Member, ...]:
    guarded = backend.guarded if isinstance(backend, Breaker) else backend
    return tuple(guarded.members()) if isinstance(guarded, _Quorate) else ()


def _holdings(
    levels: Sequence[_Composed],
    parts: Mapping[str, _Part],
    active: Sequence[Run],
    now: datetime,
) -> Holdings:
    names = sorted({name for part in parts.values() for name in part.locks})
    owners = _Owners.read(names, parts, active, now)
    found = [
        owners.judged(name, level, here)
        for name in names
        for level, here in _split(_where(name, parts), levels, owners.level_of(name))
    ]
    order = (STUCK, EXPIRES, HEALTHY)
    return Holdings(
        levels=tuple(_level_state(level, parts) for level in levels),
        locks=tuple(sorted(found, key=lambda lock: order.index(lock.verdict))),
    )


def _where(name: str, parts: Mapping[str, _Part]) -> dict[str, LockInfo]:
    return {part: each.locks[name] for part, each in parts.items() if name in each.locks}


def _split(
    where: Mapping[str, LockInfo], levels: Sequence[_Composed], own: str
) -> Iterator[tuple[str, dict[str, LockInfo]]]:
    """Yield the levels at which a lock is held that was found in these parts.

    A schedule's own level comes first, then the levels all of whose parts have it, the one
    of most parts before its gate alone.
    """
    left = dict(where)
    largest_first = sorted(levels, key=lambda level: -len(level.backends))
    for is_complete in (True, False):
        for level in sorted(largest_first, key=lambda level: level.name != own):
            here = {part: left[part] for part in level.backends if part in left}
            is_whole = len(here) == len(level.backends) or level.name == own
            if here and (is_whole or not is_complete):
                yield level.name, here
                left = {part: info for part, info in left.items() if part not in here}


def _level_state(level: _Composed, parts: Mapping[str, _Part]) -> LevelState:
    mine = [parts[part] for part in level.backends]
    problem = level.problem or next((part.problem for part in mine if part.problem), "")
    return LevelState(
        name=level.name,
        backend="+".join(part.backend for part in mine),
        ping_ms=None if problem else sum(part.ping_ms or 0.0 for part in mine),
        problem=problem,
        members=next((part.members for part in mine if part.members), ()),
    )


def _active(runs: QuerySet[Run]) -> list[Run]:
    """Return the active runs with schedule and node, by one query, the newest last."""
    found = runs.filter(state__in=Run.ACTIVE_STATES).select_related("schedule", "node")
    return list(found.order_by("id"))


def _unseen(name: str, run: Run, now: datetime) -> HeldLock:
    return HeldLock(
        name=name,
        level=run.schedule.lock_level if run.schedule else STANDARD,
        schedule=run.schedule,
        concurrency_key=run.concurrency_key,
        run=run,
        node=run.node,
        node_state=computed_state(run.node, now) if run.node else "",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Owners:
    """What the database knows about the locks: schedules, active runs, nodes by name."""

    schedules: Mapping[str, Schedule]
    runs: Mapping[str, Sequence[Run]]
    # The concurrency keys of the locks of scopes, "" for others.
    keys: Mapping[str, str]
    nodes: Mapping[str, Node]
    now: datetime

    @classmethod
    def read(
        cls,
        names: Sequence[str],
        parts: Mapping[str, _Part],
        active: Sequence[Run],
        now: datetime,
    ) -> _Owners:
        runs: dict[str, list[Run]] = {}
        for run in active:
            runs.setdefault(lock_name_of(run), []).append(run)
        schedules = {name: of[-1].schedule for name, of in runs.items() if of[-1].schedule}
        missing = [schedule_id_of(name) for name in names if name not in schedules]
        ids = [pk for pk in missing if pk is not None][:_MOST_IDS]
        for schedule in Schedule.objects.filter(pk__in=ids) if ids else ():
            schedules[schedule_lock_name(schedule.pk)] = schedule
        keys = {name: of[-1].concurrency_key for name, of in runs.items()}
        unknown = {name for name in names if is_scope_lock(name)} - keys.keys()
        if unknown:
            # Only a hash of the key is in the name, so the schedules are asked for theirs.
            for schedule in Schedule.objects.exclude(concurrency_key="")[:_MOST_IDS]:
                name = scope_lock_name(schedule.scope())
                if name in unknown:
                    keys[name] = schedule.scope()
                    schedules.setdefault(name, schedule)
        notes = {info.note for part in parts.values() for info in part.locks.values()}
        return cls(
            schedules=schedules, runs=runs, keys=keys, nodes=_newest_nodes(notes, now), now=now
        )

    def level_of(self, name: str) -> str:
        """Return the level at which the lock should be; empty for one that is no schedule's."""
        schedule = self.schedules.get(name)
        return schedule.lock_level if schedule else ""

    def judged(self, name: str, level: str, where: Mapping[str, LockInfo]) -> HeldLock:
        """Return the lock with its holder and a verdict."""
        info = _merged(where)
        run = self._run(name, info)
        node = run.node if run and _is_of(run, info) else self.nodes.get(info.note)
        lock = HeldLock(
            name=name,
            level=level,
            info=info,
            schedule=self.schedules.get(name),
            concurrency_key=self.keys.get(name, ""),
            run=run,
            node=node,
            node_state=computed_state(node, self.now) if node else "",
            in_session=not _SESSION_PARTS.isdisjoint(where),
        )
        verdict, why = _verdict(lock, info, where)
        return dataclasses.replace(lock, verdict=verdict, why=why)

    def _run(self, name: str, info: LockInfo) -> Run | None:
        """Return the active run that holds the lock, else the newest active of its schedule."""
        runs = self.runs.get(name, ())
        newest = runs[-1] if runs else None
        return next((run for run in runs if run.owner_token == info.owner_token), newest)


def _newest_nodes(names: Collection[str], now: datetime) -> dict[str, Node]:
    """Return the nodes of these names; of those that had the same one, the newest."""
    chosen = [name for name in names if name][:_MOST_IDS]
    if not chosen:
        return {}
    found = Node.objects.filter(name__in=chosen).order_by("started_at")
    nodes = sorted(found, key=lambda node: computed_state(node, now) in ALIVE)
    return {node.name: node for node in nodes}


def _merged(where: Mapping[str, LockInfo]) -> LockInfo:
    """Return what the first part knows, with what only a later one can tell."""
    merged, *others = where.values()
    for info in others:
        missing = {
            field.name: getattr(info, field.name)
            for field in dataclasses.fields(LockInfo)
            if getattr(merged, field.name) in (None, "")
        }
        merged = dataclasses.replace(merged, **missing)
    return merged


def _is_of(run: Run, info: LockInfo) -> bool:
    return info.owner_token in (None, run.owner_token)


def _verdict(lock: HeldLock, info: LockInfo, where: Mapping[str, LockInfo]) -> tuple[str, str]:
    lasting = [each for part, each in where.items() if part not in _SESSION_PARTS]
    if any(each.ttl_ms is None for each in lasting):
        return STUCK, _("It has no TTL, which only a foreign hand can cause. Release it.")
    facts = {"node": lock.node.name if lock.node else "", "run": lock.run.pk if lock.run else 0}
    if lock.in_session and lock.holder_is_alive is False:
        text = _("Node %(node)s is dead, and the database still keeps its session. Release it.")
        return STUCK, text % facts
    if lock.run and _is_of(lock.run, info) and lock.holder_is_alive:
        if lock.node_state == "suspect":
            return HEALTHY, _("Its run is active; the heartbeat of node %(node)s is late.") % facts
        return HEALTHY, _("Its run is active and its node is alive.")
    if lock.name.startswith(_PUBLIC) and (lock.in_session or _is_renewed(info)):
        return HEALTHY, _("Its holder keeps it.")
    why = _unrenewed(lock, info) % facts
    return EXPIRES, f"{why} {_ending(info)}"


def _is_renewed(info: LockInfo) -> bool:
    """Return False where a holder that renews every third of the TTL missed its turn."""
    if info.granted_ms is None or info.ttl_ms is None:
        return True
    return info.ttl_ms >= info.granted_ms / 2


def _unrenewed(lock: HeldLock, info: LockInfo) -> str:
    if lock.run is not None and not _is_of(lock.run, info):
        return _("Another owner than its active run %(run)d holds it.")
    if lock.holder_is_alive is False:
        return _("Node %(node)s is dead, so nobody renews it.")
    if lock.concurrency_key:
        return _("No run with this concurrency key is active; one may just be starting or ending.")
    if lock.schedule is not None:
        return _("No run of the schedule is active; one may just be starting or ending.")
    if lock.name.startswith(_PUBLIC):
        return _("Its holder has not renewed it lately.")
    return _("It belongs to no schedule that is known here.")


def _ending(info: LockInfo) -> str:
    if info.ttl_ms is None:
        return _("It ends with the database session that holds it.")
    return _("It expires by itself in %d s.") % math.ceil(info.ttl_ms / 1000)
