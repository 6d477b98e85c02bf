"""The overlap policy, cell by cell: what becomes of an occurrence while others are open."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from distcron_app import lifecycle
from distcron_app.instants import database_now
from distcron_app.lifecycle import Decision
from distcron_app.lifecycle.overlap import OpenRuns, fate
from distcron_app.locks import new_owner_token
from distcron_app.models import Node, Run, Schedule
from tests.factories import make_node, make_run, make_schedule

pytestmark = pytest.mark.django_db

# policy, active_limit (None: as the policy has it), max_queued, active, waiting -> state.
CELLS = [
    ("skip", None, 100, 0, 0, "claimed"),
    ("skip", None, 100, 1, 0, "skipped"),
    ("skip", 2, 100, 1, 0, "claimed"),
    ("skip", 2, 100, 2, 0, "skipped"),
    ("queue_one", None, 100, 0, 0, "claimed"),
    ("queue_one", None, 100, 1, 0, "queued"),
    ("queue_one", None, 100, 1, 1, "skipped"),
    ("queue_one", None, 100, 0, 1, "skipped"),
    ("queue_one", 2, 100, 1, 0, "claimed"),
    ("queue_one", 2, 100, 2, 0, "queued"),
    ("queue_all", None, 3, 1, 0, "queued"),
    ("queue_all", None, 3, 1, 2, "queued"),
    ("queue_all", None, 3, 1, 3, "skipped"),
    ("queue_all", None, 0, 1, 0, "skipped"),
    ("queue_all", None, 3, 0, 1, "queued"),
    ("queue_all", 2, 3, 1, 1, "queued"),
    ("replace", None, 100, 0, 0, "claimed"),
    ("replace", None, 100, 1, 0, "queued"),
    ("replace", None, 100, 1, 1, "queued"),
    ("replace", None, 100, 0, 1, "claimed"),
    ("allow", None, 100, 5, 0, "claimed"),
    ("allow", 3, 100, 2, 0, "claimed"),
    ("allow", 3, 100, 3, 0, "skipped"),
]


def due(**values: Any) -> Schedule:
    """Return a schedule whose next instant is two seconds ago."""
    at = database_now().replace(microsecond=0) - timedelta(seconds=2)
    schedule = make_schedule(
        kind="interval", cron="", interval_seconds=60, interval_anchor=at, **values
    )
    Schedule.objects.filter(pk=schedule.pk).update(next_run_at=at)
    schedule.refresh_from_db()
    return schedule


def claim(schedule: Schedule, node: Node, **values: Any) -> lifecycle.Claimed:
    seen = schedule.next_run_at
    assert seen is not None
    defaults: dict[str, Any] = {
        "schedule_id": schedule.pk,
        "version": schedule.version,
        "seen_next_run_at": seen,
        "next_run_at": seen + timedelta(minutes=1),
        "owner_token": new_owner_token(),
        "run_at": seen,
    }
    return lifecycle.claim([Decision(**defaults | values)], node.pk)


def occupy(schedule: Schedule, active: int, waiting: int) -> list[Run]:
    runs = [make_run(schedule=schedule, state="running", attempt=1) for _ in range(active)]
    runs += [make_run(schedule=schedule, state="queued", reason="overlap") for _ in range(waiting)]
    return runs


@pytest.mark.parametrize(("policy", "most", "places", "active", "waiting", "state"), CELLS)
def test_each_cell_of_the_table(
    policy: str, most: int | None, places: int, active: int, waiting: int, state: str
) -> None:
    schedule = due(overlap=policy, max_active=most, max_queued=places)
    blocking = occupy(schedule, active, waiting)
    claim(schedule, make_node())
    run = Run.objects.get(schedule=schedule, scheduled_at=schedule.next_run_at)
    assert run.state == state
    assert run.reason == ("" if state == "claimed" else "overlap")
    if state != "claimed":
        assert isinstance(run.details, dict)
        assert run.details["blocked_by"] == blocking[0].pk


@pytest.mark.parametrize(("policy", "most", "places", "active", "waiting", "state"), CELLS)
def test_the_pure_table_says_the_same(
    policy: str, most: int | None, places: int, active: int, waiting: int, state: str
) -> None:
    schedule = Schedule(overlap=policy, max_active=most, max_queued=places)
    runs = OpenRuns(active=active, blocked_by=1 if active else None, waiting=waiting)
    assert {"start": "claimed", "queue": "queued", "skip": "skipped"}[fate(schedule, runs)] == state


def test_a_run_that_waits_for_its_next_attempt_keeps_its_schedule() -> None:
    schedule = due(overlap="skip")
    make_run(schedule=schedule, state="queued", attempt=1)
    (skipped,) = claim(schedule, make_node()).skipped
    assert skipped.reason == "overlap"


def test_a_run_that_waits_is_claimed_when_the_active_one_has_ended() -> None:
    node = make_node()
    schedule = due(overlap="queue_one")
    (active,) = occupy(schedule, 1, 0)
    claim(schedule, node)
    waiting = Run.objects.get(state="queued")
    token = {waiting.pk: new_owner_token()}
    assert list(Run.objects.queued_due().startable()) == []
    assert lifecycle.claim_queued(token, node.pk).runs == ()
    Run.objects.filter(pk=active.pk).update(state="succeeded")
    assert list(Run.objects.queued_due().startable()) == [waiting]
    (run,) = lifecycle.claim_queued(token, node.pk).runs
    assert run.scheduled_at == schedule.next_run_at


@pytest.mark.parametrize("most", [None, 2])
def test_the_next_attempt_of_a_run_goes_before_what_waits_for_that_run(most: int | None) -> None:
    """What waits is due before: where it went first, neither would ever start."""
    schedule = due(overlap="queue_all", max_active=most)
    now = database_now()
    for _ in range((most or 1) - 1):
        make_run(schedule=schedule, state="running")
    waiting = make_run(schedule=schedule, state="queued", reason="overlap")
    retry = make_run(schedule=schedule, state="queued", reason="retry", attempt=1)
    Run.objects.filter(pk=waiting.pk).update(due_at=now - timedelta(seconds=9))
    Run.objects.filter(pk=retry.pk).update(due_at=now + timedelta(seconds=9))
    assert list(Run.objects.queued_due().startable()) == []
    Run.objects.filter(pk=retry.pk).update(due_at=now - timedelta(seconds=1))
    assert list(Run.objects.queued_due().startable()) == [retry]
    Run.objects.filter(pk=retry.pk).update(state="failed")
    assert list(Run.objects.queued_due().startable()) == [waiting]


def test_replace_asks_the_active_run_to_stop_and_skips_what_waited() -> None:
    schedule = due(overlap="replace")
    active, older = occupy(schedule, 1, 1)
    claim(schedule, make_node())
    active.refresh_from_db()
    assert active.state == "running"
    assert active.cancel_requested_at is not None
    assert active.cancel_cause == "a newer occurrence replaces it"
    older.refresh_from_db()
    assert (older.state, older.details) == ("skipped", {"blocked_by": active.pk, "replaced": True})
    newest = Run.objects.get(state="queued")
    assert newest.scheduled_at == schedule.next_run_at


@pytest.mark.parametrize("is_spread", [False, True])
def test_what_waits_is_replaced_by_a_newer_one_that_need_not_wait(is_spread: bool) -> None:
    """Or it would run after the newer one."""
    node = make_node()
    schedule = due(overlap="replace")
    (older,) = occupy(schedule, 0, 1)
    if is_spread:
        now = database_now()
        newer = make_run(
            schedule=schedule,
            state="queued",
            scheduled_at=now - timedelta(seconds=60),
            due_at=now - timedelta(seconds=1),
        )
        (run,) = lifecycle.claim_queued({newer.pk: new_owner_token()}, node.pk).runs
    else:
        (run,) = claim(schedule, node).runs
    assert run.run_id != older.pk
    older.refresh_from_db()
    assert (older.state, older.reason) == ("skipped", "overlap")
    assert older.details == {"blocked_by": None, "replaced": True}


@pytest.mark.parametrize("policy", ["replace", "queue_one"])
def test_what_a_person_queued_is_kept_and_takes_no_place(policy: str) -> None:
    schedule = due(overlap=policy)
    occupy(schedule, 1, 0)
    asked_for = lifecycle.queue_manual(schedule, by="siti", behind=True)
    claim(schedule, make_node())
    asked_for.refresh_from_db()
    assert (asked_for.state, asked_for.reason) == ("queued", "overlap")
    assert Run.objects.get(scheduled_at=schedule.next_run_at).state == "queued"


def test_a_full_queue_is_named_on_the_row_that_found_it_full() -> None:
    schedule = due(overlap="queue_all", max_queued=2)
    active, *_ = occupy(schedule, 1, 2)
    (skipped,) = claim(schedule, make_node()).skipped
    assert skipped.details == {"blocked_by": active.pk, "waiting": 2}


def test_an_occurrence_that_waits_counts_towards_the_limit_of_runs() -> None:
    schedule = due(overlap="queue_one", max_runs=1)
    occupy(schedule, 1, 0)
    claim(schedule, make_node())
    stored = Schedule.objects.get(pk=schedule.pk)
    assert (stored.runs_planned, stored.state) == (1, "exhausted")


@pytest.mark.parametrize(
    ("policy", "state"),
    [("skip", "skipped"), ("queue_one", "queued"), ("replace", "queued"), ("allow", "claimed")],
)
def test_a_spread_occurrence_meets_the_policy_when_it_is_due(policy: str, state: str) -> None:
    node = make_node()
    schedule = due(overlap=policy)
    (active,) = occupy(schedule, 1, 0)
    now = database_now()
    spread = make_run(
        schedule=schedule,
        state="queued",
        scheduled_at=now - timedelta(seconds=60),
        due_at=now - timedelta(seconds=1),
    )
    assert spread in Run.objects.queued_due().startable()
    lifecycle.claim_queued({spread.pk: new_owner_token()}, node.pk)
    spread.refresh_from_db()
    assert spread.state == state
    active.refresh_from_db()
    assert (active.cancel_requested_at is not None) == (policy == "replace")


def test_runs_side_by_side_are_claimed_by_more_than_one_node() -> None:
    schedule = due(overlap="allow", max_active=2)
    first, second = make_node(), make_node()
    assert len(claim(schedule, first).runs) == 1
    schedule.refresh_from_db()
    assert len(claim(schedule, second).runs) == 1
    schedule.refresh_from_db()
    (skipped,) = claim(schedule, first).skipped
    assert skipped.reason == "overlap"


def test_a_limit_of_no_run_at_all_is_refused() -> None:
    schedule = make_schedule()
    schedule.max_active = 0
    with pytest.raises(Exception, match="At least 1, or empty"):
        schedule.full_clean()


def test_the_policies_page_lists_every_choice() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "policies.md").read_text()
    rows = set(re.findall(r"^\| `([a-z_]+)`", page, re.MULTILINE))
    choices = {*Schedule.Overlap.values, *Schedule.Misfire.values, *Schedule.Backoff.values}
    assert choices <= rows
