"""Excluded days, timetables that keep clear of them, and iCalendar files."""

import random
import time
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from distcron_app.errors import TimetableError
from distcron_app.timetable import Cron, Interval, Once, Timetable, Union
from distcron_app.timetable.calendars import Event, Excluding, Exclusions, parse_ical
from tests import oracle

NEW_YORK = "America/New_York"
WEEKEND = Exclusions(weekdays=frozenset({6, 7}), timezone=NEW_YORK)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def day(text: str) -> date:
    return date.fromisoformat(text)


def listed(rule: Timetable, start: str, end: str) -> list[str]:
    return [f"{at:%Y-%m-%dT%H:%M}" for at in rule.between(utc(start), utc(end))]


class TestExclusions:
    CALENDAR = Exclusions(
        dates=frozenset({day("2026-12-31")}),
        weekdays=frozenset({7}),
        ranges=((day("2026-12-24"), day("2026-12-26")), (day("2026-12-20"), day("2027-01-02"))),
        timezone="Asia/Jakarta",
        events=(Event(day("2026-12-25"), day("2026-12-25"), "Natal"),),
    )

    @pytest.mark.parametrize(
        ("on", "reason"),
        [
            ("2026-12-25", "2026-12-25 is excluded: Natal"),
            ("2026-12-31", "2026-12-31 is excluded"),
            ("2026-12-28", "2026-12-28 is excluded: 2026-12-20 to 2027-01-02 is"),
            ("2026-12-13", "2026-12-13 is excluded: every Sunday is"),
            ("2026-12-19", ""),
            ("2027-01-04", ""),
        ],
    )
    def test_reason_names_what_excludes_the_day(self, on: str, reason: str) -> None:
        assert self.CALENDAR.excluded_day(day(on)) == reason
        assert self.CALENDAR.allows(day(on)) is (reason == "")

    def test_days_are_those_of_the_zone(self) -> None:
        assert self.CALENDAR.excluded(utc("2026-12-12T16:59")) == ""
        assert self.CALENDAR.excluded(utc("2026-12-12T17:00")) != ""

    def test_a_short_range_does_not_hide_a_long_one(self) -> None:
        found = Exclusions(
            ranges=(
                (day("2026-01-01"), day("2026-12-31")),
                (day("2026-02-01"), day("2026-02-02")),
                (day("2026-03-01"), day("2026-03-02")),
            )
        )
        assert not found.allows(day("2026-06-01"))
        assert found.allows(day("2027-01-01"))

    @pytest.mark.parametrize(
        ("given", "field", "message"),
        [
            (
                {"weekdays": frozenset({0})},
                "weekdays",
                "Weekday '0': must be from 1, Monday, to 7, Sunday.",
            ),
            (
                {"ranges": ((day("2026-02-01"), day("2026-01-01")),)},
                "ranges",
                "Range 2026-02-01 to 2026-01-01: runs backwards. Exchange its ends.",
            ),
            (
                {"timezone": "Mars/Base"},
                "timezone",
                "Time zone 'Mars/Base': not known. Write an IANA name such as Asia/Jakarta.",
            ),
        ],
    )
    def test_refusal_names_the_field(
        self, given: dict[str, object], field: str, message: str
    ) -> None:
        with pytest.raises(TimetableError) as caught:
            Exclusions(**given)  # type: ignore[arg-type]
        assert (caught.value.field, str(caught.value)) == (field, message)


