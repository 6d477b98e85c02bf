"""Chains where people meet them: the form, the pages, the command line and the answers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.test import Client
from django.urls import reverse

from distcron_app import history, operations
from distcron_app.explained_instants import explain_instant
from distcron_app.instants import database_now
from distcron_app.models import AuditEntry, ChainLink, ChainStart, Run, Schedule
from distcron_app.wording import describe, marks
from tests.factories import make_run, make_schedule, make_user
from tests.integration.schedulerctl_builders import ctl

pytestmark = pytest.mark.django_db

EDITS = ("distcron.view_schedule", "distcron.change_schedule")
RUNS = "distcron.run_schedule"


def manual(**values: Any) -> Schedule:
    return make_schedule(kind="manual", cron="", **values)


def signed_in(*permissions: str) -> Client:
    client = Client()
    client.force_login(make_user(*permissions, username="siti"))
    return client


def form(schedule: Schedule, *rows: dict[str, Any]) -> dict[str, Any]:
    """Return what the browser sends; each row is a link, with its id where it is stored."""
    stored = sum("id" in row for row in rows)
    data = {
        "name": schedule.name,
        "key": schedule.key,
        "job": schedule.job,
        "arguments": "",
        "kind": schedule.kind,
        "cron": schedule.cron,
        "timezone": schedule.timezone,
        "delivery": schedule.delivery,
        "seen_version": schedule.version,
        "links-TOTAL_FORMS": len(rows),
        "links-INITIAL_FORMS": stored,
    }
    for number, row in enumerate(rows):
        data |= {f"links-{number}-{name}": value for name, value in row.items()}
    return data


def post(client: Client, schedule: Schedule, *rows: dict[str, Any]) -> Any:
    url = reverse("admin:distcron_schedule_change", args=[schedule.pk])
    return client.post(url, form(schedule, *rows))


def errors(answer: Any) -> list[str]:
    formset = answer.context["inline_admin_formsets"][0].formset
    return [str(text) for row in formset.errors for found in row.values() for text in found] + list(
        formset.non_form_errors()
    )


def links() -> list[tuple[str, str, str]]:
    rows = ChainLink.objects.values_list("schedule__key", "event", "follower__key")
    return list(rows.order_by("pk"))


class TestTheForm:
    """Links are rows of the form of the schedule that starts others."""

    def test_adding_changing_and_removing_is_audited(self) -> None:
        client, a, _b, _c = signed_in(*EDITS, RUNS), *(manual(key=key) for key in "abc")
        new = {"event": "succeeded", "follower": "b"}
        assert post(client, a, new).status_code == 302
        assert links() == [("a", "succeeded", "b")]
        stored = {"id": ChainLink.objects.get().pk, "event": "failed", "follower": "c"}
        assert post(client, a, stored).status_code == 302
        assert links() == [("a", "failed", "c")]
        assert post(client, a, stored | {"DELETE": "on"}).status_code == 302
        assert links() == []
        entries = AuditEntry.objects.order_by("pk")
        assert [(each.actor, each.verb, each.before, each.after) for each in entries] == [
            ("siti", "change", {"links": []}, {"links": ["succeeded → b"]}),
            ("siti", "change", {"links": ["succeeded → b"]}, {"links": ["failed → c"]}),
            ("siti", "change", {"links": ["failed → c"]}, {"links": []}),
        ]

    def test_the_page_shows_both_directions(self) -> None:
        client, a, b = signed_in(*EDITS), manual(key="a"), manual(key="b")
        ChainLink.objects.create(schedule=a, event="failed", follower=b)
        page = client.get(reverse("admin:distcron_schedule_change", args=[a.pk])).text
        assert 'name="links-0-follower" value="b"' in page
        page = client.get(reverse("admin:distcron_schedule_change", args=[b.pk])).text
        assert "when a run has failed or is lost</li>" in page
        assert ">a</a>" in page

    def test_who_may_only_look_changes_nothing(self) -> None:
        client, a, _b = signed_in("distcron.view_schedule"), manual(key="a"), manual(key="b")
        answer = post(client, a, {"event": "succeeded", "follower": "b"})
        assert answer.status_code == 403
        assert links() == []

    def test_the_follower_must_be_one_that_the_person_may_run(self) -> None:
        client, a, _b = signed_in(*EDITS), manual(key="a"), manual(key="b")
        answer = post(client, a, {"event": "succeeded", "follower": "b"})
        assert errors(answer) == [f"“b”: you need the permission {RUNS} to let it start."]
        assert links() == []

    def test_the_permission_of_the_followers_job_is_needed_as_well(self) -> None:
        client, a = signed_in(*EDITS, RUNS), manual(key="a")
        manual(key="b", job="tests.call_api", arguments={"api_key": "x"})
        answer = post(client, a, {"event": "succeeded", "follower": "b"})
        assert errors(answer) == ["“b”: you need the permission auth.view_group to let it start."]

    def test_a_link_of_somebody_else_may_stay_and_may_be_removed(self) -> None:
        client, a, b = signed_in(*EDITS), manual(key="a"), manual(key="b")
        stored = ChainLink.objects.create(schedule=a, event="failed", follower=b)
        row = {"id": stored.pk, "event": "failed", "follower": "b"}
        assert post(client, a, row).status_code == 302
        assert links() == [("a", "failed", "b")]
        assert post(client, a, row | {"DELETE": "on"}).status_code == 302
        assert links() == []

    @pytest.mark.parametrize(
        ("rows", "problem"),
        [
            (["x"], "No schedule has the key “x”. The list of schedules shows them."),
            (["a"], "This closes a cycle: a → a."),
            (["c", "b"], "This closes a cycle: a → b → a."),
            (["c", "c"], "Please correct the duplicate data for event and follower, which must"),
        ],
    )
    def test_what_is_refused(self, rows: Sequence[str], problem: str) -> None:
        client, a, b, _c = signed_in(*EDITS, RUNS), *(manual(key=key) for key in "abc")
        ChainLink.objects.create(schedule=b, event="failed", follower=a)
        answer = post(client, a, *({"event": "succeeded", "follower": key} for key in rows))
        assert answer.status_code == 200
        assert any(text.startswith(problem) for text in errors(answer)), errors(answer)
        assert links() == [("b", "failed", "a")]

    def test_the_links_of_a_schedule_in_code_are_shown_and_not_edited(self) -> None:
        client, a, b = signed_in(*EDITS, RUNS), manual(key="a"), manual(key="b")
        ChainLink.objects.create(schedule=a, event="failed", follower=b)
        Schedule.objects.filter(pk=a.pk).update(defined_in="shop.jobs:1")
        page = client.get(reverse("admin:distcron_schedule_change", args=[a.pk])).text
        assert "has failed or is lost" in page
        assert 'name="links-0-follower"' not in page
        post(client, a, {"event": "succeeded", "follower": "b"})
        assert links() == [("a", "failed", "b")]

    def test_a_form_without_links_keeps_them(self) -> None:
        client, a, b = signed_in(*EDITS), manual(key="a"), manual(key="b")
        ChainLink.objects.create(schedule=a, event="failed", follower=b)
        data = {name: value for name, value in form(a).items() if not name.startswith("links-")}
        url = reverse("admin:distcron_schedule_change", args=[a.pk])
        assert client.post(url, data).status_code == 302
        assert links() == [("a", "failed", "b")]

    def test_a_deleted_schedule_takes_its_links_along(self) -> None:
        client = signed_in(*EDITS, "distcron.delete_schedule")
        a, b = manual(key="a"), manual(key="b")
        ChainLink.objects.create(schedule=a, event="failed", follower=b)
        client.post(reverse("admin:distcron_schedule_delete", args=[a.pk]), {"post": "yes"})
        assert links() == []
        entry = AuditEntry.objects.get(verb="delete")
        assert (entry.before or {})["links"] == ["failed → b"]


def started_child(parent: Schedule, child: Schedule) -> tuple[Run, Run]:
    """Return a run that succeeded and the one that it has started."""
    first = make_run(schedule=parent, scheduled_at=database_now().replace(microsecond=0))
    second = make_run(
        schedule=child, state="queued", trigger="chain", parent=first, due_at=database_now()
    )
    ChainStart.objects.create(
        run=second,
        parent=first,
        attempt=1,
        schedule=child,
        parent_key=parent.key,
        state="succeeded",
        scheduled_at=first.scheduled_at,
        depth=1,
    )
    return first, second


class TestThePages:
    """Who started whom."""

    def test_a_schedule_says_what_it_starts_and_what_starts_it(self, admin_client: Client) -> None:
        a, b = manual(name="Load & clean"), manual(name="Report")
        ChainLink.objects.create(schedule=a, event="succeeded", follower=b)
        page = " ".join(admin_client.get(a.get_absolute_url()).text.split())
        assert "Starts</dt>" in page
        assert "Report</bdi></a>" in page
        assert "when a run has succeeded" in page
        page = " ".join(admin_client.get(b.get_absolute_url()).text.split())
        assert "Is started by</dt>" in page
        assert "Load &amp; clean</bdi></a>" in page

    def test_the_runs_name_each_other(self, admin_client: Client) -> None:
        first, second = started_child(manual(key="load"), manual(name="Report"))
        page = admin_client.get(second.get_absolute_url()).text
        words = f"It was started by run {first.pk} of “load”, which succeeded."
        assert words in page
        assert first.get_absolute_url() in page
        page = admin_client.get(first.get_absolute_url()).text
        assert "Started by its end" in page
        assert second.get_absolute_url() in page

    def test_the_list_of_runs_can_be_narrowed_to_them(self, admin_client: Client) -> None:
        first, second = started_child(manual(), manual())
        page = admin_client.get(reverse("distcron:runs") + "?trigger=chain").text
        assert second.get_absolute_url() in page
        assert first.get_absolute_url() not in page

    @pytest.mark.parametrize(
        ("reason", "words"),
        [
            ("invalid", "It did not run: its schedule is invalid."),
            ("chain_depth", "too many schedules had started each other before it."),
            ("paused", "It did not run: when it was due, its schedule was paused."),
        ],
    )
    def test_why_a_follower_was_skipped(
        self, admin_client: Client, reason: str, words: str
    ) -> None:
        _first, second = started_child(manual(), manual())
        Run.objects.filter(pk=second.pk).update(state="skipped", reason=reason)
        assert words in admin_client.get(second.get_absolute_url()).text


class TestWithoutATimetable:
    """A schedule that runs only by hand or after another one."""

    def test_it_can_be_added_and_is_active(self) -> None:
        client = signed_in("distcron.add_schedule", "distcron.view_schedule")
        data = form(Schedule(name="Report", key="report", job="project.demo.heartbeat"))
        data |= {"kind": "manual", "timezone": "Asia/Jakarta"}
        answer = client.post(reverse("admin:distcron_schedule_add"), data)
        assert answer.status_code == 302
        schedule = Schedule.objects.get()
        assert (schedule.state, schedule.next_run_at) == ("active", None)

    def test_it_stays_active_when_its_timetable_is_taken_away_and_comes_back(self) -> None:
        schedule = make_schedule()
        schedule.kind = "manual"
        schedule.save()
        assert (schedule.state, schedule.next_run_at) == ("active", None)
        schedule.kind = "cron"
        schedule.save()
        assert schedule.next_run_at is not None

    def test_a_resumed_one_is_active_and_leaves_no_row(self) -> None:
        schedule = manual()
        operations.pause([schedule], reason="x", actor="siti", via="cli")
        schedule.refresh_from_db()
        operations.resume([schedule], actor="siti", via="cli")
        schedule.refresh_from_db()
        assert (schedule.state, schedule.next_run_at) == ("active", None)
        assert not Run.objects.exists()

    def test_it_runs_by_hand(self) -> None:
        assert operations.run_now(manual(), actor="siti", via="cli").state == "queued"

    def test_words_marks_and_forecast(self) -> None:
        schedule = manual()
        schedule.full_clean()
        assert schedule.in_words() == "Only by hand or after another schedule"
        assert describe(schedule.timetable()) == schedule.in_words()
        assert marks(schedule.timetable(), after=database_now()) == []
        forecast = history.forecast(database_now())
        assert (forecast.schedules, forecast.total) == (0, 0)

    def test_the_preview_says_so(self) -> None:
        schedule, client = manual(), signed_in(*EDITS)
        answer = client.post(
            reverse("admin:distcron_schedule_preview"),
            form(schedule) | {"kind": "manual", "csrfmiddlewaretoken": ""},
            query_params={"schedule": str(schedule.pk)},
        )
        assert "Only by hand or after another schedule" in answer.text
        assert "No instant" not in answer.text

    def test_pages_show_a_dash(self, admin_client: Client) -> None:
        schedule = manual()
        page = admin_client.get(schedule.get_absolute_url()).text
        assert "It has no timetable: it runs by hand, or after another schedule." in page
        page = admin_client.get(reverse("admin:distcron_schedule_changelist")).text
        assert 'class="field-next_run_shown">–</td>' in page

    def test_the_command_line(self) -> None:
        a, b = manual(key="a"), manual(key="b")
        ChainLink.objects.create(schedule=a, event="succeeded", follower=b)
        first, second = ctl("list", "--json").data["schedules"]
        assert first["starts"] == [{"event": "succeeded", "key": "b"}]
        assert second["started_by"] == [{"event": "succeeded", "key": "a"}]
        assert (first["kind"], first["rule"], first["next_run_at"]) == ("manual", "", None)
        assert "succeeded → b" in ctl("list", "--wide").out
        assert "It has no timetable" in ctl("next", "a").out + ctl("next", "a").error

    def test_why_it_did_not_run_at_a_time(self) -> None:
        schedule = manual()
        Schedule.objects.filter(pk=schedule.pk).update(created_at="2020-01-01T00:00:00Z")
        schedule.refresh_from_db()
        at = database_now() + timedelta(hours=1)
        answer = explain_instant(schedule, at, now=database_now())
        assert answer.code == "no_timetable"
        assert answer.sentence == (
            "It will not run: the schedule has no timetable, it runs only by hand or after "
            "another one."
        )

    def test_why_it_ran_at_the_instant_of_its_parent(self) -> None:
        first, second = started_child(manual(key="load"), manual())
        assert first.scheduled_at is not None and second.schedule is not None
        answer = explain_instant(second.schedule, first.scheduled_at, now=database_now())
        assert answer.run == second
        facts = {fact.code: fact.value for fact in answer.facts}
        assert facts["parent"] == first.pk
        assert facts["started_by"] == (
            f"It was started by run {first.pk} of “load”, which succeeded."
        )
        at = first.scheduled_at.isoformat()
        assert ctl("explain", second.schedule.key, "--at", at, "--json").data["code"] == "queued"

    def test_an_unknown_kind_is_refused(self) -> None:
        with pytest.raises(ValidationError, match="kind"):
            make_schedule_unsaved("by hand").full_clean()


def make_schedule_unsaved(kind: str) -> Schedule:
    return Schedule(key="x", name="x", job="project.demo.heartbeat", kind=kind, timezone="UTC")
