"""Building timetables and asking them for instants."""

from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from distcron_app import timetable
from distcron_app.errors import TimetableError
from distcron_app.timetable import ClockChange, Cron, Interval, Once, build, first_after, latest

ANCHOR = datetime(2026, 11, 29, 10, 0, 7, tzinfo=UTC)
EVERY_90_S = Interval(seconds=90, anchor=ANCHOR)
CHRISTMAS = datetime(2026, 12, 25, 8, 30, tzinfo=UTC)
ALL_KINDS = [
    Cron(expression="*/5 * * * *", timezone="America/New_York"),
    EVERY_90_S,
    Once(at=CHRISTMAS),
]


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def cron(expression: str, zone: str = "UTC") -> Cron:
    return Cron(expression=expression, timezone=zone)


class TestBuild:
    def test_cron_is_stored_in_canonical_form(self) -> None:
        built = build(kind="cron", cron=" @Daily ", timezone="Asia/Jakarta")
        assert built == Cron(expression="0 0 * * *", timezone="Asia/Jakarta")

    def test_interval_counts_from_1970_without_an_anchor(self) -> None:
        built = build(kind="interval", interval_seconds=90)
        assert built == Interval(seconds=90, anchor=utc("1970-01-01T00:00"))

    def test_anchor_is_converted_to_utc(self) -> None:
        jakarta = datetime(2026, 11, 29, 17, 0, 7, tzinfo=timezone(timedelta(hours=7)))
        built = build(kind="interval", interval_seconds=90, interval_anchor=jakarta)
        assert isinstance(built, Interval)
        assert built.anchor.tzinfo is UTC
        assert built == EVERY_90_S

    def test_once_is_converted_to_utc(self) -> None:
        berlin = datetime(2026, 12, 25, 9, 30, tzinfo=ZoneInfo("Europe/Berlin"))
        assert build(kind="once", run_at=berlin) == Once(at=CHRISTMAS)

    def test_columns_of_other_kinds_are_ignored(self) -> None:
        built = build(kind="once", run_at=CHRISTMAS, cron="nonsense", interval_seconds=-1)
        assert built == Once(at=CHRISTMAS)

    @pytest.mark.parametrize(
        ("given", "field", "message"),
        [
            (
                {"kind": "daily"},
                "kind",
                "Kind 'daily': not known. Choose one of cron, calendar, interval, once, manual.",
            ),
            (
                {"kind": "interval"},
                "interval_seconds",
                "Interval 'None': must be a whole number of seconds from 1 to 31536000.",
            ),
            (
                {"kind": "interval", "interval_seconds": 0},
                "interval_seconds",
                "Interval '0': must be a whole number of seconds from 1 to 31536000.",
            ),
            (
                {"kind": "interval", "interval_seconds": 31_536_001},
                "interval_seconds",
                "Interval '31536001': must be a whole number of seconds from 1 to 31536000.",
            ),
            (
                {"kind": "interval", "interval_seconds": True},
                "interval_seconds",
                "Interval 'True': must be a whole number of seconds from 1 to 31536000.",
            ),
            (
                {
                    "kind": "interval",
                    "interval_seconds": 60,
                    "interval_anchor": datetime(2026, 1, 1),  # noqa: DTZ001
                },
                "interval_anchor",
                "Time '2026-01-01 00:00:00': must be an aware datetime. "
                "Give a date, a time and a time zone.",
            ),
            (
                {"kind": "once"},
                "run_at",
                "Time: missing. Give a date, a time and a time zone.",
            ),
            (
                {"kind": "once", "run_at": "tomorrow"},
                "run_at",
                "Time 'tomorrow': must be an aware datetime. Give a date, a time and a time zone.",
            ),
            (
                {"kind": "once", "run_at": CHRISTMAS, "timezone": "Mars/Base"},
                "timezone",
                "Time zone 'Mars/Base': not known. Write an IANA name such as Asia/Jakarta.",
            ),
        ],
    )
    def test_refusal_names_the_field(
        self, given: dict[str, object], field: str, message: str
    ) -> None:
        with pytest.raises(TimetableError) as caught:
            build(**given)  # type: ignore[arg-type]
        assert caught.value.field == field
        assert str(caught.value) == message


