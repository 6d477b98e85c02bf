"""What ``schedulerctl`` says about spread, limits, calendars, clock changes and zone data."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import pytest

from distcron_app import nodes
from distcron_app.conf import Config
from distcron_app.models import Calendar, CalendarEntry, Node, Schedule
from distcron_app.timetable import tzdata_version
from tests.integration.schedulerctl_builders import ctl, make_node, make_run, make_schedule

pytestmark = pytest.mark.django_db

NEW_YORK = ("--tz", "America/New_York")


def instants(*words: str) -> list[str]:
    """Return the instants that ``next`` lists."""
    return [each["scheduled_at"] for each in ctl("next", *words, "--json").data["occurrences"]]


def codes(document: dict[str, Any]) -> list[str]:
    return [one["code"] for one in document["marks"]]


def new_year(**values: Any) -> Calendar:
    calendar = Calendar.objects.create(name="holidays", timezone="Asia/Jakarta", **values)
    CalendarEntry.objects.create(
        calendar=calendar, first=date(2090, 1, 1), last=date(2090, 1, 1), summary="New Year"
    )
    return calendar


class TestRules:
    def test_several_rules_are_one_timetable(self) -> None:
        words = ("0 9 * * *", "0 9,17 * * *", "--tz", "UTC", "--from", "2027-01-01", "-n3")

        assert instants(*words) == [
            "2027-01-01T09:00:00Z",
            "2027-01-01T17:00:00Z",
            "2027-01-02T09:00:00Z",
        ]

    def test_rules_may_stand_in_lines_of_one_argument(self) -> None:
        words = ("--tz", "UTC", "--from", "2027-01-01", "-n3")

        in_lines = ctl("next", "0 9 * * *\n\n 0 17 * * *", *words, "--json").data

        assert in_lines["rule"] == "0 9 * * *\n0 17 * * *"
        assert in_lines == ctl("next", "0 9 * * *", "0 17 * * *", *words, "--json").data

    def test_the_gap_policy_leaves_an_instant_out(self) -> None:
        words = ("30 2 * * *", *NEW_YORK, "--from", "2027-03-14", "-n1")

        assert instants(*words) == ["2027-03-14T07:00:00Z"]
        assert instants(*words, "--gap", "skip") == ["2027-03-15T06:30:00Z"]

    @pytest.mark.parametrize(
        ("fold", "expected"),
        [
            ("first", ["2027-11-07T05:30:00Z", "2027-11-08T06:30:00Z"]),
            ("second", ["2027-11-07T06:30:00Z", "2027-11-08T06:30:00Z"]),
            ("both", ["2027-11-07T05:30:00Z", "2027-11-07T06:30:00Z"]),
        ],
    )
    def test_the_fold_policy_chooses_the_pass(self, fold: str, expected: list[str]) -> None:
        words = ("30 1 * * *", *NEW_YORK, "--from", "2027-11-07", "-n2", "--fold", fold)

        assert instants(*words) == expected

    @pytest.mark.parametrize(
        ("words", "error"),
        [
            (["@daily", "--gap", "jump"], "Gap 'jump': not known. Choose one of shift, skip."),
            (["@daily", "--fold", "x"], "Fold 'x': not known. Choose one of first, second, both."),
            (["@daily", "0 25 * * *"], "Hour '25': must be from 0 to 23"),
            (["0 0 * * *\n"] * 11, "11 rules: at most 10, one in each line."),
            (["\n"], "Cron rule"),
        ],
    )
    def test_refuses_what_it_cannot_read(self, words: list[str], error: str) -> None:
        answer = ctl("next", *words)

        assert error in answer.error
        assert (answer.code, answer.out) == (2, "")

    def test_policies_are_refused_for_a_stored_schedule(self) -> None:
        make_schedule()

        answer = ctl("next", "invoice-close", "--gap", "skip")

        assert answer.code == 2
        assert answer.error == (
            "schedule 'invoice-close': has its own gap and fold. Leave out --gap and --fold."
        )

    def test_what_holds_for_all_instants_stands_below_them(self) -> None:
        lines = ctl("next", "0 0 31 * mon", "--tz", "UTC", "-n2").lines

        assert lines[-2:] == [
            "⚠ Day or weekday: it runs on dates that fit either of them, not only both.",
            "⚠ Months without a 31st are left out. L is the last day of any month.",
        ]

    @pytest.mark.parametrize(
        ("rule", "code"),
        [
            ("0 0 1 * mon", "either"),
            ("*/7 * * * *", "uneven"),
            ("0 0 30 * *", "missing_days"),
            ("0 0 * 2 mon#5", "rare"),
        ],
    )
    def test_json_has_the_codes_of_the_marks(self, rule: str, code: str) -> None:
        assert code in codes(ctl("next", rule, "--tz", "UTC", "--json").data)

    def test_a_calendar_interval_has_a_rule_in_text(self) -> None:
        make_schedule(
            kind="calendar",
            cron="",
            calendar_every=2,
            calendar_unit="weeks",
            calendar_date=date(2027, 1, 31),
            calendar_time=time(9),
        )

        document = ctl("next", "invoice-close", "--json").data

        assert document["rule"] == "2 weeks from 2027-01-31T09:00"


class TestSchedules:
    def test_an_excluded_instant_is_shown_as_skipped_and_why(self) -> None:
        make_schedule(calendar=new_year())

        lines = ctl("next", "invoice-close", "--from", "2090-01-01", "-n2", "--utc").lines

        assert lines[1].endswith("⤼ skipped: 2090-01-01 is excluded: New Year")
        assert "skipped" not in lines[2]

    def test_json_says_why_an_instant_is_excluded(self) -> None:
        make_schedule(calendar=new_year())

        words = ("next", "invoice-close", "--from", "2090-01-01", "-n2", "--json")
        first, second = ctl(*words).data["occurrences"]

        assert first["excluded"] == "2090-01-01 is excluded: New Year"
        assert second["excluded"] == ""

    def test_an_instant_that_was_moved_is_marked(self) -> None:
        make_schedule(calendar=new_year(weekdays="7"), calendar_action="next")

        words = ("next", "invoice-close", "--from", "2090-01-02", "-n1", "--json")
        (first,) = ctl(*words).data["occurrences"]

        # 1 January 2090 is a Sunday; the 02:00 of Monday stands for both.
        assert (first["scheduled_at"], first["excluded"]) == ("2090-01-01T19:00:00Z", "")

    def test_a_spread_schedule_shows_when_each_occurrence_is_due(self) -> None:
        schedule = make_schedule(spread_seconds=600, spread_key="tenant-7")
        at = datetime(2090, 1, 1, 19, tzinfo=UTC)
        due_at = schedule.spread(at)

        answer = ctl("next", "invoice-close", "--from", "2090-01-02", "-n1", "--utc")

        assert at < due_at < at + timedelta(minutes=10)
        assert f"  starts {due_at:%H:%M:%S} UTC" in answer.lines[1]
        assert answer.lines[2] == "Each starts up to 600 s later: the same delay each time."

    def test_json_has_the_time_that_is_due(self) -> None:
        schedule = make_schedule(spread_seconds=600)
        at = datetime(2090, 1, 1, 19, tzinfo=UTC)

        words = ("next", "invoice-close", "--from", "2090-01-02", "-n1", "--json")
        document = ctl(*words).data

        assert document["spread_seconds"] == 600
        due_at = datetime.fromisoformat(document["occurrences"][0]["due_at"])
        assert due_at == schedule.spread(at)

    def test_no_more_instants_than_runs_are_left(self) -> None:
        schedule = make_schedule(max_runs=10)
        Schedule.objects.filter(pk=schedule.pk).update(runs_planned=8)

        lines = ctl("next", "invoice-close").lines

        assert len(lines) == 4
        assert lines[3] == "8 of 10 runs are done; then it is finished."

    def test_many_others_at_the_same_second_are_a_herd(self) -> None:
        for number in range(21):
            make_schedule(f"s{number}")

        assert codes(ctl("next", "s0", "--json").data) == ["herd"]

    def test_a_schedule_that_is_spread_is_in_no_herd(self) -> None:
        for number in range(22):
            make_schedule(f"s{number}", spread_seconds=60 if number else 0)

        assert codes(ctl("next", "s0", "--json").data) == []
        assert codes(ctl("next", "s1", "--json").data) == []

    def test_runs_that_take_longer_than_the_period_are_marked(self) -> None:
        schedule = make_schedule(cron="* * * * *")
        began = datetime(2027, 1, 1, tzinfo=UTC)
        for _number in range(3):
            make_run(
                schedule,
                "succeeded",
                started_at=began,
                finished_at=began + timedelta(seconds=61),
            )

        assert codes(ctl("next", "invoice-close", "--json").data) == ["overlap"]


def make_quick() -> None:
    """Insert a schedule of every minute, planned long ago."""
    make_schedule("quick", cron="* * * * *")
    long_ago = datetime(2026, 1, 1, tzinfo=UTC)
    Schedule.objects.filter(key="quick").update(next_run_at=long_ago, planned_from=long_ago)


class TestForecast:
    def test_says_how_many_runs_come(self) -> None:
        make_quick()
        make_schedule("paused", cron="* * * * *", state="paused")

        lines = ctl("forecast", "--hours", "2", "--utc").lines

        assert lines[0].split() == ["HOUR", "RUNS"]
        assert lines[-1] == "120 runs in 2 h, of 1 active schedule."
        assert "Busiest minutes:" in lines

    def test_the_busiest_hour_has_the_longest_bar(self) -> None:
        make_quick()

        lines = ctl("forecast", "--no-header", "--utc").lines

        assert lines[1].endswith("  60  " + "▓" * 40)

    def test_without_schedules_nothing_comes(self) -> None:
        answer = ctl("forecast", "--hours", "1")

        assert (answer.code, answer.lines[-1]) == (
            0,
            "0 runs in 1 h, of 0 active schedules.",
        )
        assert "Busiest minutes:" not in answer.out

    def test_json_has_these_keys(self) -> None:
        make_quick()

        document = ctl("forecast", "--hours", "3", "--utc", "--json").data

        assert document.pop("minutes") == [1] * 180
        assert sum(each["count"] for each in document.pop("by_hour")) == 180
        first = document.pop("start")
        assert document.pop("busiest")[0] == {"at": first, "count": 1}
        assert document == {
            "version": 1,
            "verb": "forecast",
            "hours": 3,
            "schedules": 1,
            "total": 180,
        }

    @pytest.mark.parametrize("hours", ["0", "745", "x"])
    def test_refuses_hours_beyond_a_month(self, hours: str) -> None:
        answer = ctl("forecast", "--hours", hours)

        assert f"got '{hours}', allowed 1 to 744" in answer.error


class TestZoneData:
    def test_a_node_registers_with_the_version_of_its_zone_data(self) -> None:
        node_id = nodes.register(Config())

        assert Node.objects.get(pk=node_id).zone_data == tzdata_version()

    def test_nodes_that_differ_are_shown_with_a_warning(self) -> None:
        make_node("a", zone_data="2025b")
        make_node("b", zone_data="2026f")

        answer = ctl("nodes")

        assert answer.code == 0
        assert answer.error == (
            "warning: nodes use different time zone data: 2026f, 2025b; update the tzdata package\n"
        )
        assert "ZONE DATA" in answer.lines[0]
        assert "  2025b  " in answer.lines[1]

    def test_nodes_that_agree_show_no_zone_data(self) -> None:
        make_node("a", zone_data="2026f")
        make_node("b", zone_data="2026f")
        make_node("c", zone_data="2025b", state="left")

        answer = ctl("nodes", "--all")

        assert answer.error == ""
        assert "ZONE DATA" not in answer.out

    def test_json_has_the_warning_and_the_version(self) -> None:
        make_node("a", zone_data="2025b")
        make_node("b", zone_data="2026f")

        document = ctl("nodes", "--json").data

        assert [each["zone_data"] for each in document["nodes"]] == ["2025b", "2026f"]
        assert document["warnings"] == [
            "nodes use different time zone data: 2026f, 2025b; update the tzdata package"
        ]

    def test_status_warns_and_is_well(self) -> None:
        make_node("a", zone_data="2025b")
        make_node("b", zone_data="2026f")

        answer = ctl("status")

        assert answer.code == 0
        assert (
            "⚠ warning  zone data       nodes use different time zone data: 2026f, 2025b; "
            "update the tzdata package\n"
        ) in answer.out
