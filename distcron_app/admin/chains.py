"""Which schedules a schedule starts, as rows of its form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from distcron_app import history, operations
from distcron_app.admin import display
from distcron_app.models import ChainGraph, ChainLink, Schedule

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractUser
    from django.utils.safestring import SafeString

    _LinkForm = forms.ModelForm[ChainLink]
    _LinkFormSet = forms.BaseInlineFormSet[ChainLink, Schedule, forms.ModelForm[ChainLink]]
    _Inline = admin.TabularInline[ChainLink, Schedule]
else:
    _LinkForm = forms.ModelForm
    _LinkFormSet = forms.BaseInlineFormSet
    _Inline = admin.TabularInline

__all__ = ["LinkInline", "links_text", "started_by_text"]

# Suggested while a key is typed; any key may be typed.
_SUGGESTED = 100


class KeyInput(forms.TextInput):
    """A text input that suggests the keys of schedules."""

    template_name = "admin/distcron/widgets/key.html"

    def get_context(self, name: str, value: Any, attrs: dict[str, Any] | None) -> dict[str, Any]:
        context = super().get_context(name, value, {**(attrs or {}), "list": f"{name}-keys"})
        keys = Schedule.objects.order_by("key").values_list("key", flat=True)[:_SUGGESTED]
        return {**context, "keys": list(keys)}


class LinkForm(_LinkForm):
    """One link: after which end, and which schedule, named by its key."""

    # Who types; set by the inline on the class that it builds for the request.
    user: AbstractUser | None = None

    follower = forms.ModelChoiceField(
        queryset=Schedule.objects.order_by("key"),
        to_field_name="key",
        label=gettext_lazy("Start the schedule"),
        widget=KeyInput(attrs={"size": 40, "autocomplete": "off"}),
        error_messages={
            "invalid_choice": gettext_lazy(
                "No schedule has the key “%(value)s”. The list of schedules shows them."
            )
        },
    )

    class Meta:
        model = ChainLink
        fields = ["event", "follower"]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.instance.pk:
            self.initial["follower"] = self.instance.follower

    def clean_follower(self) -> Schedule:
        """Return the schedule, which who makes the link must be allowed to run."""
        schedule: Schedule = self.cleaned_data["follower"]
        wanted = (operations.RUN_SCHEDULE, operations.job_permission(schedule.job))
        for permission in filter(None, wanted):
            if self.has_changed() and self.user and not self.user.has_perm(permission):
                message = _("“%(key)s”: you need the permission %(permission)s to let it start.")
                raise ValidationError(message % {"key": schedule.key, "permission": permission})
        return schedule


class LinkFormSet(_LinkFormSet):
    """The links of one schedule; nobody else changes links between the check and the write."""

    def full_clean(self) -> None:
        if self.is_bound and any(form.has_changed() for form in self.forms):
            ChainGraph.lock()
        super().full_clean()


class LinkInline(_Inline):
    """What a schedule starts; who may change the schedule may change it."""

    model = ChainLink
    fk_name = "schedule"
    form = LinkForm
    formset = LinkFormSet
    extra = 1  # so that one can be added without JavaScript
    verbose_name = gettext_lazy("link")
    verbose_name_plural = gettext_lazy("Afterwards, start other schedules")

    def get_formset(self, request: HttpRequest, obj: Schedule | None = None, **options: Any) -> Any:
        formset = super().get_formset(request, obj, **options)
        form = cast("type[LinkForm]", formset.form)
        # The class is made for this request alone.
        form.user = cast("AbstractUser", request.user)
        return formset

    def has_view_permission(self, request: HttpRequest, obj: Schedule | None = None) -> bool:
        return request.user.has_perm("distcron.view_schedule") or self._may_edit(request, obj)

    def has_add_permission(self, request: HttpRequest, obj: Schedule | None = None) -> bool:
        return self._may_edit(request, obj)

    def has_change_permission(self, request: HttpRequest, obj: Schedule | None = None) -> bool:
        return self._may_edit(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Schedule | None = None) -> bool:
        return self._may_edit(request, obj)

    def _may_edit(self, request: HttpRequest, obj: Schedule | None) -> bool:
        if obj is not None and obj.is_in_code:
            return False
        verb = "add" if obj is None else "change"
        return request.user.has_perm(f"distcron.{verb}_schedule")


def links_text(schedule: Schedule) -> list[str]:
    """Return what the schedule starts, for the audit."""
    links = history.chains_of([schedule.pk]).starts.get(schedule.pk, ())
    return [f"{each.event} → {each.follower.key}" for each in links]


def started_by_text(schedule: Schedule) -> SafeString | str:
    """Return after which schedules this one is started, with links to them."""
    links = history.chains_of([schedule.pk]).started_by.get(schedule.pk, ())
    if not links:
        return "–"
    rows = (
        (display.link(each.schedule, each.schedule.key), each.get_event_display()) for each in links
    )
    listed = format_html_join("", "<li>" + _("{} when a run {}") + "</li>", rows)
    return format_html('<ul class="distcron-runs">{}</ul>', listed)
