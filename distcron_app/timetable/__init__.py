"""All time maths: rules are checked here, turned into instants, and due instants planned.

A timetable is a value (Cron, CalendarInterval, Interval, Once, Union) that yields aware UTC
instants. Pure: no models, no settings, no clock; the same text, zone and
``tzdata_version()`` give the same instants on every node.

Cron follows Debian's cron at clock changes, unless a rule's ``gap`` and ``fold`` differ:

1. A rule is a wildcard if its minute or hour field starts with ``*``; otherwise it is fixed.
2. Wildcard: every UTC minute whose local time matches; nothing in a gap, both passes of a fold.
3. Fixed, gap under 3 h: the minutes jumped over run once, at the first minute after the gap.
4. Fixed, fold up to 3 h: only the first pass runs.
5. Larger jumps are corrections of the clock: nothing is made up, nothing is held back.
6. Day and weekday both restricted: either suffices (OR); if one starts with ``*``: both (AND).

Where a gap gives several minutes to one instant, that instant is one occurrence. Every N
days, weeks or months counts as fixed.
"""

from distcron_app.timetable.rules import (
    DEFAULT_CATCHUP_MAX,
    EPOCH,
    FOLDS,
    GAPS,
    KINDS,
    MAX_CALENDAR_EVERY,
    MAX_INTERVAL_SECONDS,
    MAX_RULES,
    MAX_TEXT,
    MISFIRES,
    UNITS,
    CalendarInterval,
    ClockChange,
    Cron,
    CronFields,
    Interval,
    Never,
    Once,
    Plan,
    Span,
    Timetable,
    Union,
    WallTimetable,
    build,
    canonical,
    check_timezone,
    clock_change,
    fields,
    first_after,
    latest,
    parts,
    plan,
    span,
    tzdata_version,
    union,
    zone,
)

__all__ = [
    "DEFAULT_CATCHUP_MAX",
    "EPOCH",
    "FOLDS",
    "GAPS",
    "KINDS",
    "MAX_CALENDAR_EVERY",
    "MAX_INTERVAL_SECONDS",
    "MAX_RULES",
    "MAX_TEXT",
    "MISFIRES",
    "UNITS",
    "CalendarInterval",
    "ClockChange",
    "Cron",
    "CronFields",
    "Interval",
    "Never",
    "Once",
    "Plan",
    "Span",
    "Timetable",
    "Union",
    "WallTimetable",
    "build",
    "canonical",
    "check_timezone",
    "clock_change",
    "fields",
    "first_after",
    "latest",
    "parts",
    "plan",
    "span",
    "tzdata_version",
    "union",
    "zone",
]
