"""``schedulerctl run``: queue one run, and on request wait for its end."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _

from distcron_app import operations, registry
from distcron_app.arguments import Parameter, masked_arguments
from distcron_app.cli import states, times
from distcron_app.cli.console import Console
from distcron_app.cli.exits import FAILED, REFUSED, TIMED_OUT, USAGE, Exit, busy_text
from distcron_app.cli.lookup import actor_name, find_schedule, permitted_user
from distcron_app.clock import Clock
from distcron_app.errors import ScheduleBusy
from distcron_app.models import Node, Run, Schedule
from distcron_app.timetable import zone
from distcron_app.walltime import read_instant

__all__ = ["run_facts", "run_schedule", "show_run"]

_POLL_SECONDS = 0.25
_NEWS_SECONDS = 10.0  # between two lines about one run where no line can be overwritten
_BAR_CELLS = 10
_CLEAR_LINE = "\r\x1b[K"


def run_schedule(console: Console, options: dict[str, Any]) -> None:
    """Queue a run; with ``--wait`` end with its outcome: 0, 1, or 7 for the time limit."""
    schedule = find_schedule(options["key"])
    permission = operations.job_permission(schedule.job)
    user = permitted_user(options["user"], operations.RUN_SCHEDULE, permission)
    try:
        run = operations.run_now(
            schedule,
            actor=user.get_username() if user else actor_name(),
            user=user,
            via="cli",
            reason=options["reason"],
            arguments=_arguments(schedule, options["arguments"], dict(options["arg"])),
            nominal_at=_nominal_at(schedule, options["at"]),
            behind=options["behind"],
        )
    except ScheduleBusy as error:
        hint = _("To queue it behind that run: --behind")
        raise Exit(REFUSED, busy_text(error), hint=hint) from error
    console.say(_("run %(run)d of %(key)s queued.") % {"run": run.pk, "key": schedule.key})
    if not Node.objects.alive().exists():
        console.say(
            _("No node is alive: the run waits for one. Start: manage.py runscheduler"), "yellow"
        )
    has_ended = not options["wait"] or _Wait(console, run, options["timeout"]).until_final()
    run.refresh_from_db()
    show_run(console, "run", run)
    if not has_ended:
        message = _("run %(run)d: still %(state)s after %(seconds)g s. It goes on.")
        facts = {"run": run.pk, "state": states.run_label(run.state)}
        raise Exit(TIMED_OUT, message % (facts | {"seconds": options["timeout"]}))
    if options["wait"] and run.state != Run.State.SUCCEEDED:
        raise Exit(FAILED, _outcome_text(run))


def _nominal_at(schedule: Schedule, text: str | None) -> datetime | None:
    """Return the instant of ``--at``. Raise Exit for what is none."""
    if text is None:
        return None
    try:
        return read_instant(text, zone(schedule.timezone))
    except (ValueError, OverflowError) as error:
        raise Exit(USAGE, f"--at: {error}") from None


def _arguments(
    schedule: Schedule, text: str | None, named: Mapping[str, str]
) -> dict[str, Any] | None:
    """Return the arguments of this run, or None for the schedule's own."""
    if text is None and not named:
        return None
    job = registry.get(schedule.job)
    if text is not None and not named:
        return job.parse(text)
    known = {parameter.name: parameter for parameter in job.parameters}
    typed = {name: _typed(known.get(name), value) for name, value in named.items()}
    base = dict(schedule.arguments) if text is None else _json_object(job, text)
    return job.dump(base | typed)


