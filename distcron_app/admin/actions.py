"""Run now, pause and resume in the admin: first a page that asks, then the change.

The page lists what it is about, works without JavaScript, and carries a key that makes
a form which is sent twice act once. A GET changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import django
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.http.response import HttpResponseBase, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from distcron_app import operations
from distcron_app.admin import display
from distcron_app.errors import JobError, ScheduleBusy
from distcron_app.forms import ConfirmForm
from distcron_app.models import Run, Schedule

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin
    from django.contrib.auth.models import AbstractUser

    from distcron_app.operations import StateChange

__all__ = ["VERBS", "Verb", "confirm", "tools"]

# More schedules than this are reported as a count, not each with a line.
_LINES = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One action on schedules: its words, its permission and where it makes sense."""

    name: str
    label: Promise
    permission: str
    explanation: Promise
    needs_reason: bool = False
    has_until: bool = False
    fits: Callable[[Schedule], bool] = lambda schedule: True


VERBS = {
    verb.name: verb
    for verb in (
        Verb(
            name="run",
            label=gettext_lazy("run now"),
            permission=operations.RUN_SCHEDULE,
            explanation=gettext_lazy(
                "Each schedule gets one run outside its timetable, as soon as a node has a free "
                "slot. A schedule whose run is queued or active is left alone."
            ),
        ),
        Verb(
            name="pause",
            label=gettext_lazy("pause"),
            permission=operations.PAUSE_SCHEDULE,
            explanation=gettext_lazy(
                "The timetables stop until somebody resumes them, or until the time below. A run "
                "that is active goes on to its end."
            ),
            needs_reason=True,
            has_until=True,
            fits=lambda schedule: schedule.state != Schedule.State.PAUSED,
        ),
        Verb(
            name="resume",
            label=gettext_lazy("resume"),
            permission=operations.PAUSE_SCHEDULE,
            explanation=gettext_lazy(
                "The timetables go on. What came due while they were paused is not run, unless "
                "a schedule says that its misfire policy decides about it."
            ),
            fits=lambda schedule: schedule.state == Schedule.State.PAUSED,
        ),
    )
}


def tools(request: HttpRequest, schedule: Schedule) -> list[dict[str, str]]:
    """Return the buttons of a change page: what the user may do and what makes sense."""
    return [
        {"url": f"{_url(verb)}?ids={schedule.pk}", "label": capfirst(str(verb.label))}
        for verb in VERBS.values()
        if _user(request).has_perm(verb.permission) and verb.fits(schedule)
    ]


def confirm(
    model_admin: ModelAdmin[Schedule],
    request: HttpRequest,
    name: str,
    ids: Sequence[int] | None = None,
) -> HttpResponseBase:
    """Ask on GET, and for ``ids`` that the list sent; act on the POST of that page.

    Raise Http404 for another name, PermissionDenied without the verb's permission.
    """
    verb = VERBS.get(name)
    if verb is None:
        raise Http404
    allowed = model_admin.has_view_or_change_permission(request)
    if not (allowed and _user(request).has_perm(verb.permission)):
        raise PermissionDenied
    if request.method not in ("GET", "HEAD", "POST"):
        return HttpResponseNotAllowed(["GET", "POST"])
    data = request.POST if ids is None and request.method == "POST" else None
    text = ",".join(map(str, ids)) if ids is not None else _sent(request).get("ids", "")
    schedules = _schedules(model_admin, request, text)
    form = ConfirmForm(
        data,
        needs_reason=verb.needs_reason,
        has_until=verb.has_until,
        # Of several schedules each has its own.
        schedule=schedules[0] if verb.name == "run" and len(schedules) == 1 else None,
        initial={"ids": text},
    )
    if data is not None and form.is_valid() and schedules:
        return _act(request, verb, schedules, form)
    return _page(model_admin, request, verb, schedules, form)


def _schedules(model_admin: ModelAdmin[Schedule], request: HttpRequest, ids: str) -> list[Schedule]:
    numbers = [int(part) for part in ids.split(",") if part.isascii() and part.isdigit()]
    # An id beyond the column's range would be an error on some databases.
    numbers = [number for number in numbers if number < 2**63]
    return list(model_admin.get_queryset(request).filter(pk__in=numbers).order_by("name", "pk"))


def _page(
    model_admin: ModelAdmin[Schedule],
    request: HttpRequest,
    verb: Verb,
    schedules: Sequence[Schedule],
    form: ConfirmForm,
) -> HttpResponse:
    if not schedules:
        messages.warning(request, _("None of these schedules exists any more."))
        return HttpResponseRedirect(_list_url())
    context = {
        **model_admin.admin_site.each_context(request),
        "opts": model_admin.opts,
        "title": capfirst(str(verb.label)),
        "button": capfirst(str(verb.label)),
        "explanation": verb.explanation,
        "schedules": schedules,
        "lines": [_line(verb, schedule) for schedule in schedules],
        "form": form,
        "form_url": _url(verb),
        "back_url": _back_url(schedules),
        # Django 6.1 made the breadcrumbs of the admin a list.
        "crumbs_tag": "ol" if django.VERSION >= (6, 1) else "div",
    }
    return TemplateResponse(request, "admin/distcron/schedule/confirm.html", context)


