"""Membership: which ``runscheduler`` processes there are, and which of them are dead.

A node is a row with a lease by the database's clock, renewed by one UPDATE per
heartbeat. A node that is declared dead is fenced for good: its heartbeat changes no
row, its claims and starts are refused, and the process goes on under a new id.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from datetime import datetime, timedelta
from uuid import UUID, uuid4

from django.db import transaction

import distcron_app
from distcron_app.conf import Config, get_config
from distcron_app.instants import DatabaseNow
from distcron_app.models import Node
from distcron_app.timetable import tzdata_version

__all__ = [
    "ALIVE",
    "Vitals",
    "computed_state",
    "declare_dead",
    "drain",
    "forget",
    "heartbeat",
    "leave",
    "register",
]

# What ``computed_state`` returns for a node whose lease holds.
ALIVE = ("alive", "suspect", "draining")
# Heartbeats of 1.5 intervals ago: one is overdue, the lease has not expired yet.
_SUSPECT_INTERVALS = 1.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What a heartbeat tells about the node."""

    running: int = 0
    tick_lag_ms: int = 0
    clock_offset_ms: int = 0
    alert: str = ""


def register(config: Config) -> UUID:
    """Insert this process as an active node under a fresh id and return the id."""
    node_id = uuid4()
    Node.objects.create(
        id=node_id,
        name=config.label,
        host=socket.gethostname(),
        pid=os.getpid(),
        version=distcron_app.__version__,
        zone_data=tzdata_version(),
        started_at=DatabaseNow(),
        heartbeat_at=DatabaseNow(),
        expires_at=DatabaseNow(_lease(config)),
        slots=config.slots,
        queues=list(config.queues),
    )
    return node_id


def heartbeat(config: Config, node_id: UUID, vitals: Vitals) -> bool:
    """Extend the node's lease by one UPDATE. False means fenced: claim nothing more."""
    changed = Node.objects.filter(pk=node_id, state__in=Node.MEMBER_STATES).update(
        heartbeat_at=DatabaseNow(),
        expires_at=DatabaseNow(_lease(config)),
        running=vitals.running,
        tick_lag_ms=vitals.tick_lag_ms,
        clock_offset_ms=vitals.clock_offset_ms,
        alert=vitals.alert[:300],
    )
    return changed == 1


def drain(node_id: UUID) -> None:
    """Mark the node as draining: it claims nothing more and finishes what it has."""
    Node.objects.filter(pk=node_id, state=Node.State.ACTIVE).update(state=Node.State.DRAINING)


def leave(node_id: UUID) -> None:
    """Mark the node as left. What it still owned becomes recoverable at once."""
    Node.objects.filter(pk=node_id, state__in=Node.MEMBER_STATES).update(
        state=Node.State.LEFT, expires_at=DatabaseNow(), running=0
    )


def declare_dead(grace_seconds: float = 0.0) -> list[UUID]:
    """Fence every node whose lease ended ``grace_seconds`` ago; return those this call fenced."""
    with transaction.atomic():
        expired = list(
            Node.objects.expired(grace_seconds)
            .select_for_update()
            .order_by("pk")
            .values_list("pk", flat=True)
        )
        if expired:
            Node.objects.filter(pk__in=expired).update(state=Node.State.DEAD, running=0)
    return expired


def forget(older_than: timedelta = timedelta(days=1)) -> int:
    """Delete rows of nodes that left or died long ago and own no open run; return how many."""
    gone = Node.objects.exclude(state__in=Node.MEMBER_STATES).filter(
        heartbeat_at__lt=DatabaseNow(-older_than)
    )
    deleted, _ = gone.exclude(runs__state__in=["claimed", "running"]).delete()
    return deleted


def computed_state(node: Node, now: datetime) -> str:
    """Return alive, suspect, draining, left or dead, by the database's clock ``now``."""
    if node.state not in Node.MEMBER_STATES:
        return str(node.state)
    if node.expires_at <= now:
        return "dead"
    if now - node.heartbeat_at > _suspect_after():
        return "suspect"
    return "draining" if node.state == Node.State.DRAINING else "alive"


def _suspect_after() -> timedelta:
    return timedelta(seconds=get_config().heartbeat_seconds * _SUSPECT_INTERVALS)


def _lease(config: Config) -> timedelta:
    return timedelta(seconds=config.node_lease_seconds)
