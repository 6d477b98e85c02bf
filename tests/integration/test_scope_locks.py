"""The lock of a scope: its name on the pages and the command line, and its release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client

from distcron_app import holdings, operations
from distcron_app.explained_instants import explain_instant
from distcron_app.instants import database_now
from distcron_app.locks import get_backend, new_owner_token, scope_lock_name
from distcron_app.models import AuditEntry, Run, Schedule
from tests.factories import make_node, make_run, make_schedule
from tests.integration.lock_rows import redis_locks
from tests.integration.schedulerctl_builders import ctl
from tests.integration.test_concurrency_keys import claim, due, occupy, run_of

pytestmark = pytest.mark.django_db

NAME = scope_lock_name("invoices-acme")


@pytest.fixture(autouse=True)
def namespace() -> Iterator[str]:
    with redis_locks() as used:
        yield used


def held(schedule: Schedule, **values: Any) -> Run:
    """Return an active run of the schedule that holds the lock of its scope."""
    run = occupy(schedule, node=make_node(name="web-1"), **values)
    assert get_backend().acquire({NAME: run.owner_token}, 15_000)
    return run


def test_the_lock_is_shown_with_its_key_its_schedule_and_its_run(admin_client: Client) -> None:
    run = held(due(name="Invoices"))
    (lock,) = holdings.held_locks(database_now()).locks
    assert (lock.name, lock.run, lock.concurrency_key) == (NAME, run, "invoices-acme")
    assert (lock.verdict, lock.label) == ("healthy", "Invoices")
    page = admin_client.get("/cron/locks/").content.decode()
    assert "invoices-acme" in page
    (row,) = ctl("locks", "--json").data["locks"]
    assert (row["concurrency_key"], row["schedule"]) == ("invoices-acme", run.schedule.key)


def test_the_page_of_a_schedule_and_the_command_find_the_lock_by_its_key() -> None:
    schedule, other = due(), due()
    run = held(schedule)
    for each in (schedule, other):
        (lock,) = holdings.lock_of(each, database_now()).locks
        assert (lock.name, lock.run) == (NAME, run)
    assert ctl("locks", "ttl", schedule.key, "--json").data["lock"]["name"] == NAME


def test_a_lock_without_an_active_run_is_named_by_the_schedules_of_its_key() -> None:
    schedule = due()
    due("globex")
    get_backend().acquire({NAME: new_owner_token()}, 15_000)
    (lock,) = holdings.held_locks(database_now()).locks
    assert (lock.schedule, lock.concurrency_key) == (schedule, "invoices-acme")
    assert "No run with this concurrency key is active" in lock.why


def test_an_unknown_scope_is_still_shown_by_its_name() -> None:
    name = scope_lock_name("nobody")
    get_backend().acquire({name: new_owner_token()}, 15_000)
    (lock,) = holdings.held_locks(database_now()).locks
    assert (lock.name, lock.schedule, lock.concurrency_key) == (name, None, "")


def test_a_release_fences_the_run_with_the_key_and_no_other_of_its_schedule() -> None:
    schedule = due(overlap="allow")
    run = held(schedule)
    beside = make_run(
        schedule=schedule, state="running", attempt=1, concurrency_key="invoices-globex"
    )
    done = operations.release_lock(
        NAME, reason="stuck", actor="siti", via="cli", idempotency_key="once-and-only"
    )
    schedule.refresh_from_db()
    run.refresh_from_db()
    assert (done.was_held, done.lost, done.fencing_token) == (True, (run.pk,), 1)
    assert (run.state, run.reason, run.fencing_token) == ("lost", "released", 1)
    assert Run.objects.get(pk=beside.pk).state == "running"
    assert get_backend().inspect([NAME]) == {}
    entry = AuditEntry.objects.get(verb="release_lock")
    assert (entry.object_id, entry.after["lock"]) == (str(schedule.pk), NAME)
    again = operations.release_lock(
        NAME, reason="stuck", actor="siti", via="cli", idempotency_key="once-and-only"
    )
    assert again.lost == (run.pk,)
    assert AuditEntry.objects.filter(verb="release_lock").count() == 1


def test_a_release_of_a_scope_without_runs_ends_the_lock_alone() -> None:
    get_backend().acquire({NAME: new_owner_token()}, 15_000)
    done = operations.release_lock(NAME, reason="stuck", actor="siti", via="cli")
    assert (done.was_held, done.fencing_token) == (True, None)


def test_the_page_of_a_blocked_run_names_the_schedule_that_blocked_it(
    admin_client: Client,
) -> None:
    blocking = occupy(due(name="Nightly invoices", ago=-60))
    schedule = due()
    claim(make_node(), schedule)
    text = "a run of “Nightly invoices”, which has the same concurrency key invoices-acme"
    page = admin_client.get(run_of(schedule).get_absolute_url()).content.decode()
    assert text in page
    assert f"Run #{blocking.pk} blocked it" in page
    Schedule.objects.filter(pk=schedule.pk).update(created_at=blocking.due_at)
    at = schedule.next_run_at
    assert at is not None
    answer = explain_instant(schedule, at, now=database_now())
    facts = {fact.code: fact.value for fact in answer.facts}
    assert text in answer.sentence
    assert (facts["blocked_by"], facts["blocked_by_schedule"]) == (blocking.pk, "Nightly invoices")


def test_run_now_says_whose_run_is_in_the_way(admin_client: Client) -> None:
    occupy(due(name="Nightly invoices", ago=-60))
    schedule = due(ago=-60)
    answer = ctl("run", schedule.key)
    assert (answer.code, "of 'Nightly invoices'" in answer.error) == (5, True)
    page = admin_client.post(
        f"/cron/schedules/{schedule.pk}/run/", {"idempotency_key": "once-and-only"}
    )
    assert page.status_code == 409
    assert "It is of Nightly invoices" in page.content.decode()


def test_the_pages_and_the_form_show_the_key_with_its_arguments(admin_client: Client) -> None:
    schedule = due()
    page = admin_client.get(schedule.get_absolute_url()).content.decode()
    assert "<code>invoices-acme</code>" in page
    fields = {
        "kind": "cron",
        "cron": "0 6 * * *",
        "timezone": "UTC",
        "job": "tests.bill",
        "arguments": '{"customer": "globex"}',
    }
    address = "/admin/distcron/schedule/preview/"
    for typed, shown in (
        ("invoices-{customer}", "Concurrency key: invoices-globex"),
        ("invoices-{token}", "is secret"),
    ):
        page = admin_client.post(address, fields | {"concurrency_key": typed}).content.decode()
        assert shown in page


def test_a_run_that_ended_under_a_key_says_which(admin_client: Client) -> None:
    run = make_run(schedule=make_schedule(), concurrency_key="invoices-<b>")
    page = admin_client.get(run.get_absolute_url()).content.decode()
    assert "invoices-&lt;b&gt;" in page
