"""The queries of the hot path find an index, whatever the size of the history."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from distcron_app.lifecycle.overlap import Scope, in_scope
from distcron_app.models import Run, Schedule
from tests.factories import make_schedule

SQLITE_INDEXES = ["distcron_run_history"] if connection.vendor == "sqlite" else []

pytestmark = pytest.mark.django_db


def plan_of(queryset: Any) -> str:
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET LOCAL enable_seqscan = off")
        if connection.vendor != "mysql":
            cursor.execute("ANALYZE distcron_run")
    return str(queryset.explain())


def indexes_used(plan: str, names: Sequence[str]) -> bool:
    return any(name in plan for name in names)


def fill_history() -> Schedule:
    schedules = [make_schedule() for _ in range(50)]
    Run.objects.bulk_create(
        Run(
            schedule=schedule,
            schedule_name="x",
            job="x",
            delivery="at_most_once",
            due_at=schedule.created_at,
            state="succeeded",
        )
        for schedule in schedules
        for _ in range(100)
    )
    return schedules[25]


def test_the_overlap_check_reads_open_runs_only() -> None:
    schedule = fill_history()
    plan = plan_of(Run.objects.filter(state__in=Run.OPEN_STATES, schedule__in=[schedule.pk]))
    # SQLite uses no partial index for parameters; the schedule's own rows are few there.
    assert indexes_used(plan, ["distcron_run_open", *SQLITE_INDEXES])


def test_queued_runs_are_found_by_index() -> None:
    fill_history()
    names = ["distcron_run_open", "distcron_run_open_due"]
    assert indexes_used(plan_of(Run.objects.queued_due()), names)


def test_due_schedules_are_found_by_index() -> None:
    make_schedule()
    assert indexes_used(plan_of(Schedule.objects.due()), ["distcron_schedule_due"])


def test_ended_runs_are_found_by_schedule_state_and_age() -> None:
    schedule = fill_history()
    Run.objects.update(finished_at=schedule.created_at)
    old = schedule.created_at - timedelta(days=30)
    states = ["succeeded", "skipped", "cancelled"]
    ids = [schedule.pk, schedule.pk + 1]
    plan = plan_of(Run.objects.filter(schedule__in=ids, state__in=states, finished_at__lt=old))
    assert indexes_used(plan, ["distcron_run_ended"])


@pytest.mark.databases("postgresql")  # the partial indexes
def test_what_each_sweep_looks_for_is_found_by_small_indexes() -> None:
    Schedule.objects.bulk_create(
        Schedule(key=f"key-{number}", name="x", job="x", kind="cron", cron="0 0 * * *")
        for number in range(500)
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE distcron_schedule")
    assert indexes_used(plan_of(Schedule.objects.watched()), ["distcron_schedule_watched"])
    plan = plan_of(Schedule.objects.pause_over())
    by_state = ["distcron_schedule_due", "distcron_schedule_priority"]
    assert indexes_used(plan, ["distcron_schedule_pause_end", *by_state])


def test_the_history_of_a_schedule_is_read_in_order_by_index() -> None:
    schedule = fill_history()
    plan = plan_of(Run.objects.filter(schedule=schedule.pk).order_by("-id")[:50])
    assert indexes_used(plan, ["distcron_run_history"])


@pytest.mark.databases("postgresql")  # the partial index
def test_the_open_runs_of_a_concurrency_key_are_found_by_a_small_index() -> None:
    schedule = fill_history()
    # As many open runs as make the index of all of them the longer way.
    Run.objects.bulk_create(
        Run(
            schedule=schedule,
            schedule_name="x",
            job="x",
            delivery="at_most_once",
            due_at=schedule.created_at,
            state="queued",
            concurrency_key=f"key-{number}" if number % 10 == 0 else "",
        )
        for number in range(5000)
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE distcron_run")
    keyed = Run.objects.filter(state__in=Run.OPEN_STATES, concurrency_key__in=["a", "b"])
    plan = plan_of(keyed.exclude(concurrency_key=""))
    assert indexes_used(plan, ["distcron_run_scope"])
    plan = plan_of(in_scope(Scope(1, "a")))
    assert indexes_used(plan, ["distcron_run_scope", "distcron_run_open"])
