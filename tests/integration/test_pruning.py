"""Pruning: what goes, what stays, what is summed up, and that nothing runs again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import connections
from django.test import override_settings

from distcron_app import history, lifecycle
from distcron_app.clock import Clock
from distcron_app.conf import Config
from distcron_app.instants import database_now
from distcron_app.lifecycle import Decision, Limits
from distcron_app.locks import new_owner_token
from distcron_app.maintenance import Sweeper
from distcron_app.models import Attempt, Run, RunDay, RunOutput, Schedule
from tests.factories import make_node, make_run, make_schedule

pytestmark = pytest.mark.django_db


def configured(**keys: int) -> Any:
    return override_settings(DISTCRON=settings.DISTCRON | keys)


@pytest.fixture(autouse=True)
def thirty_and_ninety_days() -> Iterator[None]:
    with configured(KEEP_DAYS=30, KEEP_FAILED_DAYS=90):
        yield


def ended(schedule: Schedule, state: str = "succeeded", *, days: float, **values: Any) -> Run:
    """Return a run that ended so many days ago, after one second and a half."""
    at = database_now() - timedelta(days=days)
    facts = {"due_at": at, "started_at": at - timedelta(seconds=1.5), "finished_at": at}
    return make_run(schedule=schedule, state=state, **facts | values)


def left() -> set[int]:
    return set(Run.objects.values_list("pk", flat=True))


def prune_all(**options: Any) -> int:
    """Prune until the walk over the schedules is over; return how many rows went."""
    count, after = 0, 0
    while True:
        step = lifecycle.prune(after, **options)
        count += step.count
        if step.after is None:
            return count
        after = step.after


class TestWhatGoes:
    def test_runs_older_than_the_projects_days(self) -> None:
        schedule = make_schedule()
        for state in ("succeeded", "skipped", "cancelled"):
            ended(schedule, state, days=31)
        young = ended(schedule, days=29)
        assert prune_all() == 3
        assert left() == {young.pk}

    def test_failed_and_lost_runs_stay_longer(self) -> None:
        schedule = make_schedule()
        kept = {ended(schedule, state, days=89).pk for state in ("failed", "lost")}
        for state in ("failed", "lost"):
            ended(schedule, state, days=91)
        assert prune_all() == 2
        assert left() == kept

    def test_failed_runs_are_never_kept_shorter_than_the_others(self) -> None:
        schedule = make_schedule(keep_days=365)
        ended(schedule, "failed", days=360)
        ended(schedule, "failed", days=366)
        assert prune_all() == 1

    def test_days_of_the_schedule_come_before_the_projects(self) -> None:
        short, forever = make_schedule(keep_days=7), make_schedule(keep_days=0)
        ended(short, days=8)
        kept = {ended(forever, days=4000).pk, ended(forever, "failed", days=4000).pk}
        assert prune_all() == 1
        assert left() == kept

    def test_zero_days_in_the_settings_keep_everything(self) -> None:
        ended(make_schedule(), "failed", days=4000)
        ended(make_schedule(), days=4000)
        with configured(KEEP_DAYS=0):
            assert prune_all() == 0
        assert prune_all() == 2

    def test_only_the_newest_so_many_stay(self) -> None:
        schedule = make_schedule(keep_succeeded=2, keep_failed=1)
        ended(schedule, days=3)
        ended(schedule, "skipped", days=2)
        ended(schedule, "failed", days=2)
        kept = [
            ended(schedule, days=1),
            ended(schedule, "cancelled", days=1),
            ended(schedule, "lost", days=1),
        ]
        assert prune_all() == 3
        assert left() == {run.pk for run in kept}

    def test_numbers_of_the_settings_hold_for_schedules_without_their_own(self) -> None:
        plain, own = make_schedule(), make_schedule(keep_succeeded=0)
        for schedule in (plain, own):
            ended(schedule, days=2)
            ended(schedule, days=1)
        with configured(KEEP_SUCCEEDED=1):
            assert prune_all() == 1
        assert Run.objects.filter(schedule=own).count() == 2

    def test_runs_of_a_deleted_schedule_follow_the_projects_days(self) -> None:
        schedule = make_schedule(keep_days=0)
        ended(schedule, days=31, scheduled_at=datetime(2026, 1, 2, tzinfo=UTC))
        young = ended(schedule, days=29)
        schedule.delete()
        assert prune_all() == 1
        assert left() == {young.pk}

    def test_output_and_attempts_go_with_the_run(self) -> None:
        run = ended(make_schedule(), days=31)
        kept = ended(make_schedule(), days=1)
        for each in (run, kept):
            RunOutput.objects.create(run=each, output="text")
            Attempt.objects.create(
                run=each, number=1, fencing_token=1, ended_at=each.due_at, reason="error"
            )
        assert prune_all() == 1
        assert list(RunOutput.objects.values_list("run", flat=True)) == [kept.pk]
        assert list(Attempt.objects.values_list("run", flat=True)) == [kept.pk]

    def test_many_schedules_are_walked_in_steps(self) -> None:
        schedules = [make_schedule() for _ in range(55)]
        for schedule in schedules:
            ended(schedule, days=31)
        first = lifecycle.prune()
        assert (first.count, first.after) == (50, schedules[49].pk)
        rest = lifecycle.prune(schedules[49].pk)
        assert (rest.count, rest.after) == (5, None)

    def test_a_step_deletes_a_batch_at_most_and_stays_where_more_is_left(self) -> None:
        schedule = make_schedule()
        for _ in range(5):
            ended(schedule, days=31)
        step = lifecycle.prune(batch=3)
        assert (step.count, step.after) == (3, 0)
        step = lifecycle.prune(batch=3)
        assert (step.count, step.after) == (2, None)

    def test_one_schedule_with_other_limits(self) -> None:
        wanted, other = make_schedule(), make_schedule()
        for schedule in (wanted, other):
            ended(schedule, days=6)
            ended(schedule, "failed", days=2)
            ended(schedule, "failed", days=1)
        limits = Limits(schedule_id=wanted.pk, keep_days=5, keep_failed=1)
        assert lifecycle.count_prunable(limits) == 2
        assert prune_all(limits=limits) == 2
        assert Run.objects.filter(schedule=other).count() == 3


class TestWhatStays:
    @pytest.mark.parametrize("state", ["queued", "claimed", "running"])
    def test_open_runs_stay_however_old(self, state: str) -> None:
        ended(make_schedule(keep_succeeded=1, keep_failed=1), state, days=4000, finished_at=None)
        assert lifecycle.count_prunable() == 0
        assert prune_all() == 0

    def test_an_instant_that_may_still_be_planned_stays(self) -> None:
        schedule = make_schedule()
        at = database_now() - timedelta(days=40)
        runs = [
            ended(schedule, days=31, scheduled_at=at + timedelta(days=number))
            for number in range(3)
        ]
        Schedule.objects.filter(pk=schedule.pk).update(next_run_at=at + timedelta(days=1))
        assert lifecycle.count_prunable() == 1
        assert prune_all() == 1
        assert left() == {runs[1].pk, runs[2].pk}

    def test_the_newest_instant_of_a_schedule_stays(self) -> None:
        schedule = make_schedule()
        newest = ended(schedule, days=31, scheduled_at=database_now() - timedelta(days=31))
        ended(schedule, days=32, scheduled_at=database_now() - timedelta(days=32))
        assert prune_all() == 1
        assert left() == {newest.pk}

    def test_planning_after_a_raw_change_does_not_go_back_behind_what_was_pruned(self) -> None:
        schedule = make_schedule(kind="interval", cron="", interval_seconds=86_400)
        start = database_now() - timedelta(days=40)
        for number in range(10):
            ended(schedule, days=31, scheduled_at=start + timedelta(days=number))
        assert prune_all() == 9
        Schedule.objects.filter(pk=schedule.pk).update(next_run_at=None, planned_from=start)
        schedule.refresh_from_db()
        assert schedule.planning_start(database_now()) == start + timedelta(days=9)

    def test_a_run_that_a_person_started_again_meanwhile_stays(self) -> None:
        run = ended(make_schedule(), "failed", days=91)
        found = {run.pk: run.finished_at}
        Run.objects.filter(pk=run.pk).update(state="queued", finished_at=None)
        assert lifecycle.pruning._delete(found) == 0
        Run.objects.filter(pk=run.pk).update(state="failed", finished_at=database_now())
        assert lifecycle.pruning._delete(found) == 0
        assert left() == {run.pk}


def test_a_stale_planner_cannot_run_a_pruned_occurrence_again() -> None:
    node = make_node()
    schedule = make_schedule(
        kind="interval",
        cron="",
        interval_seconds=86_400,
        interval_anchor=datetime(2026, 1, 1, tzinfo=UTC),
    )
    at = database_now().replace(microsecond=0) - timedelta(days=40)
    Schedule.objects.filter(pk=schedule.pk).update(next_run_at=at)
    schedule.refresh_from_db()
    stale = Decision(
        schedule_id=schedule.pk,
        version=schedule.version,
        seen_next_run_at=at,
        next_run_at=at + timedelta(days=1),
        owner_token=new_owner_token(),
        run_at=at,
    )
    ended(schedule, days=39, scheduled_at=at)
    ended(schedule, days=38, scheduled_at=at + timedelta(days=1))
    Schedule.objects.filter(pk=schedule.pk).update(next_run_at=at + timedelta(days=2))
    Schedule.objects.filter(pk=schedule.pk).update(version=stale.version)
    assert prune_all() == 1
    assert not Run.objects.filter(scheduled_at=at).exists()

    assert lifecycle.claim([stale], node.pk).runs == ()
    assert not Run.objects.filter(scheduled_at=at).exists()


class TestDays:
    def test_totals_are_the_same_before_and_after(self) -> None:
        schedule = make_schedule()
        for days, state in ((32, "succeeded"), (32, "skipped"), (33, "cancelled"), (91, "failed")):
            ended(schedule, state, days=days)
        ended(schedule, days=32, started_at=None)
        ended(schedule, "failed", days=32)  # stays, on a day of which others go
        ended(make_schedule(), days=32)
        before = history.daily_counts(schedule.pk, days=100)
        assert prune_all() == 6
        assert history.daily_counts(schedule.pk, days=100) == before
        ended(schedule, days=32)
        assert prune_all() == 1
        day = {each.day: each for each in history.daily_counts(schedule.pk, days=100)}[
            (database_now() - timedelta(days=32)).date()
        ]
        assert day.states == {"succeeded": 3, "skipped": 1, "cancelled": 0, "failed": 1, "lost": 0}
        assert (day.count, day.timed, day.total_seconds) == (5, 4, 6.0)
        assert (day.longest_seconds, day.average_seconds) == (1.5, 1.5)

    def test_each_day_is_there_and_today_is_the_last(self) -> None:
        days = history.daily_counts(make_schedule().pk, days=3)
        today = database_now().date()
        assert [each.day for each in days] == [today - timedelta(days=ago) for ago in (2, 1, 0)]
        assert [(each.count, each.average_seconds) for each in days] == [(0, None)] * 3

    def test_a_day_is_one_of_utc(self) -> None:
        schedule = make_schedule(keep_days=1)
        midnight = database_now().replace(hour=0, minute=0, second=0, microsecond=0)
        two_ago = midnight - timedelta(days=2)
        for at in (two_ago - timedelta(microseconds=1), two_ago, two_ago + timedelta(hours=2)):
            ended(schedule, days=0, finished_at=at, started_at=None)
        wanted = [1, 2, 0, 0]
        assert [each.count for each in history.daily_counts(schedule.pk, days=4)] == wanted
        assert prune_all() == 3
        assert [each.count for each in history.daily_counts(schedule.pk, days=4)] == wanted

    def test_the_longest_of_two_batches_is_kept(self) -> None:
        schedule = make_schedule()
        for seconds in (4.0, 0.25):
            run = ended(schedule, days=31)
            Run.objects.filter(pk=run.pk).update(
                started_at=run.finished_at - timedelta(seconds=seconds)
            )
            assert prune_all() == 1
        day = RunDay.objects.get()
        assert (day.timed, day.total_seconds, day.longest_seconds) == (2, 4.25, 4.0)


class HandClock(Clock):
    """A clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


