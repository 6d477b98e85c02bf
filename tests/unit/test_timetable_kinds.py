"""Calendar intervals, unions, the policies at clock changes, and previous instants."""

import random
import threading
from datetime import UTC, datetime, timedelta

import pytest

from distcron_app import timetable
from distcron_app.errors import TimetableError
from distcron_app.timetable import (
    CalendarInterval,
    ClockChange,
    Cron,
    Interval,
    Once,
    Timetable,
    Union,
    build,
    clock_change,
    first_after,
    kinds,
    latest,
    plan,
    union,
    zone_walk,
    zones,
)
from distcron_app.timetable import fields as cron_fields
from distcron_app.timetable import grammar as cron_grammar
from distcron_app.timetable import walk as cron_calendar
from tests import oracle


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def local(text: str) -> datetime:
    return datetime.fromisoformat(text)


def every(
    number: int,
    unit: str,
    start: str,
    zone: str = "UTC",
    *,
    gap: str = "shift",
    fold: str = "first",
) -> CalendarInterval:
    return CalendarInterval(
        every=number, unit=unit, start=local(start), timezone=zone, gap=gap, fold=fold
    )


def listed(rule: Timetable, start: str, end: str) -> list[str]:
    return [f"{at:%Y-%m-%dT%H:%M}" for at in rule.between(utc(start), utc(end))]


NEW_YORK_GAP = ("2026-03-08T00:00", "2026-03-09T00:00")
NEW_YORK_FOLD = ("2026-11-01T00:00", "2026-11-02T00:00")


class TestCalendarInterval:
    def test_month_end_is_clamped_without_drift(self) -> None:
        rule = every(1, "months", "2026-01-31T09:00")
        assert listed(rule, "2026-01-01", "2026-06-01") == [
            "2026-01-31T09:00",
            "2026-02-28T09:00",
            "2026-03-31T09:00",
            "2026-04-30T09:00",
            "2026-05-31T09:00",
        ]

    def test_leap_day_comes_back_every_fourth_year(self) -> None:
        rule = every(12, "months", "2024-02-29T00:00")
        assert listed(rule, "2024-03-01", "2028-12-31") == [
            "2025-02-28T00:00",
            "2026-02-28T00:00",
            "2027-02-28T00:00",
            "2028-02-29T00:00",
        ]

    def test_days_and_weeks_are_counted_from_the_start(self) -> None:
        days = every(3, "days", "2026-11-29T10:00")
        assert listed(days, "2026-11-01", "2026-12-06") == [
            "2026-11-29T10:00",
            "2026-12-02T10:00",
            "2026-12-05T10:00",
        ]
        weeks = every(2, "weeks", "2026-11-29T10:00")
        assert listed(weeks, "2026-11-29T10:00", "2026-12-28") == [
            "2026-12-13T10:00",
            "2026-12-27T10:00",
        ]

    def test_wall_time_stays_through_a_clock_change(self) -> None:
        rule = every(1, "days", "2026-03-07T09:00", "America/New_York")
        assert listed(rule, "2026-03-07", "2026-03-10") == [
            "2026-03-07T14:00",
            "2026-03-08T13:00",
            "2026-03-09T13:00",
        ]

    def test_time_inside_a_gap_runs_right_after_it_and_does_not_stay_there(self) -> None:
        rule = every(1, "days", "2026-03-07T02:30", "America/New_York")
        assert listed(rule, "2026-03-07", "2026-03-10") == [
            "2026-03-07T07:30",
            "2026-03-08T07:00",
            "2026-03-09T06:30",
        ]

    def test_nothing_comes_before_the_start(self) -> None:
        rule = every(1, "weeks", "2026-11-29T10:00")
        assert rule.previous_before(utc("2026-11-29T10:00")) is None
        assert rule.next_after(utc("1980-01-01")) == utc("2026-11-29T10:00")
        assert rule.count(utc("1980-01-01"), utc("2026-12-06T10:00")) == 2

    def test_ends_with_the_calendar(self) -> None:
        for unit in timetable.UNITS:
            rule = every(1, unit, "2026-11-29T10:00", "Asia/Jakarta")
            assert rule.next_after(datetime.max.replace(tzinfo=UTC)) is None
            assert rule.count(utc("9000-01-01"), datetime.max.replace(tzinfo=UTC)) > 11_000

    def test_is_built_from_columns(self) -> None:
        built = build(
            kind="calendar",
            timezone="Asia/Jakarta",
            calendar_every=2,
            calendar_unit="weeks",
            calendar_start=local("2026-11-29T10:00"),
            gap="skip",
            fold="both",
        )
        rule = every(2, "weeks", "2026-11-29T10:00", "Asia/Jakarta", gap="skip", fold="both")
        assert built == rule

    @pytest.mark.parametrize(
        ("changed", "field", "message"),
        [
            (
                {"calendar_every": 0},
                "calendar_every",
                "Every '0' days: must be a whole number from 1 to 3660.",
            ),
            (
                {"calendar_every": None},
                "calendar_every",
                "Every 'None' days: must be a whole number from 1 to 3660.",
            ),
            (
                {"calendar_unit": "years"},
                "calendar_unit",
                "Calendar unit 'years': not known. Choose one of days, weeks, months.",
            ),
            (
                {"calendar_start": None},
                "calendar_start",
                "Start: missing. Give a local date and time.",
            ),
            (
                {"calendar_start": utc("2026-01-01")},
                "calendar_start",
                "Start '2026-01-01 00:00:00+00:00': must be local date and time "
                "without a time zone.",
            ),
            (
                {"calendar_start": local("2026-01-01T00:00:30")},
                "calendar_start",
                "Start '2026-01-01 00:00:30': must be a whole minute. Leave out the seconds.",
            ),
            (
                {"calendar_start": local("0026-01-01")},
                "calendar_start",
                "Start '0026-01-01 00:00:00': year must be from 1970 to 2199.",
            ),
            ({"gap": "later"}, "gap", "Gap 'later': not known. Choose one of shift, skip."),
            ({"fold": ""}, "fold", "Fold '': not known. Choose one of first, second, both."),
        ],
    )
    def test_refusal_names_the_field(
        self, changed: dict[str, object], field: str, message: str
    ) -> None:
        given: dict[str, object] = {
            "kind": "calendar",
            "calendar_every": 1,
            "calendar_unit": "days",
            "calendar_start": local("2026-01-01"),
        }
        with pytest.raises(TimetableError) as caught:
            build(**(given | changed))  # type: ignore[arg-type]
        assert (caught.value.field, str(caught.value)) == (field, message)


