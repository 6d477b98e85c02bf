"""One tick: read what is due, plan, take the locks, claim.

Every step works on the whole batch: one read, one lock call for each level in it and one
transaction, whether one schedule is due or a thousand. Whoever loses at the lock stops there and
asks the database nothing more about it.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import models

from distcron_app import lifecycle, registry, timetable
from distcron_app.clock import Clock
from distcron_app.conf import Config
from distcron_app.errors import (
    ConfigurationError,
    LockUnavailable,
    TimetableError,
    UnknownJob,
)
from distcron_app.instants import DatabaseNow
from distcron_app.leases import FindLevel, Grant, LeaseBook
from distcron_app.lifecycle import Claimed, ClaimedRun, Decision, Skip
from distcron_app.locks import (
    Lease,
    Level,
    is_scope_lock,
    new_owner_token,
    occurrence_lock_name,
    schedule_lock_name,
    scope_lock_name,
)
from distcron_app.models import (
    TIMETABLE_FIELDS,
    Run,
    RunQuerySet,
    Schedule,
    ScheduleQuerySet,
    exclusions_of,
    is_exclusive,
    timetable_of,
)
from distcron_app.scopes import rendered_key
from distcron_app.timetable import Timetable
from distcron_app.timetable.calendars import Excluding, Exclusions
from distcron_app.timetable.spread import spread_instant

__all__ = ["Dispatcher", "Tick"]

logger = logging.getLogger("distcron.dispatch")

# A lock older than its TTL plus this is stuck or planted; the database decides alone.
BACKSTOP_SECONDS = 2.0
# How long a schedule that was lost at the lock is left alone, with jitter.
STAND_BACK_SECONDS = 0.3
_TICK = timedelta(microseconds=1)
# How long an occurrence waits behind a run of its scope that began after it was due.
TURN_SECONDS = 0.5
# Due rows read for each run that could start, so that nodes find different ones.
READ_AHEAD = 8
READ_AT_LEAST = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """What one tick brought. ``wait_seconds``: until the next known instant, at most a poll."""

    claimed: Claimed = dataclasses.field(default_factory=Claimed)
    stood_back: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()
    lag_seconds: float = 0.0
    wait_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Due:
    """A due schedule as it was read."""

    pk: int
    key: str
    job: str
    version: int
    lock_level: str
    queue: str
    priority: int
    overlap: str
    max_active: int | None
    misfire: str
    misfire_grace_seconds: int | None
    catchup_window_seconds: int | None
    catchup_max: int
    catchup_per_minute: int | None
    start_deadline_seconds: int | None
    max_runs: int | None
    runs_planned: int
    ends_at: datetime | None
    calendar_id: int | None
    calendar_revision: UUID | None
    calendar_action: str
    spread_by: str
    spread_seconds: int
    spread_key: str
    next_run_at: datetime
    now: datetime
    # The concurrency key with the arguments filled in; "" for the schedule itself.
    scope: str
    columns: tuple[Any, ...]

    @property
    def late_seconds(self) -> float:
        return (self.now - self.next_run_at).total_seconds()

    @property
    def is_exclusive(self) -> bool:
        """Return True where one run at most is active, so that one lock guards all of them."""
        return is_exclusive(self.overlap, self.max_active)

    @property
    def lock_name(self) -> str:
        if self.is_exclusive:
            return scope_lock_name(self.scope) if self.scope else schedule_lock_name(self.pk)
        return occurrence_lock_name(self.pk, self.next_run_at)

    @property
    def calendar(self) -> tuple[int, UUID] | None:
        if self.calendar_id is None or self.calendar_revision is None:
            return None
        return self.calendar_id, self.calendar_revision

    @property
    def timetable(self) -> Timetable:
        return timetable_of(self.columns, self.calendar, self.calendar_action)

    @property
    def exclusions(self) -> Exclusions | None:
        if self.calendar is None or self.calendar_action != Schedule.Excluded.SKIP:
            return None
        return exclusions_of(*self.calendar)

    @property
    def runs_left(self) -> int | None:
        """Return how many runs may follow the one of now; None means any number.

        Whether that one counts is decided by the claim, which knows what overlaps.
        """
        if self.max_runs is None:
            return None
        return max(0, self.max_runs - self.runs_planned - 1)

    @property
    def catchup_window(self) -> timedelta | None:
        if self.catchup_window_seconds is None:
            return None
        return timedelta(seconds=self.catchup_window_seconds)

    def has_expired(self, instant: datetime) -> bool:
        """Return True where the schedule's deadline to start ``instant`` has passed."""
        if self.start_deadline_seconds is None:
            return False
        return self.now > self.spread(instant) + timedelta(seconds=self.start_deadline_seconds)

    def paced(self, instants: Sequence[datetime]) -> tuple[tuple[datetime, datetime], ...]:
        """Return each late instant with when it may start, after the one that starts now."""
        if not self.catchup_per_minute:
            return tuple((instant, self.now) for instant in instants)
        pause = timedelta(minutes=1) / self.catchup_per_minute
        return tuple(
            (instant, self.now + pause * place) for place, instant in enumerate(instants, 1)
        )

    def spread(self, instant: datetime) -> datetime:
        return spread_instant(
            self.spread_by, self.spread_seconds, self.spread_key or str(self.pk), instant
        )


