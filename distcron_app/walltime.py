"""Instants as people type them: wall time of a zone, or with an offset."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, tzinfo

from django.utils.translation import gettext as _

from distcron_app.instants import parse_wall

__all__ = ["LONGEST_INSTANT", "read_end", "read_instant", "read_when"]

FIRST_YEAR, LAST_YEAR = 1970, 2199  # beyond is a slip of the hand
LONGEST_INSTANT = 40  # characters, with microseconds and an offset

_MICROSECOND = timedelta(microseconds=1)


def read_when(text: str) -> datetime:
    """Return what a person typed, naive without an offset. Raise ValueError with the words."""
    try:
        when = parse_wall(text)
    except ValueError:
        message = _("%r: not a date or time. Write 2027-03-12T06:00 or 2027-03-12T06:00Z.")
        raise ValueError(message % text) from None
    if not FIRST_YEAR <= when.year <= LAST_YEAR:
        message = _("%(text)r: year must be from %(first)d to %(last)d.")
        raise ValueError(message % {"text": text, "first": FIRST_YEAR, "last": LAST_YEAR})
    return when


def read_instant(text: str, place: tzinfo) -> datetime:
    """Return the instant, aware UTC; without an offset it is wall time of ``place``.

    Of a wall time that comes twice the first is meant. Raise ValueError, with the words,
    for text that is no time and for a wall time that the clocks jump over.
    """
    when = read_when(text.strip())
    if when.tzinfo is not None:
        return when.astimezone(UTC)
    at = when.replace(tzinfo=place).astimezone(UTC)
    if at.astimezone(place).replace(tzinfo=None) != when:
        message = _(
            "%(text)r: does not exist in %(zone)s, where the clocks jump over it. Choose another "
            "time, or add an offset: 2027-03-12T06:00Z."
        )
        raise ValueError(message % {"text": text, "zone": place})
    return at


def read_end(text: str, place: tzinfo) -> datetime:
    """Return the end of a range, included; a date alone means the whole day of ``place``.

    Otherwise as ``read_instant``.
    """
    try:
        day = date.fromisoformat(text.strip())
    except ValueError:
        return read_instant(text, place)
    # Checked as any other time; the next day's first moment may be one that is jumped over.
    read_when(text.strip())
    midnight = datetime.combine(day + timedelta(days=1), datetime.min.time(), place)
    return midnight.astimezone(UTC) - _MICROSECOND
