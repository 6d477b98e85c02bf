"""Schedules in code on the pages: shown as such, run and paused there, and not edited."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import reverse

from distcron_app import cron, sync
from distcron_app.models import AuditEntry, Schedule
from tests.code import Code
from tests.factories import make_schedule, make_user
from tests.integration.test_admin import LIST, change, url

pytestmark = pytest.mark.django_db

KEY = "shop-close-books"
ACT = "admin:distcron_schedule_act"


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Code:
    code = Code(monkeypatch)
    code.define(cron("0 2 * * *", timezone="Asia/Jakarta", notes="Ask <b>Ratna</b>."))
    synced()
    return code


@pytest.fixture
def admin() -> Client:
    client = Client()
    client.force_login(make_user(username="siti", is_superuser=True))
    return client


def synced() -> None:
    sync.sync(sync.Author(actor="cli:deploy"))


def row() -> Schedule:
    return Schedule.objects.get(key=KEY)


def text_of(page: Any) -> list[str]:
    return [str(message) for message in page.context["messages"]]


def test_its_page_says_where_it_is_defined_and_has_no_field_to_type_in(
    code: Code, admin: Client
) -> None:
    page = admin.get(url(row()))
    assert page.status_code == 200
    assert "<code>shop.jobs:42</code>. Change it there; here it can be run, paused" in page.text
    assert 'name="cron"' not in page.text and 'name="_save"' not in page.text
    assert "Ask &lt;b&gt;Ratna&lt;/b&gt;." in page.text
    assert f'href="{reverse(ACT, args=["pause"])}?ids={row().pk}"' in page.text


@pytest.mark.parametrize("button", ["_save", "_continue", "_preview", "_saveasnew", "_addanother"])
def test_a_posted_change_is_refused_and_says_why(code: Code, admin: Client, button: str) -> None:
    before = Schedule.objects.filter(key=KEY).values().get()
    sent = change(row(), job="shop.close_books", cron="0 9 * * *", **{button: "1"})

    answer = admin.post(url(row()), sent, follow=True)

    assert answer.redirect_chain == [(url(row()), 302)]
    assert text_of(answer) == [
        "Shop close books is defined in code (shop.jobs:42), so nothing was saved. "
        "Change it there, or pause it."
    ]
    assert list(Schedule.objects.values()) == [before]
    assert LogEntry.objects.count() == 0


def test_who_may_not_edit_schedules_is_told_no_more(code: Code) -> None:
    client = Client()
    client.force_login(make_user("distcron.view_schedule"))
    assert client.post(url(row()), change(row())).status_code == 403


def test_its_preview_is_refused_as_its_change_is(code: Code, admin: Client) -> None:
    address = reverse("admin:distcron_schedule_preview")
    assert admin.post(f"{address}?schedule={row().pk}", change(row())).status_code == 403


def test_a_form_that_was_open_while_the_code_took_over_saves_nothing(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = make_schedule(key=KEY)
    sent = change(schedule, cron="0 9 * * *")
    code = Code(monkeypatch)
    code.define(cron("0 2 * * *"))
    sync.sync(sync.Author(actor="cli:deploy"), adopt=[KEY])

    answer = admin.post(url(schedule), sent, follow=True)

    assert "so nothing was saved" in text_of(answer)[0]
    assert row().cron == "0 2 * * *"


def test_it_is_paused_and_resumed_as_any_other(code: Code, admin: Client) -> None:
    sent = {"ids": row().pk, "idempotency_key": "k", "reason": "books are closed"}
    admin.post(reverse(ACT, args=["pause"]), sent)
    assert (row().state, row().state_reason) == ("paused", "books are closed")
    admin.post(reverse(ACT, args=["resume"]), sent | {"idempotency_key": "l"})
    assert row().state == "active"


def test_it_is_not_deleted_and_pausing_is_offered(code: Code, admin: Client) -> None:
    asked = admin.get(url(row(), "delete"))
    answer = admin.post(url(row(), "delete"), {"post": "yes"})
    for page in (asked, answer):
        assert "Shop close books: defined in code, in shop.jobs:42" in page.text
        assert f'href="{reverse(ACT, args=["pause"])}?ids={row().pk}"' in page.text
        assert "Yes, I’m sure" not in page.text
    assert Schedule.objects.count() == 1
    assert not AuditEntry.objects.filter(verb="delete").exists()


def test_deleting_several_deletes_none_while_one_is_in_code(code: Code, admin: Client) -> None:
    mine = make_schedule()
    chosen = {"action": "delete_selected", "_selected_action": [row().pk, mine.pk]}
    asked = admin.post(reverse(LIST), chosen)
    answer = admin.post(reverse(LIST), chosen | {"post": "yes"}, follow=True)
    for page in (asked, answer):
        assert "Shop close books: defined in code, in shop.jobs:42" in page.text
        assert f"?ids={row().pk},&quot;" in page.text or f'?ids={row().pk},"' in page.text
    assert Schedule.objects.count() == 2
    admin.post(
        reverse(LIST),
        {"action": "delete_selected", "_selected_action": [mine.pk], "post": "yes"},
    )
    assert [each.key for each in Schedule.objects.all()] == [KEY]


def test_what_left_the_code_can_be_edited_and_is_that_persons_then(
    code: Code, admin: Client
) -> None:
    code.define()
    synced()
    page = admin.get(url(row()))
    assert "<code>shop.jobs:42</code>, until " in page.text
    assert 'name="cron"' in page.text

    sent = change(row(), job="shop.close_books", cron="0 9 * * *")
    assert admin.post(url(row()), sent).status_code == 302

    assert (row().cron, row().defined_in, row().left_code_at) == ("0 9 * * *", "", None)
    entry = AuditEntry.objects.latest("id")
    assert entry.before is not None and entry.before["defined_in"] == "shop.jobs:42"
    code.define(cron("0 2 * * *"))
    synced()
    assert row().cron == "0 9 * * *"


def test_what_left_the_code_can_be_deleted(code: Code, admin: Client) -> None:
    code.drop()
    synced()
    admin.post(url(row(), "delete"), {"post": "yes"})
    assert Schedule.objects.count() == 0


@pytest.mark.parametrize(
    ("value", "keys"), [("yes", [KEY]), ("left", ["gone"]), ("no", ["mine"]), ("x", None)]
)
def test_the_list_is_filtered_by_who_defines(
    code: Code, admin: Client, value: str, keys: list[str] | None
) -> None:
    make_schedule(key="mine")
    code.define(cron("0 2 * * *", key="gone"), name="shop.gone")
    synced()
    code.drop("shop.gone")
    synced()
    page = admin.get(reverse(LIST), {"in_code": value})
    shown = sorted(each.key for each in page.context["cl"].result_list)
    assert shown == (keys or sorted([KEY, "gone", "mine"]))
    assert page.text.count("· in code") == (1 if KEY in shown else 0)


def test_the_page_of_the_schedule_says_where_it_is_defined(code: Code, admin: Client) -> None:
    page = admin.get(row().get_absolute_url()).text
    assert "<dt>Defined in code</dt><dd><code>shop.jobs:42</code></dd>" in page
    assert ">All fields</a>" in page
    Schedule.objects.mark_invalid("Job 'x': not registered.")
    page = admin.get(row().get_absolute_url()).text
    assert "Mend the code, deploy it and sync." in page


def test_the_page_of_what_left_the_code_says_since_when(code: Code, admin: Client) -> None:
    code.drop()
    synced()
    page = admin.get(row().get_absolute_url()).text
    assert "<code>shop.jobs:42</code><span" in page
    assert "No longer defined in code (was shop.jobs:42)" in page
    make_schedule(key="mine")
    other = Schedule.objects.get(key="mine")
    assert "Defined in code" not in admin.get(other.get_absolute_url()).text
