"""Nodes: the ``runscheduler`` processes and their leases."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import timedelta

from django.db import models
from django.utils.translation import gettext_lazy as _

from distcron_app.instants import DatabaseNow, InstantField

__all__ = ["Node", "served_queues"]


class NodeQuerySet(models.QuerySet["Node"]):
    """Verbs on nodes."""

    def alive(self) -> NodeQuerySet:
        """Return nodes whose lease has not expired by the database's clock."""
        return self.filter(state__in=Node.MEMBER_STATES, expires_at__gt=DatabaseNow())

    def expired(self, grace_seconds: float = 0.0) -> NodeQuerySet:
        """Return nodes that should be alive and whose lease ended ``grace_seconds`` ago."""
        limit = DatabaseNow(timedelta(seconds=-grace_seconds))
        return self.filter(state__in=Node.MEMBER_STATES, expires_at__lte=limit)


class Node(models.Model):
    """One ``runscheduler`` process; its id is fresh at each start, its name only a label."""

    class State(models.TextChoices):
        ACTIVE = "active", _("active")
        DRAINING = "draining", _("draining")  # takes no new claims, finishes what it has
        LEFT = "left", _("left")  # ended by itself
        DEAD = "dead", _("dead")  # lease expired; fenced for good

    MEMBER_STATES = ("active", "draining")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(_("name"), max_length=100)
    host = models.CharField(_("host"), max_length=255)
    pid = models.IntegerField(_("process id"))
    version = models.CharField(_("version"), max_length=40)
    # The zone data that its instants come from; nodes that differ are shown.
    zone_data = models.CharField(_("time zone data"), max_length=10, blank=True, default="")
    state = models.CharField(_("state"), max_length=10, choices=State, default=State.ACTIVE)
    started_at = InstantField(_("started"))
    heartbeat_at = InstantField(_("heartbeat"))
    expires_at = InstantField(_("lease until"))
    # Those that it serves; empty is all of them.
    queues = models.JSONField(_("queues"), default=list, blank=True)
    slots = models.PositiveIntegerField(_("slots"), default=0)
    running = models.PositiveIntegerField(_("running"), default=0)
    tick_lag_ms = models.IntegerField(_("tick lag (ms)"), default=0)
    clock_offset_ms = models.IntegerField(_("clock offset (ms)"), default=0)
    alert = models.CharField(_("alert"), max_length=300, blank=True)

    objects = NodeQuerySet.as_manager()

    class Meta:
        verbose_name = _("node")
        verbose_name_plural = _("nodes")
        ordering = ["name", "started_at"]
        indexes = [models.Index(fields=["state", "expires_at"], name="distcron_node_lease")]

    def __str__(self) -> str:
        return f"{self.name} {str(self.id)[:8]}"

    def serves(self, queue: str) -> bool:
        """Return True where the node runs what is in ``queue``."""
        return not self.queues or queue in self.queues


def served_queues(alive: Iterable[Node]) -> frozenset[str] | None:
    """Return the queues that the nodes serve which take new runs; None means every queue."""
    taking = [node for node in alive if node.state == Node.State.ACTIVE]
    if any(not node.queues for node in taking):
        return None
    return frozenset(queue for node in taking for queue in node.queues)
