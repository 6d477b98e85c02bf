"""The form of a schedule: each error on the field that is wrong, nothing typed is lost.

Two people cannot overwrite each other: the form carries the version it was opened with,
and a save on top of another one is refused with what the two differ in. Secret arguments
are shown masked, and a value that is left masked keeps what is stored.
"""

from __future__ import annotations

import json
import uuid
import zoneinfo
from collections.abc import Mapping
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Any, cast

from django import forms
from django.conf import settings
from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from distcron_app import audit, registry
from distcron_app.arguments import MASK
from distcron_app.errors import TimetableError, UnknownJob
from distcron_app.filters import InstantInput, UntilField
from distcron_app.locks import level_names
from distcron_app.models import POLICY_FIELDS, AuditEntry, Schedule
from distcron_app.operations import REASON_LENGTH, job_permission
from distcron_app.timetable.zones import zone

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractUser
    from django.db import models

    _ModelForm = forms.ModelForm[Schedule]
else:
    _ModelForm = forms.ModelForm

__all__ = ["ConfirmForm", "DayInput", "ScheduleForm", "TimingForm", "ZoneInput"]

INSTANT_FIELDS = ("interval_anchor", "run_at", "starts_at", "ends_at")
# What decides when a schedule runs: the preview needs no more.
TIMING_FIELDS = (
    "kind",
    "cron",
    "interval_seconds",
    "interval_anchor",
    "calendar_every",
    "calendar_unit",
    "calendar_date",
    "calendar_time",
    "run_at",
    "timezone",
    "starts_at",
    "ends_at",
    "max_runs",
    "calendar",
    "calendar_action",
    "spread_seconds",
    "spread_by",
    "spread_key",
    "gap",
    "fold",
)
# Left empty, these take the model's default; left out, they keep what is stored.
_DEFAULTED = (
    "calendar_unit",
    "calendar_action",
    "spread_seconds",
    "spread_by",
    "gap",
    "fold",
    "overlap",
    "max_queued",
    "misfire",
    "catchup_max",
    "max_attempts",
    "backoff",
    "backoff_delays",
    "backoff_longest_seconds",
    "backoff_jitter",
    "on_resume",
)
# Of which at least one is filled in as soon as somebody has begun to type a rule.
_RULE_FIELDS = ("cron", "interval_seconds", "calendar_every", "calendar_date", "run_at")
_LEVEL_LABELS = {
    "standard": gettext_lazy("standard: goes on without its lock, since the database decides"),
    "quorum": gettext_lazy("quorum: most of the Redis instances, else it waits"),
    "critical": gettext_lazy("critical: also a lock of the database while it runs, else it waits"),
}


class ZoneInput(forms.TextInput):
    """A text input that suggests the names of all time zones."""

    template_name = "admin/distcron/widgets/zone.html"

    def get_context(self, name: str, value: Any, attrs: dict[str, Any] | None) -> dict[str, Any]:
        context = super().get_context(name, value, {**(attrs or {}), "list": f"{name}-zones"})
        return {**context, "zones": sorted(zoneinfo.available_timezones())}


class DayInput(forms.DateInput):
    """The browser's date picker."""

    input_type = "date"

    def __init__(self, attrs: dict[str, Any] | None = None) -> None:
        super().__init__(attrs=attrs, format="%Y-%m-%d")


class TimeOfDayInput(forms.TimeInput):
    """The browser's time picker, with seconds where there are any."""

    input_type = "time"