class _Queued(NamedTuple):
    """A queued run as it was read."""

    pk: int
    schedule_id: int
    due_at: datetime
    attempt: int
    now: datetime
    priority: int
    concurrency_key: str
    lock_level: str
    overlap: str
    max_active: int | None

    @property
    def scope(self) -> tuple[int, str]:
        """Return what it waits for its turn with: its key, or else its schedule."""
        return (0, self.concurrency_key) if self.concurrency_key else (self.schedule_id, "")

    @property
    def lock_name(self) -> str:
        if is_exclusive(self.overlap, self.max_active):
            key = self.concurrency_key
            return scope_lock_name(key) if key else schedule_lock_name(self.schedule_id)
        return occurrence_lock_name(self.schedule_id, self.due_at)


_QUEUED_COLUMNS = (
    "pk",
    "schedule_id",
    "due_at",
    "attempt",
    "now",
    "priority",
    "concurrency_key",
    "schedule__lock_level",
    "schedule__overlap",
    "schedule__max_active",
)
_COMPUTED = ("scope", "columns")
_OWN = tuple(field.name for field in dataclasses.fields(_Due) if field.name not in _COMPUTED)
_SPLIT = len(_OWN)
_COLUMNS = ("concurrency_key", "keyed_arguments", *_OWN, *TIMETABLE_FIELDS)


