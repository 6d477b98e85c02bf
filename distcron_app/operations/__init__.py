"""What people do besides editing schedules: run now or again, backfill, cancel, pause, release.

Admin, pages and command line call these, so that all three behave alike: each change
is one transaction together with its audit entry, nodes are told on commit, and a form
that is sent twice acts once. Who may do what is checked by the callers, with the
permissions named here.
"""

from distcron_app.operations.author import REASON_LENGTH
from distcron_app.operations.backfills import (
    MAX_BACKFILL,
    MAX_PER_MINUTE,
    MAX_SIDE_BY_SIDE,
    BackfillCancellation,
    BackfillPlan,
    BackfillRequest,
    backfill,
    cancel_backfill,
    plan_backfill,
)
from distcron_app.operations.locks import LockRelease, earlier_release, release_lock
from distcron_app.operations.maintenance import begin_maintenance, end_maintenance
from distcron_app.operations.pauses import StateChange, pause, resume
from distcron_app.operations.permissions import (
    ADD_SCHEDULES,
    BACKFILL_SCHEDULE,
    CANCEL_RUN,
    FORCE_RELEASE_LOCK,
    MANAGE_MAINTENANCE,
    MANAGE_SCHEDULES,
    PAUSE_SCHEDULE,
    PRUNE_RUNS,
    RUN_SCHEDULE,
    VIEW_DASHBOARD,
    VIEW_LOCK,
    VIEW_OUTPUT,
    job_permission,
)
from distcron_app.operations.pruning import prune_history
from distcron_app.operations.runs import Cancellation, cancel_run, run_again, run_now

__all__ = [
    "ADD_SCHEDULES",
    "BACKFILL_SCHEDULE",
    "CANCEL_RUN",
    "FORCE_RELEASE_LOCK",
    "MANAGE_MAINTENANCE",
    "MANAGE_SCHEDULES",
    "MAX_BACKFILL",
    "MAX_PER_MINUTE",
    "MAX_SIDE_BY_SIDE",
    "PAUSE_SCHEDULE",
    "PRUNE_RUNS",
    "REASON_LENGTH",
    "RUN_SCHEDULE",
    "VIEW_DASHBOARD",
    "VIEW_LOCK",
    "VIEW_OUTPUT",
    "BackfillCancellation",
    "BackfillPlan",
    "BackfillRequest",
    "Cancellation",
    "LockRelease",
    "StateChange",
    "backfill",
    "begin_maintenance",
    "cancel_backfill",
    "cancel_run",
    "earlier_release",
    "end_maintenance",
    "job_permission",
    "pause",
    "plan_backfill",
    "prune_history",
    "release_lock",
    "resume",
    "run_again",
    "run_now",
]