class TestPolicies:
    @pytest.mark.parametrize(("gap", "expected"), [("shift", ["2026-03-08T07:00"]), ("skip", [])])
    def test_gap(self, gap: str, expected: list[str]) -> None:
        rule = Cron(expression="30 2 * * *", timezone="America/New_York", gap=gap)
        assert listed(rule, *NEW_YORK_GAP) == expected
        assert rule.count(*map(utc, NEW_YORK_GAP)) == len(expected)

    @pytest.mark.parametrize(
        ("fold", "expected"),
        [
            ("first", ["2026-11-01T05:30"]),
            ("second", ["2026-11-01T06:30"]),
            ("both", ["2026-11-01T05:30", "2026-11-01T06:30"]),
        ],
    )
    def test_fold(self, fold: str, expected: list[str]) -> None:
        cron = Cron(expression="30 1 * * *", timezone="America/New_York", fold=fold)
        daily = every(1, "days", "2026-01-01T01:30", "America/New_York", fold=fold)
        for rule in (cron, daily):
            assert listed(rule, *NEW_YORK_FOLD) == expected
            assert rule.count(*map(utc, NEW_YORK_FOLD)) == len(expected)

    def test_wildcard_follows_the_real_clock_whatever_its_policy(self) -> None:
        for gap in timetable.GAPS:
            for fold in timetable.FOLDS:
                rule = Cron(
                    expression="*/30 1-2 * * *", timezone="America/New_York", gap=gap, fold=fold
                )
                assert rule.count(*map(utc, NEW_YORK_GAP)) == 2
                assert rule.count(*map(utc, NEW_YORK_FOLD)) == 6

    def test_correction_of_the_clock_knows_no_policy(self) -> None:
        rule = Cron(expression="0 9 * * *", timezone="Pacific/Apia", gap="shift", fold="second")
        assert listed(rule, "2011-12-29", "2012-01-01") == [
            "2011-12-29T19:00",
            "2011-12-30T19:00",
            "2011-12-31T19:00",
        ]

    def test_run_held_back_until_the_second_pass_is_a_clock_change(self) -> None:
        rule = Cron(expression="30 1 * * *", timezone="America/New_York", fold="second")
        assert clock_change(rule, utc("2026-11-01T06:30")) == ClockChange(
            kind="fold", wall=local("2026-11-01T01:30"), fold="second"
        )
        assert clock_change(rule, utc("2026-11-01T07:30")) is None

    def test_run_in_both_passes_is_no_clock_change(self) -> None:
        rule = Cron(expression="30 1 * * *", timezone="America/New_York", fold="both")
        assert clock_change(rule, utc("2026-11-01T05:30")) is None
        assert clock_change(rule, utc("2026-11-01T06:30")) is None

    def test_change_of_one_rule_of_a_union_is_found(self) -> None:
        moved = Cron(expression="30 2 * * *", timezone="America/New_York")
        other = Cron(expression="0 7 * * *", timezone="UTC")
        assert clock_change(Union((other, moved)), utc("2026-03-08T07:00")) == ClockChange(
            kind="gap", wall=local("2026-03-08T02:30")
        )


