"""``schedulerctl maintenance``: the switch that keeps all nodes from claiming."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.utils.translation import gettext as _

from distcron_app import operations
from distcron_app.cli import times
from distcron_app.cli.console import Console
from distcron_app.cli.exits import USAGE, Exit
from distcron_app.cli.lookup import actor_name, permitted_user
from distcron_app.cli.pausing import parse_end
from distcron_app.models import Maintenance

__all__ = ["switch_maintenance"]


def switch_maintenance(console: Console, options: dict[str, Any]) -> None:
    """Turn the switch on or off; off where it is off says so and changes nothing."""
    is_on = options["switch"] == "on"
    if is_on and not options["reason"]:
        raise Exit(USAGE, _("--reason: missing. Say why, for whoever finds that nothing starts."))
    if options["until"] and not is_on:
        raise Exit(USAGE, _("--until: is for maintenance on."))
    user = permitted_user(options["user"], operations.MANAGE_MAINTENANCE)
    author: dict[str, Any] = {
        "reason": options["reason"],
        "actor": user.get_username() if user else actor_name(),
        "user": user,
        "via": "cli",
    }
    place = console.view.zone or settings.TIME_ZONE
    if is_on:
        until = parse_end(options["until"], place) if options["until"] else None
        row: Maintenance | None = operations.begin_maintenance(until=until, **author)
    else:
        row = operations.end_maintenance(**author)
    if console.view.as_json:
        console.json("maintenance", **_facts(row))
    else:
        console.say(_words(row, place))


def _facts(row: Maintenance | None) -> dict[str, Any]:
    return {
        "on": row is not None and row.is_on,
        "changed": row is not None,
        "reason": row.reason if row else "",
        "by": row.by if row else "",
        "until": times.iso(row.until) if row else None,
    }


def _words(row: Maintenance | None, place: str) -> str:
    if row is None:
        return _("Maintenance was off.")
    if not row.is_on:
        return _("Maintenance is off: the nodes claim again.")
    if row.until is None:
        return _("Maintenance is on: no node claims anything until it is off.")
    message = _("Maintenance is on until %s: no node claims anything.")
    return message % times.moment(row.until, place)
