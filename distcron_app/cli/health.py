"""``schedulerctl status``: on one screen, whether all is well."""

from __future__ import annotations

import dataclasses
from collections import Counter
from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import Count, Max
from django.utils import formats
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

import distcron_app
from distcron_app.cli import states, times
from distcron_app.cli.console import Cell, Column, Console
from distcron_app.cli.exits import DEPENDENCY_DOWN, FAILED, Exit
from distcron_app.clock import Clock
from distcron_app.conf import get_config
from distcron_app.errors import LockUnavailable
from distcron_app.explanations import unserved_queue, zone_data_warning
from distcron_app.history import unserved_queues
from distcron_app.instants import DatabaseNow, database_now
from distcron_app.locks import get_backend
from distcron_app.models import Maintenance, Node, Run, Schedule, served_queues
from distcron_app.nodes import ALIVE, computed_state

__all__ = ["show_status"]

_RECENT = timedelta(hours=24)
# Bounds the cost of the count on a history of millions: runs are looked at newest first.
_RECENT_RUNS = 500_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Status:
    """What the screen says; times in milliseconds, ``locks_ms`` None when down."""

    now: datetime
    database: str
    database_ms: float
    locks: str
    locks_ms: float | None
    locks_problem: str
    nodes: dict[str, int]
    warning: str
    unserved: list[str]
    schedules: dict[str, int]
    overdue: int
    running: int
    over_limit: int
    queued: int
    lost: int
    failed: int
    maintenance: Maintenance | None

    @property
    def alive(self) -> int:
        return sum(self.nodes.get(state, 0) for state in ALIVE)

    @property
    def problems(self) -> list[str]:
        """Return what is wrong, in words, the worst first."""
        found = [
            (self.locks_ms is None, _("locks do not answer")),
            (not self.alive, _("no node is alive")),
            (self.overdue, _("overdue schedules: %d") % self.overdue),
            (self.lost, _("runs lost in 24 h: %d") % self.lost),
        ]
        return [text for is_wrong, text in found if is_wrong]


def show_status(console: Console, options: dict[str, Any]) -> None:
    """Show the state of everything. Raise Exit when something needs a person."""
    status = _read()
    if console.view.as_json:
        console.json("status", **_facts(status))
    else:
        columns = [Column(title=""), Column(title=""), Column(title="", flexible=True)]
        console.table(columns, _rows(status), has_header=False)
    if status.problems:
        code = DEPENDENCY_DOWN if status.locks_ms is None else FAILED
        raise Exit(code, _("unhealthy: %s") % "; ".join(status.problems))


def _read() -> _Status:
    clock = Clock()
    asked_at = clock.monotonic()
    now = database_now()
    database_ms = (clock.monotonic() - asked_at) * 1000
    backend = get_backend()
    nodes = [(node, computed_state(node, now)) for node in Node.objects.all()]
    alive = [node for node, state in nodes if state in ALIVE]
    locks_ms, locks_problem = _ping_locks()
    states_of_runs = _recent_states()
    return _Status(
        now=now,
        database=_database_label(),
        database_ms=round(database_ms, 1),
        locks=backend.name,
        locks_ms=locks_ms,
        locks_problem=locks_problem,
        nodes=Counter(state for _node, state in nodes),
        warning=zone_data_warning(alive),
        unserved=_unserved(alive),
        schedules=_schedule_states(),
        overdue=Schedule.objects.overdue(get_config().misfire_grace_seconds).count(),
        running=Run.objects.filter(state__in=Run.ACTIVE_STATES).count(),
        over_limit=Run.objects.over_limit().count(),
        queued=Run.objects.filter(state=Run.State.QUEUED).count(),
        lost=states_of_runs.get(Run.State.LOST, 0),
        failed=states_of_runs.get(Run.State.FAILED, 0),
        maintenance=Maintenance.objects.on().first(),
    )


def _unserved(alive: list[Node]) -> list[str]:
    queues = unserved_queues(served_queues(alive)) if alive else []
    return [unserved_queue(*each) for each in queues]


def _ping_locks() -> tuple[float | None, str]:
    try:
        return round(get_backend().ping() * 1000, 1), ""
    except LockUnavailable as error:
        return None, error.cause


