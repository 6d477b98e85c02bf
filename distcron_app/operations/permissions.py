"""Which permission each verb asks for."""

from __future__ import annotations

from distcron_app import registry
from distcron_app.errors import UnknownJob

__all__ = [
    "ADD_SCHEDULES",
    "BACKFILL_SCHEDULE",
    "CANCEL_RUN",
    "FORCE_RELEASE_LOCK",
    "MANAGE_MAINTENANCE",
    "MANAGE_SCHEDULES",
    "PAUSE_SCHEDULE",
    "PRUNE_RUNS",
    "RUN_SCHEDULE",
    "VIEW_DASHBOARD",
    "VIEW_LOCK",
    "VIEW_OUTPUT",
    "job_permission",
]

RUN_SCHEDULE = "distcron.run_schedule"
BACKFILL_SCHEDULE = "distcron.backfill_schedule"
PAUSE_SCHEDULE = "distcron.pause_schedule"
CANCEL_RUN = "distcron.cancel_run"
MANAGE_MAINTENANCE = "distcron.change_maintenance"
ADD_SCHEDULES = "distcron.add_schedule"
MANAGE_SCHEDULES = "distcron.change_schedule"
VIEW_DASHBOARD = "distcron.view_dashboard"
VIEW_OUTPUT = "distcron.view_output"
VIEW_LOCK = "distcron.view_lock"
FORCE_RELEASE_LOCK = "distcron.force_release_lock"
PRUNE_RUNS = "distcron.delete_run"


def job_permission(job: str) -> str | None:
    """Return the permission that the job itself asks for, or None; None for unknown jobs too."""
    try:
        return registry.get(job).permission
    except UnknownJob:
        return None
