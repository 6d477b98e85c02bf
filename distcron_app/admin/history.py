"""Runs, nodes and audit entries: read-only, and quick with millions of rows."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from django.contrib import admin
from django.core.paginator import Paginator
from django.db import models
from django.http import HttpRequest
from django.utils import formats
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from distcron_app import audit, operations
from distcron_app.admin import display
from distcron_app.models import Attempt, AuditEntry, Calendar, Node, Run, RunOutput, Schedule

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

    _RunAdmin = admin.ModelAdmin[Run]
    _NodeAdmin = admin.ModelAdmin[Node]
    _AuditEntryAdmin = admin.ModelAdmin[AuditEntry]
    _AttemptInline = admin.TabularInline[Attempt, Run]
    _Options = admin.options.BaseModelAdmin[Any]
    _Paginator = Paginator[Any]
else:
    _RunAdmin = _NodeAdmin = _AuditEntryAdmin = admin.ModelAdmin
    _AttemptInline = admin.TabularInline
    _Options = object
    _Paginator = Paginator

__all__ = ["AuditEntryAdmin", "NodeAdmin", "RunAdmin"]

# Counting a million rows takes longer than reading the page; nobody pages further.
COUNT_LIMIT = 10_000
_AUDITED: tuple[type[Schedule | Calendar | Run], ...] = (Schedule, Calendar, Run)


class CappedPaginator(_Paginator):
    """Pages through the first rows only, so that a list never counts a whole table."""

    @cached_property
    def count(self) -> int:
        rows = cast("models.QuerySet[Any]", self.object_list)
        return rows[:COUNT_LIMIT].count()


class ReadOnly(_Options):
    """Nobody adds, changes or deletes these rows by hand."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class AttemptInline(ReadOnly, _AttemptInline):
    model = Attempt
    extra = 0
    can_delete = False
    verbose_name_plural = gettext_lazy("earlier attempts")
    fields = (
        "number",
        "node",
        "fencing_token",
        "started_at",
        "ended_at",
        "reason",
        "error",
        "late_state",
    )

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Attempt]:
        return super().get_queryset(request).select_related("node")


@admin.register(Run)
class RunAdmin(ReadOnly, _RunAdmin):
    """What ran or was decided upon. Output needs a permission of its own."""

    list_display = (
        "state_shown",
        "schedule_shown",
        "trigger",
        "scheduled_shown",
        "duration_shown",
        "attempt",
        "node",
        "reason_shown",
    )
    list_display_links = ("state_shown",)
    list_filter = ("state", "trigger", "reason")
    # Without a change of case: for each of a million rows that took most of a second.
    search_fields = ("schedule_name__exact", "job__exact")
    search_help_text = gettext_lazy("Exact name of a schedule or job")
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = CappedPaginator
    list_per_page = 50
    view_on_site = False
    ordering = ("-id",)
    # Any other order would sort the whole table.
    sortable_by = ()
    inlines = (AttemptInline,)

    class Media:
        css = {"all": ["distcron/admin.css"]}

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Run]:
        return super().get_queryset(request).select_related("schedule", "node")

    def get_fieldsets(self, request: HttpRequest, obj: Run | None = None) -> Any:
        outcome = ["state_shown", "reason_shown", "error_shown", "result_shown"]
        outcome += ["checkpoint_shown", "details_shown"]
        if request.user.has_perm(operations.VIEW_OUTPUT):
            outcome += ["output_shown", "traceback_shown"]
        what = ["schedule_shown", "job", "arguments_shown", "delivery", "trigger", "triggered_by"]
        if obj is not None and obj.backfill_id is not None:
            what += ["backfill"]
        when = ["scheduled_shown", "due_shown", "claimed_shown", "started_shown", "finished_shown"]
        owner = ["node", "attempt", "recoveries", "fencing_token", "late_shown"]
        return [
            (gettext_lazy("Outcome"), {"fields": outcome}),
            (gettext_lazy("What"), {"fields": what}),
            (gettext_lazy("When"), {"fields": [*when, "duration_shown"]}),
            (gettext_lazy("Owner"), {"fields": owner}),
        ]

    def get_inlines(self, request: HttpRequest, obj: Run | None) -> Any:
        has_attempts = obj is not None and Attempt.objects.filter(run=obj).exists()
        return self.inlines if has_attempts else ()

    @admin.display(description=gettext_lazy("state"))
    def state_shown(self, run: Run) -> SafeString:
        return display.state(run)

    @admin.display(description=gettext_lazy("schedule"))
    def schedule_shown(self, run: Run) -> SafeString:
        if run.schedule is None:
            text = _("deleted")
            return format_html('{} <span class="distcron-quiet">{}</span>', run.schedule_name, text)
        return display.link(run.schedule, run.schedule_name)

    @admin.display(description=gettext_lazy("scheduled"))
    def scheduled_shown(self, run: Run) -> str:
        return _instant(run, "instant")

    @admin.display(description=gettext_lazy("due"))
    def due_shown(self, run: Run) -> str:
        return _instant(run, "due_at")

    @admin.display(description=gettext_lazy("claimed"))
    def claimed_shown(self, run: Run) -> str:
        return _instant(run, "claimed_at")

    @admin.display(description=gettext_lazy("started"))
    def started_shown(self, run: Run) -> str:
        return _instant(run, "started_at")

    @admin.display(description=gettext_lazy("finished"))
    def finished_shown(self, run: Run) -> str:
        return _instant(run, "finished_at")

    @admin.display(description=gettext_lazy("duration"))
    def duration_shown(self, run: Run) -> str:
        seconds = run.duration_seconds
        return "–" if seconds is None else _("%s s") % formats.number_format(seconds, 1)

    @admin.display(description=gettext_lazy("reason"))
    def reason_shown(self, run: Run) -> str:
        return str(run.get_reason_display()) or "–"

    @admin.display(description=gettext_lazy("reported late"))
    def late_shown(self, run: Run) -> str:
        return _("yes") if run.late else _("no")

    @admin.display(description=gettext_lazy("arguments"))
    def arguments_shown(self, run: Run) -> str:
        return display.json_block(audit.masked({"arguments": run.arguments})["arguments"])

    @admin.display(description=gettext_lazy("result"))
    def result_shown(self, run: Run) -> str:
        return display.json_block(run.result)

    @admin.display(description=gettext_lazy("checkpoint"))
    def checkpoint_shown(self, run: Run) -> str:
        return display.json_block(run.checkpoint)

    @admin.display(description=gettext_lazy("details"))
    def details_shown(self, run: Run) -> str:
        return display.json_block(run.details)

    @admin.display(description=gettext_lazy("error"))
    def error_shown(self, run: Run) -> str:
        return run.error or "–"

    @admin.display(description=gettext_lazy("output"))
    def output_shown(self, run: Run) -> str:
        return _text(run, "output")

    @admin.display(description=gettext_lazy("traceback"))
    def traceback_shown(self, run: Run) -> str:
        return _text(run, "traceback")


