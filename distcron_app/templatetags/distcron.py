"""How instants, durations, states and text of jobs are printed; one tag for each."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, tzinfo
from typing import Any
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from django import template
from django.conf import settings
from django.urls import reverse
from django.utils import formats
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import pgettext_lazy

from distcron_app import explanations, registry
from distcron_app.errors import TimetableError
from distcron_app.locks import LockInfo
from distcron_app.models import Node
from distcron_app.timetable.zones import zone as find_zone

__all__ = ["register"]

register = template.Library()

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
# Finer would change each answer, and a poll could never say "nothing new".
_STEP_SECONDS = 10

_CHECK = '<path d="M3.5 8.5l3 3 6-7"/>'
_CROSS = '<path d="M4 4l8 8M12 4l-8 8"/>'
_RING = '<circle cx="8" cy="8" r="5.5"/>'
_BANG = '<path d="M8 2L14.5 13.5h-13zM8 6.5v3M8 11.5v.2"/>'
_PAUSE = '<path d="M5.5 3.5v9M10.5 3.5v9"/>'
_CLOCK = '<circle cx="8" cy="8" r="6"/><path d="M8 4.5V8l2.5 1.5"/>'
_SKIP = '<path d="M3 4l4 4-4 4M8.5 4l4 4-4 4"/>'
_PLAY = '<path d="M5 3.5l7 4.5-7 4.5z"/>'
_ICONS = {
    "queued": _CLOCK,
    "claimed": _RING,
    "running": _PLAY,
    "succeeded": _CHECK,
    "failed": _CROSS,
    "cancelled": '<circle cx="8" cy="8" r="5.5"/><path d="M4.2 4.2l7.6 7.6"/>',
    "lost": _BANG,
    "skipped": _SKIP,
    "active": _CHECK,
    "done": _CHECK,
    "paused": _PAUSE,
    "exhausted": '<path d="M4 3v10M4 3.5h8l-2 2.5 2 2.5H4"/>',
    "invalid": _CROSS,
    "draining": _PAUSE,
    "left": '<path d="M9 3H4v10h5M7 8h6M10.5 5.5L13 8l-2.5 2.5"/>',
    "dead": _CROSS,
    "silent": _BANG,
    "overdue": _BANG,
    "late": _CLOCK,
    "over_limit": _CLOCK,
    "alive": _CHECK,
    "suspect": _BANG,
    "healthy": _CHECK,
    "expires": _CLOCK,
    "stuck": _BANG,
}
# Words of states that no model has, because they are computed.
_COMPUTED = {
    "silent": pgettext_lazy("state", "silent"),
    "overdue": pgettext_lazy("state", "overdue"),
    "late": pgettext_lazy("state", "reported late"),
    "over_limit": pgettext_lazy("state", "over its limit"),
    "alive": pgettext_lazy("state", "alive"),
    "suspect": pgettext_lazy("state", "suspect"),
    "draining": Node.State.DRAINING.label,
    "left": Node.State.LEFT.label,
    "dead": Node.State.DEAD.label,
    "healthy": pgettext_lazy("state", "healthy"),
    "expires": pgettext_lazy("state", "expires by itself"),
    "stuck": pgettext_lazy("state", "stuck"),
}


@register.simple_tag(takes_context=True)
def instant(
    context: template.Context,
    at: datetime | None,
    zone: str = "",
    full: bool = False,
    brief: bool = False,
) -> str:
    """Print an instant: in ``zone`` (by default the project's) first, then relative to now.

    ``full`` adds UTC to the text, which is the tooltip otherwise. ``brief`` prints the
    relative part alone and the rest as the tooltip. None prints a dash.
    """
    if at is None:
        return format_html('<span class="dc-none">{}</span>', "–")
    place, now = _zone(zone), context["now"]
    wall, universal, distance = _wall(at, place, now), _universal(at), relative(at, now)
    if brief:
        return _time(at, distance, title=f"{wall} · {universal}")
    parts = [_time(at, wall, title=universal)]
    if full:
        is_same_day = at.astimezone(place).date() == at.astimezone(UTC).date()
        shown = _wall(at, UTC, now, has_day=not is_same_day)
        parts.append(format_html('<span class="dc-utc">{}</span>', shown))
    parts.append(format_html('<span class="dc-relative">{}</span>', distance))
    return SafeString(" ".join(parts))


def relative(at: datetime, now: datetime) -> str:
    """Return how far ``at`` is from ``now`` in words, in steps of ten seconds."""
    seconds = (at - now).total_seconds()
    if abs(seconds) < _STEP_SECONDS:
        return _("just now") if seconds <= 0 else _("in a moment")
    text = _rough(abs(seconds))
    return (_("%s ago") if seconds < 0 else _("in %s")) % text


@register.filter
def duration(seconds: float | None) -> str:
    """Return a length of time: ``412 ms``, ``12.4 s``, ``1 min 4 s``, ``10 min``, ``2 h 5 min``."""
    if seconds is None:
        return "–"
    if seconds < 0:
        return f"−{duration(-seconds)}"
    if seconds < 1:
        return _("%s ms") % round(seconds * 1000)
    if seconds < _MINUTE:
        return _("%s s") % formats.number_format(round(seconds, 1), 1)
    return _exact(round(seconds))


@register.simple_tag
def offset(at: datetime | None, start: datetime | None) -> str:
    """Return the distance from ``start`` to ``at`` with its sign, "" where one is missing."""
    if at is None or start is None:
        return ""
    seconds = (at - start).total_seconds()
    return duration(seconds) if seconds < 0 else f"+{duration(seconds)}"


@register.simple_tag
def state(value: str, label: str = "") -> str:
    """Print a state as an icon and a word; the class gives its colour."""
    word = label or _COMPUTED.get(value, value)
    icon = _ICONS.get(value, _RING)
    return format_html(
        '<span class="dc-state dc-state--{}"><svg class="dc-icon" viewBox="0 0 16 16" '
        'aria-hidden="true" focusable="false">{}</svg>{}</span>',
        value if value in _ICONS else "unknown",
        mark_safe(icon),  # noqa: S308 - one of the constants above
        word,
    )


@register.simple_tag
def unserved_queue(queue: str, count: int) -> str:
    """Print what is wrong with a queue that no node serves."""
    return explanations.unserved_queue(queue, count)


@register.simple_tag
def age(milliseconds: int | None) -> str:
    """Print for how long something lasts, a dash where that is not known."""
    if milliseconds is None:
        return "–"
    seconds = milliseconds // 1000
    return _("%s s") % seconds if seconds < _MINUTE else _exact(seconds)


@register.simple_tag
def ttl(info: LockInfo | None) -> str:
    """Print what is left of a lock's TTL, with a bar where it is known what was granted."""
    if info is None:
        return "–"
    if info.ttl_ms is None:
        return _("no TTL")
    left = math.ceil(info.ttl_ms / 1000)
    granted = info.granted_ms
    if granted is None or granted < info.ttl_ms:
        return _("%s s") % left
    facts = {"left": left, "granted": f"{granted / 1000:g}"}
    return format_html(
        '{} <progress class="dc-progress" max="{}" value="{}" aria-hidden="true"></progress>',
        _("%(left)s s of %(granted)s s") % facts,
        granted,
        info.ttl_ms,
    )


@register.simple_tag
def runs_url(**filters: Any) -> str:
    """Return the address of the list of runs under these filters; a list repeats its name."""
    chosen = {
        name: value.split() if name == "state" else value
        for name, value in filters.items()
        if value not in (None, "")
    }
    query = urlencode(chosen, doseq=True)
    return f"{reverse('distcron:runs')}?{query}" if query else reverse("distcron:runs")


@register.filter
def masked(arguments: Any) -> str:
    """Return arguments as JSON for reading, with secret values hidden; "" for none."""
    if not arguments:
        return ""
    shown = registry.masked_arguments(arguments) if isinstance(arguments, dict) else arguments
    return as_json(shown)


@register.filter
def as_json(value: Any) -> str:
    """Return a value as JSON for reading, with control characters made visible."""
    return explanations.inert(json.dumps(value, indent=2, ensure_ascii=False, default=str))


@register.filter
def node_label(row: Any) -> str:
    """Return the name of the node of a run or an attempt."""
    return explanations.node_label(row)


register.filter("inert", explanations.inert)
register.filter("app_frames", explanations.app_frames)
register.filter("chain_words", explanations.chain_words)


def _zone(name: str) -> tzinfo:
    try:
        return find_zone(name or settings.TIME_ZONE)
    except TimetableError:
        # A row with a zone that is unknown here must still be readable.
        return UTC


def _time(at: datetime, text: str, *, title: str) -> SafeString:
    machine = at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return format_html(
        '<time class="dc-time" datetime="{}" title="{}">{}</time>', machine, title, text
    )


def _universal(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _wall(at: datetime, place: tzinfo, now: datetime, *, has_day: bool = True) -> str:
    wall = at.astimezone(place)
    time = f"{wall:%H:%M:%S} {_abbreviation(wall, place)}"
    if not has_day:
        return time
    is_this_year = now.astimezone(place).year == wall.year
    return f"{formats.date_format(wall, 'j M' if is_this_year else 'j M Y')} {time}"


def _abbreviation(wall: datetime, place: tzinfo) -> str:
    name = wall.tzname() or ""
    if name[:1] in "+-":
        # Zones without letters of their own, such as America/Sao_Paulo.
        return f"UTC{name}"
    return name if isinstance(place, ZoneInfo) or place is UTC else f"{wall:%z}"


def _rough(seconds: float) -> str:
    if seconds < _MINUTE:
        return _("%s s") % (int(seconds) // _STEP_SECONDS * _STEP_SECONDS)
    if seconds < _HOUR:
        return _("%s min") % (int(seconds) // _MINUTE)
    if seconds < _DAY:
        hours, minutes = divmod(int(seconds) // _MINUTE, 60)
        return _exact(hours * _HOUR + minutes * _MINUTE) if minutes else _("%s h") % hours
    days = int(seconds) // _DAY
    return _("1 day") if days == 1 else _("%s days") % days


def _exact(seconds: int) -> str:
    hours, rest = divmod(seconds, _HOUR)
    minutes, left = divmod(rest, _MINUTE)
    if hours and minutes:
        return _("%(hours)s h %(minutes)s min") % {"hours": hours, "minutes": minutes}
    if hours:
        return _("%s h") % hours
    if left:
        return _("%(minutes)s min %(seconds)s s") % {"minutes": minutes, "seconds": left}
    return _("%s min") % minutes
