"""Tiny builders for the tests of the pages."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

from django.contrib.auth.models import Permission, User

from distcron_app.instants import database_now
from distcron_app.models import Node, Run, Schedule

VIEWS = ("view_dashboard", "view_schedule", "view_run", "view_node")


def user(name: str = "siti", *codenames: str) -> User:
    """Insert a user with these permissions of the app and no other."""
    created = User.objects.create_user(name)
    wanted = Permission.objects.filter(
        content_type__app_label="distcron", codename__in=codenames or VIEWS
    )
    created.user_permissions.set(wanted)
    return created


def node(name: str = "web-1", *, lease_seconds: float = 60, **given: Any) -> Node:
    """Insert a node; a lease in the past makes it silent."""
    now = database_now()
    values = {
        "id": uuid.uuid4(),
        "host": f"{name}.internal",
        "pid": 4121,
        "version": "0.1.0",
        "started_at": now - timedelta(hours=1),
        "heartbeat_at": now - timedelta(seconds=1),
        "expires_at": now + timedelta(seconds=lease_seconds),
        "slots": 16,
    }
    return Node.objects.create(name=name, **(values | given))


def schedule(key: str = "close", **given: Any) -> Schedule:
    """Insert an active schedule of the demo job that writes one line."""
    values = {"name": key.title(), "job": "project.demo.heartbeat", "cron": "0 2 * * *"}
    return Schedule.objects.create(key=key, **(values | given))


def run(of: Schedule, state: str = "succeeded", **given: Any) -> Run:
    """Insert a run as it would have been left in that state, due five minutes ago."""
    # Off the full minute: "5 min ago" must not become another text within a test.
    due = database_now() - timedelta(minutes=5, seconds=20)
    began = state not in ("queued", "claimed", "skipped", "cancelled")
    ended = state not in ("queued", "claimed", "running")
    values = {
        "schedule_name": of.name,
        "job": of.job,
        "arguments": of.arguments,
        "delivery": of.delivery,
        "scheduled_at": None,
        "due_at": due,
        "attempt": int(began),
        "owner_token": "a" * 32 if state in ("claimed", "running", "lost") else "",
        "claimed_at": due if began else None,
        "started_at": due + timedelta(milliseconds=100) if began else None,
        "finished_at": due + timedelta(seconds=12) if ended else None,
    }
    return Run.objects.create(schedule=of, state=state, **(values | given))
