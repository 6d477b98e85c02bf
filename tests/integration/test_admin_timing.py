"""Every field that decides when a schedule runs, through the admin's form."""

from __future__ import annotations

from datetime import date, time
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from distcron_app.models import AuditEntry, Calendar, Schedule
from tests.factories import make_schedule, make_user

pytestmark = pytest.mark.django_db

ADD = "admin:distcron_schedule_add"


@pytest.fixture
def admin() -> Client:
    client = Client()
    client.force_login(make_user(username="siti", is_superuser=True))
    return client


def new(**values: Any) -> dict[str, Any]:
    return {
        "name": "Report",
        "key": "report",
        "job": "project.demo.heartbeat",
        "arguments": "",
        "kind": "cron",
        "cron": "30 2 * * *",
        "timezone": "Asia/Jakarta",
        "delivery": "at_most_once",
    } | values


def change(schedule: Schedule, **values: Any) -> dict[str, Any]:
    kept = new(name=schedule.name, key=schedule.key, seen_version=schedule.version)
    return kept | values


def url(schedule: Schedule) -> str:
    return reverse("admin:distcron_schedule_change", args=[schedule.pk])


def month_ends(**values: Any) -> dict[str, Any]:
    rule = {
        "kind": "calendar",
        "cron": "",
        "calendar_every": "1",
        "calendar_unit": "months",
        "calendar_date": "2027-01-31",
        "calendar_time": "09:30",
    }
    return new(**rule | values)


def every_field(calendar: Calendar) -> dict[str, str]:
    return {
        "max_runs": "12",
        "calendar": str(calendar.pk),
        "calendar_action": "next",
        "spread_seconds": "600",
        "spread_by": "random",
        "spread_key": "tenant-7",
        "gap": "skip",
        "fold": "both",
    }


def test_every_field_is_stored_and_shown_again(admin: Client) -> None:
    sent = month_ends(**every_field(Calendar.objects.create(name="Holidays")))
    assert admin.post(reverse(ADD), sent).status_code == 302
    stored = Schedule.objects.get()
    assert (stored.calendar_every, stored.calendar_unit) == (1, "months")
    assert (stored.calendar_date, stored.calendar_time) == (date(2027, 1, 31), time(9, 30))
    assert (stored.max_runs, stored.calendar_action) == (12, "next")
    assert stored.calendar is not None and stored.calendar.name == "Holidays"
    assert (stored.spread_seconds, stored.spread_by, stored.spread_key) == (
        600,
        "random",
        "tenant-7",
    )
    assert (stored.gap, stored.fold) == ("skip", "both")
    page = admin.get(url(stored)).text
    for shown in ('value="2027-01-31"', 'value="09:30', 'value="12"', 'value="tenant-7"'):
        assert shown in page
    for chosen in ("months", "next", "random", "skip", "both"):
        assert f'<option value="{chosen}" selected>' in page


def test_every_field_is_in_the_audit_entry(admin: Client) -> None:
    schedule = make_schedule()
    sent = every_field(Calendar.objects.create(name="Holidays"))
    assert admin.post(url(schedule), change(schedule, **sent)).status_code == 302
    entry = AuditEntry.objects.get()
    assert entry.after == {
        "max_runs": 12,
        "calendar": "Holidays",
        "calendar_action": "next",
        "spread_seconds": 600,
        "spread_by": "random",
        "spread_key": "tenant-7",
        "gap": "skip",
        "fold": "both",
    }
    assert (entry.before["calendar"], entry.before["gap"]) == (None, "shift")


def test_days_and_times_are_in_the_audit_entry(admin: Client) -> None:
    admin.post(reverse(ADD), month_ends())
    after = AuditEntry.objects.get().after
    assert (after["calendar_date"], after["calendar_time"]) == ("2027-01-31", "09:30:00")