class TestEveryKind:
    @pytest.mark.parametrize("rule", ALL_KINDS)
    def test_naive_instant_is_refused(self, rule: timetable.Timetable) -> None:
        naive = datetime(2026, 1, 1)  # noqa: DTZ001
        with pytest.raises(ValueError, match="has no time zone"):
            rule.next_after(naive)
        with pytest.raises(ValueError, match="has no time zone"):
            rule.matches(naive)
        with pytest.raises(ValueError, match="has no time zone"):
            list(rule.between(naive, naive))

    @pytest.mark.parametrize("rule", ALL_KINDS)
    def test_instants_come_out_in_utc_from_any_zone(self, rule: timetable.Timetable) -> None:
        jakarta = utc("2026-11-29T10:00").astimezone(ZoneInfo("Asia/Jakarta"))
        instant = rule.next_after(jakarta)
        assert instant is not None
        assert instant.tzinfo is UTC
        assert instant == rule.next_after(utc("2026-11-29T10:00"))

    @pytest.mark.parametrize("rule", ALL_KINDS)
    def test_next_is_strictly_later_than_the_instant_itself(
        self, rule: timetable.Timetable
    ) -> None:
        instant = rule.next_after(utc("2026-11-29T10:00"))
        assert instant is not None
        later = rule.next_after(instant)
        assert later is None or later > instant

    @pytest.mark.parametrize("rule", ALL_KINDS)
    def test_only_instants_match(self, rule: timetable.Timetable) -> None:
        instant = rule.next_after(utc("2026-11-29T10:00"))
        assert instant is not None
        assert rule.matches(instant)
        assert rule.matches(instant.astimezone(ZoneInfo("Asia/Kathmandu")))
        assert not rule.matches(instant + timedelta(microseconds=1))
        assert not rule.matches(instant - timedelta(seconds=1))


class TestInterval:
    def test_anchor_is_the_first_instant(self) -> None:
        assert EVERY_90_S.next_after(utc("2020-01-01T00:00")) == ANCHOR
        assert EVERY_90_S.next_after(ANCHOR - timedelta(microseconds=1)) == ANCHOR

    def test_next_keeps_the_phase_of_the_anchor(self) -> None:
        assert EVERY_90_S.next_after(utc("2026-11-29T10:05:00")) == utc("2026-11-29T10:06:07")
        assert EVERY_90_S.next_after(utc("2026-11-29T10:06:07")) == utc("2026-11-29T10:07:37")

    def test_between_excludes_the_start_and_includes_the_end(self) -> None:
        found = list(EVERY_90_S.between(ANCHOR, utc("2026-11-29T10:03:07")))
        assert found == [utc("2026-11-29T10:01:37"), utc("2026-11-29T10:03:07")]
        assert EVERY_90_S.count(ANCHOR, utc("2026-11-29T10:03:07")) == 2

    def test_count_starts_at_the_anchor(self) -> None:
        assert EVERY_90_S.count(utc("2000-01-01T00:00"), ANCHOR) == 1
        assert EVERY_90_S.count(utc("2000-01-01T00:00"), utc("2001-01-01T00:00")) == 0

    def test_ends_with_the_calendar(self) -> None:
        rule = Interval(seconds=31_536_000, anchor=ANCHOR)
        assert rule.next_after(utc("9999-12-31T00:00")) is None


class TestOnce:
    def test_comes_exactly_once(self) -> None:
        rule = Once(at=CHRISTMAS)
        assert rule.next_after(utc("2026-01-01T00:00")) == CHRISTMAS
        assert rule.next_after(CHRISTMAS) is None
        assert list(rule.between(utc("2026-01-01T00:00"), CHRISTMAS)) == [CHRISTMAS]
        assert rule.count(utc("2026-01-01T00:00"), CHRISTMAS) == 1
        assert rule.count(CHRISTMAS, utc("2027-01-01T00:00")) == 0

    def test_has_no_period(self) -> None:
        assert Once(at=CHRISTMAS).period_after(utc("2026-01-01T00:00")) is None


