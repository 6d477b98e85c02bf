"""The locks page, and the release of a lock from it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from django.test import Client, override_settings
from django.urls import reverse

from distcron_app.locks import get_backend, get_level
from distcron_app.locks.redis import RedisLockBackend
from distcron_app.models import Attempt, AuditEntry, Run, Schedule
from tests.integration.lock_rows import NO_REDIS, ODD, hold, is_held, redis_locks, remove_ttl
from tests.integration.pages_rows import VIEWS, node, run, schedule, user

pytestmark = pytest.mark.django_db

KEY = "0123456789abcdef"
TOKEN = "a" * 32


@pytest.fixture
def namespace() -> Iterator[str]:
    with redis_locks() as used:
        yield used


@pytest.fixture
def running(namespace: str) -> Run:
    """Return an active run whose schedule's lock is held."""
    own = schedule(name="Close invoices")
    Schedule.objects.filter(pk=own.pk).update(fencing_token=4712)
    active = run(own, "running", node=node("web-2"), fencing_token=4712)
    hold(f"schedule:{own.pk}", TOKEN, holder="web-2", namespace=namespace)
    return active


@dataclasses.dataclass(frozen=True)
class Server:
    """One server of a quorum, as its backend tells of it."""

    alias: str
    state: str
    cause: str


def page(client: Client) -> str:
    return str(client.get("/cron/locks/").text)


def words(html: str) -> str:
    """Return the text of a page as a reader sees it, in one line."""
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def address(name: str, level: str = "standard") -> str:
    return f"{reverse('distcron:release_lock')}?name={quote(name, safe='')}&level={level}"


def post(client: Client, name: str, **given: str) -> Any:
    values = {"lock": name, "reason": "node hangs", "idempotency_key": KEY}
    return client.post(address(name), values | given)


def test_a_row_says_who_holds_it_for_which_run_and_how_it_is(
    admin_client: Client, running: Run
) -> None:
    html = page(admin_client)
    shown = words(html)
    assert "Close invoices" in shown
    assert f"schedule:{running.schedule_id} standard" in shown
    assert "web-2 alive aaaaaaaa…" in shown
    assert TOKEN not in html
    assert f'href="{running.get_absolute_url()}"' in html
    assert "4712" in shown
    assert "healthy Its run is active and its node is alive." in shown


def test_a_level_says_that_it_answers(admin_client: Client, running: Run) -> None:
    assert re.search(r"standard redis answers in \d+ ms", words(page(admin_client)))


def test_a_stuck_lock_says_why(admin_client: Client, namespace: str) -> None:
    hold("name:orphan", TOKEN, holder="", namespace=namespace)
    remove_ttl("name:orphan", namespace)
    shown = words(page(admin_client))
    assert "stuck It has no TTL, which only a foreign hand can cause. Release it." in shown
    assert "no TTL" in shown
    assert "unknown" in shown


def test_without_locks_says_what_that_means(admin_client: Client, namespace: str) -> None:
    assert "No lock is held. So no job is running" in words(page(admin_client))


def test_refused_settings_are_named(admin_client: Client) -> None:
    with override_settings(DISTCRON={"LOCK_BACKEND": "radis"}):
        answer = admin_client.get("/cron/locks/")
    assert answer.status_code == 200
    assert "LOCK_BACKEND" in answer.text


def test_a_backend_that_comes_back_is_seen_by_the_next_poll(
    admin_client: Client, settings: Any
) -> None:
    settings.DISTCRON = {"LOCK_BACKEND": "redis"}
    with override_settings(CACHES=NO_REDIS):
        away = admin_client.get("/cron/locks/?fragment=live")
    back = admin_client.get("/cron/locks/?fragment=live", headers={"If-None-Match": away["ETag"]})
    assert (away.status_code, back.status_code) == (200, 200)
    assert "Locks: unknown." in away.text
    assert "Locks: unknown." not in back.text


def test_a_level_that_is_away_is_named_beside_the_locks_of_the_others(
    admin_client: Client, settings: Any
) -> None:
    settings.DISTCRON = {"LOCK_BACKEND": "redis", "LOCK_LEVELS": {"local": ["memory"]}}
    with override_settings(CACHES=NO_REDIS):
        get_level("local").backend.acquire({"name:here": TOKEN}, 60_000)
        shown = words(page(admin_client))
    assert "Some locks: unknown. Level standard does not answer:" in shown
    assert "here name:here local" in shown