class TestSweep:
    """The pause is jittered by half: 15 to 45 s, and ten minutes more where a node is busy."""

    @pytest.fixture
    def clock(self) -> HandClock:
        return HandClock()

    @pytest.fixture
    def sweeper(self, clock: HandClock) -> Sweeper:
        return Sweeper(config=Config(processes=1, threads=2), clock=clock)

    def sweep(self, sweeper: Sweeper, owned: int = 0) -> int:
        return sweeper.sweep(make_node().pk, range(owned), 0.0).pruned

    def test_prunes_some_time_after_the_start_and_then_now_and_then(
        self, sweeper: Sweeper, clock: HandClock
    ) -> None:
        schedule = make_schedule()
        ended(schedule, days=31)
        clock.seconds += 14
        assert self.sweep(sweeper) == 0
        clock.seconds += 32
        assert self.sweep(sweeper) == 1
        ended(schedule, days=31)
        clock.seconds += 14
        assert self.sweep(sweeper) == 0
        clock.seconds += 32
        assert self.sweep(sweeper) == 1

    def test_each_sweep_prunes_while_a_batch_comes_out_full(
        self, sweeper: Sweeper, clock: HandClock
    ) -> None:
        fill([make_schedule()], 2500, database_now() - timedelta(days=40))
        clock.seconds += 46
        assert [self.sweep(sweeper) for _ in range(4)] == [1000, 1000, 500, 0]

    def test_a_busy_node_prunes_after_ten_minutes_at_the_latest(
        self, sweeper: Sweeper, clock: HandClock
    ) -> None:
        ended(make_schedule(), days=31)
        clock.seconds += 600
        assert self.sweep(sweeper, owned=3) == 0
        clock.seconds += 46
        assert self.sweep(sweeper, owned=3) == 1

    def test_goes_on_with_the_schedules_behind_and_begins_again(
        self, sweeper: Sweeper, clock: HandClock
    ) -> None:
        schedules = [make_schedule() for _ in range(51)]
        for schedule in schedules:
            ended(schedule, days=31)
            ended(schedule, days=1)  # stays, and so does the schedule in the walk
        pruned = []
        for _ in range(2):
            clock.seconds += 46
            pruned.append(self.sweep(sweeper))
        assert pruned == [50, 1]
        ended(schedules[0], days=31)
        clock.seconds += 46
        assert self.sweep(sweeper) == 1


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("keep_days", 36_501, "At most 36500; 0 is no limit."),
        ("keep_succeeded", 10_000_001, "At most 10000000; 0 is no limit."),
        ("keep_failed", 10_000_001, "At most 10000000; 0 is no limit."),
    ],
)
def test_the_form_names_the_limit_that_is_too_large(field: str, value: int, text: str) -> None:
    schedule = make_schedule()
    setattr(schedule, field, value)
    with pytest.raises(ValidationError) as caught:
        schedule.full_clean()
    assert caught.value.message_dict == {field: [text]}