class TestCron:
    def test_limit_ends_a_listing(self) -> None:
        found = list(cron("0 * * * *").between(utc("2026-01-01T00:00"), CHRISTMAS, limit=2))
        assert found == [utc("2026-01-01T01:00"), utc("2026-01-01T02:00")]
        assert list(cron("0 * * * *").between(utc("2026-01-01T00:00"), CHRISTMAS, limit=0)) == []

    def test_period_is_the_distance_of_the_next_two_instants(self) -> None:
        assert cron("0 9 * * 1-5").period_after(utc("2026-11-26T12:00")) == timedelta(days=3)

    def test_period_follows_the_clock_change(self) -> None:
        rule = cron("0 12 * * *", "Europe/Berlin")
        assert rule.period_after(utc("2026-03-27T12:00")) == timedelta(hours=23)

    def test_start_with_a_fraction_of_a_second_loses_nothing(self) -> None:
        rule = cron("0 3 * * *")
        assert rule.next_after(utc("2026-01-01T02:59:59.999999")) == utc("2026-01-01T03:00")
        assert rule.next_after(utc("2026-01-01T03:00:00.400000")) == utc("2026-01-02T03:00")

    def test_next_strictly_increases_through_both_changes_west_of_greenwich(self) -> None:
        for expression in ["*/5 * * * *", "30 1 * * *", "15,45 2 * * *", "0 * * * *"]:
            rule = cron(expression, "America/New_York")
            for start, end in [
                (utc("2026-03-07T00:00"), utc("2026-03-10T00:00")),
                (utc("2026-10-31T00:00"), utc("2026-11-03T00:00")),
            ]:
                assert all(one < two for one, two in pairwise(rule.between(start, end)))

    def test_every_five_minutes_is_never_further_than_300_s_away(self) -> None:
        rule = cron("*/5 * * * *", "America/New_York")
        start = utc("2026-11-01T00:00")
        for minute in range(0, 2880, 7):
            at = start + timedelta(minutes=minute)
            instant = rule.next_after(at)
            assert instant is not None
            assert timedelta(0) < instant - at <= timedelta(seconds=300)

    def test_missing_day_is_not_made_up(self) -> None:
        rule = cron("0 9 * * *", "Pacific/Apia")
        found = list(rule.between(utc("2011-12-29T00:00"), utc("2012-01-01T00:00")))
        assert found == [utc("2011-12-29T19:00"), utc("2011-12-30T19:00"), utc("2011-12-31T19:00")]

    def test_fold_of_exactly_3_hours_runs_a_fixed_rule_once(self) -> None:
        rule = cron("6 23 * * *", "Antarctica/Casey")
        found = list(rule.between(utc("2018-03-10T00:00"), utc("2018-03-12T00:00")))
        assert found == [utc("2018-03-10T12:06"), utc("2018-03-11T15:06")]

    def test_rare_date_far_away_uses_the_right_offset(self) -> None:
        rule = cron("0 12 29 2 *", "Asia/Jakarta")
        assert rule.next_after(utc("2096-03-01T00:00")) == utc("2104-02-29T05:00")

    def test_far_past_and_far_future_have_an_answer(self) -> None:
        rule = cron("0 0 * * *", "Europe/Berlin")
        assert rule.next_after(datetime.max.replace(tzinfo=UTC)) is None
        assert rule.next_after(datetime.min.replace(tzinfo=UTC)) is not None
        assert rule.count(utc("9000-01-01T00:00"), datetime.max.replace(tzinfo=UTC)) > 360_000

    def test_count_does_not_list(self) -> None:
        rule = cron("* * * * *", "Europe/London")
        assert rule.count(utc("1990-01-01T00:00"), utc("2020-01-01T00:00")) == 15_778_080

    def test_refused_text_in_a_value_raises_our_error(self) -> None:
        with pytest.raises(TimetableError):
            cron("61 * * * *").next_after(CHRISTMAS)
        with pytest.raises(TimetableError):
            cron("0 * * * *", "../../etc/passwd").next_after(CHRISTMAS)


class TestBounds:
    RULE = Cron(expression="0 3 * * *", timezone="UTC")

    def test_first_is_not_before_starts_at(self) -> None:
        found = first_after(self.RULE, utc("2026-01-01T00:00"), starts_at=utc("2026-02-01T03:00"))
        assert found == utc("2026-02-01T03:00")

    def test_starts_at_in_the_past_changes_nothing(self) -> None:
        found = first_after(self.RULE, utc("2026-01-01T03:00"), starts_at=utc("2025-02-01T03:00"))
        assert found == utc("2026-01-02T03:00")

    def test_ends_at_is_included(self) -> None:
        after = utc("2026-01-01T12:00")
        end = utc("2026-01-02T03:00")
        assert first_after(self.RULE, after, ends_at=end) == end
        assert first_after(self.RULE, after, ends_at=end - timedelta(seconds=1)) is None

    def test_latest_is_the_newest_up_to_and_including_until(self) -> None:
        after = utc("2026-01-01T12:00")
        assert latest(self.RULE, after=after, until=utc("2026-03-01T03:00")) == utc(
            "2026-03-01T03:00"
        )
        assert latest(self.RULE, after=after, until=utc("2026-03-01T02:59")) == utc(
            "2026-02-28T03:00"
        )
        assert latest(self.RULE, after=after, until=utc("2026-01-02T02:00")) is None


class TestClockChange:
    def test_run_moved_by_a_gap_names_the_missing_wall_time(self) -> None:
        rule = cron("30 2 * * *", "America/New_York")
        assert timetable.clock_change(rule, utc("2026-03-08T07:00")) == ClockChange(
            kind="gap",
            wall=datetime(2026, 3, 8, 2, 30),  # noqa: DTZ001
        )

    def test_run_in_the_first_pass_of_a_fold_names_the_repeated_wall_time(self) -> None:
        rule = cron("30 1 * * *", "America/New_York")
        assert timetable.clock_change(rule, utc("2026-11-01T05:30")) == ClockChange(
            kind="fold",
            wall=datetime(2026, 11, 1, 1, 30),  # noqa: DTZ001
        )

    @pytest.mark.parametrize(
        ("expression", "at"),
        [
            ("0 3 * * *", "2026-03-08T07:00"),  # a real slot at the end of the gap
            ("30 2 * * *", "2026-03-09T06:30"),  # the day after
            ("30 2 * * *", "2026-11-01T07:30"),  # after the fold
            ("0 2 * * *", "2026-11-01T07:00"),  # the first minute after the fold
            ("*/30 * * * *", "2026-11-01T05:30"),  # a wildcard runs in both passes
            ("30 1 * * *", "2026-11-01T06:30"),  # not an instant of the rule
        ],
    )
    def test_other_instants_are_unchanged(self, expression: str, at: str) -> None:
        assert timetable.clock_change(cron(expression, "America/New_York"), utc(at)) is None

    def test_only_cron_rules_are_touched(self) -> None:
        assert timetable.clock_change(EVERY_90_S, ANCHOR) is None
