"""Tiny builders of rows, each with a value for everything that a test does not care about."""

from __future__ import annotations

import itertools
import uuid
from datetime import timedelta
from typing import Any

from django.contrib.auth.models import Permission, User

from distcron_app import job
from distcron_app.instants import database_now
from distcron_app.models import Node, Run, Schedule

_numbers = itertools.count(1)


@job(name="tests.call_api", permission="auth.view_group")
def call_api(api_key: str, batch: int = 1) -> None:
    """Take a secret argument; who may schedule it must be able to view groups."""


def make_schedule(**values: Any) -> Schedule:
    """Return a saved schedule of the heartbeat job, daily at 02:30 in Jakarta."""
    number = next(_numbers)
    defaults: dict[str, Any] = {
        "key": f"schedule-{number}",
        "name": f"Schedule {number}",
        "job": "project.demo.heartbeat",
        "kind": "cron",
        "cron": "30 2 * * *",
        "timezone": "Asia/Jakarta",
    }
    return Schedule.objects.create(**defaults | values)


def make_node(**values: Any) -> Node:
    """Return a node that is alive for the next minute."""
    now = database_now()
    defaults: dict[str, Any] = {
        "name": "node",
        "host": "host",
        "pid": 1,
        "version": "0",
        "started_at": now,
        "heartbeat_at": now,
        "expires_at": now + timedelta(minutes=1),
        "slots": 4,
    }
    return Node.objects.create(**defaults | values)


def make_run(**values: Any) -> Run:
    """Return a run that succeeded, of the schedule given or of a new one."""
    now = database_now()
    schedule = values.pop("schedule", None) or make_schedule()
    state = values.get("state", "succeeded")
    defaults: dict[str, Any] = {
        "schedule": schedule,
        "schedule_name": schedule.name,
        "job": schedule.job,
        "arguments": schedule.arguments,
        "delivery": schedule.delivery,
        "scheduled_at": None,
        "due_at": now,
        "state": state,
    }
    if state in Run.ACTIVE_STATES:
        defaults["owner_token"] = uuid.uuid4().hex
    return Run.objects.create(**defaults | values)


def make_user(*perms: str, **values: Any) -> User:
    """Return a member of staff with the permissions, each as "app.codename"."""
    defaults: dict[str, Any] = {"username": f"user-{next(_numbers)}", "is_staff": True}
    user = User.objects.create(**defaults | values)
    for perm in perms:
        app_label, codename = perm.split(".")
        user.user_permissions.add(
            Permission.objects.get(content_type__app_label=app_label, codename=codename)
        )
    return user