def test_the_servers_of_a_quorum_are_shown_with_their_state(
    admin_client: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = (Server("r1", "up", ""), Server("r2", "up", ""), Server("r3", "down", "Timeout"))
    monkeypatch.setattr(RedisLockBackend, "members", lambda backend: states, raising=False)
    shown = words(page(admin_client))
    assert "r1 up r2 up r3 does not answer Timeout quorum 2 of 3" in shown


def test_only_who_may_release_sees_the_button(client: Client, running: Run) -> None:
    client.force_login(user("siti", "view_lock"))
    assert "Force release" not in page(client)
    client.force_login(user("ratna", "view_lock", "force_release_lock"))
    assert "Force release…" in page(client)


def test_links_of_the_reader_stay_within_the_permissions(client: Client, running: Run) -> None:
    client.force_login(user("siti", "view_lock"))
    html = page(client)
    assert "Close invoices" in html
    assert running.get_absolute_url() not in html
    assert f"/schedules/{running.schedule_id}/" not in html


def test_post_without_the_permission_releases_nothing(client: Client, running: Run) -> None:
    client.force_login(user("siti", *VIEWS, "view_lock"))
    answer = post(client, f"schedule:{running.schedule_id}")
    assert answer.status_code == 403
    assert "distcron.force_release_lock" in answer.text
    assert is_held(f"schedule:{running.schedule_id}")
    assert not AuditEntry.objects.exists()


def test_the_confirmation_says_what_will_happen(admin_client: Client, running: Run) -> None:
    html = admin_client.get(address(f"schedule:{running.schedule_id}")).text
    shown = words(html)
    assert "Node web-2 is alive and will lose the lock" in shown
    assert "what it reports with a fencing token below 4713 is refused" in shown
    assert f"Its run {running.pk} will be shown as lost, and no node starts it again." in shown
    assert "Type close, so that no other lock is released by mistake." in shown
    assert "csrfmiddlewaretoken" in html


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"lock": "clsoe"}, "“clsoe” is not this lock. Type close."),
        ({"lock": ""}, "This field is required."),
        ({"reason": "  "}, "This field is required."),
    ],
)
def test_a_wrong_name_or_no_reason_releases_nothing(
    admin_client: Client, running: Run, given: dict[str, str], problem: str
) -> None:
    typed = {"lock": "close", "reason": "node hangs"} | given
    answer = post(admin_client, f"schedule:{running.schedule_id}", **typed)
    assert answer.status_code == 400
    assert problem in words(answer.text)
    for value in filter(str.strip, typed.values()):
        assert f'value="{value}"' in answer.text
    assert is_held(f"schedule:{running.schedule_id}")
    assert not AuditEntry.objects.exists()


@pytest.mark.parametrize("typed", ["close", "Close invoices", "schedule:{id}"])
def test_a_release_takes_the_lock_and_says_what_became_of_the_run(
    admin_client: Client, running: Run, typed: str
) -> None:
    name = f"schedule:{running.schedule_id}"
    answer = post(admin_client, name, lock=typed.format(id=running.schedule_id))
    assert answer["Location"] == "/cron/locks/"
    assert (
        f"“{name}”: The lock is released. Run {running.pk} is shown as lost. "
        "The fencing token is 4713."
    ) in page(admin_client)
    assert not is_held(name)
    running.refresh_from_db()
    assert (running.state, running.reason) == ("lost", "released")
    entry = AuditEntry.objects.get()
    assert (entry.via, entry.verb, entry.actor, entry.reason) == (
        "dashboard",
        "release_lock",
        "admin",
        "node hangs",
    )


def test_a_double_click_releases_once(admin_client: Client, running: Run, namespace: str) -> None:
    name = f"schedule:{running.schedule_id}"
    post(admin_client, name, lock="close")
    # Between the clicks another node has taken the lock.
    hold(name, "b" * 32, holder="web-3", namespace=namespace)
    second = post(admin_client, name, lock="close")
    assert second["Location"] == "/cron/locks/"
    assert is_held(name)
    assert AuditEntry.objects.count() == 1
    assert Schedule.objects.get().fencing_token == 4713


@pytest.mark.parametrize("text", [ODD, "<script>alert(1)</script>", "a b", "\u202egnp", "x" * 500])
def test_a_public_lock_of_any_text_is_released(
    admin_client: Client, namespace: str, text: str
) -> None:
    hold(f"name:{text}", TOKEN, holder="app-7", namespace=namespace)
    html = page(admin_client)
    (link,) = re.findall(r'href="(/cron/locks/release/[^"]+)"', html)
    link = link.replace("&amp;", "&")
    confirmation = admin_client.get(link)
    assert confirmation.status_code == 200
    assert "<script>alert" not in html + confirmation.text
    typed = text.replace("\u202e", "\\x202e")
    values = {"lock": typed, "reason": "test", "idempotency_key": KEY}
    assert admin_client.post(link, values).status_code == 302
    assert not is_held(f"name:{text}")
    assert AuditEntry.objects.get().object_type == "lock"


@pytest.mark.parametrize("name", ["", "name:gone", "schedule:1", "schedule:9" * 30, "a\x00b"])
def test_a_lock_that_is_not_held_is_no_page(
    admin_client: Client, namespace: str, name: str
) -> None:
    assert admin_client.get(address(name)).status_code == 404
    assert post(admin_client, name).status_code == 404
    assert not AuditEntry.objects.exists()


