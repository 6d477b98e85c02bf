"""The admin's form and lists: errors on their fields, secrets masked, history kept."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import ADDITION, CHANGE, DELETION, LogEntry
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from distcron_app.models import Attempt, AuditEntry, Run, RunOutput, Schedule
from tests.factories import make_node, make_run, make_schedule, make_user

pytestmark = pytest.mark.django_db

LIST = "admin:distcron_schedule_changelist"
ADD = "admin:distcron_schedule_add"
HOSTILE = "<script>alert('x')</script>"


@pytest.fixture
def admin() -> Client:
    client = Client()
    client.force_login(make_user(username="siti", is_superuser=True))
    return client


def new(**values: Any) -> dict[str, Any]:
    return {
        "name": "Report",
        "key": "report",
        "job": "project.demo.heartbeat",
        "arguments": "",
        "kind": "cron",
        "cron": "30 2 * * *",
        "timezone": "Asia/Jakarta",
        "delivery": "at_most_once",
    } | values


def change(schedule: Schedule, **values: Any) -> dict[str, Any]:
    return new(name=schedule.name, key=schedule.key, seen_version=schedule.version) | values


def url(schedule: Schedule, view: str = "change") -> str:
    return reverse(f"admin:distcron_schedule_{view}", args=[schedule.pk])


# --- the form ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "field", "text"),
    [
        ({"cron": "0 25 * * *"}, "cron", "25"),
        ({"cron": ""}, "cron", ""),
        ({"timezone": "WIB"}, "timezone", "Did you mean Asia/Jakarta?"),
        ({"kind": "interval", "cron": ""}, "interval_seconds", ""),
        ({"kind": "once", "cron": ""}, "run_at", ""),
        ({"job": "project.demo.gret"}, "job", "Did you mean 'project.demo.greet'"),
        ({"job": ""}, "job", "required"),
        ({"arguments": "{"}, "arguments", "line 1, column 2"),
        ({"arguments": "[1]"}, "arguments", "must be a JSON object"),
        ({"arguments": '{"a": 1, "a": 2}'}, "arguments", "“a” is given twice"),
        ({"arguments": '{"batch": 1}'}, "arguments", "batch: is not a parameter"),
        (
            {"job": "project.demo.greet", "arguments": '{"name": 1}'},
            "arguments",
            "name: must be",
        ),
        ({"job": "project.demo.greet"}, "arguments", "name: is required"),
        (
            {"starts_at": "2027-01-02T00:00:00", "ends_at": "2027-01-01T00:00:00"},
            "ends_at",
            "Must be later",
        ),
        ({"key": "no spaces"}, "key", "letters"),
    ],
)
def test_an_error_is_on_the_field_that_is_wrong(
    admin: Client, values: dict[str, str], field: str, text: str
) -> None:
    page = admin.post(reverse(ADD), new(**values))
    assert page.status_code == 200
    errors = page.context["adminform"].form.errors
    assert list(errors) == [field]
    assert text in str(errors.as_data()[field]).replace("\\'", "'")
    assert Schedule.objects.count() == 0


def test_nothing_that_was_typed_is_lost_by_an_error(admin: Client) -> None:
    typed = new(cron="bad", job="gone.job", arguments='{"x": [1,', notes="mine", name="Nàme 🚀")
    page = admin.post(reverse(ADD), typed).text
    assert "bad</textarea>" in page
    assert '<option value="gone.job" selected>gone.job (not registered)</option>' in page
    assert "{&quot;x&quot;: [1," in page
    assert "mine</textarea>" in page
    assert 'value="Nàme 🚀"' in page


def test_jobs_are_offered_with_their_summaries(admin: Client) -> None:
    page = admin.get(reverse(ADD)).text
    assert "project.demo.greet — Greet somebody." in page


def test_a_stored_job_that_is_not_registered_is_shown_and_kept(admin: Client) -> None:
    schedule = make_schedule()
    Schedule.objects.update(job="gone.job")
    assert "gone.job (not registered)" in admin.get(url(schedule)).text


def test_instants_are_typed_in_the_zone_of_the_schedule(admin: Client) -> None:
    sent = new(kind="once", cron="", run_at="2030-07-01T09:00:00", timezone="America/New_York")
    assert admin.post(reverse(ADD), sent).status_code == 302
    schedule = Schedule.objects.get()
    assert schedule.run_at is not None
    assert schedule.run_at.isoformat() == "2030-07-01T13:00:00+00:00"
    assert 'value="2030-07-01T09:00:00"' in admin.get(url(schedule)).text


def test_the_next_five_runs_are_shown_with_zone_and_utc(admin: Client) -> None:
    page = admin.get(url(make_schedule(cron="30 2 1 1 *"))).text
    assert page.count("02:30 WIB") == 5
    assert page.count("19:30 UTC") == 5


def test_a_secret_argument_is_masked_and_kept_when_it_is_left_alone(admin: Client) -> None:
    schedule = make_schedule(job="tests.call_api", arguments={"api_key": "s3cret", "batch": 1})
    page = admin.get(url(schedule)).text
    assert "s3cret" not in page and "••••" in page
    sent = change(
        schedule, job="tests.call_api", arguments='{"api_key": "••••", "batch": 2}', notes="n"
    )
    assert admin.post(url(schedule), sent).status_code == 302
    assert Schedule.objects.get().arguments == {"api_key": "s3cret", "batch": 2}
    assert "s3cret" not in str(list(AuditEntry.objects.values("before", "after")))
    assert "s3cret" not in LogEntry.objects.get().change_message


def test_a_secret_argument_can_be_replaced(admin: Client) -> None:
    schedule = make_schedule(job="tests.call_api", arguments={"api_key": "s3cret"})
    sent = change(schedule, job="tests.call_api", arguments='{"api_key": "other"}')
    admin.post(url(schedule), sent)
    assert Schedule.objects.get().arguments == {"api_key": "other"}
    assert AuditEntry.objects.get().after == {"arguments": {"api_key": "••••"}}


def test_a_job_with_a_permission_is_neither_offered_nor_accepted_without_it() -> None:
    client = Client()
    client.force_login(make_user("distcron.view_schedule", "distcron.add_schedule"))
    assert "tests.call_api" not in client.get(reverse(ADD)).text
    page = client.post(reverse(ADD), new(job="tests.call_api", arguments='{"api_key": "k"}'))
    assert "you need the permission auth.view_group" in page.text
    assert Schedule.objects.count() == 0


def test_saving_writes_no_column_of_the_scheduler(admin: Client) -> None:
    schedule = make_schedule()
    Schedule.objects.filter(pk=schedule.pk).update(fencing_token=7)
    sent = change(schedule, cron="0 4 * * *", fencing_token="1", next_run_at="2020-01-01")
    admin.post(url(schedule), sent)
    stored = Schedule.objects.get()
    assert (stored.cron, stored.fencing_token) == ("0 4 * * *", 7)


# --- who did what -----------------------------------------------------------


def test_adding_is_audited_and_logged(admin: Client) -> None:
    admin.post(reverse(ADD), new())
    entry, log = AuditEntry.objects.get(), LogEntry.objects.get()
    assert (entry.verb, entry.actor, entry.via) == ("add", "siti", "admin")
    assert entry.before is None and entry.after["cron"] == "30 2 * * *"
    assert (log.action_flag, log.object_repr) == (ADDITION, "Report")


def test_a_change_is_audited_and_logged_with_the_fields_that_differ(admin: Client) -> None:
    schedule = make_schedule()
    admin.post(url(schedule), change(schedule, cron="0 4 * * *"))
    entry, log = AuditEntry.objects.get(), LogEntry.objects.get()
    assert (entry.before, entry.after) == ({"cron": "30 2 * * *"}, {"cron": "0 4 * * *"})
    assert log.action_flag == CHANGE
    assert "cron: 30 2 * * * → 0 4 * * *" in log.change_message
    assert "0 4 * * *" in admin.get(url(schedule, "history")).text


def test_saving_without_a_change_writes_nothing(admin: Client) -> None:
    schedule = make_schedule()
    assert admin.post(url(schedule), change(schedule)).status_code == 302
    assert Schedule.objects.get().version == 1
    assert AuditEntry.objects.count() == LogEntry.objects.count() == 0


def test_deleting_keeps_the_history_and_says_so(admin: Client) -> None:
    schedule = make_schedule(name="Report")
    run = make_run(schedule=schedule)
    assert "The history stays" in admin.get(url(schedule, "delete")).text
    admin.post(url(schedule, "delete"), {"post": "yes"})
    assert Schedule.objects.count() == 0
    assert AuditEntry.objects.get().verb == "delete"
    assert LogEntry.objects.get().action_flag == DELETION
    page = admin.get(reverse("admin:distcron_run_change", args=[run.pk]))
    assert page.status_code == 200 and "Report" in page.text and "deleted" in page.text


def test_deleting_a_selection_is_audited_row_by_row(admin: Client) -> None:
    rows = [make_schedule().pk, make_schedule().pk]
    sent = {"action": "delete_selected", "_selected_action": rows}
    assert "The history stays" in admin.post(reverse(LIST), sent).text
    admin.post(reverse(LIST), sent | {"post": "yes"})
    assert Schedule.objects.count() == 0
    assert AuditEntry.objects.filter(verb="delete").count() == 2


# --- the lists --------------------------------------------------------------


def queries_of(client: Client, address: str) -> list[str]:
    from django.db import connection

    with CaptureQueriesContext(
        connection,
    ) as captured:
        assert client.get(address).status_code == 200
    return [query["sql"] for query in captured.captured_queries]


def test_the_list_of_schedules_takes_as_many_queries_for_twenty_rows_as_for_two(
    admin: Client,
) -> None:
    def add(count: int) -> None:
        for _ in range(count):
            make_run(schedule=make_schedule())

    add(2)
    few = queries_of(admin, reverse(LIST))
    add(18)
    assert len(queries_of(admin, reverse(LIST))) == len(few)


def test_the_list_of_runs_takes_as_many_queries_for_twenty_rows_as_for_two(admin: Client) -> None:
    address = reverse("admin:distcron_run_changelist")
    for _ in range(2):
        make_run(node=make_node())
    few = queries_of(admin, address)
    for _ in range(18):
        make_run(node=make_node())
    assert len(queries_of(admin, address)) == len(few)


def test_the_list_of_runs_never_counts_the_whole_table(admin: Client) -> None:
    make_run()
    counting = [
        sql
        for sql in queries_of(admin, reverse("admin:distcron_run_changelist"))
        if "COUNT(" in sql
    ]
    assert counting and all("LIMIT 10000" in sql for sql in counting)


def test_the_list_shows_state_rule_next_and_last_run(admin: Client) -> None:
    schedule = make_schedule(name="Report", cron="30 2 1 1 *")
    run = make_run(schedule=schedule, state="failed", reason="error")
    page = admin.get(reverse(LIST)).text
    assert "active" in page and "30 2 1 1 *" in page and "02:30 WIB" in page
    assert reverse("admin:distcron_run_change", args=[run.pk]) in page
    assert "failed" in page


@pytest.mark.parametrize("query", ["?state__exact=paused", "?q=Wanted", "?kind__exact=interval"])
def test_the_list_can_be_filtered_and_searched(admin: Client, query: str) -> None:
    make_schedule(
        name="Wanted", kind="interval", interval_seconds=60, state="paused", state_reason="r"
    )
    make_schedule(name="Other")
    page = admin.get(reverse(LIST) + query).text
    assert "Wanted" in page and ">Other" not in page


@pytest.mark.parametrize("model", ["run", "node", "auditentry"])
def test_history_cannot_be_written_by_hand(admin: Client, model: str) -> None:
    make_run(node=make_node())
    admin.post(reverse(ADD), new())
    rows = {
        "run": Run.objects.get(),
        "node": Run.objects.get().node,
        "auditentry": AuditEntry.objects.get(),
    }
    pk = rows[model].pk  # type: ignore[union-attr]
    assert admin.get(reverse(f"admin:distcron_{model}_changelist")).status_code == 200
    assert admin.get(reverse(f"admin:distcron_{model}_change", args=[pk])).status_code == 200
    assert admin.get(reverse(f"admin:distcron_{model}_add")).status_code == 403
    assert admin.post(reverse(f"admin:distcron_{model}_change", args=[pk])).status_code == 403
    assert admin.post(reverse(f"admin:distcron_{model}_delete", args=[pk])).status_code == 403


# --- one run ----------------------------------------------------------------


def test_output_needs_its_own_permission() -> None:
    run = make_run()
    RunOutput.objects.create(run=run, output="the-output", traceback="the-traceback")
    address = reverse("admin:distcron_run_change", args=[run.pk])
    viewer, reader = Client(), Client()
    viewer.force_login(make_user("distcron.view_run"))
    reader.force_login(make_user("distcron.view_run", "distcron.view_output"))
    assert "the-output" not in viewer.get(address).text
    assert "the-traceback" not in viewer.get(address).text
    assert "the-output" in reader.get(address).text
    assert "the-traceback" in reader.get(address).text


def test_a_run_shows_node_token_result_error_and_earlier_attempts(admin: Client) -> None:
    node = make_node(name="node-7")
    run = make_run(
        node=node, fencing_token=41, result={"pages": 3}, error="Boom", state="failed", attempt=2
    )
    Attempt.objects.create(
        run=run, number=1, node=node, fencing_token=40, ended_at=run.due_at, reason="node_died"
    )
    page = admin.get(reverse("admin:distcron_run_change", args=[run.pk])).text
    for text in ("node-7", ">41<", "&quot;pages&quot;: 3", "Boom", ">40<"):
        assert text in page


def test_arguments_of_a_run_are_masked(admin: Client) -> None:
    run = make_run(
        schedule=make_schedule(job="tests.call_api", arguments={"api_key": "s3cret-key"})
    )
    page = admin.get(reverse("admin:distcron_run_change", args=[run.pk])).text
    assert "s3cret-key" not in page and "••••" in page


def test_a_viewer_sees_a_schedule_with_its_arguments_masked() -> None:
    schedule = make_schedule(job="tests.call_api", arguments={"api_key": "s3cret-key"})
    client = Client()
    client.force_login(make_user("distcron.view_schedule"))
    page = client.get(url(schedule))
    assert page.status_code == 200
    assert "s3cret-key" not in page.text and "••••" in page.text
    assert client.post(url(schedule), change(schedule, name="x")).status_code == 403


def test_hostile_text_is_inert_on_every_page(admin: Client) -> None:
    node = make_node(name=HOSTILE, host=HOSTILE, alert=HOSTILE)
    schedule = make_schedule(
        name=HOSTILE,
        notes=HOSTILE,
        job="project.demo.greet",
        arguments={"name": HOSTILE},
        state="paused",
        state_reason=HOSTILE,
    )
    run = make_run(schedule=schedule, node=node, error=HOSTILE, result=HOSTILE)
    RunOutput.objects.create(run=run, output=HOSTILE, traceback=HOSTILE)
    entry = AuditEntry.objects.create(
        actor=HOSTILE, via="cli", verb="change", object_type="schedule",
        object_id=str(schedule.pk), object_label=HOSTILE, reason=HOSTILE,
        before={"name": HOSTILE}, after={"name": "x"},
    )  # fmt: skip
    pages = [
        reverse(LIST),
        url(schedule),
        url(schedule, "delete"),
        reverse("admin:distcron_schedule_act", args=["resume"]) + f"?ids={schedule.pk}",
        reverse("admin:distcron_run_changelist"),
        reverse("admin:distcron_run_change", args=[run.pk]),
        reverse("admin:distcron_node_changelist"),
        reverse("admin:distcron_auditentry_changelist"),
        reverse("admin:distcron_auditentry_change", args=[entry.pk]),
    ]
    for address in pages:
        page = admin.get(address).text
        assert "<script>alert(" not in page, address
        assert "&lt;script&gt;" in page, address


def test_a_stale_refusal_shows_hostile_text_inert(admin: Client) -> None:
    schedule = make_schedule(name="Report")
    row = Schedule.objects.get()
    row.name = HOSTILE
    row.save()
    page = admin.post(url(schedule), change(schedule, name="<b>mine</b>")).text
    assert "<script>alert(" not in page and "<b>mine" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("language", ["en", "id"])
def test_every_page_renders_in_both_languages(admin: Client, language: str) -> None:
    run = make_run(node=make_node())
    admin.cookies["django_language"] = language
    for address in (
        reverse(LIST),
        reverse(ADD),
        url(run.schedule),  # type: ignore[arg-type]
        reverse("admin:distcron_schedule_act", args=["run"]) + f"?ids={run.schedule_id}",
        reverse("admin:distcron_run_change", args=[run.pk]),
        reverse("admin:distcron_node_changelist"),
    ):
        assert admin.get(address).status_code == 200
