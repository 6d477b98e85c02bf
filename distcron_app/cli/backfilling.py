"""``schedulerctl backfill`` and ``schedulerctl backfills``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from distcron_app import operations, registry
from distcron_app.arguments import masked_arguments
from distcron_app.cli import states, times
from distcron_app.cli.console import Cell, Column, Console
from distcron_app.cli.exits import NOT_FOUND, REFUSED, USAGE, Exit
from distcron_app.cli.lookup import actor_name, find_schedule, permitted_user
from distcron_app.explanations import how_backfill_runs, left_out_in_words
from distcron_app.instants import database_now
from distcron_app.models import Backfill, BackfillProgress, Run, Schedule
from distcron_app.operations import BackfillPlan, BackfillRequest
from distcron_app.timetable import zone
from distcron_app.walltime import read_end, read_instant

__all__ = ["begin_backfill", "manage_backfills"]

_SHOWN = 50  # backfills in the list, the newest
_BAR_CELLS = 20
_COLUMNS = (
    Column(title=gettext_lazy("ID"), right=True),
    Column(title=gettext_lazy("STATE")),
    Column(title=gettext_lazy("KEY"), flexible=True),
    Column(title=gettext_lazy("FROM")),
    Column(title=gettext_lazy("TO")),
    Column(title=gettext_lazy("RUNS"), right=True),
    Column(title=gettext_lazy("ENDED"), right=True),
    Column(title=gettext_lazy("LEFT")),
    Column(title=gettext_lazy("BY"), only_wide=True),
    Column(title=gettext_lazy("REASON"), only_wide=True),
)


def begin_backfill(console: Console, options: dict[str, Any]) -> None:
    """Count what the range would run; then, once confirmed, queue it."""
    schedule = find_schedule(options["key"])
    permission = operations.job_permission(schedule.job)
    user = permitted_user(options["user"], operations.BACKFILL_SCHEDULE, permission)
    request = _request(schedule, options)
    plan = operations.plan_backfill(schedule, request)
    if options["dry_run"] or not plan.instants:
        _finish(console, schedule, plan, None, is_dry_run=options["dry_run"])
        return
    if not console.view.as_json:
        _show_plan(console, schedule, plan)
    question = ngettext("Queue %d run?", "Queue %d runs?", plan.count) % plan.count
    hint = _("Not confirmed. Add --yes, or --dry-run to look.")
    _confirm(console, question, hint, is_agreed=options["yes"])
    backfill = operations.backfill(
        schedule,
        request,
        reason=options["reason"],
        actor=user.get_username() if user else actor_name(),
        user=user,
        via="cli",
        expected=plan.count,
    )
    _finish(console, schedule, plan, backfill, is_dry_run=False)


def manage_backfills(console: Console, options: dict[str, Any]) -> None:
    """List the backfills, show one, or cancel one."""
    action = options["action"]
    if action is None:
        _list(console, options)
    elif action == "show":
        _show(console, "backfills show", _find(options["backfill"]))
    else:
        _cancel(console, options)


def _request(schedule: Schedule, options: dict[str, Any]) -> BackfillRequest:
    place = zone(schedule.timezone)
    first_at = _instant("--from", options["start"], read_instant, place)
    last_at = _instant("--to", options["end"], read_end, place)
    text, job = options["arguments"], registry.get(schedule.job)
    return BackfillRequest(
        first_at=first_at,
        last_at=last_at,
        arguments=None if text is None else job.parse(text, schedule.arguments),
        overlap=options["overlap"],
        most_active=options["most_active"],
        per_minute=options["per_minute"],
        repeat=options["repeat"],
    )


def _instant(flag: str, text: str, read: Any, place: Any) -> datetime:
    try:
        at: datetime = read(text, place)
    except (ValueError, OverflowError) as error:
        raise Exit(USAGE, f"{flag}: {error}") from None
    return at


def _confirm(console: Console, question: str, hint: str, *, is_agreed: bool) -> None:
    """Ask on a terminal. Raise Exit when the answer is not yes, with ``hint`` elsewhere."""
    if is_agreed:
        return
    if not (sys.stdin.isatty() and console.err.is_tty):
        raise Exit(REFUSED, f"{question} {hint}")
    choices = _("[y/N]")
    console.err.write(f"{console.err.shown(question)} {choices} ", end="")
    console.err.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes", "ya"):
        raise Exit(REFUSED, _("not confirmed; nothing was changed."))


def _finish(
    console: Console,
    schedule: Schedule,
    plan: BackfillPlan,
    backfill: Backfill | None,
    *,
    is_dry_run: bool,
) -> None:
    if console.view.as_json:
        facts = None if backfill is None else _facts(backfill, backfill.progress())
        planned = _plan_facts(schedule, plan)
        console.json("backfill", dry_run=is_dry_run, plan=planned, backfill=facts)
        return
    if backfill is not None:
        text = ngettext(
            "backfill %(id)d: %(count)d run queued.",
            "backfill %(id)d: %(count)d runs queued.",
            backfill.planned,
        )
        console.line(text % {"id": backfill.pk, "count": backfill.planned})
        hint = _("To follow it: schedulerctl backfills show %(id)d. To end it: backfills cancel.")
        console.say(hint % {"id": backfill.pk})
        return
    _show_plan(console, schedule, plan)
    if is_dry_run:
        console.say(_("Nothing was changed: this was a dry run."), "yellow")


def _show_plan(console: Console, schedule: Schedule, plan: BackfillPlan) -> None:
    place = console.view.zone or schedule.timezone
    if plan.first is None or plan.last is None:
        console.line(_("No instant of the range is left to run."))
    else:
        text = ngettext(
            "%(count)d run of %(key)s, from %(first)s to %(last)s",
            "%(count)d runs of %(key)s, from %(first)s to %(last)s",
            plan.count,
        )
        facts = {
            "count": plan.count,
            "key": schedule.key,
            "first": times.moment(plan.first, place),
            "last": times.moment(plan.last, place),
        }
        console.line(text % facts)
        console.line(_how(plan))
    for text in left_out_in_words(
        existing=plan.existing,
        excluded=plan.excluded,
        upcoming=plan.upcoming,
        outside=plan.outside,
        repeated=plan.repeated,
    ):
        console.line(text)


def _how(plan: BackfillPlan) -> str:
    request = plan.request
    how = how_backfill_runs(
        overlap=request.overlap, most_active=request.most_active, per_minute=request.per_minute
    )
    if not plan.paced_seconds:
        return how
    return _("%(how)s: at least %(span)s") % {
        "how": how,
        "span": times.span_text(plan.paced_seconds),
    }


def _plan_facts(schedule: Schedule, plan: BackfillPlan) -> dict[str, Any]:
    return {
        "key": schedule.key,
        "timezone": schedule.timezone,
        "runs": plan.count,
        "first_at": times.iso(plan.first),
        "last_at": times.iso(plan.last),
        "repeated": plan.repeated,
        "existing": plan.existing,
        "excluded": plan.excluded,
        "upcoming": plan.upcoming,
        "outside": plan.outside,
        "paced_seconds": plan.paced_seconds,
    }


# --- list, show, cancel -------------------------------------------------------------


def _find(backfill_id: int) -> Backfill:
    found = Backfill.objects.select_related("schedule").filter(pk=backfill_id).first()
    if found is None:
        message = _("backfill %d: not found, or its history was pruned.")
        raise Exit(NOT_FOUND, message % backfill_id)
    return found


def _list(console: Console, options: dict[str, Any]) -> None:
    found = Backfill.objects.select_related("schedule").order_by("-id")
    if options["schedule"] is not None:
        found = found.filter(schedule=find_schedule(options["schedule"]))
    if not options["all"]:
        found = found.active()
    rows = list(found[:_SHOWN])
    progress = Backfill.objects.filter(pk__in=[row.pk for row in rows]).progress()
    if console.view.as_json:
        facts = [_facts(row, progress[row.pk]) for row in rows]
        console.json("backfills", backfills=facts)
        return
    if rows:
        console.table(_COLUMNS, _table(rows, progress, console.view.zone))
        return
    if options["all"]:
        console.say(
            _("No backfill yet. To count one: schedulerctl backfill KEY --from … --dry-run")
        )
    else:
        console.say(_("No backfill is active. Those that have ended: schedulerctl backfills --all"))


def _table(
    rows: Sequence[Backfill], progress: dict[int, BackfillProgress], view_zone: str
) -> list[list[Cell | str]]:
    now = database_now()
    table: list[list[Cell | str]] = []
    for row in rows:
        done = progress[row.pk]
        place = view_zone or _zone_of(row)
        table.append(
            [
                str(row.pk),
                _state(row),
                row.schedule.key if row.schedule else row.schedule_name,
                times.short_moment(row.first_at, place, now),
                times.short_moment(row.last_at, place, now),
                str(done.total),
                f"{done.percent} %",
                _left(done, now),
                row.by,
                row.reason,
            ]
        )
    return table


def _show(console: Console, verb: str, backfill: Backfill, **facts: Any) -> None:
    progress = backfill.progress()
    if console.view.as_json:
        console.json(verb, backfill=_facts(backfill, progress), **facts)
        return
    place, now = console.view.zone or _zone_of(backfill), database_now()
    state = _state(backfill)
    title = _("backfill %(id)d of %(schedule)s · %(state)s")
    named = {"id": backfill.pk, "schedule": backfill.schedule_name, "state": state.text}
    console.line(title % named, state.colour)
    full = progress.percent * _BAR_CELLS // 100
    counts = _("%(ended)d of %(total)d runs have ended")
    bar = f"{'▓' * full}{'░' * (_BAR_CELLS - full)} {progress.percent} %"
    ended = counts % {"ended": progress.ended, "total": progress.total}
    left = _left(progress, now)
    console.line(" · ".join(part for part in (bar, ended, left) if part))
    by_state = [
        f"{states.cell(name, states.run_label(name)).text} {count}"
        for name in Run.State.values
        if (count := progress.states.get(name))
    ]
    if progress.pruned:
        by_state.append(_("pruned %d") % progress.pruned)
    console.line(" · ".join(by_state))
    console.line(
        _("from %(first)s to %(last)s")
        % {
            "first": times.moment(backfill.first_at, place),
            "last": times.moment(backfill.last_at, place),
        }
    )
    console.line(
        how_backfill_runs(
            overlap=backfill.overlap,
            most_active=backfill.most_active,
            per_minute=backfill.per_minute,
        )
    )
    _show_people(console, backfill, place, now)


def _show_people(console: Console, backfill: Backfill, place: str, now: datetime) -> None:
    for message, who, at, why in (
        (_("begun by %(who)s %(at)s"), backfill.by, backfill.created_at, backfill.reason),
        (
            _("ended by %(who)s %(at)s"),
            backfill.state_by,
            backfill.state_at,
            backfill.state_reason,
        ),
    ):
        if who and at:
            text = message % {"who": who, "at": times.short_moment(at, place, now)}
            console.line(f"{text}: {why}" if why else text)


def _cancel(console: Console, options: dict[str, Any]) -> None:
    if not options["reason"]:
        raise Exit(USAGE, _("--reason: empty. Say why, for whoever looks for the runs' work."))
    user = permitted_user(options["user"], operations.CANCEL_RUN)
    backfill = _find(options["backfill"])
    count = backfill.progress().open
    question = ngettext(
        "Cancel %d run that has not ended?", "Cancel %d runs that have not ended?", count
    )
    hint = _("Not confirmed. Add --yes.")
    _confirm(console, question % count, hint, is_agreed=options["yes"])
    done = operations.cancel_backfill(
        backfill,
        reason=options["reason"],
        is_stopping=not options["let_run"],
        actor=user.get_username() if user else actor_name(),
        user=user,
        via="cli",
    )
    console.say(done.in_words())
    backfill.refresh_from_db()
    _show(console, "backfills cancel", backfill, cancelled=done.cancelled, asked=done.asked)


def _state(backfill: Backfill) -> Cell:
    looks = {"active": "running", "done": "succeeded", "cancelled": "cancelled"}
    return states.cell(looks[backfill.state], backfill.get_state_display())


def _left(progress: BackfillProgress, now: datetime) -> str:
    seconds = progress.remaining_seconds(now)
    if seconds is None:
        return _("not known yet")
    return _("about %s left") % times.span_text(seconds) if seconds else "-"


def _zone_of(backfill: Backfill) -> str:
    return backfill.schedule.timezone if backfill.schedule else ""


def _facts(backfill: Backfill, progress: BackfillProgress) -> dict[str, Any]:
    given = backfill.arguments
    return {
        "id": backfill.pk,
        "schedule": backfill.schedule and backfill.schedule.key,
        "first_at": times.iso(backfill.first_at),
        "last_at": times.iso(backfill.last_at),
        "arguments": None if given is None else masked_arguments(given),
        "overlap": backfill.overlap,
        "most_active": backfill.most_active,
        "per_minute": backfill.per_minute,
        "repeat": backfill.repeat,
        "by": backfill.by,
        "reason": backfill.reason,
        "created_at": times.iso(backfill.created_at),
        "state": backfill.state,
        "state_by": backfill.state_by,
        "state_reason": backfill.state_reason,
        "state_at": times.iso(backfill.state_at),
        "runs": progress.total,
        "ended": progress.ended,
        "percent": progress.percent,
        "states": progress.states,
        "pruned": progress.pruned,
        "remaining_seconds": progress.remaining_seconds(database_now()),
    }
