"""How much later than its instant an occurrence starts, so that not all start at once.

Every node computes the same offset, in any process and on any day, since it comes from a
hash of what is given and from no random state. Pure.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.utils.translation import gettext_lazy as _

from distcron_app.errors import TimetableError
from distcron_app.timetable.hashing import stable_fraction
from distcron_app.timetable.kinds import EPOCH, MICROSECOND, as_utc

__all__ = ["MAX_OFFSET_SECONDS", "SPREADS", "offset_seconds", "spread_instant"]

SPREADS = ("random", "hashed")
MAX_OFFSET_SECONDS = 86_400


def offset_seconds(kind: str, limit: float, key: str, instant: datetime) -> float:
    """Return seconds from 0 to below ``limit`` by which an occurrence starts later.

    "hashed": the same for every instant of ``key``, the schedule and perhaps a tenant.
    "random": another for each instant, unpredictable from the last one. Raise
    TimetableError for an unknown kind or a limit outside 0 to MAX_OFFSET_SECONDS.
    """
    if kind not in SPREADS:
        message = _("Spread %(kind)r: not known. Choose one of %(allowed)s.")
        facts: dict[str, object] = {"kind": str(kind)[:40], "allowed": ", ".join(SPREADS)}
        raise TimetableError("spread", message % facts)
    if not 0 <= limit <= MAX_OFFSET_SECONDS:
        message = _("Spread of %(limit)s s: must be from 0 to %(largest)d seconds.")
        facts = {"limit": str(limit)[:40], "largest": MAX_OFFSET_SECONDS}
        raise TimetableError("spread_seconds", message % facts)
    at = "" if kind == "hashed" else str((as_utc(instant) - EPOCH) // MICROSECOND)
    return stable_fraction(kind, key, at) * limit


def spread_instant(kind: str, limit: float, key: str, instant: datetime) -> datetime:
    """Return ``instant`` plus its offset, in whole milliseconds; the same on every node."""
    if not limit:
        return instant
    milliseconds = int(offset_seconds(kind, limit, key, instant) * 1000)
    return instant + timedelta(milliseconds=milliseconds)
