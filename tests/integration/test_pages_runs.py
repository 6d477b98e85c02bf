"""Cancel a run, and run one again, from its page."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from distcron_app import registry
from distcron_app.instants import database_now
from distcron_app.lifecycle.overlap import REPLACE_CAUSE
from distcron_app.models import Attempt, AuditEntry, Run, Schedule
from tests.integration.pages_rows import VIEWS, node, run, schedule, user

pytestmark = [
    pytest.mark.django_db,
]

KEY = "0123456789abcdef"
BY_SITI = "by siti: wrong data"


def path(name: str, of: Run) -> str:
    return reverse(f"distcron:{name}", args=[of.pk])


def post(client: Client, name: str, of: Run, **given: str) -> Any:
    return client.post(path(name, of), {"idempotency_key": KEY, "reason": ""} | given)


def page(client: Client, of: Run) -> str:
    html = client.get(of.get_absolute_url()).text
    return " ".join(html.split())


@pytest.mark.parametrize("state", ["queued", "claimed"])
def test_cancel_ends_a_run_that_has_not_started(admin_client: Client, state: str) -> None:
    own = run(schedule(), state)
    assert "cancelled at once" in admin_client.get(path("cancel_run", own)).text
    answer = post(admin_client, "cancel_run", own, reason="wrong data")
    own.refresh_from_db()
    assert (own.state, own.reason) == ("cancelled", "cancelled")
    assert answer["Location"] == own.get_absolute_url()
    entry = AuditEntry.objects.get()
    assert (entry.via, entry.verb, entry.reason) == ("dashboard", "cancel", "wrong data")
    html = page(admin_client, own)
    assert "It was cancelled by admin: “wrong data”. Its job had not started." in html
    assert "dc-pre--error" not in html


def test_cancel_asks_a_running_job_and_the_page_says_so(admin_client: Client) -> None:
    own = run(schedule(), "running", node=node())
    assert "The job is asked to stop. It decides" in admin_client.get(path("cancel_run", own)).text
    assert "Asked to stop" not in page(admin_client, own)
    post(admin_client, "cancel_run", own, reason="wrong data")
    own.refresh_from_db()
    assert own.state == "running"
    html = page(admin_client, own)
    assert "It was asked to stop by admin: “wrong data”." in html
    assert "<dt>Asked to stop</dt>" in html
    again = admin_client.get(path("cancel_run", own)).text
    assert "It was asked to stop by admin: “wrong data”." in again


def test_cancel_needs_a_reason(admin_client: Client) -> None:
    own = run(schedule(), "queued")
    answer = post(admin_client, "cancel_run", own, reason=" ")
    own.refresh_from_db()
    assert (answer.status_code, own.state) == (400, "queued")
    assert "This field is required." in answer.text


def test_cancel_of_a_run_that_ended_meanwhile_says_so(admin_client: Client) -> None:
    own = run(schedule(), "succeeded")
    answer = post(admin_client, "cancel_run", own, reason="late")
    assert answer.status_code == 409
    assert f"Run {own.pk}: succeeded by now, so it was not cancelled." in answer.text


def test_cancel_sent_twice_acts_once(admin_client: Client) -> None:
    own = run(schedule(), "queued")
    answers = [post(admin_client, "cancel_run", own, reason="x") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [302, 302]
    assert AuditEntry.objects.count() == 1


@pytest.mark.parametrize("state", ["failed", "cancelled", "lost"])
def test_run_again_queues_the_same_run(admin_client: Client, state: str) -> None:
    own = run(schedule(), state, reason="error", error="boom")
    confirmation = admin_client.get(path("run_again", own)).text
    assert "Queues the same run for one more attempt" in confirmation
    assert ("two of them would work at the same time" in confirmation) == (state == "lost")
    answer = post(admin_client, "run_again", own, reason="disk was full")
    stored = Run.objects.get()
    assert (stored.pk, stored.state, stored.reason) == (own.pk, "queued", "again")
    assert answer["Location"] == own.get_absolute_url()
    assert "A person started it again." in page(admin_client, own)


def test_run_again_sent_twice_acts_once(admin_client: Client) -> None:
    own = run(schedule(), "failed")
    answers = [post(admin_client, "run_again", own) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [302, 302]
    assert AuditEntry.objects.count() == 1


def test_run_again_of_a_busy_schedule_links_the_run_in_the_way(admin_client: Client) -> None:
    own = schedule()
    failed, active = run(own, "failed"), run(own, "running")
    answer = post(admin_client, "run_again", failed)
    assert answer.status_code == 409
    assert f'href="{active.get_absolute_url()}"' in answer.text
    failed.refresh_from_db()
    assert failed.state == "failed"


def test_run_again_of_a_run_that_succeeded_says_so(admin_client: Client) -> None:
    own = run(schedule(), "succeeded")
    answer = post(admin_client, "run_again", own)
    assert answer.status_code == 409
    assert f"Run {own.pk}: succeeded by now. Only a failed, cancelled or lost" in answer.text


@pytest.mark.parametrize(
    ("state", "buttons"),
    [
        ("queued", {"cancel_run"}),
        ("claimed", {"cancel_run"}),
        ("running", {"cancel_run"}),
        ("failed", {"run_again"}),
        ("cancelled", {"run_again"}),
        ("lost", {"run_again"}),
        ("succeeded", set()),
        ("skipped", set()),
    ],
)
def test_each_state_has_its_buttons(admin_client: Client, state: str, buttons: set[str]) -> None:
    own = run(schedule(), state)
    assert shown(admin_client, own) == buttons


@pytest.mark.parametrize(
    ("held", "buttons"),
    [((), set()), (("cancel_run",), {"cancel_run"}), (("run_schedule",), {"run_again"})],
)
def test_buttons_are_for_those_who_may(
    client: Client, held: tuple[str, ...], buttons: set[str]
) -> None:
    own = schedule()
    client.force_login(user("siti", *VIEWS, *held))
    assert shown(client, run(own, "running")) | shown(client, run(own, "failed")) == buttons


@pytest.mark.parametrize(
    ("name", "possible", "other"),
    [("cancel_run", "running", "failed"), ("run_again", "failed", "succeeded")],
)
def test_a_run_in_another_state_has_nothing_to_confirm(
    admin_client: Client, name: str, possible: str, other: str
) -> None:
    one = schedule()
    asks = admin_client.get(path(name, run(one, possible))).text
    assert 'name="reason"' in asks
    says = admin_client.get(path(name, run(one, other))).text
    assert 'name="reason"' not in says


@pytest.mark.parametrize(("name", "state"), [("cancel_run", "queued"), ("run_again", "failed")])
@pytest.mark.parametrize("method", ["get", "post"])
def test_without_the_permission_nothing_happens(
    client: Client, name: str, state: str, method: str
) -> None:
    own = run(schedule(), state)
    other = {"cancel_run": "run_schedule", "run_again": "cancel_run"}[name]
    client.force_login(user("siti", *VIEWS, other))
    answer = getattr(client, method)(path(name, own), {"idempotency_key": KEY, "reason": "because"})
    assert answer.status_code == 403
    own.refresh_from_db()
    assert own.state == state
    assert not AuditEntry.objects.exists()


def test_run_again_needs_the_permission_of_the_job_too(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = dataclasses.replace(
        registry.get("project.demo.heartbeat"), permission="billing.close_books"
    )
    monkeypatch.setitem(registry._jobs, guarded.name, guarded)
    own = run(schedule(), "failed")
    client.force_login(user("siti", *VIEWS, "run_schedule"))
    answer = post(client, "run_again", own)
    assert answer.status_code == 403
    assert "billing.close_books" in answer.text
    assert shown(client, own) == set()


def test_a_run_without_its_schedule_cannot_run_again(admin_client: Client) -> None:
    own = run(schedule(), "failed")
    Schedule.objects.all().delete()
    assert shown(admin_client, own) == set()
    answer = post(admin_client, "run_again", own)
    assert answer.status_code == 409
    assert "its schedule was deleted" in answer.text


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"state": "cancelled", "reason": "cancelled", "error": BY_SITI},
            "It was cancelled by siti: “wrong data”. Its job had not started.",
        ),
        (
            {
                "state": "cancelled",
                "reason": "cancelled",
                "error": "RunStopped: Run 5: told to stop",
                "cancel_cause": BY_SITI,
                "started": True,
            },
            "It was cancelled by siti: “wrong data”. Its job had started.",
        ),
        (
            {"state": "cancelled", "reason": "cancelled", "cancel_cause": REPLACE_CAUSE},
            "It was cancelled: a newer occurrence replaces it.",
        ),
        (
            {"state": "lost", "cancel_cause": BY_SITI, "asked": True, "delivery": "at_least_once"},
            "It was asked to stop by siti: “wrong data”. So no node starts it again.",
        ),
        (
            {"state": "cancelled", "reason": "deleted"},
            "It was cancelled: the schedule was deleted.",
        ),
        (
            {"state": "running", "cancel_cause": REPLACE_CAUSE, "asked": True},
            "The job is running on node web-1. It was asked to stop: a newer occurrence replaces "
            "it.",
        ),
    ],
)
def test_a_cancel_is_explained(admin_client: Client, values: dict[str, Any], sentence: str) -> None:
    now = database_now()
    given = dict(values)
    if given.pop("started", False):
        given["started_at"] = now - timedelta(seconds=3)
    if given.pop("asked", False):
        given["cancel_requested_at"] = now
    own = run(schedule(), given.pop("state"), node=node(), **given)
    assert sentence in page(admin_client, own)


def test_attempts_show_their_error(admin_client: Client) -> None:
    own = run(schedule(), "running", attempt=2)
    Attempt.objects.create(
        run=own,
        number=1,
        fencing_token=1,
        ended_at=database_now(),
        reason="error",
        error="SMTPTimeout: <b>no answer</b>",
    )
    html = page(admin_client, own)
    assert "SMTPTimeout: &lt;b&gt;no answer&lt;/b&gt;" in html


def test_run_now_of_a_busy_schedule_may_queue_behind_it(admin_client: Client) -> None:
    own = schedule()
    active = run(own, "running")
    answer = admin_client.post(
        reverse("distcron:run_now", args=[own.pk]),
        {"idempotency_key": KEY, "reason": "", "behind": "on"},
    )
    queued = Run.objects.get(state="queued")
    assert (queued.reason, queued.details) == ("overlap", {"blocked_by": active.pk})
    assert answer["Location"] == queued.get_absolute_url()
    assert "It waits until an earlier run of its schedule has ended." in page(admin_client, queued)


def test_run_now_offers_to_queue_only_when_asked(admin_client: Client) -> None:
    html = admin_client.get(reverse("distcron:run_now", args=[schedule().pk])).text
    assert 'type="checkbox" name="behind"' in html
    assert "checked" not in html


def shown(client: Client, of: Run) -> set[str]:
    html = page(client, of)
    return {name for name in ("cancel_run", "run_again") if f'href="{path(name, of)}"' in html}
