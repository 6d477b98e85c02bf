"""Schedules with the same concurrency key count as one for overlapping runs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import close_old_connections, connection

from distcron_app import job, lifecycle, operations
from distcron_app.dispatch import TURN_SECONDS
from distcron_app.errors import ScheduleBusy
from distcron_app.instants import database_now
from distcron_app.lifecycle import Decision
from distcron_app.lifecycle.overlap import OpenRuns, fate
from distcron_app.locks import new_owner_token, schedule_lock_name, scope_lock_name
from distcron_app.locks.memory import MemoryLockBackend
from distcron_app.models import Node, Run, Schedule, ScopeLock, scope_bucket
from tests.factories import make_node, make_run, make_schedule
from tests.integration.test_dispatch import Member

pytestmark = pytest.mark.django_db

KEY = "invoices-{customer}"


@job(name="tests.bill")
def bill(customer: str = "acme", token: str = "") -> str:
    """Do nothing for a customer."""
    return customer


def due(customer: str = "acme", *, ago: float = 2, **values: Any) -> Schedule:
    """Return a schedule of the key whose next instant is ``ago`` seconds past."""
    at = database_now().replace(microsecond=0) - timedelta(seconds=ago)
    defaults: dict[str, Any] = {
        "job": "tests.bill",
        "arguments": {"customer": customer},
        "concurrency_key": KEY,
        "kind": "interval",
        "cron": "",
        "interval_seconds": 60,
        "interval_anchor": at,
    }
    schedule = make_schedule(**defaults | values)
    Schedule.objects.filter(pk=schedule.pk).update(next_run_at=at)
    schedule.refresh_from_db()
    return schedule


def decision(schedule: Schedule, **values: Any) -> Decision:
    seen = schedule.next_run_at
    assert seen is not None
    defaults: dict[str, Any] = {
        "schedule_id": schedule.pk,
        "version": schedule.version,
        "seen_next_run_at": seen,
        "next_run_at": seen + timedelta(minutes=1),
        "owner_token": new_owner_token(),
        "run_at": seen,
        "concurrency_key": schedule.scope(),
    }
    return Decision(**defaults | values)


def claim(node: Node, *schedules: Schedule) -> lifecycle.Claimed:
    return lifecycle.claim([decision(schedule) for schedule in schedules], node.pk)


def run_of(schedule: Schedule) -> Run:
    return Run.objects.get(schedule=schedule, scheduled_at=schedule.next_run_at)


def occupy(schedule: Schedule, state: str = "running", **values: Any) -> Run:
    active = {"attempt": 1} if state == "running" else {}
    return make_run(
        schedule=schedule, state=state, concurrency_key=schedule.scope(), **active | values
    )


class TestOverlap:
    @pytest.mark.parametrize(
        ("values", "state"),
        [
            ({"overlap": "skip"}, "skipped"),
            ({"overlap": "skip", "max_active": 2}, "claimed"),
            ({"overlap": "queue_one"}, "queued"),
            ({"overlap": "queue_all"}, "queued"),
            ({"overlap": "replace"}, "queued"),
            ({"overlap": "allow"}, "claimed"),
            ({"overlap": "allow", "max_active": 1}, "skipped"),
        ],
    )
    def test_the_active_run_of_another_schedule_counts(
        self, values: dict[str, Any], state: str
    ) -> None:
        active = occupy(make_schedule(job="tests.bill", concurrency_key="invoices-acme"))
        schedule = due(**values)
        claim(make_node(), schedule)
        run = run_of(schedule)
        assert run.state == state
        assert run.concurrency_key == "invoices-acme"
        if state != "claimed":
            assert run.reason == "overlap"
            assert isinstance(run.details, dict)
            assert run.details["blocked_by"] == active.pk
        active.refresh_from_db()
        assert (active.cancel_requested_at is not None) == (values["overlap"] == "replace")

    @pytest.mark.parametrize(
        ("overlap", "waiting", "state"),
        [
            ("queue_one", 1, "skipped"),
            ("queue_all", 2, "queued"),
            ("queue_all", 3, "skipped"),
            ("replace", 2, "queued"),
        ],
    )
    def test_what_waits_in_the_scope_fills_one_queue(
        self, overlap: str, waiting: int, state: str
    ) -> None:
        other = due(ago=-60)
        occupy(other)
        earlier = [occupy(other, "queued", reason="overlap") for _ in range(waiting)]
        schedule = due(overlap=overlap, max_queued=3)
        claim(make_node(), schedule)
        assert run_of(schedule).state == state
        states = {Run.objects.get(pk=run.pk).state for run in earlier}
        assert states == ({"skipped"} if overlap == "replace" else {"queued"})

    def test_other_arguments_run_side_by_side(self) -> None:
        first, second = due("acme"), due("globex")
        assert len(claim(make_node(), first, second).runs) == 2

    def test_a_key_that_differs_by_case_alone_is_another_one(self) -> None:
        occupy(due("Acme"))
        schedule = due("acme")
        assert len(claim(make_node(), schedule).runs) == 1
        waiting = make_run(schedule=due("ACME"), state="queued", concurrency_key="invoices-ACME")
        assert list(Run.objects.queued_due().startable()) == [waiting]

    def test_of_two_in_one_batch_the_first_is_decided(self) -> None:
        first, second = due(), due(overlap="queue_one")
        node = make_node()
        (run,) = claim(node, first, second).runs
        assert run.schedule_id == first.pk
        second.refresh_from_db()
        claim(node, second)
        assert run_of(second).details == {"blocked_by": run.run_id}

    def test_runs_from_before_the_schedule_had_a_key_count_and_those_of_others_do_not(self) -> None:
        schedule, other = due(), due(concurrency_key="")
        make_run(schedule=schedule, state="running", attempt=1)
        make_run(schedule=other, state="running", attempt=1)
        (skipped,) = claim(make_node(), schedule).skipped
        assert skipped.reason == "overlap"
        assert len(claim(make_node(), due("globex")).runs) == 1

    def test_without_its_key_a_schedule_still_never_runs_beside_itself(self) -> None:
        schedule = due(concurrency_key="")
        make_run(schedule=schedule, state="running", attempt=1, concurrency_key="invoices-acme")
        assert len(claim(make_node(), schedule).skipped) == 1

    def test_a_schedule_without_a_key_costs_no_statement_more(
        self, django_assert_num_queries: Any
    ) -> None:
        plain, keyed, node = due(concurrency_key=""), due(), make_node()
        with django_assert_num_queries(_STATEMENTS[connection.vendor]):
            claim(node, plain)
        ScopeLock.objects.get_or_create(pk=scope_bucket(keyed.scope()))
        with django_assert_num_queries(_STATEMENTS[connection.vendor] + _MORE[connection.vendor]):
            claim(node, keyed)


# Including the savepoint of the test: begin, statements, end.
_STATEMENTS = {"postgresql": 4, "mysql": 10, "sqlite": 10}
# The lock of the scope, and on the portable path the runs that have the key.
_MORE = {"postgresql": 1, "mysql": 2, "sqlite": 2}


def test_any_mix_of_schedules_keys_and_runs_is_decided_as_the_table_says() -> None:
    dice = random.Random(7)
    node = make_node()
    for _ in range(40):
        _play(dice, node)
        Run.objects.all().delete()
        Schedule.objects.all().delete()


def _play(dice: random.Random, node: Node) -> None:
    schedules = [
        due(
            dice.choice(["a", "b"]),
            concurrency_key=dice.choice(["", KEY, "invoices-a"]),
            overlap=dice.choice(Schedule.Overlap.values),
            max_active=dice.choice([None, None, 1, 2]),
            max_queued=dice.choice([0, 1, 3]),
        )
        for _ in range(4)
    ]
    for _ in range(dice.randrange(7)):
        state, attempt, reason = dice.choice(
            [
                ("running", 1, ""),
                ("claimed", 0, ""),
                ("queued", 0, "overlap"),
                ("queued", 0, ""),
                ("queued", 1, "retry"),
                ("succeeded", 1, ""),
            ]
        )
        make_run(
            schedule=dice.choice(schedules),
            state=state,
            attempt=attempt,
            reason=reason,
            trigger=dice.choice(["timetable", "timetable", "manual"]),
            concurrency_key=dice.choice(["", "invoices-a", "invoices-b"]),
        )
    rows = list(Run.objects.filter(state__in=Run.OPEN_STATES))
    chosen = lifecycle.one_of_each_scope([decision(schedule) for schedule in schedules])
    expected = {
        schedule.pk: fate(schedule, _beside(schedule, rows))
        for schedule in schedules
        if schedule.pk in {each.schedule_id for each in chosen}
    }
    lifecycle.claim(chosen, node.pk)
    states = {"start": "claimed", "queue": "queued", "skip": "skipped"}
    for schedule in schedules:
        if schedule.pk not in expected:
            continue
        run = run_of(schedule)
        assert run.state == states[expected[schedule.pk]]
        if run.state != "claimed":
            assert isinstance(run.details, dict)
            assert run.details["blocked_by"] == _beside(schedule, rows).blocked_by


def _beside(schedule: Schedule, rows: list[Run]) -> OpenRuns:
    """Say which runs count, in other words than the code."""
    key = schedule.scope()
    counted = [
        run
        for run in rows
        if (key and run.concurrency_key == key)
        or (run.schedule_id == schedule.pk and (not key or not run.concurrency_key))
    ]
    active = [run.pk for run in counted if run.state != "queued" or run.attempt]
    waiting = [
        run
        for run in counted
        if (run.state, run.attempt, run.reason, run.trigger)
        == ("queued", 0, "overlap", "timetable")
    ]
    in_the_way = active or [run.pk for run in waiting]
    return OpenRuns(
        active=len(active), blocked_by=min(in_the_way, default=None), waiting=len(waiting)
    )


class TestQueued:
    def test_a_waiting_run_starts_when_the_other_schedules_run_has_ended(self) -> None:
        active = occupy(due(ago=-60))
        schedule, node = due(overlap="queue_one"), make_node()
        claim(node, schedule)
        waiting = run_of(schedule)
        token = {waiting.pk: new_owner_token()}
        assert list(Run.objects.queued_due().startable()) == []
        assert lifecycle.claim_queued(token, node.pk).runs == ()
        Run.objects.filter(pk=active.pk).update(state="succeeded")
        assert list(Run.objects.queued_due().startable()) == [waiting]
        assert len(lifecycle.claim_queued(token, node.pk).runs) == 1

    def test_of_several_in_one_batch_one_is_claimed(self) -> None:
        runs = [occupy(due(ago=-60), "queued") for _ in range(3)]
        other = occupy(due("globex", ago=-60), "queued")
        tokens = {run.pk: new_owner_token() for run in (*runs, other)}
        claimed = lifecycle.claim_queued(tokens, make_node().pk).runs
        assert {run.run_id for run in claimed} == {runs[0].pk, other.pk}

    def test_run_now_is_refused_by_the_run_of_another_schedule_and_names_it(self) -> None:
        blocking = make_schedule(name="Nightly", job="tests.bill", concurrency_key=KEY)
        run = occupy(blocking)
        schedule = due(ago=-60)
        with pytest.raises(ScheduleBusy, match=f"blocked by run {run.pk} of 'Nightly'") as caught:
            lifecycle.queue_manual(schedule, by="siti")
        assert caught.value.blocked_by == run.pk
        queued = lifecycle.queue_manual(schedule, by="siti", behind=True)
        assert (queued.reason, queued.concurrency_key) == ("overlap", "invoices-acme")

    def test_run_now_with_other_arguments_is_another_scope(self) -> None:
        schedule = due(ago=-60)
        occupy(schedule)
        with pytest.raises(ScheduleBusy):
            lifecycle.queue_manual(schedule, by="siti")
        run = operations.run_now(
            schedule, actor="siti", via="cli", arguments={"customer": "globex"}
        )
        assert run.concurrency_key == "invoices-globex"
        assert len(lifecycle.claim_queued({run.pk: new_owner_token()}, make_node().pk).runs) == 1

    def test_run_again_is_refused_while_the_scope_is_busy(self) -> None:
        ended = occupy(due(ago=-60), "failed", attempt=1)
        occupy(make_schedule(name="Nightly", job="tests.bill", concurrency_key=KEY))
        with pytest.raises(ScheduleBusy, match="of 'Nightly'"):
            lifecycle.queue_again(ended.pk)


class TestOneTick:
    def test_two_schedules_of_a_scope_run_one_after_the_other(self) -> None:
        backend = MemoryLockBackend()
        member = Member(backend)
        first, second = due(ago=2), due(ago=1)
        tick = member.tick()
        (run,) = tick.claimed.runs
        assert (run.schedule_id, tick.wait_seconds) == (first.pk, 0)
        assert list(backend.inspect([scope_lock_name("invoices-acme")])) != []
        assert list(backend.inspect([schedule_lock_name(first.pk)])) == []
        # Its instant was there before the run began, so for a moment it is behind it.
        assert member.tick().claimed == lifecycle.Claimed()
        member.finish(run)
        (run,) = member.tick().claimed.runs
        assert run.schedule_id == second.pk

    def test_the_node_of_the_active_run_decides_about_the_others_without_any_slot(self) -> None:
        backend = MemoryLockBackend()
        member, stranger = Member(backend), Member(backend)
        due(ago=2)
        (run,) = member.tick().claimed.runs
        second = due(ago=1)
        assert stranger.tick().stood_back == (second.key,)
        later = timedelta(seconds=TURN_SECONDS + 1)
        holding = member.leases._holdings[run.run_id]
        holding.since = holding.since - later
        (skipped,) = member.tick(capacity=0).claimed.skipped
        assert (skipped.schedule_key, skipped.details) == (second.key, {"blocked_by": run.run_id})

    def test_a_strict_scope_is_decided_beside_its_active_run_only(self) -> None:
        backend = MemoryLockBackend()
        member = Member(backend)
        first = due(ago=2)
        (run,) = member.tick().claimed.runs
        member.dispatcher._find_level = lambda name: _strict(backend, name)
        due(ago=-60, concurrency_key="")
        second = due(ago=1)
        member.leases._holdings[run.run_id].since -= timedelta(seconds=9)
        # Ended, and its lease not given back yet.
        Run.objects.filter(pk=run.run_id).update(state="succeeded")
        assert member.tick().claimed == lifecycle.Claimed()
        member.leases.let_go([run.run_id])
        (run,) = member.tick().claimed.runs
        assert run.schedule_id == second.pk != first.pk

    def test_queued_runs_of_a_scope_go_one_at_a_time(self) -> None:
        for _ in range(2):
            lifecycle.queue_manual(due(ago=-60), by="siti", behind=True)
        member = Member(MemoryLockBackend())
        assert len(member.dispatcher.claim_queued(member.row.pk, 5).runs) == 1
        assert member.dispatcher.claim_queued(member.row.pk, 5).runs == ()


def _strict(backend: MemoryLockBackend, name: str) -> Any:
    from distcron_app.locks import Level

    return Level(name=name, parts=("database",), backend=backend)


class TestForm:
    @pytest.mark.parametrize(
        ("key", "text"),
        [
            ("{customer.name}", "no attributes"),
            ("{custmer}", "no argument of the job. Allowed: customer"),
            ("{token}", "secret"),
        ],
    )
    def test_a_key_that_cannot_work_is_refused_at_save(self, key: str, text: str) -> None:
        schedule = due()
        schedule.concurrency_key = key
        with pytest.raises(ValidationError, match=text) as caught:
            schedule.full_clean()
        assert list(caught.value.message_dict) == ["concurrency_key"]


@pytest.fixture
def together() -> Iterator[Callable[..., list[Any]]]:
    """Runs functions at the same moment, each in a thread with a connection of its own."""

    def run(*functions: Callable[[], Any]) -> list[Any]:
        barrier = threading.Barrier(len(functions))
        results: list[Any] = [None] * len(functions)

        def act(number: int, function: Callable[[], Any]) -> None:
            close_old_connections()
            connection.ensure_connection()
            try:
                barrier.wait(20)
                results[number] = function()
            finally:
                connection.close()

        threads = [
            threading.Thread(target=act, args=each, daemon=True) for each in enumerate(functions)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    yield run


@pytest.mark.databases("postgresql", "mysql")  # SQLite has one writer at a time
@pytest.mark.django_db(transaction=True)
class TestAtTheSameMoment:
    def test_two_schedules_of_a_scope_never_both_start(
        self, together: Callable[..., list[Any]]
    ) -> None:
        nodes = [make_node() for _ in range(4)]
        started = 0
        for _ in range(15):
            schedules = [due(overlap="queue_all") for _ in nodes]
            claims = [
                lambda pair=pair: claim(pair[0], pair[1])
                for pair in zip(nodes, schedules, strict=True)
            ]
            claimed = together(*claims)
            active = Run.objects.filter(state__in=Run.ACTIVE_STATES).count()
            assert active <= 1
            assert sum(len(each.runs) for each in claimed) == active
            started += active
            Run.objects.all().delete()
        assert started > 10

    def test_neither_do_a_claim_a_queued_run_and_run_now(
        self, together: Callable[..., list[Any]]
    ) -> None:
        node, other = make_node(), make_node()
        for _ in range(15):
            schedule = due(overlap="queue_all")
            waiting = occupy(due(ago=-60), "queued", due_at=_past())
            third = due(ago=-60)
            together(
                lambda: claim(node, schedule),  # noqa: B023
                lambda: lifecycle.claim_queued({waiting.pk: new_owner_token()}, other.pk),  # noqa: B023
                lambda: lifecycle.queue_manual(third, by="siti", behind=True),  # noqa: B023
            )
            assert Run.objects.filter(state__in=Run.ACTIVE_STATES).count() <= 1
            assert Run.objects.filter(schedule=third).count() == 1
            Run.objects.all().delete()


def _past() -> datetime:
    return database_now() - timedelta(seconds=1)