def _database_label() -> str:
    version = ".".join(map(str, connection.get_database_version()))
    return f"{connection.display_name} {version}"


def _schedule_states() -> dict[str, int]:
    counts = Schedule.objects.order_by().values_list("state").annotate(count=Count("pk"))
    return {state: 0 for state in Schedule.State.values} | dict(counts)


def _recent_states() -> dict[str, int]:
    newest = Run.objects.aggregate(newest=Max("pk"))["newest"] or 0
    runs = Run.objects.filter(
        pk__gt=newest - _RECENT_RUNS,
        state__in=[Run.State.LOST, Run.State.FAILED],
        finished_at__gte=DatabaseNow(-_RECENT),
    )
    return dict(runs.order_by().values_list("state").annotate(count=Count("pk")))


def _rows(status: _Status) -> list[list[Cell | str]]:
    answer = _("%(name)s, answers in %(ms)s ms")
    locks = (
        _("%(name)s, does not answer: %(cause)s")
        % {"name": status.locks, "cause": status.locks_problem}
        if status.locks_ms is None
        else answer % {"name": status.locks, "ms": formats.number_format(status.locks_ms, 1)}
    )
    database = answer % {
        "name": status.database,
        "ms": formats.number_format(status.database_ms, 1),
    }
    warnings: list[list[Cell | str]] = []
    mark = states.cell("warn", _("warning"))
    if status.maintenance is not None:
        reason = _("nothing is claimed: %s") % status.maintenance.reason
        warnings.append([mark, _("maintenance"), reason])
    if status.warning:
        warnings.append([mark, _("zone data"), status.warning])
    warnings += [[mark, _("queues"), text] for text in status.unserved]
    if status.over_limit:
        warnings.append([mark, _("over their limit"), _over_limit_words(status.over_limit)])
    return [
        _row(True, _("database"), database),
        _row(status.locks_ms is not None, _("locks"), locks),
        _row(status.alive > 0, _("nodes"), _node_words(status)),
        *warnings,
        _row(True, _("schedules"), _schedule_words(status)),
        _row(not status.overdue, _("overdue"), str(status.overdue)),
        _row(True, _("runs"), _run_words(status)),
        _row(not status.lost, _("lost in 24 h"), str(status.lost)),
        _row(True, _("failed in 24 h"), str(status.failed)),
    ]


def _row(is_well: bool, label: str, text: str) -> list[Cell | str]:
    mark = states.cell("ok", _("ok")) if is_well else states.cell("bad", _("problem"))
    return [mark, label, text]


def _node_words(status: _Status) -> str:
    text = _("%d alive") % status.alive
    if status.nodes.get("suspect"):
        text += ", " + _("%d of them suspect") % status.nodes["suspect"]
    return text


def _schedule_words(status: _Status) -> str:
    parts = (
        f"{count} {states.schedule_label(state)}"
        for state, count in status.schedules.items()
        if count
    )
    return ", ".join(parts) or _("none yet")


def _run_words(status: _Status) -> str:
    facts = {"running": status.running, "queued": status.queued}
    return _("%(running)d running, %(queued)d queued") % facts


def _over_limit_words(count: int) -> str:
    message = ngettext("%d run was told to stop", "%d runs were told to stop", count)
    return message % count


def _facts(status: _Status) -> dict[str, Any]:
    return {
        "at": times.iso(status.now),
        "distcron": distcron_app.__version__,
        "healthy": not status.problems,
        "problems": status.problems,
        "warnings": [*([status.warning] if status.warning else []), *status.unserved],
        "database": {"name": status.database, "ping_ms": status.database_ms},
        "locks": {
            "backend": status.locks,
            "answers": status.locks_ms is not None,
            "ping_ms": status.locks_ms,
            "problem": status.locks_problem,
        },
        "nodes": {"alive": status.alive, "suspect": status.nodes.get("suspect", 0)},
        "schedules": status.schedules,
        "overdue": status.overdue,
        "running": status.running,
        "over_limit": status.over_limit,
        "queued": status.queued,
        "lost_24h": status.lost,
        "failed_24h": status.failed,
        "maintenance": status.maintenance is not None,
    }
