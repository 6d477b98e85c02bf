"""Edits never run what is past, and never write over somebody else's columns.

The instants are literal: the database's clock is set where a schedule is planned.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client, override_settings
from django.urls import reverse

from distcron_app import lifecycle, maintenance, operations
from distcron_app.clock import Clock
from distcron_app.conf import get_config
from distcron_app.instants import database_now
from distcron_app.lifecycle import Decision
from distcron_app.models import AuditEntry, Run, Schedule, schedules
from distcron_app.operations import author, pauses
from tests.factories import make_node, make_run, make_schedule, make_user
from tests.integration.schedulerctl_builders import ctl

pytestmark = pytest.mark.django_db

SetClock = Callable[[str], None]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Make every plan happen at the instant given, UTC."""

    def set_to(text: str) -> None:
        instant = datetime.fromisoformat(text).replace(tzinfo=UTC)
        for module in (schedules, maintenance, pauses, author):
            monkeypatch.setattr(module, "database_now", lambda: instant)

    return set_to


@pytest.fixture
def editor() -> Client:
    client = Client()
    client.force_login(
        make_user(
            "distcron.view_schedule",
            "distcron.change_schedule",
            "distcron.add_schedule",
            "distcron.pause_schedule",
            username="siti",
        )
    )
    return client


def change_url(schedule: Schedule) -> str:
    return reverse("admin:distcron_schedule_change", args=[schedule.pk])


def typed(schedule: Schedule, **values: Any) -> dict[str, Any]:
    """Return what the browser would send for the page as it is, with ``values`` typed in."""
    schedule.refresh_from_db()
    return {
        "name": schedule.name,
        "key": schedule.key,
        "job": schedule.job,
        "arguments": "{}",
        "kind": schedule.kind,
        "cron": schedule.cron,
        "interval_seconds": schedule.interval_seconds or "",
        "interval_anchor": "",
        "run_at": "",
        "timezone": schedule.timezone,
        "starts_at": "",
        "ends_at": "",
        "delivery": schedule.delivery,
        "notes": "",
        "seen_version": schedule.version,
    } | values


def next_run(schedule: Schedule) -> str:
    schedule.refresh_from_db()
    assert schedule.next_run_at is not None
    return schedule.next_run_at.strftime("%Y-%m-%d %H:%M:%S")


def adopt() -> None:
    maintenance.Sweeper(config=get_config(), clock=Clock())
    maintenance._adopt()


def test_op_01_a_new_time_does_not_rerun_the_day(editor: Client, set_clock: SetClock) -> None:
    """OP-01."""
    set_clock("2026-12-01 16:00:00")
    schedule = make_schedule(cron="33 16 * * *", timezone="UTC")
    make_run(schedule=schedule, scheduled_at=datetime(2026, 12, 1, 16, 33, tzinfo=UTC))
    set_clock("2026-12-01 16:34:08")
    editor.post(change_url(schedule), typed(schedule, cron="34 16 * * *"))
    assert next_run(schedule) == "2026-12-02 16:34:00"


def test_op_03_an_edit_brings_no_instant_of_neither_rule(
    editor: Client, set_clock: SetClock
) -> None:
    """OP-03."""
    # Tuesday 21:00 has run; the edit comes on Friday 02:10.
    set_clock("2026-12-01 12:00:00")
    schedule = make_schedule(cron="0 21 * * tue,fri", timezone="UTC")
    make_run(schedule=schedule, scheduled_at=datetime(2026, 12, 1, 21, 0, tzinfo=UTC))
    set_clock("2026-12-04 02:10:00")
    editor.post(change_url(schedule), typed(schedule, cron="0 23 * * wed,sun"))
    assert next_run(schedule) == "2026-12-06 23:00:00"


def test_op_05_a_new_zone_decides_alone_from_the_edit_on(
    editor: Client, set_clock: SetClock
) -> None:
    """OP-05."""
    # 08:00 in Berlin, an hour before the old rule's instant.
    set_clock("2026-12-02 07:00:00")
    schedule = make_schedule(cron="0 9 * * *", timezone="Europe/Berlin")
    assert next_run(schedule) == "2026-12-02 08:00:00"
    editor.post(change_url(schedule), typed(schedule, timezone="America/New_York"))
    assert next_run(schedule) == "2026-12-02 14:00:00"


