"""What people may put into the query string of a list, or confirm, checked as a form."""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import UTC, datetime, tzinfo
from typing import Any
from uuid import UUID

from django import forms
from django.core.exceptions import ValidationError
from django.utils import timezone
from django.utils.functional import Promise
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from distcron_app import explanations, history, registry
from distcron_app.errors import InvalidArguments, UnknownJob
from distcron_app.instants import database_now
from distcron_app.models import Backfill, Node, Run, RunQuerySet, Schedule
from distcron_app.walltime import LONGEST_INSTANT, read_end, read_instant

__all__ = [
    "ActionForm",
    "ArgumentsField",
    "BackfillForm",
    "CancelBackfillForm",
    "InstantInput",
    "PauseForm",
    "ReleaseForm",
    "RunFilters",
    "RunNowForm",
    "ScheduleFilters",
    "TypedInstantField",
    "UntilField",
    "prepare_call",
]

_LARGEST_ID = 2**63 - 1
# What the browser's own date and time picker sends and shows.
_INSTANT_FORMAT = "%Y-%m-%dT%H:%M:%S"


def _choice_error(choices: list[str]) -> dict[str, Any]:
    message = _("“%(value)s” is not known. Choose one of: {choices}.")
    return {"invalid_choice": format_lazy(message, choices=", ".join(choices))}


class RunFilters(forms.Form):
    """Filters of the list of runs; ``before``, ``after`` and ``top`` page through it by id."""

    state = forms.MultipleChoiceField(
        label=_("State"),
        choices=Run.State.choices,
        required=False,
        widget=forms.CheckboxSelectMultiple,
        error_messages=_choice_error(Run.State.values),
    )
    schedule = forms.CharField(label=_("Schedule"), required=False, max_length=100)
    job = forms.CharField(label=_("Job"), required=False, max_length=100)
    node = forms.CharField(label=_("Node"), required=False, max_length=100)
    trigger = forms.ChoiceField(
        label=_("Started by"),
        choices=[("", _("any")), *Run.Trigger.choices],
        required=False,
        error_messages=_choice_error(Run.Trigger.values),
    )
    backfill = forms.IntegerField(
        label=_("Backfill"), required=False, min_value=1, max_value=_LARGEST_ID
    )
    before = forms.IntegerField(
        required=False, min_value=1, max_value=_LARGEST_ID, widget=forms.HiddenInput
    )
    after = forms.IntegerField(
        required=False, min_value=0, max_value=_LARGEST_ID, widget=forms.HiddenInput
    )
    top = forms.IntegerField(
        required=False, min_value=0, max_value=_LARGEST_ID, widget=forms.HiddenInput
    )

    def clean_schedule(self) -> int | None:
        """Return the id of the schedule, given as id or key; a deleted one has only an id."""
        given = self.cleaned_data["schedule"].strip()
        if not given:
            return None
        if given.isascii() and given.isdigit():
            return min(int(given), _LARGEST_ID)
        found = Schedule.objects.filter(key=given).values_list("pk", flat=True).first()
        if found is None:
            raise ValidationError(
                _("No schedule has the key “%(key)s”. The list of schedules shows them."),
                params={"key": given},
            )
        return int(found)

    def clean_node(self) -> list[UUID] | None:
        """Return the ids of the nodes, given as one id or as a name that several had."""
        given = self.cleaned_data["node"].strip()
        if not given:
            return None
        try:
            return [UUID(given)]
        except ValueError:
            ids = list(Node.objects.filter(name=given).values_list("pk", flat=True))
        if not ids:
            raise ValidationError(
                _("No node is called “%(name)s”. A node that left long ago has only its id."),
                params={"name": given},
            )
        return ids

    def runs(self) -> RunQuerySet:
        """Return the runs that fit; call it on a valid form."""
        chosen = self.cleaned_data
        return history.runs_matching(
            states=chosen["state"],
            schedule_id=chosen["schedule"],
            nodes=chosen["node"],
            trigger=chosen["trigger"],
            job=chosen["job"].strip(),
            backfill_id=chosen["backfill"],
        )

    @property
    def is_narrowed(self) -> bool:
        """Return True when a filter is set, so that an empty list does not mean no runs."""
        names = ("state", "schedule", "job", "node", "trigger", "backfill")
        return any(self.data.get(name) for name in names)


class ScheduleFilters(forms.Form):
    """Filters of the list of schedules."""

    q = forms.CharField(label=_("Name, key or job"), required=False, max_length=200)
    state = forms.ChoiceField(
        label=_("State"),
        choices=[("", _("any")), *Schedule.State.choices, ("overdue", _("overdue"))],
        required=False,
        error_messages=_choice_error([*Schedule.State.values, "overdue"]),
    )
    page = forms.IntegerField(
        required=False, min_value=1, max_value=100_000, widget=forms.HiddenInput
    )

    @property
    def is_narrowed(self) -> bool:
        """Return True when a filter is set."""
        return bool(self.data.get("q") or self.data.get("state"))