class TestExcluding:
    DAILY = Cron(expression="0 9 * * *", timezone=NEW_YORK)

    @pytest.mark.parametrize(
        ("action", "expected"),
        [
            ("skip", ["2026-11-27T14:00", "2026-11-30T14:00"]),
            ("next", ["2026-11-27T14:00", "2026-11-30T14:00"]),
            ("previous", ["2026-11-27T14:00", "2026-11-30T14:00"]),
        ],
    )
    def test_daily_run_has_its_weekend(self, action: str, expected: list[str]) -> None:
        rule = Excluding(timetable=self.DAILY, exclusions=WEEKEND, action=action)
        assert listed(rule, "2026-11-27", "2026-12-01") == expected

    @pytest.mark.parametrize(
        ("action", "expected"),
        [
            ("skip", []),
            ("next", ["2026-11-02T14:00"]),
            ("previous", ["2026-10-30T13:00"]),
        ],
    )
    def test_monthly_run_moves_to_the_same_wall_time(
        self, action: str, expected: list[str]
    ) -> None:
        first = Cron(expression="0 9 1 * *", timezone=NEW_YORK)  # 1 November 2026 is a Sunday
        rule = Excluding(timetable=first, exclusions=WEEKEND, action=action)
        assert listed(rule, "2026-10-15", "2026-11-15") == expected

    def test_start_inside_the_excluded_days_still_sees_what_is_moved_out_of_them(self) -> None:
        saturday = Cron(expression="0 9 * * 6", timezone=NEW_YORK)
        rule = Excluding(timetable=saturday, exclusions=WEEKEND, action="next")
        assert rule.next_after(utc("2026-11-28T20:00")) == utc("2026-11-30T14:00")
        assert rule.next_after(utc("2026-11-29T20:00")) == utc("2026-11-30T14:00")
        assert rule.next_after(utc("2026-11-30T13:59")) == utc("2026-11-30T14:00")
        assert rule.next_after(utc("2026-11-30T14:00")) == utc("2026-12-07T14:00")

    def test_run_moved_into_a_gap_runs_right_after_it(self) -> None:
        saturday = Cron(expression="30 2 * * 6", timezone=NEW_YORK)
        free = Exclusions(dates=frozenset({day("2026-03-07")}), timezone=NEW_YORK)
        rule = Excluding(timetable=saturday, exclusions=free, action="next")
        assert rule.next_after(utc("2026-03-06")) == utc("2026-03-08T07:00")

    def test_run_that_a_gap_moved_keeps_the_time_that_was_meant(self) -> None:
        daily = Cron(expression="30 2 * * *", timezone=NEW_YORK)
        rule = Excluding(timetable=daily, exclusions=WEEKEND, action="next")
        assert listed(rule, "2026-03-07", "2026-03-10") == ["2026-03-09T06:30"]

    def test_run_moved_into_a_fold_runs_once(self) -> None:
        saturday = Cron(expression="30 1 * * 6", timezone=NEW_YORK)
        free = Exclusions(dates=frozenset({day("2026-10-31")}), timezone=NEW_YORK)
        rule = Excluding(timetable=saturday, exclusions=free, action="next")
        assert listed(rule, "2026-10-31", "2026-11-03") == ["2026-11-01T05:30"]

    def test_no_allowed_day_within_a_year_is_no_instant(self) -> None:
        years = Exclusions(ranges=((day("2026-01-01"), day("2028-12-31")),))
        rule = Excluding(
            timetable=Once(at=utc("2026-11-29T10:00")), exclusions=years, action="next"
        )
        assert rule.next_after(utc("2026-01-01")) is None
        near = Excluding(
            timetable=Once(at=utc("2028-11-29T10:00")), exclusions=years, action="next"
        )
        assert near.next_after(utc("2026-01-01")) == utc("2029-01-01T10:00")

    @pytest.mark.parametrize(
        ("action", "expected"),
        [
            (
                "skip",
                [
                    ("2026-11-28T14:00", "2026-11-28 is excluded: every Saturday is"),
                    ("2026-11-29T14:00", "2026-11-29 is excluded: every Sunday is"),
                ],
            ),
            ("next", []),
            ("previous", []),
        ],
    )
    def test_instants_left_out_have_a_reason(
        self, action: str, expected: list[tuple[str, str]]
    ) -> None:
        rule = Excluding(timetable=self.DAILY, exclusions=WEEKEND, action=action)
        found = rule.left_out(utc("2026-11-27"), utc("2026-12-01"))
        assert [(f"{at:%Y-%m-%dT%H:%M}", reason) for at, reason in found] == expected

    def test_naive_instant_is_refused(self) -> None:
        naive = datetime(2026, 1, 1)  # noqa: DTZ001
        with pytest.raises(ValueError, match="has no time zone"):
            WEEKEND.excluded(naive)
        with pytest.raises(ValueError, match="has no time zone"):
            Excluding(timetable=self.DAILY, exclusions=WEEKEND).next_after(naive)

    def test_all_days_excluded_is_answered_with_nothing(self) -> None:
        never = Exclusions(weekdays=frozenset(range(1, 8)))
        for action in ("skip", "next", "previous"):
            rule = Excluding(timetable=self.DAILY, exclusions=never, action=action)
            began = time.thread_time()
            assert rule.next_after(utc("2026-01-01")) is None
            assert rule.previous_before(utc("2026-01-01")) is None
            assert time.thread_time() - began < 1

    def test_ends_of_the_calendar_have_an_answer(self) -> None:
        for action in ("skip", "next", "previous"):
            rule = Excluding(timetable=self.DAILY, exclusions=WEEKEND, action=action)
            assert rule.next_after(datetime.max.replace(tzinfo=UTC)) is None
            assert rule.previous_before(datetime.min.replace(tzinfo=UTC)) is None
            assert rule.next_after(datetime.min.replace(tzinfo=UTC)) is not None
            assert rule.previous_before(datetime.max.replace(tzinfo=UTC)) is not None

    def test_unknown_action_is_refused(self) -> None:
        with pytest.raises(TimetableError, match="Choose one of skip, next, previous"):
            Excluding(timetable=self.DAILY, exclusions=WEEKEND, action="later")


