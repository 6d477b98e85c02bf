"""``schedulerctl next``: when a schedule, or a rule that is only an idea, comes next.

A rule needs neither Redis nor the database. A schedule needs the database.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.utils.translation import gettext as _

from distcron_app import history
from distcron_app.cli import times
from distcron_app.cli.console import Cell, Column, Console
from distcron_app.cli.exits import USAGE, Exit
from distcron_app.cli.lookup import find_schedule, rule_text
from distcron_app.clock import Clock
from distcron_app.errors import TimetableError
from distcron_app.explanations import Occurrence, occurrences
from distcron_app.models import Schedule
from distcron_app.timetable import build, clock_change
from distcron_app.wording import Mark, marks

__all__ = ["show_occurrences"]

_KEY = re.compile(r"[-\w]+")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Preview:
    """What is looked at: a stored schedule, or one that exists only here, for a rule."""

    schedule: Schedule
    rule: str
    is_stored: bool
    marks: Sequence[Mark]

    @property
    def words(self) -> str:
        return self.schedule.in_words()


def show_occurrences(console: Console, options: dict[str, Any]) -> None:
    """Show the next instants with the schedule's zone, UTC, distance and what is to know."""
    now = Clock().now()
    preview = _preview(options, now)
    found = list(_occurrences(preview, options["start"], now, options["count"]))
    if console.view.as_json:
        zone = console.view.zone or preview.schedule.timezone
        facts = [_facts(preview, each, zone) for each in found]
        console.json("next", **_heading(preview), occurrences=facts)
        return
    if console.view.has_header:
        console.line(f"{preview.words} ({preview.schedule.timezone})", "bold")
    _show_table(console, preview.schedule, found, now)
    for line in _remarks(preview):
        console.line(line, "yellow")
    _say_end(console, preview.schedule, is_empty=not found)


def _preview(options: dict[str, Any], now: datetime) -> _Preview:
    rules, gap, fold = options["rules"], options["gap"], options["fold"]
    if len(rules) > 1 or not _KEY.fullmatch(rules[0]):
        timezone = options["tz"] or settings.TIME_ZONE
        return _of_rules(rules, timezone, gap or "shift", fold or "first", now)
    if gap or fold:
        message = _("schedule %r: has its own gap and fold. Leave out --gap and --fold.")
        raise Exit(USAGE, message % rules[0])
    schedule = find_schedule(rules[0])
    newest = history.run_page(history.runs_matching(schedule_id=schedule.pk))
    return _Preview(
        schedule=schedule,
        rule=rule_text(schedule),
        is_stored=True,
        marks=history.schedule_marks(schedule, now, newest.rows),
    )


def _of_rules(rules: Sequence[str], timezone: str, gap: str, fold: str, now: datetime) -> _Preview:
    lines = [line.strip() for rule in rules for line in rule.splitlines() if line.strip()]
    for line in lines:
        try:
            build(kind="cron", cron=line, timezone=timezone, gap=gap, fold=fold)
        except TimetableError as error:
            raise Exit(USAGE, error, hint=_pointer(line, error)) from error
    text = "\n".join(lines)
    schedule = Schedule(cron=text, timezone=timezone, gap=gap, fold=fold)
    general = marks(schedule.timetable(), after=now)
    return _Preview(schedule=schedule, rule=text, is_stored=False, marks=general)


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


def _occurrences(
    preview: _Preview, start: str | None, now: datetime, count: int
) -> Iterator[Occurrence]:
    schedule = preview.schedule
    instants = _instants(schedule, start, now, count)
    # How many runs come before a start of the person's own choice is not known.
    is_limited = schedule.max_runs is not None and start is None
    left = (schedule.max_runs or 0) - schedule.runs_planned if is_limited else None
    return occurrences(schedule, instants, runs_left=left)


