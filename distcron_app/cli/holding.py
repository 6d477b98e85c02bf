"""``schedulerctl locks``: which locks are held, by whom, and whether that is as it should be."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from distcron_app.cli import states, times
from distcron_app.cli.console import Cell, Column, Console
from distcron_app.locks import LockInfo, get_backend, schedule_id_of
from distcron_app.models import Node, Run, Schedule

__all__ = ["show_locks"]

_VERDICTS = {
    "healthy": gettext_lazy("healthy"),
    "expires": gettext_lazy("expires by itself"),
    "stuck": gettext_lazy("STUCK"),
}
_COLUMNS = (
    Column(title=gettext_lazy("LOCK"), flexible=True),
    Column(title=gettext_lazy("SCHEDULE"), flexible=True),
    Column(title=gettext_lazy("HOLDER"), flexible=True),
    Column(title=gettext_lazy("TTL"), right=True),
    Column(title=gettext_lazy("RUN"), right=True),
    Column(title=gettext_lazy("FENCING"), right=True, only_wide=True),
    Column(title=gettext_lazy("OWNER"), only_wide=True),
    Column(title=gettext_lazy("VERDICT")),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A lock with the schedule that it belongs to and the schedule's active run."""

    info: LockInfo
    schedule_key: str
    run: Run | None
    has_live_node: bool

    @property
    def verdict(self) -> str:
        """Return healthy, expires (nobody renews it, its TTL ends it) or stuck (no TTL)."""
        if self.info.ttl_ms is None:
            return "stuck"
        if self.run is None or not self.has_live_node:
            return "expires"
        is_owner = self.info.owner_token in (None, self.run.owner_token)
        return "healthy" if is_owner else "expires"


def show_locks(console: Console, options: dict[str, Any]) -> None:
    """Show the locks that are held. LockUnavailable passes: the backend does not answer."""
    backend = get_backend()
    held = _read(backend.held())
    if console.view.as_json:
        console.json("locks", backend=backend.name, locks=[_facts(each) for each in held])
        return
    if held:
        console.table(_COLUMNS, [_row(each) for each in held])
    else:
        console.say(_("No lock is held (backend: %s).") % backend.name)


def _read(infos: list[LockInfo]) -> list[_Held]:
    names = {info.name: schedule_id_of(info.name) for info in infos}
    keys = dict(Schedule.objects.filter(pk__in=_known(names)).values_list("pk", "key"))
    active = Run.objects.filter(state__in=Run.ACTIVE_STATES, schedule__in=_known(names))
    runs = {run.schedule_id: run for run in active.order_by("id")}
    alive = set(Node.objects.alive().values_list("pk", flat=True))
    return [_held(info, names[info.name], keys, runs, alive) for info in infos]


def _held(
    info: LockInfo,
    schedule_id: int | None,
    keys: Mapping[int, str],
    runs: Mapping[int | None, Run],
    alive: Collection[UUID],
) -> _Held:
    run = None if schedule_id is None else runs.get(schedule_id)
    return _Held(
        info=info,
        schedule_key=keys.get(schedule_id or 0, ""),
        run=run,
        has_live_node=run is not None and run.node_id in alive,
    )


def _known(names: Mapping[str, int | None]) -> list[int]:
    return [schedule_id for schedule_id in names.values() if schedule_id is not None]


def _row(held: _Held) -> list[Cell | str]:
    return [
        held.info.name,
        held.schedule_key or "-",
        held.info.note or _("unknown"),
        _ttl_text(held.info.ttl_ms),
        str(held.run.pk) if held.run else "-",
        str(held.run.fencing_token) if held.run else "-",
        held.info.owner_token or "-",
        states.cell(held.verdict, _VERDICTS[held.verdict]),
    ]


def _ttl_text(ttl_ms: int | None) -> str:
    return _("none") if ttl_ms is None else times.duration_text(ttl_ms / 1000)


def _facts(held: _Held) -> dict[str, Any]:
    return {
        "name": held.info.name,
        "schedule": held.schedule_key or None,
        "holder": held.info.note,
        "owner_token": held.info.owner_token,
        "ttl_ms": held.info.ttl_ms,
        "run": held.run and held.run.pk,
        "fencing_token": held.run and held.run.fencing_token,
        "verdict": held.verdict,
    }