class TimingForm(_ModelForm):
    """When a schedule runs. Instants are typed in the time zone of the schedule."""

    class Meta:
        model = Schedule
        fields: list[str] = [*TIMING_FIELDS]
        widgets = {
            "cron": forms.Textarea(attrs={"rows": 2, "cols": 40, "spellcheck": "false"}),
            "calendar_date": DayInput(),
            "calendar_time": TimeOfDayInput(),
            "timezone": ZoneInput(attrs={"size": 40}),
            **{name: InstantInput() for name in INSTANT_FIELDS},
        }
        field_classes = {name: forms.DateTimeField for name in INSTANT_FIELDS}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # A person who may only look gets the page without the model's fields.
        if "timezone" in self.fields:
            self._prepare()

    @property
    def is_blank(self) -> bool:
        """Return whether nobody has begun to type a rule, where the kind needs one."""
        if self.data.get(self.add_prefix("kind")) == Schedule.Kind.MANUAL:
            return False
        return not any(self.data.get(self.add_prefix(name)) for name in _RULE_FIELDS)

    def full_clean(self) -> None:
        with timezone.override(self._zone(self.data.get(self.add_prefix("timezone")))):
            super().full_clean()

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        for name in _DEFAULTED:
            if name in cleaned and cleaned[name] in (None, ""):
                cleaned[name] = self._default(name)
        return cleaned

    def _prepare(self) -> None:
        self._show_instants()
        for name in self.fields.keys() & set(_DEFAULTED):
            self.fields[name].required = False
        help_text = _("All times of this schedule are in this zone. The project's is %s.")
        self.fields["timezone"].help_text = help_text % settings.TIME_ZONE

    def _default(self, name: str) -> Any:
        widget = self.fields[name].widget
        if widget.value_omitted_from_data(self.data, self.files, self.add_prefix(name)):
            return getattr(self.instance, name)
        return cast("models.Field[Any, Any]", Schedule._meta.get_field(name)).get_default()

    def _show_instants(self) -> None:
        place = self._zone(self.initial.get("timezone"))
        for name in INSTANT_FIELDS:
            value = self.initial.get(name)
            if isinstance(value, datetime):
                self.initial[name] = value.astimezone(place).replace(tzinfo=None)

    def _zone(self, name: Any) -> tzinfo:
        for candidate in (name, self.instance.timezone):
            try:
                return zone(str(candidate or ""))
            except TimetableError:
                continue
        return timezone.get_default_timezone()

    def _update_errors(self, errors: ValidationError) -> None:
        # The model judges the old value of a field whose new one was refused already, and
        # columns that this form does not have.
        found = getattr(errors, "error_dict", {})
        for name in [name for name in found if name in self.errors or not self._has(name)]:
            del found[name]
        super()._update_errors(errors)  # type: ignore[misc]

    def _has(self, name: str) -> bool:
        return name in self.fields or name == NON_FIELD_ERRORS


class ScheduleForm(TimingForm):
    """Add or change a schedule."""

    # What the user may do; set by the admin on the class that it builds for the request.
    user: AbstractUser | None = None
    # Shows what was typed again, with its preview, and is never saved.
    is_preview = False

    job = forms.ChoiceField()
    lock_level = forms.ChoiceField(required=False)
    arguments = forms.CharField(
        required=False,
        widget=forms.Textarea(attrs={"rows": 4, "cols": 60, "spellcheck": "false"}),
    )
    seen_version = forms.IntegerField(required=False, widget=forms.HiddenInput)
    # The version whose changes may be replaced. Never rendered with the other fields: its
    # only input is the checkbox in the refusal.
    overwrite = forms.IntegerField(required=False, widget=forms.HiddenInput)

    class Meta(TimingForm.Meta):
        fields = [
            "name",
            "key",
            "job",
            "arguments",
            *TIMING_FIELDS,
            "delivery",
            *POLICY_FIELDS,
            "notes",
        ]
        widgets = TimingForm.Meta.widgets | {
            "notes": forms.Textarea(attrs={"rows": 3, "cols": 60}),
            "retry_on": forms.Textarea(attrs={"rows": 2, "cols": 60, "spellcheck": "false"}),
            "give_up_on": forms.Textarea(attrs={"rows": 2, "cols": 60, "spellcheck": "false"}),
        }

    class Media:
        js = [forms.Script("distcron/preview.js", defer=True)]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Taken before validation writes what was typed into the instance.
        self.before = audit.snapshot(self.instance) if self.instance.pk else {}
        self._stored_arguments = self.instance.arguments

    def is_valid(self) -> bool:
        return super().is_valid() and not self.is_preview

    def clean_job(self) -> str:
        name: str = self.cleaned_data["job"]
        permission = job_permission(name)
        if permission and self.user is not None and not self.user.has_perm(permission):
            message = _("Job “%(job)s”: you need the permission %(permission)s to schedule it.")
            raise ValidationError(message % {"job": name, "permission": permission})
        return name

    def clean_arguments(self) -> Any:
        try:
            typed = json.loads(
                self.cleaned_data["arguments"] or "{}", object_pairs_hook=_unique_pairs
            )
        except json.JSONDecodeError as error:
            message = _("Not JSON: %(problem)s at line %(line)s, column %(column)s.")
            facts = {"problem": error.msg, "line": error.lineno, "column": error.colno}
            raise ValidationError(message % facts) from error
        except RecursionError as error:
            raise ValidationError(_("Nested too deeply.")) from error
        return _unmasked(typed, self._stored_arguments)

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean()
        if self.instance.pk:
            seen = cleaned.get("seen_version")
            if self.instance.version not in (seen, cleaned.get("overwrite")):
                raise ValidationError(self._refusal(), code="stale")
        return cleaned

    def _prepare(self) -> None:
        super()._prepare()
        self._show_arguments()
        self._offer_jobs()
        self._offer_levels()
        self.initial["seen_version"] = self.instance.version
        for name in ("job", "arguments", "lock_level"):
            described = cast("models.Field[Any, Any]", Schedule._meta.get_field(name))
            self.fields[name].label = capfirst(described.verbose_name)
            self.fields[name].help_text = described.help_text

    def _show_arguments(self) -> None:
        value = self.initial.get("arguments", {})
        if not isinstance(value, str):
            shown = registry.masked_arguments(value) if isinstance(value, dict) else value
            self.initial["arguments"] = json.dumps(shown, ensure_ascii=False, indent=2)

    def _offer_jobs(self) -> None:
        offered = {job.name: _label(job) for job in registry.all_jobs() if self._may_use(job)}
        typed = self.data.get(self.add_prefix("job"), "")
        for name in (self.instance.job, typed):
            if name and name not in offered:
                offered[name] = self._label_of_other(name)
        field = self.fields["job"]
        assert isinstance(field, forms.ChoiceField)  # noqa: S101 - declared above
        field.choices = [("", "---------"), *offered.items()]

    def _offer_levels(self) -> None:
        offered = {name: _LEVEL_LABELS.get(name, name) for name in level_names()}
        typed = self.data.get(self.add_prefix("lock_level"), "")
        for name in (self.instance.lock_level, typed):
            if name and name not in offered:
                offered[name] = _("%s, which cannot be used here") % name
        field = self.fields["lock_level"]
        assert isinstance(field, forms.ChoiceField)  # noqa: S101 - declared above
        field.choices = list(offered.items())

    def clean_lock_level(self) -> str:
        return self.cleaned_data["lock_level"] or self.instance.lock_level

    def _may_use(self, job: registry.Job) -> bool:
        return not job.permission or self.user is None or self.user.has_perm(job.permission)

    def _label_of_other(self, name: str) -> str:
        try:
            return _label(registry.get(name))
        except UnknownJob:
            return _("%s (not registered)") % name

    def _refusal(self) -> SafeString:
        """Say what the stored row and the typed values differ in, and how to go on."""
        return format_html(
            '<span class="distcron-stale">{}</span>{}<label><input type="checkbox" '
            'name="{}" value="{}"> {}</label>',
            _who_saved(self.instance),
            self._differences(),
            self.add_prefix("overwrite"),
            self.instance.version,
            _("Replace those changes by what is typed below."),
        )

    def _differences(self) -> SafeString:
        # Not cleaned yet into the instance: that still holds what the other person saved.
        typed = {
            name: audit.json_value(value)
            for name, value in self.cleaned_data.items()
            if name in self.before
        }
        theirs, yours = audit.changes(self.before, typed)
        rows = [
            (self.fields[name].label or name, theirs[name], yours[name])
            for name in yours
            if (theirs[name] or "") != (yours[name] or "")
        ]
        template = _("{}: stored is “{}”, you typed “{}”")
        listed = format_html_join("", f"<li>{template}</li>", rows)
        return format_html("<ul>{}</ul>", listed) if rows else SafeString("")


