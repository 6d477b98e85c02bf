"""What the code asks for: each definition of the registry as a row that could be stored."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from django.apps import AppConfig
from django.core.checks import CheckMessage, register
from django.core.exceptions import ValidationError
from django.db import models
from django.utils import timezone
from django.utils.translation import gettext as _

from distcron_app import conf, registry
from distcron_app.checks import definition_problem
from distcron_app.definitions import default_key, key_in_words
from distcron_app.errors import InvalidArguments, TimetableError
from distcron_app.models import DEFINED_FIELDS, Calendar, Schedule
from distcron_app.timetable import build

if TYPE_CHECKING:
    from distcron_app.definitions import Definition

__all__ = ["COLUMNS", "Wanted", "all_wanted", "check_definitions", "defined_keys"]

E030 = "distcron.E030"
E031 = "distcron.E031"

# What code may define of a row; the state is people's.
COLUMNS = {
    name: cast("models.Field[Any, Any]", Schedule._meta.get_field(name)) for name in DEFINED_FIELDS
}
_KEY = "key"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One definition, and the row that it asks for; None where it cannot be used.

    ``problems`` are pairs of field and text.
    """

    key: str
    job: registry.Job
    row: Schedule | None
    problems: tuple[tuple[str, str], ...] = ()


def all_wanted(calendars: Mapping[str, Calendar] | None) -> list[Wanted]:
    """Return every definition of the registry, checked, by key.

    Asks no database. ``calendars`` are the rows by name; None leaves them unchecked.
    """
    found = _definitions()
    uses = Counter(key for key, _job, _definition in found)
    wanted = [
        _checked(key, job, definition, calendars)
        for key, job, definition in found
        if uses[key] == 1
    ]
    for key in sorted(key for key, count in uses.items() if count > 1):
        jobs = [job for other, job, _definition in found if other == key]
        problem = (_KEY, _twice(key, [job.source for job in jobs]))
        wanted.append(Wanted(key=key, job=jobs[-1], row=None, problems=(problem,)))
    return sorted(wanted, key=lambda each: each.key)


def defined_keys() -> set[str]:
    """Return the keys of all schedules in code, also of those that cannot be used."""
    return {key for key, _job, _definition in _definitions()}


@register("distcron")
def check_definitions(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Refuse schedules in code that no sync could make rows of; asks no database."""
    if conf.problems():
        return []  # they are errors of their own, and lock levels are read from the settings
    return [
        definition_problem(
            _("Schedule %(key)r: %(field)s: %(problem)s")
            % {"key": wanted.key, "field": field, "problem": problem},
            hint=_("A sync leaves it out until the code is mended."),
            obj=wanted.job.source,
            id=E031 if field == _KEY else E030,
        )
        for wanted in all_wanted(calendars=None)
        for field, problem in wanted.problems
    ]


def _definitions() -> list[tuple[str, registry.Job, Definition]]:
    return [
        (str(definition.columns.get("key") or default_key(job.name)), job, definition)
        for job in registry.all_jobs()
        for definition in job.schedules
    ]


def _twice(key: str, places: Sequence[str]) -> str:
    message = _("%(key)r is used by %(count)d definitions: %(places)s. Give each a key of its own.")
    return message % {"key": key, "count": len(places), "places": ", ".join(places)}


def _checked(
    key: str,
    job: registry.Job,
    definition: Definition,
    calendars: Mapping[str, Calendar] | None,
) -> Wanted:
    columns = {"name": key_in_words(key), **definition.columns, "key": key, "job": job.name}
    row = None
    problems = dict(_value_problems(columns))
    problems |= _stored_arguments(columns, job)
    problems |= {} if problems else _in_columns(columns, calendars)
    if not problems:
        row = Schedule(**columns)
        problems = _row_problems(row)
    listed = tuple((field, str(problem)) for field, problem in problems.items())
    return Wanted(key=key, job=job, row=None if listed else row, problems=listed)


def _value_problems(columns: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield what the model's fields would convert without a word, or refuse in too few."""
    for name, value in columns.items():
        if name in COLUMNS and value is not None:
            problem = _value_problem(COLUMNS[name], value)
            if problem:
                yield name, problem
    if columns["kind"] == Schedule.Kind.CALENDAR:
        yield from _start_problems(columns)


def _value_problem(column: models.Field[Any, Any], value: Any) -> object:
    if column.choices:
        allowed = [each for each, _label in column.flatchoices]
        message = _("got %(value)r. Choose one of %(allowed)s.")
        is_allowed = isinstance(value, str) and value in allowed
        return "" if is_allowed else message % {"value": value, "allowed": ", ".join(allowed)}
    if isinstance(column, models.CharField | models.TextField | models.ForeignKey):
        return "" if isinstance(value, str) else _("got %r. Write a text.") % (value,)
    if isinstance(column, models.IntegerField):
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return "" if is_whole else _("got %r. Write a whole number.") % (value,)
    if isinstance(column, models.DateTimeField):
        is_aware = isinstance(value, datetime) and timezone.is_aware(value)
        message = _("got %r. Write a datetime with a time zone: datetime(..., tzinfo=UTC).")
        return "" if is_aware else message % (value,)
    return ""


def _start_problems(columns: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield what is wrong with every so many days, weeks or months, and their first instant."""
    names = ("calendar_every", "calendar_unit", "calendar_start")
    try:
        build(kind=columns["kind"], **{name: columns[name] for name in names})
    except TimetableError as error:
        yield error.field, error.message


def _stored_arguments(columns: dict[str, Any], job: registry.Job) -> dict[str, object]:
    """Bring the arguments into the form that is stored; they may hold Python values."""
    try:
        columns["arguments"] = job.dump(columns.get("arguments", {}))
    except InvalidArguments as error:
        parts = (
            str(text) if name == registry.WHOLE else f"{name}: {text}"
            for name, text in error.problems.items()
        )
        return {"arguments": " ".join(parts)}
    return {}


def _in_columns(
    columns: dict[str, Any], calendars: Mapping[str, Calendar] | None
) -> dict[str, object]:
    """Put columns in place of the first instant and of the calendar's name."""
    start: datetime | None = columns.pop("calendar_start", None)
    if start is not None:
        columns["calendar_date"], columns["calendar_time"] = start.date(), start.time()
    name = columns.pop("calendar", None)
    if name is None or calendars is None:
        return {}
    if name not in calendars:
        return {"calendar": _("%r does not exist. Make it in the admin, under Calendars.") % name}
    columns["calendar"] = calendars[name]
    return {}


def _row_problems(row: Schedule) -> dict[str, object]:
    """Check the row as its form does, and bring its values into the form that is stored."""
    try:
        # Whether the calendar exists was looked up for all of them at once.
        row.clean_fields(exclude={"calendar"})
        row.clean()
    except ValidationError as error:
        return {field: " ".join(texts) for field, texts in error.message_dict.items()}
    return {}
