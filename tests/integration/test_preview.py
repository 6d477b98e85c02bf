"""The preview of the schedule form: what will run, from what is typed, and nothing stored."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import time_machine
from django.conf import settings
from django.db import connection
from django.http import QueryDict
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import translation

import distcron_app
from distcron_app.admin.preview import Preview, preview
from distcron_app.instants import database_now
from distcron_app.models import AuditEntry, Calendar, CalendarEntry, Run, Schedule
from tests.factories import make_run, make_schedule, make_user

pytestmark = pytest.mark.django_db

PREVIEW = "admin:distcron_schedule_preview"
ADD = "admin:distcron_schedule_add"
HOSTILE = "<script>alert('x')</script>"
NOW = "2027-01-15T12:00:00+00:00"


@pytest.fixture
def admin() -> Client:
    client = Client()
    client.force_login(make_user(username="siti", is_superuser=True))
    return client


def typed(**values: Any) -> dict[str, Any]:
    return {"kind": "cron", "cron": "30 2 * * *", "timezone": "Asia/Jakarta"} | values


def shown(instance: Schedule | None = None, **values: Any) -> Preview:
    """Return the preview of what is typed, as of the middle of January 2027."""
    with time_machine.travel(NOW, tick=False), translation.override("en"):
        return preview(posted(**values), instance)


def posted(**values: Any) -> QueryDict:
    data = QueryDict(mutable=True)
    data.update(typed(**values))
    return data


def utc(found: Preview) -> list[str]:
    return [row.at.removesuffix(":00+00:00") for row in found.rows]


# --- what is shown ------------------------------------------------------------


def test_the_next_ten_instants_are_shown_in_the_zone_in_utc_and_how_soon() -> None:
    found = shown()
    assert found.words == "At 02:30 every day"
    assert len(found.rows) == 10
    first = found.rows[0]
    assert (first.local, first.utc) == ("Sat 16 Jan 02:30 WIB", "Fri 15 Jan 19:30 UTC")
    assert first.relative == "in 7\xa0hours"
    assert found.notes == [] and first.notes == []


def test_several_rules_run_at_the_instants_of_all_of_them() -> None:
    found = shown(cron="0 1 * * *\r\n0 2 * * *\r\n\r\n", timezone="UTC")
    assert utc(found)[:3] == ["2027-01-16T01:00", "2027-01-16T02:00", "2027-01-17T01:00"]


def test_a_rule_of_months_is_clamped_and_says_so() -> None:
    found = shown(
        kind="calendar", cron="", calendar_every="1", calendar_unit="months",
        calendar_date="2027-01-31", calendar_time="09:00", timezone="UTC",
    )  # fmt: skip
    assert utc(found)[:2] == ["2027-01-31T09:00", "2027-02-28T09:00"]
    assert found.notes == ["In months without a 31st it runs on their last day."]


def test_an_instant_moved_out_of_a_gap_says_so() -> None:
    found = shown(timezone="America/New_York", starts_at="2027-03-13T12:00:00")
    assert found.rows[0].local == "Sun 14 Mar 03:00 EDT"
    assert found.rows[0].notes == [
        "02:30 does not exist on 14 March 2027 in America/New_York: runs at 03:00 instead."
    ]
    assert found.rows[1].notes == []


def test_a_gap_that_is_skipped_is_not_among_the_instants() -> None:
    found = shown(timezone="America/New_York", starts_at="2027-03-13T12:00:00", gap="skip")
    assert found.rows[0].local == "Mon 15 Mar 02:30 EDT"


def test_an_instant_that_happens_twice_says_which_one_runs() -> None:
    found = shown(cron="30 1 * * *", timezone="America/New_York", starts_at="2027-11-06T12:00:00")
    assert found.rows[0].local == "Sun 7 Nov 01:30 EDT"
    assert "happens twice" in found.rows[0].notes[0]


def test_both_passes_of_a_fold_are_shown_with_their_abbreviations() -> None:
    found = shown(
        cron="30 1 * * *", timezone="America/New_York", starts_at="2027-11-06T12:00:00",
        fold="both",
    )  # fmt: skip
    local = [row.local for row in found.rows[:2]]
    assert local == ["Sun 7 Nov 01:30 EDT", "Sun 7 Nov 01:30 EST"]


def holidays(*days: date) -> Calendar:
    calendar = Calendar.objects.create(name="Holidays", timezone="Asia/Jakarta")
    for day in days:
        CalendarEntry.objects.create(calendar=calendar, first=day, last=day, summary=HOSTILE)
    return calendar


def test_an_excluded_day_is_struck_and_says_why() -> None:
    calendar = holidays(date(2027, 1, 17))
    found = shown(calendar=calendar.pk)
    assert [bool(row.skipped) for row in found.rows[:3]] == [False, True, False]
    assert found.rows[1].skipped == f"2027-01-17 is excluded: {HOSTILE}"
    client = Client()
    with time_machine.travel(NOW, tick=False):
        client.force_login(make_user(is_superuser=True))
        page = client.post(reverse(PREVIEW), typed(calendar=calendar.pk)).text
    assert page.count("<del>") == 1
    assert "Skipped: 2027-01-17 is excluded: &lt;script&gt;" in page
    assert "<script" not in page


def test_an_instant_moved_from_an_excluded_day_says_so() -> None:
    calendar = holidays(date(2027, 1, 17))
    found = shown(cron="30 2 17 * *", calendar=calendar.pk, calendar_action="next")
    assert found.rows[0].local == "Mon 18 Jan 02:30 WIB"
    assert found.rows[0].notes == ["Moved here from an excluded day."]


@pytest.mark.parametrize(
    ("cron", "text"),
    [
        ("0 0 13 * fri", "Day or weekday"),
        ("*/7 * * * *", "7"),
        ("0 0 31 * *", "31st"),
        ("0 0 29 2 *", "Runs rarely"),
    ],
)
def test_what_is_to_know_about_the_whole_rule_is_said_above(cron: str, text: str) -> None:
    assert any(text in note for note in shown(cron=cron).notes)


def test_no_more_instants_are_shown_than_the_limit_leaves() -> None:
    assert len(shown(max_runs="3").rows) == 3


def test_a_skipped_instant_does_not_count_against_the_limit() -> None:
    found = shown(max_runs="2", calendar=holidays(date(2027, 1, 17)).pk)
    assert [bool(row.skipped) for row in found.rows] == [False, True, False]


def test_nothing_is_left_after_the_end() -> None:
    found = shown(ends_at="2027-01-15T20:00:00")
    assert (found.rows, found.notes) == ([], ["No instant of the timetable is left."])


def test_the_delay_of_a_new_schedule_is_said_as_its_limit() -> None:
    assert shown(spread_seconds="600").notes == ["Each of them starts up to 600 s later."]


def test_the_delay_of_a_stored_schedule_is_the_one_that_the_scheduler_takes() -> None:
    schedule = make_schedule(spread_seconds=600)
    at = datetime(2027, 1, 15, 19, 30, tzinfo=UTC)
    delay = int((schedule.spread(at) - at).total_seconds())
    found = shown(Schedule.objects.get(), spread_seconds="600")
    assert found.rows[0].at == "2027-01-15T19:30:00+00:00"
    assert found.notes == [f"Each of them starts {delay} s later."]


def test_random_delays_are_said_for_each_instant() -> None:
    schedule = make_schedule(spread_seconds=600, spread_by="random", spread_key="tenant-7")
    found = shown(spread_seconds="600", spread_by="random", spread_key="tenant-7")
    planned = [datetime.fromisoformat(row.at) for row in found.rows]
    delays = [int((schedule.spread(at) - at).total_seconds()) for at in planned]
    assert [row.notes for row in found.rows] == [[f"Starts {each} s later."] for each in delays]
    assert found.notes == []


def test_many_others_at_the_same_second_are_said_with_one_query_for_all() -> None:
    at = shown().rows[0].at
    for _ in range(21):
        make_schedule()
    Schedule.objects.update(next_run_at=at)
    with CaptureQueriesContext(connection) as captured:
        found = shown()
    assert found.rows[0].notes == ["21 other schedules start at the same second."]
    assert found.rows[1].notes == []
    assert len([q for q in captured.captured_queries if "next_run_at" in q["sql"]]) == 1


def test_the_schedule_itself_and_paused_ones_are_no_herd() -> None:
    at = shown().rows[0].at
    for _ in range(20):
        make_schedule()
    Schedule.objects.update(next_run_at=at)
    assert shown(Schedule.objects.first()).rows[0].notes == []
    Schedule.objects.update(state="paused", next_run_at=at)
    assert shown().rows[0].notes == []


def test_the_preview_shows_the_instants_that_are_planned() -> None:
    schedule = make_schedule(cron="*/20 8-10 * * mon-fri\n15 3 1 * *", timezone="Europe/London")
    data = posted(cron=schedule.cron, timezone=schedule.timezone)
    planned = [at.isoformat() for at in schedule.upcoming(10)]
    assert [row.at for row in preview(data, None, database_now()).rows] == planned


# --- errors and hostile input ------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "label", "text"),
    [
        ({"cron": "0 25 * * *"}, "Cron expression", "25"),
        ({"timezone": "WIB"}, "Time zone", "Did you mean Asia/Jakarta?"),
        ({"kind": "interval", "interval_seconds": ""}, "Every (seconds)", ""),
        ({"kind": "calendar", "calendar_every": "0"}, "Every", ""),
        ({"kind": "calendar", "calendar_every": "1"}, "First day", ""),
        ({"starts_at": "yesterday"}, "Not before", "valid date"),
        ({"max_runs": "0"}, "At most this many runs", "Must be at least 1"),
        ({"spread_seconds": "86401"}, "Spread over (seconds)", "86,400"),
        ({"calendar": "9"}, "Days to keep clear of", "valid choice"),
        ({"gap": "jump"}, "Time that the clocks jump over", "valid choice"),
    ],
)
def test_errors_name_their_field(values: dict[str, str], label: str, text: str) -> None:
    found = shown(**values)
    assert [name for name, _message in found.errors] == [label]
    assert text in found.errors[0][1]
    assert found.rows == []


def test_an_empty_form_is_no_error(admin: Client) -> None:
    page = admin.post(reverse(PREVIEW), typed(cron="")).text
    assert "Fill in a rule" in page and "errorlist" not in page


HOSTILE_RULES = [
    "* * * * *",
    ",".join(["*/1"] * 40) + " * * * *",
    "0-59/1,1-58/3,2-57/5 0-23/1,1-22/3 1-31/1 * *",
    "0 0 31 2 *",
    "0 0 29 2 mon#5",
    "0 0 30 2 *\n" * 10,
    "59 23 31 12 0-7\n" * 10,
    "9" * 2000,
    "*/" * 900,
    "\x00 * * * *",
    "٣ * * * *",
    HOSTILE,
    "%s %(x)s {} * *",
]


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Keep the collector, which would pass over the garbage of all tests, out of a measurement."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("rule", HOSTILE_RULES)
def test_a_hostile_text_costs_less_than_50_ms(rule: str) -> None:
    data = posted(cron=rule, timezone="America/St_Johns")
    started = time.process_time()
    preview(data, None)
    assert time.process_time() - started < 0.05


@pytest.mark.parametrize("rule", HOSTILE_RULES)
def test_a_hostile_rule_is_answered_and_inert(admin: Client, rule: str) -> None:
    answer = admin.post(reverse(PREVIEW), typed(cron=rule))
    assert answer.status_code == 200
    assert "<script" not in answer.text


@pytest.mark.usefixtures("no_garbage")
def test_an_answer_takes_less_than_30_ms(admin: Client) -> None:
    calendar = holidays(date(2027, 1, 17))
    sent = typed(cron="*/20 8-10 * * mon-fri\n15 3 1 * *", calendar=calendar.pk)
    admin.post(reverse(PREVIEW), sent)
    started = time.process_time()
    admin.post(reverse(PREVIEW), sent)
    assert time.process_time() - started < 0.03


@pytest.mark.parametrize("field", ["kind", "timezone", "starts_at", "calendar", "spread_key"])
def test_hostile_text_is_inert_in_every_field(admin: Client, field: str) -> None:
    page = admin.post(reverse(PREVIEW), typed(**{field: HOSTILE}))
    assert page.status_code == 200
    assert "<script" not in page.text


# --- who may ask, and what it does ---------------------------------------------------


def test_only_a_post_is_answered(admin: Client) -> None:
    assert admin.get(reverse(PREVIEW)).status_code == 405


def test_a_post_without_the_token_is_refused() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_user(is_superuser=True))
    assert client.post(reverse(PREVIEW), typed()).status_code == 403


def test_a_stranger_is_sent_to_sign_in() -> None:
    answer = Client().post(reverse(PREVIEW), typed())
    assert answer.status_code == 302 and "login" in answer.headers["Location"]


@pytest.mark.parametrize(
    ("permission", "for_new", "for_stored"),
    [("add", 200, 403), ("change", 403, 200), ("view", 403, 403)],
)
def test_who_may_not_save_gets_no_preview(permission: str, for_new: int, for_stored: int) -> None:
    schedule = make_schedule()
    client = Client()
    client.force_login(make_user(f"distcron.{permission}_schedule"))
    address = reverse(PREVIEW)
    assert client.post(address, typed()).status_code == for_new
    answer = client.post(f"{address}?schedule={schedule.pk}", typed())
    assert answer.status_code == for_stored


@pytest.mark.parametrize("number", ["0", "x", "999999999999999999999", "1'--"])
def test_a_schedule_that_is_not_there_is_previewed_as_a_new_one(admin: Client, number: str) -> None:
    assert admin.post(f"{reverse(PREVIEW)}?schedule={number}", typed()).status_code == 200


def rows() -> list[Any]:
    tables = (Schedule, AuditEntry, Run, Calendar, CalendarEntry)
    return [list(model.objects.order_by("pk").values()) for model in tables]


def test_nothing_is_written(admin: Client) -> None:
    schedule = make_schedule(calendar=holidays(date(2027, 1, 17)))
    before = rows()
    with CaptureQueriesContext(connection) as captured:
        admin.post(f"{reverse(PREVIEW)}?schedule={schedule.pk}", typed(cron="0 4 * * *"))
    assert rows() == before
    written = ("INSERT", "UPDATE", "DELETE")
    assert not [q for q in captured.captured_queries if q["sql"].startswith(written)]


def test_it_takes_few_queries_whatever_there_is(admin: Client) -> None:
    for _ in range(20):
        make_schedule()
    admin.post(reverse(PREVIEW), typed())
    with CaptureQueriesContext(connection) as captured:
        admin.post(reverse(PREVIEW), typed())
    # Session, user, the constraint of the kind in its savepoint, others at the same second.
    assert len(captured.captured_queries) <= 6


# --- without JavaScript -----------------------------------------------------------


def complete(**values: Any) -> dict[str, Any]:
    return typed(
        name="Report",
        key="report",
        job="project.demo.heartbeat",
        arguments="",
        delivery="at_most_once",
        notes="keep me",
    ) | {"_preview": "Preview"} | values  # fmt: skip


def test_the_button_shows_the_form_again_with_the_preview(admin: Client) -> None:
    page = admin.post(reverse(ADD), complete(cron="0 4 * * *"))
    assert page.status_code == 200
    assert "At 04:00 every day" in page.text and page.text.count("04:00 WIB") == 10
    assert "keep me</textarea>" in page.text and "0 4 * * *</textarea>" in page.text
    assert "errornote" not in page.text
    assert Schedule.objects.count() == AuditEntry.objects.count() == 0


def test_the_button_changes_no_stored_schedule(admin: Client) -> None:
    schedule = make_schedule()
    before = rows()
    address = reverse("admin:distcron_schedule_change", args=[schedule.pk])
    page = admin.post(address, complete(cron="0 4 * * *", seen_version=1))
    assert "At 04:00 every day" in page.text
    assert f'value="{schedule.version}"' in page.text
    assert rows() == before


def test_the_button_shows_what_is_wrong(admin: Client) -> None:
    page = admin.post(reverse(ADD), complete(cron="0 25 * * *")).text
    preview_at = page.index("data-distcron-preview")
    assert "<li>Cron expression: " in page[preview_at:]
    assert "0 25 * * *</textarea>" in page


def test_the_button_is_the_last_so_that_enter_saves(admin: Client) -> None:
    page = admin.get(reverse(ADD)).text
    assert page.index('name="_save"') < page.index('name="_preview"')
    assert page.count('name="_preview"') == 1
    assert 'formaction="#distcron-preview"' in page and 'id="distcron-preview"' in page


def test_a_viewer_has_no_button_and_no_region() -> None:
    schedule = make_schedule()
    client = Client()
    client.force_login(make_user("distcron.view_schedule"))
    page = client.get(reverse("admin:distcron_schedule_change", args=[schedule.pk])).text
    assert "_preview" not in page and "data-distcron-preview" not in page


def test_the_script_is_small_and_a_file_of_its_own(admin: Client) -> None:
    script = Path(distcron_app.__file__).parent / "static/distcron/preview.js"
    assert script.stat().st_size <= 3000
    page = admin.get(reverse(ADD)).text
    assert f'src="{settings.STATIC_URL}distcron/preview.js"' in page


def test_the_preview_is_in_the_language_of_the_reader(admin: Client) -> None:
    admin.cookies["django_language"] = "id"
    page = admin.post(reverse(PREVIEW), typed(cron="0 4 * * mon")).text
    assert "Senin" in page


def test_the_first_instant_is_later_than_now() -> None:
    first = shown(kind="interval", cron="", interval_seconds="60").rows[0]
    assert first.at == "2027-01-15T12:01:00+00:00"


def test_runs_longer_than_the_period_are_told() -> None:
    schedule = make_schedule(kind="interval", cron="", interval_seconds=60)
    start = database_now() - timedelta(hours=1)
    for number in range(5):
        make_run(
            schedule=schedule,
            started_at=start,
            finished_at=start + timedelta(minutes=3),
            scheduled_at=start + timedelta(minutes=number),
        )
    found = shown(schedule, kind="interval", cron="", interval_seconds="60")
    assert found.notes == ["Runs take up to 180 s, but the next one starts after 60 s."]
