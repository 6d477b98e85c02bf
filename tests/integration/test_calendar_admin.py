"""Calendars in the admin: days by hand or from a file, audited, and never lost by accident."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.urls import reverse

from distcron_app.models import AuditEntry, Calendar, CalendarEntry, Schedule
from tests.factories import make_schedule, make_user

pytestmark = pytest.mark.django_db

ADD = "admin:distcron_calendar_add"
LIST = "admin:distcron_calendar_changelist"
HOSTILE = "<script>alert('x')</script>"
EVENT = "BEGIN:VEVENT\r\nDTSTART;VALUE=DATE:{}\r\nSUMMARY:{}\r\nEND:VEVENT\r\n"


@pytest.fixture
def admin() -> Client:
    client = Client()
    client.force_login(make_user(username="siti", is_superuser=True))
    return client


def url(calendar: Calendar, view: str = "change") -> str:
    return reverse(f"admin:distcron_calendar_{view}", args=[calendar.pk])


def make_calendar(*days: str, **values: Any) -> Calendar:
    calendar = Calendar.objects.create(**{"name": "Holidays", "timezone": "UTC"} | values)
    for day in days:
        at = date.fromisoformat(day)
        CalendarEntry.objects.create(calendar=calendar, first=at, last=at)
    return calendar


def sent(*days: tuple[str, str, str], **values: Any) -> dict[str, Any]:
    """Return a form of new entries, each as (first, last, summary)."""
    form: dict[str, Any] = {
        "name": "Holidays",
        "timezone": "Asia/Jakarta",
        "weekdays": "",
        "entries-TOTAL_FORMS": len(days),
        "entries-INITIAL_FORMS": 0,
    }
    for number, (first, last, summary) in enumerate(days):
        row = {"first": first, "last": last, "summary": summary}
        form |= {f"entries-{number}-{name}": value for name, value in row.items()}
    return form | values


def changed(calendar: Calendar, **values: Any) -> dict[str, Any]:
    """Return the form of a stored calendar as its page shows it."""
    entries = list(calendar.entries.all())
    form = sent(
        *((str(each.first), str(each.last), each.summary) for each in entries),
        name=calendar.name,
        timezone=calendar.timezone,
        weekdays=calendar.weekdays,
    )
    form["entries-INITIAL_FORMS"] = len(entries)
    for number, each in enumerate(entries):
        form |= {f"entries-{number}-id": each.pk, f"entries-{number}-calendar": calendar.pk}
    return form | values


def ical(*events: tuple[str, str], name: str = "days.ics") -> SimpleUploadedFile:
    body = "".join(EVENT.format(day, summary) for day, summary in events)
    return SimpleUploadedFile(name, f"BEGIN:VCALENDAR\r\n{body}END:VCALENDAR\r\n".encode())


def stored() -> list[tuple[str, str, str]]:
    return [(str(e.first), str(e.last), e.summary) for e in CalendarEntry.objects.all()]


def errors(page: Any) -> dict[str, list[str]]:
    return {name: list(texts) for name, texts in page.context["adminform"].form.errors.items()}


# --- by hand -----------------------------------------------------------------


def test_a_calendar_is_added_with_its_days_and_audited_once(admin: Client) -> None:
    days = ("2027-01-01", "2027-01-01", "New Year"), ("2027-12-24", "2027-12-26", "")
    assert admin.post(reverse(ADD), sent(*days, weekdays="6,7")).status_code == 302
    assert stored() == list(days)
    entry = AuditEntry.objects.get()
    assert (entry.actor, entry.verb, entry.object_type) == ("siti", "add", "calendar")
    assert entry.after == {
        "name": "Holidays",
        "timezone": "Asia/Jakarta",
        "weekdays": "6,7",
        "entries": ["2027-01-01 New Year", "2027-12-24 – 2027-12-26"],
    }
    assert LogEntry.objects.count() == 1


@pytest.mark.parametrize(
    ("values", "field", "text"),
    [
        ({"timezone": "WIB"}, "timezone", "Did you mean Asia/Jakarta?"),
        ({"weekdays": "sat"}, "weekdays", "numbers from 1 to 7"),
        ({"weekdays": "8"}, "weekdays", "numbers from 1 to 7"),
        ({"name": ""}, "name", "required"),
    ],
)
def test_an_error_is_on_the_field_that_is_wrong(
    admin: Client, values: dict[str, str], field: str, text: str
) -> None:
    found = errors(admin.post(reverse(ADD), sent(**values)))
    assert list(found) == [field]
    assert text in found[field][0]
    assert Calendar.objects.count() == 0


def test_a_range_that_runs_backwards_is_refused_in_its_row(admin: Client) -> None:
    page = admin.post(reverse(ADD), sent(("2027-01-02", "2027-01-01", "x")))
    assert "Must not be before the first day." in page.text
    assert Calendar.objects.count() == 0


def test_a_change_is_audited_with_the_days_that_went_and_came(admin: Client) -> None:
    calendar = make_calendar("2027-01-01", "2027-05-01")
    form = changed(calendar, **{"entries-0-DELETE": "on", "entries-1-summary": "Labour Day"})
    assert admin.post(url(calendar), form).status_code == 302
    entry = AuditEntry.objects.get()
    assert entry.before == {"entries": ["2027-01-01", "2027-05-01"]}
    assert entry.after == {"entries": ["2027-05-01 Labour Day"]}


def test_saving_without_a_change_writes_nothing_and_plans_nothing(admin: Client) -> None:
    calendar = make_calendar("2027-01-01")
    schedule = make_schedule(calendar=calendar)
    assert admin.post(url(calendar), changed(calendar)).status_code == 302
    assert AuditEntry.objects.count() == 0
    assert Schedule.objects.get().next_run_at == schedule.next_run_at is not None


def test_a_new_day_plans_the_schedules_of_the_calendar_anew(admin: Client) -> None:
    calendar = make_calendar()
    make_schedule(calendar=calendar)
    other = make_schedule()
    form = changed(calendar) | sent(("2027-01-01", "2027-01-01", ""))
    admin.post(url(calendar), form)
    assert Schedule.objects.get(calendar=calendar).next_run_at is None
    assert Schedule.objects.get(pk=other.pk).next_run_at is not None


# --- from a file ---------------------------------------------------------------


def test_a_file_fills_a_new_calendar(admin: Client) -> None:
    file = ical(("20270101", "New Year"), ("20270501", "Labour Day"))
    assert admin.post(reverse(ADD), sent(ical=file)).status_code == 302
    assert stored() == [
        ("2027-01-01", "2027-01-01", "New Year"),
        ("2027-05-01", "2027-05-01", "Labour Day"),
    ]
    assert AuditEntry.objects.get().after["entries"] == [
        "2027-01-01 New Year",
        "2027-05-01 Labour Day",
    ]


def test_a_file_replaces_no_day_without_the_tick(admin: Client) -> None:
    calendar = make_calendar("2027-08-17")
    page = admin.post(url(calendar), changed(calendar, ical=ical(("20270101", "New Year"))))
    assert list(errors(page)) == ["replace"]
    assert "has 1 entry, which the file would replace" in page.text
    assert stored() == [("2027-08-17", "2027-08-17", "")]


def test_a_file_replaces_all_days_with_the_tick(admin: Client) -> None:
    calendar = make_calendar("2027-08-17")
    schedule = make_schedule(calendar=calendar)
    form = changed(calendar, ical=ical(("20270101", "New Year")), replace="on")
    assert admin.post(url(calendar), form).status_code == 302
    assert stored() == [("2027-01-01", "2027-01-01", "New Year")]
    entry = AuditEntry.objects.get()
    assert entry.before == {"entries": ["2027-08-17"]}
    assert entry.after == {"entries": ["2027-01-01 New Year"]}
    assert Schedule.objects.get(pk=schedule.pk).next_run_at is None


def test_an_error_in_the_file_names_its_line(admin: Client) -> None:
    page = admin.post(reverse(ADD), sent(ical=ical(("2027011", HOSTILE))))
    assert "line 3" in errors(page)["ical"][0]
    assert "<script>alert(" not in page.text
    assert Calendar.objects.count() == 0


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"x" * 1_000_001, "has 1000001 bytes, at most 1,000,000"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"BEGIN:VCALENDAR\r\nEND:VCALENDAR\r\n", "has no events"),
    ],
)
def test_another_file_is_refused(admin: Client, content: bytes, text: str) -> None:
    page = admin.post(reverse(ADD), sent(ical=SimpleUploadedFile("days.ics", content)))
    assert list(errors(page)) == ["ical"]
    assert text in errors(page)["ical"][0]
    assert Calendar.objects.count() == 0


def test_a_long_calendar_can_still_be_saved_and_replaced(admin: Client) -> None:
    start = date(2027, 1, 1)
    days = [(f"{start + timedelta(days=2 * number):%Y%m%d}", "Day") for number in range(300)]
    admin.post(reverse(ADD), sent(ical=ical(*days)))
    calendar = Calendar.objects.get()
    page = admin.get(url(calendar)).text
    assert "entries-0-first" not in page and "2027-01-01 Day" in page and "… and 100 more" in page
    form = {"name": "Renamed", "timezone": "UTC", "weekdays": ""}
    assert admin.post(url(calendar), form).status_code == 302
    assert (Calendar.objects.get().name, CalendarEntry.objects.count()) == ("Renamed", 300)
    assert len(AuditEntry.objects.get(verb="add").after["entries"]) == 51


# --- the list, deleting, permissions ----------------------------------------------


def test_the_list_shows_how_many_days_and_which_schedules(admin: Client) -> None:
    calendar = make_calendar("2027-01-01")
    CalendarEntry.objects.create(
        calendar=calendar, first=date(2027, 12, 24), last=date(2027, 12, 26)
    )
    make_schedule(calendar=calendar)
    make_schedule(calendar=calendar)
    page = admin.get(reverse(LIST)).text
    assert '<td class="field-days_listed">4</td>' in page
    assert f'?calendar__id__exact={calendar.pk}">2 schedules</a>' in page
    listed = admin.get(
        reverse("admin:distcron_schedule_changelist"), {"calendar__id__exact": calendar.pk}
    )
    assert len(listed.context["cl"].result_list) == 2


def test_a_calendar_names_the_schedules_that_use_it(admin: Client) -> None:
    calendar = make_calendar()
    schedule = make_schedule(calendar=calendar, name="Close invoices")
    page = admin.get(url(calendar)).text
    address = reverse("admin:distcron_schedule_change", args=[schedule.pk])
    assert f'<a href="{address}">Close invoices</a>' in page


def test_a_calendar_in_use_is_not_deleted_and_its_schedules_are_listed(admin: Client) -> None:
    calendar = make_calendar()
    make_schedule(calendar=calendar, name="Close invoices")
    page = admin.post(url(calendar, "delete"), {"post": "yes"})
    assert page.status_code == 200 and "Close invoices" in page.text
    admin.post(
        reverse(LIST),
        {"action": "delete_selected", "_selected_action": [calendar.pk], "post": "yes"},
    )
    assert Calendar.objects.count() == 1
    assert AuditEntry.objects.count() == 0


def test_deleting_a_free_calendar_is_audited(admin: Client) -> None:
    calendar = make_calendar("2027-01-01")
    admin.post(url(calendar, "delete"), {"post": "yes"})
    assert Calendar.objects.count() == CalendarEntry.objects.count() == 0
    entry = AuditEntry.objects.get()
    assert (entry.verb, entry.before["entries"]) == ("delete", ["2027-01-01"])
    shown = admin.get(reverse("admin:distcron_auditentry_change", args=[entry.pk]))
    assert "Holidays" in shown.text


def test_who_may_change_a_calendar_may_change_its_days() -> None:
    calendar = make_calendar("2027-01-01")
    client = Client()
    client.force_login(make_user("distcron.change_calendar"))
    form = changed(calendar, **{"entries-0-DELETE": "on"})
    assert client.post(url(calendar), form).status_code == 302
    assert stored() == []


def test_a_viewer_sees_the_days_and_changes_nothing() -> None:
    calendar = make_calendar("2027-01-01", weekdays="6,7")
    client = Client()
    client.force_login(make_user("distcron.view_calendar"))
    page = client.get(url(calendar)).text
    assert "6,7" in page and "Jan. 1, 2027" in page and 'type="file"' not in page
    assert client.post(url(calendar), changed(calendar, name="x")).status_code == 403
    assert client.post(reverse(ADD), sent()).status_code == 403


def test_hostile_names_are_inert(admin: Client) -> None:
    calendar = make_calendar(name=HOSTILE)
    CalendarEntry.objects.create(
        calendar=calendar, first=date(2027, 1, 1), last=date(2027, 1, 1), summary=HOSTILE
    )
    make_schedule(calendar=calendar, name=HOSTILE)
    for address in (reverse(LIST), url(calendar), url(calendar, "delete")):
        page = admin.get(address).text
        assert "<script>alert(" not in page, address
        assert "&lt;script&gt;" in page, address


@pytest.mark.parametrize("language", ["en", "id"])
def test_every_page_renders_in_both_languages(admin: Client, language: str) -> None:
    calendar = make_calendar("2027-01-01")
    admin.cookies["django_language"] = language
    for address in (reverse(LIST), reverse(ADD), url(calendar)):
        assert admin.get(address).status_code == 200