def moved_by_hand(
    base: Timetable, excluded: Exclusions, action: str, start: datetime, end: datetime
) -> list[datetime]:
    """Return the instants by moving each on its own; rules without a gap in the window only."""
    place = ZoneInfo(excluded.timezone)
    found = set()
    for at in base.between(start, end):
        local = at.astimezone(place)
        on, step = local.date(), timedelta(days=-1 if action == "previous" else 1)
        if excluded.allows(on):
            found.add(at)
            continue
        while action != "skip" and not excluded.allows(on):
            on += step
        if action != "skip":
            wall = datetime.combine(on, local.time(), tzinfo=place)  # fold=0, the first pass
            found.add(wall.astimezone(UTC))
    return sorted(found)


@pytest.mark.parametrize(
    ("zone", "middle"),
    [
        ("America/New_York", "2026-11-01"),
        ("Australia/Lord_Howe", "2026-04-05"),
        ("America/St_Johns", "2006-10-29"),  # the clock falls from 00:01 to 23:01
        ("America/Sao_Paulo", "2018-02-18"),  # from midnight to 23:00
        ("Asia/Jakarta", "2026-12-25"),
    ],
)
@pytest.mark.parametrize("action", ["skip", "next", "previous"])
def test_moved_instants_equal_those_moved_one_by_one(zone: str, middle: str, action: str) -> None:
    pick = random.Random(f"{zone} {action}")
    centre = utc(middle)
    for _ in range(12):
        text = oracle.random_rule(pick)
        # A wildcard moves into both passes of a fold, which the comparison does not.
        while text[0] == "*" or (text.split()[1][0] == "*" and zone != "Asia/Jakarta"):
            text = oracle.random_rule(pick)
        base: Timetable = Cron(expression=text, timezone=zone)
        if pick.random() < 0.3:
            base = Union((base, Interval(seconds=40_000, anchor=utc("2000-01-01T00:00:07"))))
        around = [(centre + timedelta(days=offset)).date() for offset in range(-12, 12)]
        first = pick.choice(around)
        excluded = Exclusions(
            dates=frozenset(pick.sample(around, 6)),
            weekdays=frozenset(pick.sample(range(1, 8), pick.randint(0, 2))),
            ranges=((first, first + timedelta(days=pick.randint(0, 5))),),
            timezone=zone,
        )
        rule = Excluding(timetable=base, exclusions=excluded, action=action)
        start, end = centre - timedelta(days=14), centre + timedelta(days=14)
        margin = timedelta(days=30)
        everything = moved_by_hand(base, excluded, action, start - margin, end + margin)
        expected = [at for at in everything if start < at <= end]
        found = list(rule.between(start, end))
        assert found == expected, (base, excluded)
        assert all(one < two for one, two in pairwise(found))
        assert rule.count(start, end) == len(expected)
        back = []
        before: datetime | None = end + timedelta(microseconds=1)
        while before and (before := rule.previous_before(before)) and before > start:
            back.append(before)
        assert back[::-1] == expected, (base, excluded)


def ical(*lines: str, ending: str = "\r\n") -> str:
    whole = ["BEGIN:VCALENDAR", "VERSION:2.0", *lines, "END:VCALENDAR"]
    return ending.join(whole) + ending


def event(*lines: str) -> list[str]:
    return ["BEGIN:VEVENT", *lines, "END:VEVENT"]


def days(*lines: str, **options: object) -> list[tuple[str, str]]:
    found = parse_ical(ical(*event(*lines)), **options)  # type: ignore[arg-type]
    return [(one.first.isoformat(), one.last.isoformat()) for one in found]