class TestUnion:
    def test_instant_that_two_rules_name_comes_once(self) -> None:
        rule = Union(
            (
                Cron(expression="0 9 * * *", timezone="Asia/Jakarta"),
                Cron(expression="0 2,3 * * *", timezone="UTC"),
                Once(at=utc("2026-11-30T02:00")),
            )
        )
        window = ("2026-11-30T00:00", "2026-12-01T00:00")
        assert listed(rule, *window) == ["2026-11-30T02:00", "2026-11-30T03:00"]
        assert rule.count(*map(utc, window)) == 2
        assert rule.matches(utc("2026-11-30T03:00"))
        assert rule.previous_before(utc("2026-11-30T03:00")) == utc("2026-11-30T02:00")

    def test_ends_when_its_last_rule_has_ended(self) -> None:
        rule = Union((Once(at=utc("2026-01-01")), Once(at=utc("2026-02-01"))))
        assert rule.next_after(utc("2026-01-01")) == utc("2026-02-01")
        assert rule.next_after(utc("2026-02-01")) is None
        assert rule.previous_before(utc("2026-01-01")) is None

    def test_is_built_of_distinct_rules(self) -> None:
        one, other = Once(at=utc("2026-01-01")), Once(at=utc("2026-02-01"))
        assert union([one, other, one]) == Union((one, other))
        assert union([one, one]) == one

    @pytest.mark.parametrize("number", [0, 21])
    def test_number_of_rules_has_its_limits(self, number: int) -> None:
        rules = [Interval(seconds=60 + index, anchor=utc("2026-01-01")) for index in range(number)]
        with pytest.raises(TimetableError) as caught:
            union(rules)
        assert str(caught.value) == f"Timetable of {number} rules: must have from 1 to 20."

    def test_count_equals_the_listing_for_any_mix(self) -> None:
        pick = random.Random("union")
        for _ in range(60):
            zone = pick.choice(["America/New_York", "Australia/Lord_Howe", "UTC"])
            start = utc("2026-10-31T00:00") + timedelta(seconds=pick.randrange(200_000))
            end = start + timedelta(seconds=pick.randrange(300_000))
            fraction = timedelta(microseconds=pick.choice([0, 0, 250_000]))
            rules: list[Timetable] = [
                Cron(expression=oracle.random_rule(pick), timezone=zone),
                Cron(expression=oracle.random_rule(pick), timezone="Asia/Kathmandu"),
                Interval(
                    seconds=pick.choice([90, 240, 3600, 7000]),
                    anchor=utc("2026-10-31T12:00:30") + fraction,
                ),
                Interval(seconds=180, anchor=utc("2026-01-01T00:00")),
                Once(at=start + timedelta(seconds=pick.randrange(200_000))),
                every(1, "days", "2026-10-30T01:30", zone),
            ]
            rule = Union((Union(tuple(pick.sample(rules, 3))), *pick.sample(rules, 2)))
            assert rule.count(start, end) == len(list(rule.between(start, end))), (rule, start)

    def test_count_of_a_long_outage_is_quick(self) -> None:
        rule = Union(
            (
                Cron(expression="* * * * *", timezone="America/New_York"),
                Interval(seconds=60, anchor=utc("2026-01-01T00:00:30")),
            )
        )
        assert rule.count(utc("2026-01-01"), utc("2026-12-31")) == 2 * 364 * 1440


