"""Instants for people: the schedule's zone with its abbreviation, and how far away.

Every time that the command line shows is made here.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, time, timedelta, tzinfo

from django.utils import dateformat, formats
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from distcron_app.errors import TimetableError
from distcron_app.instants import parse_wall
from distcron_app.timetable import zone

__all__ = [
    "duration_text",
    "iso",
    "local",
    "moment",
    "parse_from",
    "parse_until",
    "relative",
    "short_moment",
    "span_text",
    "utc_time",
]

_SPAN = re.compile(r"\+(\d{1,6})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_MINUTE, _HOUR, _DAY, _WEEK = 60, 3_600, 86_400, 604_800
_MONTH, _YEAR = 30.44 * _DAY, 365.25 * _DAY


def iso(at: datetime | None) -> str | None:
    """Return the instant for machines, in UTC, or None.

    >>> iso(datetime(2027, 3, 14, 7, tzinfo=UTC))
    '2027-03-14T07:00:00Z'
    """
    return None if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def local(at: datetime, zone_name: str) -> datetime:
    """Return the instant in the zone; in UTC where the zone of a broken row is unknown."""
    return at.astimezone(_zone(zone_name))


def moment(at: datetime, zone_name: str) -> str:
    """Return weekday, date, time and zone abbreviation, as in ``Sat 13 Mar 2027 02:30 EST``."""
    there = local(at, zone_name)
    return f"{dateformat.format(there, 'D d M Y')} {_clock_time(there)}"


def short_moment(at: datetime, zone_name: str, now: datetime) -> str:
    """Return the time of day today, else the date as well; the year where it is another."""
    there, here = local(at, zone_name), local(now, zone_name)
    if there.date() == here.date():
        return _clock_time(there)
    shape = "D d M" if there.year == here.year else "D d M Y"
    return f"{dateformat.format(there, shape)} {_clock_time(there)}"


def utc_time(at: datetime, zone_name: str) -> str:
    """Return the time in UTC beside the local one, with the weekday where that differs."""
    there, utc = local(at, zone_name), at.astimezone(UTC)
    if there.tzname() == "UTC":
        return ""
    if there.date() == utc.date():
        return _clock_time(utc)
    return f"{dateformat.format(utc, 'D')} {_clock_time(utc)}"


def relative(at: datetime, now: datetime) -> str:
    """Return how far ``at`` is from ``now``, as in ``in 6 m`` or ``4 m ago``."""
    seconds = (at - now).total_seconds()
    if seconds < 0:
        return _("%s ago") % span_text(-seconds)
    return _("in %s") % span_text(seconds)


def span_text(seconds: float) -> str:
    """Return a length of time in its one or two largest units, rounded down."""
    if seconds < _MINUTE:
        return _("%d s") % seconds
    if seconds < _HOUR:
        return _("%d m") % (seconds // _MINUTE)
    if seconds < _DAY:
        hours, minutes = int(seconds // _HOUR), int(seconds % _HOUR // _MINUTE)
        if not minutes:
            return _("%d h") % hours
        return _("%(hours)d h %(minutes)d m") % {"hours": hours, "minutes": minutes}
    if seconds < _WEEK:
        days, hours = int(seconds // _DAY), int(seconds % _DAY // _HOUR)
        return _("%(days)d d %(hours)d h") % {"days": days, "hours": hours}
    if seconds < 2 * _MONTH:
        return _("%d d") % (seconds // _DAY)
    if seconds < 2 * _YEAR:
        months = int(seconds // _MONTH)
        return ngettext("%d month", "%d months", months) % months
    years = int(seconds // _YEAR)
    return ngettext("%d year", "%d years", years) % years


def duration_text(seconds: float) -> str:
    """Return how long something took, as in ``4.9 s`` or ``2 m``."""
    if seconds >= _MINUTE:
        return span_text(seconds)
    return _("%s s") % formats.number_format(round(seconds, 1), 1)


def parse_from(text: str, zone_name: str) -> datetime:
    """Return the instant that ``--from`` names; without an offset it is local to the zone.

    A date means its first moment. Raise ValueError for text that is neither.
    """
    parsed = parse_wall(text)
    aware = parsed if parsed.tzinfo else parsed.replace(tzinfo=_zone(zone_name))
    return aware.astimezone(UTC)


def parse_until(text: str, zone_name: str, now: datetime) -> datetime:
    """Return the instant that ``--until`` names: ``+2h``, ``18:00`` or a date with a time.

    A time of day is the next one of the zone. Raise ValueError for text that is none of them.
    """
    if span := _SPAN.fullmatch(text):
        return now + timedelta(**{_UNITS[span[2]]: int(span[1])})
    try:
        of_day = time.fromisoformat(text)
    except ValueError:
        return parse_from(text, zone_name)
    place = of_day.tzinfo or _zone(zone_name)
    today = now.astimezone(place).date()
    at = datetime.combine(today, of_day, place).astimezone(UTC)
    if at > now:
        return at
    return datetime.combine(today + timedelta(days=1), of_day, place).astimezone(UTC)


def _clock_time(there: datetime) -> str:
    shape = "%H:%M:%S" if there.second else "%H:%M"
    return f"{there.strftime(shape)} {there.tzname()}"


def _zone(name: str) -> tzinfo:
    try:
        return zone(name) if name else UTC
    except TimetableError:
        return UTC
