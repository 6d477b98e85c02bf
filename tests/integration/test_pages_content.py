"""What the pages say about each state of the rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from distcron_app.instants import database_now
from distcron_app.locks import get_backend, new_owner_token
from distcron_app.models import Attempt, Run, RunOutput, Schedule
from tests.integration.pages_rows import node, run, schedule

pytestmark = [
    pytest.mark.django_db,
]

HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(2)>'
NO_SCHEDULER = "No scheduler is running."
ALL_PAGES = ["overview", "schedules", "runs", "nodes", "locks"]


def shown(client: Client, target: Run | Schedule) -> str:
    answer = client.get(target.get_absolute_url())
    assert answer.status_code == 200
    return str(answer.text)


@pytest.mark.parametrize("name", ALL_PAGES)
def test_banner_on_every_page_while_no_scheduler_runs(admin_client: Client, name: str) -> None:
    html = admin_client.get(reverse(f"distcron:{name}")).text
    assert NO_SCHEDULER in html
    assert "python manage.py runscheduler" in html


def test_banner_while_all_nodes_are_silent(admin_client: Client) -> None:
    node(lease_seconds=-1)
    assert NO_SCHEDULER in admin_client.get("/cron/").text


def test_no_banner_while_one_of_two_nodes_is_alive(admin_client: Client) -> None:
    node("web-1", lease_seconds=-1)
    node("web-2")
    assert NO_SCHEDULER not in admin_client.get("/cron/").text


@pytest.mark.parametrize("name", ALL_PAGES)
def test_alert_of_an_alive_node_is_on_every_page(admin_client: Client, name: str) -> None:
    node("web-7", alert="locks unavailable, the database decides alone")
    html = admin_client.get(reverse(f"distcron:{name}")).text
    assert "Node web-7 reports:" in html
    assert "locks unavailable, the database decides alone" in html


def test_empty_project_is_told_what_to_do(admin_client: Client) -> None:
    html = admin_client.get("/cron/").text
    assert "There is no schedule yet." in html
    assert "python manage.py runscheduler" in html


@pytest.mark.parametrize("state", Run.State.values)
def test_run_of_every_state_has_a_page_and_a_row(admin_client: Client, state: str) -> None:
    holder = node()
    own = run(schedule(), state, node=holder if state in ("claimed", "running", "lost") else None)
    assert f"dc-state--{state}" in shown(admin_client, own)
    assert f"dc-state--{state}" in admin_client.get("/cron/runs/").text


@pytest.mark.parametrize("reason", [reason for reason in Run.Reason.values if reason])
def test_every_reason_is_said_in_words(admin_client: Client, reason: str) -> None:
    own = run(schedule(), "skipped" if reason in ("misfire", "coalesced") else "failed")
    Run.objects.filter(pk=own.pk).update(reason=reason)
    assert str(Run.Reason(reason).label) in admin_client.get("/cron/runs/").text
    assert shown(admin_client, own)


def test_lost_run_says_why_and_what_a_person_can_do(admin_client: Client) -> None:
    own = schedule()
    html = shown(admin_client, run(own, "lost", reason="node_died", node=node("web-4")))
    assert "Node web-4 stopped reporting while the job was running." in html
    assert "nobody knows whether its work was done." in html
    assert "Its delivery is “at most once”, so no node starts it again." in html
    assert "Check in the job&#x27;s own records whether the work was done." in html
    assert f'href="{reverse("distcron:run_now", args=[own.pk])}"' in html


def test_lost_run_that_was_repeated_once_says_so(admin_client: Client) -> None:
    lost = run(schedule(), "lost", reason="node_died", delivery="at_least_once", recoveries=1)
    assert "It had been run again after a crash already" in shown(admin_client, lost)


def test_run_skipped_for_overlap_links_the_run_in_the_way(admin_client: Client) -> None:
    own = schedule()
    active = run(own, "running", node=node())
    skipped = run(own, "skipped", reason="overlap", details={"blocked_by": active.pk})
    html = shown(admin_client, skipped)
    assert "It did not run: the previous run was still active." in html
    assert f'<a href="{active.get_absolute_url()}">Run #{active.pk} blocked it</a>' in html


def test_coalesced_row_says_how_many_occurrences_it_stands_for(admin_client: Client) -> None:
    details = {
        "first_at": "2026-11-29T07:00:00+00:00",
        "last_at": "2026-11-29T07:55:00+00:00",
        "count": 12,
    }
    own = run(schedule(timezone="Asia/Jakarta"), "skipped", reason="coalesced", details=details)
    html = shown(admin_client, own)
    assert "This row stands for 12 occurrences from" in html
    assert 'datetime="2026-11-29T07:00:00.000Z" title="2026-11-29 07:00:00 UTC">' in html
    assert "14:00:00 WIB" in html
    assert "14:55:00 WIB" in html


@pytest.mark.parametrize("details", [None, [], "x", {"count": "many"}, {"first_at": "soon"}])
def test_run_with_odd_details_still_has_a_page(admin_client: Client, details: Any) -> None:
    assert shown(admin_client, run(schedule(), "skipped", reason="misfire", details=details))


def test_running_run_of_a_silent_node_says_what_happens_next(admin_client: Client) -> None:
    own = run(schedule(), "running", node=node("web-9", lease_seconds=-1))
    assert "Node web-9 is silent. Another node settles this run" in shown(admin_client, own)


def test_late_report_is_marked(admin_client: Client) -> None:
    html = shown(admin_client, run(schedule(), "succeeded", late=True))
    assert "reported late" in html
    assert "Its node reported this after the run had been marked lost." in html


def test_refused_late_report_of_an_earlier_attempt_is_shown(admin_client: Client) -> None:
    own = run(schedule(), "succeeded", attempt=2, fencing_token=8)
    Attempt.objects.create(
        run=own,
        number=1,
        node=node("web-3"),
        fencing_token=7,
        reason="node_died",
        ended_at=database_now(),
        late_state="failed",
        late_at=database_now(),
    )
    html = shown(admin_client, own)
    assert "web-3" in html
    assert "It reported “failed” too late. The report was refused and changed nothing," in html


def test_times_of_a_run_have_offsets_from_due(admin_client: Client) -> None:
    due = datetime(2026, 11, 29, 6, 0, tzinfo=UTC)
    own = run(
        schedule(timezone="America/New_York"),
        due_at=due,
        claimed_at=due + timedelta(milliseconds=61),
        started_at=due + timedelta(milliseconds=104),
        finished_at=due + timedelta(seconds=76, milliseconds=104),
    )
    html = shown(admin_client, own)
    assert '<b class="dc-offset">+61 ms</b>' in html
    assert '<b class="dc-offset">+104 ms</b>' in html
    assert "<dd>1 min 16 s</dd>" in html
    assert "01:00:00 EST" in html
    assert '<span class="dc-utc">06:00:00 UTC</span>' in html


def test_traceback_shows_the_frames_of_the_app_first(admin_client: Client) -> None:
    failed = run(schedule(), "failed", reason="error", error="MailError: busy")
    RunOutput.objects.create(
        run=failed,
        traceback=(
            "Traceback (most recent call last):\n"
            '  File "/srv/shop/jobs.py", line 4, in close\n    send()\n'
            '  File "/venv/lib/python3.12/site-packages/mailer/net.py", line 9, in send\n'
            "    raise MailError\n"
            "MailError: busy\n"
        ),
    )
    html = shown(admin_client, failed)
    first, rest = html.split("Whole traceback")
    assert "/srv/shop/jobs.py" in first
    assert "site-packages" not in first
    assert "site-packages/mailer/net.py" in rest


def test_secret_arguments_are_masked(admin_client: Client) -> None:
    own = run(schedule(), arguments={"batch": 5, "auth": {"apiToken": "s3cr3t-value"}})
    html = shown(admin_client, own)
    assert "s3cr3t-value" not in html
    assert "&quot;batch&quot;: 5" in html


def test_runs_of_a_deleted_schedule_are_still_shown(admin_client: Client) -> None:
    own = schedule(name="Old export")
    kept = run(own, node=node())
    deleted_id = own.pk
    own.delete()
    assert "Old export" in admin_client.get("/cron/runs/").text
    assert "(deleted)" in shown(admin_client, kept)
    found = admin_client.get("/cron/runs/", {"schedule": deleted_id}).text
    assert f'href="{kept.get_absolute_url()}"' in found


def test_run_of_a_forgotten_node_shows_its_id(admin_client: Client) -> None:
    holder = node()
    own = run(schedule(), node=holder)
    short_id = str(holder.pk)[:8]
    holder_id = holder.pk
    holder.delete()
    assert short_id in shown(admin_client, own)
    found = admin_client.get("/cron/runs/", {"node": str(holder_id)}).text
    assert f'href="{own.get_absolute_url()}"' in found


def test_invalid_schedule_says_what_is_wrong(admin_client: Client) -> None:
    own = schedule()
    Schedule.objects.filter(pk=own.pk).mark_invalid("Job 'shop.export': not registered.")
    own.refresh_from_db()
    assert "Job &#x27;shop.export&#x27;: not registered." in shown(admin_client, own)
    assert "Old" not in admin_client.get("/cron/schedules/", {"state": "active"}).text


def test_schedule_shows_its_rule_in_words_and_ten_instants(admin_client: Client) -> None:
    html = shown(admin_client, schedule(cron="30 2 * * *", timezone="America/New_York"))
    assert "At 02:30 every day" in html
    instants = html.split("Next 10")[1].split("</ol>")[0]
    assert instants.count("<time ") == 10
    assert instants.count("02:30:00 E") == 10


def test_schedule_with_a_broken_rule_still_has_a_page(admin_client: Client) -> None:
    own = schedule()
    Schedule.objects.filter(pk=own.pk).update(
        cron="99 * * * *", timezone="Mars/Base", next_run_at=database_now()
    )
    own.refresh_from_db()
    assert "99 * * * *" in shown(admin_client, own)
    assert admin_client.get("/cron/").status_code == 200


def test_history_of_a_schedule_has_the_skipped_occurrences(admin_client: Client) -> None:
    own = schedule()
    run(own, "skipped", reason="overlap", details={"blocked_by": 1})
    assert "the previous run was still active" in shown(admin_client, own)


def test_overview_lists_what_needs_attention(admin_client: Client) -> None:
    node()
    own = schedule("alpha")
    run(own, "failed", reason="error", error="Boom of today")
    run(own, "failed", error="Boom of last week", finished_at=database_now() - timedelta(days=7))
    run(own, "lost", reason="node_died")
    late = schedule("beta", name="Late one")
    Schedule.objects.filter(pk=late.pk).update(next_run_at=database_now() - timedelta(minutes=9))
    paused = schedule("gamma", name="Paused one")
    Schedule.objects.filter(pk=paused.pk).update(state="paused", state_reason="vendor outage")
    html = admin_client.get("/cron/").text
    attention = html.split("Needs attention")[1].split("Running now")[0]
    assert "Boom of today" in attention
    assert "Boom of last week" not in attention
    assert "dc-state--lost" in attention
    assert "Late one" in attention
    assert "vendor outage" in attention


def test_overview_says_when_nothing_needs_attention(admin_client: Client) -> None:
    node()
    schedule()
    assert "Nothing needs you." in admin_client.get("/cron/").text


def test_overview_shows_the_progress_of_a_running_job(admin_client: Client) -> None:
    holder = node(running=1)
    run(schedule(), "running", node=holder, progress_percent=58.4, progress_message="Page 4")
    html = admin_client.get("/cron/").text
    assert 'max="100" value="58"' in html
    assert "Page 4" in html


def test_node_without_a_lease_is_called_silent(admin_client: Client) -> None:
    node(lease_seconds=-1)
    assert "Its lease ended. Others take its runs over" in admin_client.get("/cron/nodes/").text


def test_text_of_jobs_and_people_is_inert(admin_client: Client) -> None:
    holder = node(HOSTILE[:60], alert=HOSTILE, host=HOSTILE)
    own = schedule(name=HOSTILE, notes=HOSTILE, arguments={HOSTILE: HOSTILE})
    Schedule.objects.filter(pk=own.pk).update(
        state="paused", state_reason=HOSTILE, state_by=HOSTILE
    )
    bad = run(
        own,
        "failed",
        node=holder,
        error=HOSTILE,
        arguments={HOSTILE: HOSTILE},
        result={"x": HOSTILE},
        trigger="manual",
        triggered_by=HOSTILE,
    )
    RunOutput.objects.create(run=bad, output=HOSTILE, traceback=HOSTILE)
    run(own, "running", node=holder, progress_message=HOSTILE)
    paths = [f"/cron/{name}" for name in ("", "schedules/", "runs/", "nodes/", "locks/")]
    paths += [bad.get_absolute_url(), own.get_absolute_url()]
    paths += [f"/cron/runs/?state={HOSTILE}&node={HOSTILE}", f"/cron/schedules/?q={HOSTILE}"]
    for path in paths:
        html = admin_client.get(path).text
        assert "<script>alert" not in html, path
        assert "<img" not in html, path


def test_control_characters_of_the_output_are_made_visible(admin_client: Client) -> None:
    own = run(schedule())
    RunOutput.objects.create(run=own, output="\x1b[31mred\x1b[0m \u202egnp.exe\x07")
    html = shown(admin_client, own)
    assert "red \\x202egnp.exe\\x07" in html


def test_locks_page_shows_holder_and_time_left(admin_client: Client, settings: Any) -> None:
    settings.DISTCRON = {"LOCK_BACKEND": "memory", "NODE_NAME": "web-5"}
    own = schedule(name="Close invoices")
    token = new_owner_token()
    get_backend().acquire({f"schedule:{own.pk}": token, "other": new_owner_token()}, 90_000)
    html = admin_client.get("/cron/locks/").text
    assert "Close invoices" in html
    assert "web-5" in html
    assert "90 s" in html
    assert token[:8] in html
    assert token not in html


def test_locks_are_unknown_while_redis_is_down(admin_client: Client, settings: Any) -> None:
    settings.CACHES = settings.CACHES | {
        "distcron": settings.CACHES["distcron"] | {"LOCATION": "redis://127.0.0.1:1/0"}
    }
    settings.DISTCRON = {"LOCK_BACKEND": "redis"}
    node()
    own = schedule()
    answer = admin_client.get("/cron/locks/")
    assert answer.status_code == 200
    assert "Locks: unknown." in answer.text
    for path in ("/cron/", "/cron/runs/", "/cron/nodes/", own.get_absolute_url()):
        assert admin_client.get(path).status_code == 200