def test_several_rules_are_typed_in_several_lines(admin: Client) -> None:
    admin.post(reverse(ADD), new(cron=" 0 1 * * * \r\n\r\n0 2 * * mon\r\n"))
    schedule = Schedule.objects.get()
    assert schedule.cron == "0 1 * * *\n0 2 * * mon"
    assert "0 1 * * *\n0 2 * * mon</textarea>" in admin.get(url(schedule)).text


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"cron": "0 1 * * *\n0 25 * * *"}, "cron"),
        ({"cron": "0 1 * * *\n" * 11}, "cron"),
        ({"cron": "1" * 5000}, "cron"),
        ({"max_runs": "0"}, "max_runs"),
        ({"max_runs": "-1"}, "max_runs"),
        ({"calendar": "9"}, "calendar"),
        ({"calendar_action": "later"}, "calendar_action"),
        ({"spread_seconds": "86401"}, "spread_seconds"),
        ({"spread_seconds": "soon"}, "spread_seconds"),
        ({"spread_by": "dice"}, "spread_by"),
        ({"spread_key": "k" * 101}, "spread_key"),
        ({"gap": "jump"}, "gap"),
        ({"fold": "third"}, "fold"),
    ],
)
def test_an_error_is_on_the_field_that_is_wrong(
    admin: Client, values: dict[str, str], field: str
) -> None:
    page = admin.post(reverse(ADD), new(**values))
    assert list(page.context["adminform"].form.errors) == [field]
    assert Schedule.objects.count() == 0


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"calendar_every": ""}, "calendar_every"),
        ({"calendar_every": "0"}, "calendar_every"),
        ({"calendar_date": ""}, "calendar_date"),
        ({"calendar_date": "31.1."}, "calendar_date"),
        ({"calendar_time": "25:00"}, "calendar_time"),
        ({"calendar_unit": "years"}, "calendar_unit"),
    ],
)
def test_an_error_of_a_calendar_rule_is_on_the_field_that_is_wrong(
    admin: Client, values: dict[str, str], field: str
) -> None:
    page = admin.post(reverse(ADD), month_ends(**values))
    assert list(page.context["adminform"].form.errors) == [field]


def test_nothing_that_was_typed_is_lost_by_an_error(admin: Client) -> None:
    sent = every_field(Calendar.objects.create(name="Holidays")) | {"max_runs": "many"}
    page = admin.post(reverse(ADD), month_ends(**sent)).text
    for shown in ('value="many"', 'value="2027-01-31"', 'value="09:30"', 'value="tenant-7"'):
        assert shown in page
    for chosen in ("months", "next", "random", "skip", "both"):
        assert f'<option value="{chosen}" selected>' in page


def test_what_a_form_leaves_out_keeps_what_is_stored(admin: Client) -> None:
    schedule = make_schedule(spread_seconds=600, gap="skip")
    admin.post(url(schedule), change(schedule, notes="n"))
    stored = Schedule.objects.get()
    assert (stored.notes, stored.spread_seconds, stored.gap) == ("n", 600, "skip")


def test_an_empty_spread_is_none(admin: Client) -> None:
    schedule = make_schedule(spread_seconds=600)
    admin.post(url(schedule), change(schedule, spread_seconds=""))
    assert Schedule.objects.get().spread_seconds == 0


def test_a_stale_form_names_both_calendars(admin: Client) -> None:
    schedule = make_schedule(calendar=Calendar.objects.create(name="Holidays"))
    mine = Calendar.objects.create(name="Stock-taking")
    row = Schedule.objects.get()
    row.name = "Theirs"
    row.save()
    page = admin.post(url(schedule), change(schedule, calendar=mine.pk))
    assert "stored is “Holidays”, you typed “Stock-taking”" in page.text
    stored = Schedule.objects.get()
    assert stored.calendar is not None and stored.calendar.name == "Holidays"


def test_a_new_limit_below_the_runs_so_far_is_refused(admin: Client) -> None:
    schedule = make_schedule()
    Schedule.objects.filter(pk=schedule.pk).update(runs_planned=3)
    page = admin.post(url(schedule), change(schedule, max_runs="2", seen_version=schedule.version))
    assert list(page.context["adminform"].form.errors) == ["max_runs"]
