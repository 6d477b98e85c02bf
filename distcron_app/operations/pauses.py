"""Pause and resume schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from django.db import transaction
from django.utils.translation import gettext as _

from distcron_app import audit, lifecycle, wakeup
from distcron_app.instants import database_now
from distcron_app.models import Schedule
from distcron_app.operations.author import Author, check_reason, check_until, entries_of, row_key

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractBaseUser

__all__ = ["StateChange", "pause", "resume"]

_STATE_FIELDS = ("state", "state_reason", "state_by", "state_at", "paused_until")
Guard = Callable[[Schedule], bool]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """What a pause or resume did; ``unchanged`` already stood where they were wanted."""

    changed: tuple[Schedule, ...] = ()
    unchanged: tuple[Schedule, ...] = ()


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
    check_until(until)

    def stop(schedule: Schedule) -> bool:
        if schedule.state == Schedule.State.PAUSED or not (only_if is None or only_if(schedule)):
            return False
        schedule.state, schedule.state_reason = Schedule.State.PAUSED, reason.strip()
        schedule.paused_until = until
        return True

    author = Author(actor=actor, user=user, via=via, reason=reason.strip())
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

    author = Author(actor=actor, user=user, via=via, reason=reason.strip())
    return _change_all(schedules, "resume", go_on, author, idempotency_key)


def _change_all(
    schedules: Iterable[Schedule],
    verb: str,
    change: Callable[[Schedule], bool],
    author: Author,
    idempotency_key: str | None,
) -> StateChange:
    check_reason(author.reason)
    changed: list[Schedule] = []
    unchanged: list[Schedule] = []
    with transaction.atomic():
        # In key order, as the claim locks them; what was deleted meanwhile is left out.
        rows = Schedule.objects.select_for_update().filter(pk__in=[row.pk for row in schedules])
        for schedule in rows.order_by("pk"):
            key = row_key(verb, schedule.pk, idempotency_key)
            # A form sent again after somebody else reversed it must not act again.
            is_repeated = key is not None and entries_of(key).exists()
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
    author: Author,
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
