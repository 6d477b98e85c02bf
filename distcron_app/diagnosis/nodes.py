"""The ``runscheduler`` processes, their clocks, and what this host lends them."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from distcron_app.conf import Config
from distcron_app.diagnosis.finding import OK, PROBLEM, WARNING, Finding
from distcron_app.explanations import zone_data_warning
from distcron_app.models import Node
from distcron_app.nodes import ALIVE, computed_state
from distcron_app.scheduler import CLOCK_OFFSET_ALERT_MS

__all__ = [
    "alive_nodes",
    "judge_clocks",
    "judge_disk",
    "judge_nodes",
    "judge_one_machine",
    "judge_open_files",
    "look_at_disk",
    "look_at_nodes",
    "look_at_open_files",
    "needed_files",
]

CLOCK_WARNING_MS = 1000
_LEAST_FREE_BYTES = 100 * 1024 * 1024
# The interpreter, its libraries, logs, pipes to the workers, and links to the servers.
_FILES_OF_A_NODE = 128
# For each job: its connections, and a few files of its own.
_FILES_OF_A_JOB = 8


def alive_nodes(now: datetime) -> list[Node]:
    """Return the nodes whose lease holds by the database's clock."""
    members = Node.objects.filter(state__in=Node.MEMBER_STATES).order_by("name", "started_at")
    return [node for node in members if computed_state(node, now) in ALIVE]


def look_at_nodes(
    config: Config, alive: Sequence[Node], now: datetime, *, vendor: str
) -> list[Finding]:
    """Judge the alive nodes; ``vendor`` is that of the database."""
    states = {node.name: computed_state(node, now) for node in alive}
    return [
        *judge_nodes(alive, suspect=[name for name in states if states[name] == "suspect"]),
        *judge_one_machine(
            {node.host for node in alive},
            vendor=vendor,
            lock_backend=config.effective_lock_backend,
        ),
    ]


def look_at_open_files(config: Config) -> Finding:
    """Judge how many files this process may open."""
    limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_open_files(limit, needed_files(config))


def look_at_disk(config: Config) -> list[Finding]:
    """Judge the room for lock files, where locks are files."""
    if config.effective_lock_backend != "file":
        return []
    path = config.lock_path
    existing = next(part for part in (Path(path), *Path(path).parents) if part.exists())
    files = os.statvfs(existing)
    # A file system without a table of files tells 0 of both.
    free_files = files.f_favail if files.f_files else None
    return [judge_disk(path, shutil.disk_usage(existing).free, free_files)]


def needed_files(config: Config) -> int:
    """Return how many files one process of a node may have open at once."""
    # A lock file stays open while its lock is held, and a batch is claimed at once.
    locks = config.batch_size if config.effective_lock_backend == "file" else 0
    return _FILES_OF_A_NODE + _FILES_OF_A_JOB * config.slots + locks


# --- judgements: no input or output ---------------------------------------------------


def judge_nodes(alive: Sequence[Node], *, suspect: Sequence[str] = ()) -> list[Finding]:
    """Judge whether there are nodes, and whether they are alike."""
    if not alive:
        return [
            Finding(
                code="nodes.alive",
                level=PROBLEM,
                text=_("no node is alive"),
                consequence=_("Nothing is run."),
                fix=_("Start one: manage.py runscheduler"),
            )
        ]
    text = _("%d alive") % len(alive)
    found = [Finding(code="nodes.alive", level=OK, text=text)]
    found += [_suspect(name) for name in suspect]
    found += _versions({node.version for node in alive})
    found += _zone_data(zone_data_warning(alive))
    found += [_alert(node.name, node.alert) for node in alive if node.alert]
    return found


def judge_clocks(offsets: Sequence[tuple[str, int]]) -> list[Finding]:
    """Judge how many ms the clocks of hosts, given by name, are behind the database's."""
    off = [_off(name, ms) for name, ms in offsets if abs(ms) > CLOCK_WARNING_MS]
    within = [abs(ms) for _name, ms in offsets if abs(ms) <= CLOCK_WARNING_MS]
    if not within:
        return off
    said = {"count": len(within), "ms": max(within)}
    message = ngettext(
        "%(count)d clock is within %(ms)d ms of the database's",
        "%(count)d clocks are within %(ms)d ms of the database's",
        len(within),
    )
    text = message % said
    return [Finding(code="clocks.host", level=OK, text=text), *off]


