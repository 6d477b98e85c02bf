"""Run now, pause and resume in the admin: who may, what a GET and a double click do."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import reverse

from distcron_app.models import AuditEntry, Run, Schedule
from tests.factories import make_run, make_schedule, make_user

pytestmark = pytest.mark.django_db

LIST = "admin:distcron_schedule_changelist"
ROLES = {
    "nobody": (),
    "viewer": ("distcron.view_schedule",),
    "editor": ("distcron.view_schedule", "distcron.change_schedule"),
    "runner": ("distcron.view_schedule", "distcron.run_schedule"),
    "pauser": ("distcron.view_schedule", "distcron.pause_schedule"),
    # May run, but may not see schedules.
    "blind": ("distcron.run_schedule", "distcron.pause_schedule"),
}
MAY = {("runner", "run"), ("pauser", "pause"), ("pauser", "resume")}


@pytest.fixture
def admin() -> Client:
    client = Client()
    client.force_login(make_user(username="siti", is_superuser=True))
    return client


def client_of(role: str) -> Client:
    client = Client()
    client.force_login(make_user(*ROLES[role]))
    return client


def act(verb: str) -> str:
    return reverse("admin:distcron_schedule_act", args=[verb])


def sent(*schedules: Schedule, key: str = "k", reason: str = "why") -> dict[str, str]:
    ids = ",".join(str(schedule.pk) for schedule in schedules)
    return {"ids": ids, "idempotency_key": key, "reason": reason, "confirm": "yes"}


def rows() -> list[Any]:
    return [
        list(model.objects.order_by("pk").values())
        for model in (Schedule, Run, AuditEntry, LogEntry)
    ]


@pytest.mark.parametrize("verb", ["run", "pause", "resume"])
@pytest.mark.parametrize("role", list(ROLES))
def test_page_and_action_need_their_permission(role: str, verb: str) -> None:
    schedule = make_schedule(state="paused" if verb == "resume" else "active")
    client = client_of(role)
    before = rows()
    page = client.get(act(verb), {"ids": schedule.pk})
    assert page.status_code == (200 if (role, verb) in MAY else 403)
    assert rows() == before
    done = client.post(act(verb), sent(schedule))
    assert done.status_code == (302 if (role, verb) in MAY else 403)
    assert (AuditEntry.objects.count() == 1) is ((role, verb) in MAY)


@pytest.mark.parametrize("role", ["viewer", "editor", "runner", "pauser"])
def test_buttons_and_list_actions_are_hidden_without_their_permission(role: str) -> None:
    schedule = make_schedule()
    client = client_of(role)
    page = client.get(reverse("admin:distcron_schedule_change", args=[schedule.pk])).text
    listed = client.get(reverse(LIST)).text
    assert (act("run") in page) is (role == "runner")
    assert (act("pause") in page) is (role == "pauser")
    assert ('value="run_selected"' in listed) is (role == "runner")
    assert ('value="pause_selected"' in listed) is (role == "pauser")


def test_only_what_makes_sense_is_offered(admin: Client) -> None:
    schedule = make_schedule(state="paused")
    page = admin.get(reverse("admin:distcron_schedule_change", args=[schedule.pk])).text
    assert act("resume") in page and act("pause") not in page


@pytest.mark.parametrize("verb", ["run", "pause", "resume"])
def test_a_get_changes_no_row_whatever_it_carries(admin: Client, verb: str) -> None:
    schedule = make_schedule()
    before = rows()
    assert admin.get(act(verb), sent(schedule)).status_code == 200
    assert admin.head(act(verb), sent(schedule)).status_code == 200
    assert rows() == before


@pytest.mark.parametrize("method", ["put", "patch", "delete"])
def test_other_methods_are_refused(admin: Client, method: str) -> None:
    schedule = make_schedule()
    before = rows()
    assert getattr(admin, method)(f"{act('run')}?ids={schedule.pk}").status_code == 405
    assert rows() == before


def test_the_list_asks_before_it_acts(admin: Client) -> None:
    schedules = [make_schedule(name="First"), make_schedule(name="Second")]
    before = rows()
    page = admin.post(
        reverse(LIST),
        {"action": "pause_selected", "_selected_action": [row.pk for row in schedules]},
    )
    assert page.status_code == 200
    assert "2 schedules" in page.text and "First" in page.text and "Second" in page.text
    assert rows() == before


def test_what_the_page_of_the_list_sends_acts_on_all(admin: Client) -> None:
    schedules = [make_schedule(), make_schedule()]
    page = admin.post(
        reverse(LIST),
        {"action": "pause_selected", "_selected_action": [row.pk for row in schedules]},
    ).text
    fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page))
    assert admin.post(act("pause"), fields | {"reason": "release"}).status_code == 302
    assert set(Schedule.objects.values_list("state", "state_reason", "state_by")) == {
        ("paused", "release", "siti")
    }


def test_a_double_click_makes_one_run_and_the_same_answer(admin: Client) -> None:
    schedule = make_schedule()
    first = admin.post(act("run"), sent(schedule), follow=True).text
    second = admin.post(act("run"), sent(schedule), follow=True).text
    run = Run.objects.get()
    link = reverse("admin:distcron_run_change", args=[run.pk])
    for page in (first, second):
        assert f'<a href="{link}">run {run.pk}</a> is queued' in page
    assert AuditEntry.objects.count() == LogEntry.objects.count() == 1


def test_each_page_carries_a_key_of_its_own(admin: Client) -> None:
    schedule = make_schedule()
    pages = [admin.get(act("run"), {"ids": schedule.pk}) for _ in range(2)]
    keys = {page.context["form"]["idempotency_key"].value() for page in pages}
    assert len(keys) == 2 and all(len(key) == 32 for key in keys)


def test_a_busy_schedule_names_the_run_that_blocks(admin: Client) -> None:
    schedule = make_schedule(name="Report")
    active = make_run(schedule=schedule, state="running")
    page = admin.post(act("run"), sent(schedule), follow=True).text
    assert "Report: busy, blocked by" in page and f">run {active.pk}</a>" in page
    assert Run.objects.count() == 1


def test_one_busy_schedule_does_not_stop_the_others(admin: Client) -> None:
    busy, free = make_schedule(), make_schedule()
    make_run(schedule=busy, state="queued")
    admin.post(act("run"), sent(busy, free))
    assert Run.objects.filter(schedule=free).count() == 1


def test_a_job_with_a_permission_is_not_run_without_it() -> None:
    schedule = make_schedule(job="tests.call_api", arguments={"api_key": "k"})
    page = client_of("runner").post(act("run"), sent(schedule), follow=True).text
    assert "Its job needs the permission auth.view_group" in page
    assert Run.objects.count() == 0


def test_the_run_is_named_without_a_link_to_who_may_not_see_runs() -> None:
    page = client_of("runner").post(act("run"), sent(make_schedule()), follow=True).text
    run = Run.objects.get()
    assert f"run {run.pk} is queued" in page
    assert reverse("admin:distcron_run_change", args=[run.pk]) not in page


def test_a_pause_without_a_reason_asks_again_and_keeps_the_key(admin: Client) -> None:
    schedule = make_schedule()
    page = admin.post(act("pause"), sent(schedule, key="my-key", reason=""))
    assert page.status_code == 200
    assert "Say why" in page.text and 'value="my-key"' in page.text
    assert Schedule.objects.get().state == "active"


def test_a_reason_that_is_too_long_is_refused(admin: Client) -> None:
    page = admin.post(act("pause"), sent(make_schedule(), reason="x" * 501))
    assert page.status_code == 200
    assert Schedule.objects.get().state == "active"


def test_pause_and_resume_are_audited_and_logged(admin: Client) -> None:
    schedule = make_schedule()
    admin.post(act("pause"), sent(schedule, key="a", reason="release"))
    admin.post(act("resume"), sent(schedule, key="b", reason=""))
    assert list(
        AuditEntry.objects.order_by("pk").values_list("verb", "actor", "via", "reason")
    ) == [
        ("pause", "siti", "admin", "release"),
        ("resume", "siti", "admin", ""),
    ]
    assert LogEntry.objects.filter(object_id=str(schedule.pk)).count() == 2
    assert Schedule.objects.get().state == "active"


def test_pausing_a_paused_schedule_is_reported(admin: Client) -> None:
    schedule = make_schedule(state="paused")
    page = admin.post(act("pause"), sent(schedule), follow=True).text
    assert "1 was paused already." in page


def test_a_hostile_reason_is_shown_inert(admin: Client) -> None:
    schedule = make_schedule()
    reason = "<script>alert('x')</script>"
    admin.post(act("pause"), sent(schedule, reason=reason))
    for address in (
        reverse(LIST),
        reverse("admin:distcron_schedule_history", args=[schedule.pk]),
        reverse("admin:distcron_auditentry_changelist"),
    ):
        page = admin.get(address).text
        assert "<script>alert(" not in page and "&lt;script&gt;alert(" in page


@pytest.mark.parametrize("ids", ["", "abc", "0", "9" * 40, "1;drop", "-1", "²"])
def test_ids_of_nothing_bring_the_list_back(admin: Client, ids: str) -> None:
    page = admin.get(act("run"), {"ids": ids}, follow=True)
    assert page.status_code == 200 and "None of these schedules exists" in page.text


def test_an_unknown_verb_is_not_found(admin: Client) -> None:
    assert admin.get(act("destroy")).status_code == 404


@pytest.mark.parametrize("verb", ["run", "pause", "resume"])
def test_a_post_without_the_csrf_token_is_refused(verb: str) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_user(is_superuser=True))
    schedule = make_schedule()
    before = rows()
    assert client.post(act(verb), sent(schedule)).status_code == 403
    assert rows() == before


def test_a_post_with_the_token_of_the_page_is_accepted() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_user(is_superuser=True))
    schedule = make_schedule()
    page = client.get(act("run"), {"ids": schedule.pk}).text
    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page)
    assert token is not None
    answer = client.post(act("run"), sent(schedule) | {"csrfmiddlewaretoken": token[1]})
    assert answer.status_code == 302 and Run.objects.count() == 1


def test_nobody_gets_in_without_a_login() -> None:
    answer = Client().post(act("run"), sent(make_schedule()))
    assert answer.status_code == 302 and "/login/" in answer.headers["Location"]
    assert Run.objects.count() == 0
