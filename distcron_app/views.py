"""The pages: live state and history for people, and two probes for machines.

Each page has one region that changes. The page itself carries it, and ``?fragment=live``
returns it alone, with an ETag, so that an open page costs a 304 while nothing happens.
Every page works without JavaScript; no GET writes a row.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime, tzinfo
from typing import Any, ClassVar
from urllib.parse import urlencode

from django.contrib import messages
from django.contrib.auth.views import redirect_to_login
from django.core.paginator import Paginator
from django.db import Error, InterfaceError, OperationalError, connection
from django.db.migrations.executor import MigrationExecutor
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.shortcuts import redirect, render
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.cache import get_conditional_response, patch_cache_control
from django.utils.decorators import method_decorator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views import View
from django.views.decorators.http import require_safe

from distcron_app import explanations, history, holdings, operations
from distcron_app.errors import (
    ConfigurationError,
    InvalidArguments,
    RunMovedOn,
    ScheduleBusy,
    StaleVersion,
    TimetableError,
    UnknownJob,
)
from distcron_app.explained_instants import explain_instant, read_when
from distcron_app.filters import (
    ActionForm,
    PauseForm,
    ReleaseForm,
    RunFilters,
    RunNowForm,
    ScheduleFilters,
)
from distcron_app.models import Run, RunOutput, Schedule
from distcron_app.timetable import zone
from distcron_app.wording import Mark

__all__ = [
    "CancelRun",
    "ExplainPage",
    "LocksPage",
    "NodesPage",
    "OverviewPage",
    "PauseSchedule",
    "ReleaseLock",
    "ResumeSchedule",
    "RunAgain",
    "RunNow",
    "RunOutputFile",
    "RunPage",
    "RunsPage",
    "SchedulePage",
    "SchedulesPage",
    "live",
    "ready",
    "strict_headers",
]

logger = logging.getLogger("distcron.views")

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_FAST_SECONDS, _USUAL_SECONDS, _SLOW_SECONDS = 2, 5, 15
_SCHEDULES_PER_PAGE = 100
_UPCOMING_COUNT = 10
_LOCKS_SHOWN = 300
_LONGEST_INSTANT = 40  # with microseconds and an offset

_ViewFunction = Callable[..., HttpResponseBase]


def strict_headers(view: _ViewFunction) -> _ViewFunction:
    """Add the headers that let a page load nothing but its own files, framed by nobody."""

    @functools.wraps(view)
    def wrapped(*args: Any, **kwargs: Any) -> HttpResponseBase:
        response = view(*args, **kwargs)
        response["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
        response["X-Content-Type-Options"] = "nosniff"
        response["X-Frame-Options"] = "DENY"
        response["Referrer-Policy"] = "same-origin"
        return response

    return wrapped


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What the user may do, for links and buttons; each page checks for itself."""

    view_dashboard: bool
    view_schedule: bool
    view_run: bool
    view_node: bool
    view_lock: bool
    view_output: bool
    run_schedule: bool
    pause_schedule: bool
    cancel_run: bool
    force_release_lock: bool

    @classmethod
    def of(cls, user: Any) -> Abilities:
        """Return the abilities of ``user``, by two queries at most."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: user.has_perm(f"distcron.{name}") for name in names})


@method_decorator(strict_headers, name="dispatch")
class Page(View):
    """A page for signed-in users with ``permission``; ``region`` is the part that changes."""

    permission: ClassVar[str]
    section: ClassVar[str] = ""
    template: ClassVar[str]
    region: ClassVar[str] = ""
    poll_seconds: float = _USUAL_SECONDS

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """Answer; say so where a permission, the row or the database is missing."""
        try:
            answer = self._answer(request, *args, **kwargs)
        except (OperationalError, InterfaceError):
            logger.warning("page_without_database path=%s", request.path, exc_info=True)
            # Without the request: even its user would be read from the database.
            answer = HttpResponse(render_to_string("distcron_app/unavailable.html"), status=503)
        patch_cache_control(answer, private=True, no_cache=True)
        return answer

    def get(self, request: HttpRequest, **kwargs: Any) -> HttpResponseBase:
        """Return the page, or its region alone for ``?fragment=live``."""
        context = self.frame() | self.facts(**kwargs)
        status = context.pop("status", 200)
        html = render_to_string(self.region, context, request)
        etag = f'"{hashlib.sha256(html.encode()).hexdigest()[:32]}"'
        if request.GET.get("fragment") == "live":
            return self._fragment(html, etag, status)
        context |= {"live": html, "etag": etag, "poll": self._poll_url(context)}
        context["poll_seconds"] = self.poll_seconds if status == 200 else 0
        return render(request, self.template, context, status=status)

    def facts(self, **kwargs: Any) -> dict[str, Any]:
        """Return what the templates show beside the frame."""
        raise NotImplementedError

    def frame(self) -> dict[str, Any]:
        """Return what every page shows: who is alive, the time, and where one may go."""
        return {
            "membership": self.membership,
            "now": self.membership.now,
            "section": self.section,
            "can": Abilities.of(self.request.user),
        }

    @functools.cached_property
    def membership(self) -> history.Membership:
        """Return who is alive, and the time by the database's clock."""
        return history.membership()

    def page(self, template: str, context: dict[str, Any], status: int = 200) -> HttpResponse:
        """Return a page without a region that changes."""
        return render(self.request, template, self.frame() | context, status=status)

    def refuse(self, permission: str) -> HttpResponse:
        """Return the page that names the missing permission."""
        return self.page("distcron_app/forbidden.html", {"permission": permission}, status=403)

    def _answer(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if not request.user.is_authenticated:
            return redirect_to_login(request.get_full_path())
        if not request.user.has_perm(f"distcron.{self.permission}"):
            return self.refuse(f"distcron.{self.permission}")
        try:
            return super().dispatch(request, *args, **kwargs)
        except Http404 as error:
            return self.page("distcron_app/missing.html", {"problem": str(error)}, status=404)

    def _poll_url(self, context: dict[str, Any]) -> str:
        query = self.request.GET.copy()
        query["fragment"] = "live"
        for name, value in context.get("hold", {}).items():
            query[name] = str(value)
        return f"{self.request.path}?{query.urlencode()}"

    def _fragment(self, html: str, etag: str, status: int) -> HttpResponseBase:
        region = HttpResponse(html, status=status)
        region["ETag"] = etag
        answer: HttpResponseBase | None = region
        if status == 200:
            answer = get_conditional_response(self.request, etag=etag, response=region)
        answer = answer or region
        answer["X-Distcron-Poll"] = str(self.poll_seconds)
        return answer


class OverviewPage(Page):
    """Is it alive, and is anything wrong now?"""

    permission = "view_dashboard"
    section = "overview"
    template = "distcron_app/overview.html"
    region = "distcron_app/_overview.html"

    def facts(self, **kwargs: Any) -> dict[str, Any]:
        return {"overview": history.overview(self.membership.now)}


class RunsPage(Page):
    """Find a run. New rows are announced; the rows on the page stay where they are."""

    permission = "view_run"
    section = "runs"
    template = "distcron_app/runs.html"
    region = "distcron_app/_runs.html"

    def facts(self, **kwargs: Any) -> dict[str, Any]:
        form = RunFilters(self.request.GET)
        if not form.is_valid():
            return {"form": form, "page": None, "status": 400}
        before, after, top = (form.cleaned_data[name] for name in ("before", "after", "top"))
        page = history.run_page(form.runs(), before=before, after=after, top=top)
        is_first = before is None and after is None
        if top is None and is_first:
            top = page.rows[0].pk if page.rows else 0
        return {
            "form": form,
            "page": page,
            "new_count": history.newer_than(form.runs(), top) if self._is_poll(top) else 0,
            "hold": {"top": top} if is_first else {},
            "query": self._filters_only(),
        }

    def _is_poll(self, top: int | None) -> bool:
        return top is not None and "top" in self.request.GET

    def _filters_only(self) -> str:
        query = self.request.GET.copy()
        for name in ("before", "after", "top", "fragment"):
            query.pop(name, None)
        return query.urlencode()


class RunPage(Page):
    """What happened to one run, in what order, and why."""

    permission = "view_run"
    section = "runs"
    template = "distcron_app/run.html"
    region = "distcron_app/_run.html"

    def facts(self, **kwargs: Any) -> dict[str, Any]:
        run, attempts, text = history.find_run(kwargs["run_id"])
        if run is None:
            raise _no_run(kwargs["run_id"])
        self.poll_seconds = _poll_seconds(run)
        return {
            "run": run,
            "attempts": attempts,
            "text": text,
            "explanation": explanations.explain(run, self.membership.now, attempts),
            "release": history.release_of(run, attempts),
            "chain_start": history.start_of(run),
            "children": history.children_of(run),
            "run_zone": _zone_name(run.schedule),
            "may_run_again": self._may_run_again(run),
        }

    def _may_run_again(self, run: Run) -> bool:
        if run.state not in Run.AGAIN_STATES or run.schedule is None:
            return False
        wanted = filter(None, (operations.RUN_SCHEDULE, operations.job_permission(run.job)))
        return all(self.request.user.has_perm(permission) for permission in wanted)


class SchedulesPage(Page):
    """What runs when, and what is late or cannot run."""

    permission = "view_schedule"
    section = "schedules"
    template = "distcron_app/schedules.html"
    region = "distcron_app/_schedules.html"
    poll_seconds = _SLOW_SECONDS

    def facts(self, **kwargs: Any) -> dict[str, Any]:
        form = ScheduleFilters(self.request.GET)
        if not form.is_valid():
            return {"form": form, "page": None, "status": 400}
        found = history.schedules_matching(
            text=form.cleaned_data["q"],
            state=form.cleaned_data["state"],
            now=self.membership.now,
        )
        page = Paginator(found, _SCHEDULES_PER_PAGE).get_page(form.cleaned_data["page"] or 1)
        runs = history.last_runs(page.object_list)
        return {
            "form": form,
            "page": page,
            "rows": [(each, each.in_words(), runs.get(each.pk)) for each in page.object_list],
            "query": urlencode({name: form.cleaned_data[name] for name in ("q", "state")}),
        }


class SchedulePage(Page):
    """One schedule: its rule in words, what comes, and everything that was decided."""

    permission = "view_schedule"
    section = "schedules"
    template = "distcron_app/schedule.html"
    region = "distcron_app/_schedule.html"

    def facts(self, **kwargs: Any) -> dict[str, Any]:
        schedule = _schedule_or_404(kwargs["schedule_id"])
        may_see_runs = self.request.user.has_perm("distcron.view_run")
        runs = (
            history.runs_matching(schedule_id=schedule.pk) if may_see_runs else Run.objects.none()
        )
        page = history.run_page(runs)
        chains = history.chains_of([schedule.pk])
        return {
            "schedule": schedule,
            "starts": chains.starts.get(schedule.pk, ()),
            "started_by": chains.started_by.get(schedule.pk, ()),
            "words": schedule.in_words(),
            "meanwhile": explanations.during_a_pause(schedule),
            "upcoming": _upcoming(schedule),
            "marks": _marks(schedule, self.membership.now, page.rows),
            "page": page,
            "held": self._held(schedule),
        }

    def _held(self, schedule: Schedule) -> holdings.Holdings | None:
        """Return what is known of its lock, None for a reader who may not see locks."""
        if not self.request.user.has_perm(operations.VIEW_LOCK):
            return None
        try:
            return holdings.lock_of(schedule, self.membership.now)
        except ConfigurationError:
            return None  # the locks page says what is wrong


class ExplainPage(Page):
    """Why a schedule ran or did not run at the instant ``?at=``; without it, only the form."""

    permission = "view_schedule"
    section = "schedules"
    template = "distcron_app/explain.html"

    def get(self, request: HttpRequest, **kwargs: Any) -> HttpResponse:
        schedule = _schedule_or_404(kwargs["schedule_id"])
        text = request.GET.get("at", "")[:_LONGEST_INSTANT]
        context: dict[str, Any] = {"schedule": schedule, "asked": text}
        status = 200
        try:
            if text:
                when = read_when(text)
                context["answer"] = explain_instant(schedule, when, now=self.membership.now)
        except ValueError as error:
            context["problem"], status = str(error), 400
        return self.page(self.template, context, status=status)


class NodesPage(Page):
    """Which nodes live, drain, lag, or are gone."""

    permission = "view_node"
    section = "nodes"
    template = "distcron_app/nodes.html"
    region = "distcron_app/_nodes.html"

    def facts(self, **kwargs: Any) -> dict[str, Any]:
        warning = explanations.zone_data_warning(self.membership.alive)
        return {"nodes": history.known_nodes(), "zone_data_warning": warning}


class LocksPage(Page):
    """Who holds which lock, for how long, and whether it is stuck."""

    permission = "view_lock"
    section = "locks"
    template = "distcron_app/locks.html"
    region = "distcron_app/_locks.html"
    poll_seconds = _FAST_SECONDS

    def facts(self, **kwargs: Any) -> dict[str, Any]:
        try:
            held = holdings.held_locks(self.membership.now)
        except ConfigurationError as error:
            return {"problem": str(error)}
        return {
            "held": held,
            "locks": held.locks[:_LOCKS_SHOWN],
            "hidden_count": max(0, len(held.locks) - _LOCKS_SHOWN),
        }


class ReleaseLock(Page):
    """End a lock whoever holds it: GET says what will follow, POST does it."""

    permission = "force_release_lock"
    section = "locks"
    template = "distcron_app/release_lock.html"

    def get(self, request: HttpRequest, **kwargs: Any) -> HttpResponse:
        lock = self._lock()
        initial = {"idempotency_key": uuid.uuid4().hex}
        return self.confirm(lock, ReleaseForm(initial=initial, names=lock.names))

    def post(self, request: HttpRequest, **kwargs: Any) -> HttpResponse:
        """Release it, or show what is wrong beside what was typed."""
        key = request.POST.get("idempotency_key", "")
        if earlier := operations.earlier_release(self._name(), key):
            return self._done(earlier)
        lock = self._lock()
        form = ReleaseForm(request.POST, names=lock.names)
        user: Any = request.user
        if not form.is_valid():
            return self.confirm(lock, form, status=400)
        try:
            done = operations.release_lock(
                lock.name,
                level=lock.level,
                reason=form.cleaned_data["reason"],
                actor=user.get_username(),
                user=user,
                via="dashboard",
                idempotency_key=form.cleaned_data["idempotency_key"],
            )
        except ConfigurationError as error:
            return self.confirm(lock, form, status=409, problem=str(error))
        return self._done(done)

    def confirm(
        self, lock: holdings.HeldLock, form: ReleaseForm, *, status: int = 200, problem: str = ""
    ) -> HttpResponse:
        """Return the page that says what will happen."""
        context = {
            "lock": lock,
            "follows": list(holdings.follows(lock)),
            "form": form,
            "problem": problem,
        }
        return self.page(self.template, context, status=status)

    def _name(self) -> str:
        return self.request.GET.get("name", "")

    def _lock(self) -> holdings.HeldLock:
        name, level = self._name(), self.request.GET.get("level", "")
        # No database takes a text with that character, and so no lock of ours has it.
        if name and "\x00" not in name:
            held = holdings.lock_named(name, self.membership.now)
            for lock in holdings.matching(held, name, level):
                return lock
            if held.unknown:
                message = _("Lock “%(name)s” is unknown, its backend does not answer: %(cause)s.")
                facts = {"name": explanations.inert(name), "cause": held.unknown[0].problem}
                raise Http404(message % facts)
        raise Http404(_("Lock “%s” is not held, or not any more.") % explanations.inert(name))

    def _done(self, done: operations.LockRelease) -> HttpResponse:
        text = f"“{explanations.inert(done.name)}”: {done.in_words()}"
        _say(self.request, text, level=messages.WARNING if done.problem else messages.SUCCESS)
        return redirect("distcron:locks")


class Action(Page):
    """The confirmation of one verb on a row: GET explains it, POST does it."""

    verb: ClassVar[str]
    heading: ClassVar[Any]
    form_class: ClassVar[type[ActionForm]] = ActionForm
    needs_reason: ClassVar[bool] = False

    def get(self, request: HttpRequest, **kwargs: Any) -> HttpResponse:
        target = self.target(**kwargs)
        if missing := self.missing_permission(target):
            return self.refuse(missing)
        form = self.form(target, initial={"idempotency_key": uuid.uuid4().hex})
        return self.confirm(target, form)

    def post(self, request: HttpRequest, **kwargs: Any) -> HttpResponse:
        """Do it, or show what is wrong beside what was typed."""
        target = self.target(**kwargs)
        if missing := self.missing_permission(target):
            return self.refuse(missing)
        form = self.form(target, request.POST)
        if not form.is_valid():
            return self.confirm(target, form, status=400)
        user = request.user
        author = {"actor": user.get_username(), "user": user, "via": "dashboard"}
        try:
            return self.act(target, **author, **form.cleaned_data)
        except ScheduleBusy as error:
            return self.confirm(target, form, status=409, blocked_by=error.blocked_by)
        except (UnknownJob, InvalidArguments, RunMovedOn, StaleVersion) as error:
            return self.confirm(target, form, status=409, problem=str(error))

    def target(self, **kwargs: Any) -> Any:
        """Return the row that the address names. Raise Http404 for none."""
        raise NotImplementedError

    def form(self, target: Any, *data: Any, **options: Any) -> ActionForm:
        """Return the form that asks, with what was typed."""
        return self.form_class(*data, needs_reason=self.needs_reason, **options)

    def act(self, target: Any, **given: Any) -> HttpResponse:
        """Carry the verb out and return where to go; ``given`` holds the form's fields."""
        raise NotImplementedError

    def missing_permission(self, target: Any) -> str | None:
        """Return a permission that this row asks for beyond the page's, or None."""
        return None

    def missing_for_job(self, job: str) -> str | None:
        """Return the permission that the job asks for where the user lacks it, or None."""
        wanted = operations.job_permission(job)
        return wanted if wanted and not self.request.user.has_perm(wanted) else None

    def about(self, target: Any) -> dict[str, Any]:
        """Return what the template shows of the row."""
        raise NotImplementedError

    def confirm(
        self, target: Any, form: ActionForm, *, status: int = 200, **problem: Any
    ) -> HttpResponse:
        """Return the page that says what will happen."""
        context = {"form": form, "verb": self.verb, "heading": self.heading} | self.about(target)
        return self.page(self.template, context | problem, status=status)


class ScheduleAction(Action):
    """The confirmation of one verb on a schedule."""

    section = "schedules"
    template = "distcron_app/confirm.html"

    def target(self, **kwargs: Any) -> Schedule:
        return _schedule_or_404(kwargs["schedule_id"])

    def about(self, target: Schedule) -> dict[str, Any]:
        return {"schedule": target, "meanwhile": explanations.during_a_pause(target)}


class RunNow(ScheduleAction):
    """Queue one run outside the timetable."""

    permission = "run_schedule"
    verb = "run"
    heading = gettext_lazy("Run now")
    form_class = RunNowForm

    def act(self, target: Schedule, **given: Any) -> HttpResponse:
        run = operations.run_now(target, **given)
        _say(self.request, _("Run %s is queued.") % run.pk)
        may_see = self.request.user.has_perm("distcron.view_run")
        return redirect(run if may_see else target)

    def missing_permission(self, target: Schedule) -> str | None:
        return self.missing_for_job(target.job)


class PauseSchedule(ScheduleAction):
    """Stop the timetable until somebody resumes it, or until a time."""

    permission = "pause_schedule"
    verb = "pause"
    heading = gettext_lazy("Pause")

    def form(self, target: Schedule, *data: Any, **options: Any) -> ActionForm:
        return PauseForm(*data, place=_place(target), **options)

    def act(self, target: Schedule, **given: Any) -> HttpResponse:
        changed = operations.pause([target], **given).changed
        text = _("“%s” is paused.") if changed else _("“%s” was paused already.")
        _say(self.request, text % target)
        return redirect(target)


class ResumeSchedule(ScheduleAction):
    """Let the timetable go on."""

    permission = "pause_schedule"
    verb = "resume"
    heading = gettext_lazy("Resume")

    def act(self, target: Schedule, **given: Any) -> HttpResponse:
        changed = operations.resume([target], **given).changed
        text = _("“%s” goes on from now.") if changed else _("“%s” was not paused.")
        _say(self.request, text % target)
        return redirect(target)


class RunAction(Action):
    """The confirmation of one verb on a run."""

    section = "runs"
    template = "distcron_app/confirm_run.html"
    # A run in another state has nothing to confirm.
    states: ClassVar[tuple[str, ...]]

    def target(self, **kwargs: Any) -> Run:
        return _run_or_404(kwargs["run_id"])

    def about(self, target: Run) -> dict[str, Any]:
        return {
            "run": target,
            "stop_asked": explanations.stop_asked(target),
            "is_possible": target.state in self.states,
        }


class CancelRun(RunAction):
    """End a run by request: at once where it has not started, else as its job decides."""

    permission = "cancel_run"
    verb = "cancel"
    heading = gettext_lazy("Cancel the run")
    needs_reason = True
    states = Run.OPEN_STATES

    def act(self, target: Run, **given: Any) -> HttpResponse:
        done = operations.cancel_run(target, **given)
        _say(self.request, done.in_words())
        return redirect(target)


class RunAgain(RunAction):
    """Queue a run again that did not end well."""

    permission = "run_schedule"
    verb = "again"
    heading = gettext_lazy("Run again")
    states = Run.AGAIN_STATES

    def act(self, target: Run, **given: Any) -> HttpResponse:
        run = operations.run_again(target, **given)
        _say(self.request, _("Run %s is queued again.") % run.pk)
        return redirect(run)

    def missing_permission(self, target: Run) -> str | None:
        return self.missing_for_job(target.job)


class RunOutputFile(Page):
    """The captured output of a run as a text file."""

    permission = "view_output"

    def get(self, request: HttpRequest, **kwargs: Any) -> HttpResponse:
        if not request.user.has_perm("distcron.view_run"):
            return self.refuse("distcron.view_run")
        output = RunOutput.objects.filter(pk=kwargs["run_id"]).first()
        if output is None or not output.output:
            raise Http404(_("Run %s has no output.") % kwargs["run_id"])
        return HttpResponse(
            output.output,
            content_type="text/plain; charset=utf-8",
            headers={"Content-Disposition": f'attachment; filename="run-{output.pk}.txt"'},
        )


@require_safe
def live(request: HttpRequest) -> JsonResponse:
    """Say that this process answers; touches neither database nor Redis."""
    return JsonResponse({"status": "live"})


@require_safe
def ready(request: HttpRequest) -> JsonResponse:
    """Say whether requests can be served: the database answers and is migrated. 503 if not."""
    try:
        executor = MigrationExecutor(connection)
        pending = executor.migration_plan(executor.loader.graph.leaf_nodes("distcron"))
    except Error:
        return JsonResponse({"status": "unavailable", "database": "no answer"}, status=503)
    if pending:
        return JsonResponse({"status": "unavailable", "migrations": "pending"}, status=503)
    return JsonResponse({"status": "ready"})


def _schedule_or_404(schedule_id: int) -> Schedule:
    schedule = Schedule.objects.select_related("calendar").filter(pk=schedule_id).first()
    if schedule is None:
        raise Http404(_("Schedule %s does not exist, or it was deleted.") % schedule_id)
    return schedule


def _run_or_404(run_id: int) -> Run:
    run = Run.objects.select_related("schedule").filter(pk=run_id).first()
    if run is None:
        raise _no_run(run_id)
    return run


def _no_run(run_id: int) -> Http404:
    return Http404(_("Run %s does not exist, or its history was pruned.") % run_id)


def _place(schedule: Schedule) -> tzinfo:
    try:
        return zone(schedule.timezone)
    except TimetableError:
        return timezone.get_default_timezone()


def _poll_seconds(run: Run) -> float:
    if run.state == Run.State.LOST:
        # Its owner may still be alive and report late.
        return _SLOW_SECONDS
    return 0 if run.is_final else _FAST_SECONDS


def _zone_name(schedule: Schedule | None) -> str:
    return schedule.timezone if schedule else ""


def _upcoming(schedule: Schedule) -> list[explanations.Occurrence]:
    try:
        instants = schedule.upcoming(_UPCOMING_COUNT)
        found = explanations.occurrences(schedule, instants, runs_left=_runs_left(schedule))
        return list(found)
    except TimetableError:
        return []


def _runs_left(schedule: Schedule) -> int | None:
    return None if schedule.max_runs is None else schedule.max_runs - schedule.runs_planned


def _marks(schedule: Schedule, now: datetime, runs: Sequence[Run]) -> list[Mark]:
    try:
        return history.schedule_marks(schedule, now, runs) if schedule.next_run_at else []
    except TimetableError:
        return []


def _say(request: HttpRequest, text: str, *, level: int = messages.SUCCESS) -> None:
    # A project may do without the messages framework.
    messages.add_message(request, level, text, fail_silently=True)
