"""``schedulerctl pause`` and ``schedulerctl resume``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from distcron_app import operations
from distcron_app.cli import states, times
from distcron_app.cli.console import Cell, Column, Console
from distcron_app.cli.exits import REFUSED, USAGE, Exit
from distcron_app.cli.lookup import actor_name, filtered, find_schedules, permitted_user
from distcron_app.instants import database_now
from distcron_app.models import Schedule

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractBaseUser

__all__ = ["parse_end", "pause_schedules", "resume_schedules"]

_PAUSABLE = (Schedule.State.ACTIVE, Schedule.State.INVALID)
_RESUMABLE = (Schedule.State.PAUSED,)


def pause_schedules(console: Console, options: dict[str, Any]) -> None:
    """Pause the named or selected schedules; those that are paused or finished stay so."""
    if not options["reason"]:
        raise Exit(USAGE, _("--reason: empty. Say why, for whoever finds the schedule paused."))
    pause: Callable[..., operations.StateChange] = operations.pause
    if options["until"]:
        place = console.view.zone or _common_zone(_chosen(options))
        pause = functools.partial(operations.pause, until=parse_end(options["until"], place))
    _change(console, options, "pause", _PAUSABLE, pause)


def resume_schedules(console: Console, options: dict[str, Any]) -> None:
    """Resume the named or selected schedules; those that are not paused stay as they are."""
    _change(console, options, "resume", _RESUMABLE, operations.resume)


def parse_end(text: str, place: str) -> datetime:
    """Return the instant of ``--until``. Raise Exit for what is no time, or is over."""
    now = database_now()
    try:
        until = times.parse_until(text, place, now)
    except (ValueError, OverflowError):
        message = _("--until: got %r. Write +2h, 18:00 or 2027-03-12T06:00.")
        raise Exit(USAGE, message % text) from None
    if until <= now:
        message = _("--until: %s is over. Choose a later time.")
        raise Exit(USAGE, message % times.iso(until))
    return until


def _common_zone(schedules: Sequence[Schedule]) -> str:
    """Return the zone of the schedules, in which a time without one is meant."""
    zones = {schedule.timezone for schedule in schedules}
    if len(zones) > 1:
        message = _(
            "--until: the schedules have different time zones (%s). Add --tz ZONE or --utc."
        )
        raise Exit(USAGE, message % ", ".join(sorted(zones)))
    return zones.pop() if zones else ""


def _change(
    console: Console,
    options: dict[str, Any],
    verb: str,
    states_before: Sequence[str],
    operation: Callable[..., operations.StateChange],
) -> None:
    user = permitted_user(options["user"], operations.PAUSE_SCHEDULE)
    chosen = _chosen(options)
    wanted = [schedule for schedule in chosen if schedule.state in states_before]
    if options["dry_run"]:
        changed = {schedule.pk for schedule in wanted}
    else:
        _confirm(console, options, verb, len(wanted))
        changed = _apply(operation, wanted, user, options["reason"])
    rows = Schedule.objects.in_bulk([schedule.pk for schedule in chosen])
    after = [rows.get(schedule.pk, schedule) for schedule in chosen]
    if console.view.as_json:
        facts = [_facts(schedule, schedule.pk in changed) for schedule in after]
        console.json(verb, dry_run=options["dry_run"], schedules=facts)
        return
    _show(console, after, changed, _("would change") if options["dry_run"] else _("changed"))
    if options["dry_run"]:
        console.say(_("Nothing was changed: this was a dry run."), "yellow")
    else:
        count = len(changed)
        console.say(ngettext("%d schedule changed.", "%d schedules changed.", count) % count)


def _apply(
    operation: Callable[..., operations.StateChange],
    schedules: Sequence[Schedule],
    user: AbstractBaseUser | None,
    reason: str,
) -> set[int]:
    """Return the keys of the rows that were changed."""
    if not schedules:
        return set()
    actor = user.get_username() if user else actor_name()
    done = operation(schedules, reason=reason, actor=actor, user=user, via="cli")
    return {schedule.pk for schedule in done.changed}


def _chosen(options: dict[str, Any]) -> list[Schedule]:
    keys, takes_all = options["keys"], options["all"]
    if bool(keys) == takes_all:
        raise Exit(USAGE, _("name schedules by key, or use --all, but not both."))
    if not takes_all and (options["state"] or options["job"]):
        raise Exit(USAGE, _("--state and --job: need --all."))
    return list(filtered(options["state"], options["job"])) if takes_all else find_schedules(keys)


def _confirm(console: Console, options: dict[str, Any], verb: str, count: int) -> None:
    """Ask on a terminal before many schedules change. Raise Exit when the answer is not yes."""
    if not options["all"] or options["yes"] or not count:
        return
    question = _question(verb, count)
    if not (sys.stdin.isatty() and console.err.is_tty):
        raise Exit(REFUSED, _("%s Not confirmed. Add --yes, or --dry-run to look.") % question)
    choices = _("[y/N]")
    console.err.write(f"{console.err.shown(question)} {choices} ", end="")
    console.err.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes", "ya"):
        raise Exit(REFUSED, _("not confirmed; nothing was changed."))


def _question(verb: str, count: int) -> str:
    if verb == "pause":
        return ngettext("Pause %d schedule?", "Pause %d schedules?", count) % count
    return ngettext("Resume %d schedule?", "Resume %d schedules?", count) % count


def _show(
    console: Console, schedules: Sequence[Schedule], changed: set[int], changed_label: str
) -> None:
    columns: tuple[Column, ...] = (
        Column(title=_("STATE")),
        Column(title=_("KEY"), flexible=True),
        Column(title=_("CHANGE")),
        Column(title=_("REASON"), flexible=True),
    )
    if any(schedule.paused_until for schedule in schedules):
        columns += (Column(title=_("UNTIL")),)
    now = database_now()
    full: list[list[Cell | str]] = [
        [
            states.cell(schedule.state, states.schedule_label(schedule.state)),
            schedule.key,
            changed_label if schedule.pk in changed else _("unchanged"),
            schedule.state_reason,
            _end(schedule, console.view.zone or schedule.timezone, now),
        ]
        for schedule in schedules
    ]
    rows = [row[: len(columns)] for row in full]
    if rows:
        console.table(columns, rows)


def _end(schedule: Schedule, zone: str, now: datetime) -> str:
    until = schedule.paused_until
    return "-" if until is None else times.short_moment(until, zone, now)


def _facts(schedule: Schedule, is_changed: bool) -> dict[str, Any]:
    return {
        "key": schedule.key,
        "state": schedule.state,
        "state_reason": schedule.state_reason,
        "state_by": schedule.state_by,
        "paused_until": times.iso(schedule.paused_until),
        "changed": is_changed,
    }
