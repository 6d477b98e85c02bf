"""History that is deleted on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from distcron_app import audit, lifecycle
from distcron_app.models import Run, Schedule
from distcron_app.operations.author import Author, check_reason

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractBaseUser

__all__ = ["prune_history"]


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
    check_reason(reason)
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
            _record_pruning(limits, count, Author(actor=actor, user=user, via=via, reason=reason))


def _record_pruning(limits: lifecycle.Limits, count: int, author: Author) -> None:
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