def test_op_05_list_page_and_form_show_the_instant_of_the_runner(
    editor: Client, set_clock: SetClock
) -> None:
    """OP-05."""
    set_clock("2096-12-02 07:00:00")
    schedule = make_schedule(cron="0 9 * * *", timezone="America/New_York")
    shown = "Sun 2 Dec 2096 09:00 EST"
    assert shown in editor.get(reverse("admin:distcron_schedule_changelist")).text
    assert shown in editor.get(change_url(schedule)).text
    assert schedule.upcoming(1) == [datetime(2096, 12, 2, 14, 0, tzinfo=UTC)]


def by_form(client: Client, schedule: Schedule) -> None:
    url = reverse("admin:distcron_schedule_act", args=["resume"])
    client.post(url, {"ids": schedule.pk, "idempotency_key": "k", "reason": "", "confirm": "yes"})


def by_list_action(client: Client, schedule: Schedule) -> None:
    page = client.post(
        reverse("admin:distcron_schedule_changelist"),
        {"action": "resume_selected", "_selected_action": [schedule.pk]},
    )
    key = page.context["form"]["idempotency_key"].value()
    url = reverse("admin:distcron_schedule_act", args=["resume"])
    client.post(url, {"ids": schedule.pk, "idempotency_key": key, "reason": "", "confirm": "yes"})


def by_queryset_update(client: Client, schedule: Schedule) -> None:
    # The update takes the database's clock, which no test can set.
    at = datetime(2026, 12, 1, 1, 55, 10, tzinfo=UTC)
    Schedule.objects.filter(pk=schedule.pk).update(state="active", state_reason="")
    Schedule.objects.filter(pk=schedule.pk).update(next_run_at=None, planned_from=at)
    adopt()


def by_save(client: Client, schedule: Schedule) -> None:
    row = Schedule.objects.get(pk=schedule.pk)
    row.state = Schedule.State.ACTIVE
    row.save()


def by_command(client: Client, schedule: Schedule) -> None:
    assert ctl("resume", schedule.key).code == 0


@pytest.mark.parametrize(
    "resume", [by_form, by_list_action, by_queryset_update, by_save, by_command]
)
def test_op_07_every_way_to_resume_goes_on_with_the_next_slot(
    editor: Client, set_clock: SetClock, resume: Callable[[Client, Schedule], None]
) -> None:
    """OP-07: by form, list action, queryset, model and command line alike."""
    set_clock("2026-12-01 00:55:00")
    schedule = make_schedule(cron="0 * * * *", timezone="UTC")
    operations.pause([schedule], reason="release", actor="siti", via="cli")
    set_clock("2026-12-01 01:55:10")
    resume(editor, schedule)
    assert next_run(schedule) == "2026-12-01 02:00:00"
    assert Run.objects.exclude(state="skipped").count() == 0


def test_op_07_a_bulk_update_never_plans_an_instant_before_itself() -> None:
    schedule = make_schedule(kind="interval", interval_seconds=60, state="paused")
    moment = database_now()
    Schedule.objects.filter(pk=schedule.pk).update(state="active")
    adopt()
    schedule.refresh_from_db()
    assert schedule.next_run_at is not None and schedule.next_run_at > moment


def decision(schedule: Schedule) -> Decision:
    assert schedule.next_run_at is not None
    return Decision(
        schedule_id=schedule.pk,
        version=schedule.version,
        seen_next_run_at=schedule.next_run_at,
        next_run_at=schedule.next_run_at + timedelta(hours=1),
        owner_token="a" * 32,
        run_at=schedule.next_run_at,
    )


def test_op_09_a_claim_that_was_planned_before_the_pause_gets_nothing() -> None:
    """OP-09."""
    schedule = make_schedule()
    planned = decision(schedule)
    operations.pause([schedule], reason="stop", actor="siti", via="admin")
    claimed = lifecycle.claim([planned], make_node().pk)
    assert claimed.runs == () and Run.objects.count() == 0


def test_op_09_a_claim_that_was_planned_before_an_edit_gets_nothing() -> None:
    """OP-09."""
    schedule = make_schedule()
    planned = decision(schedule)
    row = Schedule.objects.get()
    row.arguments = {}
    row.notes = "edited"
    row.save()
    assert lifecycle.claim([planned], make_node().pk).runs == ()


