"""``schedulerctl forecast``: how many runs start in each coming hour, and the busiest minutes."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from distcron_app import history
from distcron_app.cli import times
from distcron_app.cli.console import Cell, Column, Console
from distcron_app.instants import database_now
from distcron_app.timetable import zone as find_zone

__all__ = ["show_forecast"]

_BAR_CELLS = 40
_BUSIEST = 5
_COLUMNS = (
    Column(title=gettext_lazy("HOUR")),
    Column(title=gettext_lazy("RUNS"), right=True),
    Column(title="", flexible=True),
)


def show_forecast(console: Console, options: dict[str, Any]) -> None:
    """Show the occurrences of active schedules by hour, the busiest minutes and the total."""
    found = history.forecast(database_now(), options["hours"])
    zone = console.view.zone or settings.TIME_ZONE
    if console.view.as_json:
        console.json("forecast", **_facts(found, zone, options["hours"]))
        return
    hours = found.by_hour(find_zone(zone))
    most = max(count for _at, count in hours)
    rows: list[list[Cell | str]] = [
        [times.moment(at, zone), str(count), Cell(_bar(count, most), "cyan")] for at, count in hours
    ]
    console.table(_COLUMNS, rows)
    if busiest := found.busiest(_BUSIEST):
        console.line(_("Busiest minutes:"), "bold")
        console.table(
            _COLUMNS,
            [[f"  {times.moment(at, zone)}", str(count), ""] for at, count in busiest],
            has_header=False,
        )
    console.line(_total(found, options["hours"]))


def _bar(count: int, most: int) -> str:
    """Return a bar whose length says how busy an hour is; not empty where something runs."""
    return "▓" * (-(-count * _BAR_CELLS // most) if count else 0)


def _total(found: history.Forecast, hours: int) -> str:
    facts = {"runs": found.total, "hours": hours, "count": found.schedules}
    message = ngettext(
        "%(runs)d runs in %(hours)d h, of %(count)d active schedule.",
        "%(runs)d runs in %(hours)d h, of %(count)d active schedules.",
        found.schedules,
    )
    return message % facts


def _facts(found: history.Forecast, zone: str, hours: int) -> dict[str, Any]:
    return {
        "start": times.iso(found.start),
        "hours": hours,
        "schedules": found.schedules,
        "total": found.total,
        "by_hour": [
            {"at": times.iso(at), "count": count} for at, count in found.by_hour(find_zone(zone))
        ],
        "busiest": [{"at": times.iso(at), "count": count} for at, count in found.busiest(_BUSIEST)],
        "minutes": list(found.counts),
    }
