"""Limits of runs in the database, in the form, on the pages and on the command line."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.test import Client
from django.urls import reverse

from distcron_app import lifecycle
from distcron_app.instants import database_now
from distcron_app.lifecycle import ClaimedRun, Failure
from distcron_app.locks import new_owner_token
from distcron_app.models import Node, Run, Schedule
from tests.factories import make_node, make_schedule, make_user
from tests.integration import pages_rows
from tests.integration.schedulerctl_builders import ctl
from tests.integration.test_overlap import claim, due
from tests.integration.test_retries import again, failed, started

pytestmark = pytest.mark.django_db

TIMED_OUT = Failure(exceptions=(), timed_out=True)
LIMITS = {
    "isolation": "own",
    "run_timeout_seconds": 30,
    "total_timeout_seconds": 90,
    "kill_grace_seconds": 5,
    "memory_limit_mb": 256,
}


def noted(run: ClaimedRun) -> Run:
    lifecycle.note_over_limit({run.run_id: (run.fencing_token, run.owner_token)})
    return Run.objects.get(pk=run.run_id)


# --- rows -------------------------------------------------------------------------


@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
def test_a_claim_brings_the_limits_of_its_schedule(delivery: str) -> None:
    (run,) = claim(due(delivery=delivery, **LIMITS), make_node()).runs
    assert {name: getattr(run, name) for name in LIMITS} == LIMITS


def test_a_claim_of_a_queued_run_brings_the_limits_as_they_are_then() -> None:
    node = make_node()
    queued = lifecycle.queue_manual(make_schedule(), by="siti")
    Schedule.objects.update(**LIMITS)
    (run,) = lifecycle.claim_queued({queued.pk: new_owner_token()}, node.pk).runs
    assert {name: getattr(run, name) for name in LIMITS} == LIMITS
    assert run.first_started_at is None


@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
def test_the_first_start_stays_through_the_attempts_until_a_person_starts_it_again(
    delivery: str,
) -> None:
    node = make_node()
    first = started(node, delivery=delivery, retry_on_timeout=True, run_timeout_seconds=30)
    started_at = Run.objects.get().started_at
    assert Run.objects.get().first_started_at == started_at
    lifecycle.finish([failed(first, reason="timeout", failure=TIMED_OUT)])
    second = again(node, first.run_id)
    row = Run.objects.get()
    assert (second.first_started_at, row.first_started_at) == (started_at, started_at)
    assert row.started_at > started_at
    lifecycle.finish([failed(second, reason="timeout", failure=None)])
    lifecycle.queue_again(first.run_id)
    assert again(node, first.run_id).first_started_at is None
    assert Run.objects.get().first_started_at > started_at


def test_a_run_over_its_limit_says_since_when_until_its_next_start() -> None:
    node = make_node()
    run = started(node, retry_on_timeout=True, run_timeout_seconds=30)
    before = database_now()
    row = noted(run)
    assert before <= row.over_limit_at <= database_now()
    assert row.is_over_limit
    lifecycle.finish([failed(run, reason="timeout", failure=TIMED_OUT)])
    row.refresh_from_db()
    assert (row.over_limit_at is not None, row.is_over_limit) == (True, False)
    again(node, run.run_id)
    row.refresh_from_db()
    assert row.over_limit_at is None


def test_a_run_that_moved_on_is_not_noted_as_over_its_limit() -> None:
    run = started(make_node())
    lifecycle.finish([failed(run, failure=None)])
    assert noted(run).over_limit_at is None


@pytest.mark.parametrize(("wanted", "state"), [(False, "failed"), (True, "queued")])
def test_a_timeout_is_tried_again_only_where_the_schedule_says_so(wanted: bool, state: str) -> None:
    run = started(
        make_node(), retry_on_timeout=wanted, run_timeout_seconds=30, delivery="at_least_once"
    )
    lifecycle.finish([failed(run, reason="timeout", failure=TIMED_OUT)])
    assert Run.objects.get().state == state


def test_no_attempt_is_planned_past_the_time_of_all() -> None:
    run = started(make_node(), backoff_delays="20", total_timeout_seconds=60)
    Run.objects.update(first_started_at=database_now() - timedelta(seconds=41))
    lifecycle.finish([failed(run)])
    assert Run.objects.get().state == "failed"


# --- what people may type -----------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "field", "problem"),
    [
        ({"run_timeout_seconds": 0}, "run_timeout_seconds", "At least 1, or empty"),
        ({"run_timeout_seconds": 40_000_000}, "run_timeout_seconds", "At most 31536000"),
        ({"total_timeout_seconds": 0}, "total_timeout_seconds", "At least 1, or empty"),
        ({"kill_grace_seconds": 3601}, "kill_grace_seconds", "From 0 to 3600"),
        ({"retry_on_timeout": True}, "retry_on_timeout", "Nothing times out"),
        ({"memory_limit_mb": 256}, "memory_limit_mb", "Is for a process of its own"),
        ({"isolation": "own", "memory_limit_mb": 63}, "memory_limit_mb", "From 64 to 1048576"),
        ({"isolation": "container"}, "isolation", "container"),
    ],
)
def test_a_limit_that_cannot_be_used_names_its_field(
    values: dict[str, Any], field: str, problem: str
) -> None:
    schedule = make_schedule()
    for name, value in values.items():
        setattr(schedule, name, value)
    with pytest.raises(ValidationError) as refused:
        schedule.full_clean()
    assert problem in str(refused.value.message_dict[field])


def test_the_form_takes_every_limit() -> None:
    client = Client()
    client.force_login(make_user(username="siti", is_superuser=True))
    typed = {
        "name": "Report",
        "key": "report",
        "job": "project.demo.heartbeat",
        "arguments": "",
        "kind": "cron",
        "cron": "30 2 * * *",
        "timezone": "Asia/Jakarta",
        "delivery": "at_most_once",
        "retry_on_timeout": "on",
        **LIMITS,
    }
    url = reverse("admin:distcron_schedule_add")
    assert "When it takes too long" in client.get(url).text
    assert client.post(url, typed).status_code == 302
    saved = Schedule.objects.get(key="report")
    assert {name: getattr(saved, name) for name in LIMITS} == LIMITS
    assert saved.retry_on_timeout is True


# --- what people see ---------------------------------------------------------------------


@pytest.fixture
def holder() -> Node:
    return pages_rows.node()


def over_limit(holder: Node, **values: Any) -> Run:
    own = pages_rows.schedule(run_timeout_seconds=30, **values)
    since = database_now() - timedelta(minutes=3)
    return pages_rows.run(own, "running", node=holder, over_limit_at=since)


def shown(client: Client, run: Run) -> str:
    return client.get(run.get_absolute_url()).text


def test_a_thread_over_its_limit_is_shown_with_what_becomes_of_it(
    admin_client: Client, holder: Node
) -> None:
    html = shown(admin_client, over_limit(holder))
    assert "dc-state--over_limit" in html
    assert "It takes longer than its limit and was told to stop." in html
    assert "It runs in a thread, which cannot be killed" in html
    for page in ("/cron/", "/cron/runs/"):
        assert "dc-state--over_limit" in admin_client.get(page).text


def test_a_process_over_its_limit_is_shown_with_when_it_is_killed(
    admin_client: Client, holder: Node
) -> None:
    html = shown(admin_client, over_limit(holder, isolation="own", kill_grace_seconds=7))
    assert "It has 7 s to stop." in html
    assert "killed with all that it has started" in html


def test_a_run_in_time_is_not_called_over_its_limit(admin_client: Client, holder: Node) -> None:
    run = pages_rows.run(pages_rows.schedule(), "running", node=holder)
    assert "over_limit" not in shown(admin_client, run)
    ended = over_limit(holder, key="ended")
    Run.objects.filter(pk=ended.pk).update(state="failed", reason="timeout")
    html = shown(admin_client, ended)
    assert "dc-state--over_limit" not in html
    assert "It failed: it took longer than its limit." in html


def test_the_page_of_a_schedule_says_its_limits(admin_client: Client) -> None:
    own = pages_rows.schedule(**LIMITS)
    html = admin_client.get(own.get_absolute_url()).text
    assert "a process of its own" in html
    assert "at most 256 MB of memory" in html
    assert "for all attempts" in html
    assert "then it is told to stop, and killed" in html


def test_the_command_line_shows_what_is_over_its_limit(holder: Node) -> None:
    run = over_limit(holder)
    assert "over its limit" in ctl("list").out
    (line,) = json.loads(ctl("list", "--json").out)["schedules"]
    assert line["active_run_id"] == run.pk
    assert line["over_limit_at"] is not None
    assert "over their limit" in ctl("status").out
    assert json.loads(ctl("status", "--json").out)["over_limit"] == 1


@pytest.mark.parametrize(
    ("isolation", "text"),
    [
        ("shared", "A job that never looks cannot be stopped this way."),
        ("own", "If it has not stopped after 7 s, its process is killed"),
    ],
)
def test_whoever_cancels_is_told_whether_the_job_can_be_killed(
    admin_client: Client, holder: Node, isolation: str, text: str
) -> None:
    own = pages_rows.schedule(isolation=isolation, kill_grace_seconds=7)
    run = pages_rows.run(own, "running", node=holder)
    assert text in admin_client.get(reverse("distcron:cancel_run", args=[run.pk])).text
