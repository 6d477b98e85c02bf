"""Backfills: a past range of occurrences that is run on request."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta
from typing import Any

from django.db import models
from django.db.models import Q
from django.urls import reverse
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from distcron_app.instants import InstantField
from distcron_app.models.schedules import Schedule

__all__ = ["Backfill", "BackfillProgress", "BackfillQuerySet"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackfillProgress:
    """How far a backfill is: its ``total`` runs by state; ``pruned`` ones have ended.

    ``last_due_at`` is when the last run that waits may start, None where none waits.
    """

    total: int
    states: dict[str, int]
    began_at: datetime
    last_due_at: datetime | None = None

    @property
    def open(self) -> int:
        """Return how many runs have not ended."""
        return sum(self.states.get(state, 0) for state in ("queued", "claimed", "running"))

    @property
    def ended(self) -> int:
        """Return how many runs have ended, pruned ones included."""
        return self.total - self.open

    @property
    def pruned(self) -> int:
        """Return how many runs were deleted from the history."""
        return max(0, self.total - sum(self.states.values()))

    @property
    def percent(self) -> int:
        """Return how much has ended, rounded down."""
        return self.ended * 100 // self.total if self.total else 100

    def remaining_seconds(self, now: datetime) -> float | None:
        """Return how long it takes by its pace, and as long for each run as so far.

        None where nothing is known yet, 0 where no run is open.
        """
        if not self.open:
            return 0.0
        paced = 0.0
        if self.last_due_at is not None:
            paced = max(0.0, (self.last_due_at - now).total_seconds())
        if not self.ended:
            return paced or None
        usual = (now - self.began_at).total_seconds() / self.ended * self.open
        return max(paced, usual)


class BackfillQuerySet(models.QuerySet["Backfill"]):
    """Verbs on backfills."""

    def active(self) -> BackfillQuerySet:
        """Return those whose runs wait or run."""
        return self.filter(state=Backfill.State.ACTIVE)

    def progress(self) -> dict[int, BackfillProgress]:
        """Return how far each is, by one query for all of them."""
        rows = list(self.values_list("pk", "planned", "created_at"))
        states: dict[int, dict[str, int]] = {pk: {} for pk, _planned, _at in rows}
        last: dict[int, datetime] = {}
        runs: Any = Backfill.runs.rel.related_model
        found = runs.objects.filter(backfill__in=list(states)).order_by()
        counts = found.values_list("backfill_id", "state").annotate(
            count=models.Count("pk"), last=models.Max("due_at")
        )
        for pk, state, count, last_due_at in counts:
            states[pk][state] = count
            if state == "queued":
                last[pk] = last_due_at
        return {
            pk: BackfillProgress(
                total=planned, states=states[pk], began_at=created_at, last_due_at=last.get(pk)
            )
            for pk, planned, created_at in rows
        }


class Backfill(models.Model):
    """The occurrences of a schedule from ``first_at`` to ``last_at``, run on request.

    Its runs are rows from the beginning, and ``planned`` is how many there are. ``state``
    becomes ``done`` with the sweep after the last of them has ended.
    """

    class State(models.TextChoices):
        ACTIVE = "active", pgettext_lazy("backfill", "active")  # its runs wait or run
        DONE = "done", pgettext_lazy("backfill", "done")  # final: every run has ended
        CANCELLED = "cancelled", pgettext_lazy("backfill", "cancelled")  # final

    class Overlap(models.TextChoices):
        ONE_BY_ONE = "one_by_one", _("one by one, while no other run of the schedule is active")
        SIDE_BY_SIDE = "side_by_side", _("side by side, as far as the schedule allows it")

    class Repeat(models.TextChoices):
        NONE = "none", _("only instants without a run; what was skipped has none")
        FAILED = "failed", _("also those whose run failed, was cancelled or is lost")
        ALL = "all", _("every instant, also those whose run succeeded")

    schedule = models.ForeignKey(
        Schedule,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        null=True,
        related_name="backfills",
        verbose_name=_("schedule"),
    )
    schedule_name = models.CharField(_("schedule name"), max_length=200)
    first_at = InstantField(_("from"))
    last_at = InstantField(_("to"))
    # Instead of the schedule's; None for those.
    arguments = models.JSONField(_("arguments"), null=True, blank=True)
    overlap = models.CharField(
        _("overlap"), max_length=20, choices=Overlap, default=Overlap.ONE_BY_ONE
    )
    most_active = models.PositiveIntegerField(_("side by side at most"), null=True)
    per_minute = models.PositiveIntegerField(_("runs per minute"), null=True)
    repeat = models.CharField(_("repeat"), max_length=10, choices=Repeat, default=Repeat.NONE)
    planned = models.PositiveIntegerField(_("runs"))
    by = models.CharField(_("started by"), max_length=150)
    reason = models.CharField(_("reason"), max_length=500, blank=True)
    created_at = InstantField(_("started"))

    state = models.CharField(_("state"), max_length=10, choices=State, default=State.ACTIVE)
    state_by = models.CharField(_("ended by"), max_length=150, blank=True)
    state_reason = models.CharField(_("why it ended"), max_length=500, blank=True)
    state_at = InstantField(_("ended"), null=True)

    objects = BackfillQuerySet.as_manager()

    class Meta:
        verbose_name = _("backfill")
        verbose_name_plural = _("backfills")
        ordering = ["-id"]
        # Who may see runs may see these; see the permissions of schedules and runs.
        default_permissions = ()
        indexes = [
            models.Index(
                fields=["state"], name="distcron_backfill_active", condition=Q(state="active")
            )
        ]
        constraints = [
            models.CheckConstraint(
                name="distcron_backfill_state",
                condition=Q(state__in=["active", "done", "cancelled"]),
            )
        ]

    def __str__(self) -> str:
        return f"{self.schedule_name} #{self.pk}"

    def get_absolute_url(self) -> str:
        return reverse("distcron:backfill", args=[self.pk])

    def progress(self) -> BackfillProgress:
        """Return how far it is, by two queries."""
        return Backfill.objects.filter(pk=self.pk).progress()[self.pk]

    @property
    def pause(self) -> timedelta:
        """Return how long after another its runs may start at the earliest."""
        return timedelta(minutes=1) / self.per_minute if self.per_minute else timedelta()
