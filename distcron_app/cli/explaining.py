"""``schedulerctl explain``: why a schedule ran or did not run at an instant."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _

from distcron_app.cli import times
from distcron_app.cli.console import Console
from distcron_app.cli.exits import USAGE, Exit
from distcron_app.cli.lookup import find_schedule
from distcron_app.explained_instants import Fact, explain_instant
from distcron_app.instants import database_now

__all__ = ["show_explanation"]

FIRST_YEAR, LAST_YEAR = 1970, 2199  # beyond is a slip of the hand


def show_explanation(console: Console, options: dict[str, Any]) -> None:
    """Show one sentence about the instant, then what it rests on."""
    schedule = find_schedule(options["key"])
    answer = explain_instant(schedule, _when(options["at"]), now=database_now())
    if console.view.as_json:
        console.json(
            "explain",
            key=schedule.key,
            timezone=schedule.timezone,
            at=times.iso(answer.at),
            code=answer.code,
            text=answer.sentence,
            run=answer.run and answer.run.pk,
            state=answer.run and answer.run.state,
            reason=answer.run and answer.run.reason,
            facts={fact.code: _plain(fact) for fact in answer.facts},
        )
        return
    zone = console.view.zone or schedule.timezone
    console.line(f"{times.moment(answer.at, zone)}  {answer.sentence}", "bold")
    for fact in answer.facts:
        console.line(f"  {fact.label}: {_shown(fact, zone)}")


def _when(text: str) -> datetime:
    try:
        when = times.parse_wall(text)
    except ValueError:
        message = _("--at %r: not a date or time. Write 2027-03-12T06:00 or 2027-03-12T06:00Z.")
        raise Exit(USAGE, message % text) from None
    if not FIRST_YEAR <= when.year <= LAST_YEAR:
        message = _("--at %(text)r: year must be from %(first)d to %(last)d.")
        facts = {"text": text, "first": FIRST_YEAR, "last": LAST_YEAR}
        raise Exit(USAGE, message % facts)
    return when


def _plain(fact: Fact) -> str | int | None:
    return times.iso(fact.value) if isinstance(fact.value, datetime) else fact.value


def _shown(fact: Fact, zone: str) -> str:
    if isinstance(fact.value, datetime):
        return times.moment(fact.value, zone)
    return str(fact.value)
