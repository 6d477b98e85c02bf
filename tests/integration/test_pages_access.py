"""Who may see and do what on the pages, and what every answer carries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from django.db import OperationalError
from django.test import Client
from django.urls import clear_script_prefix, reverse, set_script_prefix

from distcron_app import history
from distcron_app.locks import get_backend, new_owner_token
from distcron_app.models import AuditEntry, Node, Run, RunOutput, Schedule
from tests.integration.pages_rows import VIEWS, node, run, schedule, user

pytestmark = [
    pytest.mark.django_db,
]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# name of the route, what it is of, the permission that opens it
PAGES = [
    ("overview", None, "view_dashboard"),
    ("schedules", None, "view_schedule"),
    ("schedule", "schedule", "view_schedule"),
    ("run_now", "schedule", "run_schedule"),
    ("pause", "schedule", "pause_schedule"),
    ("resume", "schedule", "pause_schedule"),
    ("explain", "schedule", "view_schedule"),
    ("runs", None, "view_run"),
    ("run", "run", "view_run"),
    ("cancel_run", "run", "cancel_run"),
    ("run_again", "run", "run_schedule"),
    ("nodes", None, "view_node"),
    ("locks", None, "view_lock"),
    ("release_lock", "lock", "force_release_lock"),
]


@pytest.fixture
def rows(settings: Any) -> dict[str, Any]:
    settings.DISTCRON = {"LOCK_BACKEND": "memory"}
    get_backend().acquire({"name:export": new_owner_token()}, 60_000)
    node()
    own = schedule()
    finished = run(own)
    RunOutput.objects.create(run=finished, output="25 closed\n", traceback="Traceback of billing")
    return {"schedule": own, "run": finished, "lock": "name:export"}


def address(name: str, of: str | None, rows: dict[str, Any]) -> str:
    if of == "lock":
        return f"{reverse(f'distcron:{name}')}?name=name%3Aexport"
    return reverse(f"distcron:{name}", args=[rows[of].pk] if of else [])


@pytest.mark.parametrize(("name", "of", "permission"), PAGES)
def test_page_opens_with_its_own_permission_alone(
    client: Client, rows: dict[str, Any], name: str, of: str | None, permission: str
) -> None:
    client.force_login(user("siti", permission))
    assert client.get(address(name, of, rows)).status_code == 200


@pytest.mark.parametrize(("name", "of", "permission"), PAGES)
def test_page_without_its_permission_names_it(
    client: Client, rows: dict[str, Any], name: str, of: str | None, permission: str
) -> None:
    others = {"view_dashboard", "view_schedule", "view_run", "view_node", "view_output"}
    others |= {"run_schedule", "pause_schedule", "view_lock", "force_release_lock", "cancel_run"}
    client.force_login(user("siti", *(others - {permission})))
    answer = client.get(address(name, of, rows))
    assert answer.status_code == 403
    assert f"distcron.{permission}" in answer.text


@pytest.mark.parametrize(("name", "of", "permission"), PAGES)
def test_stranger_is_sent_to_the_login(
    client: Client, rows: dict[str, Any], name: str, of: str | None, permission: str
) -> None:
    path = address(name, of, rows)
    answer = client.get(path)
    assert (answer.status_code, answer["Location"]) == (302, f"/login/?next={quote(path)}")


@pytest.mark.parametrize(("name", "of", "permission"), PAGES)
def test_every_answer_carries_the_strict_headers(
    admin_client: Client,
    client: Client,
    rows: dict[str, Any],
    name: str,
    of: str | None,
    permission: str,
) -> None:
    client.force_login(user("siti", "view_output"))
    for answer in (admin_client.get(address(name, of, rows)), client.get(address(name, of, rows))):
        assert answer["Content-Security-Policy"] == POLICY
        assert answer["X-Content-Type-Options"] == "nosniff"
        assert answer["X-Frame-Options"] == "DENY"
        assert answer["Referrer-Policy"] == "same-origin"


@pytest.mark.parametrize(("name", "of", "permission"), PAGES)
def test_page_has_no_inline_script_or_style(
    admin_client: Client, rows: dict[str, Any], name: str, of: str | None, permission: str
) -> None:
    html = admin_client.get(address(name, of, rows)).text
    assert "<style" not in html
    assert " style=" not in html
    assert " onclick=" not in html
    assert html.count("<script") == html.count('<script type="module" src="/static/') == 1


@pytest.mark.parametrize(("name", "of", "permission"), PAGES)
def test_get_changes_no_row(
    admin_client: Client, rows: dict[str, Any], name: str, of: str | None, permission: str
) -> None:
    def stored() -> list[Any]:
        models = (Schedule, Run, Node, RunOutput, AuditEntry)
        return [list(model.objects.order_by("pk").values()) for model in models]

    before = stored()
    admin_client.get(address(name, of, rows))
    admin_client.get(address(name, of, rows), {"fragment": "live"})
    assert stored() == before


@pytest.mark.parametrize("name", ["login", "no-such-page"])
def test_pages_of_the_site_carry_the_strict_policy(client: Client, name: str) -> None:
    assert client.get(f"/{name}/")["Content-Security-Policy"] == POLICY


def test_output_and_traceback_need_their_own_permission(
    client: Client, rows: dict[str, Any]
) -> None:
    failed = run(rows["schedule"], "failed", reason="error", error="Boom")
    RunOutput.objects.create(run=failed, output="25 closed\n", traceback="Traceback of billing")
    client.force_login(user("siti", *VIEWS))
    html = client.get(failed.get_absolute_url()).text
    assert "25 closed" not in html
    assert "Traceback of billing" not in html
    assert "distcron.view_output" in html


def test_output_is_shown_to_who_may_read_it(client: Client, rows: dict[str, Any]) -> None:
    client.force_login(user("siti", *VIEWS, "view_output"))
    assert "25 closed" in client.get(rows["run"].get_absolute_url()).text


def test_download_of_the_output_is_plain_text_to_be_saved(
    client: Client, rows: dict[str, Any]
) -> None:
    client.force_login(user("siti", "view_run", "view_output"))
    answer = client.get(reverse("distcron:run_output", args=[rows["run"].pk]))
    assert answer.content == b"25 closed\n"
    assert answer["Content-Type"] == "text/plain; charset=utf-8"
    assert answer["Content-Disposition"] == f'attachment; filename="run-{rows["run"].pk}.txt"'


@pytest.mark.parametrize("held", ["view_run", "view_output"])
def test_download_needs_both_permissions(client: Client, rows: dict[str, Any], held: str) -> None:
    client.force_login(user("siti", held))
    assert client.get(reverse("distcron:run_output", args=[rows["run"].pk])).status_code == 403


def test_links_lead_only_where_the_user_may_go(client: Client, rows: dict[str, Any]) -> None:
    client.force_login(user("siti", "view_schedule"))
    html = client.get(rows["schedule"].get_absolute_url()).text
    for name in ("overview", "runs", "nodes", "locks"):
        assert f'<a href="{reverse(f"distcron:{name}")}"' not in html
    assert reverse("distcron:run_now", args=[rows["schedule"].pk]) not in html
    assert reverse("distcron:pause", args=[rows["schedule"].pk]) not in html


@pytest.mark.parametrize(
    "path",
    [
        "runs/0/",
        "runs/999999/",
        f"runs/{10**30}/",
        f"runs/{10**30}/output.txt",
        "schedules/999999/",
        f"schedules/{10**30}/",
        f"schedules/{10**30}/run/",
        "runs/-1/",
        "runs/1;drop/",
        "schedules/%00/",
    ],
)
def test_unknown_and_hostile_ids_are_not_found(admin_client: Client, path: str) -> None:
    assert admin_client.get(f"/cron/{path}").status_code == 404


def test_live_needs_no_login_and_no_database(
    client: Client, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(0):
        answer = client.get("/live")
    assert answer.json() == {"status": "live"}


def test_ready_when_the_database_is_migrated(client: Client) -> None:
    assert client.get("/ready").json() == {"status": "ready"}
    assert client.get(reverse("distcron:ready")).status_code == 200


def test_not_ready_while_a_migration_is_pending(client: Client) -> None:
    from django.db.migrations.recorder import MigrationRecorder

    MigrationRecorder.Migration.objects.filter(app="distcron").delete()
    answer = client.get("/ready")
    assert (answer.status_code, answer.json()["migrations"]) == (503, "pending")


def test_root_leads_to_the_overview(client: Client) -> None:
    assert client.get("/")["Location"] == "/cron/"


@pytest.fixture
def sub_path() -> Iterator[str]:
    set_script_prefix("/ops/")
    yield "/ops"
    clear_script_prefix()


def test_links_keep_the_prefix_of_a_sub_path(
    admin_client: Client, rows: dict[str, Any], sub_path: str
) -> None:
    html = admin_client.get("/cron/runs/", SCRIPT_NAME=sub_path).text
    assert f'href="/ops/cron/runs/{rows["run"].pk}/"' in html
    assert 'data-dc-poll="/ops/cron/runs/?' in html
    assert 'href="/cron/' not in html


def test_language_can_be_switched(admin_client: Client) -> None:
    answer = admin_client.post("/i18n/setlang/", {"language": "id", "next": "/cron/nodes/"})
    assert answer["Location"] == "/cron/nodes/"
    assert '<html lang="id">' in admin_client.get("/cron/nodes/").text


def test_database_that_does_not_answer_is_said_in_a_page(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OperationalError("connection refused by db.internal")

    monkeypatch.setattr(history, "membership", refuse)
    answer = admin_client.get("/cron/")
    assert answer.status_code == 503
    assert "The database does not answer" in answer.text
    assert "db.internal" not in answer.text
    assert answer["Content-Security-Policy"] == POLICY


def test_error_of_the_server_has_a_page_of_its_own(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(history, "membership", fail)
    admin_client.raise_request_exception = False
    answer = admin_client.get("/cron/")
    assert answer.status_code == 500
    assert "The server could not answer" in answer.text
    assert "a secret detail" not in answer.text
    assert answer["Content-Security-Policy"] == POLICY


@pytest.mark.parametrize("path", ["/cron/", "/cron/runs/", "/cron/?fragment=live"])
def test_shared_caches_keep_no_page(admin_client: Client, path: str) -> None:
    assert admin_client.get(path)["Cache-Control"] == "private, no-cache"
