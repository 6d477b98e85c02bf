"""Reading iCalendar files (RFC 5545) as lists of dates. Pure: no models, no settings, no clock.

What is read: VEVENTs of whole days or with times, their DTEND or DURATION, EXDATE, and
RRULEs that come every year or week. What is not understood is refused with its line, not
passed over, since a date that is missing from a calendar is found out too late.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from typing import NamedTuple, NoReturn
from zoneinfo import ZoneInfo

from django.utils.translation import gettext_lazy as _

from distcron_app.errors import TimetableError
from distcron_app.timetable.zones import zone

__all__ = ["MAX_EVENTS", "MAX_FILE", "Event", "parse_ical"]

MAX_FILE = 1_000_000  # characters
MAX_EVENTS = 5000  # repeated ones included
UNTIL = date(2049, 12, 31)  # rules without an end are followed up to here
_FIRST_YEAR, _LAST_YEAR = 1900, 2200

_LINE = re.compile(r'([A-Za-z0-9-]+)((?:;[A-Za-z0-9-]+=(?:"[^"]*"|[^";:]*)(?:,"[^"]*")*)*):(.*)')
_PARAMETER = re.compile(r';([A-Za-z0-9-]+)=(?:"([^"]*)"|([^";:]*))')
_MOMENT = re.compile(r"(\d{4})(\d\d)(\d\d)(?:T(\d\d)(\d\d)(\d\d)(Z?))?")
_DURATION = re.compile(
    r"\+?P(?:(\d{1,4})W|(?:(\d{1,5})D)?(?:T(?:(\d{1,5})H)?(?:(\d{1,6})M)?(?:(\d{1,7})S)?)?)"
)
_BY_DAY = re.compile(r"([+-]?\d{1,2})?(MO|TU|WE|TH|FR|SA|SU)")
_WEEKDAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
_KNOWN_PARTS = {"FREQ", "INTERVAL", "COUNT", "UNTIL", "BYMONTH", "BYMONTHDAY", "BYDAY", "WKST"}
_REFUSED = ("RDATE", "EXRULE", "RECURRENCE-ID")


class Event(NamedTuple):
    """The days that an event touches, both included."""

    first: date
    last: date
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One unfolded line; ``number`` is that of its first part in the file."""

    number: int
    text: str
    name: str
    parameters: dict[str, str]
    value: str

    def refuse(self, problem: object, **facts: object) -> NoReturn:
        """Raise TimetableError naming the line."""
        shown = self.text[:60]
        message = _("Calendar file line %(number)d %(text)r: %(problem)s")
        facts = {"number": self.number, "text": shown, "problem": str(problem) % facts}
        raise TimetableError("ical", message % facts, token=shown, position=self.number)


@dataclass(slots=True, kw_only=True)
class _RawEvent:
    """The lines of one VEVENT. The first of a name counts, but EXDATE may come several times."""

    begin: _Line
    lines: dict[str, _Line] = field(default_factory=dict)
    left_out: list[_Line] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repetition:
    """A checked RRULE. Weekdays count from Monday = 0, each with its number or 0 for every."""

    yearly: bool
    interval: int
    count: int | None
    until: datetime
    months: tuple[int, ...]
    month_days: tuple[int, ...]
    weekdays: tuple[tuple[int, int], ...]


def parse_ical(text: str, *, timezone: str = "UTC", until: date = UNTIL) -> list[Event]:
    """Return the days of all events in order of their first day.

    An event with times touches each day of ``timezone`` that it has a part of; times without
    a zone mean ``timezone``. Rules without an end are followed up to ``until``. Cancelled
    events are left out. Raise TimetableError whose ``position`` is the line at fault.
    """
    if not isinstance(text, str) or len(text) > MAX_FILE:
        message = _("Calendar file: must be text of at most %(limit)d characters. Split it.")
        raise TimetableError("ical", message % {"limit": MAX_FILE})
    home = zone(timezone)
    found: list[Event] = []
    for raw in _raw_events(_lines(text)):
        for event in _events(raw, home, until):
            found.append(event)
            if len(found) > MAX_EVENTS:
                raw.begin.refuse(
                    _("the file has more than %(limit)d dates. Split it, or end its rules sooner."),
                    limit=MAX_EVENTS,
                )
    return sorted(found)


