"""``schedulerctl backfill``, ``backfills`` and ``run --at``."""

from __future__ import annotations

from typing import Any

import pytest

from distcron_app.models import AuditEntry, Backfill, Run, Schedule
from tests.factories import make_user
from tests.integration.schedulerctl_builders import Answer, ctl, make_run, make_schedule

pytestmark = pytest.mark.django_db(transaction=True)

RANGE = ("--from", "2026-06-01", "--to", "2026-06-03")


def backfill(*words: str) -> Answer:
    return ctl("backfill", "invoice-close", *RANGE, *words)


def test_a_dry_run_counts_and_writes_nothing() -> None:
    make_schedule()
    answer = backfill("--dry-run", "--per-minute", "2")
    assert answer.code == 0
    assert answer.lines == [
        "3 runs of invoice-close, from Mon 01 Jun 2026 02:00 WIB to Wed 03 Jun 2026 02:00 WIB",
        "one by one, while no other run of the schedule is active, at most 2 runs in a minute: "
        "at least 1 m",
    ]
    assert "dry run" in answer.error
    assert not Run.objects.exists()


def test_what_is_left_out_is_said() -> None:
    schedule = make_schedule()
    instant = "2026-06-01T19:00:00+00:00"
    make_run(schedule, "succeeded", nominal_at=instant)
    left_out = backfill("--dry-run")
    assert left_out.lines[0].startswith("2 runs of invoice-close")
    assert left_out.lines[2] == "Left out: 1 instant that has a run."
    repeated = backfill("--dry-run", "--repeat")
    assert repeated.lines[0].startswith("3 runs")
    assert repeated.lines[2] == "1 of them has a run already."
    assert backfill("--dry-run", "--repeat", "failed").lines[0].startswith("2 runs")


def test_it_queues_what_was_counted_and_says_how_to_follow_it() -> None:
    make_schedule()
    answer = backfill("--yes", "--reason", "after the outage")
    row = Backfill.objects.get()
    assert answer.code == 0
    assert answer.lines[-1] == f"backfill {row.pk}: 3 runs queued."
    assert f"backfills show {row.pk}" in answer.error
    assert set(Run.objects.values_list("state", "trigger")) == {("queued", "backfill")}
    entry = AuditEntry.objects.get()
    assert (entry.verb, entry.via, entry.reason) == ("backfill", "cli", "after the outage")
    assert entry.actor.startswith("cli:")


def test_without_a_terminal_it_needs_a_yes() -> None:
    make_schedule()
    answer = backfill()
    assert answer.code == 5
    assert "Queue 3 runs? Not confirmed." in answer.error
    assert not Run.objects.exists()


def test_its_json_has_the_plan_and_the_backfill() -> None:
    make_schedule(arguments={"batch": 5})
    counted = backfill("--dry-run", "--json").data
    assert (counted["verb"], counted["dry_run"], counted["backfill"]) == ("backfill", True, None)
    assert counted["plan"] == {
        "key": "invoice-close",
        "timezone": "Asia/Jakarta",
        "runs": 3,
        "first_at": "2026-05-31T19:00:00Z",
        "last_at": "2026-06-02T19:00:00Z",
        "repeated": 0,
        "existing": 0,
        "excluded": 0,
        "upcoming": 0,
        "outside": 0,
        "paced_seconds": 0.0,
    }
    done = backfill("--yes", "--json", "--arguments", '{"batch": 7}').data
    assert done["plan"]["runs"] == 3
    facts = done["backfill"]
    assert (facts["schedule"], facts["runs"], facts["ended"]) == ("invoice-close", 3, 0)
    assert (facts["state"], facts["states"], facts["arguments"]) == (
        "active",
        {"queued": 3},
        {"batch": 7},
    )


def test_nothing_left_to_run_is_no_error() -> None:
    make_schedule()
    backfill("--yes")
    answer = backfill("--yes")
    assert answer.code == 0
    assert answer.lines == [
        "No instant of the range is left to run.",
        "Left out: 3 instants that have a run.",
    ]
    assert Backfill.objects.count() == 1


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--from", "soon", "--to", "2026-06-03"), 2, "--from: 'soon': not a date or time."),
        (("--from", "2026-06-03", "--to", "2026-06-01"), 2, "the end is before the beginning"),
        (("--from", "2097-06-03", "--to", "2098-06-01"), 2, "begins in the future"),
        ((*RANGE, "--most-active", "2"), 2, "needs the choice side by side"),
        ((*RANGE, "--overlap", "side_by_side", "--most-active", "2"), 2, "allows 1 active run"),
        ((*RANGE, "--arguments", '{"batch": "x"}'), 2, "batch: "),
        ((*RANGE, "--user", "nobody"), 4, "user 'nobody': not found"),
    ],
)
def test_what_is_wrong_is_named(words: tuple[str, ...], code: int, text: str) -> None:
    make_schedule()
    answer = ctl("backfill", "invoice-close", "--yes", *words)
    assert answer.code == code
    assert text in answer.error
    assert not Run.objects.exists()


