"""Characters beyond the basic plane, in every place where people or jobs write text."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from distcron_app import lifecycle, operations
from distcron_app.instants import database_now
from distcron_app.lifecycle import Finished
from distcron_app.models import AuditEntry, Run, RunOutput, Schedule
from tests.integration.schedulerctl_builders import ctl
from tests.integration.test_dispatch import Counting, Member, due

pytestmark = pytest.mark.django_db

WIDE = "🚀𝒜𝓁𝓅𝒽𝒶"


def test_wide_text_is_kept_by_every_column_and_shown_on_every_page(admin_client: Client) -> None:
    """OP-74: names, arguments, notes, output, errors, results, progress and reasons."""
    name, error = (WIDE * 40)[:200], (WIDE * 100)[:500]
    schedule = due(name=name, job="tests.echo", arguments={"text": WIDE}, notes=WIDE)
    member = Member(Counting())
    (run,) = member.tick().claimed.runs
    lifecycle.start([run], member.row.pk)
    tokens = {run.run_id: (run.fencing_token, run.owner_token)}
    lifecycle.report_progress({run.run_id: (50.0, (WIDE * 40)[:200])}, tokens)
    lifecycle.finish(
        [
            Finished(
                run_id=run.run_id,
                fencing_token=run.fencing_token,
                owner_token=run.owner_token,
                state="failed",
                reason="error",
                finished_at=database_now(),
                result={WIDE: [WIDE]},
                error=error,
                output=WIDE,
                traceback=WIDE,
            )
        ]
    )
    operations.pause([schedule], reason=WIDE, actor="siti", via="admin")

    stored = Run.objects.get()
    assert (stored.schedule_name, stored.arguments) == (name, {"text": WIDE})
    assert (stored.error, stored.result) == (error, {WIDE: [WIDE]})
    assert stored.progress_message == (WIDE * 40)[:200]
    text = RunOutput.objects.get()
    assert (text.output, text.traceback) == (WIDE, WIDE)
    assert Schedule.objects.get().notes == WIDE
    assert AuditEntry.objects.get().reason == WIDE
    pages = [
        stored.get_absolute_url(),
        schedule.get_absolute_url(),
        "/cron/runs/",
        f"/cron/schedules/?q={WIDE}",
        reverse("admin:distcron_schedule_changelist") + f"?q={WIDE}",
        reverse("admin:distcron_schedule_change", args=[schedule.pk]),
        reverse("admin:distcron_run_changelist"),
    ]
    assert [page for page in pages if WIDE not in admin_client.get(page).text] == []
    assert ctl("list", "--json").data["schedules"][0]["name"] == name
