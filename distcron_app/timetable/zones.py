"""Time zones: which names are accepted, their data, and when their clocks change.

Data comes from the ``tzdata`` package, not from the operating system, so that every
node that has the same package computes the same instants. Pure: no Django settings,
no clock. Everything is memoised within fixed bounds and safe to call from many threads.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import resources

from django.utils.translation import gettext_lazy as _

from distcron_app.errors import TimetableError

__all__ = [
    "FIRST_SECOND",
    "LAST_SECOND",
    "Changes",
    "changes",
    "changes_around",
    "check_timezone",
    "tzdata_version",
    "zone",
]

# Names that depend on the host or stand for no place.
_REFUSED = frozenset({"localtime", "posixrules", "posix", "right", "Factory", "leapseconds"})
_OF_THE_HOST = frozenset({"localtime", "posixrules", "local", "system"})
_ABBREVIATIONS = {"wib": "Asia/Jakarta", "wita": "Asia/Makassar", "wit": "Asia/Jayapura"}
_LONGEST_NAME = 64  # more than twice the longest name; bounds the search for a similar one

# Datetimes near year 1 and year 9999 overflow when an offset is applied.
FIRST_SECOND = -62_000_000_000
LAST_SECOND = 253_000_000_000
_DAY = 86_400
_BLOCK = 1 << 28  # seconds, about 8.5 years: one table covers two blocks
_PROBE_STEP = 3 * _DAY  # two changes of one zone are at least 6.9 days apart
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The clock changes of one zone between two instants. All values are seconds.

    Change ``i`` happens at the UTC second ``at[i]`` and replaces ``offsets[i]`` by
    ``offsets[i + 1]``. ``ends[i]`` is the wall time at which the old stretch ends and
    ``starts[i]`` the one at which the new stretch starts: a gap if starts > ends,
    a fold if starts < ends; ``edges[i]`` is the earlier of both. Nothing is known before
    the UTC second ``since`` and from ``until`` on.
    """

    at: tuple[int, ...]
    offsets: tuple[int, ...]
    ends: tuple[int, ...]
    starts: tuple[int, ...]
    edges: tuple[int, ...]
    since: int
    until: int


def check_timezone(name: str) -> str:
    """Return ``name`` if it is an IANA time zone, spelled exactly. Raise TimetableError."""
    known = _names()
    if isinstance(name, str) and name in known:
        return name
    shown = str(name)[:_LONGEST_NAME]
    if not shown:
        message = _("Time zone: empty. Write an IANA name such as Asia/Jakarta or UTC.")
        raise TimetableError("timezone", message)
    if shown.strip().lower().removeprefix("/etc/") in _OF_THE_HOST:
        message = _(
            "Time zone %(name)r: differs from host to host. "
            "Write an IANA name such as Asia/Jakarta or UTC."
        )
        raise TimetableError("timezone", message % {"name": shown}, token=shown)
    nearest = _nearest_name(shown)
    if nearest:
        message = _("Time zone %(name)r: not known. Did you mean %(nearest)s?")
    else:
        message = _("Time zone %(name)r: not known. Write an IANA name such as Asia/Jakarta.")
    raise TimetableError("timezone", message % {"name": shown, "nearest": nearest}, token=shown)


@functools.lru_cache(maxsize=1024)
def zone(name: str) -> zoneinfo.ZoneInfo:
    """Return the zone from the ``tzdata`` package. Raise TimetableError for an unknown name.

    The object is not registered with zoneinfo's own cache and cannot be pickled.
    """
    check_timezone(name)
    try:
        source = resources.files("tzdata.zoneinfo").joinpath(*name.split("/"))
        with source.open("rb") as file:
            return zoneinfo.ZoneInfo.from_file(file, key=name)
    except (ModuleNotFoundError, OSError):
        return zoneinfo.ZoneInfo(name)


@functools.lru_cache(maxsize=1)
def tzdata_version() -> str:
    """Return the version of the zone data in use, such as ``2026f``, or ``system``."""
    try:
        return str(importlib.import_module("tzdata").IANA_VERSION)
    except ModuleNotFoundError:
        return "system"


def changes_around(name: str, first: int, last: int) -> Changes:
    """Return the changes from a day before the UTC second ``first`` to beyond ``last``."""
    return changes(name, first // _BLOCK, last // _BLOCK + 1)


@functools.lru_cache(maxsize=1024)
def changes(name: str, first_block: int, last_block: int) -> Changes:
    """Return the changes of whole blocks of time; probes the offset and bisects."""
    place = zone(name)
    since = max(first_block * _BLOCK - _DAY, FIRST_SECOND)
    until = min((last_block + 1) * _BLOCK, LAST_SECOND + _DAY)
    at: list[int] = []
    offsets = [_offset(place, since)]
    for probe in range(since, until, _PROBE_STEP):
        later = min(probe + _PROBE_STEP, until)
        offset = _offset(place, later)
        if offset != offsets[-1]:
            at.append(_first_second_with(place, offset, probe, later))
            offsets.append(offset)
    ends = tuple(map(int.__add__, at, offsets))
    starts = tuple(map(int.__add__, at, offsets[1:]))
    return Changes(
        at=tuple(at),
        offsets=tuple(offsets),
        ends=ends,
        starts=starts,
        edges=tuple(map(min, ends, starts)),
        since=since,
        until=until,
    )


def _first_second_with(place: zoneinfo.ZoneInfo, offset: int, before: int, after: int) -> int:
    while after - before > 1:
        middle = (before + after) // 2
        if _offset(place, middle) == offset:
            after = middle
        else:
            before = middle
    return after


def _offset(place: zoneinfo.ZoneInfo, second: int) -> int:
    offset = (_EPOCH + timedelta(seconds=second)).astimezone(place).utcoffset()
    assert offset is not None  # noqa: S101 - a ZoneInfo always has one
    return offset // timedelta(seconds=1)


@functools.lru_cache(maxsize=1)
def _names() -> frozenset[str]:
    # The package's own list, since the system's may differ from host to host.
    try:
        listed = resources.files("tzdata").joinpath("zones").read_text("utf-8").split()
    except (ModuleNotFoundError, OSError):
        listed = list(zoneinfo.available_timezones())
    return frozenset(listed) - _REFUSED


def _nearest_name(name: str) -> str:
    wanted = name.strip().lower().replace(" ", "_")
    if wanted in _ABBREVIATIONS:
        return _ABBREVIATIONS[wanted]
    whole = {known.lower(): known for known in sorted(_names())}
    cities = {known.lower().rpartition("/")[2]: known for known in sorted(_names())}
    lookups: tuple[Callable[[], str], ...] = (
        lambda: whole.get(wanted, ""),
        lambda: cities.get(wanted, ""),
        lambda: _similar(wanted, whole),
    )
    return next((found for lookup in lookups if (found := lookup())), "")


def _similar(wanted: str, names: dict[str, str]) -> str:
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.75)
    return names[close[0]] if close else ""