@pytest.mark.parametrize("lacking", ["distcron.backfill_schedule", "auth.view_group"])
def test_a_user_needs_the_permission_and_the_one_of_the_job(lacking: str) -> None:
    make_schedule(job="tests.call_api", arguments={"api_key": "s3cr3t"})
    needed = {"distcron.backfill_schedule", "auth.view_group"}
    make_user(*(needed - {lacking}), username="siti")
    answer = backfill("--yes", "--user", "siti")
    assert answer.code == 5
    assert lacking in answer.error
    assert not Run.objects.exists()


def test_backfills_are_listed_with_how_far_they_are() -> None:
    assert "No backfill is active." in ctl("backfills").error
    assert "No backfill yet." in ctl("backfills", "--all").error
    make_schedule()
    backfill("--yes")
    Run.objects.filter(pk=Run.objects.first().pk).update(state="succeeded")
    listed = ctl("backfills")
    assert listed.lines[0].split()[:4] == ["ID", "STATE", "KEY", "FROM"]
    assert "invoice-close" in listed.lines[1]
    assert "33 %" in listed.lines[1]
    Backfill.objects.update(state="done")
    assert ctl("backfills").lines == []
    assert [row["state"] for row in ctl("backfills", "--all", "--json").data["backfills"]] == [
        "done"
    ]


def test_one_backfill_is_shown_with_a_bar_and_its_states() -> None:
    make_schedule()
    backfill("--yes", "--reason", "after the outage")
    row = Backfill.objects.get()
    Run.objects.filter(pk=Run.objects.first().pk).update(state="failed")
    answer = ctl("backfills", "show", str(row.pk))
    assert answer.code == 0
    assert answer.lines[0].startswith(f"backfill {row.pk} of invoice-close · ▶ active")
    assert answer.lines[1].startswith("▓▓▓▓▓▓░░░░░░░░░░░░░░ 33 % · 1 of 3 runs have ended · about")
    assert answer.lines[2] == "○ queued 2 · ✖ failed 1"
    assert "after the outage" in answer.out
    assert ctl("backfills", "show", "999").code == 4


def test_cancel_needs_a_yes_and_a_reason_and_is_said() -> None:
    make_schedule()
    backfill("--yes")
    number = str(Backfill.objects.get().pk)
    refused = ctl("backfills", "cancel", number, "--reason", "wrong month")
    assert refused.code == 5
    assert "Cancel 3 runs that have not ended?" in refused.error
    assert ctl("backfills", "cancel", number, "--yes", "--reason", "").code == 2
    answer = ctl("backfills", "cancel", number, "--yes", "--reason", "wrong month", "--json")
    assert answer.code == 0
    assert (answer.data["cancelled"], answer.data["asked"]) == (3, 0)
    assert answer.data["backfill"]["state"] == "cancelled"
    assert "3 runs will not start." in answer.error
    again = ctl("backfills", "cancel", number, "--yes", "--reason", "wrong month")
    assert (again.code, "it has ended" in again.error) == (5, True)


def test_cancel_needs_the_permission_of_the_verb() -> None:
    make_schedule()
    backfill("--yes")
    make_user("distcron.backfill_schedule", username="siti")
    number = str(Backfill.objects.get().pk)
    answer = ctl("backfills", "cancel", number, "--yes", "--reason", "no", "--user", "siti")
    assert (answer.code, "distcron.cancel_run" in answer.error) == (5, True)


# --- run --at -----------------------------------------------------------------------


def run_at(text: str, **fields: Any) -> Answer:
    make_schedule(**fields)
    return ctl("run", "invoice-close", "--at", text, "--json")


def test_run_at_an_instant_is_in_the_zone_of_the_schedule() -> None:
    answer = run_at("2026-06-01T02:30")
    assert answer.code == 0
    assert answer.data["run"]["scheduled_at"] == "2026-05-31T19:30:00Z"
    assert answer.data["run"]["trigger"] == "manual"


def test_run_at_an_instant_with_an_offset() -> None:
    assert run_at("2026-06-01T02:30Z").data["run"]["scheduled_at"] == "2026-06-01T02:30:00Z"


def test_run_at_a_time_that_comes_twice_means_the_first() -> None:
    answer = run_at("2026-11-01T01:30", timezone="America/New_York")
    assert answer.data["run"]["scheduled_at"] == "2026-11-01T05:30:00Z"


def test_run_at_a_time_that_is_jumped_over_is_refused() -> None:
    answer = run_at("2026-03-08T02:30", timezone="America/New_York")
    assert answer.code == 2
    assert "--at: '2026-03-08T02:30': does not exist in America/New_York" in answer.error
    assert not Run.objects.exists()
    assert Schedule.objects.get().version == 1