class TestIcal:
    def test_whole_days_end_before_dtend(self) -> None:
        text = ical(
            *event(
                "DTSTART;VALUE=DATE:20261224",
                "DTEND;VALUE=DATE:20261227",
                "SUMMARY:Cuti bersama\\, Natal",
            ),
            *event("DTSTART;VALUE=DATE:20260817", "SUMMARY:Hari Kemerdekaan"),
        )
        assert parse_ical(text) == [
            (day("2026-08-17"), day("2026-08-17"), "Hari Kemerdekaan"),
            (day("2026-12-24"), day("2026-12-26"), "Cuti bersama, Natal"),
        ]

    def test_folded_lines_and_any_line_ending_are_read(self) -> None:
        for ending in ("\r\n", "\n", "\r"):
            text = ical(
                *event("DTSTART;VALUE=DATE:2026", " 1225", "SUMMARY:New", "  Year\\nEve"),
                ending=ending,
            )
            assert parse_ical(text) == [(day("2026-12-25"), day("2026-12-25"), "New Year Eve")]

    def test_times_touch_the_days_of_the_zone_asked_for(self) -> None:
        given = ("DTSTART:20261129T160000Z", "DTEND:20261129T170000Z")
        assert days(*given) == [("2026-11-29", "2026-11-29")]
        assert days(*given, timezone="Asia/Jakarta") == [("2026-11-29", "2026-11-29")]
        longer = ("DTSTART:20261129T160000Z", "DTEND:20261129T170001Z")
        assert days(*longer, timezone="Asia/Jakarta") == [("2026-11-29", "2026-11-30")]

    def test_zone_of_the_event_counts(self) -> None:
        given = ("DTSTART;TZID=America/New_York:20261129T200000", "DURATION:PT1H")
        assert days(*given) == [("2026-11-30", "2026-11-30")]
        assert days(*given, timezone="America/New_York") == [("2026-11-29", "2026-11-29")]

    def test_time_without_a_zone_is_local(self) -> None:
        assert days("DTSTART:20261129T233000", timezone="Asia/Tokyo") == [
            ("2026-11-29", "2026-11-29")
        ]

    def test_duration_in_days_and_weeks(self) -> None:
        assert days("DTSTART:20261201", "DURATION:P3D") == [("2026-12-01", "2026-12-03")]
        assert days("DTSTART:20261201", "DURATION:P1W") == [("2026-12-01", "2026-12-07")]

    @pytest.mark.parametrize(
        ("start", "rule", "expected"),
        [
            ("20261225", "FREQ=YEARLY;COUNT=3", ["2026-12-25", "2027-12-25", "2028-12-25"]),
            ("20240229", "FREQ=YEARLY;UNTIL=20281231", ["2024-02-29", "2028-02-29"]),
            (
                "20260101",
                "FREQ=YEARLY;INTERVAL=2;UNTIL=20300101",
                ["2026-01-01", "2028-01-01", "2030-01-01"],
            ),
            (
                "20261126",
                "FREQ=YEARLY;BYMONTH=11;BYDAY=4TH;COUNT=3",
                ["2026-11-26", "2027-11-25", "2028-11-23"],
            ),
            ("20260525", "FREQ=YEARLY;BYMONTH=5;BYDAY=-1MO;COUNT=2", ["2026-05-25", "2027-05-31"]),
            (
                "20261103",
                "FREQ=YEARLY;BYMONTH=11;BYDAY=TU;BYMONTHDAY=2,3,4,5,6,7,8;COUNT=2",
                ["2026-11-03", "2027-11-02"],
            ),
            (
                "20260228",
                "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=-1;COUNT=3",
                ["2026-02-28", "2027-02-28", "2028-02-29"],
            ),
            (
                "20260115",
                "FREQ=YEARLY;BYMONTHDAY=15;COUNT=3",
                ["2026-01-15", "2026-02-15", "2026-03-15"],
            ),
            ("20261127", "FREQ=WEEKLY;COUNT=3", ["2026-11-27", "2026-12-04", "2026-12-11"]),
            (
                "20261127",
                "FREQ=WEEKLY;INTERVAL=2;BYDAY=MO,FR;COUNT=4",
                ["2026-11-27", "2026-12-07", "2026-12-11", "2026-12-21"],
            ),
            (
                "20261127",
                "FREQ=WEEKLY;WKST=SU;UNTIL=20261204T000000Z",
                ["2026-11-27", "2026-12-04"],
            ),
        ],
    )
    def test_rules_of_years_and_weeks(self, start: str, rule: str, expected: list[str]) -> None:
        assert [first for first, _last in days(f"DTSTART:{start}", f"RRULE:{rule}")] == expected

    def test_rule_without_an_end_goes_on_until_the_day_asked_for(self) -> None:
        found = days("DTSTART:20261225", "RRULE:FREQ=YEARLY", until=day("2029-12-24"))
        assert [first for first, _last in found] == ["2026-12-25", "2027-12-25", "2028-12-25"]

    def test_left_out_dates_are_left_out_and_counted(self) -> None:
        found = days(
            "DTSTART;TZID=Asia/Jakarta:20261201T090000",
            "RRULE:FREQ=WEEKLY;COUNT=4",
            "EXDATE;TZID=Asia/Jakarta:20261208T090000",
            "EXDATE:20261215T020000Z",
        )
        assert [first for first, _last in found] == ["2026-12-01", "2026-12-22"]

    def test_repeated_time_keeps_its_wall_time(self) -> None:
        given = (
            "DTSTART;TZID=America/New_York:20261031T193000",
            "DURATION:PT15M",
            "RRULE:FREQ=WEEKLY;COUNT=2",
        )
        assert days(*given) == [("2026-10-31", "2026-10-31"), ("2026-11-08", "2026-11-08")]

    def test_cancelled_events_alarms_and_zones_are_passed_over(self) -> None:
        text = ical(
            "BEGIN:VTIMEZONE",
            "TZID:Asia/Jakarta",
            "BEGIN:STANDARD",
            "DTSTART:19700101T000000",
            "RRULE:FREQ=HOURLY",
            "END:STANDARD",
            "END:VTIMEZONE",
            *event("DTSTART:20261225", "STATUS:CANCELLED"),
            *event("DTSTART:20261226", "BEGIN:VALARM", "DURATION:nonsense", "END:VALARM"),
        )
        assert [one.first for one in parse_ical(text)] == [day("2026-12-26")]

    @pytest.mark.parametrize(
        ("lines", "number", "problem"),
        [
            (
                ["DTSTART:20261225", "RRULE:FREQ=HOURLY"],
                5,
                "FREQ=HOURLY is not supported. Use YEARLY or WEEKLY, or write the dates out.",
            ),
            (
                ["DTSTART:20261225", "RRULE:FREQ=YEARLY;BYWEEKNO=20"],
                5,
                "BYWEEKNO=20 is not supported. Use BYDAY, BYMONTH, BYMONTHDAY, COUNT, FREQ, "
                "INTERVAL, UNTIL, WKST, or write the dates out.",
            ),
            (
                ["DTSTART:20261225", "RRULE:FREQ=YEARLY;COUNT=0"],
                5,
                "COUNT=0 is out of range. Change it.",
            ),
            (
                ["DTSTART:20261225", "RRULE:FREQ=YEARLY;INTERVAL=-1"],
                5,
                "INTERVAL=-1 is out of range. Change it.",
            ),
            (
                ["DTSTART:20261225", "RRULE:FREQ=YEARLY;BYMONTH=13"],
                5,
                "BYMONTH=13 is out of range. Change it.",
            ),
            (
                ["DTSTART:20261225", "RRULE:FREQ=YEARLY;COUNT=2;UNTIL=20300101"],
                5,
                "COUNT and UNTIL exclude each other. Leave one out.",
            ),
            (
                ["DTSTART:20261225", "RRULE:FREQ=YEARLY;BYDAY=MO"],
                5,
                "weekdays of a whole year are not supported. Add BYMONTH.",
            ),
            (
                ["DTSTART:20261225", "RRULE:FREQ=WEEKLY;BYDAY=2MO"],
                5,
                "a weekly rule takes plain weekdays only. Write BYDAY=MO,FR.",
            ),
            (
                ["DTSTART:20261225", "RRULE:FREQ=YEARLY;BYMONTH=1;BYDAY=XX"],
                5,
                "XX is not a weekday. Write MO, 2MO or -1MO.",
            ),
            (
                ["DTSTART:20261225", "RRULE:FREQ=WEEKLY;INTERVAL=2;BYDAY=MO;WKST=SU"],
                5,
                "weeks must start on Monday. Leave out WKST.",
            ),
            (
                ["DTSTART:20261345"],
                4,
                "not a date. Write 20261225, 20261225T093000 or 20261225T093000Z.",
            ),
            (["DTSTART:00261225"], 4, "the year must be from 1900 to 2200."),
            (["DTSTART:20261225", "DTEND:20261224"], 5, "ends before it starts. Change DTEND."),
            (
                ["DTSTART:20261225", "DTEND:20261225T100000"],
                5,
                "DTSTART and DTEND must both have a time, or none.",
            ),
            (["DTSTART:20261225", "DURATION:P"], 5, "not a length. Write P1D, P1W or PT1H30M."),
            (
                ["DTSTART;TZID=Mars/Base:20261225T100000"],
                4,
                "Time zone 'Mars/Base': not known. Write an IANA name such as Asia/Jakarta.",
            ),
            (
                ["DTSTART:20261225", "RDATE:20270101"],
                5,
                "not supported. Write the dates as events of their own.",
            ),
            (["SUMMARY:No day"], 3, "the event has no DTSTART. Add its first day."),
            (
                ["DTSTART:20261225", "no colon here"],
                5,
                "not a line of an iCalendar file. Write NAME:value.",
            ),
        ],
    )
    def test_what_is_not_understood_is_refused_with_its_line(
        self, lines: list[str], number: int, problem: str
    ) -> None:
        with pytest.raises(TimetableError) as caught:
            parse_ical(ical(*event(*lines)))
        assert str(caught.value).endswith(f": {problem}")
        assert str(caught.value).startswith(f"Calendar file line {number} ")
        assert caught.value.field == "ical"
        assert caught.value.position == number

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "Calendar file: ends before END:VCALENDAR. Export it again."),
            ("BEGIN:VCALENDAR\n", "Calendar file: ends before END:VCALENDAR. Export it again."),
            (
                "BEGIN:VCALENDAR\nEND:VEVENT\n",
                "Calendar file line 2 'END:VEVENT': ends what was not begun. "
                "Export the file again.",
            ),
            (
                "DTSTART:20261225",
                "Calendar file line 1 'DTSTART:20261225': the file must begin with "
                "BEGIN:VCALENDAR. Choose an iCalendar file.",
            ),
            (
                "x" * 1_000_001,
                "Calendar file: must be text of at most 1000000 characters. Split it.",
            ),
        ],
    )
    def test_what_is_no_calendar_file_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(TimetableError) as caught:
            parse_ical(text)
        assert str(caught.value) == message

    def test_more_than_5000_dates_are_refused(self) -> None:
        weekly = event("DTSTART:20000103", "RRULE:FREQ=WEEKLY;BYDAY=MO,TU,WE,TH,FR")
        with pytest.raises(TimetableError, match="more than 5000 dates"):
            parse_ical(ical(*weekly))
        assert len(parse_ical(ical(*event("DTSTART:20260101") * 5000))) == 5000

    def test_hostile_files_are_answered_quickly(self) -> None:
        texts = [
            ical("A" * 900_000),
            ical("X:" + "\\" * 900_000),
            ical('X;P="' + "a," * 400_000),
            ical("X" + ";a=b" * 200_000),
            ical("BEGIN:VEVENT", "DTSTART:20260101", *[" "] * 300_000, "END:VEVENT"),
            ical(*["BEGIN:VEVENT"] * 60_000),
            ical(*event("DTSTART:20260101", "RRULE:FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30")),
            ical(*event("DTSTART:20260101", "EXDATE:" + "20260101," * 90_000 + "20260101")),
        ]
        for text in texts:
            began = time.thread_time()
            try:
                parse_ical(text)
            except TimetableError as error:
                assert len(str(error)) < 300
            assert time.thread_time() - began < 2, text[:60]

    def test_any_text_is_read_or_refused_with_our_error(self) -> None:
        pick = random.Random("ical")
        pieces = [
            *["BEGIN:VEVENT", "END:VEVENT", "DTSTART:20260101", "DTEND:2026", "RRULE:FREQ=WEEKLY"],
            *["DTSTART;TZID=Asia/Jakarta:20260101T000000", "DURATION:PT1H", "EXDATE:20260108"],
            *["RRULE:FREQ=YEARLY;BYDAY=1MO;BYMONTH=1", "BEGIN:VALARM", "END:VALARM", " folded"],
            *["RRULE:FREQ=YEARLY;UNTIL=20260101T", "SUMMARY:\\", "DTEND:20260102", ";", ":", ""],
        ]
        for _ in range(2000):
            text = ical(*pick.choices(pieces, k=pick.randint(0, 9)))
            try:
                parse_ical(text, until=day("2026-12-31"))
            except TimetableError:
                continue
