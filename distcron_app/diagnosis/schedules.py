"""Schedules that do not run, or not as they say."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from django.utils.translation import gettext as _

from distcron_app.conf import Config
from distcron_app.diagnosis.finding import OK, PROBLEM, WARNING, Finding
from distcron_app.errors import LockUnavailable
from distcron_app.explanations import unserved_queue
from distcron_app.history import unserved_queues
from distcron_app.instants import DatabaseNow
from distcron_app.locks import level_problem, pooling_problem
from distcron_app.models import Node, Run, Schedule, served_queues

__all__ = [
    "judge_invalid",
    "judge_levels",
    "judge_lost",
    "judge_overdue",
    "judge_queues",
    "look_at_schedules",
]

_SHOWN = 5  # findings of one kind; the last one counts the rest
_RECENT = timedelta(hours=24)
# Not looked at: what is more than this many rows ago, to bound the cost of the count.
_RECENT_RUNS = 500_000


def look_at_schedules(config: Config) -> list[Finding]:
    """Judge the stored schedules, and the runs of the last 24 hours."""
    by_level = dict[str, list[str]]()
    live = Schedule.objects.exclude(state=Schedule.State.EXHAUSTED).order_by("key")
    for key, level in live.values_list("key", "lock_level"):
        by_level.setdefault(level, []).append(key)
    invalid = live.filter(state=Schedule.State.INVALID).values_list("key", "state_reason")
    overdue = Schedule.objects.overdue(config.misfire_grace_seconds).values_list("key", flat=True)
    problems = {
        level: level_problem(level, config) or _session_problem(level, config) for level in by_level
    }
    found = [
        *judge_invalid(list(invalid)),
        *judge_overdue(list(overdue), config.misfire_grace_seconds),
        *judge_queues(_unserved_queues()),
        *judge_levels([(by_level[level], text) for level, text in problems.items() if text]),
        *judge_lost(_lost_names()),
    ]
    return found or [_all_well(sum(map(len, by_level.values())))]


def _session_problem(level: str, config: Config) -> str:
    """Return why the database cannot hold the locks of ``level``, by asking it; else nothing."""
    if "database" not in config.levels[level]:
        return ""
    try:
        return pooling_problem(config.lock_database)
    except LockUnavailable as error:
        return str(error)


def _unserved_queues() -> list[tuple[str, int]]:
    alive = list(Node.objects.alive())
    return unserved_queues(served_queues(alive)) if alive else []


def _lost_names() -> list[str]:
    newest = Run.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
    lost = Run.objects.filter(
        pk__gt=newest - _RECENT_RUNS,
        state=Run.State.LOST,
        delivery=Schedule.Delivery.AT_MOST_ONCE,
        finished_at__gte=DatabaseNow(-_RECENT),
    )
    return list(lost.order_by("schedule_name").values_list("schedule_name", flat=True))


# --- judgements: no input or output ---------------------------------------------------


def judge_invalid(invalid: Sequence[tuple[str, str]]) -> list[Finding]:
    """Name the schedules that cannot run; each as its key and the reason."""
    found = [
        Finding(
            code="schedules.invalid",
            level=PROBLEM,
            subject=key,
            text=reason or _("invalid"),
            consequence=_("It does not run."),
            fix=_("Correct the schedule in the admin, or deploy the code that it needs."),
        )
        for key, reason in invalid[:_SHOWN]
    ]
    return found + _rest("schedules.invalid", PROBLEM, len(invalid))


def judge_overdue(keys: Sequence[str], grace_seconds: float) -> list[Finding]:
    """Name the schedules that were due and that nobody has claimed."""
    found = [
        Finding(
            code="schedules.overdue",
            level=PROBLEM,
            subject=key,
            text=_("due for more than %g s, and nobody has claimed it") % grace_seconds,
            consequence=_("It runs late, or is skipped as a misfire."),
            fix=_("Look at the nodes: alive, enough free slots, and the code of its job."),
        )
        for key in keys[:_SHOWN]
    ]
    return found + _rest("schedules.overdue", PROBLEM, len(keys))


def judge_queues(unserved: Sequence[tuple[str, int]]) -> list[Finding]:
    """Name the queues that no node serves; each with how many active schedules are in it."""
    return [
        Finding(
            code="schedules.queue",
            level=WARNING,
            subject=queue,
            text=unserved_queue(queue, count),
            consequence=_("What comes due there waits, and is late or a misfire in the end."),
            fix=_("Start a node that serves it, or correct the queue of the schedules."),
        )
        for queue, count in unserved
    ]


def judge_levels(unusable: Sequence[tuple[Sequence[str], str]]) -> list[Finding]:
    """Name the schedules of lock levels that cannot work here; each with the reason."""
    return [
        Finding(
            code="schedules.level",
            level=PROBLEM,
            subject=", ".join(keys[:3]) + (", …" if len(keys) > 3 else ""),
            text=text,
            consequence=_("These schedules do not run."),
            fix=_("Correct the settings, or choose another lock level for them."),
        )
        for keys, text in unusable
    ]


def judge_lost(names: Sequence[str]) -> list[Finding]:
    """Tell of runs that may or may not have done their work; a name for each run."""
    if not names:
        return []
    distinct = sorted(set(names))
    said = {"count": len(names), "names": ", ".join(distinct[:_SHOWN])}
    return [
        Finding(
            code="schedules.lost",
            level=WARNING,
            text=_("runs lost in 24 h: %(count)d (%(names)s)") % said,
            consequence=_(
                "They had started when their node ended. Nobody knows whether the work was done, "
                "and delivery “at most once” never starts them again."
            ),
            fix=_("Check in the job's own records, then: schedulerctl run KEY"),
        )
    ]


def _rest(code: str, level: str, count: int) -> list[Finding]:
    if count <= _SHOWN:
        return []
    text = _("%d more") % (count - _SHOWN)
    fix = _("See all of them: schedulerctl list")
    return [Finding(code=code, level=level, text=text, fix=fix)]


def _all_well(count: int) -> Finding:
    text = _("%d in all, none invalid or overdue") % count
    return Finding(code="schedules.state", level=OK, text=text)
