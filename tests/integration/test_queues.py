"""Queues, priorities and reserved slots: what a node reads, claims and starts, in which order."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client

from distcron_app import lifecycle
from distcron_app.clock import Clock
from distcron_app.conf import Config, problems
from distcron_app.dispatch import READ_AT_LEAST
from distcron_app.explained_instants import explain_instant
from distcron_app.explanations import explain
from distcron_app.instants import database_now
from distcron_app.lifecycle import ClaimedRun
from distcron_app.locks import Level
from distcron_app.locks.memory import MemoryLockBackend
from distcron_app.management.commands import runscheduler
from distcron_app.models import Run, Schedule
from distcron_app.nodes import register
from distcron_app.runner import Assignment, Outcome
from distcron_app.scheduler import Scheduler
from tests.factories import make_node, make_run, make_schedule
from tests.integration.schedulerctl_builders import ctl
from tests.integration.test_dispatch import CONFIG, Member, due, whole_second

pytestmark = pytest.mark.django_db


def member(**settings: Any) -> Member:
    found = Member(MemoryLockBackend())
    found.dispatcher._config = dataclasses.replace(CONFIG, **settings)
    return found


def flood(priority: int, count: int = READ_AT_LEAST + 20, **values: Any) -> None:
    """Insert due schedules that are older than any other."""
    at = whole_second(-600)
    Schedule.objects.bulk_create(
        Schedule(
            key=f"flood-{priority}-{number}",
            name="flood",
            job="project.demo.heartbeat",
            kind="interval",
            interval_seconds=3600,
            interval_anchor=at,
            next_run_at=at + timedelta(milliseconds=number),
            misfire_grace_seconds=3600,
            priority=priority,
            **values,
        )
        for number in range(count)
    )


def claimed(found: Member, capacity: int, reserved: int = 0) -> list[int]:
    tick = found.dispatcher.tick(found.row.pk, capacity, reserved=reserved)
    return [run.priority for run in tick.claimed.runs]


class TestWhatIsRead:
    def test_a_flood_of_low_priority_keeps_no_high_one_out(self) -> None:
        flood(0)
        due(seconds_ago=1, priority=10)
        due(seconds_ago=1, priority=20)
        assert sorted(claimed(member(), 2)) == [10, 20]

    def test_a_flood_of_high_priority_goes_before_low_ones_and_each_comes_in_the_end(self) -> None:
        flood(5)
        due(seconds_ago=1)
        found = member()
        assert claimed(found, READ_AT_LEAST) == [5] * READ_AT_LEAST
        assert sorted(claimed(found, READ_AT_LEAST)) == [0] + [5] * 20

    def test_below_a_full_batch_one_query_is_enough(self, django_assert_num_queries: Any) -> None:
        found = member()
        with django_assert_num_queries(1):
            claimed(found, 5)

    def test_only_the_queues_of_the_node_are_claimed(self) -> None:
        reports = due(queue="reports")
        other = due(queue="default")
        tick = member(queues=("reports", "night")).tick()
        assert [run.schedule_id for run in tick.claimed.runs] == [reports.pk]
        tick = member().tick()
        assert [run.schedule_id for run in tick.claimed.runs] == [other.pk]

    def test_queued_runs_go_by_queue_and_priority_then_by_age(self) -> None:
        for queue, priority, age in (("a", 0, 9), ("a", 5, 1), ("a", 5, 3), ("b", 50, 9)):
            make_run(
                schedule=make_schedule(),
                state="queued",
                queue=queue,
                priority=priority,
                due_at=whole_second(-age),
            )
        found = member(queues=("a",))
        (oldest,) = found.dispatcher.claim_queued(found.row.pk, 1).runs
        (second,) = found.dispatcher.claim_queued(found.row.pk, 1).runs
        assert [oldest.priority, second.priority] == [5, 5]
        assert oldest.due_at < second.due_at
        (last,) = found.dispatcher.claim_queued(found.row.pk, 5).runs
        assert last.priority == 0

    def test_queued_runs_that_are_still_to_come_do_not_fill_the_batch(self) -> None:
        soon = database_now() + timedelta(milliseconds=900)
        schedule = make_schedule()
        for _ in range(READ_AT_LEAST):
            make_run(schedule=schedule, state="queued", priority=100, due_at=soon)
        make_run(schedule=make_schedule(), state="queued", due_at=whole_second(-1))
        found = member()
        (run,) = found.dispatcher.claim_queued(found.row.pk, 5).runs
        assert run.priority == 0
        assert 0 < found.dispatcher.queued_wait_seconds <= 0.9


class TestReservedSlots:
    def test_reserved_capacity_is_for_high_priority_alone(self) -> None:
        flood(0)
        due(seconds_ago=1, priority=50)
        assert claimed(member(), 0, reserved=2) == [50]

    def test_what_is_left_beside_high_ones_goes_to_the_others(self) -> None:
        flood(0, count=10)
        for _ in range(3):
            due(seconds_ago=1, priority=60)
        assert sorted(claimed(member(), 2, reserved=2)) == [0, 60, 60, 60]

    def test_queued_runs_may_use_the_reserved_capacity_too(self) -> None:
        low = make_run(schedule=make_schedule(), state="queued", due_at=whole_second(-9))
        high = make_run(
            schedule=make_schedule(), state="queued", priority=50, due_at=whole_second(-1)
        )
        found = member()
        runs = found.dispatcher.claim_queued(found.row.pk, 0, reserved=1).runs
        assert [run.run_id for run in runs] == [high.pk]
        runs = found.dispatcher.claim_queued(found.row.pk, 1).runs
        assert [run.run_id for run in runs] == [low.pk]


class Pool:
    """Two slots that are taken and freed by the test."""

    stuck = 0

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.runs: list[int] = []
        self.cancelled: dict[int, str] = {}

    @property
    def in_flight(self) -> int:
        return len(self.runs)

    @property
    def taken_slots(self) -> int:
        return len(self.runs)

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.runs)

    def submit(self, assignments: Iterable[Assignment]) -> None:
        self.runs += [each.run_id for each in assignments]

    def cancel(self, causes: dict[int, str], *, reason: str) -> None:
        self.cancelled |= {run: cause for run, cause in causes.items() if run in self.runs}

    def wake(self) -> None: ...


class Loop:
    """A scheduler without processes, whose jobs end when the test says so."""

    def __init__(self, slots: int, **settings: Any) -> None:
        config = Config(lock_backend="memory", processes=1, threads=slots, **settings)
        self.pool = Pool(slots)
        backend = MemoryLockBackend()
        self.scheduler = Scheduler(
            config=config,
            pool=self.pool,  # type: ignore[arg-type]
            find_level=lambda name: Level(name=name, parts=("memory",), backend=backend),
            report=lambda event, **facts: None,
            clock=Clock(),
        )
        self.node_id = register(config)
        self.scheduler._keeper.node_id = self.node_id

    def accept(self, *priorities: int, state: str = "claimed") -> list[int]:
        """Own runs of these priorities, and start what has a slot; return all their ids."""
        rows = [
            make_run(
                state=state,
                priority=priority,
                node_id=self.node_id,
                attempt=int(state == "running"),
                delivery="at_least_once" if state == "running" else "at_most_once",
            )
            for priority in priorities
        ]
        runs = lifecycle.read_back([row.owner_token for row in rows], self.node_id)
        ordered: list[ClaimedRun] = sorted(runs, key=lambda run: run.run_id)
        self.scheduler._accept(ordered)
        self.scheduler._start_ready()
        return [run.run_id for run in ordered]

    def end(self, run_id: int) -> None:
        self.pool.runs.remove(run_id)
        self.scheduler._ended(Outcome(run_id=run_id, fencing_token=0, state="succeeded"))
        self.scheduler._start_ready()

    @property
    def in_flight(self) -> set[int]:
        return set(self.pool.runs)


class TestStarting:
    def test_what_is_claimed_starts_by_priority(self) -> None:
        loop = Loop(1)
        first, low, high = loop.accept(0, 0, 5)
        assert loop.in_flight == {high}
        loop.end(high)
        assert loop.in_flight == {first}
        loop.end(first)
        assert loop.in_flight == {low}

    def test_a_node_full_of_low_priority_starts_a_high_one_at_once(self) -> None:
        loop = Loop(3, reserved_slots=1)
        low = loop.accept(0, 0, 0, 49)
        assert len(loop.in_flight) == 2
        assert loop.scheduler._capacity() == (0, 0)
        assert not loop.scheduler._can_start()
        (high,) = loop.accept(50)
        assert high in loop.in_flight
        assert len(loop.in_flight) == 3
        # The slot that a low one leaves goes to the next low one, and the reserved one stays.
        loop.end(high)
        assert len(loop.in_flight) == 2
        loop.end(next(iter(loop.in_flight)))
        assert len(loop.in_flight & set(low)) == 2

    def test_capacity_counts_the_reserved_slots_apart(self) -> None:
        loop = Loop(4, reserved_slots=2)
        assert loop.scheduler._capacity() == (2, 2)
        (high,) = loop.accept(90)
        assert loop.scheduler._capacity() == (2, 1)
        loop.accept(0, 0)
        assert loop.scheduler._capacity() == (0, 1)
        loop.end(high)
        assert loop.scheduler._capacity() == (0, 2)

    def test_a_run_whose_start_came_with_its_claim_waits_at_the_node_for_a_free_thread(
        self,
    ) -> None:
        # Handed over at once, it could land behind a long job while another thread gets free.
        loop = Loop(1)
        (long,) = loop.accept(0)
        (waiting,) = loop.accept(0, state="running")
        assert loop.in_flight == {long}
        loop.end(long)
        assert loop.in_flight == {waiting}

    def test_what_waits_behind_a_run_is_claimed_in_the_turn_in_which_that_ends(self) -> None:
        """In the next one it would be up to a poll late, each time."""
        loop = Loop(2)
        schedule = due(overlap="queue_one")
        loop.scheduler._claim()
        loop.scheduler._start_ready()
        (first,) = loop.in_flight
        waiting = make_run(schedule=schedule, state="queued", reason="overlap")
        loop.end(first)
        loop.scheduler._claim()
        loop.scheduler._start_ready()
        assert loop.in_flight == {waiting.pk}

    def test_a_run_that_is_told_to_stop_while_it_waits_hears_of_it_when_it_starts(self) -> None:
        loop = Loop(1)
        (long,) = loop.accept(0)
        (waiting,) = loop.accept(0, state="running")
        lifecycle.request_cancel([waiting], cause="by siti: too much")
        loop.scheduler._obey_stops()
        assert loop.pool.cancelled == {}
        loop.end(long)
        assert loop.pool.cancelled == {waiting: "by siti: too much"}

    def test_a_drain_gives_back_what_has_not_started_and_finishes_the_rest(self) -> None:
        loop = Loop(1)
        loop.accept(0)
        (given_back,) = loop.accept(0)
        (started,) = loop.accept(0, state="running")
        loop.scheduler._begin_drain()
        assert Run.objects.get(pk=given_back).state == "queued"
        assert Run.objects.get(pk=started).state == "running"
        assert loop.scheduler._drained() is None
        loop.end(*loop.in_flight)
        assert loop.in_flight == {started}


class TestRefusals:
    @pytest.mark.parametrize("priority", [-101, 101])
    def test_a_priority_out_of_bounds_names_them(self, priority: int) -> None:
        schedule = make_schedule()
        schedule.priority = priority
        with pytest.raises(ValidationError, match="allowed -100 to 100") as caught:
            schedule.full_clean()
        assert list(caught.value.message_dict) == ["priority"]

    def test_a_queue_is_named_as_a_slug(self) -> None:
        schedule = make_schedule()
        schedule.queue = "two words"
        with pytest.raises(ValidationError) as caught:
            schedule.full_clean()
        assert list(caught.value.message_dict) == ["queue"]

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"QUEUES": ["two words"]}, "queue name 'two words'"),
            ({"QUEUES": "default"}, "list of strings"),
            ({"RESERVED_SLOTS": 16}, "16 of 16 slots leave none"),
            ({"RESERVED_PRIORITY": 101}, "allowed -100 to 100"),
        ],
    )
    def test_settings_that_cannot_work_say_why(self, settings: dict[str, Any], text: str) -> None:
        (problem,) = problems(settings)
        assert text in str(problem)

    @pytest.mark.parametrize("text", ["", " , ", "a b", "x" * 51])
    def test_the_option_refuses_what_is_no_queue(self, text: str) -> None:
        with pytest.raises(argparse.ArgumentTypeError):
            runscheduler._queues(text)

    def test_the_option_takes_several_and_each_once(self) -> None:
        assert runscheduler._queues("default, reports,default") == ("default", "reports")

    def test_options_that_leave_no_slot_beside_the_reserved_ones_are_refused(
        self, settings: Any
    ) -> None:
        settings.DISTCRON = {**settings.DISTCRON, "RESERVED_SLOTS": 2}
        with pytest.raises(CommandError, match="2 of 2 slots"):
            call_command("runscheduler", "--processes", "1", "--threads", "2")


@pytest.fixture
def unserved() -> Iterator[Schedule]:
    make_node(name="web-1", queues=["default"])
    yield due(key="close", queue="reports", created_at=whole_second(-3600))


class TestWhatPeopleSee:
    def test_the_node_row_says_what_it_serves(self) -> None:
        register(dataclasses.replace(CONFIG, queues=("reports",)))
        answer = ctl("nodes", "--json")
        assert [node["queues"] for node in answer.data["nodes"]] == [["reports"]]

    def test_the_pages_show_the_queues_and_warn(
        self, unserved: Schedule, admin_client: Client
    ) -> None:
        make_schedule(queue="default")
        text = admin_client.get("/cron/nodes/").content.decode()
        assert '<td data-label="Queues">default</td>' in text
        text = admin_client.get("/cron/").content.decode()
        assert "no node serves the queue reports, so 1 active schedule does not run" in text
        text = admin_client.get("/cron/schedules/?queue=reports").content.decode()
        assert unserved.name in text
        assert "no schedule fits" not in text.lower()
        text = admin_client.get("/cron/schedules/?queue=night").content.decode()
        assert unserved.name not in text

    def test_runs_are_filtered_by_queue(self, admin_client: Client) -> None:
        make_run(queue="reports", schedule=make_schedule(name="Alpha"))
        make_run(queue="default", schedule=make_schedule(name="Beta"))
        text = admin_client.get("/cron/runs/?queue=reports").content.decode()
        assert "Alpha" in text
        assert "Beta" not in text

    def test_a_node_that_serves_all_of_them_ends_the_warning(
        self, unserved: Schedule, admin_client: Client
    ) -> None:
        make_node(queues=[])
        text = admin_client.get("/cron/").content.decode()
        assert "no node serves" not in text

    def test_the_command_line_warns(self, unserved: Schedule) -> None:
        warning = "no node serves the queue reports, so 1 active schedule does not run"
        assert ctl("status", "--json").data["warnings"] == [warning]
        found = [
            (each["level"], each["subject"], each["text"])
            for each in ctl("doctor", "--json").data["findings"]
            if each["code"] == "schedules.queue"
        ]
        assert found == [("warning", "reports", warning)]

    def test_the_list_shows_and_filters_queues(self, unserved: Schedule) -> None:
        make_schedule()
        (row,) = ctl("list", "--queue", "reports", "--json").data["schedules"]
        assert (row["key"], row["queue"], row["priority"]) == ("close", "reports", 0)

    def test_an_overdue_occurrence_says_that_nobody_serves_its_queue(
        self, unserved: Schedule
    ) -> None:
        assert unserved.next_run_at is not None
        answer = explain_instant(unserved, unserved.next_run_at, now=database_now())
        assert answer.code == "due_queue"
        assert answer.sentence.endswith("no node that takes runs serves its queue “reports”.")

    def test_a_queued_run_says_so_too(self, unserved: Schedule, admin_client: Client) -> None:
        run = make_run(schedule=unserved, state="queued", queue="reports")
        text = "No node that takes runs serves its queue “reports”"
        assert text in admin_client.get(run.get_absolute_url()).content.decode()
        assert text in explain(run, database_now(), served=frozenset({"default"})).warning
        assert explain(run, database_now(), served=None).warning == ""


@pytest.mark.databases("postgresql")
def test_due_rows_are_found_by_index_at_100_000_schedules() -> None:
    make_schedule(key="x")
    columns = {field.column for field in Schedule._meta.concrete_fields}
    names = ", ".join(f'"{name}"' for name in sorted(columns - {"id", "key", "next_run_at"}))
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO distcron_schedule (key, next_run_at, {names}) "
            f"SELECT 'k' || n, now() + (n - 200) * interval '1 second', {names} "
            "FROM distcron_schedule, generate_series(1, 100000) AS n WHERE key = 'x'"
        )
        cursor.execute("UPDATE distcron_schedule SET priority = 60 WHERE id % 1000 = 0")
        cursor.execute("ANALYZE distcron_schedule")
    dispatcher = member(queues=("default",)).dispatcher
    oldest = dispatcher._served(1.0)[:128]
    above = dispatcher._served().filter(priority__gt=0).by_priority()[:128]
    assert "Index Scan using distcron_schedule_due" in oldest.explain(analyze=True)
    assert "Seq Scan" not in above.explain(analyze=True)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE distcron_schedule SET next_run_at = now() - interval '1 hour'")
        cursor.execute("ANALYZE distcron_schedule")
    assert "Index Scan using distcron_schedule_due" in oldest.explain(analyze=True)
    assert "Index Scan using distcron_schedule_priority" in above.explain(analyze=True)
