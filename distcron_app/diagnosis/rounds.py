"""One look at everything, in the order in which people read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from django.db import DatabaseError, InterfaceError
from django.utils.translation import gettext as _

from distcron_app.clock import Clock
from distcron_app.conf import Config, get_config
from distcron_app.conf import problems as setting_problems
from distcron_app.diagnosis.configuration import look_at_settings
from distcron_app.diagnosis.database import DatabaseFacts, judge_connections, look_at_database
from distcron_app.diagnosis.finding import WARNING, Finding
from distcron_app.diagnosis.nodes import (
    alive_nodes,
    judge_clocks,
    look_at_disk,
    look_at_nodes,
    look_at_open_files,
)
from distcron_app.diagnosis.redis import Progress, look_at_redis
from distcron_app.diagnosis.schedules import look_at_schedules
from distcron_app.diagnosis.stopping import look_at_stopping
from distcron_app.diagnosis.timing import judge_timing
from distcron_app.instants import database_now

__all__ = ["diagnose"]


def diagnose(
    *,
    latency_seconds: float | None = None,
    supervisor_conf: str = "",
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> list[Finding]:
    """Return what was found. A database or Redis that is away is a finding, no exception.

    Blocks for about a second, for each Redis alias up to 2 s where it is far away, or
    for ``latency_seconds``. Raise OSError where ``supervisor_conf`` cannot be read.
    """
    if setting_problems():
        # Nothing else can be looked at without settings.
        return look_at_settings()
    config = get_config()
    clock = clock or Clock()
    facts, found = look_at_database(clock=clock)
    offset = _database_offset(clock) if facts is not None else None
    redis = look_at_redis(
        config,
        database_offset=offset,
        latency_seconds=latency_seconds,
        progress=progress,
        clock=clock,
    )
    rows = [] if facts is None or offset is None else _look_at_rows(config, facts, offset)
    return [
        *look_at_settings(),
        *found,
        *redis,
        *rows,
        look_at_open_files(config),
        *look_at_disk(config),
        judge_timing(config),
        *look_at_stopping(config, supervisor_conf),
    ]


def _database_offset(clock: Clock) -> float | None:
    """Return how many seconds the database's clock is ahead of this host's."""
    before = clock.now()
    try:
        theirs = database_now()
    except (DatabaseError, InterfaceError):
        return None
    after = clock.now()
    return (theirs - (before + (after - before) / 2)).total_seconds()


def _look_at_rows(config: Config, facts: DatabaseFacts, offset: float) -> list[Finding]:
    return [
        *_tried("nodes", lambda: _look_at_members(config, facts, round(offset * 1000))),
        *_tried("schedules", lambda: look_at_schedules(config)),
    ]


def _look_at_members(config: Config, facts: DatabaseFacts, offset_ms: int) -> list[Finding]:
    now = database_now()
    alive = alive_nodes(now)
    return [
        *judge_connections(facts, [node.slots for node in alive]),
        *judge_clocks(
            [(_("this host"), offset_ms), *((node.name, node.clock_offset_ms) for node in alive)]
        ),
        *look_at_nodes(config, alive, now, vendor=facts.vendor),
    ]


def _tried(area: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return what ``look`` finds, or that the tables cannot be read."""
    try:
        return list(look())
    except (DatabaseError, InterfaceError) as error:
        return [
            Finding(
                code=f"{area}.readable",
                level=WARNING,
                text=_("could not be read: %s") % str(error).strip().partition("\n")[0],
                consequence=_("What is wrong there is not shown."),
                fix=_("Mend what is said about the database first."),
            )
        ]