class Dispatcher:
    """Claims due occurrences and queued runs for one node.

    ``away`` maps the name of each lock level that did not answer to the cause. At a gate
    level the database decides alone meanwhile; what a strict level guards stays due.
    """

    def __init__(
        self, *, config: Config, clock: Clock, find_level: FindLevel, leases: LeaseBook
    ) -> None:
        self._config = config
        self._clock = clock
        self._find_level = find_level
        self._leases = leases
        self.away: dict[str, str] = {}
        # Those of them whose breaker was seen open: when it closes, they are back.
        self._opened: set[str] = set()
        # Schedule to (instant it was lost at, monotonic time to look again).
        self._standing_back: dict[int, tuple[datetime, float]] = {}
        # Owner token to what was granted for claims whose COMMIT was not answered.
        self._unsettled: dict[str, Grant] = {}
        # The database's clock at the last read; before the first read nothing is claimed.
        self._database_time = datetime.min.replace(tzinfo=UTC)
        # Until the next queued run is due, at most a poll.
        self.queued_wait_seconds = config.poll_seconds

    def tick(self, node_id: UUID, capacity: int, *, reserved: int = 0) -> Tick:
        """Claim up to ``capacity`` runs, the highest priority first, and return them.

        ``reserved`` more may be claimed of at least the reserved priority. Without any
        capacity only schedules whose run is on this node are looked at, since nobody else
        decides about those. Raise DatabaseError when the database is away; ``settle`` then
        finds out what was committed.
        """
        rows = self._read_due(capacity, reserved)
        if not rows:
            return Tick(wait_seconds=self._config.poll_seconds)
        now = self._database_time = rows[0].now
        due = [row for row in rows if row.next_run_at <= now]
        ahead = [row.next_run_at for row in rows if row.next_run_at > now]
        wait = (min(ahead) - now).total_seconds() if ahead else self._config.poll_seconds
        chosen = self._choose(due, capacity, reserved)
        if not chosen:
            return Tick(wait_seconds=min(wait, STAND_BACK_SECONDS if due else wait))
        decisions, invalid = self._decide(chosen)
        claimed, stood_back = self._claim(decisions, {row.pk: row for row in chosen}, node_id)
        more = len(due) > len(chosen) or any(decision.run_at for decision in decisions)
        return Tick(
            claimed=claimed,
            stood_back=stood_back,
            invalid=invalid,
            lag_seconds=max(
                ((now - run.scheduled_at).total_seconds() for run in claimed.runs),
                default=0.0,
            ),
            wait_seconds=0.0 if more and (claimed.runs or claimed.skipped) else wait,
        )

    def claim_queued(
        self,
        node_id: UUID,
        capacity: int,
        *,
        reserved: int = 0,
        still_here: Collection[int] = (),
    ) -> Claimed:
        """Claim queued runs (by hand, given back, recovered, of backfills) whose time has come.

        The capacity is meant as in ``tick``. ``still_here`` are runs of which this node
        executes an attempt. One that was taken from it is left to the others until that
        attempt has ended: a node never executes two attempts of one run.
        """
        within = self._config.poll_seconds
        found = self._read_queued(Run.objects.queued_due(within), capacity, reserved)
        of_backfills: list[_Queued] = []
        if capacity + reserved > 0:
            following = Run.objects.next_of_backfills(within)
            of_backfills = self._read_queued(following, capacity, reserved)
        # Last, so that the timetable of the same schedule goes first.
        found += of_backfills
        self.queued_wait_seconds = self._config.poll_seconds
        due = [row for row in found if row.due_at <= row.now and row.pk not in still_here]
        if found:
            self._database_time = found[0].now
        ahead = [(row.due_at - row.now).total_seconds() for row in found if row.due_at > row.now]
        self.queued_wait_seconds = min([self.queued_wait_seconds, *ahead])
        # One run of a scope at a time, the first in their order; what is behind it waits. One
        # that waits for its next attempt keeps its scope, so it goes before the others.
        ordered = sorted(reversed(due), key=lambda row: row.attempt > 0)
        first = {row.scope: row for row in ordered}
        here = self._leases.names()
        free = [row for row in due if first[row.scope] is row and row.lock_name not in here]
        urgent = [row for row in free if self._is_urgent(row)][: capacity + reserved]
        others = [row for row in free if not self._is_urgent(row)]
        chosen = urgent + others[: min(capacity, capacity + reserved - len(urgent))]
        if not chosen:
            return Claimed()
        wanted = {row.pk: self._grant(row) for row in chosen}
        granted = self._acquire(grant for grant in wanted.values() if grant is not None)
        mine: dict[int, Grant] = {}
        for row in chosen:
            grant = wanted[row.pk]
            late_seconds = (row.now - row.due_at).total_seconds()
            if grant is not None and self._may_claim(grant, granted, late_seconds):
                mine[row.pk] = granted.get(grant.owner_token, grant)
        self._remember(mine.values())
        claimed = lifecycle.claim_queued(
            {pk: grant.owner_token for pk, grant in mine.items()}, node_id
        )
        self._take(claimed.runs)
        if {row.pk for row in of_backfills} & {run.run_id for run in claimed.runs}:
            # The next one of the backfill may be startable beside it.
            self.queued_wait_seconds = 0.0
        return claimed

    def settle(self, node_id: UUID) -> list[ClaimedRun]:
        """Read back claims whose COMMIT was not answered; return those that are ours after all.

        What is absent was not committed: it is dropped and its lease released.
        """
        if not self._unsettled:
            return []
        runs = lifecycle.read_back(list(self._unsettled), node_id)
        self._take(runs)
        return runs

    def _read_queued(self, queued: RunQuerySet, capacity: int, reserved: int) -> list[_Queued]:
        limit = max(READ_AT_LEAST, capacity + reserved) if capacity + reserved > 0 else 0
        if self._config.queues:
            queued = queued.filter(queue__in=self._config.queues)
        if capacity <= 0:
            queued = queued.filter(priority__gte=self._config.reserved_priority)
        rows = (
            queued.startable()
            .exclude(schedule__lock_level__in=self._waiting_levels())
            .annotate(now=DatabaseNow())
            .values_list(*_QUEUED_COLUMNS)[:limit]
        )
        return [_Queued(*row) for row in rows]

    def _read_due(self, capacity: int, reserved: int) -> list[_Due]:
        """Read what is due, or soon will be, by one query; by two where more is due than fits.

        The first reads the oldest instants, which an index has in order. Where all that it
        brought is due, a second one reads what has a higher priority than the least of it,
        in the order of another index: a flood of low ones keeps no high one out.
        """
        limit = min(self._config.batch_size, max(READ_AT_LEAST, (capacity + reserved) * READ_AHEAD))
        soon = self._served(self._config.poll_seconds)
        if capacity <= 0:
            rows = _read(soon.filter(pk__in=self._leases.schedules()), limit)
            if any(map(is_scope_lock, self._leases.names())):
                # Others of that scope are decided here as well; which, only their keys tell.
                rows += _read(soon.exclude(concurrency_key=""), limit)
            if reserved > 0:
                urgent = soon.filter(priority__gte=self._config.reserved_priority)
                rows += _read(urgent.by_priority(), limit)
        else:
            rows = _read(soon, limit)
            if len(rows) == limit and rows[-1].next_run_at <= rows[-1].now:
                least = min(row.priority for row in rows)
                rows += _read(self._served().filter(priority__gt=least).by_priority(), limit)
        # A row may be in both.
        return list({row.pk: row for row in rows}.values())

    def _served(self, within_seconds: float = 0.0) -> ScheduleQuerySet:
        """Return the due schedules of this node's queues whose locks can be had."""
        due = Schedule.objects.due(within_seconds=within_seconds)
        if self._config.queues:
            due = due.filter(queue__in=self._config.queues)
        return due.exclude(lock_level__in=self._waiting_levels())

    def _choose(self, due: Sequence[_Due], capacity: int, reserved: int) -> list[_Due]:
        here = self._leases.names()
        now = self._clock.monotonic()
        free: list[_Due] = []
        chosen: list[_Due] = []
        for row in due:
            lost_at, again_at = self._standing_back.get(row.pk, (None, 0.0))
            if row.lock_name in here:
                if not self._waits_its_turn(row, here[row.lock_name]):
                    chosen.append(row)
            elif lost_at != row.next_run_at or now >= again_at:
                free.append(row)
        urgent = _foremost(filter(self._is_urgent, free), capacity + reserved)
        room = min(capacity, capacity + reserved - len(urgent))
        others = _foremost((row for row in free if not self._is_urgent(row)), room)
        return chosen + urgent + others

    def _is_urgent(self, row: _Due | _Queued) -> bool:
        """Return True for what may use the reserved slots."""
        return row.priority >= self._config.reserved_priority

    def _waits_its_turn(self, row: _Due, running_since: datetime) -> bool:
        """Return True for an occurrence that was due before the run that is active began.

        It is behind, not overlapped: after a stall the occurrences of a short job run one
        after the other. A run that takes longer does overlap what is behind it, or a long
        job would stay late for ever.
        """
        behind = row.next_run_at <= running_since
        active_seconds = (row.now - running_since).total_seconds()
        return behind and active_seconds <= TURN_SECONDS

    def _decide(self, rows: Sequence[_Due]) -> tuple[list[Decision], tuple[str, ...]]:
        decisions: list[Decision] = []
        invalid: list[str] = []
        for row in sorted(rows, key=lambda row: (-row.priority, row.next_run_at)):
            try:
                decision = self._decision(row)
            except (TimetableError, UnknownJob, ConfigurationError) as error:
                Schedule.objects.filter(pk=row.pk, version=row.version).mark_invalid(str(error))
                invalid.append(row.key)
            else:
                if decision is not None:
                    decisions.append(decision)
        # The others of a scope come with the next tick, when it is known what this one did.
        return lifecycle.one_of_each_scope(decisions), tuple(invalid)

    def _decision(self, row: _Due) -> Decision | None:
        try:
            registry.get(row.job)
        except UnknownJob:
            # During a rolling deploy another node may know it; after the grace nobody does.
            if row.late_seconds <= self._grace_seconds(row):
                return None
            raise
        self._find_level(row.lock_level)
        exclusions = row.exclusions
        if exclusions is not None and exclusions.excluded(row.next_run_at):
            return _skipping(row, exclusions)
        allowed = _allowed(row, exclusions)
        plan = timetable.plan(
            allowed,
            due_from=row.next_run_at,
            now=row.now,
            misfire_grace=timedelta(seconds=self._grace_seconds(row)),
            misfire=row.misfire,
            catchup_window=row.catchup_window,
            catchup_max=row.catchup_max,
            ends_at=row.ends_at,
        )
        plan = dataclasses.replace(plan, then=plan.then[: row.runs_left])
        after = _after(row, plan)
        expired = [each for each in (plan.run, *plan.then) if each and row.has_expired(each)]
        if expired:
            plan = dataclasses.replace(
                plan,
                run=None if plan.run in expired else plan.run,
                then=tuple(each for each in plan.then if each not in expired),
            )
        spans = ((plan.misfired, Run.Reason.MISFIRE), (plan.coalesced, Run.Reason.COALESCED))
        return Decision(
            schedule_id=row.pk,
            version=row.version,
            seen_next_run_at=row.next_run_at,
            # Of the timetable itself: excluded instants get their turn, and their row.
            next_run_at=plan.next if exclusions is None else after,
            owner_token=new_owner_token(),
            concurrency_key=row.scope,
            run_at=plan.run,
            due_at=None if plan.run is None else row.spread(plan.run),
            queue=row.paced(plan.then),
            skips=(
                *(_skip(span, reason) for span, reason in spans if span is not None),
                *(Skip(scheduled_at=each, reason=Run.Reason.EXPIRED) for each in expired),
            ),
        )

    def _grace_seconds(self, row: _Due) -> float:
        return row.misfire_grace_seconds or self._config.misfire_grace_seconds

    def _claim(
        self, decisions: Sequence[Decision], rows: Mapping[int, _Due], node_id: UUID
    ) -> tuple[Claimed, tuple[str, ...]]:
        here = self._leases.names()
        wanted = {
            decision.owner_token: Grant(
                level=self._find_level(rows[decision.schedule_id].lock_level),
                name=rows[decision.schedule_id].lock_name,
                owner_token=decision.owner_token,
                is_exclusive=rows[decision.schedule_id].is_exclusive,
            )
            for decision in decisions
        }
        granted = self._acquire(
            wanted[decision.owner_token]
            for decision in decisions
            if wanted[decision.owner_token].name not in here
        )
        kept: list[Decision] = []
        stood_back: list[str] = []
        for decision in decisions:
            row, grant = rows[decision.schedule_id], wanted[decision.owner_token]
            if self._may_claim(grant, granted, row.late_seconds):
                kept.append(decision)
            elif grant.name in here:
                # Only what overlaps is decided here; at a gate the lock may be ours already.
                only_beside = grant.level.is_strict
                kept.append(dataclasses.replace(decision, only_beside=only_beside))
            elif self._stand_back(row) and grant.level.name not in self.away:
                stood_back.append(row.key)
        self._remember((wanted | granted)[decision.owner_token] for decision in kept)
        claimed = lifecycle.claim(kept, node_id)
        self._take(claimed.runs)
        return claimed, tuple(stood_back)

    @property
    def _stuck_after_seconds(self) -> float:
        return self._config.lock_ttl_seconds + BACKSTOP_SECONDS

    def _grant(self, row: _Queued) -> Grant | None:
        """Return what to ask for; None where the level cannot be used and nothing may start."""
        try:
            level = self._find_level(row.lock_level)
        except ConfigurationError as error:
            self.away[row.lock_level] = error.problem
            return None
        return Grant(
            level=level,
            name=row.lock_name,
            owner_token=new_owner_token(),
            is_exclusive=is_exclusive(row.overlap, row.max_active),
        )

    def _acquire(self, wanted: Iterable[Grant]) -> dict[str, Grant]:
        """Ask each level once; return what was won by owner token, and keep ``away`` true."""
        by_level: dict[str, list[Grant]] = {}
        for grant in wanted:
            by_level.setdefault(grant.level.name, []).append(grant)
        granted: dict[str, Grant] = {}
        for name, grants in by_level.items():
            leases = self._ask(grants[0].level, grants)
            for grant in grants:
                if grant.name in leases:
                    granted[grant.owner_token] = dataclasses.replace(
                        grant, lease=leases[grant.name]
                    )
            logger.debug("locks level=%s wanted=%d won=%d", name, len(grants), len(leases))
        return granted

    def _ask(self, level: Level, grants: Sequence[Grant]) -> dict[str, Lease]:
        try:
            leases = level.backend.acquire(
                {grant.name: grant.owner_token for grant in grants},
                int(self._config.lock_ttl_seconds * 1000),
            )
        except LockUnavailable as error:
            self.away[level.name] = error.cause
            return {}
        self.away.pop(level.name, None)
        return leases

    def _may_claim(self, grant: Grant, granted: Mapping[str, Grant], late_seconds: float) -> bool:
        """Return True for a lock that was won, and at a gate level for one that may be ignored.

        It is ignored while its backend is away, and when the work is so late that the lock
        must be stuck or planted.
        """
        if grant.owner_token in granted:
            return True
        is_away = grant.level.name in self.away
        return not grant.level.is_strict and (is_away or late_seconds > self._stuck_after_seconds)

    def _waiting_levels(self) -> list[str]:
        """Return the strict levels that are known to be away.

        What they guard is not even read: it would fill the batch, and others would wait.
        """
        waiting: list[str] = []
        for name in list(self.away):
            try:
                level = self._find_level(name)
            except ConfigurationError:
                waiting.append(name)
                continue
            if level.backend.state == "open":
                self._opened.add(name)
                if level.is_strict:
                    waiting.append(name)
            elif name in self._opened:
                self._opened.remove(name)
                del self.away[name]
        return waiting

    def _stand_back(self, row: _Due) -> bool:
        """Leave the schedule alone for a moment; return True the first time for this instant."""
        known_at, _ = self._standing_back.get(row.pk, (None, 0.0))
        if len(self._standing_back) > 10_000:
            self._standing_back.clear()
        again = self._clock.monotonic() + STAND_BACK_SECONDS * random.uniform(0.7, 1.3)  # noqa: S311
        self._standing_back[row.pk] = (row.next_run_at, again)
        return known_at != row.next_run_at

    def _remember(self, grants: Iterable[Grant]) -> None:
        self._unsettled.update((grant.owner_token, grant) for grant in grants)

    def _take(self, runs: Collection[ClaimedRun]) -> None:
        """Enter what was committed into the book of leases and release the rest."""
        for run in runs:
            self._leases.hold(
                run.run_id,
                schedule_id=run.schedule_id,
                grant=self._unsettled.pop(run.owner_token),
                since=self._database_time,
            )
        unused = list(self._unsettled.values())
        self._unsettled.clear()
        self._leases.release(unused)