class ConfirmForm(forms.Form):
    """The page before run now, pause and resume: on which schedules, and why."""

    ids = forms.CharField(widget=forms.HiddenInput)
    idempotency_key = forms.CharField(max_length=64, widget=forms.HiddenInput)
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        max_length=REASON_LENGTH,
        required=False,
        error_messages={
            "required": gettext_lazy("Say why, for whoever finds the schedule paused.")
        },
        widget=forms.TextInput(attrs={"size": 60}),
    )

    until = UntilField()

    def __init__(
        self, *args: Any, needs_reason: bool, has_until: bool = False, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.fields["reason"].required = needs_reason
        if not has_until:
            del self.fields["until"]
        self.initial.setdefault("idempotency_key", uuid.uuid4().hex)


def _label(job: registry.Job) -> str:
    # The first line of a docstring may be in the catalogue of the project that wrote it.
    return f"{job.name} — {_(job.summary)}" if job.summary else job.name


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _value in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValidationError(_("The name “%s” is given twice.") % twice)
    return dict(pairs)


def _unmasked(typed: Any, stored: Any) -> Any:
    """Return ``typed`` with each value that was left masked replaced by the stored one."""
    if isinstance(typed, dict) and isinstance(stored, Mapping):
        return {
            name: stored[name]
            if value == MASK and name in stored
            else _unmasked(value, stored.get(name))
            for name, value in typed.items()
        }
    if isinstance(typed, list) and isinstance(stored, list) and len(typed) == len(stored):
        return [_unmasked(*pair) for pair in zip(typed, stored, strict=True)]
    return typed


def _who_saved(schedule: Schedule) -> str:
    entry = AuditEntry.objects.filter(object_type="schedule", object_id=str(schedule.pk)).first()
    actor = entry.actor if entry else _("Somebody else")
    return _(
        "%(actor)s changed this schedule after you opened it, so nothing was saved. "
        "Its state is now: %(state)s."
    ) % {"actor": actor, "state": schedule.get_state_display()}
