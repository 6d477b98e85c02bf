"""Run now, pause and resume from the pages."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from distcron_app.models import AuditEntry, Run, Schedule
from distcron_app.registry import get
from tests.integration.pages_rows import VIEWS, run, schedule, user

pytestmark = [
    pytest.mark.django_db,
]

KEY = "0123456789abcdef"


def post(client: Client, name: str, of: Schedule, **given: str) -> Any:
    return client.post(
        reverse(f"distcron:{name}", args=[of.pk]), {"idempotency_key": KEY, "reason": ""} | given
    )


def test_run_now_queues_a_run_and_shows_it(admin_client: Client) -> None:
    own = schedule()
    answer = post(admin_client, "run_now", own, reason="month end")
    queued = Run.objects.get()
    assert (queued.state, queued.trigger, queued.triggered_by) == ("queued", "manual", "admin")
    assert answer["Location"] == queued.get_absolute_url()
    entry = AuditEntry.objects.get()
    assert (entry.via, entry.verb, entry.reason) == ("dashboard", "run_now", "month end")


def test_form_sent_twice_queues_one_run(admin_client: Client) -> None:
    own = schedule()
    first, second = (post(admin_client, "run_now", own) for _ in range(2))
    assert Run.objects.count() == 1
    assert first["Location"] == second["Location"]


def test_each_confirmation_has_a_key_of_its_own(admin_client: Client) -> None:
    path = reverse("distcron:run_now", args=[schedule().pk])
    pattern = r'name="idempotency_key" value="([0-9a-f]{32})"'
    first, second = (re.search(pattern, admin_client.get(path).text) for _ in range(2))
    assert first and second
    assert first[1] != second[1]


def test_run_now_of_a_busy_schedule_links_the_run_in_the_way(admin_client: Client) -> None:
    own = schedule()
    active = run(own, "running")
    answer = post(admin_client, "run_now", own)
    assert answer.status_code == 409
    assert f'href="{active.get_absolute_url()}"' in answer.text
    assert Run.objects.count() == 1


def test_run_now_of_an_unknown_job_says_so(admin_client: Client) -> None:
    answer = post(admin_client, "run_now", schedule(job="shop.export"))
    assert answer.status_code == 409
    assert "Job &#x27;shop.export&#x27;: not registered." in answer.text


def test_run_now_needs_the_permission_of_the_job_too(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from distcron_app import registry

    guarded = dataclasses.replace(get("project.demo.heartbeat"), permission="billing.close_books")
    monkeypatch.setitem(registry._jobs, guarded.name, guarded)
    client.force_login(user("siti", "run_schedule"))
    answer = post(client, "run_now", schedule())
    assert answer.status_code == 403
    assert "billing.close_books" in answer.text
    assert not Run.objects.exists()


def test_pause_says_who_and_why(admin_client: Client) -> None:
    own = schedule()
    post(admin_client, "pause", own, reason="vendor outage")
    own.refresh_from_db()
    assert (own.state, own.state_reason, own.state_by) == ("paused", "vendor outage", "admin")
    html = admin_client.get(own.get_absolute_url()).text
    assert "Paused by admin" in html
    assert "vendor outage" in html
    assert "Instants that pass meanwhile are never run." in html


def test_pause_needs_a_reason(admin_client: Client) -> None:
    own = schedule()
    answer = post(admin_client, "pause", own, reason=" ")
    own.refresh_from_db()
    assert (answer.status_code, own.state) == (400, "active")
    assert "This field is required." in answer.text


def test_resume_goes_on_from_now(admin_client: Client) -> None:
    own = schedule()
    post(admin_client, "pause", own, reason="vendor outage")
    post(admin_client, "resume", own)
    own.refresh_from_db()
    assert own.state == "active"
    assert own.next_run_at is not None


@pytest.mark.parametrize("name", ["run_now", "pause", "resume"])
def test_post_without_the_permission_changes_nothing(client: Client, name: str) -> None:
    own = schedule()
    client.force_login(user("siti", *VIEWS))
    assert post(client, name, own, reason="because").status_code == 403
    own.refresh_from_db()
    assert own.state == "active"
    assert not Run.objects.exists()
    assert not AuditEntry.objects.exists()


def test_post_without_the_token_of_the_form_is_refused() -> None:
    own = schedule()
    client = Client(enforce_csrf_checks=True)
    client.force_login(user("siti", "run_schedule"))
    assert post(client, "run_now", own).status_code == 403
    assert not Run.objects.exists()


def test_secret_arguments_are_masked_before_a_run(admin_client: Client) -> None:
    own = schedule()
    Schedule.objects.filter(pk=own.pk).update(arguments={"api_key": "s3cr3t-value"})
    html = admin_client.get(reverse("distcron:run_now", args=[own.pk])).text
    assert "s3cr3t-value" not in html
    assert "••••" in html