@admin.register(Node)
class NodeAdmin(ReadOnly, _NodeAdmin):
    """The processes that run schedules now, or did."""

    list_display = (
        "state_shown",
        "name",
        "process_shown",
        "heartbeat_shown",
        "load_shown",
        "tick_lag_ms",
        "clock_offset_ms",
        "alert",
    )
    list_display_links = ("name",)
    list_filter = ("state",)
    search_fields = ("name", "host")
    show_full_result_count = False
    view_on_site = False

    class Media:
        css = {"all": ["distcron/admin.css"]}

    @admin.display(description=gettext_lazy("state"), ordering="state")
    def state_shown(self, node: Node) -> SafeString:
        return display.state(node)

    @admin.display(description=gettext_lazy("heartbeat"), ordering="heartbeat_at")
    def heartbeat_shown(self, node: Node) -> str:
        return display.relative(node.heartbeat_at, display.place_of(None))

    @admin.display(description=gettext_lazy("process"), ordering="host")
    def process_shown(self, node: Node) -> str:
        return f"{node.host} / {node.pid}"

    @admin.display(description=gettext_lazy("running"))
    def load_shown(self, node: Node) -> str:
        return _("%(running)s of %(slots)s") % {"running": node.running, "slots": node.slots}


@admin.register(AuditEntry)
class AuditEntryAdmin(ReadOnly, _AuditEntryAdmin):
    """Who did what, and why."""

    list_display = ("at_shown", "actor", "via", "verb", "object_shown", "reason", "difference")
    list_display_links = ("at_shown",)
    list_filter = ("verb", "via")
    search_fields = ("actor", "object_label", "reason")
    search_help_text = gettext_lazy("Actor, object or reason")
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = CappedPaginator
    list_per_page = 50
    view_on_site = False
    sortable_by = ()
    fields = (
        "at_shown",
        "actor",
        "user",
        "via",
        "verb",
        "type_shown",
        "object_shown",
        "reason",
        "before_shown",
        "after_shown",
    )

    class Media:
        css = {"all": ["distcron/admin.css"]}

    @admin.display(description=gettext_lazy("at"))
    def at_shown(self, entry: AuditEntry) -> str:
        return display.instant(entry.at)

    @admin.display(description=gettext_lazy("object type"))
    def type_shown(self, entry: AuditEntry) -> str:
        names = {model._meta.model_name: model._meta.verbose_name for model in _AUDITED}
        return str(names.get(entry.object_type, entry.object_type))

    @admin.display(description=gettext_lazy("object"))
    def object_shown(self, entry: AuditEntry) -> str:
        model = next((m for m in _AUDITED if m._meta.model_name == entry.object_type), None)
        if model is None or entry.verb == "delete":
            return entry.object_label
        return display.link(model(pk=int(entry.object_id)), entry.object_label)

    @admin.display(description=gettext_lazy("change"))
    def difference(self, entry: AuditEntry) -> str:
        if entry.verb in ("add", "delete"):
            return "–"
        return audit.shown(entry.before, entry.after) or "–"

    @admin.display(description=gettext_lazy("before"))
    def before_shown(self, entry: AuditEntry) -> str:
        return display.json_block(entry.before)

    @admin.display(description=gettext_lazy("after"))
    def after_shown(self, entry: AuditEntry) -> str:
        return display.json_block(entry.after)


def _instant(run: Run, name: str) -> str:
    return display.instant(getattr(run, name), display.place_of(run.schedule))


def _text(run: Run, name: str) -> str:
    text = RunOutput.objects.filter(pk=run.pk).values_list(name, flat=True).first()
    return format_html('<pre class="distcron-output">{}</pre>', text) if text else "–"