def _instants(
    schedule: Schedule, start: str | None, now: datetime, count: int
) -> Iterator[datetime]:
    if start is not None:
        # An instant exactly at the start counts.
        after = _start(start, schedule.timezone) - timedelta(microseconds=1)
        instant = schedule.first_after(after)
    else:
        # A due occurrence that no node has claimed yet still comes next.
        instant = schedule.next_run_at or schedule.first_after(now)
    while instant is not None and count:
        yield instant
        count -= 1
        instant = schedule.first_after(instant)


def _start(text: str, timezone: str) -> datetime:
    try:
        return times.parse_from(text, timezone)
    except (ValueError, OverflowError):
        message = _("--from %r: not a date or time. Write 2027-03-12 or 2027-03-12T06:00.")
        raise Exit(USAGE, message % text) from None


def _show_table(
    console: Console, schedule: Schedule, found: Sequence[Occurrence], now: datetime
) -> None:
    zone = console.view.zone or schedule.timezone
    rows: list[list[Cell | str]] = [
        [
            f"  {times.moment(each.scheduled_at, zone)}",
            times.utc_time(each.scheduled_at, zone),
            times.relative(each.scheduled_at, now),
            _start_text(each, zone),
            _note_cell(each),
        ]
        for each in found
    ]
    columns = [Column(title="") for _place in range(4)] + [Column(title="", flexible=True)]
    if not schedule.spread_seconds:  # no empty column where all start at their instant
        rows, columns = [[*row[:3], row[4]] for row in rows], [*columns[:3], columns[4]]
    console.table(columns, rows, has_header=False)


def _start_text(each: Occurrence, zone: str) -> str:
    if each.excluded:
        return ""
    return _("starts %s") % times.short_moment(each.due_at, zone, each.scheduled_at)


def _note_cell(each: Occurrence) -> Cell | str:
    if each.excluded:
        return Cell(_("⤼ skipped: %s") % each.excluded, "yellow")
    return Cell(f"⚠ {_note(each)}", "yellow") if each.marks else ""


def _note(each: Occurrence) -> str:
    return " ".join(one.text for one in each.marks)


def _remarks(preview: _Preview) -> Iterator[str]:
    """Yield what is to know about all of the instants."""
    schedule = preview.schedule
    if schedule.spread_seconds:
        facts = {"seconds": schedule.spread_seconds, "how": schedule.get_spread_by_display()}
        yield _("Each starts up to %(seconds)d s later: %(how)s.") % facts
    if schedule.max_runs is not None:
        facts = {"done": schedule.runs_planned, "most": schedule.max_runs}
        yield _("%(done)d of %(most)d runs are done; then it is finished.") % facts
    for one in preview.marks:
        yield f"⚠ {one.text}"


def _say_end(console: Console, schedule: Schedule, *, is_empty: bool) -> None:
    if not schedule.has_timetable:
        console.say(_("It has no timetable, so no instant comes by itself."))
    elif is_empty:
        console.say(_("No instant is left."))
    if schedule.state == Schedule.State.PAUSED:
        console.say(_("The schedule is paused: nothing runs until it is resumed."), "yellow")


def _heading(preview: _Preview) -> dict[str, Any]:
    schedule = preview.schedule
    return {
        "key": schedule.key if preview.is_stored else None,
        "rule": preview.rule,
        "timezone": schedule.timezone,
        "words": preview.words,
        "state": schedule.state if preview.is_stored else None,
        "spread_seconds": schedule.spread_seconds,
        "runs_planned": schedule.runs_planned,
        "max_runs": schedule.max_runs,
        "marks": [dataclasses.asdict(one) for one in preview.marks],
    }


def _facts(preview: _Preview, each: Occurrence, zone: str) -> dict[str, Any]:
    change = clock_change(preview.schedule.timetable(), each.scheduled_at)
    return {
        "scheduled_at": times.iso(each.scheduled_at),
        "due_at": times.iso(each.due_at),
        "local": times.local(each.scheduled_at, zone).isoformat(),
        "clock_change": change and change.kind,
        "wall": change and change.wall.isoformat(),
        "marks": [one.code for one in each.marks],
        "note": _note(each),
        "excluded": each.excluded,
    }
