"""Schedules in code: what ``@job(schedule=...)`` keeps until a sync makes a row of it.

    from distcron_app import cron, every, job

    @job(schedule=cron("0 2 * * *", timezone="Asia/Jakarta"))
    def nightly_report() -> None: ...

    @job(schedule=[every(5, "minutes"), cron("0 0 1 * *", key="orders-month-end")])
    def sync_orders() -> None: ...

Pure: no models, no settings, no clock, no database. At import only the call itself is
checked, as Python does; a rule or a policy that cannot be used is found by the system
check and by the sync, so that a slip in one of them breaks no import.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypedDict, Unpack, get_args

__all__ = ["Definition", "Options", "cron", "default_key", "every", "key_in_words", "once"]

_Elapsed = Literal["seconds", "minutes", "hours"]
_Wall = Literal["days", "weeks", "months"]
_SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600}
# Where an interval is counted from, so that every database has the same instants.
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NO_SLUG = re.compile(r"[^a-z0-9]+")


class Options(TypedDict, total=False):
    """The keywords of every definition: columns of a schedule, under the same names.

    What is left out has the default of the form. ``calendar`` is the name of one.
    """

    key: str
    name: str
    arguments: Mapping[str, Any]
    timezone: str
    gap: str
    fold: str
    starts_at: datetime | None
    ends_at: datetime | None
    max_runs: int | None
    calendar: str | None
    calendar_action: str
    spread_seconds: int
    spread_by: str
    spread_key: str
    delivery: str
    overlap: str
    max_active: int | None
    max_queued: int
    misfire: str
    misfire_grace_seconds: int | None
    catchup_window_seconds: int | None
    catchup_max: int
    catchup_per_minute: int | None
    start_deadline_seconds: int | None
    max_attempts: int
    backoff: str
    backoff_delays: str | Sequence[float]
    backoff_longest_seconds: int
    backoff_jitter: str
    retry_on: str | Sequence[str | type[BaseException]]
    give_up_on: str | Sequence[str | type[BaseException]]
    retry_stops_at_next: bool
    on_resume: str
    auto_pause_after: int | None
    auto_pause_minutes: int | None
    run_timeout_seconds: int | None
    total_timeout_seconds: int | None
    kill_grace_seconds: int
    retry_on_timeout: bool
    isolation: str
    memory_limit_mb: int | None
    max_recoveries: int
    concurrency_key: str
    queue: str
    priority: int
    lock_level: str
    keep_days: int | None
    keep_succeeded: int | None
    keep_failed: int | None
    notes: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One schedule as code defines it: the columns that it gives, by name.

    ``calendar_start`` stands for the two columns of the first instant of a calendar kind.
    """

    columns: Mapping[str, Any]


def cron(*rules: str, **options: Unpack[Options]) -> Definition:
    """Define a schedule by one or more cron rules of its ``timezone``.

    Several rules run at the instants of all of them. Raise TypeError for a keyword that
    is none.
    """
    return _definition("cron", {"kind": "cron", "cron": "\n".join(rules)}, options)


def every(
    length: int | timedelta,
    unit: _Elapsed | _Wall = "seconds",
    *,
    start: datetime | None = None,
    **options: Unpack[Options],
) -> Definition:
    """Define a schedule by the distance of its instants.

    Seconds, minutes, hours and a timedelta are elapsed time, counted from the aware
    ``start``, or from 1970 in UTC: ``every(5, "minutes")`` is at :00, :05, … in any zone.
    Days, weeks and months keep the time of day of ``start``, which is naive local time of
    the schedule's ``timezone``. Raise TypeError for a keyword that is none, ValueError for
    an unknown unit, or one beside a timedelta.
    """
    if isinstance(length, timedelta) and unit != "seconds":
        raise ValueError(f"every(): got a timedelta and the unit {unit!r}. Leave out the unit.")
    if unit in _SECONDS:
        seconds = length.total_seconds() if isinstance(length, timedelta) else length
        interval = {
            "kind": "interval",
            "interval_seconds": _whole(seconds * _SECONDS[unit]),
            "interval_anchor": _EPOCH if start is None else start,
        }
        return _definition("every", interval, options)
    if unit not in get_args(_Wall):
        allowed = ", ".join([*_SECONDS, *get_args(_Wall)])
        raise ValueError(f"every(): got the unit {unit!r}. Choose one of {allowed}.")
    wall = {
        "kind": "calendar",
        "calendar_every": length,
        "calendar_unit": unit,
        "calendar_start": start,
    }
    return _definition("every", wall, options)


def once(at: datetime, **options: Unpack[Options]) -> Definition:
    """Define a schedule of a single instant, which is aware.

    Where it is past at the first sync, it never runs. Raise TypeError for a keyword that
    is none.
    """
    return _definition("once", {"kind": "once", "run_at": at}, options)


def default_key(job_name: str) -> str:
    """Return the key of a schedule that gives none: the job's name as a slug.

    >>> default_key("billing.close_invoices")
    'billing-close-invoices'
    """
    return _NO_SLUG.sub("-", job_name.lower()).strip("-")


def key_in_words(key: str) -> str:
    """Return the name of a schedule that gives none.

    >>> key_in_words("billing-close-invoices")
    'Billing close invoices'
    """
    words = key.replace("-", " ").replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def _definition(function: str, rule: dict[str, Any], options: Options) -> Definition:
    given: dict[str, Any] = dict(options)
    for keyword in given:
        if keyword not in Options.__annotations__:
            raise TypeError(f"{function}(): {_unknown(keyword)}")
    for keyword in ("retry_on", "give_up_on"):
        if keyword in given:
            given[keyword] = _listed(given[keyword], "\n", _dotted)
    if "backoff_delays" in given:
        given["backoff_delays"] = _listed(given["backoff_delays"], ", ", str)
    return Definition(columns=given | rule)


def _unknown(keyword: str) -> str:
    nearest = difflib.get_close_matches(keyword, Options.__annotations__, n=1, cutoff=0.5)
    advice = (
        f"Did you mean {nearest[0]!r}?"
        if nearest
        else f"Known are: {', '.join(Options.__annotations__)}."
    )
    return f"got the unknown keyword {keyword!r}. {advice}"


def _listed(given: Any, separator: str, shown: Any) -> Any:
    """Return several values as the one text that the column holds."""
    if isinstance(given, Iterable) and not isinstance(given, str):
        return separator.join(shown(each) for each in given)
    return given


def _dotted(error: str | type[BaseException]) -> str:
    if isinstance(error, type):
        return f"{error.__module__}.{error.__qualname__}"
    return error


def _whole(seconds: float) -> float:
    """Return whole seconds as an int; what is not whole is refused with the rule."""
    return int(seconds) if seconds == int(seconds) else seconds