def _json_object(job: registry.Job, text: str) -> dict[str, Any]:
    """Return the object, unchecked: what is missing in it may be given by ``--arg``."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return job.parse(text)  # refuses it, with the place
    return arguments if isinstance(arguments, dict) else job.dump(arguments)


def _typed(parameter: Parameter | None, text: str) -> Any:
    """Return ``text`` as the JSON value that the parameter's type takes.

    What does not fit stays text, so that the job's own check says what is allowed.
    """
    kind = parameter.type.kind if parameter else "json"
    if parameter and parameter.type.is_nullable and text == "null":
        return None
    if kind in ("str", "date", "datetime", "Decimal"):
        return text
    if parameter and kind == "choice":
        forms = (form for form, _member in parameter.type.choices)
        return next((form for form in forms if str(form) == text), text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class _Wait:
    """Follows one run, on a terminal in one line that is overwritten."""

    def __init__(self, console: Console, run: Run, timeout: float | None) -> None:
        self._console = console
        self._run = run
        self._clock = Clock()
        self._started = self._clock.monotonic()
        self._timeout = timeout
        self._told = ""
        self._told_at = self._started

    def until_final(self) -> bool:
        """Block until the run is final; False when the time limit came first."""
        never = threading.Event()
        try:
            while True:
                self._run = Run.objects.select_related("node").get(pk=self._run.pk)
                if self._run.is_final:
                    return True
                elapsed = self._clock.monotonic() - self._started
                if self._timeout is not None and elapsed >= self._timeout:
                    return False
                self._tell()
                self._clock.wait(never, self._pause(elapsed))
        except KeyboardInterrupt:
            self._clear()
            goes_on = _("run %d goes on without this command. See: schedulerctl list")
            self._console.say(goes_on % self._run.pk)
            raise
        finally:
            self._clear()

    def _pause(self, elapsed: float) -> float:
        if self._timeout is None:
            return _POLL_SECONDS
        return min(_POLL_SECONDS, self._timeout - elapsed)

    def _tell(self) -> None:
        err = self._console.err
        if self._console.view.is_quiet:
            return
        if err.is_tty:
            err.write(f"{_CLEAR_LINE}{err.shown(self._progress())}", end="")
            err.flush()
            self._told = "overwritten"
            return
        now = self._clock.monotonic()
        if self._run.state != self._told or now - self._told_at >= _NEWS_SECONDS:
            self._told, self._told_at = self._run.state, now
            self._console.say(self._progress())

    def _progress(self) -> str:
        run = self._run
        parts = [_("run %d") % run.pk, states.run_label(run.state)]
        if run.node is not None:
            parts.append(run.node.name)
        if run.progress_percent is not None:
            parts.append(f"{_bar(run.progress_percent)} {run.progress_percent:.0f} %")
        if run.progress_message:
            parts.append(run.progress_message)
        elapsed = self._clock.monotonic() - self._started
        return " · ".join((*parts, times.span_text(elapsed)))

    def _clear(self) -> None:
        if self._told == "overwritten":
            self._console.err.write(_CLEAR_LINE, end="")
            self._told = ""


def _bar(percent: float) -> str:
    full = round(max(0.0, min(percent, 100.0)) / 100 * _BAR_CELLS)
    return "▓" * full + "░" * (_BAR_CELLS - full)


def show_run(console: Console, verb: str, run: Run, **facts: Any) -> None:
    """Print the run in one line, or as JSON with ``facts`` beside it."""
    if console.view.as_json:
        console.json(verb, run=run_facts(run), **facts)
        return
    shown = states.cell(run.state, states.run_label(run.state))
    parts = [_("run %d") % run.pk, shown.text]
    if run.duration_seconds is not None:
        parts.append(times.duration_text(run.duration_seconds))
    console.line(" · ".join(parts), shown.colour)


def _outcome_text(run: Run) -> str:
    facts = {"run": run.pk, "state": states.run_label(run.state)}
    cause = run.error or (str(run.get_reason_display()) if run.reason else "")
    if not cause:
        return _("run %(run)d: %(state)s.") % facts
    return _("run %(run)d: %(state)s, %(cause)s") % (facts | {"cause": cause})


def run_facts(run: Run) -> dict[str, Any]:
    """Return what ``--json`` says of a run; ``schedule`` is null where it was deleted."""
    node = Node.objects.filter(runs=run.pk).first()
    return {
        "id": run.pk,
        "schedule": run.schedule and run.schedule.key,
        "job": run.job,
        "arguments": masked_arguments(run.arguments),
        "state": run.state,
        "reason": run.reason,
        "error": run.error,
        "cancel_requested_at": times.iso(run.cancel_requested_at),
        "cancel_cause": run.cancel_cause,
        "attempt": run.attempt,
        "node": node and node.name,
        "trigger": run.trigger,
        "scheduled_at": times.iso(run.instant),
        "backfill": run.backfill_id,
        "due_at": times.iso(run.due_at),
        "started_at": times.iso(run.started_at),
        "finished_at": times.iso(run.finished_at),
        "duration_seconds": run.duration_seconds,
        "result": run.result,
    }