def _read(schedules: ScheduleQuerySet, limit: int) -> list[_Due]:
    rows = schedules.annotate(
        now=DatabaseNow(),
        calendar_revision=models.F("calendar__revision"),
        keyed_arguments=models.Case(
            models.When(~models.Q(concurrency_key=""), then=models.F("arguments")),
            output_field=models.JSONField(null=True),
        ),
    ).values_list(*_COLUMNS)[:limit]
    return [_due(key, arguments, row) for key, arguments, *row in rows]


def _due(key: str, arguments: dict[str, Any] | None, row: list[Any]) -> _Due:
    own, columns = row[:_SPLIT], tuple(row[_SPLIT:])
    found = _Due(*(*own, "", columns))
    if not key:
        return found
    return dataclasses.replace(found, scope=rendered_key(key, found.job, arguments or {}))


def _foremost(rows: Iterable[_Due], count: int) -> list[_Due]:
    """Return ``count`` rows of the highest priorities.

    Those of the last one that fits are taken at random: nodes that read the same rows must
    not all go for the first ones.
    """
    ordered = sorted(rows, key=lambda row: -row.priority)
    if len(ordered) <= count:
        return ordered
    if count <= 0:
        return []
    least = ordered[count - 1].priority
    above = [row for row in ordered if row.priority > least]
    level = [row for row in ordered if row.priority == least]
    return above + random.sample(level, count - len(above))


