"""Why a run is in its state, in sentences, and what a person can do about it.

Pure: rows in, lazy text out. The pages and the command line print the same words.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from distcron_app.models import Attempt, ChainStart, Node, Run, Schedule
from distcron_app.wording import Mark, marks

__all__ = [
    "Explanation",
    "Occurrence",
    "Stretch",
    "app_frames",
    "chain_words",
    "during_a_pause",
    "explain",
    "inert",
    "node_label",
    "occurrences",
    "stop_asked",
    "zone_data_warning",
]

# As operations.cancel_run and lifecycle.REPLACE_CAUSE store it, in one language for all readers.
_ASKED_BY = re.compile(r"by (?P<who>.+?): (?P<why>.*)", re.DOTALL)
_REPLACED = "a newer occurrence replaces it"
_FRAME = re.compile(r'^  File "(?P<path>[^"]*)", line ')
_LIBRARY = re.compile(r"(site-packages|dist-packages|[/\\]lib[/\\]python3|^<frozen )")
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
# Control characters, and those that turn the direction of the text around them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Several occurrences that one row stands for."""

    first: datetime
    last: datetime
    count: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """``why`` the run is as it is; ``advice`` is for a person, "" when nothing is to do.

    ``warning`` says what went wrong beside it and did not decide its state.
    """

    why: str
    advice: str = ""
    warning: str = ""
    blocked_by: int | None = None
    stretch: Stretch | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """A coming instant, when it is due, and what is to know about it.

    ``excluded`` says why it will be skipped, "" if it will not.
    """

    scheduled_at: datetime
    due_at: datetime
    marks: tuple[Mark, ...] = ()
    excluded: str = ""


def occurrences(
    schedule: Schedule, instants: Iterable[datetime], *, runs_left: int | None = None
) -> Iterator[Occurrence]:
    """Yield what becomes of each coming instant of the schedule, up to its last run."""
    timetable = schedule.timetable()
    for at in instants:
        if runs_left is not None and runs_left <= 0:
            return
        why = schedule.excluded(at)
        if why:
            yield Occurrence(scheduled_at=at, due_at=at, excluded=why)
            continue
        found = tuple(marks(timetable, at))
        yield Occurrence(scheduled_at=at, due_at=schedule.spread(at), marks=found)
        runs_left = None if runs_left is None else runs_left - 1


def zone_data_warning(alive: Iterable[Node]) -> str:
    """Return a sentence where the alive nodes differ in their zone data, else ""."""
    versions = sorted({node.zone_data for node in alive if node.zone_data}, reverse=True)
    if len(versions) < 2:
        return ""
    message = _("nodes use different time zone data: %s; update the tzdata package")
    return message % ", ".join(versions)


def during_a_pause(schedule: Schedule) -> str:
    """Return what becomes of the instants that pass while the schedule is paused."""
    if schedule.on_resume == Schedule.OnResume.MISFIRE:
        message = _("Instants that pass meanwhile are decided on resume as after an outage: %s.")
        return message % schedule.get_misfire_display()
    return _("Instants that pass meanwhile are never run.")


def explain(run: Run, now: datetime, attempts: Sequence[Attempt] = ()) -> Explanation:
    """Return the sentences for ``run``, whose node and schedule should be joined.

    ``attempts`` are those that ended before, the newest last.
    """
    return dataclasses.replace(_explained(run, now, attempts), warning=_lock_warning(run))


def _explained(run: Run, now: datetime, attempts: Sequence[Attempt]) -> Explanation:
    if run.state == Run.State.SKIPPED:
        return _skipped(run)
    if run.state == Run.State.LOST:
        return _lost(run)
    if run.state in Run.ACTIVE_STATES:
        return _active(run, now)
    if run.state == Run.State.QUEUED:
        return _queued(run, attempts)
    return _ended(run)


def _lock_warning(run: Run) -> str:
    details = run.details if isinstance(run.details, dict) else {}
    cause = details.get("lease_lost")
    if not isinstance(cause, str) or not cause:
        return ""
    facts = {"cause": inert(cause)}
    if run.state in Run.ACTIVE_STATES:
        return _("Its lock was lost: %(cause)s. The job is told to stop where it asks.") % facts
    return _("Its lock was lost while it ran: %(cause)s. The outcome is what it reported.") % facts


def chain_words(start: ChainStart) -> str:
    """Return the sentence that says which run started this one, and how that one ended."""
    facts = {"run": start.parent_id, "key": start.parent_key}
    if start.state == Run.State.SUCCEEDED:
        return _("It was started by run %(run)d of “%(key)s”, which succeeded.") % facts
    if start.state == Run.State.LOST:
        return _("It was started by run %(run)d of “%(key)s”, which was lost.") % facts
    if start.state == Run.State.SKIPPED:
        return _("It was started by run %(run)d of “%(key)s”, which was skipped.") % facts
    return _("It was started by run %(run)d of “%(key)s”, which failed.") % facts


