"""``schedulerctl nodes``: the ``runscheduler`` processes and how they are."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from distcron_app.cli import states, times
from distcron_app.cli.console import Cell, Column, Console
from distcron_app.cli.exits import FAILED, Exit
from distcron_app.explanations import zone_data_warning
from distcron_app.instants import database_now
from distcron_app.models import Node
from distcron_app.nodes import ALIVE, computed_state

__all__ = ["show_nodes"]

_ZONE_DATA = gettext_lazy("ZONE DATA")
_COLUMNS = (
    Column(title=gettext_lazy("STATE")),
    Column(title=gettext_lazy("NODE"), flexible=True),
    Column(title=gettext_lazy("PROCESS"), flexible=True),
    Column(title=gettext_lazy("VERSION")),
    Column(title=_ZONE_DATA, only_wide=True),
    Column(title=gettext_lazy("HEARTBEAT")),
    Column(title=gettext_lazy("LAG"), right=True),
    Column(title=gettext_lazy("RUNNING"), right=True),
    Column(title=gettext_lazy("QUEUES"), flexible=True),
    Column(title=gettext_lazy("CLOCK"), right=True),
    Column(title=gettext_lazy("STARTED"), only_wide=True),
    Column(title=gettext_lazy("ID"), only_wide=True),
    Column(title=gettext_lazy("ALERT"), flexible=True),
)


def show_nodes(console: Console, options: dict[str, Any]) -> None:
    """Show the nodes. Raise Exit when none is alive."""
    nodes = Node.objects.order_by("name", "-started_at")
    if not options["all"]:
        nodes = nodes.filter(state__in=Node.MEMBER_STATES)
    now = database_now()
    shown = list(nodes)
    warning = zone_data_warning(node for node in shown if computed_state(node, now) in ALIVE)
    if console.view.as_json:
        facts = [_facts(node, now) for node in shown]
        console.json("nodes", nodes=facts, warnings=[warning] if warning else [])
    elif shown:
        console.table(
            _columns(differ=bool(warning)), [_row(node, now, console.view.zone) for node in shown]
        )
    if warning and not console.view.as_json:
        console.say(_("warning: %s") % warning, "yellow")
    if not any(computed_state(node, now) in ALIVE for node in shown):
        raise Exit(FAILED, _("no node is alive. Start one: manage.py runscheduler"))


def _columns(*, differ: bool) -> list[Column]:
    """Return the columns; where the nodes differ in their zone data, that one is shown, too."""
    return [
        dataclasses.replace(column, only_wide=False)
        if differ and column.title is _ZONE_DATA
        else column
        for column in _COLUMNS
    ]


def _row(node: Node, now: datetime, zone: str) -> list[Cell | str]:
    state = computed_state(node, now)
    return [
        states.cell(state, states.node_label(state)),
        node.name,
        f"{node.host}:{node.pid}",
        node.version,
        node.zone_data,
        times.relative(min(node.heartbeat_at, now - timedelta(microseconds=1)), now),
        _("%d ms") % node.tick_lag_ms,
        f"{node.running}/{node.slots}",
        ",".join(node.queues) or _("all"),
        _("%+d ms") % node.clock_offset_ms,
        times.short_moment(node.started_at, zone or "UTC", now),
        str(node.id),
        Cell(node.alert, "yellow"),
    ]


def _facts(node: Node, now: datetime) -> dict[str, Any]:
    return {
        "id": str(node.id),
        "name": node.name,
        "state": computed_state(node, now),
        "host": node.host,
        "pid": node.pid,
        "version": node.version,
        "zone_data": node.zone_data,
        "started_at": times.iso(node.started_at),
        "heartbeat_at": times.iso(node.heartbeat_at),
        "heartbeat_age_seconds": round((now - node.heartbeat_at).total_seconds(), 3),
        "expires_at": times.iso(node.expires_at),
        "tick_lag_ms": node.tick_lag_ms,
        "running": node.running,
        "slots": node.slots,
        "queues": node.queues,
        "clock_offset_ms": node.clock_offset_ms,
        "alert": node.alert,
    }
