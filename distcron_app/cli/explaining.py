"""``schedulerctl explain``: why a schedule ran or did not run at an instant."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from distcron_app.cli import times
from distcron_app.cli.console import Console
from distcron_app.cli.exits import USAGE, Exit
from distcron_app.cli.lookup import find_schedule
from distcron_app.explained_instants import Fact, explain_instant
from distcron_app.instants import database_now
from distcron_app.walltime import read_when

__all__ = ["show_explanation"]


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
        return read_when(text)
    except ValueError as error:
        raise Exit(USAGE, f"--at {error}") from None


def _plain(fact: Fact) -> str | int | None:
    return times.iso(fact.value) if isinstance(fact.value, datetime) else fact.value


def _shown(fact: Fact, zone: str) -> str:
    if isinstance(fact.value, datetime):
        return times.moment(fact.value, zone)
    return str(fact.value)