def test_op_09_the_same_claim_wins_where_nobody_edited() -> None:
    schedule = make_schedule()
    assert len(lifecycle.claim([decision(schedule)], make_node().pk).runs) == 1


@override_settings(TIME_ZONE="Asia/Shanghai")
def test_op_11_a_new_schedule_has_the_project_s_zone(editor: Client) -> None:
    """OP-11."""
    page = editor.get(reverse("admin:distcron_schedule_add")).text
    assert 'value="Asia/Shanghai"' in page
    blank = typed(make_schedule(key="old"), key="new", timezone="Asia/Shanghai")
    editor.post(reverse("admin:distcron_schedule_add"), blank)
    schedule = Schedule.objects.get(key="new")
    assert schedule.timezone == "Asia/Shanghai"
    assert "CST" in editor.get(change_url(schedule)).text


def test_op_59_an_edit_survives_a_tick_that_passes_meanwhile(editor: Client) -> None:
    """OP-59."""
    schedule = make_schedule()
    sent = typed(schedule, cron="0 4 * * *")
    assert len(lifecycle.claim([decision(schedule)], make_node().pk).runs) == 1
    editor.post(change_url(schedule), sent)
    schedule.refresh_from_db()
    assert schedule.cron == "0 4 * * *"
    assert schedule.fencing_token == 1


def test_op_59_a_tick_that_passes_meanwhile_survives_an_edit_of_the_notes(editor: Client) -> None:
    """OP-59."""
    schedule = make_schedule()
    sent = typed(schedule, notes="new")
    planned = decision(schedule)
    lifecycle.claim([planned], make_node().pk)
    editor.post(change_url(schedule), sent)
    schedule.refresh_from_db()
    assert schedule.notes == "new"
    assert schedule.next_run_at == planned.next_run_at


def test_op_59_a_stale_form_is_refused_and_names_both_values(editor: Client) -> None:
    """OP-59."""
    schedule = make_schedule(name="Report")
    sent = typed(schedule, name="Mine", cron="0 7 * * *")
    row = Schedule.objects.get()
    row.name = "Theirs"
    row.save()
    page = editor.post(change_url(schedule), sent)
    assert page.status_code == 200
    assert "stored is “Theirs”, you typed “Mine”" in page.text
    assert "stored is “30 2 * * *”, you typed “0 7 * * *”" in page.text
    assert "0 7 * * *</textarea>" in page.text
    schedule.refresh_from_db()
    assert (schedule.name, schedule.cron) == ("Theirs", "30 2 * * *")


def test_op_59_a_stale_form_is_refused_again_until_the_person_decides(editor: Client) -> None:
    schedule = make_schedule(name="Report")
    sent = typed(schedule, name="Mine")
    row = Schedule.objects.get()
    row.name = "Theirs"
    row.save()
    editor.post(change_url(schedule), sent)
    assert editor.post(change_url(schedule), sent).status_code == 200
    assert editor.post(change_url(schedule), sent | {"overwrite": row.version}).status_code == 302
    schedule.refresh_from_db()
    assert schedule.name == "Mine"


def test_op_59_the_refused_page_offers_one_input_for_the_decision(editor: Client) -> None:
    schedule = make_schedule(name="Report")
    sent = typed(schedule, name="Mine")
    Schedule.objects.update(name="Theirs")
    page = editor.post(change_url(schedule), sent).text
    assert re.findall(r'<input [^>]*name="overwrite"[^>]*>', page) == [
        '<input type="checkbox" name="overwrite" value="2">'
    ]


def test_op_59_a_refused_page_shows_the_next_runs_of_what_is_stored(
    editor: Client,
) -> None:
    schedule = make_schedule(cron="30 2 1 1 *")
    page = editor.post(change_url(schedule), typed(schedule, cron="bad")).text
    assert page.count("02:30 WIB") == 5


def test_op_59_consent_to_one_change_is_no_consent_to_a_later_one(editor: Client) -> None:
    schedule = make_schedule(name="Report")
    sent = typed(schedule, name="Mine")
    for name in ("Theirs", "Later"):
        row = Schedule.objects.get()
        row.name = name
        row.save()
    consent = sent | {"overwrite": row.version - 1}
    assert editor.post(change_url(schedule), consent).status_code == 200
    schedule.refresh_from_db()
    assert schedule.name == "Later"