@pytest.mark.django_db(transaction=True)
def test_two_pruners_at_once_delete_each_run_once() -> None:
    schedules = [make_schedule() for _ in range(20)]
    at = database_now() - timedelta(days=40)
    fill(schedules, 3000, at)
    counts: list[int] = []
    barrier = threading.Barrier(2)

    def work() -> None:
        try:
            barrier.wait(30)
            counts.append(prune_all(batch=100))
        finally:
            connections.close_all()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    rest = prune_all()  # what each skipped since the other one had it

    assert len(counts) == 2
    assert sum(counts) + rest == 3000
    assert Run.objects.count() == 0
    assert sum(day.succeeded for day in RunDay.objects.all()) == 3000


def fill(schedules: list[Schedule], count: int, at: datetime) -> None:
    Run.objects.bulk_create(
        (
            Run(
                schedule=schedules[number % len(schedules)],
                schedule_name="x",
                job="x",
                delivery="at_most_once",
                due_at=at,
                started_at=at,
                finished_at=at + timedelta(seconds=0.5),
                state="succeeded",
            )
            for number in range(count)
        ),
        batch_size=1000,
    )


@pytest.mark.django_db(transaction=True)  # in one transaction MariaDB can purge nothing
def test_a_hundred_thousand_runs_are_pruned_and_summed_up() -> None:
    schedules = [make_schedule() for _ in range(50)]
    fill(schedules, 100_000, database_now() - timedelta(days=40))
    kept = ended(schedules[0], days=1)

    assert lifecycle.count_prunable() == 100_000
    assert prune_all(batch=5000) == 100_000

    assert left() == {kept.pk}
    assert sum(day.succeeded for day in RunDay.objects.all()) == 100_000
    assert sum(day.total_seconds for day in RunDay.objects.all()) == 50_000.0