def _allowed(row: _Due, exclusions: Exclusions | None) -> Timetable:
    if exclusions is None:
        return row.timetable
    return Excluding(timetable=row.timetable, exclusions=exclusions)


def _after(row: _Due, plan: timetable.Plan) -> datetime | None:
    spans = [span.last for span in (plan.coalesced, plan.misfired) if span is not None]
    decided = max([row.next_run_at, *spans, *plan.then, *([plan.run] if plan.run else [])])
    return timetable.first_after(row.timetable, decided, ends_at=row.ends_at)


def _skipping(row: _Due, exclusions: Exclusions) -> Decision:
    """Decide the excluded instants from the due one on, up to the first that may run."""
    reason = exclusions.excluded(row.next_run_at)
    resume = timetable.first_after(_allowed(row, exclusions), row.next_run_at, ends_at=row.ends_at)
    end = row.now if resume is None else min(row.now, resume - _TICK)
    last = timetable.latest(row.timetable, after=row.next_run_at, until=end)
    count = 1 + row.timetable.count(row.next_run_at, end)
    span = timetable.Span(first=row.next_run_at, last=last or row.next_run_at, count=count)
    skip = _skip(span, Run.Reason.CALENDAR)
    return Decision(
        schedule_id=row.pk,
        version=row.version,
        seen_next_run_at=row.next_run_at,
        next_run_at=timetable.first_after(row.timetable, span.last, ends_at=row.ends_at),
        owner_token=new_owner_token(),
        concurrency_key=row.scope,
        skips=(dataclasses.replace(skip, details=(skip.details or {}) | {"why": reason}),),
    )


def _skip(span: timetable.Span, reason: str) -> Skip:
    details: dict[str, Any] | None = None
    if span.count > 1:
        details = {
            "first_at": span.first.isoformat(),
            "last_at": span.last.isoformat(),
            "count": span.count,
        }
    return Skip(scheduled_at=span.first, reason=reason, details=details)