def judge_one_machine(hosts: set[str], *, vendor: str, lock_backend: str) -> list[Finding]:
    """Refuse several machines where the database or the locks are for one."""
    if len(hosts) < 2:
        return []
    found = []
    said = ", ".join(sorted(hosts))
    if vendor == "sqlite":
        found.append(
            Finding(
                code="nodes.one_machine",
                level=PROBLEM,
                subject="SQLite",
                text=_("nodes on several machines: %s") % said,
                consequence=_("Their locks on the file do not meet, and the file is damaged."),
                fix=_("Use PostgreSQL or MariaDB, or the nodes of one machine."),
            )
        )
    if lock_backend in ("file", "memory"):
        found.append(
            Finding(
                code="nodes.one_machine",
                level=WARNING,
                subject=lock_backend,
                text=_("nodes on several machines: %s") % said,
                consequence=_(
                    "These locks do not reach beyond one. The database still lets each "
                    "occurrence run once; locks of your own code have no second guard."
                ),
                fix=_("Set LOCK_BACKEND to redis."),
            )
        )
    return found


def judge_open_files(limit: int, needed: int) -> Finding:
    """Judge the limit on open files; ``limit`` is negative where there is none."""
    if limit < 0 or limit >= needed:
        said = {"limit": limit if limit >= 0 else _("not limited"), "needed": needed}
        text = _("open files: %(limit)s, a node needs up to %(needed)d") % said
        return Finding(code="host.open_files", level=OK, text=text)
    said = {"limit": limit, "needed": needed}
    return Finding(
        code="host.open_files",
        level=WARNING,
        text=_("open files: %(limit)s, a node needs up to %(needed)d") % said,
        consequence=_("Under load, connections and locks fail with “too many open files”."),
        fix=_(
            "Raise minfds in supervisord.conf, LimitNOFILE in the unit, or ulimit -n. This "
            "shell's limit was read; that of the service may differ."
        ),
    )


def judge_disk(path: str, free_bytes: int, free_files: int | None) -> Finding:
    """Judge the room where the lock files are; ``free_files`` is None where it is not limited."""
    megabytes = free_bytes // (1024 * 1024)
    text = _("%(path)s: %(megabytes)d MB are free") % {"path": path, "megabytes": megabytes}
    if free_bytes >= _LEAST_FREE_BYTES and free_files != 0:
        return Finding(code="host.disk", level=OK, text=text)
    if free_files == 0:
        text = _("%s: no further file can be made there") % path
    return Finding(
        code="host.disk",
        level=WARNING,
        text=text,
        consequence=_("With a full disk no lock can be taken; the database alone decides."),
        fix=_("Free some space, or name another folder in LOCK_DIRECTORY."),
    )


def _suspect(name: str) -> Finding:
    return Finding(
        code="nodes.suspect",
        level=WARNING,
        subject=name,
        text=_("its heartbeat is late"),
        consequence=_("When its lease ends, others take over its runs."),
        fix=_("Look at its load, its log, and its link to the database."),
    )


def _versions(versions: set[str]) -> list[Finding]:
    if len(versions) < 2:
        return []
    return [
        Finding(
            code="nodes.versions",
            level=WARNING,
            text=_("nodes of different versions: %s") % ", ".join(sorted(versions)),
            consequence=_("A job that is new to the older ones waits for the others."),
            fix=_("Finish the update."),
        )
    ]


def _zone_data(text: str) -> list[Finding]:
    if not text:
        return []
    return [
        Finding(
            code="nodes.zone_data",
            level=WARNING,
            text=text,
            consequence=_("Where a rule of a zone has changed, the nodes plan different instants."),
            fix=_("Install the same tzdata package on each, and restart them."),
        )
    ]


def _alert(name: str, alert: str) -> Finding:
    return Finding(
        code="nodes.alert",
        level=WARNING,
        subject=name,
        text=alert,
        consequence=_("The node says so itself, in its last heartbeat."),
        fix=_("Look into its log."),
    )


def _off(name: str, offset_ms: int) -> Finding:
    return Finding(
        code="clocks.host",
        level=PROBLEM if abs(offset_ms) > CLOCK_OFFSET_ALERT_MS else WARNING,
        subject=name,
        text=_("its clock is %+d ms from the database's") % -offset_ms,
        consequence=_(
            "The database's clock decides what is due, so nothing runs twice; what jobs "
            "and logs write down is wrong."
        ),
        fix=_("Let NTP run on that host."),
    )