def _lines(text: str) -> Iterator[_Line]:
    """Yield the unfolded lines: a line that starts with a blank goes on the one before."""
    whole: list[str] = []
    number = 0
    for position, part in enumerate(re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff")), start=1):
        if part[:1] in (" ", "\t") and whole:
            whole.append(part[1:])
            continue
        if whole:
            yield _line(number, "".join(whole))
        whole, number = ([part], position) if part.strip() else ([], position)
    if whole:
        yield _line(number, "".join(whole))


def _line(number: int, text: str) -> _Line:
    matched = _LINE.fullmatch(text)
    if matched is None:
        bare = _Line(number=number, text=text, name="", parameters={}, value="")
        bare.refuse(_("not a line of an iCalendar file. Write NAME:value."))
    name, parameters, value = matched.groups()
    given = {key.upper(): quoted or bare for key, quoted, bare in _PARAMETER.findall(parameters)}
    return _Line(number=number, text=text, name=name.upper(), parameters=given, value=value)


def _raw_events(lines: Iterator[_Line]) -> Iterator[_RawEvent]:
    """Yield the events; what belongs to alarms, zones and other components is passed over."""
    inside: list[str] = []
    event: _RawEvent | None = None
    line: _Line | None = None
    for line in lines:
        if not inside and (line.name, line.value.upper()) != ("BEGIN", "VCALENDAR"):
            line.refuse(_("the file must begin with BEGIN:VCALENDAR. Choose an iCalendar file."))
        if line.name == "BEGIN":
            inside.append(line.value.upper())
            event = _RawEvent(begin=line) if inside[-1] == "VEVENT" else event
        elif line.name == "END":
            if inside.pop() != line.value.upper():
                line.refuse(_("ends what was not begun. Export the file again."))
            if event and line.value.upper() == "VEVENT":
                yield event
        elif event and inside[-1] == "VEVENT":
            _keep(event, line)
    if line is None or inside:
        message = _("Calendar file: ends before END:VCALENDAR. Export it again.")
        raise TimetableError("ical", message)


def _keep(event: _RawEvent, line: _Line) -> None:
    if line.name in _REFUSED:
        line.refuse(_("not supported. Write the dates as events of their own."))
    if line.name == "EXDATE":
        event.left_out.append(line)
    elif line.name == "RRULE" and line.name in event.lines:
        line.refuse(_("second rule of one event. Write two events."))
    else:
        event.lines.setdefault(line.name, line)


def _events(raw: _RawEvent, home: ZoneInfo, until: date) -> Iterator[Event]:
    lines = raw.lines
    if "STATUS" in lines and lines["STATUS"].value.upper() == "CANCELLED":
        return
    if "DTSTART" not in lines:
        raw.begin.refuse(_("the event has no DTSTART. Add its first day."))
    begin = lines["DTSTART"]
    place = _zone_of(begin, home)
    start = _moment(begin, begin.value, place)
    lasts = _length(lines, start, place)
    is_timed = "T" in begin.value
    left_out = {
        _moment(line, value, _zone_of(line, home)).astimezone(place).replace(tzinfo=None)
        for line in raw.left_out
        for value in line.value.split(",")
    }
    summary = _unescaped(lines["SUMMARY"].value)[:200] if "SUMMARY" in lines else ""
    for naive in _starts(lines.get("RRULE"), start.replace(tzinfo=None), place, until):
        if naive in left_out:
            continue
        if not is_timed:
            yield Event(naive.date(), (naive + lasts - timedelta(days=1)).date(), summary)
            continue
        began = naive.replace(tzinfo=place).astimezone(UTC)
        ended = began + max(lasts - timedelta(microseconds=1), timedelta())
        yield Event(began.astimezone(home).date(), ended.astimezone(home).date(), summary)


def _zone_of(line: _Line, home: ZoneInfo) -> ZoneInfo:
    name = line.parameters.get("TZID")
    if name is None:
        return home
    try:
        return zone(name)
    except TimetableError as error:
        line.refuse("%(reason)s", reason=str(error))


def _moment(line: _Line, value: str, place: ZoneInfo) -> datetime:
    """Return the aware start of a day or time; "Z" counts more than the zone of the line."""
    matched = _MOMENT.fullmatch(value.strip())
    numbers = [int(group or 0) for group in matched.groups()[:6]] if matched else [0]
    try:
        naive = datetime(*numbers)  # type: ignore[arg-type] # noqa: DTZ001
    except (TypeError, ValueError):
        line.refuse(_("not a date. Write 20261225, 20261225T093000 or 20261225T093000Z."))
    if matched is None or not _FIRST_YEAR <= naive.year <= _LAST_YEAR:
        facts = {"first": _FIRST_YEAR, "last": _LAST_YEAR}
        line.refuse(_("the year must be from %(first)d to %(last)d."), **facts)
    if matched[7]:
        return naive.replace(tzinfo=UTC).astimezone(place)
    return naive.replace(tzinfo=place)


def _length(lines: dict[str, _Line], start: datetime, place: ZoneInfo) -> timedelta:
    """Return how long an event lasts; days of whole-day events, at least one."""
    is_timed = "T" in lines["DTSTART"].value
    if "DTEND" in lines:
        line = lines["DTEND"]
        if ("T" in line.value) is not is_timed:
            line.refuse(_("DTSTART and DTEND must both have a time, or none."))
        end = _moment(line, line.value, _zone_of(line, place))
        lasts = end.astimezone(UTC) - start.astimezone(UTC)
        if not is_timed:
            lasts = end.replace(tzinfo=None) - start.replace(tzinfo=None)
        if lasts < timedelta():
            line.refuse(_("ends before it starts. Change DTEND."))
    elif "DURATION" in lines:
        lasts = _duration(lines["DURATION"])
    else:
        lasts = timedelta()
    return lasts if is_timed else max(lasts, timedelta(days=1))


def _duration(line: _Line) -> timedelta:
    matched = _DURATION.fullmatch(line.value.strip())
    if matched is None or not any(matched.groups()):
        line.refuse(_("not a length. Write P1D, P1W or PT1H30M."))
    weeks, days, hours, minutes, seconds = (int(group or 0) for group in matched.groups())
    lasts = timedelta(weeks=weeks, days=days, hours=hours, minutes=minutes, seconds=seconds)
    if lasts > timedelta(days=36_600):
        line.refuse(_("longer than 100 years. Change DURATION."))
    return lasts


def _starts(
    line: _Line | None, start: datetime, place: ZoneInfo, until: date
) -> Iterator[datetime]:
    """Yield the naive starts of an event in order; its own start is always the first."""
    yield start
    if line is None:
        return
    rule = _repetition(line, place, until)
    left = None if rule.count is None else rule.count - 1
    days = _yearly_days if rule.yearly else _weekly_days
    for day in days(rule, start.date()):
        at = datetime.combine(day, start.time())
        if at > rule.until or left == 0:
            return
        if at > start:
            yield at
            left = None if left is None else left - 1


def _yearly_days(rule: _Repetition, start: date) -> Iterator[date]:
    months = rule.months or (range(1, 13) if rule.month_days else (start.month,))
    for year in range(start.year, rule.until.year + 1, rule.interval):
        for month in months:
            length = calendar.monthrange(year, month)[1]
            days = _month_days(rule, date(year, month, 1), length, start.day)
            yield from (date(year, month, day) for day in sorted(days))


def _month_days(rule: _Repetition, first: date, length: int, day: int) -> set[int]:
    numbers = range(1, length + 1)
    by_day = {n if n > 0 else length + 1 + n for n in rule.month_days}
    by_weekday = {
        number
        for number in numbers
        for weekday, nth in rule.weekdays
        if (first.weekday() + number - 1) % 7 == weekday
        and nth in (0, (number + 6) // 7, -((length - number) // 7 + 1))
    }
    if rule.month_days and rule.weekdays:
        chosen = by_day & by_weekday
    else:
        chosen = by_day or by_weekday or ({day} if not rule.weekdays else set())
    return chosen & set(numbers)


def _weekly_days(rule: _Repetition, start: date) -> Iterator[date]:
    weekdays = sorted(weekday for weekday, _nth in rule.weekdays) or [start.weekday()]
    monday = start - timedelta(days=start.weekday())
    while monday <= rule.until.date():
        for weekday in weekdays:
            day = monday + timedelta(days=weekday)
            if not rule.months or day.month in rule.months:
                yield day
        monday += timedelta(weeks=rule.interval)


def _repetition(line: _Line, place: ZoneInfo, horizon: date) -> _Repetition:
    given = _parts_of(line)
    yearly = given.get("FREQ") == "YEARLY"
    if given.get("FREQ") not in ("YEARLY", "WEEKLY"):
        line.refuse(
            _("FREQ=%(freq)s is not supported. Use YEARLY or WEEKLY, or write the dates out."),
            freq=given.get("FREQ", "")[:20],
        )
    weekdays = tuple(_by_day(line, part) for part in _items(given, "BYDAY"))
    numbered = any(nth for _weekday, nth in weekdays)
    if not yearly and (numbered or "BYMONTHDAY" in given):
        line.refuse(_("a weekly rule takes plain weekdays only. Write BYDAY=MO,FR."))
    if yearly and weekdays and not ("BYMONTH" in given or "BYMONTHDAY" in given):
        line.refuse(_("weekdays of a whole year are not supported. Add BYMONTH."))
    interval = _number(line, given, "INTERVAL", 1, 1000) or 1
    if interval > 1 and weekdays and given.get("WKST", "MO") != "MO":
        line.refuse(_("weeks must start on Monday. Leave out WKST."))
    return _Repetition(
        yearly=yearly,
        interval=interval,
        count=_number(line, given, "COUNT", 1, 10**9),
        until=_until(line, given, place, horizon),
        months=_numbers(line, given, "BYMONTH", range(1, 13)),
        month_days=_numbers(line, given, "BYMONTHDAY", range(-31, 32)),
        weekdays=weekdays,
    )


def _parts_of(line: _Line) -> dict[str, str]:
    given: dict[str, str] = {}
    for part in line.value.upper().strip().rstrip(";").split(";"):
        name, equals, value = part.partition("=")
        if name not in _KNOWN_PARTS or not equals or not value:
            line.refuse(
                _("%(part)s is not supported. Use %(known)s, or write the dates out."),
                part=part[:20],
                known=", ".join(sorted(_KNOWN_PARTS)),
            )
        given[name] = value
    return given


def _items(given: dict[str, str], name: str) -> list[str]:
    return given[name].split(",") if name in given else []


def _by_day(line: _Line, part: str) -> tuple[int, int]:
    matched = _BY_DAY.fullmatch(part)
    if matched is None or (matched[1] and not 1 <= abs(int(matched[1])) <= 5):
        line.refuse(_("%(part)s is not a weekday. Write MO, 2MO or -1MO."), part=part[:20])
    return _WEEKDAYS.index(matched[2]), int(matched[1] or 0)


def _number(line: _Line, given: dict[str, str], name: str, low: int, high: int) -> int | None:
    if name not in given:
        return None
    return _checked(line, name, given[name], lambda number: low <= number <= high)


def _numbers(line: _Line, given: dict[str, str], name: str, allowed: range) -> tuple[int, ...]:
    return tuple(
        sorted({_checked(line, name, part, allowed.__contains__) for part in _items(given, name)})
    )


def _checked(line: _Line, name: str, text: str, is_allowed: Callable[[int], bool]) -> int:
    number = int(text) if re.fullmatch(r"[+-]?[0-9]{1,9}", text) else 0
    if not number or not is_allowed(number):
        line.refuse(_("%(part)s is out of range. Change it."), part=f"{name}={text[:20]}")
    return number


def _until(line: _Line, given: dict[str, str], place: ZoneInfo, horizon: date) -> datetime:
    """Return the last naive start that a rule may have."""
    latest = datetime.combine(min(horizon, date(_LAST_YEAR, 12, 31)), time.max)
    if "UNTIL" not in given:
        return latest
    if "COUNT" in given:
        line.refuse(_("COUNT and UNTIL exclude each other. Leave one out."))
    until = _moment(line, given["UNTIL"], place).replace(tzinfo=None)
    if "T" not in given["UNTIL"]:
        until = datetime.combine(until.date(), time.max)
    return min(until, latest)


def _unescaped(text: str) -> str:
    """Return a text value without its backslashes, on one line."""
    plain = re.sub(r"\\(.)", lambda found: " " if found[1] in "nN" else found[1], text)
    return " ".join(plain.split())
