"""A timetable in words: exact sentences, and outlines that mean what their rules mean."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from distcron_app.errors import TimetableError
from distcron_app.timetable import (
    CalendarInterval,
    Cron,
    Interval,
    Once,
    Timetable,
    Union,
    canonical,
    zone_walk,
)
from distcron_app.timetable.calendars import Excluding, Exclusions
from distcron_app.wording import (
    Grid,
    Mark,
    Outline,
    Steps,
    Times,
    describe,
    mark,
    marks,
    outline,
)
from tests import oracle


def words(expression: str) -> str:
    return describe(Cron(expression=canonical(expression), timezone="Asia/Jakarta"))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0 9 * * 1-5", "At 09:00, Monday to Friday"),
        ("0 9 * * 1", "At 09:00 every Monday"),
        ("0 0 * * *", "At 00:00 every day"),
        ("15,45 6 * * *", "At 06:15 and 06:45 every day"),
        ("0 */6 * * *", "At 00:00, 06:00, 12:00 and 18:00 every day"),
        ("0 0 * * 0,6", "At 00:00, Saturday and Sunday"),
        ("0 9 * * sat-sun", "At 09:00, Saturday and Sunday"),
        ("0 9 * * 1,3-5", "At 09:00, Monday and Wednesday to Friday"),
    ],
)
def test_few_times_are_said_one_by_one(expression: str, expected: str) -> None:
    assert words(expression) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("* * * * *", "Every minute"),
        ("*/5 * * * *", "Every 5 minutes"),
        ("@hourly", "Every hour"),
        ("0 */2 * * *", "Every 2 hours"),
        ("* 9-17 * * *", "Every minute from 09:00 to 17:59"),
        ("* 9-23 * * *", "Every minute from 09:00 to 23:59"),
        ("*/5 9-17 * * 1-5", "Every 5 minutes from 09:00 to 17:55, Monday to Friday"),
        ("0 9-17 * * 1-5", "Every hour from 09:00 to 17:00, Monday to Friday"),
        ("23 0-20/2 * * *", "Every 2 hours from 00:23 to 20:23"),
        ("2-59/5 * * * *", "Every 5 minutes from 00:02 to 23:57"),
        ("*/7 3 * * *", "Every 7 minutes from 03:00 to 03:56"),
        ("*/5 * 13 * *", "Every 5 minutes on the 13th"),
        ("*/5 * * * 0", "Every 5 minutes on Sunday"),
    ],
)
def test_even_rhythm_is_said_with_its_bounds(expression: str, expected: str) -> None:
    assert words(expression) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("*/7 * * * *", "At minute 0, 7, 14, 21, 28 and 4 more of every hour"),
        ("15 * * * *", "At minute 15 of every hour"),
        ("15,45 * * * *", "At minute 15 and 45 of every hour"),
        ("0-29 * * * *", "At minute 0 to 29 of every hour"),
        ("10,45 9-17 * * *", "At minute 10 and 45 of every hour from 09 to 17"),
        ("10,45 */2 * * *", "At minute 10 and 45, every 2 hours from 00 to 22"),
        ("*/5 */7 * * *", "Every 5 minutes in hours 00, 07, 14 and 21"),
        ("*/10 22-23,0-2 * * *", "Every 10 minutes in hours 00 to 02, 22 and 23"),
        ("1,4,8,9,13,25,40 2 * * *", "At minute 1, 4, 8, 9, 13 and 2 more in hour 02"),
    ],
)
def test_uneven_steps_are_said_as_lists(expression: str, expected: str) -> None:
    assert words(expression) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0 0 13 * 5", "At 00:00 on the 13th or any Friday"),
        ("0 0 13 * 1,5", "At 00:00 on the 13th or any Monday or Friday"),
        ("0 0 13 * 5#3", "At 00:00 on the 13th or the third Friday"),
        ("0 0 L * 5", "At 00:00 on the last day or any Friday"),
        ("0 0 1 1 5", "At 00:00 on the 1st or any Friday, in January"),
        ("0 0 1-31 * 1", "At 00:00 every day"),
        ("0 0 1 * 0-6", "At 00:00 every day"),
        (
            "0 0 */10 * 1",
            "At 00:00 on the 1st, 11th, 21st and 31st, only if that is Monday",
        ),
        (
            "0 0 1,2 * */3",
            "At 00:00 on the 1st and 2nd, only if that is Wednesday, Saturday or Sunday",
        ),
        ("0 0 * * 1", "At 00:00 every Monday"),
    ],
)
def test_two_day_fields_are_said_with_or_and_with_only_if(expression: str, expected: str) -> None:
    assert words(expression) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0 0 1,15 * *", "At 00:00 on the 1st and 15th"),
        ("0 0 2,3,11,12,13 * *", "At 00:00 on the 2nd, 3rd and 11th to 13th"),
        ("0 0 21,22,31 * *", "At 00:00 on the 21st, 22nd and 31st"),
        ("0 0 L * *", "At 00:00 on the last day of the month"),
        ("0 0 1,L * *", "At 00:00 on the 1st and last day of the month"),
        ("0 0 L 2,3 *", "At 00:00 on the last day of February and March"),
        ("0 0 1 */3 *", "At 00:00 on the 1st of January, April, July and October"),
        ("0 0 * * 5#3", "At 00:00 on the third Friday of the month"),
        ("0 0 * * 5#1,L1", "At 00:00 on the first Friday and last Monday of the month"),
        ("0 9 * 6-8 *", "At 09:00 every day, in June to August"),
        ("0 9 * 1,6 1-5", "At 09:00, Monday to Friday, in January and June"),
        ("0 9 */2 * *", "At 09:00 on the 1st, 3rd, 5th, 7th, 9th and 11 more"),
        ("0 9 1,3,5,7,9,11-13 * *", "At 09:00 on the 1st, 3rd, 5th, 7th, 9th and 3 more"),
        (
            "0 9 1,3,5,7,9,11,L * *",
            "At 09:00 on the 1st, 3rd, 5th, 7th, last day and 2 more of the month",
        ),
    ],
)
def test_dates_and_months(expression: str, expected: str) -> None:
    assert words(expression) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (1, "Every second"),
        (90, "Every 90 seconds"),
        (60, "Every minute"),
        (300, "Every 5 minutes"),
        (3600, "Every hour"),
        (7200, "Every 2 hours"),
        (86_400, "Every day"),
        (604_800, "Every 7 days"),
    ],
)
def test_interval_is_said_in_the_largest_unit_that_fits(seconds: int, expected: str) -> None:
    anchor = datetime(2026, 1, 1, tzinfo=UTC)
    assert describe(Interval(seconds=seconds, anchor=anchor)) == expected


def test_once_is_said_in_the_zone_asked_for() -> None:
    once = Once(at=datetime(2026, 12, 25, 18, 30, tzinfo=UTC))
    assert describe(once) == "Once at 18:30 on 25 December 2026 (UTC)"
    local = describe(once, timezone="Asia/Jakarta")
    assert local == "Once at 01:30 on 26 December 2026 (Asia/Jakarta)"


def test_once_keeps_its_seconds() -> None:
    once = Once(at=datetime(2026, 12, 25, 18, 30, 5, tzinfo=UTC))
    assert describe(once) == "Once at 18:30:05 on 25 December 2026 (UTC)"


def test_refused_rule_has_no_words() -> None:
    with pytest.raises(TimetableError):
        words("61 * * * *")


def test_run_moved_by_a_gap_is_marked() -> None:
    rule = Cron(expression="30 2 * * *", timezone="America/New_York")
    assert mark(rule, datetime(2027, 3, 14, 7, tzinfo=UTC)) == (
        "02:30 does not exist on 14 March 2027 in America/New_York: runs at 03:00 instead."
    )


def test_gap_at_the_end_of_a_day_is_marked_with_that_day() -> None:
    rule = Cron(expression="30 23 * * 6", timezone="America/Nuuk")
    assert mark(rule, datetime(2024, 3, 31, 1, tzinfo=UTC)) == (
        "23:30 does not exist on 30 March 2024 in America/Nuuk: runs at 00:00 instead."
    )


def test_first_of_two_equal_times_is_marked() -> None:
    rule = Cron(expression="30 1 * * *", timezone="America/New_York")
    assert mark(rule, datetime(2026, 11, 1, 5, 30, tzinfo=UTC)) == (
        "01:30 happens twice on 1 November 2026 in America/New_York: runs once, at the first."
    )


def test_ordinary_instants_carry_no_mark() -> None:
    instant = datetime(2026, 11, 2, 6, 30, tzinfo=UTC)
    assert mark(Cron(expression="30 1 * * *", timezone="America/New_York"), instant) == ""
    assert mark(Interval(seconds=60, anchor=instant), instant) == ""
    assert mark(Once(at=instant), instant) == ""


def every(number: int, unit: str, start: str, **policies: str) -> CalendarInterval:
    return CalendarInterval(
        every=number,
        unit=unit,
        start=datetime.fromisoformat(start),
        timezone="America/New_York",
        **policies,
    )


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (every(1, "days", "2026-11-29T09:00"), "Every day at 09:00 from 29 November 2026"),
        (every(3, "days", "2026-11-29T09:00"), "Every 3 days at 09:00 from 29 November 2026"),
        (
            every(1, "weeks", "2026-11-29T09:00"),
            "Every week on Sunday at 09:00 from 29 November 2026",
        ),
        (
            every(2, "weeks", "2026-11-30T23:05"),
            "Every 2 weeks on Monday at 23:05 from 30 November 2026",
        ),
        (
            every(1, "months", "2026-01-28T09:00"),
            "Every month on the 28th at 09:00 from 28 January 2026",
        ),
        (
            every(3, "months", "2026-01-31T09:00"),
            "Every 3 months on the 31st or else the last day at 09:00 from 31 January 2026",
        ),
    ],
)
def test_calendar_interval_is_said_with_its_start(rule: Timetable, expected: str) -> None:
    assert describe(rule) == expected


@pytest.mark.parametrize(
    ("expression", "policies", "expected"),
    [
        ("30 2 * * *", {}, "At 02:30 every day"),
        (
            "30 2 * * *",
            {"gap": "skip"},
            "At 02:30 every day, not when the clocks skip the time",
        ),
        ("30 2 * * *", {"fold": "both"}, "At 02:30 every day, at both of two equal times"),
        (
            "30 2 * * *",
            {"fold": "second", "gap": "skip"},
            "At 02:30 every day, at the second of two equal times, "
            "not when the clocks skip the time",
        ),
        ("*/5 * * * *", {"fold": "second", "gap": "skip"}, "Every 5 minutes"),
    ],
)
def test_policies_are_said_where_they_are_not_usual(
    expression: str, policies: dict[str, str], expected: str
) -> None:
    assert describe(Cron(expression=expression, timezone="Europe/Berlin", **policies)) == expected


def test_union_says_each_rule_and_zones_only_where_they_differ() -> None:
    morning = Cron(expression="0 9 * * *", timezone="Asia/Jakarta")
    minutes = Interval(seconds=300, anchor=datetime(2026, 1, 1, tzinfo=UTC))
    other = Cron(expression="0 10 * * *", timezone="UTC")
    assert describe(Union((morning, minutes))) == "At 09:00 every day; Every 5 minutes"
    assert describe(Union((morning, other))) == (
        "At 09:00 every day (Asia/Jakarta); At 10:00 every day (UTC)"
    )


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("skip", "At 09:00 every day, not on excluded days"),
        ("next", "At 09:00 every day, on excluded days moved to the next allowed day"),
        ("previous", "At 09:00 every day, on excluded days moved to the previous allowed day"),
    ],
)
def test_what_happens_on_excluded_days_is_said(action: str, expected: str) -> None:
    morning = Cron(expression="0 9 * * *", timezone="Asia/Jakarta")
    rule = Excluding(timetable=morning, exclusions=Exclusions(), action=action)
    assert describe(rule) == expected


AFTER = datetime(2026, 11, 29, 10, tzinfo=UTC)


def marked(rule: Timetable | str, **options: object) -> list[tuple[str, str]]:
    if isinstance(rule, str):
        rule = Cron(expression=canonical(rule), timezone="America/New_York")
    return [(one.code, one.text) for one in marks(rule, **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("0 9 * * 1-5", []),
        ("*/15 */6 * */3 *", []),
        ("0 0 1-31 * 1", []),
        (
            "0 0 13 * 5",
            [
                (
                    "either",
                    "Day or weekday: it runs on dates that fit either of them, not only both.",
                )
            ],
        ),
        (
            "*/7 * * * *",
            [("uneven", "Minute */7 starts over: its last step is 4, not 7.")],
        ),
        ("0 */5 * * *", [("uneven", "Hour */5 starts over: its last step is 4, not 5.")]),
        ("0 0 * * */3", [("uneven", "Weekday */3 starts over: its last step is 1, not 3.")]),
        (
            "0 0 */2 * *",
            [("uneven", "Day */2 starts over every month, so its last step is shorter.")],
        ),
        (
            "0 0 29,31 * *",
            [
                (
                    "missing_days",
                    "Months without a 29th or 31st are left out. L is the last day of any month.",
                )
            ],
        ),
        ("0 0 31 1,3 *", []),
        ("0 0 * * 5#5", [("missing_days", "Months without a fifth such weekday are left out.")]),
        (
            every(1, "months", "2026-01-30T00:00"),
            [("missing_days", "In months without a 30th it runs on their last day.")],
        ),
        (every(1, "days", "2026-01-30T00:00"), []),
    ],
)
def test_timetable_is_marked(rule: Timetable | str, expected: list[tuple[str, str]]) -> None:
    assert marked(rule) == expected


def test_marks_of_all_rules_of_a_union_are_told() -> None:
    rules = [Cron(expression=text, timezone="UTC") for text in ("*/7 * * * *", "0 0 13 * 5")]
    assert [code for code, _text in marked(Union(tuple(rules)))] == ["uneven", "either"]


def test_rare_and_ended_timetables_are_marked() -> None:
    assert ("rare", "Runs rarely: next on 29 February 2028 (UTC).") in marked(
        "0 0 29 2 *", after=AFTER
    )
    ended = Once(at=datetime(2026, 1, 1, tzinfo=UTC))
    assert marked(ended, after=AFTER) == [("never", "Never runs again.")]
    assert marked("0 0 1 1 *", after=AFTER) == []


def test_runs_longer_than_the_shortest_period_are_marked() -> None:
    text = "Runs take up to 90 s, but the next one starts after 60 s."
    assert marked("0,1 9 * * *", after=AFTER, p95=timedelta(seconds=90)) == [("overlap", text)]
    assert marked("0,1 9 * * *", after=AFTER, p95=timedelta(seconds=60)) == []


def test_many_others_at_the_same_second_are_marked() -> None:
    text = "20 other schedules start at the same second."
    assert marked("0 0 * * *", herd=20) == [("herd", text)]
    assert marked("0 0 * * *", at=AFTER, herd=20) == [("herd", text)]
    assert marked("0 0 * * *", herd=19) == []


def test_instant_is_marked_for_what_a_clock_change_did() -> None:
    at = datetime(2026, 11, 1, 6, 30, tzinfo=UTC)
    second = Cron(expression="30 1 * * *", timezone="America/New_York", fold="second")
    text = "01:30 happens twice on 1 November 2026 in America/New_York: runs once, at the second."
    assert marks(second, at) == [Mark(code="fold", text=text)]
    assert mark(Union((Once(at=AFTER), second)), at) == text
    assert marks(every(1, "days", "2026-01-01T02:30"), datetime(2026, 3, 8, 7, tzinfo=UTC)) == [
        Mark(
            code="gap",
            text="02:30 does not exist on 8 March 2026 in America/New_York: runs at 03:00 instead.",
        )
    ]


def test_instant_moved_from_an_excluded_day_is_marked() -> None:
    saturdays = Cron(expression="0 9 * * 6", timezone="UTC")
    weekend = Exclusions(weekdays=frozenset({6, 7}))
    rule = Excluding(timetable=saturdays, exclusions=weekend, action="next")
    monday = datetime(2026, 11, 30, 9, tzinfo=UTC)
    assert marks(rule, monday) == [Mark(code="moved", text="Moved here from an excluded day.")]
    daily = Cron(expression="0 9 * * *", timezone="UTC")
    assert marks(Excluding(timetable=daily, exclusions=weekend, action="next"), monday) == []


def minutes_said(time: Times | Steps | Grid) -> set[int]:
    if isinstance(time, Times):
        return set(time.minutes)
    if isinstance(time, Steps):
        return set(range(time.first, time.last + 1, time.step))
    return {hour * 60 + minute for hour in time.hours for minute in time.minutes}


def day_is_said(said: Outline, on: datetime) -> bool:
    if said.months and on.month not in said.months:
        return False
    week = timedelta(days=7)
    weekday, nth = on.isoweekday(), (on.day + 6) // 7
    by_day = on.day in said.days
    by_day |= said.last_day and (on + timedelta(days=1)).day == 1
    by_weekday = weekday in said.weekdays or (weekday, nth) in said.nth_weekdays
    by_weekday |= weekday in said.last_weekdays and (on + week).month != on.month
    return {
        "all": True,
        "days": by_day,
        "weekdays": by_weekday,
        "either": by_day or by_weekday,
        "both": by_day and by_weekday,
    }[said.dates]


def test_outline_means_what_the_rule_means_on_every_day_of_four_years() -> None:
    pick = random.Random("outline")
    days = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=day) for day in range(1461)]
    for _ in range(300):
        text = oracle.random_rule(pick)
        rule, said = oracle.Rule(text), outline(text)
        for on in days:
            number = (on - oracle.EPOCH).days
            assert day_is_said(said, on) == rule.matches_day(number), (text, on)
        matching = next((day for day in range(40_000) if rule.matches_day(day)), None)
        if matching is not None:
            times = {minute for minute in range(1440) if rule.matches(matching * 1440 + minute)}
            assert minutes_said(said.time) == times, text


def test_what_is_said_of_300_rules_is_what_runs_for_a_year() -> None:
    pick = random.Random("a year")
    first = datetime(2027, 1, 1, tzinfo=UTC)
    days = [first + timedelta(days=day) for day in range(365)]
    start = int(first.timestamp())
    for _ in range(300):
        text = oracle.random_rule(pick)
        said = outline(text)
        bits = sum(1 << minute for minute in minutes_said(said.time))
        expected = {int(on.timestamp()): bits for on in days if day_is_said(said, on)}
        rule = Cron(expression=text, timezone="UTC")
        runs: dict[int, int] = {}
        for second, mask in zone_walk.masks(rule.rule, "UTC", start - 1, start + 365 * 86_400 - 1):
            day = second // 86_400 * 86_400
            runs[day] = runs.get(day, 0) | mask << (second - day) // 60
        assert runs == expected, text
        assert (
            rule.count(days[0] - timedelta(seconds=1), days[-1])
            == sum(mask.bit_count() for day, mask in runs.items() if day < days[-1].timestamp())
            + runs.get(int(days[-1].timestamp()), 0) % 2
        ), text


def test_sentence_is_short_and_complete_for_any_rule() -> None:
    pick = random.Random("sentences")
    for _ in range(1000):
        text = oracle.random_rule(pick)
        sentence = words(text)
        assert sentence[0] in "AE", text
        assert "%" not in sentence, text
        assert "  " not in sentence, text
        assert len(sentence) < 250, text
