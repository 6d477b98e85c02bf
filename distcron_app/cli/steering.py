"""``schedulerctl cancel`` and ``schedulerctl again``: act on one run, given by its number."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _

from distcron_app import operations
from distcron_app.cli.console import Console
from distcron_app.cli.exits import USAGE, Exit
from distcron_app.cli.lookup import actor_name, find_run, permitted_user
from distcron_app.cli.running import show_run

__all__ = ["cancel_run", "run_again"]


def cancel_run(console: Console, options: dict[str, Any]) -> None:
    """Cancel a run that has not started; ask one that runs to stop, and do not wait for it."""
    if not options["reason"]:
        raise Exit(USAGE, _("--reason: empty. Say why, for whoever looks for the run's work."))
    user = permitted_user(options["user"], operations.CANCEL_RUN)
    run = find_run(options["run"])
    done = operations.cancel_run(
        run,
        reason=options["reason"],
        actor=user.get_username() if user else actor_name(),
        user=user,
        via="cli",
    )
    console.say(done.in_words())
    run.refresh_from_db()
    show_run(console, "cancel", run, outcome=done.outcome)


def run_again(console: Console, options: dict[str, Any]) -> None:
    """Queue a run that failed, was cancelled or is lost for one more attempt."""
    run = find_run(options["run"])
    permission = operations.job_permission(run.job)
    user = permitted_user(options["user"], operations.RUN_SCHEDULE, permission)
    queued = operations.run_again(
        run,
        reason=options["reason"],
        actor=user.get_username() if user else actor_name(),
        user=user,
        via="cli",
    )
    console.say(_("Run %d is queued again.") % queued.pk)
    queued.refresh_from_db()
    show_run(console, "again", queued)
