"""``schedulerctl list``."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from django.db.models import OuterRef, Subquery
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from distcron_app import history
from distcron_app.cli import states, times
from distcron_app.cli.console import Cell, Column, Console
from distcron_app.cli.lookup import filtered, rule_text
from distcron_app.instants import database_now
from distcron_app.models import ChainLink, Run, Schedule, ScheduleQuerySet

__all__ = ["show_schedules"]

_OUTCOMES = ("succeeded", "failed", "lost", "cancelled")
_BAD_OUTCOMES = ("failed", "lost")
_COLUMNS = (
    Column(title=gettext_lazy("STATE")),
    Column(title=gettext_lazy("KEY"), flexible=True),
    Column(title=gettext_lazy("WHEN"), flexible=True),
    Column(title=gettext_lazy("LAST")),
    Column(title=gettext_lazy("NEXT")),
    Column(title=gettext_lazy("JOB"), only_wide=True),
    Column(title=gettext_lazy("ZONE"), only_wide=True),
    Column(title=gettext_lazy("REASON"), only_wide=True),
    Column(title=gettext_lazy("DEFINED IN"), only_wide=True),
    Column(title=gettext_lazy("STARTS"), only_wide=True),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One schedule with what its history says."""

    schedule: Schedule
    outcome: Run | None
    active_run_id: int | None
    now: datetime
    starts: Sequence[ChainLink]
    started_by: Sequence[ChainLink]

    @property
    def is_failing(self) -> bool:
        has_failed = self.outcome is not None and self.outcome.state in _BAD_OUTCOMES
        return has_failed or self.schedule.state == Schedule.State.INVALID


def show_schedules(console: Console, options: dict[str, Any]) -> None:
    """Show the schedules that fit the filters."""
    lines = _read(filtered(options["state"], options["job"]))
    if options["failing"]:
        lines = [line for line in lines if line.is_failing]
    if console.view.as_json:
        console.json("list", schedules=[_facts(line) for line in lines])
        return
    if lines:
        console.table(_COLUMNS, [_row(line, console.view.zone) for line in lines])
    _say_count(console, options, len(lines))


def _read(schedules: ScheduleQuerySet) -> list[_Line]:
    newest = Run.objects.filter(schedule=OuterRef("pk"), state__in=_OUTCOMES).order_by("-id")
    ids = dict(
        schedules.annotate(outcome_id=Subquery(newest.values("id")[:1])).values_list(
            "pk", "outcome_id"
        )
    )
    outcomes = Run.objects.in_bulk([pk for pk in ids.values() if pk is not None])
    active = _active_runs(ids)
    chains = history.chains_of(list(ids))
    now = database_now()
    return [
        _Line(
            schedule=schedule,
            outcome=outcomes.get(ids.get(schedule.pk) or 0),
            active_run_id=active.get(schedule.pk),
            now=now,
            starts=chains.starts.get(schedule.pk, ()),
            started_by=chains.started_by.get(schedule.pk, ()),
        )
        for schedule in schedules
    ]


def _active_runs(schedule_ids: Collection[int]) -> dict[int | None, int]:
    active = Run.objects.active().order_by("-id").values_list("schedule_id", "id")
    return {schedule: run for schedule, run in active if schedule in schedule_ids}


def _row(line: _Line, zone: str) -> list[Cell | str]:
    schedule = line.schedule
    return [
        _state(line),
        schedule.key,
        schedule.in_words(),
        _last(line),
        _next(line, zone or schedule.timezone),
        schedule.job,
        schedule.timezone,
        schedule.state_reason,
        schedule.defined_in if schedule.is_in_code else "",
        ", ".join(f"{each.event} → {each.follower.key}" for each in line.starts),
    ]


def _state(line: _Line) -> Cell:
    state = line.schedule.state
    if state in (Schedule.State.INVALID, Schedule.State.PAUSED):
        return states.cell(state, states.schedule_label(state))
    if line.active_run_id is not None:
        return states.cell("running", states.run_label("running"))
    if line.is_failing:
        return states.cell("failing", _("failing"))
    return states.cell(state, states.schedule_label(state))


def _last(line: _Line) -> Cell:
    run = line.outcome
    if run is None:
        return Cell(_("never"), "grey")
    shown = states.cell(run.state, states.run_label(run.state))
    if run.finished_at is None:
        return shown
    return Cell(f"{shown.text} {times.relative(run.finished_at, line.now)}", shown.colour)


def _next(line: _Line, zone: str) -> str:
    until = line.schedule.paused_until
    if until is not None:
        return _("until %s") % times.short_moment(until, zone, line.now)
    at = line.schedule.next_run_at
    if at is None or line.schedule.state != Schedule.State.ACTIVE:
        return "-"
    return f"{times.short_moment(at, zone, line.now)} {times.relative(at, line.now)}"


def _facts(line: _Line) -> dict[str, Any]:
    schedule, run = line.schedule, line.outcome
    return {
        "key": schedule.key,
        "name": schedule.name,
        "job": schedule.job,
        "state": schedule.state,
        "state_reason": schedule.state_reason,
        "state_by": schedule.state_by,
        "paused_until": times.iso(schedule.paused_until),
        "failing": line.is_failing,
        "kind": schedule.kind,
        "rule": rule_text(schedule),
        "defined_in": schedule.defined_in,
        "left_code_at": times.iso(schedule.left_code_at),
        "timezone": schedule.timezone,
        "words": schedule.in_words(),
        "next_run_at": times.iso(schedule.next_run_at),
        "active_run_id": line.active_run_id,
        "starts": [{"event": each.event, "key": each.follower.key} for each in line.starts],
        "started_by": [{"event": each.event, "key": each.schedule.key} for each in line.started_by],
        "last_outcome": run
        and {
            "run": run.pk,
            "state": run.state,
            "reason": run.reason,
            "finished_at": times.iso(run.finished_at),
            "error": run.error,
        },
    }


def _say_count(console: Console, options: dict[str, Any], shown: int) -> None:
    names = ("state", "job", "failing")
    filters = ", ".join(
        name if options[name] is True else f"{name} {options[name]}"
        for name in names
        if options[name]
    )
    if filters:
        facts = {"shown": shown, "total": Schedule.objects.count(), "filters": filters}
        console.say(_("%(shown)d of %(total)d, filters: %(filters)s") % facts)
    elif not shown:
        console.say(_("No schedules yet. Add one in the admin, under Schedules."))
        console.say(_('To try a rule first: schedulerctl next "30 2 * * *"'))
