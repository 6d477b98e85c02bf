"""The list and the form of schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db import models, transaction
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_POST

from distcron_app import audit, operations, wakeup
from distcron_app.admin import actions, display, preview
from distcron_app.admin.chains import LinkInline, links_text, started_by_text
from distcron_app.errors import TimetableError
from distcron_app.forms import ScheduleForm
from distcron_app.models import Run, Schedule

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractUser
    from django.utils.safestring import SafeString

    _ScheduleAdmin = admin.ModelAdmin[Schedule]
else:
    _ScheduleAdmin = admin.ModelAdmin

__all__ = ["ScheduleAdmin"]

_PREVIEW_COUNT = 5
_WHEN = gettext_lazy(
    "Fill in what the kind needs: a cron expression, a number of seconds, "
    "a number of days, weeks or months, or one instant. A schedule that runs only by hand or "
    "after another one needs nothing."
)
# Marks the fieldset after which the preview is shown.
WHEN_CLASS = "distcron-when"
_RULE = (
    "kind",
    "cron",
    "interval_seconds",
    "interval_anchor",
    ("calendar_every", "calendar_unit"),
    ("calendar_date", "calendar_time"),
    "run_at",
    "timezone",
)
_MORE = (
    ("starts_at", "ends_at"),
    "max_runs",
    ("calendar", "calendar_action"),
    ("spread_seconds", "spread_by"),
    "spread_key",
    ("gap", "fold"),
    "on_resume",
    "delivery",
    "lock_level",
    ("keep_days", "keep_succeeded", "keep_failed"),
    "notes",
)
# Groups of policies, folded until somebody opens them or one of their fields is wrong.
_POLICIES = (
    (gettext_lazy("While a run is still active"), ("overlap", "max_active", "max_queued")),
    (
        gettext_lazy("Occurrences that are late"),
        (
            "misfire",
            "misfire_grace_seconds",
            "catchup_window_seconds",
            ("catchup_max", "catchup_per_minute"),
            "start_deadline_seconds",
        ),
    ),
    (
        gettext_lazy("When the job fails"),
        (
            "max_attempts",
            ("backoff", "backoff_delays"),
            ("backoff_longest_seconds", "backoff_jitter"),
            "retry_stops_at_next",
            "retry_on",
            "give_up_on",
            ("auto_pause_after", "auto_pause_minutes"),
        ),
    ),
)


class DefinedInFilter(admin.SimpleListFilter):
    """By who says what a schedule does: people, or code."""

    title = gettext_lazy("defined in code")
    parameter_name = "in_code"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [
            ("yes", _("In code")),
            ("left", _("No longer in code")),
            ("no", _("By people")),
        ]

    def queryset(
        self, request: HttpRequest, queryset: models.QuerySet[Schedule]
    ) -> models.QuerySet[Schedule]:
        conditions = {
            "yes": models.Q(left_code_at=None) & ~models.Q(defined_in=""),
            "left": models.Q(left_code_at__isnull=False),
            "no": models.Q(defined_in=""),
        }
        return queryset.filter(conditions.get(self.value() or "", models.Q()))


class ScheduleChangeList(ChangeList):
    """The page of schedules, each with its newest run; one more query for the whole page."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        schedules: list[Any] = list(self.result_list)
        wanted = [schedule.last_run_id for schedule in schedules if schedule.last_run_id]
        runs = Run.objects.only("state", "reason", "finished_at", "due_at").in_bulk(wanted)
        for schedule in schedules:
            schedule.last_run = runs.get(schedule.last_run_id)
        self.result_list = schedules


