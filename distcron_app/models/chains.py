"""Chains: which schedule starts another one when its run has ended, and what was started."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models, transaction
from django.utils.translation import gettext_lazy as _

from distcron_app.errors import ChainCycle
from distcron_app.instants import InstantField
from distcron_app.models.runs import Run
from distcron_app.models.schedules import Schedule

__all__ = ["ChainGraph", "ChainLink", "ChainStart", "find_path"]


class ChainGraph(models.Model):
    """One row that is locked while links change: two people cannot close a cycle together."""

    ONLY = 1

    class Meta:
        verbose_name = _("chain graph")
        verbose_name_plural = _("chain graphs")

    def __str__(self) -> str:
        return str(self.pk)

    @classmethod
    def lock(cls) -> None:
        """Wait until nobody else changes links; ends with the transaction that must be open."""
        cls.objects.select_for_update().get_or_create(pk=cls.ONLY)


class ChainLink(models.Model):
    """When a run of ``schedule`` has ended so, a run of ``follower`` is queued."""

    class Event(models.TextChoices):
        SUCCEEDED = "succeeded", _("has succeeded")
        FAILED = "failed", _("has failed or is lost")
        SKIPPED = "skipped", _("is skipped")

    schedule = models.ForeignKey(
        Schedule,
        on_delete=models.CASCADE,
        db_index=False,  # the unique constraint begins with it
        related_name="links",
        verbose_name=_("schedule"),
    )
    event = models.CharField(_("when a run"), max_length=10, choices=Event, default=Event.SUCCEEDED)
    follower = models.ForeignKey(
        Schedule,
        on_delete=models.CASCADE,
        related_name="followed",
        verbose_name=_("start the schedule"),
    )

    class Meta:
        verbose_name = _("chain link")
        verbose_name_plural = _("chain links")
        ordering = ["schedule", "event", "follower"]
        constraints = [
            models.UniqueConstraint(
                fields=["schedule", "event", "follower"], name="distcron_chainlink_once"
            ),
            models.CheckConstraint(
                name="distcron_chainlink_event",
                condition=models.Q(event__in=["succeeded", "failed", "skipped"]),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.schedule.key} {self.event} → {self.follower.key}"

    def save(self, *args: Any, **options: Any) -> None:
        """Write the link. Raise ChainCycle where it closes a cycle, whoever else saves now."""
        with transaction.atomic(using=options.get("using")):
            ChainGraph.lock()
            self._check_cycle()
            super().save(*args, **options)

    def clean(self) -> None:
        """Refuse a link that closes a cycle."""
        try:
            self._check_cycle()
        except ChainCycle as error:
            raise ValidationError({"follower": [str(error)]}) from error

    def _check_cycle(self) -> None:
        if self.schedule_id is None or self.follower_id is None:
            return
        others = ChainLink.objects.exclude(pk=self.pk).order_by()
        path = find_path(
            others.values_list("schedule_id", "follower_id"), self.follower_id, self.schedule_id
        )
        if path:
            keys = dict(Schedule.objects.filter(pk__in=path).values_list("pk", "key"))
            raise ChainCycle([keys.get(pk, str(pk)) for pk in (self.schedule_id, *path)])


class ChainStart(models.Model):
    """What the end of a run has started, and what that run was like then.

    ``run`` is the one that was started, ``parent_id`` the one that had ended; either may be
    pruned before the other. One row for each end and follower: no repeated report, crash or
    second node starts a follower twice. Only ``lifecycle`` writes it.
    """

    run = models.OneToOneField(
        Run,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        primary_key=True,
        related_name="chain_start",
        verbose_name=_("run"),
    )
    parent = models.ForeignKey(
        Run,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="chain_starts",
        verbose_name=_("started by the run"),
    )
    # Of the parent: a person may run it again, and that ends again.
    attempt = models.PositiveIntegerField(_("attempt"))
    schedule = models.ForeignKey(
        Schedule,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="+",
        verbose_name=_("schedule"),
    )
    parent_key = models.CharField(_("key"), max_length=100)
    state = models.CharField(_("state"), max_length=10, choices=Run.State)
    reason = models.CharField(_("reason"), max_length=20, choices=Run.Reason, blank=True)
    scheduled_at = InstantField(_("scheduled"))
    result = models.JSONField(_("result"), null=True, blank=True)
    # How many links led here.
    depth = models.PositiveSmallIntegerField(_("depth"))

    class Meta:
        verbose_name = _("chain start")
        verbose_name_plural = _("chain starts")
        indexes = [
            # For the question why a schedule ran at an instant.
            models.Index(fields=["schedule", "scheduled_at"], name="distcron_chainstart_at")
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["parent", "attempt", "schedule"], name="distcron_chainstart_once"
            )
        ]

    def __str__(self) -> str:
        return f"{self.parent_key} #{self.parent_id} → #{self.run_id}"


def find_path(links: Iterable[tuple[int, int]], start: int, end: int) -> list[int]:
    """Return the shortest way from ``start`` to ``end`` along the links, both included.

    Empty where there is none. A way from a schedule to itself is that schedule alone.
    """
    following: dict[int, list[int]] = {}
    for source, target in links:
        following.setdefault(source, []).append(target)
    ways = {start: [start]}
    reached = [start]
    for at in reached:
        if at == end:
            return ways[at]
        for target in following.get(at, ()):
            if target not in ways:
                ways[target] = [*ways[at], target]
                reached.append(target)
    return []