def test_op_59_after_a_reload_the_save_works(editor: Client) -> None:
    schedule = make_schedule(name="Report")
    row = Schedule.objects.get()
    row.name = "Theirs"
    row.save()
    reloaded = typed(schedule, name="Mine")
    assert editor.post(change_url(schedule), reloaded).status_code == 302
    schedule.refresh_from_db()
    assert schedule.name == "Mine"


@pytest.mark.django_db(transaction=True)
def test_of_two_saves_at_the_same_moment_one_is_refused() -> None:
    user = make_user(is_superuser=True)
    schedule = make_schedule()
    start = threading.Barrier(2)
    answers: list[int] = []

    def save(name: str, sent: dict[str, Any]) -> None:
        try:
            client = Client()
            client.force_login(user)
            start.wait(10)
            answers.append(client.post(change_url(schedule), sent | {"name": name}).status_code)
        finally:
            connection.close()

    sent = typed(schedule)
    threads = [threading.Thread(target=save, args=(name, sent)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(answers) == [200, 302]


def test_a_form_without_a_version_is_refused(editor: Client) -> None:
    schedule = make_schedule(name="Report")
    sent = typed(schedule, name="Mine", seen_version="")
    assert editor.post(change_url(schedule), sent).status_code == 200
    schedule.refresh_from_db()
    assert schedule.name == "Report"


def test_op_70_bad_rows_are_shown_as_invalid_and_good_ones_go_on(editor: Client) -> None:
    """OP-70: in the admin."""
    bad = {
        "never": {"cron": "0 0 31 2 *"},
        "nowhere": {"timezone": "Mars/Phobos"},
        "nothing": {"job": ""},
    }
    rows = [{"key": f"good-{number}"} for number in range(10)]
    rows += [{"key": key, **values} for key, values in bad.items()]
    defaults = {"name": "n", "job": "project.demo.heartbeat", "cron": "* * * * *"}
    Schedule.objects.bulk_create([Schedule(**defaults | row) for row in rows])
    adopt()
    assert Schedule.objects.filter(state="active").exclude(next_run_at=None).count() == 10
    assert set(Schedule.objects.filter(state="invalid").values_list("key", flat=True)) == set(bad)
    page = editor.get(reverse("admin:distcron_schedule_changelist") + "?state__exact=invalid").text
    assert "Time zone &#x27;Mars/Phobos&#x27;: not known" in page
    assert "Job &#x27;&#x27;: not registered" in page
    for schedule in Schedule.objects.filter(state="invalid"):
        assert schedule.state_reason
        assert editor.get(change_url(schedule)).status_code == 200


def test_op_70_mending_an_invalid_row_in_the_form_makes_it_active(editor: Client) -> None:
    schedule = make_schedule()
    Schedule.objects.update(timezone="Mars/Phobos")
    adopt()
    editor.post(change_url(schedule), typed(schedule, timezone="Asia/Jakarta"))
    schedule.refresh_from_db()
    assert (schedule.state, schedule.state_reason) == ("active", "")
    assert schedule.next_run_at is not None
    assert AuditEntry.objects.get().after == {
        "timezone": "Asia/Jakarta",
        "state": "active",
        "state_reason": "",
    }


NAMES = ["🚀" * 200, "𝓔" * 100 + "é" * 100]


@pytest.mark.parametrize("name", NAMES)
def test_op_74_astral_names_and_arguments_are_saved_shown_and_run(
    editor: Client, name: str
) -> None:
    sent = typed(
        make_schedule(key="old"),
        key="new",
        name=name,
        job="project.demo.greet",
        arguments='{"name": "🎉 𝓐"}',
    )
    assert editor.post(reverse("admin:distcron_schedule_add"), sent).status_code == 302
    schedule = Schedule.objects.get(key="new")
    assert (schedule.name, schedule.arguments) == (name, {"name": "🎉 𝓐"})
    assert name in editor.get(change_url(schedule)).text
    assert "🎉 𝓐" in editor.get(change_url(schedule)).text
    assert name in editor.get(reverse("admin:distcron_schedule_changelist")).text
    run = operations.run_now(schedule, actor="siti", via="cli")
    assert Run.objects.get(pk=run.pk).arguments == {"name": "🎉 𝓐"}