class ActionForm(forms.Form):
    """The confirmation of an action: why, and a key that makes a double click harmless."""

    reason = forms.CharField(
        label=_("Reason"),
        required=False,
        max_length=500,
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
        help_text=_("Kept in the audit trail with your name."),
    )
    idempotency_key = forms.CharField(max_length=64, min_length=8, widget=forms.HiddenInput)

    def __init__(self, *args: Any, needs_reason: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fields["reason"].required = needs_reason


class ArgumentsField(forms.CharField):
    """Arguments as JSON text, at first those of ``schedule``; None where they are left alone."""

    def __init__(self, **options: Any) -> None:
        widget = forms.Textarea(attrs={"rows": 4, "cols": 60, "spellcheck": "false"})
        super().__init__(label=_("Arguments"), required=False, widget=widget, **options)
        self.schedule = Schedule()

    def start_from(self, schedule: Schedule) -> None:
        """Show the schedule's arguments, secrets masked, and check what is typed by its job."""
        self.schedule = schedule
        shown = registry.masked_arguments(schedule.arguments)
        self.initial = json.dumps(shown, ensure_ascii=False, indent=2)
        self.help_text = _(
            "A JSON object, instead of the schedule's arguments. A value that is left masked "
            "stays as it is."
        )

    def clean(self, value: Any) -> dict[str, Any] | None:
        text: str = super().clean(value)
        if not text.strip():
            return None
        try:
            given = registry.get(self.schedule.job).parse(text, self.schedule.arguments)
        except UnknownJob:
            return None  # the action says so itself
        except InvalidArguments as error:
            raise ValidationError(
                [
                    str(message) if name == registry.WHOLE else f"{name}: {message}"
                    for name, message in error.problems.items()
                ]
            ) from error
        return None if given == self.schedule.arguments else given


class TypedInstantField(forms.CharField):
    """An instant as text, in the zone of a schedule or with an offset; None for none.

    With ``is_end`` a date alone means the whole day.
    """

    def __init__(self, *, is_end: bool = False, **options: Any) -> None:
        attrs = {"autocomplete": "off", "spellcheck": "false", "placeholder": "2027-03-12T06:00"}
        widget = forms.TextInput(attrs=attrs)
        super().__init__(max_length=LONGEST_INSTANT, widget=widget, **options)
        self.is_end = is_end
        self.place: tzinfo = UTC

    def show_in(self, place: tzinfo, note: str | Promise = "") -> None:
        """Take what is typed as wall time of ``place``, and say so, followed by ``note``."""
        self.place = place
        text = _("In {zone}, or with an offset: 2027-03-12T06:00Z. {note}")
        self.help_text = format_lazy(text, zone=str(place), note=note)

    def clean(self, value: Any) -> datetime | None:
        text: str = super().clean(value)
        if not text:
            return None
        try:
            return (read_end if self.is_end else read_instant)(text, self.place)
        except (ValueError, OverflowError) as error:
            raise ValidationError(str(error)) from error


class RunNowForm(ActionForm):
    """One run outside the timetable: with which arguments, for which instant, and behind what."""

    arguments = ArgumentsField()
    nominal_at = TypedInstantField(label=_("For the instant"), required=False)
    behind = forms.BooleanField(
        label=_("Queue it behind the active run, if there is one"),
        required=False,
        help_text=_("It starts when the schedule is free."),
    )

    field_order = ("reason", "arguments", "nominal_at", "behind", "idempotency_key")

    def __init__(self, *args: Any, schedule: Schedule, place: tzinfo, **options: Any) -> None:
        super().__init__(*args, **options)
        prepare_call(self, schedule, place)


def prepare_call(form: forms.Form, schedule: Schedule, place: tzinfo) -> None:
    """Fill the fields ``arguments`` and ``nominal_at`` of a form for one run of the schedule."""
    arguments, nominal_at = form.fields["arguments"], form.fields["nominal_at"]
    assert isinstance(arguments, ArgumentsField)  # noqa: S101 - declared by the form
    assert isinstance(nominal_at, TypedInstantField)  # noqa: S101 - declared by the form
    arguments.start_from(schedule)
    nominal_at.show_in(
        place, _("Told to the job as its own. The timetable runs its instants all the same.")
    )


class BackfillForm(ActionForm):
    """A past range of a schedule and how it is to run; ``expected`` is the agreed count."""

    first_at = TypedInstantField(label=_("From"))
    last_at = TypedInstantField(label=_("To"), is_end=True)
    overlap = forms.ChoiceField(
        label=_("Overlap"),
        choices=Backfill.Overlap.choices,
        initial=Backfill.Overlap.ONE_BY_ONE,
        error_messages=_choice_error(Backfill.Overlap.values),
    )
    most_active = forms.IntegerField(
        label=_("Side by side at most"),
        required=False,
        min_value=1,
        help_text=_("Empty: as many as the schedule allows."),
    )
    per_minute = forms.IntegerField(
        label=_("Runs per minute"),
        required=False,
        min_value=1,
        help_text=_("Empty: the next one starts as soon as it may."),
    )
    repeat = forms.ChoiceField(
        label=_("Instants that have a run"),
        choices=Backfill.Repeat.choices,
        initial=Backfill.Repeat.NONE,
        error_messages=_choice_error(Backfill.Repeat.values),
    )
    arguments = ArgumentsField()
    expected = forms.IntegerField(required=False, min_value=0, widget=forms.HiddenInput)

    field_order = (
        "first_at",
        "last_at",
        "overlap",
        "most_active",
        "per_minute",
        "repeat",
        "arguments",
        "reason",
        "idempotency_key",
        "expected",
    )

    def __init__(self, *args: Any, schedule: Schedule, place: tzinfo, **options: Any) -> None:
        super().__init__(*args, **options)
        for name, note in (
            ("first_at", ""),
            ("last_at", _("Both ends are included; a date means the whole day.")),
        ):
            field = self.fields[name]
            assert isinstance(field, TypedInstantField)  # noqa: S101 - declared above
            field.show_in(place, note)
        arguments = self.fields["arguments"]
        assert isinstance(arguments, ArgumentsField)  # noqa: S101 - declared above
        arguments.start_from(schedule)


class CancelBackfillForm(ActionForm):
    """The cancel of a backfill: why, and what becomes of the runs that have begun."""

    let_run = forms.BooleanField(
        label=_("Let the runs that have begun go on to their end"),
        required=False,
        help_text=_("Otherwise their jobs are asked to stop."),
    )


class InstantInput(forms.DateTimeInput):
    """The browser's date and time picker, with seconds."""

    input_type = "datetime-local"

    def __init__(self, attrs: dict[str, Any] | None = None) -> None:
        super().__init__(attrs={"step": 1, **(attrs or {})}, format=_INSTANT_FORMAT)


class UntilField(forms.DateTimeField):
    """The end of a pause, as local time of ``place``; empty for a pause without an end."""

    widget = InstantInput

    def __init__(self, **options: Any) -> None:
        super().__init__(label=_("Until"), required=False, **options)
        self.show_in(timezone.get_default_timezone())

    def show_in(self, place: tzinfo) -> None:
        """Take what is typed as local time of ``place``, and say so."""
        self.place = place
        help_text = _("In the time zone {zone}. Empty: until somebody resumes it.")
        self.help_text = format_lazy(help_text, zone=str(place))

    def clean(self, value: Any) -> datetime | None:
        with timezone.override(self.place):
            at: datetime | None = super().clean(value)
        if at is None:
            return None
        if timezone.is_naive(at):
            at = timezone.make_aware(at, self.place)
        if at <= database_now():
            raise ValidationError(_("It is over already. Choose a later time."))
        return at


class PauseForm(ActionForm):
    """The confirmation of a pause: why, and until when, by the clock of ``place``."""

    until = UntilField()

    field_order = ("reason", "until", "idempotency_key")

    def __init__(self, *args: Any, place: tzinfo, **options: Any) -> None:
        super().__init__(*args, needs_reason=True, **options)
        field = self.fields["until"]
        assert isinstance(field, UntilField)  # noqa: S101 - declared above
        field.show_in(place)


class ReleaseForm(ActionForm):
    """The release of a lock: its name, typed, and why; ``names`` are what it is called."""

    lock = forms.CharField(
        label=_("Name of the lock"),
        max_length=1000,
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"}),
    )

    field_order = ("lock", "reason", "idempotency_key")

    def __init__(self, *args: Any, names: Collection[str], **options: Any) -> None:
        super().__init__(*args, needs_reason=True, **options)
        # As a person sees and can type them.
        self._names = [explanations.inert(name).strip() for name in names]
        self.fields["lock"].help_text = format_lazy(
            _("Type {name}, so that no other lock is released by mistake."), name=self._names[0]
        )

    def clean_lock(self) -> str:
        """Return the name as it was typed, which must be one of the lock's."""
        typed: str = self.cleaned_data["lock"]
        if typed not in self._names:
            raise ValidationError(
                _("“%(typed)s” is not this lock. Type %(name)s."),
                params={"typed": typed, "name": self._names[0]},
            )
        return typed
