"""The schedules of the demo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from distcron_app.instants import database_now
from distcron_app.models import ChainLink, Schedule

__all__ = ["HEARTBEAT", "SLOW_REPORT", "seed"]

HEARTBEAT = "heartbeat"
SLOW_REPORT = "slow-report"

_SCHEDULES: dict[str, dict[str, Any]] = {
    HEARTBEAT: {
        "name": "Heartbeat",
        "job": "project.demo.heartbeat",
        "kind": "interval",
        "interval_seconds": 5,
        "notes": "The demo counts its runs: exactly one for each instant.",
    },
    SLOW_REPORT: {
        "name": "Slow report",
        "job": "project.demo.slow_report",
        "arguments": {"seconds": 15},
        "kind": "interval",
        "interval_seconds": 60,
        "delivery": "at_least_once",
        "notes": "Shows progress. The demo kills the node that runs it; another goes on.",
    },
    "flaky-mail": {
        "name": "Flaky mail",
        "job": "project.demo.flaky_mail",
        "kind": "interval",
        "interval_seconds": 20,
        "notes": "Fails two times of three.",
    },
    "mail-alarm": {
        "name": "Mail alarm",
        "job": "project.demo.tell_failure",
        "kind": "manual",
        "overlap": "queue_all",
        "notes": "Has no timetable: it starts when a flaky mail has failed.",
    },
    "overlap": {
        "name": "Longer than its interval",
        "job": "project.demo.slow_report",
        "arguments": {"seconds": 14},
        "kind": "interval",
        "interval_seconds": 10,
        "notes": "Takes 14 s and is due every 10 s: what overlaps is skipped, with a row.",
    },
    "new-york-clock-change": {
        "name": "New York, 01:30",
        "job": "project.demo.greet",
        "arguments": {"name": "New York"},
        "kind": "cron",
        "cron": "30 1 * * *",
        "timezone": "America/New_York",
        "notes": "01:30 comes twice on the day the clocks go back; it runs once.",
    },
    "jakarta-invoices": {
        "name": "Jakarta, weekdays at 09:00",
        "job": "project.demo.invoice_close",
        "kind": "cron",
        "cron": "0 9 * * mon-fri",
        "timezone": "Asia/Jakarta",
    },
    "greeting": {
        "name": "Greeting",
        "job": "project.demo.greet",
        "arguments": {"name": "Jakarta", "language": "id"},
        "kind": "cron",
        "cron": "*/2 * * * *",
        "timezone": "Asia/Jakarta",
    },
    "paused-sync": {
        "name": "Paused",
        "job": "project.demo.greet",
        "arguments": {"name": "nobody"},
        "kind": "interval",
        "interval_seconds": 30,
        "state": "paused",
        "state_reason": "Shows what a paused schedule looks like.",
        "state_by": "demo",
    },
}
# From each schedule, after which end, to which one.
_LINKS = (("flaky-mail", "failed", "mail-alarm"),)
# What the demo itself relies on; the others stay as a person left them.
_RESET = (HEARTBEAT, SLOW_REPORT)
# The failover comes early, and the nodes are up by then.
_FIRST_AFTER = {SLOW_REPORT: timedelta(seconds=15)}


def seed() -> int:
    """Create the demo schedules, and set back those that the demo relies on; return how many."""
    known = set(Schedule.objects.values_list("key", flat=True))
    for key, values in _SCHEDULES.items():
        schedule = Schedule.objects.filter(key=key).first()
        if schedule is None:
            schedule = Schedule(key=key)
        elif key not in _RESET:
            continue
        for field, value in values.items():
            setattr(schedule, field, value)
        if schedule.kind == Schedule.Kind.INTERVAL:
            # Counted from now: an instant that passed while no demo ran is nobody's miss.
            start = database_now().replace(microsecond=0)
            schedule.interval_anchor = start + _FIRST_AFTER.get(key, timedelta())
            schedule.state = values.get("state", Schedule.State.ACTIVE)
        schedule.full_clean()
        schedule.save()
    for source, event, target in _LINKS:
        if target not in known:
            _link(source, event, target)
    return len(_SCHEDULES)


def _link(source: str, event: str, target: str) -> None:
    ends = Schedule.objects.in_bulk([source, target], field_name="key")
    ChainLink.objects.create(schedule=ends[source], event=event, follower=ends[target])
