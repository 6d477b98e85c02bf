"""Backfills on the pages, and run now with arguments and an instant of its own."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from distcron_app import operations
from distcron_app.explained_instants import explain_instant
from distcron_app.instants import database_now
from distcron_app.models import AuditEntry, Backfill, Run, Schedule
from tests.factories import make_user
from tests.integration.pages_rows import VIEWS, run, schedule, user

pytestmark = pytest.mark.django_db

KEY = "0123456789abcdef"
ASKED = {
    "idempotency_key": KEY,
    "reason": "after the outage",
    "first_at": "2026-06-01",
    "last_at": "2026-06-03",
    "overlap": "one_by_one",
    "repeat": "none",
}


def own(**given: Any) -> Schedule:
    return schedule(**{"timezone": "Asia/Jakarta"} | given)


def path(of: Schedule, name: str = "backfill_schedule") -> str:
    return reverse(f"distcron:{name}", args=[of.pk])


def begin(of: Schedule) -> Backfill:
    asked = operations.BackfillRequest(
        first_at=datetime(2026, 5, 31, tzinfo=UTC), last_at=datetime(2026, 6, 3, tzinfo=UTC)
    )
    return operations.backfill(of, asked, actor="siti", via="cli", reason="after the outage")


def test_the_first_step_counts_and_queues_nothing(admin_client: Client) -> None:
    of = own()
    assert "Step 1 of 2" in admin_client.get(path(of)).text
    answer = admin_client.post(path(of), ASKED)
    assert answer.status_code == 200
    assert "Step 2 of 2" in answer.text
    assert "Queue 3 runs" in answer.text
    assert "1 Jun 02:00:00 WIB" in answer.text
    assert not Run.objects.exists()


def test_the_second_step_queues_what_was_counted(admin_client: Client) -> None:
    of = own()
    counted = admin_client.post(path(of), ASKED).text
    hidden = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', counted))
    hidden.pop("csrfmiddlewaretoken", None)
    answer = admin_client.post(path(of), hidden | {"expected": "3", "arguments": ""})
    found = Backfill.objects.get()
    assert answer["Location"] == found.get_absolute_url()
    assert (found.planned, found.by, found.reason) == (3, "admin", "after the outage")
    assert (AuditEntry.objects.get().verb, AuditEntry.objects.get().via) == (
        "backfill",
        "dashboard",
    )


def test_a_form_sent_twice_begins_one_backfill(admin_client: Client) -> None:
    of = own()
    first, second = (admin_client.post(path(of), ASKED | {"expected": "3"}) for _ in range(2))
    assert first["Location"] == second["Location"]
    assert (Backfill.objects.count(), Run.objects.count()) == (1, 3)


def test_another_count_by_now_is_shown_and_asked_again(admin_client: Client) -> None:
    of = own()
    answer = admin_client.post(path(of), ASKED | {"expected": "7"})
    assert answer.status_code == 409
    assert "it would be 3 runs by now instead of 7. Look again." in answer.text
    assert "Queue 3 runs" in answer.text
    assert not Run.objects.exists()


def test_change_goes_back_with_what_was_typed(admin_client: Client) -> None:
    answer = admin_client.post(path(own()), ASKED | {"change": "yes", "per_minute": "6"})
    assert "Step 1 of 2" in answer.text
    assert 'value="2026-06-03"' in answer.text
    assert 'name="per_minute" value="6"' in answer.text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"first_at": "soon"}, "not a date or time. Write 2027-03-12T06:00"),
        ({"last_at": "2026-05-01"}, "the end is before the beginning"),
        ({"first_at": "2097-01-01", "last_at": "2098-01-01"}, "begins in the future"),
        ({"per_minute": "9999"}, "9999 runs per minute: allowed 1 to 6000."),
        ({"most_active": "3"}, "needs the choice side by side"),
        ({"overlap": "both"}, "is not known. Choose one of: one_by_one, side_by_side."),
        ({"arguments": "{"}, "must be JSON"),
        ({"arguments": '{"nobody": 1}'}, "nobody: is not a parameter"),
    ],
)
def test_what_is_wrong_stands_at_its_field_and_is_kept(
    admin_client: Client, given: dict[str, str], text: str
) -> None:
    answer = admin_client.post(path(own()), ASKED | given)
    assert answer.status_code == 400
    assert text in answer.text
    assert "after the outage" in answer.text
    assert not Run.objects.exists()


def test_nothing_left_to_run_is_said_and_offers_no_button(admin_client: Client) -> None:
    of = own()
    begin(of)
    html = admin_client.post(path(of), ASKED).text
    assert "No instant of the range is left to run." in html
    assert "Left out: 3 instants that have a run." in html
    assert 'name="expected"' not in html


@pytest.mark.parametrize("name", ["backfill_schedule", "cancel_backfill"])
def test_post_without_the_permission_changes_nothing(client: Client, name: str) -> None:
    of = own()
    found = begin(of)
    client.force_login(user("siti", *VIEWS, "run_schedule"))
    address = (
        path(of) if name == "backfill_schedule" else reverse(f"distcron:{name}", args=[found.pk])
    )
    assert client.post(address, ASKED | {"expected": "3"}).status_code == 403
    assert client.get(address).status_code == 403
    assert Backfill.objects.get().state == "active"
    assert path(of) not in client.get(of.get_absolute_url()).text


def test_the_permission_of_the_job_is_needed_as_well(client: Client) -> None:
    of = own(job="tests.call_api", arguments={"api_key": "s3cr3t"})
    client.force_login(make_user("distcron.backfill_schedule", "distcron.view_schedule"))
    answer = client.post(path(of), ASKED | {"expected": "3"})
    assert answer.status_code == 403
    assert "auth.view_group" in answer.text


def test_the_token_of_the_form_is_needed() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(user("siti", "backfill_schedule"))
    assert client.post(path(own()), ASKED | {"expected": "3"}).status_code == 403
    assert not Run.objects.exists()


def test_the_list_is_empty_with_a_way_to_begin_one(admin_client: Client, client: Client) -> None:
    of = own()
    html = admin_client.get(path(of, "backfills")).text
    assert "No past range of this schedule has been run on request." in html
    assert path(of) in html
    client.force_login(user("siti", *VIEWS))
    assert "distcron.backfill_schedule" in client.get(path(of, "backfills")).text


def test_the_list_and_the_page_show_how_far_it_is(admin_client: Client) -> None:
    of = own()
    found = begin(of)
    first = found.runs.order_by("due_at").first()
    Run.objects.filter(pk=first.pk).update(state="succeeded", finished_at=database_now())
    listed = admin_client.get(path(of, "backfills")).text
    assert 'value="33"' in listed
    assert "1 of 3 runs" in listed
    html = admin_client.get(found.get_absolute_url()).text
    assert "1 of 3 runs have ended." in html
    assert first.get_absolute_url() in html
    assert "“<bdi>after the outage</bdi>”" in html
    assert 'data-dc-seconds="2"' in html
    assert "one by one, while no other run" in html


def test_its_page_stays_when_the_schedule_is_gone(admin_client: Client) -> None:
    of = own()
    found = begin(of)
    of.delete()
    assert admin_client.get(found.get_absolute_url()).status_code == 200
    assert admin_client.get(reverse("distcron:backfill", args=[999])).status_code == 404


def test_runs_are_filtered_by_backfill(admin_client: Client) -> None:
    of = own()
    found, other = begin(of), run(of)
    html = admin_client.get(reverse("distcron:runs") + f"?backfill={found.pk}").text
    assert f"#{found.runs.first().pk} " in html
    assert other.get_absolute_url() not in html
    assert f"backfill #{found.pk}, siti" in html


def test_the_page_of_its_run_leads_to_it(admin_client: Client) -> None:
    found = begin(own())
    html = admin_client.get(found.runs.first().get_absolute_url()).text
    assert f'href="{found.get_absolute_url()}"' in html
    assert f"It waits for its turn in backfill {found.pk}." in html
    assert "Occurrence" in html


def test_cancel_asks_first_needs_a_reason_and_acts_once(admin_client: Client) -> None:
    found = begin(own())
    address = reverse("distcron:cancel_backfill", args=[found.pk])
    assert "3 runs that wait are cancelled at once." in admin_client.get(address).text
    assert admin_client.post(address, {"idempotency_key": KEY}).status_code == 400
    given = {"idempotency_key": KEY, "reason": "wrong month"}
    first, second = (admin_client.post(address, given) for _ in range(2))
    assert first["Location"] == second["Location"] == found.get_absolute_url()
    found.refresh_from_db()
    assert (found.state, found.state_by, found.state_reason) == (
        "cancelled",
        "admin",
        "wrong month",
    )
    assert AuditEntry.objects.filter(verb="cancel_backfill").count() == 1
    late = admin_client.post(address, given | {"idempotency_key": KEY[::-1]})
    assert late.status_code == 409
    assert "it has ended" in late.text


def test_names_and_reasons_are_escaped(admin_client: Client) -> None:
    of = own(name="<script>alert(1)</script>")
    found = begin(of)
    Backfill.objects.update(state="cancelled", state_by="x", state_reason="<img src=x>")
    for address in (found.get_absolute_url(), path(of, "backfills"), path(of)):
        html = admin_client.get(address).text
        assert "<script>alert" not in html
        assert "<img" not in html


# --- run now ----------------------------------------------------------------------


def run_now(client: Client, of: Schedule, **given: str) -> Any:
    return client.post(path(of, "run_now"), {"idempotency_key": KEY, "reason": ""} | given)


def test_run_now_with_arguments_and_an_instant_of_its_own(admin_client: Client) -> None:
    of = own(job="project.demo.invoice_close", arguments={"batch": 5})
    assert "&quot;batch&quot;: 5" in admin_client.get(path(of, "run_now")).text
    run_now(admin_client, of, arguments='{"batch": 7}', nominal_at="2026-06-01T02:30")
    queued = Run.objects.get()
    assert queued.arguments == {"batch": 7}
    assert queued.instant == datetime(2026, 5, 31, 19, 30, tzinfo=UTC)
    html = admin_client.get(queued.get_absolute_url()).text
    assert "1 Jun 02:30:00 WIB" in html


def test_run_now_keeps_what_was_typed_and_names_the_parameter(admin_client: Client) -> None:
    of = own(job="project.demo.invoice_close", arguments={"batch": 5})
    answer = run_now(admin_client, of, arguments='{"batch": "x"}', nominal_at="2026-06-01T02:30")
    assert answer.status_code == 400
    assert "batch: " in answer.text
    assert "{&quot;batch&quot;: &quot;x&quot;}" in answer.text
    assert 'value="2026-06-01T02:30"' in answer.text
    assert not Run.objects.exists()


def test_run_now_leaves_a_masked_secret_as_it_is(admin_client: Client) -> None:
    of = own(job="tests.call_api", arguments={"api_key": "s3cr3t", "batch": 1})
    assert "s3cr3t" not in admin_client.get(path(of, "run_now")).text
    run_now(admin_client, of, arguments='{"api_key": "••••", "batch": 2}')
    assert Run.objects.get().arguments == {"api_key": "s3cr3t", "batch": 2}


def test_run_now_for_a_time_that_is_jumped_over_is_refused(admin_client: Client) -> None:
    of = own(timezone="Europe/Riga")
    answer = run_now(admin_client, of, nominal_at="2026-03-29T03:30")
    assert answer.status_code == 400
    assert "does not exist in Europe/Riga" in answer.text


def test_the_admin_offers_both_for_one_schedule(admin_client: Client) -> None:
    first, second = own(), own(key="other")
    address = reverse("admin:distcron_schedule_act", args=["run"])
    one = admin_client.get(f"{address}?ids={first.pk}").text
    both = admin_client.get(f"{address}?ids={first.pk},{second.pk}").text
    assert 'name="nominal_at"' in one
    assert 'name="nominal_at"' not in both
    given = {"ids": str(first.pk), "idempotency_key": KEY, "confirm": "yes"}
    wrong = admin_client.post(address, given | {"nominal_at": "soon"}).text
    assert "not a date or time" in wrong
    admin_client.post(address, given | {"nominal_at": "2026-06-01T02:30"})
    assert Run.objects.get().instant == datetime(2026, 5, 31, 19, 30, tzinfo=UTC)


# --- explain ----------------------------------------------------------------------


def test_explain_says_which_backfill_ran_an_instant() -> None:
    of = own()
    found = begin(of)
    first = found.runs.order_by("due_at").first()
    Run.objects.filter(pk=first.pk).update(state="succeeded", started_at=database_now())
    answer = explain_instant(of, first.instant, now=database_now())
    assert answer.code == "ran"
    assert answer.sentence == (
        f"The job ended without an error. Asked for by backfill {found.pk} of siti."
    )
    assert {fact.code: fact.value for fact in answer.facts}["backfill"] == found.pk


def test_explain_puts_a_run_on_request_before_a_skipped_occurrence() -> None:
    of = own()
    at = datetime(2026, 6, 1, 19, tzinfo=UTC)
    run(of, "skipped", reason="misfire", scheduled_at=at)
    found = begin(of)
    answer = explain_instant(of, at, now=database_now())
    assert answer.code == "queued"
    facts = {fact.code: fact.value for fact in answer.facts}
    assert facts["timetable"] == "skipped: too late to run"
    Run.objects.filter(backfill=found).delete()
    assert explain_instant(of, at, now=database_now()).code == "skipped_misfire"
