"""``schedulerctl next``: when a schedule, or a rule that is only an idea, comes next.

A rule needs neither Redis nor the database. A schedule needs the database.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.utils.translation import gettext as _

from distcron_app.cli import times
from distcron_app.cli.console import Cell, Column, Console
from distcron_app.cli.exits import USAGE, Exit
from distcron_app.cli.lookup import find_schedule, rule_text
from distcron_app.clock import Clock
from distcron_app.errors import TimetableError
from distcron_app.models import Schedule
from distcron_app.timetable import Timetable, build, clock_change
from distcron_app.wording import describe, mark

__all__ = ["show_occurrences"]

_KEY = re.compile(r"[-\w]+")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Preview:
    """What is looked at: a timetable, and how to get from one instant to the next."""

    key: str | None
    rule: str
    timezone: str
    timetable: Timetable
    first_after: Callable[[datetime], datetime | None]
    due_at: datetime | None = None
    state: str = Schedule.State.ACTIVE


def show_occurrences(console: Console, options: dict[str, Any]) -> None:
    """Show the next instants with the schedule's zone, UTC, distance and clock changes."""
    if _KEY.fullmatch(options["rule"]):
        preview = _of_schedule(options["rule"])
    else:
        preview = _of_rule(options["rule"], options["tz"] or settings.TIME_ZONE)
    now = Clock().now()
    instants = list(_instants(preview, options["start"], now, options["count"]))
    zone = console.view.zone or preview.timezone
    if console.view.as_json:
        facts = [_facts(preview, at, zone) for at in instants]
        console.json("next", **_heading(preview), occurrences=facts)
        return
    if console.view.has_header:
        console.line(f"{_sentence(preview)} ({preview.timezone})", "bold")
    _show_table(console, preview, instants, now)
    if not instants:
        console.say(_("No instant is left."))
    if preview.state == Schedule.State.PAUSED:
        console.say(_("The schedule is paused: nothing runs until it is resumed."), "yellow")


def _of_schedule(key: str) -> _Preview:
    schedule = find_schedule(key)
    return _Preview(
        key=schedule.key,
        rule=rule_text(schedule),
        timezone=schedule.timezone,
        timetable=schedule.timetable(),
        first_after=schedule.first_after,
        due_at=schedule.next_run_at,
        state=schedule.state,
    )


def _of_rule(rule: str, timezone: str) -> _Preview:
    try:
        timetable = build(kind="cron", cron=rule, timezone=timezone)
    except TimetableError as error:
        raise Exit(USAGE, error, hint=_pointer(rule, error)) from error
    return _Preview(
        key=None,
        rule=rule,
        timezone=timezone,
        timetable=timetable,
        first_after=timetable.next_after,
    )


def _pointer(rule: str, error: TimetableError) -> str:
    """Return the rule with carets under what is wrong, or nothing where no place is known."""
    if error.position is None or not error.token:
        return ""
    end = error.position + len(error.token)
    # The place counts in the text with single blanks, or in the text as it was typed.
    for text in (" ".join(rule.lower().split()), rule):
        if text[error.position : end] == error.token and text.isprintable():
            return f"  {text}\n  {' ' * error.position}{'^' * len(error.token)}"
    return ""


def _instants(
    preview: _Preview, start: str | None, now: datetime, count: int
) -> Iterator[datetime]:
    if start is not None:
        # An instant exactly at the start counts.
        after = _start(start, preview.timezone) - timedelta(microseconds=1)
        instant = preview.first_after(after)
    else:
        # A due occurrence that no node has claimed yet still comes next.
        instant = preview.due_at or preview.first_after(now)
    while instant is not None and count:
        yield instant
        count -= 1
        instant = preview.first_after(instant)


def _start(text: str, timezone: str) -> datetime:
    try:
        return times.parse_from(text, timezone)
    except (ValueError, OverflowError):
        message = _("--from %r: not a date or time. Write 2027-03-12 or 2027-03-12T06:00.")
        raise Exit(USAGE, message % text) from None


def _show_table(
    console: Console, preview: _Preview, instants: list[datetime], now: datetime
) -> None:
    zone = console.view.zone or preview.timezone
    rows: list[list[Cell | str]] = []
    for at in instants:
        note = mark(preview.timetable, at)
        rows.append(
            [
                f"  {times.moment(at, zone)}",
                times.utc_time(at, zone),
                times.relative(at, now),
                Cell(f"⚠ {note}", "yellow") if note else "",
            ]
        )
    columns = [Column(title="") for _place in range(3)] + [Column(title="", flexible=True)]
    console.table(columns, rows, has_header=False)


def _sentence(preview: _Preview) -> str:
    return describe(preview.timetable, timezone=preview.timezone)


def _heading(preview: _Preview) -> dict[str, Any]:
    return {
        "key": preview.key,
        "rule": preview.rule,
        "timezone": preview.timezone,
        "words": _sentence(preview),
        "state": preview.state if preview.key else None,
    }


def _facts(preview: _Preview, at: datetime, zone: str) -> dict[str, Any]:
    change = clock_change(preview.timetable, at)
    return {
        "scheduled_at": times.iso(at),
        "local": times.local(at, zone).isoformat(),
        "clock_change": change and change.kind,
        "wall": change and change.wall.isoformat(),
        "note": mark(preview.timetable, at),
    }
