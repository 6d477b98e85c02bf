"""What is past stays past: after a pause, beside a new schedule, and when a node starts."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from distcron_app import operations
from distcron_app.instants import database_now
from distcron_app.maintenance import Sweeper
from distcron_app.models import Run, Schedule
from tests.factories import make_run, make_schedule
from tests.integration.schedulerctl_builders import ctl
from tests.integration.test_dispatch import CONFIG, Counting, Member, due
from tests.services import wait_for

pytestmark = pytest.mark.django_db


def by_page(schedule: Schedule) -> None:
    operations.resume([schedule], actor="siti", via="admin")


def by_command(schedule: Schedule) -> None:
    assert ctl("resume", schedule.key).code == 0


def by_its_end(schedule: Schedule) -> None:
    Schedule.objects.filter(pk=schedule.pk).update(paused_until=database_now())
    sweep(Member(Counting()))


def sweep(member: Member) -> None:
    Sweeper(config=CONFIG, clock=member.clock).sweep(uuid.uuid4(), (), 0.0)


@pytest.mark.parametrize(("days", "resume"), [(3, by_page), (7, by_command), (7, by_its_end)])
def test_after_days_of_pause_the_next_instant_runs_and_none_before_it(
    days: int, resume: Callable[[Schedule], None]
) -> None:
    """OP-07, OP-13: one row accounts for all that came due meanwhile."""
    schedule = make_schedule(kind="interval", cron="", interval_seconds=1)
    operations.pause([schedule], reason="books", actor="siti", via="admin")
    began_at = database_now() - timedelta(days=days)
    Schedule.objects.filter(pk=schedule.pk).update(planned_from=began_at, next_run_at=None)
    schedule.refresh_from_db()

    resume(schedule)
    resumed_at = database_now()
    member = Member(Counting())
    (run,) = wait_for(lambda: member.tick().claimed.runs, 20, "the next instant")

    assert run.scheduled_at > resumed_at - timedelta(seconds=1)
    (paused,) = Run.objects.exclude(pk=run.run_id)
    assert (paused.state, paused.reason) == ("skipped", "paused")
    details = paused.details or {}
    first, last = (datetime.fromisoformat(details[name]) for name in ("first_at", "last_at"))
    assert began_at < first <= began_at + timedelta(seconds=1)
    assert last < resumed_at
    assert details["count"] == (last - first) / timedelta(seconds=1) + 1
    # Nothing lies between the row and the run, and nothing is in both.
    assert last + timedelta(seconds=1) == run.scheduled_at


def test_a_new_schedule_reruns_nobody_within_the_grace() -> None:
    """OP-17: done at its instant, 29 minutes ago, and its grace is an hour."""
    member = Member(Counting())
    done = due(seconds_ago=1740, every=3600, misfire_grace_seconds=3600)
    (run,) = member.tick().claimed.runs
    member.finish(run)

    added = due()
    for seen in (member, Member(Counting())):
        sweep(seen)
        assert {each.schedule_id for each in seen.tick().claimed.runs} <= {added.pk}

    assert Run.objects.filter(schedule=done).count() == 1
    assert Run.objects.filter(schedule=added).count() == 1


def test_a_node_that_starts_runs_nothing_that_is_past() -> None:
    """OP-19: also what has to be planned first, since it was changed past the model."""
    weekly = make_schedule(cron="45 14 * * 2", timezone="UTC")
    changed = make_schedule(kind="interval", cron="", interval_seconds=3600)
    ran_at = database_now() - timedelta(hours=25)
    for schedule in (weekly, changed):
        make_run(schedule=schedule, scheduled_at=ran_at)
    Schedule.objects.filter(pk=changed.pk).update(next_run_at=None)

    for _ in range(3):
        member = Member(Counting())
        sweep(member)
        assert member.tick().claimed.runs == ()
        assert member.dispatcher.claim_queued(member.row.pk, 100).runs == ()

    assert Run.objects.count() == 2
    changed.refresh_from_db()
    assert changed.next_run_at is not None and changed.next_run_at > database_now()
