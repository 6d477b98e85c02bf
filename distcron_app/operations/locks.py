"""The release of a lock, whoever holds it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from distcron_app import audit, lifecycle, wakeup
from distcron_app.conf import STANDARD
from distcron_app.errors import LockUnavailable
from distcron_app.locks import get_level, is_scope_lock, schedule_id_of, scope_lock_name
from distcron_app.models import Run, Schedule
from distcron_app.operations.author import Author, check_reason, done_before, row_key

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractBaseUser

__all__ = ["LockRelease", "earlier_release", "release_lock"]


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
    wake-up arrives. Where it is that of a concurrency key, the active runs with that key
    are. Blocks for one call to the backend. Raise ValueError without a reason,
    ConfigurationError for an unknown level.
    """
    if not reason.strip():
        raise ValueError(_("Reason: missing. Say why the lock is taken from its holder."))
    author = Author(actor=actor, user=user, via=via, reason=reason.strip())
    check_reason(author.reason)
    key = row_key("release_lock:" + name, 0, idempotency_key)
    earlier = done_before(key, _release_of)
    if earlier is not None:
        return earlier
    scope = _scope_of(name)
    schedule = Schedule.objects.filter(pk=schedule_id_of(name) or 0).first()
    backend = get_level(level if schedule is None else schedule.lock_level).backend
    try:
        with transaction.atomic():
            if scope:
                done = _disown_scope(name, scope, author, key)
            else:
                done = _disown(name, schedule, author, key)
    except IntegrityError:
        # The other click of a double click committed first.
        earlier = done_before(key, _release_of)
        if earlier is None:
            raise
        return earlier
    try:
        done = dataclasses.replace(done, was_held=backend.force_release(name))
    except LockUnavailable as error:
        done = dataclasses.replace(done, problem=error.cause)
    wakeup.announce()
    return done


def earlier_release(name: str, idempotency_key: str) -> LockRelease | None:
    """Return what a form that was sent before did to the lock ``name``; None for a new one."""
    return done_before(row_key("release_lock:" + name, 0, idempotency_key), _release_of)


def _scope_of(name: str) -> str:
    """Return the concurrency key of the active runs under the lock ``name``, else ""."""
    if not is_scope_lock(name):
        return ""
    active = Run.objects.filter(state__in=Run.ACTIVE_STATES).exclude(concurrency_key="")
    keys = set(active.values_list("concurrency_key", flat=True))
    return next((key for key in keys if scope_lock_name(key) == name), "")


def _disown_scope(name: str, scope: str, author: Author, key: str | None) -> LockRelease:
    released = lifecycle.release_scope(scope)
    done = LockRelease(
        name=name,
        fencing_token=max((each.fencing_token for _schedule, each in released), default=None),
        requeued=tuple(run for _schedule, each in released for run in each.runs.requeued),
        lost=tuple(run for _schedule, each in released for run in each.runs.lost),
    )
    # One entry for each schedule, since the page of a run looks there who released its lock.
    for number, (schedule, _each) in enumerate(released):
        _record_release(done, schedule, author, None if number else key)
    if not released:
        _record_release(done, name, author, key)
    return done


def _disown(name: str, schedule: Schedule | None, author: Author, key: str | None) -> LockRelease:
    done = LockRelease(name=name)
    if schedule is not None:
        released = lifecycle.release(schedule.pk)
        done = LockRelease(
            name=name,
            fencing_token=released.fencing_token,
            requeued=released.runs.requeued,
            lost=released.runs.lost,
        )
    _record_release(done, name if schedule is None else schedule, author, key)
    return done


def _record_release(
    done: LockRelease, target: Schedule | str, author: Author, key: str | None
) -> None:
    audit.record(
        actor=author.actor,
        user=author.user,
        via=author.via,
        verb="release_lock",
        target=target,
        reason=author.reason,
        after={
            "lock": done.name,
            "fencing_token": done.fencing_token,
            "requeued": list(done.requeued),
            "lost": list(done.lost),
        },
        idempotency_key=key,
    )


def _release_of(after: dict[str, Any]) -> LockRelease:
    return LockRelease(
        name=after["lock"],
        fencing_token=after["fencing_token"],
        requeued=tuple(after["requeued"]),
        lost=tuple(after["lost"]),
    )