@admin.register(Schedule)
class ScheduleAdmin(_ScheduleAdmin):
    """Add, edit, run, pause and resume schedules.

    The form writes what people may edit, guarded by the version, and the scheduler's
    columns are never among it. Of a schedule in code it writes nothing: people may run,
    pause and resume that.
    """

    form = ScheduleForm
    list_display = (
        "state_shown",
        "name_shown",
        "rule_shown",
        "next_run_shown",
        "last_run_listed",
    )
    list_display_links = ("name_shown",)
    list_filter = ("state", "kind", "job", DefinedInFilter, "lock_level", "calendar")
    search_fields = ("name", "key", "job", "notes")
    search_help_text = gettext_lazy("Name, key, job or notes")
    show_full_result_count = False
    list_per_page = 50
    view_on_site = False
    save_on_top = False
    prepopulated_fields = {"key": ("name",)}
    actions = ("run_selected", "pause_selected", "resume_selected")
    inlines = (LinkInline,)
    readonly_fields = (
        "state_shown",
        "state_note",
        "defined_shown",
        "upcoming_shown",
        "last_run_shown",
        "started_by_shown",
        "arguments_shown",
    )

    class Media:
        css = {"all": ["distcron/admin.css"]}

    # --- what is shown ---

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Schedule]:
        # For the columns, which are not given the request.
        may_view_runs = models.Value(request.user.has_perm("distcron.view_run"))
        return Schedule.objects.with_last_run().annotate(may_view_runs=may_view_runs)

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[ChangeList]:
        return ScheduleChangeList

    def get_fieldsets(self, request: HttpRequest, obj: Schedule | None = None) -> Any:
        arguments = "arguments" if self._may_edit(request, obj) else "arguments_shown"
        what = ["name", "key", "job", arguments]
        more = [*_MORE]
        when = None
        if self._may_edit(request, obj):
            more += ["seen_version"]
            when = _WHEN
        fieldsets: list[Any] = [
            (gettext_lazy("What"), {"fields": what}),
            (
                gettext_lazy("When"),
                {"fields": [*_RULE], "description": when, "classes": [WHEN_CLASS]},
            ),
            *(
                (heading, {"fields": fields, "classes": ["collapse"]})
                for heading, fields in _POLICIES
            ),
            (gettext_lazy("More"), {"fields": more}),
        ]
        if obj is not None:
            now = [
                "state_shown",
                "state_note",
                "upcoming_shown",
                "last_run_shown",
                "started_by_shown",
            ]
            if obj.defined_in:
                now.insert(0, "defined_shown")
            fieldsets.insert(0, (gettext_lazy("Now"), {"fields": now}))
        return fieldsets

    def get_inline_instances(self, request: HttpRequest, obj: Schedule | None = None) -> list[Any]:
        # Left out, links keep what is stored, as fields do.
        if request.method == "POST" and "links-TOTAL_FORMS" not in request.POST:
            return []
        return list(super().get_inline_instances(request, obj))

    def get_form(
        self,
        request: HttpRequest,
        obj: Schedule | None = None,
        change: bool = False,
        **options: Any,
    ) -> type[ScheduleForm]:
        form = cast("type[ScheduleForm]", super().get_form(request, obj, change, **options))
        # The class is made for this request alone.
        form.user = cast("AbstractUser", request.user)
        form.is_preview = "_preview" in request.POST
        return form

    @admin.display(description=gettext_lazy("state"), ordering="state")
    def state_shown(self, schedule: Schedule) -> SafeString:
        return display.state(schedule)

    @admin.display(description=gettext_lazy("name"), ordering="name")
    def name_shown(self, schedule: Schedule) -> SafeString:
        note = schedule.state_reason if schedule.state != Schedule.State.ACTIVE else ""
        until = ""
        if schedule.paused_until:
            ends = display.instant(schedule.paused_until, display.place_of(schedule))
            until = format_html(_("until {}"), ends)
        in_code = _("· in code") if schedule.is_in_code else ""
        return format_html(
            '{}<br><span class="distcron-quiet">{} {} {}</span>',
            schedule.name,
            note or schedule.job,
            until,
            in_code,
        )

    @admin.display(description=gettext_lazy("rule"))
    def rule_shown(self, schedule: Schedule) -> str:
        stored = f"{schedule.cron} · {schedule.timezone}" if schedule.cron else schedule.timezone
        return format_html(
            '<span class="distcron-rule">{}</span><br><span class="distcron-quiet">{}</span>',
            schedule.in_words(),
            stored,
        )

    @admin.display(description=gettext_lazy("next run"), ordering="next_run_at")
    def next_run_shown(self, schedule: Schedule) -> str:
        return display.instant(schedule.next_run_at, display.place_of(schedule))

    @admin.display(description=gettext_lazy("last run"))
    def last_run_listed(self, schedule: Any) -> str:
        run: Run | None = schedule.last_run
        if run is None:
            return _("never")
        ago = display.relative(run.finished_at or run.due_at, display.place_of(schedule))
        return format_html("{} {}", _outcome(schedule, run), ago)

    @admin.display(description=gettext_lazy("last run"))
    def last_run_shown(self, schedule: Any) -> str:
        run = Run.objects.filter(pk=schedule.last_run_id).first()
        if run is None:
            return _("never")
        moment = display.instant(run.finished_at or run.due_at, display.place_of(schedule))
        return format_html("{} {}", _outcome(schedule, run), moment)

    @admin.display(description=gettext_lazy("why"))
    def state_note(self, schedule: Schedule) -> str:
        if schedule.state == Schedule.State.ACTIVE:
            return "–"
        by = _("by %s") % schedule.state_by if schedule.state_by else ""
        at = display.instant(schedule.state_at) if schedule.state_at else ""
        until = ""
        if schedule.paused_until:
            until = format_html(
                _("until {}"), display.instant(schedule.paused_until, display.place_of(schedule))
            )
        return format_html("{} {} {} {}", schedule.state_reason, by, at, until)

    @admin.display(description=gettext_lazy("defined in code"))
    def defined_shown(self, schedule: Schedule) -> SafeString:
        place = format_html("<code>{}</code>", schedule.defined_in)
        if schedule.left_code_at is not None:
            left_at = display.instant(schedule.left_code_at, display.place_of(schedule))
            text = _(
                "{}, until {}. When the code is back, it decides again; a change here ends that."
            )
            return format_html(text, place, left_at)
        text = _("{}. Change it there; here it can be run, paused and resumed.")
        return format_html(text, place)

    @admin.display(description=gettext_lazy("next runs"))
    def upcoming_shown(self, schedule: Schedule) -> str:
        # As stored: after an error the object holds what was typed and is not planned.
        stored = Schedule.objects.filter(pk=schedule.pk).first() or schedule
        try:
            instants = stored.upcoming(_PREVIEW_COUNT)
        except TimetableError as error:
            return str(error)
        if not stored.has_timetable:
            return stored.in_words()
        if not instants:
            return _("None while the schedule is not active.")
        place = display.place_of(stored)
        rows = ((display.instant_with_utc(each, place),) for each in instants)
        return format_html(
            '<ul class="distcron-runs">{}</ul>', format_html_join("", "<li>{}</li>", rows)
        )

    @admin.display(description=gettext_lazy("is started by"))
    def started_by_shown(self, schedule: Schedule) -> str:
        return started_by_text(schedule)

    @admin.display(description=gettext_lazy("arguments"))
    def arguments_shown(self, schedule: Schedule) -> str:
        return display.json_block(audit.masked({"arguments": schedule.arguments})["arguments"])

    # --- add, change, delete ---

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Schedule | None:
        if request.method == "POST":
            # Held until the commit, so that nobody saves between the check and the write.
            schedule = super().get_object(request, object_id, from_field)
            if schedule is not None:
                list(Schedule.objects.select_for_update().filter(pk=schedule.pk).values("pk"))
        return super().get_object(request, object_id, from_field)

    def has_change_permission(self, request: HttpRequest, obj: Schedule | None = None) -> bool:
        is_in_code = obj is not None and obj.is_in_code
        return super().has_change_permission(request, obj) and not is_in_code

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        if request.method == "POST" and object_id is not None:
            schedule = super().get_object(request, object_id)
            if schedule is not None and schedule.is_in_code:
                return self._refuse_edit(request, schedule)
        return super().changeform_view(request, object_id, form_url, extra_context)

    def _refuse_edit(self, request: HttpRequest, schedule: Schedule) -> HttpResponse:
        """Say why nothing was saved, to whom may edit schedules at all."""
        if not super().has_change_permission(request, schedule):
            raise PermissionDenied
        text = _("{} is defined in code ({}), so nothing was saved. Change it there, or pause it.")
        messages.error(request, format_html(text, schedule, schedule.defined_in))
        return HttpResponseRedirect(
            reverse(
                "admin:distcron_schedule_change",
                args=[schedule.pk],
                current_app=self.admin_site.name,
            )
        )

    def get_deleted_objects(
        self, objs: Any, request: HttpRequest
    ) -> tuple[list[Any], dict[str, int], set[str], list[Any]]:
        deleted, counts, lacking, protected = super().get_deleted_objects(objs, request)
        # The next sync would only make it again; Django deletes nothing while any is listed.
        in_code = [
            format_html(_("{}: defined in code, in {}"), each, each.defined_in)
            for each in objs
            if each.is_in_code
        ]
        return deleted, counts, lacking, [*protected, *in_code]

    def save_model(self, request: HttpRequest, obj: Schedule, form: Any, change: bool) -> None:
        _before, typed = audit.changes(form.before, audit.snapshot(obj))
        is_broken = obj.state in (Schedule.State.INVALID, Schedule.State.EXHAUSTED)
        if change and not typed and not is_broken:
            return
        if obj.left_code_at is not None:
            # The code has dropped it and a person goes on with it: from now on it is theirs.
            obj.defined_in, obj.left_code_at = "", None
        obj.save()
        # Again, since the save may have mended or finished the schedule.
        before, after = audit.changes(form.before, audit.snapshot(obj))
        user = cast("AbstractUser", request.user)
        audit.record(
            actor=user.get_username(),
            user=user,
            via="admin",
            verb="change" if change else "add",
            target=obj,
            before=before if change else None,
            after=after,
        )
        transaction.on_commit(wakeup.announce)

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        schedule: Schedule = form.instance
        before = links_text(schedule)
        super().save_related(request, form, formsets, change)
        after = links_text(schedule)
        if before == after:
            return
        user = cast("AbstractUser", request.user)
        audit.record(
            actor=user.get_username(),
            user=user,
            via="admin",
            verb="change",
            target=schedule,
            before={"links": before},
            after={"links": after},
        )

    def log_addition(self, request: HttpRequest, obj: Schedule, message: Any) -> Any:
        """Write nothing: ``save_model`` has written the audit entry and its LogEntry."""

    def log_change(self, request: HttpRequest, obj: Schedule, message: Any) -> Any:
        """Write nothing: ``save_model`` has written the audit entry and its LogEntry."""

    def log_deletions(self, request: HttpRequest, queryset: Any) -> Any:
        user = cast("AbstractUser", request.user)
        for schedule in queryset:
            audit.record(
                actor=user.get_username(),
                user=user,
                via="admin",
                verb="delete",
                target=schedule,
                # The links go with it.
                before=audit.snapshot(schedule) | {"links": links_text(schedule)},
            )
        transaction.on_commit(wakeup.announce)

    # --- actions ---

    def has_run_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(operations.RUN_SCHEDULE)

    def has_pause_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(operations.PAUSE_SCHEDULE)

    @admin.action(description=gettext_lazy("Run now…"), permissions=["run"])
    def run_selected(
        self, request: HttpRequest, queryset: models.QuerySet[Schedule]
    ) -> HttpResponseBase:
        return actions.confirm(self, request, "run", _ids(queryset))

    @admin.action(description=gettext_lazy("Pause…"), permissions=["pause"])
    def pause_selected(
        self, request: HttpRequest, queryset: models.QuerySet[Schedule]
    ) -> HttpResponseBase:
        return actions.confirm(self, request, "pause", _ids(queryset))

    @admin.action(description=gettext_lazy("Resume…"), permissions=["pause"])
    def resume_selected(
        self, request: HttpRequest, queryset: models.QuerySet[Schedule]
    ) -> HttpResponseBase:
        return actions.confirm(self, request, "resume", _ids(queryset))

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.act_view)
        shown = self.admin_site.admin_view(require_POST(self.preview_view))
        return [
            path("act/<str:verb>/", view, name="distcron_schedule_act"),
            path("preview/", shown, name="distcron_schedule_preview"),
            *super().get_urls(),
        ]

    def act_view(self, request: HttpRequest, verb: str) -> HttpResponseBase:
        """Ask, and on the POST of that page act; the buttons of a schedule's page lead here."""
        return actions.confirm(self, request, verb)

    def preview_view(self, request: HttpRequest) -> HttpResponse:
        """Answer with what the posted form means, as a fragment; nothing is stored.

        ``?schedule=`` names the stored row that the form is about.
        """
        schedule = None
        if "schedule" in request.GET:
            # Unknown or not a number: None, which is refused as a new one may be.
            schedule = super().get_object(request, request.GET["schedule"])
        if not self._may_edit(request, schedule):
            raise PermissionDenied
        return HttpResponse(preview.render(request, schedule))

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **options: Any
    ) -> HttpResponse:
        schedule = context.get("original")
        context["distcron_tools"] = [] if schedule is None else actions.tools(request, schedule)
        if self._may_edit(request, schedule):
            context["distcron_preview"] = self._preview_context(request, schedule)
        return super().render_change_form(request, context, *args, **options)

    def _preview_context(self, request: HttpRequest, schedule: Schedule | None) -> dict[str, Any]:
        address = reverse("admin:distcron_schedule_preview", current_app=self.admin_site.name)
        if schedule is not None:
            address = f"{address}?schedule={schedule.pk}"
        if "_preview" not in request.POST:
            return {"url": address}
        stored = None if schedule is None else Schedule.objects.filter(pk=schedule.pk).first()
        return {"url": address, "html": preview.render(request, stored)}

    def _may_edit(self, request: HttpRequest, obj: Schedule | None) -> bool:
        if obj is None:
            return self.has_add_permission(request)
        return self.has_change_permission(request, obj)


def _ids(queryset: models.QuerySet[Schedule]) -> list[int]:
    return list(queryset.order_by().values_list("pk", flat=True))


def _outcome(schedule: Any, run: Run) -> SafeString:
    state = display.state(run)
    return display.link(run, state) if schedule.may_view_runs else state
