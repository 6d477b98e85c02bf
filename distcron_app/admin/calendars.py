"""Calendars: excluded days by hand or from an iCalendar file, and who uses them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db import models, transaction
from django.db.models.functions import Coalesce
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from distcron_app import audit, wakeup
from distcron_app.admin import display
from distcron_app.errors import TimetableError
from distcron_app.forms import DayInput, ZoneInput
from distcron_app.models import Calendar, CalendarEntry, Schedule
from distcron_app.timetable.calendars import Event, parse_ical
from distcron_app.timetable.zones import check_timezone

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractUser
    from django.core.files.uploadedfile import UploadedFile

    _CalendarForm = forms.ModelForm[Calendar]
    _CalendarAdmin = admin.ModelAdmin[Calendar]
    _EntryInline = admin.TabularInline[CalendarEntry, Calendar]
else:
    _CalendarForm = forms.ModelForm
    _CalendarAdmin = admin.ModelAdmin
    _EntryInline = admin.TabularInline

__all__ = ["CalendarAdmin"]

MAX_UPLOAD = 1_000_000  # bytes
# Each row is five inputs, and Django accepts 1,000 inputs of a form by default.
MAX_ROWS = 100
_AUDITED = 50  # entries in each half of an audit entry
_LISTED = 200
_COLUMNS = ("name", "timezone", "weekdays")


class CalendarForm(_CalendarForm):
    """A calendar, and the file whose days replace its entries."""

    ical = forms.FileField(
        required=False,
        label=gettext_lazy("iCalendar file"),
        help_text=gettext_lazy(
            "A file that ends in .ics, of at most 1 MB. Its days are read in the time zone above."
        ),
        widget=forms.FileInput(attrs={"accept": ".ics,text/calendar"}),
    )
    replace = forms.BooleanField(
        required=False, label=gettext_lazy("Replace all days that are listed now")
    )

    class Meta:
        model = Calendar
        fields = [*_COLUMNS]
        widgets = {"timezone": ZoneInput(attrs={"size": 40})}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Django adds a hidden initial value for a default that is called; the row has its own.
        if "timezone" in self.fields:  # a viewer's form has no fields
            self.fields["timezone"].show_hidden_initial = False
        # Taken before anything of the form is written.
        self.before = _snapshot(self.instance)
        self.events: list[Event] | None = None

    def clean_ical(self) -> str | None:
        """Return the text of the file; None without one."""
        upload: UploadedFile[bytes] | None = self.cleaned_data.get("ical")
        if upload is None:
            return None
        if (upload.size or 0) > MAX_UPLOAD:
            message = _("File “%(name)s”: has %(size)d bytes, at most 1,000,000. Split it.")
            raise ValidationError(message % {"name": upload.name, "size": upload.size})
        try:
            return bytes(upload.read()).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            message = _("File “%(name)s”: is not UTF-8 text. Export it as iCalendar (.ics).")
            raise ValidationError(message % {"name": upload.name}) from error

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        text = cleaned.get("ical")
        if text is not None and "timezone" in cleaned:
            self._read(text, cleaned["timezone"])
        return cleaned

    def _read(self, text: str, timezone: str) -> None:
        try:
            check_timezone(timezone)
        except TimetableError:
            return  # the model's clean says so, on the field
        try:
            self.events = parse_ical(text, timezone=timezone)
        except TimetableError as error:
            self.add_error("ical", str(error))
            return
        if not self.events:
            self.add_error("ical", _("The file has no events. Choose another one."))
        count = len(self.before["entries"])
        if count and not self.cleaned_data.get("replace"):
            self.add_error("replace", _must_confirm(count))


class EntryInline(_EntryInline):
    """The excluded days. Who may edit the calendar may edit them."""

    model = CalendarEntry
    extra = 3
    fields = ("first", "last", "summary")

    def get_formset(self, request: HttpRequest, obj: Any = None, **options: Any) -> Any:
        days = {"first": DayInput(), "last": DayInput()}
        return super().get_formset(request, obj, widgets=days, **options)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return _has_any(request, "view", "change")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return _has_any(request, "add" if obj is None else "change")

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return _has_any(request, "add" if obj is None else "change")

    has_delete_permission = has_change_permission


@admin.register(Calendar)
class CalendarAdmin(_CalendarAdmin):
    """Add, edit and import calendars; each change is audited and plans their schedules anew."""

    form = CalendarForm
    list_display = ("name", "timezone", "weekdays", "days_listed", "used_listed")
    search_fields = ("name",)
    inlines = (EntryInline,)
    readonly_fields = ("used_shown", "days_shown")
    show_full_result_count = False
    view_on_site = False

    class Media:
        css = {"all": ["distcron/admin.css"]}

    # --- what is shown ---

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Calendar]:
        entries = CalendarEntry.objects.filter(calendar=models.OuterRef("pk")).order_by()
        length = models.ExpressionWrapper(
            models.F("last") - models.F("first"), output_field=models.DurationField()
        )
        rows = entries.values("calendar").annotate(
            count=models.Count("pk"), length=models.Sum(length)
        )
        users = Schedule.objects.filter(calendar=models.OuterRef("pk")).order_by()
        used = users.values("calendar").annotate(count=models.Count("pk"))
        return Calendar.objects.annotate(
            entry_count=Coalesce(models.Subquery(rows.values("count")), 0),
            entry_length=models.Subquery(rows.values("length")),
            schedule_count=Coalesce(models.Subquery(used.values("count")), 0),
        )

    def get_fieldsets(self, request: HttpRequest, obj: Calendar | None = None) -> Any:
        fieldsets: list[Any] = [(None, {"fields": [*_COLUMNS]})]
        if obj is not None:
            fieldsets[0][1]["fields"].append("used_shown")
        if self._may_edit(request, obj):
            fields = ["ical"] if obj is None else ["ical", "replace"]
            fieldsets.append((gettext_lazy("Import"), {"fields": fields}))
        if obj is not None and not _has_rows(obj):
            fieldsets.append((gettext_lazy("Excluded days"), {"fields": ["days_shown"]}))
        return fieldsets

    def get_inlines(self, request: HttpRequest, obj: Calendar | None) -> Any:
        return self.inlines if obj is None or _has_rows(obj) else ()

    @admin.display(description=gettext_lazy("excluded days"))
    def days_listed(self, calendar: Any) -> int:
        length = calendar.entry_length
        return int(calendar.entry_count + (length.days if length else 0))

    @admin.display(description=gettext_lazy("used by"))
    def used_listed(self, calendar: Any) -> str:
        count = calendar.schedule_count
        if not count:
            return "–"
        text = ngettext("%(count)d schedule", "%(count)d schedules", count) % {"count": count}
        address = reverse("admin:distcron_schedule_changelist")
        return format_html('<a href="{}?calendar__id__exact={}">{}</a>', address, calendar.pk, text)

    @admin.display(description=gettext_lazy("used by"))
    def used_shown(self, calendar: Calendar) -> str:
        rows = [(display.link(each, each),) for each in calendar.schedules.all()[:_LISTED]]
        return _listed(rows) if rows else "–"

    @admin.display(description=gettext_lazy("excluded days"))
    def days_shown(self, calendar: Calendar) -> str:
        rows = [(str(each),) for each in calendar.entries.all()[:_LISTED]]
        more = calendar.entries.count() - len(rows)
        if more:
            rows.append((_("… and %(count)d more") % {"count": more},))
        note = _("Too many to edit one by one. Import a file to replace them.")
        return format_html('{}<p class="help">{}</p>', _listed(rows), note)

    # --- add, change, delete ---

    def save_model(self, request: HttpRequest, obj: Calendar, form: Any, change: bool) -> None:
        # Each save plans the schedules anew, which a form without a change shall not do.
        if not change or set(_COLUMNS).intersection(form.changed_data):
            obj.save()

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        """Store the days, those of the file in place of all others, and audit the whole."""
        calendar: Calendar = form.instance
        if form.events is None:
            super().save_related(request, form, formsets, change)
        else:
            calendar.replace_entries(form.events)
            self.message_user(request, _imported(len(form.events)))
        before, after = _differences(form.before, _snapshot(calendar))
        if after or not change:
            _audit(
                request,
                "change" if change else "add",
                calendar,
                before=before if change else None,
                after=after,
            )
        transaction.on_commit(wakeup.announce)

    def construct_change_message(
        self, request: HttpRequest, form: Any, formsets: Any, add: bool = False
    ) -> list[dict[str, Any]]:
        """Return nothing: the audit entry says more. A file leaves the formsets unsaved."""
        return []

    def log_addition(self, request: HttpRequest, obj: Calendar, message: Any) -> Any:
        """Write nothing: ``save_related`` has written the audit entry and its LogEntry."""

    def log_change(self, request: HttpRequest, obj: Calendar, message: Any) -> Any:
        """Write nothing: ``save_related`` has written the audit entry and its LogEntry."""

    def log_deletions(self, request: HttpRequest, queryset: Any) -> Any:
        for calendar in queryset:
            before, _after = _differences(_snapshot(calendar), {})
            _audit(request, "delete", calendar, before=before)

    def _may_edit(self, request: HttpRequest, obj: Calendar | None) -> bool:
        if obj is None:
            return self.has_add_permission(request)
        return self.has_change_permission(request, obj)


def _has_any(request: HttpRequest, *verbs: str) -> bool:
    return any(request.user.has_perm(f"distcron.{verb}_calendar") for verb in verbs)


def _has_rows(calendar: Calendar) -> bool:
    """Return whether the entries are few enough to be edited in one form."""
    return calendar.entries.count() <= MAX_ROWS


def _listed(rows: Collection[tuple[Any]]) -> str:
    return format_html(
        '<ul class="distcron-runs">{}</ul>', format_html_join("", "<li>{}</li>", rows)
    )


def _must_confirm(count: int) -> str:
    message = ngettext(
        "The calendar has %(count)d entry, which the file would replace. "
        "Tick this, and choose the file again.",
        "The calendar has %(count)d entries, which the file would replace. "
        "Tick this, and choose the file again.",
        count,
    )
    return message % {"count": count}


def _imported(count: int) -> str:
    message = ngettext(
        "%(count)d day or range imported.", "%(count)d days or ranges imported.", count
    )
    return message % {"count": count}


def _snapshot(calendar: Calendar) -> dict[str, Any]:
    """Return what people may edit of a calendar; of one that is not stored, nothing."""
    if calendar.pk is None:
        return {"entries": []}
    columns = {name: getattr(calendar, name) for name in _COLUMNS}
    return {**columns, "entries": [str(entry) for entry in calendar.entries.all()]}


def _differences(
    before: dict[str, Any], after: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parts that differ, as (before, after): of the entries those gone and new."""
    names = [name for name in _COLUMNS if before.get(name) != after.get(name)]
    old = {name: before[name] for name in names if name in before}
    new = {name: after[name] for name in names if name in after}
    had, has = before["entries"], after.get("entries", [])
    gone, come = _missing(had, has), _missing(has, had)
    if gone or come:
        old["entries"], new["entries"] = _shortened(gone), _shortened(come)
    return old, new


def _missing(texts: list[str], among: list[str]) -> list[str]:
    known = set(among)
    return [text for text in texts if text not in known]


def _shortened(texts: list[str]) -> list[str]:
    more = len(texts) - _AUDITED
    return texts if more <= 0 else [*texts[:_AUDITED], f"… (+{more})"]


def _audit(request: HttpRequest, verb: str, calendar: Calendar, **values: Any) -> None:
    user = cast("AbstractUser", request.user)
    audit.record(
        actor=user.get_username(), user=user, via="admin", verb=verb, target=calendar, **values
    )
