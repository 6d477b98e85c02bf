"""Finds what a person named on the command line, and says what comes near where nothing fits."""

from __future__ import annotations

import difflib
import getpass
import os
from collections.abc import Sequence
from datetime import date, datetime, time
from typing import TYPE_CHECKING

from django.contrib.auth import get_user_model
from django.utils.translation import gettext as _

from distcron_app.cli.exits import NOT_FOUND, REFUSED, Exit
from distcron_app.cli.times import iso
from distcron_app.models import Run, Schedule, ScheduleQuerySet

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractBaseUser

__all__ = [
    "actor_name",
    "filtered",
    "find_run",
    "find_schedule",
    "find_schedules",
    "permitted_user",
    "rule_text",
]

_NEAREST = 3


def find_schedule(key: str) -> Schedule:
    """Return the schedule of that key. Raise Exit, with similar keys, for none."""
    return find_schedules([key])[0]


def find_schedules(keys: Sequence[str]) -> list[Schedule]:
    """Return the schedules in the order of ``keys``. Raise Exit where one does not exist."""
    found = {
        schedule.key: schedule
        for schedule in Schedule.objects.select_related("calendar").filter(key__in=keys)
    }
    for key in keys:
        if key not in found:
            raise Exit(NOT_FOUND, _not_found_text(key))
    return [found[key] for key in dict.fromkeys(keys)]


def find_run(run_id: int) -> Run:
    """Return the run of that number. Raise Exit for none."""
    run = Run.objects.select_related("schedule").filter(pk=run_id).first()
    if run is None:
        raise Exit(NOT_FOUND, _("run %d: not found, or its history was pruned.") % run_id)
    return run


def filtered(state: str | None, job: str | None) -> ScheduleQuerySet:
    """Return the schedules in ``state`` whose job's name contains ``job``, by key."""
    schedules = Schedule.objects.select_related("calendar").order_by("key")
    if state:
        schedules = schedules.filter(state=state)
    return schedules.filter(job__icontains=job) if job else schedules


def actor_name() -> str:
    """Return ``cli:`` and the user of the operating system."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # a container's user may have no name
        return f"cli:{os.getuid()}"


def permitted_user(username: str | None, *permissions: str | None) -> AbstractBaseUser | None:
    """Return the user to act as; None when nobody is named.

    Raise Exit for an unknown or inactive user, or one without a permission. Without
    ``--user`` nothing is asked: who has this shell has the database as well.
    """
    if username is None:
        return None
    users = get_user_model()
    try:
        user = users._default_manager.get_by_natural_key(username)
    except users.DoesNotExist:
        raise Exit(NOT_FOUND, _("user %r: not found.") % username) from None
    for permission in filter(None, permissions):
        if not user.has_perm(permission):
            message = _("user %(user)r: lacks the permission %(permission)s.")
            raise Exit(REFUSED, message % {"user": username, "permission": permission})
    return user


def rule_text(schedule: Schedule) -> str:
    """Return the rule of a schedule as it is stored."""
    if schedule.kind == Schedule.Kind.CRON:
        return schedule.cron
    if schedule.kind == Schedule.Kind.INTERVAL:
        return f"{schedule.interval_seconds} s"
    if schedule.kind == Schedule.Kind.CALENDAR:
        start = datetime.combine(
            schedule.calendar_date or date.min, schedule.calendar_time or time()
        )
        return f"{schedule.calendar_every} {schedule.calendar_unit} from {start:%Y-%m-%dT%H:%M}"
    if not schedule.has_timetable:
        return ""
    return iso(schedule.run_at) or ""


def _not_found_text(key: str) -> str:
    keys = list(Schedule.objects.order_by("key").values_list("key", flat=True))
    nearest = difflib.get_close_matches(key, keys, n=_NEAREST, cutoff=0.5)
    nearest = nearest or [known for known in keys if key and key in known][:_NEAREST]
    if nearest:
        message = _("schedule %(key)r: not found. Did you mean %(nearest)s?")
        return message % {"key": key, "nearest": ", ".join(nearest)}
    if keys:
        return _("schedule %r: not found. See: schedulerctl list") % key
    return _("schedule %r: not found; there are no schedules yet.") % key
