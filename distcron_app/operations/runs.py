"""Run now, run again, cancel a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from django.utils.translation import gettext as _

from distcron_app import audit, lifecycle, registry
from distcron_app.errors import RunMovedOn, ScheduleBusy
from distcron_app.models import Run, Schedule
from distcron_app.operations.author import Author, check_reason, once, row_key

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractBaseUser

__all__ = ["Cancellation", "cancel_run", "run_again", "run_now"]


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


def run_now(
    schedule: Schedule,
    *,
    actor: str,
    user: AbstractBaseUser | None = None,
    via: audit.Via,
    reason: str = "",
    arguments: Mapping[str, Any] | None = None,
    nominal_at: datetime | None = None,
    behind: bool = False,
    idempotency_key: str | None = None,
) -> Run:
    """Queue one run outside the timetable and return it; also for a paused schedule.

    With ``nominal_at``, aware, the job is told that instant as its own, whatever the
    timetable makes of it: the timetable neither loses it nor is held back. The same
    idempotency key returns the same run. Raise ScheduleBusy when a run is queued or active,
    unless it may wait ``behind`` that one; UnknownJob or InvalidArguments for what could
    not start.
    """
    check_reason(reason)
    key = row_key("run_now", schedule.pk, idempotency_key)

    def queue() -> Run:
        job = registry.get(schedule.job)
        job.check(schedule.arguments if arguments is None else job.dump(arguments))
        run = lifecycle.queue_manual(
            schedule, by=actor[:150], arguments=arguments, nominal_at=nominal_at, behind=behind
        )
        audit.record(
            actor=actor,
            user=user,
            via=via,
            verb="run_now",
            target=schedule,
            reason=reason,
            after={"run": run.pk, "arguments": run.arguments} | _for_instant(nominal_at),
            idempotency_key=key,
        )
        return run

    return once(key, _run_of, queue, ScheduleBusy)


def _for_instant(nominal_at: datetime | None) -> dict[str, Any]:
    return {} if nominal_at is None else {"nominal_at": audit.json_value(nominal_at)}


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
    check_reason(reason)
    key = row_key("run_again", run.pk, idempotency_key)

    def queue() -> Run:
        registry.get(run.job).check(run.arguments)
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
        return queued

    return once(key, _run_of, queue, RunMovedOn, ScheduleBusy)


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
    author = Author(actor=actor, user=user, via=via, reason=reason.strip())
    check_reason(author.reason)
    key = row_key("cancel", run.pk, idempotency_key)
    return once(key, _cancellation_of, lambda: _cancel(run, author, key), RunMovedOn)


def _cancel(run: Run, author: Author, key: str | None) -> Cancellation:
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


def _cancellation_of(after: dict[str, Any]) -> Cancellation:
    return Cancellation(run_id=after["run"], outcome=after["outcome"])


def _why_not_again(run_id: int) -> str:
    found = Run.objects.filter(pk=run_id).first()
    if found is not None and found.state in Run.AGAIN_STATES:
        return _("its schedule was deleted, so it cannot run again.")
    message = _("%s by now. Only a failed, cancelled or lost run can be run again.")
    return message % _state_label(run_id)


def _state_label(run_id: int) -> str:
    found = Run.objects.filter(pk=run_id).first()
    return _("pruned") if found is None else str(found.get_state_display())


def _run_of(after: dict[str, Any]) -> Run | None:
    return Run.objects.filter(pk=after["run"]).first()
