"""What people do besides editing schedules: run now or again, cancel, pause, release a lock.

Admin, pages and command line call these, so that all three behave alike: each change
is one transaction together with its audit entry, nodes are told on commit, and a form
that is sent twice acts once. Who may do what is checked by the callers, with the
permissions named here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from distcron_app import audit, lifecycle, registry, wakeup
from distcron_app.conf import STANDARD
from distcron_app.errors import LockUnavailable, RunMovedOn, ScheduleBusy, UnknownJob
from distcron_app.instants import database_now
from distcron_app.locks import get_level, schedule_id_of
from distcron_app.models import AuditEntry, Maintenance, Run, Schedule

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractBaseUser
    from django.db.models import QuerySet

__all__ = [
    "ADD_SCHEDULES",
    "CANCEL_RUN",
    "FORCE_RELEASE_LOCK",
    "MANAGE_MAINTENANCE",
    "MANAGE_SCHEDULES",
    "PAUSE_SCHEDULE",
    "PRUNE_RUNS",
    "RUN_SCHEDULE",
    "VIEW_DASHBOARD",
    "VIEW_LOCK",
    "VIEW_OUTPUT",
    "Cancellation",
    "LockRelease",
    "StateChange",
    "begin_maintenance",
    "cancel_run",
    "earlier_release",
    "end_maintenance",
    "job_permission",
    "pause",
    "prune_history",
    "release_lock",
    "resume",
    "run_again",
    "run_now",
]

RUN_SCHEDULE = "distcron.run_schedule"
PAUSE_SCHEDULE = "distcron.pause_schedule"
CANCEL_RUN = "distcron.cancel_run"
MANAGE_MAINTENANCE = "distcron.change_maintenance"
ADD_SCHEDULES = "distcron.add_schedule"
MANAGE_SCHEDULES = "distcron.change_schedule"
VIEW_DASHBOARD = "distcron.view_dashboard"
VIEW_OUTPUT = "distcron.view_output"
VIEW_LOCK = "distcron.view_lock"
FORCE_RELEASE_LOCK = "distcron.force_release_lock"
PRUNE_RUNS = "distcron.delete_run"

REASON_LENGTH = 500
_STATE_FIELDS = ("state", "state_reason", "state_by", "state_at", "paused_until")
Guard = Callable[[Schedule], bool]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """What a pause or resume did; ``unchanged`` already stood where they were wanted."""

    changed: tuple[Schedule, ...] = ()
    unchanged: tuple[Schedule, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cancellation:
    """What the cancel of a run did; ``asked_before`` changed nothing, it was asked already."""

    run_id: int
    outcome: Literal["cancelled", "asked", "asked_before"]

    def in_words(self) -> str:
        """Return what became of the run, or what comes next."""
        if self.outcome == "cancelled":
            return _("Run %d is cancelled.") % self.run_id
        if self.outcome == "asked":
            return _("Run %d is asked to stop. It ends where its job looks for that.") % self.run_id
        return _("Run %d was asked to stop already. Nothing was changed.") % self.run_id


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LockRelease:
    """What the release of a lock did.

    ``was_held`` is None where the backend did not answer, for the ``problem`` it had: the
    lock then ends by itself. ``fencing_token`` is None for a lock that is no schedule's.
    """

    name: str
    was_held: bool | None = None
    problem: str = ""
    fencing_token: int | None = None
    requeued: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()

    def in_words(self) -> str:
        """Return what became of the lock, of its runs and of the fencing token."""
        parts = [self._lock_in_words()]
        parts += [_("Run %d is queued again.") % run for run in self.requeued]
        parts += [_("Run %d is shown as lost.") % run for run in self.lost]
        if self.fencing_token is not None:
            parts.append(_("The fencing token is %d.") % self.fencing_token)
        return " ".join(parts)

    def _lock_in_words(self) -> str:
        if self.problem:
            text = _("The lock backend does not answer, so the lock itself ends with its TTL: %s.")
            return text % self.problem
        if self.was_held is None:
            return _("The lock was released by this form already.")
        return _("The lock is released.") if self.was_held else _("The lock was not held any more.")


def job_permission(job: str) -> str | None:
    """Return the permission that the job itself asks for, or None; None for unknown jobs too."""
    try:
        return registry.get(job).permission
    except UnknownJob:
        return None


def run_now(
    schedule: Schedule,
    *,
    actor: str,
    user: AbstractBaseUser | None = None,
    via: audit.Via,
    reason: str = "",
    arguments: Mapping[str, Any] | None = None,
    behind: bool = False,
    idempotency_key: str | None = None,
) -> Run:
    """Queue one run outside the timetable and return it; also for a paused schedule.

    The same idempotency key returns the same run. Raise ScheduleBusy when a run is queued
    or active, unless it may wait ``behind`` that one; UnknownJob or InvalidArguments for
    what could not start.
    """
    _check_reason(reason)
    key = _row_key("run_now", schedule.pk, idempotency_key)
    earlier = _run_of(key)
    if earlier is not None:
        return earlier
    job = registry.get(schedule.job)
    job.check(schedule.arguments if arguments is None else job.dump(arguments))
    try:
        with transaction.atomic():
            run = lifecycle.queue_manual(
                schedule, by=actor[:150], arguments=arguments, behind=behind
            )
            audit.record(
                actor=actor,
                user=user,
                via=via,
                verb="run_now",
                target=schedule,
                reason=reason,
                after={"run": run.pk, "arguments": run.arguments},
                idempotency_key=key,
            )
    except (IntegrityError, ScheduleBusy):
        # The other click of a double click committed between the look-up and the lock.
        earlier = _run_of(key)
        if earlier is None:
            raise
        return earlier
    transaction.on_commit(wakeup.announce)
    return run


def run_again(
    run: Run,
    *,
    reason: str = "",
    actor: str,
    user: AbstractBaseUser | None = None,
    via: audit.Via,
    idempotency_key: str | None = None,
) -> Run:
    """Queue a run again that failed, was cancelled or is lost: one more attempt of the same run.

    Raise RunMovedOn where it is in another state or its schedule is gone, ScheduleBusy when
    the schedule has as many active runs as it may, UnknownJob or InvalidArguments for what
    could not start.
    """
    _check_reason(reason)
    key = _row_key("run_again", run.pk, idempotency_key)
    earlier = _run_of(key)
    if earlier is not None:
        return earlier
    registry.get(run.job).check(run.arguments)
    try:
        with transaction.atomic():
            queued = lifecycle.queue_again(run.pk)
            if queued is None:
                raise RunMovedOn(run.pk, _why_not_again(run.pk))
            audit.record(
                actor=actor,
                user=user,
                via=via,
                verb="run_again",
                target=queued,
                reason=reason,
                after={"run": queued.pk, "after_attempt": queued.attempt},
                idempotency_key=key,
            )
    except (IntegrityError, RunMovedOn, ScheduleBusy):
        # The other click of a double click committed between the look-up and the lock.
        earlier = _run_of(key)
        if earlier is None:
            raise
        return earlier
    transaction.on_commit(wakeup.announce)
    return queued


def cancel_run(
    run: Run,
    *,
    reason: str,
    actor: str,
    user: AbstractBaseUser | None = None,
    via: audit.Via,
    idempotency_key: str | None = None,
) -> Cancellation:
    """Cancel a run that is queued or claimed at once; ask a running one to stop.

    A running one ends as its job decides: it may also succeed first. Raise ValueError
    without a reason, RunMovedOn for a run that is final.
    """
    if not reason.strip():
        raise ValueError(_("Reason: missing. Say why, for whoever looks for the run's work."))
    author = _Author(actor=actor, user=user, via=via, reason=reason.strip())
    _check_reason(author.reason)
    key = _row_key("cancel", run.pk, idempotency_key)
    earlier = _cancellation_of(key)
    if earlier is not None:
        return earlier
    try:
        with transaction.atomic():
            done = _cancel(run, author, key)
    except (IntegrityError, RunMovedOn):
        # The other click of a double click committed first.
        earlier = _cancellation_of(key)
        if earlier is None:
            raise
        return earlier
    if done.outcome != "asked_before":
        transaction.on_commit(wakeup.announce)
    return done


def _cancel(run: Run, author: _Author, key: str | None) -> Cancellation:
    result = lifecycle.request_cancel([run.pk], cause=f"by {author.actor}: {author.reason}")
    if not result.cancelled and not result.asked:
        if Run.objects.open().filter(pk=run.pk).exists():
            return Cancellation(run_id=run.pk, outcome="asked_before")
        raise RunMovedOn(run.pk, _("%s by now, so it was not cancelled.") % _state_label(run.pk))
    done = Cancellation(run_id=run.pk, outcome="cancelled" if result.cancelled else "asked")
    audit.record(
        actor=author.actor,
        user=author.user,
        via=author.via,
        verb="cancel",
        target=run,
        reason=author.reason,
        after={"run": run.pk, "outcome": done.outcome},
        idempotency_key=key,
    )
    return done


def _cancellation_of(key: str | None) -> Cancellation | None:
    entry = None if key is None else _entries(key).first()
    if entry is None or entry.after is None:
        return None
    return Cancellation(run_id=entry.after["run"], outcome=entry.after["outcome"])


def _why_not_again(run_id: int) -> str:
    found = Run.objects.filter(pk=run_id).first()
    if found is not None and found.state in Run.AGAIN_STATES:
        return _("its schedule was deleted, so it cannot run again.")
    message = _("%s by now. Only a failed, cancelled or lost run can be run again.")
    return message % _state_label(run_id)


def _state_label(run_id: int) -> str:
    found = Run.objects.filter(pk=run_id).first()
    return _("pruned") if found is None else str(found.get_state_display())


def pause(
    schedules: Iterable[Schedule],
    *,
    reason: str,
    actor: str,
    user: AbstractBaseUser | None = None,
    via: audit.Via,
    until: datetime | None = None,
    only_if: Guard | None = None,
    idempotency_key: str | None = None,
) -> StateChange:
    """Stop the timetables of ``schedules`` until they are resumed; active runs go on.

    At ``until`` a node resumes them. ``only_if`` is asked about each row while it is
    locked. Raise ValueError without a reason, or for an ``until`` that is over. After the
    commit no node claims an occurrence.
    """
    if not reason.strip():
        raise ValueError(_("Reason: missing. Say why, for whoever finds the schedule paused."))
    _check_until(until)

    def stop(schedule: Schedule) -> bool:
        if schedule.state == Schedule.State.PAUSED or not (only_if is None or only_if(schedule)):
            return False
        schedule.state, schedule.state_reason = Schedule.State.PAUSED, reason.strip()
        schedule.paused_until = until
        return True

    author = _Author(actor=actor, user=user, via=via, reason=reason.strip())
    return _change_all(schedules, "pause", stop, author, idempotency_key)


def resume(
    schedules: Iterable[Schedule],
    *,
    reason: str = "",
    actor: str,
    user: AbstractBaseUser | None = None,
    via: audit.Via,
    only_if: Guard | None = None,
    idempotency_key: str | None = None,
) -> StateChange:
    """Let the timetables of paused ``schedules`` go on.

    What came due meanwhile is skipped with one row for all of it, or left to the misfire
    policy, as the schedule's ``on_resume`` says. ``only_if`` is asked about each row while
    it is locked. A row that cannot run any more becomes invalid or finished, with the
    reason.
    """

    def go_on(schedule: Schedule) -> bool:
        if schedule.state != Schedule.State.PAUSED or not (only_if is None or only_if(schedule)):
            return False
        schedule.state, schedule.state_reason = Schedule.State.ACTIVE, ""
        return True

    author = _Author(actor=actor, user=user, via=via, reason=reason.strip())
    return _change_all(schedules, "resume", go_on, author, idempotency_key)


def begin_maintenance(
    *,
    reason: str,
    actor: str,
    user: AbstractBaseUser | None = None,
    via: audit.Via,
    until: datetime | None = None,
) -> Maintenance:
    """Keep all nodes from claiming, from their next sweep on; return the switch.

    What runs is finished, and what comes due stays due. At ``until`` it ends by itself.
    Where it is on already, reason and end are replaced. Raise ValueError without a reason,
    or for an ``until`` that is over.
    """
    if not reason.strip():
        raise ValueError(_("Reason: missing. Say why, for whoever finds that nothing starts."))
    _check_until(until)
    author = _Author(actor=actor, user=user, via=via, reason=reason.strip())
    with transaction.atomic():
        return _switch(author, is_on=True, until=until)


def end_maintenance(
    *,
    reason: str = "",
    actor: str,
    user: AbstractBaseUser | None = None,
    via: audit.Via,
) -> Maintenance | None:
    """Let the nodes claim again; return the switch, or None where it was off.

    What came due meanwhile is late, and decided by the misfire policy of its schedule.
    """
    author = _Author(actor=actor, user=user, via=via, reason=reason.strip())
    with transaction.atomic():
        if not Maintenance.objects.on().select_for_update().exists():
            return None
        return _switch(author, is_on=False, until=None)


def _switch(author: _Author, *, is_on: bool, until: datetime | None) -> Maintenance:
    _check_reason(author.reason)
    row, _created = Maintenance.objects.select_for_update().get_or_create(pk=Maintenance.ONLY)
    before = {"is_on": row.is_on, "until": audit.json_value(row.until)}
    row.is_on, row.until, row.reason = is_on, until, author.reason
    row.by, row.at = author.actor[:150], database_now()
    row.save()
    audit.record(
        actor=author.actor,
        user=author.user,
        via=author.via,
        verb="maintenance_on" if is_on else "maintenance_off",
        target=row,
        reason=author.reason,
        before=before,
        after={"is_on": is_on, "until": audit.json_value(until)},
    )
    transaction.on_commit(wakeup.announce)
    return row


def release_lock(
    name: str,
    *,
    level: str = STANDARD,
    reason: str,
    actor: str,
    user: AbstractBaseUser | None = None,
    via: audit.Via,
    idempotency_key: str | None = None,
) -> LockRelease:
    """End a lock whoever holds it, by its full name as the console shows it.

    Where it is a schedule's, at that schedule's level whatever ``level`` says: its active
    runs are taken from their node first, with a larger fencing token, so that the holder
    can neither start nor finish them; it is told by the next sweep, at once where the
    wake-up arrives. Blocks for one call to the backend. Raise ValueError without a reason,
    ConfigurationError for an unknown level.
    """
    if not reason.strip():
        raise ValueError(_("Reason: missing. Say why the lock is taken from its holder."))
    author = _Author(actor=actor, user=user, via=via, reason=reason.strip())
    _check_reason(author.reason)
    key = _row_key("release_lock:" + name, 0, idempotency_key)
    earlier = _release_of(key)
    if earlier is not None:
        return earlier
    schedule = Schedule.objects.filter(pk=schedule_id_of(name) or 0).first()
    backend = get_level(level if schedule is None else schedule.lock_level).backend
    try:
        with transaction.atomic():
            done = _disown(name, schedule, author, key)
    except IntegrityError:
        # The other click of a double click committed first.
        earlier = _release_of(key)
        if earlier is None:
            raise
        return earlier
    try:
        done = dataclasses.replace(done, was_held=backend.force_release(name))
    except LockUnavailable as error:
        done = dataclasses.replace(done, problem=error.cause)
    wakeup.announce()
    return done


def prune_history(
    limits: lifecycle.Limits,
    *,
    reason: str = "",
    actor: str,
    user: AbstractBaseUser | None = None,
    via: audit.Via,
    batch: int,
    goes_on: Callable[[int], bool],
) -> int:
    """Delete the runs that are beyond ``limits``, batch by batch; return how many went.

    ``goes_on`` is told after each batch how many went so far and ends the work with False.
    One audit entry has the number at the end, also where an error ends it: each batch is a
    transaction of its own, and what is deleted by then stays deleted.
    """
    _check_reason(reason)
    count, after = 0, 0
    try:
        while True:
            step = lifecycle.prune(after, batch=batch, limits=limits)
            count += step.count
            if not goes_on(count) or step.after is None:
                return count
            after = step.after
    finally:
        if count:
            _record_pruning(limits, count, _Author(actor=actor, user=user, via=via, reason=reason))


def _record_pruning(limits: lifecycle.Limits, count: int, author: _Author) -> None:
    schedule = Schedule.objects.filter(pk=limits.schedule_id or 0).first()
    given = {"keep_days": limits.keep_days, "keep_failed": limits.keep_failed}
    audit.record(
        actor=author.actor,
        user=author.user,
        via=author.via,
        verb="prune",
        target=schedule or Run,
        reason=author.reason,
        after={
            "deleted": count,
            **{name: value for name, value in given.items() if value is not None},
        },
    )


def earlier_release(name: str, idempotency_key: str) -> LockRelease | None:
    """Return what a form that was sent before did to the lock ``name``; None for a new one."""
    return _release_of(_row_key("release_lock:" + name, 0, idempotency_key))


def _disown(name: str, schedule: Schedule | None, author: _Author, key: str | None) -> LockRelease:
    done = LockRelease(name=name)
    if schedule is not None:
        released = lifecycle.release(schedule.pk)
        done = LockRelease(
            name=name,
            fencing_token=released.fencing_token,
            requeued=released.runs.requeued,
            lost=released.runs.lost,
        )
    audit.record(
        actor=author.actor,
        user=author.user,
        via=author.via,
        verb="release_lock",
        target=name if schedule is None else schedule,
        reason=author.reason,
        after={
            "lock": name,
            "fencing_token": done.fencing_token,
            "requeued": list(done.requeued),
            "lost": list(done.lost),
        },
        idempotency_key=key,
    )
    return done


def _release_of(key: str | None) -> LockRelease | None:
    entry = None if key is None else _entries(key).first()
    if entry is None or entry.after is None:
        return None
    return LockRelease(
        name=entry.after["lock"],
        fencing_token=entry.after["fencing_token"],
        requeued=tuple(entry.after["requeued"]),
        lost=tuple(entry.after["lost"]),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Author:
    actor: str
    user: AbstractBaseUser | None
    via: audit.Via
    reason: str


def _change_all(
    schedules: Iterable[Schedule],
    verb: str,
    change: Callable[[Schedule], bool],
    author: _Author,
    idempotency_key: str | None,
) -> StateChange:
    _check_reason(author.reason)
    changed: list[Schedule] = []
    unchanged: list[Schedule] = []
    with transaction.atomic():
        # In key order, as the claim locks them; what was deleted meanwhile is left out.
        rows = Schedule.objects.select_for_update().filter(pk__in=[row.pk for row in schedules])
        for schedule in rows.order_by("pk"):
            key = _row_key(verb, schedule.pk, idempotency_key)
            # A form sent again after somebody else reversed it must not act again.
            is_repeated = key is not None and _entries(key).exists()
            if is_repeated or not _change_state(schedule, verb, change, author, key):
                unchanged.append(schedule)
            else:
                changed.append(schedule)
    if changed:
        transaction.on_commit(wakeup.announce)
    return StateChange(changed=tuple(changed), unchanged=tuple(unchanged))


def _change_state(
    schedule: Schedule,
    verb: str,
    change: Callable[[Schedule], bool],
    author: _Author,
    key: str | None,
) -> bool:
    before = audit.snapshot(schedule)
    paused_from = _undecided_from(schedule)
    if not change(schedule):
        return False
    schedule.state_by, schedule.state_at = author.actor[:150], database_now()
    schedule.save(update_fields=_STATE_FIELDS)
    if paused_from is not None and schedule.state != Schedule.State.INVALID:
        # Up to where planning went on: nothing where the misfire policy decides.
        lifecycle.skip_paused(schedule, paused_from, schedule.planned_from)
    old, new = audit.changes(before, audit.snapshot(schedule))
    audit.record(
        actor=author.actor,
        user=author.user,
        via=author.via,
        verb=verb,
        target=schedule,
        reason=author.reason,
        before=old,
        after=new,
        idempotency_key=key,
    )
    return True


def _undecided_from(schedule: Schedule) -> datetime | None:
    """Return after which instant a pause is to be accounted for; None where there is none."""
    start: datetime | None = schedule.planned_from
    if schedule.state != Schedule.State.PAUSED or start is None:
        return None
    return schedule.planning_start(start)


def _check_reason(reason: str) -> None:
    if len(reason) > REASON_LENGTH:
        message = _("Reason: %(length)s characters, allowed %(limit)s. Shorten it.")
        raise ValueError(message % {"length": len(reason), "limit": REASON_LENGTH})


def _check_until(until: datetime | None) -> None:
    if until is not None and until <= database_now():
        message = _("Until: %s is over. Choose a later time.")
        raise ValueError(message % until.isoformat(" ", "seconds"))


def _row_key(verb: str, pk: int, idempotency_key: str | None) -> str | None:
    """Return the key of one row of a form that may name many; always 64 characters."""
    if not idempotency_key:
        return None
    return hashlib.sha256(f"{verb}:{pk}:{idempotency_key}".encode()).hexdigest()


def _entries(key: str) -> QuerySet[AuditEntry]:
    return AuditEntry.objects.filter(idempotency_key=key)


def _run_of(key: str | None) -> Run | None:
    entry = None if key is None else _entries(key).first()
    if entry is None or entry.after is None:
        return None
    return Run.objects.filter(pk=entry.after["run"]).first()