def node_label(run: Any) -> str:
    """Return the name of the node of a run or an attempt, for one that is forgotten its id."""
    if run.node is not None:
        return str(run.node.name)
    return str(run.node_id)[:8] if run.node_id else ""


def stop_asked(run: Run) -> str:
    """Return the sentence that says by whom and why a run was asked to stop, else ""."""
    if run.cancel_requested_at is None:
        return ""
    if asked := _ASKED_BY.fullmatch(run.cancel_cause):
        return _("It was asked to stop by %(who)s: “%(why)s”.") % _inert_parts(asked)
    return _("It was asked to stop: %s.") % _in_words(run.cancel_cause)


def app_frames(text: str) -> str:
    """Return a traceback without the frames of libraries; all of it where only they are left."""
    kept: list[str] = []
    is_library, found_own = False, False
    for line in text.splitlines():
        if frame := _FRAME.match(line):
            is_library = bool(_LIBRARY.search(frame["path"]))
            found_own = found_own or not is_library
        elif not line.startswith("    "):
            is_library = False
        if not is_library:
            kept.append(line)
    return "\n".join(kept) if found_own else text


def inert(text: str) -> str:
    """Return text of a job for display: colours removed, control characters made visible."""
    plain = _ANSI.sub("", text).replace("\r\n", "\n")
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", plain)


def _skipped(run: Run) -> Explanation:
    details = run.details if isinstance(run.details, dict) else {}
    if run.reason == Run.Reason.OVERLAP:
        return _overlapped(details)
    stretch = _stretch(details)
    if run.reason == Run.Reason.COALESCED:
        return Explanation(
            why=_("It did not run: a later occurrence that was due as well ran in its place."),
            stretch=stretch,
        )
    if run.reason == Run.Reason.MISFIRE:
        return Explanation(
            why=_("It did not run: when a node looked, it was too late to start."),
            advice=_("Usually no scheduler was running at that time. The nodes page shows them."),
            stretch=stretch,
        )
    if run.reason == Run.Reason.EXPIRED:
        return Explanation(
            why=_("It did not run: it could not start within the time its schedule allows."),
            advice=_("All slots were taken, or an earlier run took too long."),
        )
    if run.reason == Run.Reason.CALENDAR:
        return _excluded(details, stretch)
    if run.reason == Run.Reason.INVALID:
        return Explanation(
            why=_("It did not run: its schedule is invalid."),
            advice=_("Edit the schedule and save it. It goes on from then."),
        )
    if run.reason == Run.Reason.CHAIN_DEPTH:
        return Explanation(
            why=_("It did not run: too many schedules had started each other before it."),
            advice=_("Their links form a circle, or a very long chain. Remove one of them."),
        )
    if run.reason == Run.Reason.PAUSED:
        return Explanation(
            why=_("It did not run: when it was due, its schedule was paused."),
            advice=_(
                "Run the schedule now if the work is still wanted. The schedule itself says what "
                "becomes of the instants of a pause."
            ),
            stretch=stretch,
        )
    return Explanation(why=_("It did not run: %s.") % run.get_reason_display(), stretch=stretch)


def _overlapped(details: dict[str, Any]) -> Explanation:
    advice = _("If this repeats, the job takes longer than its timetable allows.")
    blocked_by = _whole(details.get("blocked_by"))
    waiting = _whole(details.get("waiting"))
    if details.get("replaced"):
        why = _("It did not run: while it waited, a newer occurrence took its place.")
    elif waiting:
        why = ngettext(
            "It did not run: the previous run was still active, and %d run waited already.",
            "It did not run: the previous run was still active, and %d runs waited already.",
            waiting,
        ) % (waiting)
    else:
        why = _("It did not run: the previous run was still active.")
    return Explanation(why=why, advice=advice, blocked_by=blocked_by)


def _excluded(details: dict[str, Any], stretch: Stretch | None) -> Explanation:
    advice = _("The calendar of the schedule keeps it clear of such days.")
    reason = details.get("why")
    if not isinstance(reason, str) or not reason:
        return Explanation(
            why=_("It did not run: a calendar excludes the day."), advice=advice, stretch=stretch
        )
    return Explanation(why=_("It did not run: %s.") % inert(reason), advice=advice, stretch=stretch)


def _lost(run: Run) -> Explanation:
    facts = {"node": node_label(run) or _("unknown")}
    if run.reason == Run.Reason.RELEASED:
        why = _("A person released its lock while the job was running on node %(node)s.") % facts
    elif run.reason == Run.Reason.SHUTDOWN:
        why = _("Node %(node)s was stopped while the job was running.") % facts
    elif run.reason == Run.Reason.WORKER_DIED:
        why = _("The worker process on node %(node)s ended while the job was running.") % facts
    else:
        why = _("Node %(node)s stopped reporting while the job was running.") % facts
    why += " " + _("The job had started, so nobody knows whether its work was done.")
    if asked := stop_asked(run):
        why += f" {asked} " + _("So no node starts it again.")
    elif run.delivery == Schedule.Delivery.AT_LEAST_ONCE:
        why += " " + _("It had been run again after a crash already, so it was not started again.")
    else:
        why += " " + _("Its delivery is “at most once”, so no node starts it again.")
    advice = _(
        "Check in the job's own records whether the work was done. If it was not, "
        "run the schedule now."
    )
    late = (
        _("What its node reports late is refused, and shown with the attempt.")
        if run.reason == Run.Reason.RELEASED
        else _("If the node is still alive, its late report settles this run.")
    )
    return Explanation(why=why, advice=f"{advice} {late}")


