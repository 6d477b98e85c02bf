"""What the pages say about spread, limits, calendars, clock changes and zone data."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import pytest
from django.test import Client

from distcron_app.models import Calendar, CalendarEntry, Run, Schedule
from tests.integration.pages_rows import node, run, schedule

pytestmark = pytest.mark.django_db


def shown(client: Client, target: Run | Schedule) -> str:
    answer = client.get(target.get_absolute_url())
    assert answer.status_code == 200
    return " ".join(answer.text.split())


def planned(at: datetime, **given: Any) -> Schedule:
    """Insert a schedule whose next instant is ``at``."""
    own = schedule(**given)
    Schedule.objects.filter(pk=own.pk).update(next_run_at=at)
    return own


def test_an_excluded_day_is_skipped_with_the_reason(admin_client: Client) -> None:
    calendar = Calendar.objects.create(name="Holidays & days off", timezone="Asia/Jakarta")
    day = date(2090, 1, 2)
    CalendarEntry.objects.create(calendar=calendar, first=day, last=day, summary="Closed <b>")
    at = datetime(2090, 1, 1, 19, tzinfo=UTC)
    html = shown(admin_client, planned(at, calendar=calendar, timezone="Asia/Jakarta"))
    assert "2090-01-02 is excluded: Closed &lt;b&gt;" in html
    assert html.count('class="dc-state dc-state--skipped"') == 1
    assert "<bdi>Holidays &amp; days off</bdi>" in html


def test_clock_changes_are_marked_beside_their_instant(admin_client: Client) -> None:
    at = datetime(2027, 3, 13, 7, 30, tzinfo=UTC)
    html = shown(admin_client, planned(at, cron="30 2 * * *", timezone="America/New_York"))
    assert html.count("dc-mark--gap") == 1
    assert "02:30 does not exist on 14 March 2027 in America/New_York" in html


def test_what_holds_for_the_whole_rule_is_said_once(admin_client: Client) -> None:
    html = shown(admin_client, schedule(cron="0 0 1 * mon"))
    assert html.count("Day or weekday: it runs on dates that fit either of them") == 1


def test_a_spread_schedule_shows_when_its_occurrences_are_due(admin_client: Client) -> None:
    at = datetime(2090, 1, 1, 2, tzinfo=UTC)
    own = planned(at, timezone="UTC", spread_seconds=600, spread_key="tenant-7")
    html = shown(admin_client, own)
    assert "starts up to 600 s later" in html
    assert "<code>tenant-7</code>" in html
    assert f"{own.spread(at):%H:%M:%S} UTC" in html


def test_the_limit_says_how_many_runs_there_were(admin_client: Client) -> None:
    own = schedule(max_runs=10)
    Schedule.objects.filter(pk=own.pk).update(runs_planned=7)
    html = shown(admin_client, own)
    assert "<dd>7 of 10 runs</dd>" in html
    listed = html.partition("dc-list--times")[2].partition("</ol>")[0]
    assert listed.count("<li>") == 3


def test_policies_that_are_not_usual_are_facts(admin_client: Client) -> None:
    usual = shown(admin_client, schedule("usual"))
    assert "Time that the clocks jump over" not in usual
    html = shown(admin_client, schedule("own", gap="skip", fold="both"))
    assert "<dt>Time that the clocks jump over</dt><dd>do not run</dd>" in html
    assert "<dt>Time that comes twice</dt><dd>run in both passes</dd>" in html


def test_a_calendar_interval_is_said_in_words(admin_client: Client) -> None:
    own = schedule(
        kind="calendar",
        cron="",
        timezone="UTC",
        calendar_every=2,
        calendar_unit="weeks",
        calendar_date=date(2027, 1, 31),
        calendar_time=time(9),
    )
    words = "Every 2 weeks on Sunday at 09:00 from 31 January 2027"
    assert f"<dt>Rule</dt><dd>{words}</dd>" in shown(admin_client, own)


def test_a_run_skipped_by_a_calendar_says_which_day(admin_client: Client) -> None:
    details = {"why": "2027-01-01 is excluded: New Year"}
    own = run(schedule(), "skipped", reason="calendar", details=details)
    html = shown(admin_client, own)
    assert "It did not run: 2027-01-01 is excluded: New Year." in html
    assert "The calendar of the schedule keeps it clear of such days." in html


@pytest.mark.parametrize("details", [None, [], {"why": 3}, {"why": ""}])
def test_a_run_skipped_by_a_calendar_needs_no_details(admin_client: Client, details: Any) -> None:
    own = run(schedule(), "skipped", reason="calendar", details=details)
    assert "It did not run: a calendar excludes the day." in shown(admin_client, own)


def test_a_run_skipped_while_paused_says_so(admin_client: Client) -> None:
    own = run(schedule(), "skipped", reason="paused")
    html = shown(admin_client, own)
    assert "It did not run: when it was due, its schedule was paused." in html


@pytest.mark.parametrize("reason", ["calendar", "paused"])
def test_the_filter_of_runs_finds_the_new_reasons(admin_client: Client, reason: str) -> None:
    own = run(schedule(), "skipped", reason=reason)
    html = admin_client.get("/cron/runs/?state=skipped&job=project.demo.heartbeat").text
    assert own.get_absolute_url() in html
    assert str(Run.Reason(reason).label) in html


def test_nodes_with_other_zone_data_are_shown(admin_client: Client) -> None:
    node("web-1", zone_data="2025b")
    node("web-2", zone_data="2026f")
    html = admin_client.get("/cron/nodes/").text
    assert "Nodes use different time zone data: 2026f, 2025b; update the tzdata package." in html
    assert ("zone data 2025b" in html, "zone data 2026f" in html) == (True, True)


def test_a_silent_node_does_not_count_for_zone_data(admin_client: Client) -> None:
    node("web-1", zone_data="2025b", lease_seconds=-1)
    node("web-2", zone_data="2026f")
    assert "zone data" not in admin_client.get("/cron/nodes/").text


def test_runs_longer_than_the_period_are_marked(admin_client: Client) -> None:
    own = schedule(cron="* * * * *")
    began = datetime(2027, 1, 1, tzinfo=UTC)
    run(own, started_at=began, finished_at=began + timedelta(seconds=61))
    assert "Runs take up to 61 s, but the next one starts after 60 s." in shown(admin_client, own)
