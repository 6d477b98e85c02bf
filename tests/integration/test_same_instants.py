"""Pages, form, ``schedulerctl next`` and the plan of a tick name the same instants and marks."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import pytest
from django.core.management.base import OutputWrapper
from django.forms import model_to_dict
from django.http import QueryDict

from distcron_app import explanations, timetable
from distcron_app.admin.preview import preview
from distcron_app.cli.console import Console, Stream, View
from distcron_app.cli.upcoming import show_occurrences
from distcron_app.forms import TIMING_FIELDS
from distcron_app.models import Calendar, CalendarEntry, Schedule

pytestmark = pytest.mark.django_db

RULES = 1000
INSTANTS = 8
# A night before each clock change of 2026 and 2027; Jakarta has none.
NIGHTS = {
    "Asia/Jakarta": ("2026-03-28", "2027-02-27"),
    "America/New_York": ("2026-11-01", "2027-03-14", "2027-11-07"),
    "Australia/Lord_Howe": ("2026-10-04", "2027-04-04", "2027-10-03"),
    "Pacific/Chatham": ("2026-09-27", "2027-04-04", "2027-09-26"),
    "Antarctica/Troll": ("2026-10-25", "2027-03-28", "2027-10-31"),
    "America/Santiago": ("2026-09-06", "2027-04-04", "2027-09-05"),
}
Found = list[tuple[str, tuple[str, ...]]]


class Rules:
    """Random schedules, each with its next instant shortly before a clock change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._weekend = Calendar.objects.create(name="weekend", weekdays="6,7")
        day = date(2027, 3, 28)
        CalendarEntry.objects.create(calendar=self._weekend, first=day, last=day)
        self._weekend.refresh_from_db()

    def schedules(self, count: int) -> Iterator[Schedule]:
        zones = list(NIGHTS)
        for number in range(count):
            zone = zones[number % len(zones)]
            night = datetime.fromisoformat(self._random.choice(NIGHTS[zone]))
            before = night.replace(tzinfo=UTC) - timedelta(hours=self._random.randint(12, 60))
            schedule = Schedule(
                key=f"rule-{number}",
                name=f"Rule {number}",
                job="project.demo.heartbeat",
                timezone=zone,
                gap=self._random.choice(timetable.GAPS),
                fold=self._random.choice(timetable.FOLDS),
                **self._rule(before),
                **self._calendar(),
            )
            schedule.next_run_at = schedule.first_after(before)
            yield schedule

    def _rule(self, before: datetime) -> dict[str, Any]:
        if self._random.random() < 0.15:
            return {
                "kind": "calendar",
                "calendar_every": self._random.randint(1, 3),
                "calendar_unit": self._random.choice(timetable.UNITS),
                "calendar_date": before.date() - timedelta(days=self._random.randint(0, 3)),
                "calendar_time": time(self._random.randint(0, 4), self._random.randrange(60)),
            }
        lines = self._random.choice((1, 1, 1, 2, 3))
        return {"cron": "\n".join(self._line() for _line in range(lines))}

    def _line(self) -> str:
        pick, number = self._random.choice, self._random.randint
        minute = pick(("0", "30", f"{number(0, 59)}", f"{number(0, 29)},{number(30, 59)}", "*/20"))
        hour = pick((f"{number(0, 4)}", "0-3", "1,2,3", "*", "*/2", f"{number(0, 23)}"))
        day = pick(("*", "*", "*", "*/2", f"{number(1, 28)}", "L"))
        weekday = pick(("*", "*", "*", "sun", "mon-fri", f"{number(0, 6)}", "0#1", "L7"))
        return f"{minute} {hour} {day} * {weekday}"

    def _calendar(self) -> dict[str, Any]:
        if self._random.random() < 0.8:
            return {}
        return {"calendar": self._weekend, "calendar_action": self._random.choice(ACTIONS)}


ACTIONS = ("skip", "next", "previous")


def on_the_page(schedule: Schedule) -> Found:
    """Return what the page of the schedule lists."""
    found = explanations.occurrences(schedule, schedule.upcoming(INSTANTS))
    return [(text(each.scheduled_at), codes(each)) for each in found]


def codes(each: explanations.Occurrence) -> tuple[str, ...]:
    return ("excluded",) if each.excluded else tuple(one.code for one in each.marks)


def on_the_command_line(words: list[str], **options: Any) -> Found:
    """Return what ``schedulerctl next --json`` prints."""
    file = io.StringIO()
    stream = Stream(OutputWrapper(file), colour=False)
    given = {"start": None, "count": INSTANTS, "tz": None, "gap": None, "fold": None}
    show_occurrences(
        Console(stream, stream, View(as_json=True)), {"rules": words} | given | options
    )
    return [
        (each["scheduled_at"], ("excluded",) if each["excluded"] else tuple(each["marks"]))
        for each in json.loads(file.getvalue())["occurrences"]
    ]


def in_the_form(schedule: Schedule) -> list[tuple[str, bool]]:
    """Return the instants of the form's preview, and whether each is excluded."""
    stored = model_to_dict(schedule, fields=TIMING_FIELDS)
    data = QueryDict(mutable=True)
    data.update({name: "" if value is None else str(value) for name, value in stored.items()})
    assert schedule.next_run_at is not None
    found = preview(data, schedule, schedule.next_run_at - timedelta(seconds=1))
    assert found.errors == []
    rows = [(text(datetime.fromisoformat(row.at)), bool(row.skipped)) for row in found.rows]
    return rows[:INSTANTS]


def by_ticks(schedule: Schedule) -> list[str]:
    """Return the instants as ticks decide on them, each tick a moment after one is due."""
    found: list[str] = []
    at = schedule.next_run_at
    while at is not None and len(found) < INSTANTS:
        plan = timetable.plan(
            schedule.timetable(),
            due_from=at,
            now=at + timedelta(milliseconds=400),
            misfire_grace=timedelta(seconds=30),
        )
        assert plan.run == at
        found.append(text(at))
        at = plan.next
    return found


def text(at: datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


def test_a_thousand_schedules_have_the_same_instants_and_marks_everywhere() -> None:
    Schedule.objects.bulk_create(Rules(seed=2027).schedules(RULES), batch_size=100)
    seen: Counter[str] = Counter()
    for schedule in Schedule.objects.select_related("calendar").order_by("pk"):
        shown = on_the_page(schedule)
        assert on_the_command_line([schedule.key]) == shown, schedule.key
        assert by_ticks(schedule) == [at for at, _codes in shown], schedule.key
        if schedule.pk % 8 == 0:  # a form costs more than the others together
            expected = [(at, found == ("excluded",)) for at, found in shown]
            assert in_the_form(schedule) == expected, schedule.key
        seen.update(code for _at, found in shown for code in found)
    # Marks of every sort, or this would compare nothing of interest.
    assert min(seen[code] for code in ("gap", "fold", "moved", "excluded")) > 20


def test_a_rule_and_a_schedule_of_it_have_the_same_instants_and_marks() -> None:
    rules = (one for one in Rules(seed=2026).schedules(RULES) if one.cron and not one.calendar)
    compared = 0
    for schedule in rules:
        assert schedule.next_run_at is not None
        told = on_the_command_line(
            schedule.cron.splitlines(),
            start=schedule.next_run_at.isoformat(),
            tz=schedule.timezone,
            gap=schedule.gap,
            fold=schedule.fold,
        )
        assert told == on_the_page(schedule), schedule.cron
        compared += 1
    assert compared > RULES / 2