def _active(run: Run, now: datetime) -> Explanation:
    facts = {"node": node_label(run) or _("unknown")}
    if run.node is None or run.node.state not in Node.MEMBER_STATES or run.node.expires_at <= now:
        return Explanation(
            why=_("Node %(node)s is silent. Another node settles this run in a moment.") % facts,
            advice=_("If this stays, no scheduler is running."),
        )
    if run.state == Run.State.CLAIMED:
        return Explanation(why=_("Node %(node)s owns it and is about to start it.") % facts)
    why = _("The job is running on node %(node)s.") % facts
    if run.cancel_requested_at is None:
        return Explanation(why=why)
    return Explanation(
        why=f"{why} {stop_asked(run)}",
        advice=_("It ends where its job looks for that. A job that never looks runs to its end."),
    )


def _queued(run: Run, attempts: Sequence[Attempt]) -> Explanation:
    if run.reason == Run.Reason.RECOVERY and _was_released(attempts):
        return Explanation(
            why=_(
                "A person released its lock in the middle. Its delivery is “at least once”, so "
                "it waits to run again."
            )
        )
    if run.reason == Run.Reason.RECOVERY:
        return Explanation(
            why=_(
                "Its node died in the middle. Its delivery is “at least once”, so it waits to "
                "run again."
            )
        )
    if run.reason == Run.Reason.AGAIN:
        return Explanation(why=_("A person started it again. It waits for a node with a slot."))
    if run.reason == Run.Reason.RETRY:
        return Explanation(
            why=_("Attempt %(number)d failed: %(error)s It waits for its next attempt.")
            % {"number": run.attempt, "error": inert(run.error)}
        )
    if run.reason == Run.Reason.CATCH_UP:
        return Explanation(why=_("It is late, and waits for its turn among those that are."))
    if run.reason == Run.Reason.OVERLAP:
        details = run.details if isinstance(run.details, dict) else {}
        return Explanation(
            why=_("It waits until an earlier run of its schedule has ended."),
            blocked_by=_whole(details.get("blocked_by")),
        )
    return Explanation(why=_("It waits for a node with a free slot."))


def _was_released(attempts: Sequence[Attempt]) -> bool:
    return bool(attempts) and attempts[-1].reason == Run.Reason.RELEASED


def _ended(run: Run) -> Explanation:
    if run.state == Run.State.SUCCEEDED:
        return Explanation(why=_("The job ended without an error."))
    if run.state == Run.State.CANCELLED:
        return _cancelled(run)
    advices = {
        Run.Reason.JOB_NOT_FOUND: _("Deploy the code that registers the job on every node."),
        Run.Reason.INVALID_ARGUMENTS: _("Edit the arguments of the schedule."),
        Run.Reason.WORKER_DIED: _("Often the memory ran out. Look into the log of the host."),
    }
    return Explanation(
        why=_("It failed: %s.") % run.get_reason_display(),
        advice=advices.get(Run.Reason(run.reason), "") if run.reason in Run.Reason.values else "",
    )


def _cancelled(run: Run) -> Explanation:
    if run.reason != Run.Reason.CANCELLED:
        advice = ""
        if run.reason == Run.Reason.LEASE_LOST:
            advice = _("Run the schedule now if the work is still wanted.")
        return Explanation(why=_("It was cancelled: %s.") % run.get_reason_display(), advice=advice)
    # Its error has the cause where it had not started, else how its job stopped.
    asked = _ASKED_BY.fullmatch(run.error) or _ASKED_BY.fullmatch(run.cancel_cause)
    if asked:
        why = _("It was cancelled by %(who)s: “%(why)s”.") % _inert_parts(asked)
    else:
        cause = _in_words(run.cancel_cause or run.error)
        why = _("It was cancelled: %s.") % (cause or run.get_reason_display())
    started = _("Its job had started.") if run.started_at else _("Its job had not started.")
    return Explanation(why=f"{why} {started}")


def _inert_parts(found: re.Match[str]) -> dict[str, str]:
    return {name: inert(text) for name, text in found.groupdict().items()}


def _in_words(cause: str) -> str:
    return _("a newer occurrence replaces it") if cause == _REPLACED else inert(cause)


def _stretch(details: dict[str, Any]) -> Stretch | None:
    first, last = (_instant(details.get(name)) for name in ("first_at", "last_at"))
    count = _whole(details.get("count"))
    if first is None or last is None or count is None or count < 2:
        return None
    return Stretch(first=first, last=last, count=count)


def _instant(value: Any) -> datetime | None:
    try:
        parsed = parse_datetime(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return parsed if parsed is not None and parsed.tzinfo is not None else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
