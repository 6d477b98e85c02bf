"""How the admin shows instants, states, links and JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime, tzinfo
from typing import Any

from django.db import models
from django.urls import reverse
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timesince import timesince, timeuntil
from django.utils.translation import gettext as _

from distcron_app.errors import TimetableError
from distcron_app.models import Schedule
from distcron_app.timetable.zones import zone

__all__ = [
    "distance",
    "instant",
    "instant_with_utc",
    "json_block",
    "link",
    "place_of",
    "relative",
    "state",
    "wall",
]

# State shown by icon, word and colour, since colour alone is not seen by everybody.
_ICONS = {
    "active": "▶",
    "paused": "‖",
    "exhausted": "■",
    "invalid": "⚠",
    "queued": "…",
    "claimed": "→",
    "running": "▶",
    "succeeded": "✔",
    "failed": "✖",
    "cancelled": "■",
    "lost": "?",
    "skipped": "↷",
    "draining": "‖",
    "left": "■",
    "dead": "✖",
}
_BAD = frozenset({"invalid", "failed", "lost", "dead"})


def place_of(schedule: Schedule | None) -> tzinfo:
    """Return the zone to show a schedule's instants in; the project's where it is not known."""
    try:
        return zone(schedule.timezone if schedule else "")
    except TimetableError:
        return timezone.get_default_timezone()


def instant(value: datetime | None, place: tzinfo | None = None) -> str:
    """Return an instant with its zone, and how far away it is; a dash for None."""
    if value is None:
        return "–"
    return format_html(
        '<time datetime="{}">{}</time> <span class="distcron-relative">{}</span>',
        value.astimezone(UTC).isoformat(),
        _wall(value, place or timezone.get_current_timezone()),
        _relative(value),
    )


def instant_with_utc(value: datetime, place: tzinfo) -> SafeString:
    """Return an instant in its zone, in UTC, and how far away it is."""
    return format_html(
        '{} <span class="distcron-relative">({})</span>', instant(value, place), _wall(value, UTC)
    )


def relative(value: datetime, place: tzinfo) -> SafeString:
    """Return how far away an instant is; the instant itself is in the tooltip."""
    return format_html(
        '<time class="distcron-relative" datetime="{}" title="{}">{}</time>',
        value.astimezone(UTC).isoformat(),
        _wall(value, place),
        _relative(value),
    )


def wall(value: datetime, place: tzinfo) -> str:
    """Return an instant as wall time of the zone, with its abbreviation."""
    return _wall(value, place)


def distance(value: datetime) -> str:
    """Return how far away an instant is."""
    return _relative(value)


def state(obj: models.Model) -> SafeString:
    """Return the state of a schedule, run or node as icon and word."""
    value = getattr(obj, "state", "")
    return format_html(
        '<span class="distcron-state{}"><span aria-hidden="true">{}</span> {}</span>',
        " distcron-bad" if value in _BAD else "",
        _ICONS.get(value, ""),
        getattr(obj, "get_state_display")(),  # noqa: B009 - made by Django for the choices
    )


def link(obj: models.Model, text: object, view: str = "change") -> SafeString:
    """Return a link to the admin page of ``obj``."""
    meta = obj._meta
    url = reverse(f"admin:{meta.app_label}_{meta.model_name}_{view}", args=[obj.pk])
    return format_html('<a href="{}">{}</a>', url, text)


def json_block(value: Any) -> str:
    """Return a JSON value as readable text; a dash for nothing."""
    if value in (None, {}, ""):
        return "–"
    text = json.dumps(value, ensure_ascii=False, indent=2)
    return format_html('<pre class="distcron-output">{}</pre>', text)


def _wall(value: datetime, place: tzinfo) -> str:
    local = value.astimezone(place)
    clock = "H:i:s" if local.second else "H:i"
    this_year = timezone.now().astimezone(place).year
    day = "D j M" if local.year == this_year else "D j M Y"
    return f"{date_format(local, f'{day} {clock}')} {local.tzname()}"


def _relative(value: datetime) -> str:
    seconds = (value - timezone.now()).total_seconds()
    # timesince knows nothing shorter than a minute.
    if abs(seconds) < 60:
        return _("in a moment") if seconds > 0 else _("just now")
    if seconds > 0:
        return _("in %s") % timeuntil(value, depth=1)
    return _("%s ago") % timesince(value, depth=1)
