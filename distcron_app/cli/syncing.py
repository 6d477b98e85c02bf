"""``schedulerctl sync``: makes rows of the schedules that code defines."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from distcron_app import operations
from distcron_app.cli.console import Cell, Column, Console
from distcron_app.cli.exits import FAILED, NOT_FOUND, REFUSED, Exit
from distcron_app.cli.lookup import actor_name, permitted_user
from distcron_app.sync import Author, Synced, SyncReport, defined_keys, sync

__all__ = ["sync_schedules"]

_COLUMNS = (
    Column(title=gettext_lazy("OUTCOME")),
    Column(title=gettext_lazy("KEY"), flexible=True),
    Column(title=gettext_lazy("DEFINED IN"), flexible=True),
    Column(title=gettext_lazy("DIFFERS IN"), flexible=True),
)
# Word and colour of each outcome.
_OUTCOMES = {
    "created": (gettext_lazy("created"), "green"),
    "changed": (gettext_lazy("changed"), "cyan"),
    "adopted": (gettext_lazy("taken over"), "cyan"),
    "returned": (gettext_lazy("back in code"), "green"),
    "left": (gettext_lazy("no longer in code"), "yellow"),
    "unchanged": (gettext_lazy("unchanged"), "grey"),
    "refused": (gettext_lazy("refused"), "red"),
    "unusable": (gettext_lazy("unusable"), "red"),
}


def sync_schedules(console: Console, options: dict[str, Any]) -> None:
    """Sync, and show what was done; exit 1 or 5 where a definition was left out."""
    user = permitted_user(options["user"], operations.ADD_SCHEDULES, operations.MANAGE_SCHEDULES)
    _check_adopted(options["adopt"])
    report = sync(
        Author(actor=user.get_username() if user else actor_name(), user=user),
        adopt=options["adopt"],
        dry_run=options["dry_run"],
    )
    if console.view.as_json:
        facts = [_facts(entry) for entry in report.entries]
        console.json("sync", dry_run=options["dry_run"], schedules=facts)
    else:
        _show(console, report, is_dry=options["dry_run"])
    for problem in report.problems:
        console.error(problem)
    if report.has("unusable"):
        raise Exit(FAILED, _left_out(report))
    if report.has("refused"):
        raise Exit(REFUSED, _left_out(report))


def _check_adopted(keys: Sequence[str]) -> None:
    """Raise Exit for a key that no code defines: nothing would be taken over."""
    defined = defined_keys()
    for key in keys:
        if key in defined:
            continue
        nearest = difflib.get_close_matches(key, defined, n=1, cutoff=0.5)
        message = _("--adopt %(key)r: no schedule in code has this key.")
        if nearest:
            message = _("--adopt %(key)r: no schedule in code has this key. Did you mean %(near)s?")
        raise Exit(NOT_FOUND, message % {"key": key, "near": "".join(nearest)})


def _show(console: Console, report: SyncReport, *, is_dry: bool) -> None:
    shown = [
        entry for entry in report.entries if entry.outcome != "unchanged" or console.view.is_wide
    ]
    if shown:
        console.table(_COLUMNS, [_row(entry) for entry in shown])
    console.say(_("Schedules in code: %s.") % report.in_words())
    if not report.entries:
        console.say(_('Define one: @job(schedule=cron("0 2 * * *", timezone="Asia/Jakarta"))'))
    if is_dry:
        console.say(_("Nothing was changed: this was a dry run."), "yellow")


def _row(entry: Synced) -> list[Cell | str]:
    word, colour = _OUTCOMES[entry.outcome]
    return [Cell(str(word), colour), entry.key, entry.defined_in, ", ".join(entry.changed)]


def _facts(entry: Synced) -> dict[str, Any]:
    return {
        "key": entry.key,
        "job": entry.job,
        "defined_in": entry.defined_in,
        "outcome": entry.outcome,
        "changed": list(entry.changed),
        "problems": list(entry.problems),
    }


def _left_out(report: SyncReport) -> str:
    count = len([entry for entry in report.entries if entry.problems])
    text = ngettext(
        "%d schedule in code was left out; the others were not.",
        "%d schedules in code were left out; the others were not.",
        count,
    )
    return text % count