def test_while_redis_is_away_a_lock_is_unknown_and_not_gone(
    admin_client: Client, settings: Any
) -> None:
    settings.DISTCRON = {"LOCK_BACKEND": "redis"}
    with override_settings(CACHES=NO_REDIS):
        answer = admin_client.get(address("name:export"))
    assert answer.status_code == 404
    assert "is unknown, its backend does not answer" in answer.text


def test_while_redis_is_away_a_run_can_be_taken_from_its_node(
    admin_client: Client, settings: Any
) -> None:
    settings.DISTCRON = {"LOCK_BACKEND": "redis"}
    active = run(schedule(), "running", node=node("web-2"))
    with override_settings(CACHES=NO_REDIS):
        answer = post(admin_client, f"schedule:{active.schedule_id}", lock="close")
        shown = page(admin_client)
    assert answer.status_code == 302
    assert "so the lock itself ends with its TTL" in shown
    assert "dc-banner--warn" in shown
    active.refresh_from_db()
    assert active.state == "lost"


def test_the_schedule_page_shows_level_and_holder(admin_client: Client, running: Run) -> None:
    shown = words(admin_client.get(f"/cron/schedules/{running.schedule_id}/").text)
    assert "Lock level standard Lock held by web-2 aaaaaaaa… healthy" in shown


def test_the_schedule_page_shows_no_holder_to_who_may_not_see_locks(
    client: Client, running: Run
) -> None:
    client.force_login(user("siti", "view_schedule"))
    shown = words(client.get(f"/cron/schedules/{running.schedule_id}/").text)
    assert "Lock level standard" in shown
    assert "held by" not in shown


def test_the_schedule_page_stays_while_redis_is_away(admin_client: Client, settings: Any) -> None:
    settings.DISTCRON = {"LOCK_BACKEND": "redis"}
    own = schedule()
    with override_settings(CACHES=NO_REDIS):
        answer = admin_client.get(own.get_absolute_url())
    assert answer.status_code == 200
    assert "Lock unknown:" in words(answer.text)


def test_a_run_that_was_released_says_who_why_and_that_its_report_was_refused(
    admin_client: Client, running: Run
) -> None:
    post(admin_client, f"schedule:{running.schedule_id}", lock="close")
    Attempt.objects.update(late_state="succeeded", late_at=running.due_at)
    shown = words(admin_client.get(running.get_absolute_url()).text)
    assert "A person released its lock while the job was running on node web-2." in shown
    assert "Its lock was released by admin" in shown
    assert "“ node hangs ”" in shown
    assert "What its node reports late is refused, and shown with the attempt." in shown
    assert "its late report settles this run" not in shown
    assert "It reported “succeeded” too late. The report was refused and changed nothing" in shown


def test_a_released_run_that_waits_again_says_so(admin_client: Client, running: Run) -> None:
    Run.objects.filter(pk=running.pk).update(delivery="at_least_once")
    post(admin_client, f"schedule:{running.schedule_id}", lock="close")
    shown = words(admin_client.get(running.get_absolute_url()).text)
    assert "A person released its lock in the middle." in shown
    assert "Its node died" not in shown


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("running", "The job is told to stop where it asks."),
        ("succeeded", "The outcome is what it reported."),
    ],
)
def test_a_lock_that_was_lost_is_a_warning_beside_the_state(
    admin_client: Client, namespace: str, state: str, text: str
) -> None:
    details = {"lease_lost": "lock 'schedule:7' is held by another owner"}
    own = run(schedule(), state, node=node(), details=details)
    shown = words(admin_client.get(own.get_absolute_url()).text)
    assert "Its lock was lost" in shown
    assert "held by another owner" in shown
    assert text in shown


def test_a_job_that_stopped_for_its_lock_says_what_to_do(
    admin_client: Client, namespace: str
) -> None:
    own = run(schedule(), "cancelled", node=node(), reason="lease_lost")
    shown = words(admin_client.get(own.get_absolute_url()).text)
    assert "It was cancelled: the job stopped because its lease was lost." in shown
    assert "Run the schedule now if the work is still wanted." in shown


def test_queries_of_the_page_do_not_grow_with_the_locks(
    admin_client: Client, namespace: str, django_assert_max_num_queries: Any
) -> None:
    for number in range(12):
        own = schedule(f"s-{number}")
        run(own, "running", node=node(f"web-{number}"))
        hold(f"schedule:{own.pk}", TOKEN, holder=f"web-{number}", namespace=namespace)
        hold(f"name:{number}", TOKEN, holder="app", namespace=namespace)
    with django_assert_max_num_queries(7):
        page(admin_client)


def test_many_locks_are_cut_and_counted(admin_client: Client, settings: Any) -> None:
    settings.DISTCRON = {"LOCK_BACKEND": "memory"}
    get_backend().acquire({f"name:{number}": TOKEN for number in range(302)}, 60_000)
    assert "2 more locks are not shown." in words(page(admin_client))