class TestPrevious:
    RULES = [
        Cron(expression="*/7 1-3 * * *", timezone="America/New_York"),
        Cron(expression="30 1,2 * * *", timezone="America/New_York"),
        Cron(expression="30 1,2 * * *", timezone="America/New_York", gap="skip", fold="both"),
        Interval(seconds=5400, anchor=utc("2026-03-01T00:00:07")),
        every(1, "days", "2026-03-02T02:30", "America/New_York"),
        Union(
            (
                Once(at=utc("2026-03-08T07:00:30")),
                Cron(expression="0 * * * *", timezone="Asia/Kathmandu"),
            )
        ),
    ]

    @pytest.mark.parametrize("rule", RULES)
    def test_walking_back_finds_what_walking_on_found(self, rule: Timetable) -> None:
        for start, end in [("2026-03-06", "2026-03-10"), ("2026-10-30", "2026-11-03")]:
            on = list(rule.between(utc(start), utc(end)))
            back = []
            at: datetime | None = utc(end) + timedelta(microseconds=1)
            while at is not None and (at := rule.previous_before(at)) and at > utc(start):
                back.append(at)
            assert back[::-1] == on

    @pytest.mark.parametrize("rule", RULES)
    def test_is_strictly_before(self, rule: Timetable) -> None:
        instant = rule.next_after(utc("2026-03-05"))
        assert instant is not None
        earlier = rule.previous_before(instant)
        assert earlier is None or earlier < instant
        assert rule.previous_before(instant + timedelta(microseconds=1)) == instant

    def test_rare_date_long_ago_uses_the_right_offset(self) -> None:
        rule = Cron(expression="0 12 29 2 *", timezone="Asia/Jakarta")
        assert rule.previous_before(utc("2104-02-29T05:00")) == utc("2096-02-29T05:00")

    def test_far_past_and_far_future_have_an_answer(self) -> None:
        rule = Cron(expression="0 0 * * *", timezone="Europe/Berlin")
        assert rule.previous_before(datetime.min.replace(tzinfo=UTC)) is None
        assert rule.previous_before(datetime.max.replace(tzinfo=UTC)) is not None


class TestMaxRuns:
    RULE = Cron(expression="0 3 * * *", timezone="UTC")

    def test_nothing_comes_after_the_last_run(self) -> None:
        after = utc("2026-01-01")
        assert first_after(self.RULE, after, max_runs=3, runs_so_far=2) == utc("2026-01-01T03:00")
        assert first_after(self.RULE, after, max_runs=3, runs_so_far=3) is None

    @pytest.mark.parametrize(
        ("so_far", "run", "following"),
        [
            (0, "2026-01-01T03:00", "2026-01-02T03:00"),
            (1, "2026-01-01T03:00", None),
            (2, None, None),
        ],
    )
    def test_plan_ends_with_the_last_run(
        self, so_far: int, run: str | None, following: str | None
    ) -> None:
        decided = plan(
            self.RULE,
            due_from=utc("2026-01-01T03:00"),
            now=utc("2026-01-01T03:00:01"),
            misfire_grace=timedelta(minutes=1),
            max_runs=2,
            runs_so_far=so_far,
        )
        assert decided.run == (utc(run) if run else None)
        assert decided.next == (utc(following) if following else None)

    def test_latest_of_a_union_is_its_newest(self) -> None:
        rule = Union((self.RULE, Interval(seconds=3600, anchor=utc("2026-01-01T00:30"))))
        newest = latest(rule, after=utc("2026-01-01"), until=utc("2026-01-05T03:00"))
        assert newest == utc("2026-01-05T03:00")


class TestMemos:
    def test_every_memo_has_a_bound(self) -> None:
        modules = [timetable, cron_calendar, cron_fields, cron_grammar, kinds, zone_walk, zones]
        memos = [
            (module.__name__, name, value.cache_parameters()["maxsize"])
            for module in modules
            for name, value in vars(module).items()
            if hasattr(value, "cache_parameters")
        ]
        assert len(memos) > 10
        assert [memo for memo in memos if memo[2] is None] == []

    def test_many_threads_get_the_same_instants_of_every_kind(self) -> None:
        rules = TestPrevious.RULES
        seen: list[list[object]] = []

        def compute() -> None:
            start, end = utc("2026-03-06"), utc("2026-03-10")
            seen.append(
                [
                    (
                        list(rule.between(start, end)),
                        rule.previous_before(end),
                        rule.count(start, end),
                    )
                    for rule in rules
                ]
            )

        kinds.forget_instants()
        threads = [threading.Thread(target=compute) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [seen[0]] * 8