def _line(verb: Verb, schedule: Schedule) -> dict[str, Any]:
    return {
        "schedule": schedule,
        "url": reverse("admin:distcron_schedule_change", args=[schedule.pk]),
        "state": display.state(schedule),
        "note": "" if verb.fits(schedule) else _("(nothing to do)"),
    }


def _act(
    request: HttpRequest, verb: Verb, schedules: Sequence[Schedule], form: ConfirmForm
) -> HttpResponse:
    reason, key = form.cleaned_data["reason"], form.cleaned_data["idempotency_key"]
    if verb.name == "run":
        call = {name: form.cleaned_data.get(name) for name in ("arguments", "nominal_at")}
        _run_all(request, schedules, reason=reason, idempotency_key=key, **call)
    else:
        user = _user(request)
        author: dict[str, Any] = {
            "reason": reason,
            "actor": user.get_username(),
            "user": user,
            "via": "admin",
            "idempotency_key": key,
        }
        if verb.name == "pause":
            changed = operations.pause(schedules, until=form.cleaned_data["until"], **author)
        else:
            changed = operations.resume(schedules, **author)
        _report(request, verb, changed)
    return HttpResponseRedirect(_back_url(schedules))


def _run_all(request: HttpRequest, schedules: Sequence[Schedule], **given: Any) -> None:
    outcomes = [_run_one(request, schedule, **given) for schedule in schedules]
    for level, text in outcomes[:_LINES]:
        messages.add_message(request, level, text)
    rest = outcomes[_LINES:]
    if rest:
        queued = sum(level == messages.SUCCESS for level, _text in rest)
        text = _("%(queued)s more runs are queued, %(refused)s more were refused.")
        counts = {"queued": queued, "refused": len(rest) - queued}
        messages.info(request, text % counts)


def _run_one(request: HttpRequest, schedule: Schedule, **given: Any) -> tuple[int, str]:
    user = _user(request)
    needed = operations.job_permission(schedule.job)
    if needed and not user.has_perm(needed):
        text = _("{}: not run. Its job needs the permission {}.")
        return messages.ERROR, format_html(text, schedule, needed)
    try:
        run = operations.run_now(
            schedule, actor=user.get_username(), user=user, via="admin", **given
        )
    except ScheduleBusy as busy:
        blocking = _run_link(request, busy.blocked_by)
        return messages.WARNING, format_html(_("{}: busy, blocked by {}."), schedule, blocking)
    except JobError as error:
        return messages.ERROR, format_html(_("{}: not run. {}"), schedule, error)
    return messages.SUCCESS, format_html(
        _("{}: {} is queued."), schedule, _run_link(request, run.pk)
    )


def _run_link(request: HttpRequest, run_id: int) -> str | SafeString:
    text = _("run %s") % run_id
    if not _user(request).has_perm("distcron.view_run"):
        return text
    return display.link(Run(pk=run_id), text)


def _report(request: HttpRequest, verb: Verb, change: StateChange) -> None:
    done, left = len(change.changed), len(change.unchanged)
    if verb.name == "pause":
        text = ngettext("%s schedule is paused.", "%s schedules are paused.", done)
        rest = ngettext("%s was paused already.", "%s were paused already.", left)
    else:
        text = ngettext("%s schedule goes on.", "%s schedules go on.", done)
        rest = ngettext("%s was not paused.", "%s were not paused.", left)
    if done:
        messages.success(request, text % done)
    if left:
        messages.info(request, rest % left)
    for schedule in change.changed[:_LINES]:
        if schedule.state in (Schedule.State.INVALID, Schedule.State.EXHAUSTED):
            messages.warning(request, f"{schedule}: {schedule.state_reason}")


def _sent(request: HttpRequest) -> Any:
    return request.POST if request.method == "POST" else request.GET


def _user(request: HttpRequest) -> AbstractUser:
    # The admin lets nobody in who is not logged in.
    return cast("AbstractUser", request.user)


def _url(verb: Verb) -> str:
    return reverse("admin:distcron_schedule_act", args=[verb.name])


def _list_url() -> str:
    return reverse("admin:distcron_schedule_changelist")


def _back_url(schedules: Sequence[Schedule]) -> str:
    if len(schedules) == 1:
        return reverse("admin:distcron_schedule_change", args=[schedules[0].pk])
    return _list_url()
