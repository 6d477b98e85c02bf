"""What a schedule's form would make happen: its rule in words, and the next instants.

From the same timetable, exclusions and spread that the scheduler goes by, so the preview
cannot promise other instants than will run. Nothing is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

from django.core.exceptions import NON_FIELD_ERRORS
from django.db.models import Count
from django.http import HttpRequest, QueryDict
from django.template.loader import render_to_string
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from distcron_app import history
from distcron_app.admin import display
from distcron_app.clock import utc_now
from distcron_app.forms import TIMING_FIELDS, TimingForm
from distcron_app.models import Run, Schedule
from distcron_app.wording import marks

__all__ = ["Preview", "Row", "preview", "render"]

_COUNT = 10
# The newest runs that tell how long the job usually takes.
_JUDGED_RUNS = 50
_TEMPLATE = "admin/distcron/schedule/_preview.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One instant: in the schedule's zone, in UTC, how far away, and what to know about it.

    ``skipped`` says why it does not run, or is empty.
    """

    at: str
    local: str
    utc: str
    relative: str
    notes: list[str]
    skipped: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What is shown: ``errors`` as (label, message), or else the rest; ``blank`` for nothing."""

    blank: bool = False
    errors: list[tuple[str, str]]
    words: str = ""
    zone: str = ""
    notes: list[str]
    rows: list[Row]


def preview(data: QueryDict, instance: Schedule | None, now: datetime | None = None) -> Preview:
    """Return the preview of what was typed, on top of the stored schedule where there is one.

    ``instance`` takes the values that were typed, so it must not be saved afterwards.
    """
    form = TimingForm(data, instance=instance)
    if form.is_blank:
        return Preview(blank=True, errors=[], notes=[], rows=[])
    if not form.is_valid():
        return Preview(errors=_errors(form), notes=[], rows=[])
    now = now or utc_now()
    schedule: Schedule = form.instance
    timetable = schedule.timetable()
    instants = _instants(schedule, now)
    runs = Run.objects.filter(schedule_id=schedule.pk).order_by("-id") if schedule.pk else None
    p95 = None if runs is None else history.longest_usual(runs[:_JUDGED_RUNS])
    notes = [mark.text for mark in marks(timetable, after=now, p95=p95)]
    notes += _spread(schedule, instants[0]) if instants else []
    if not instants and not notes and schedule.has_timetable:
        notes = [_("No instant of the timetable is left.")]
    return Preview(
        errors=[],
        words=schedule.in_words(),
        zone=schedule.timezone,
        notes=notes,
        rows=_rows(schedule, instants),
    )


def render(request: HttpRequest, instance: Schedule | None) -> SafeString:
    """Return the preview of the posted form as HTML, without the region around it."""
    context: dict[str, Any] = {"preview": preview(request.POST, instance)}
    return render_to_string(_TEMPLATE, context, request)


def _errors(form: TimingForm) -> list[tuple[str, str]]:
    return [
        (_label(form, name), str(message))
        for name in (*TIMING_FIELDS, NON_FIELD_ERRORS)
        for message in form.errors.get(name, ())
    ]


def _label(form: TimingForm, name: str) -> str:
    return str(capfirst(form.fields[name].label or name)) if name in form.fields else ""


def _instants(schedule: Schedule, now: datetime) -> list[datetime]:
    """Return the next instants; no more than are left until the schedule is finished."""
    left = _COUNT
    if schedule.max_runs is not None:
        left = min(left, schedule.max_runs - schedule.runs_planned)
    found: list[datetime] = []
    instant = schedule.first_after(now)
    while instant is not None and left > 0 and len(found) < _COUNT:
        found.append(instant)
        left -= not schedule.excluded(instant)
        instant = schedule.first_after(instant)
    return found


def _rows(schedule: Schedule, instants: list[datetime]) -> list[Row]:
    place, others = display.place_of(schedule), _others(schedule, instants)
    return [_row(schedule, instant, place, others.get(instant, 0)) for instant in instants]


def _row(schedule: Schedule, instant: datetime, place: tzinfo, herd: int) -> Row:
    skipped = schedule.excluded(instant)
    notes = [mark.text for mark in marks(schedule.timetable(), instant, herd=herd)]
    if not skipped and _has_own_delays(schedule):
        notes.append(_("Starts %(seconds)d s later.") % {"seconds": _delay(schedule, instant)})
    return Row(
        at=instant.astimezone(UTC).isoformat(),
        local=display.wall(instant, place),
        utc=display.wall(instant, UTC),
        relative=display.distance(instant),
        notes=notes,
        skipped=skipped,
    )


def _spread(schedule: Schedule, instant: datetime) -> list[str]:
    """Return what the spread does to every instant alike, if it does."""
    if not schedule.spread_seconds or _has_own_delays(schedule):
        return []
    if _is_keyed(schedule):
        delay = _delay(schedule, instant)
        return [_("Each of them starts %(seconds)d s later.") % {"seconds": delay}]
    message = _("Each of them starts up to %(seconds)d s later.")
    return [message % {"seconds": schedule.spread_seconds}]


def _has_own_delays(schedule: Schedule) -> bool:
    is_random = schedule.spread_by == Schedule.Spread.RANDOM
    return bool(schedule.spread_seconds and is_random and _is_keyed(schedule))


def _is_keyed(schedule: Schedule) -> bool:
    # Without a key the delay comes from the number that the row gets when it is stored.
    return bool(schedule.pk is not None or schedule.spread_key)


def _delay(schedule: Schedule, instant: datetime) -> int:
    return (schedule.spread(instant) - instant) // timedelta(seconds=1)


def _others(schedule: Schedule, instants: list[datetime]) -> dict[datetime, int]:
    """Return how many other active schedules come next at each instant. One query."""
    rows = Schedule.objects.filter(state=Schedule.State.ACTIVE, next_run_at__in=instants)
    counted = rows.exclude(pk=schedule.pk).order_by().values_list("next_run_at")
    return {at: count for at, count in counted.annotate(Count("pk")) if at is not None}
