"""One tick: what is read, planned, locked and claimed, with real lock backends."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from distcron_app import dispatch, lifecycle
from distcron_app.clock import Clock
from distcron_app.conf import Config
from distcron_app.dispatch import Dispatcher
from distcron_app.errors import ConfigurationError, LockUnavailable
from distcron_app.instants import database_now
from distcron_app.leases import LeaseBook
from distcron_app.lifecycle import Finished
from distcron_app.locks import Lease, Level, LockBackend, new_owner_token, schedule_lock_name
from distcron_app.locks.memory import MemoryLockBackend
from distcron_app.maintenance import Sweeper
from distcron_app.models import Node, Run, Schedule
from tests.factories import make_node, make_run, make_schedule
from tests.services import wait_for

pytestmark = pytest.mark.django_db

CONFIG = Config(lock_backend="memory", lock_ttl_seconds=15, misfire_grace_seconds=30)


class ManualClock(Clock):
    """A clock whose monotonic time a test moves."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


class Counting(MemoryLockBackend):
    """The memory backend, counting calls, and away when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.is_away = False

    def acquire(self, wanted: Mapping[str, str], ttl_ms: int) -> dict[str, Lease]:
        self.calls.append("acquire")
        if self.is_away:
            raise LockUnavailable("memory", "switched off by the test")
        return super().acquire(wanted, ttl_ms)

    def renew(self, leases: Collection[Lease], ttl_ms: int) -> dict[str, Lease]:
        self.calls.append("renew")
        if self.is_away:
            raise LockUnavailable("memory", "switched off by the test")
        return super().renew(leases, ttl_ms)


class Member:
    """A node without a process: a dispatcher with its own row and leases."""

    def __init__(self, backend: LockBackend) -> None:
        self.clock = ManualClock()
        self.row: Node = make_node()
        self.leases = LeaseBook(15_000, clock=self.clock)
        self.dispatcher = Dispatcher(
            config=CONFIG,
            clock=self.clock,
            find_level=lambda name: Level(name=name, parts=("memory",), backend=backend),
            leases=self.leases,
        )

    def tick(self, capacity: int = 100) -> dispatch.Tick:
        return self.dispatcher.tick(self.row.pk, capacity)

    def finish(self, run: lifecycle.ClaimedRun) -> None:
        if run.state == "claimed":
            lifecycle.start([run], self.row.pk)
        lifecycle.finish(
            [
                Finished(
                    run_id=run.run_id,
                    fencing_token=run.fencing_token,
                    owner_token=run.owner_token,
                    state="succeeded",
                    finished_at=database_now(),
                )
            ]
        )
        self.leases.let_go([run.run_id])


@pytest.fixture
def backend() -> Counting:
    return Counting()


def whole_second(offset: float = 0) -> datetime:
    return database_now().replace(microsecond=0) + timedelta(seconds=offset)


def due(seconds_ago: float = 1, every: int = 60, **values: Any) -> Schedule:
    """Return a schedule every ``every`` seconds with an instant ``seconds_ago`` unclaimed."""
    at = whole_second(-seconds_ago)
    schedule = make_schedule(
        kind="interval", cron="", interval_seconds=every, interval_anchor=at, **values
    )
    Schedule.objects.filter(pk=schedule.pk).update(next_run_at=at)
    schedule.refresh_from_db()
    return schedule


class TestOneTick:
    def test_what_is_due_is_claimed_and_its_next_instant_planned(self, backend: Counting) -> None:
        schedule = due()
        at = schedule.next_run_at
        tick = Member(backend).tick()
        assert [run.schedule_id for run in tick.claimed.runs] == [schedule.pk]
        schedule.refresh_from_db()
        assert at is not None
        assert schedule.next_run_at == at + timedelta(seconds=60)

    def test_nothing_due_costs_one_query_and_no_lock(
        self, backend: Counting, django_assert_num_queries: Any
    ) -> None:
        member = Member(backend)
        make_schedule()
        with django_assert_num_queries(1):
            tick = member.tick()
        assert (tick.claimed.runs, tick.wait_seconds) == ((), 1.0)
        assert backend.calls == []

    def test_the_wait_ends_at_the_next_instant(self, backend: Counting) -> None:
        schedule = due(every=3600)
        soon = database_now() + timedelta(seconds=0.6)
        Schedule.objects.filter(pk=schedule.pk).update(next_run_at=soon)
        assert 0.3 < Member(backend).tick().wait_seconds <= 0.6

    def test_a_hundred_due_schedules_cost_one_lock_call(self, backend: Counting) -> None:
        for _ in range(100):
            due()
        tick = Member(backend).tick(capacity=100)
        assert len(tick.claimed.runs) == 100
        assert backend.calls == ["acquire"]

    def test_no_more_is_claimed_than_can_start(self, backend: Counting) -> None:
        for _ in range(10):
            due()
        assert len(Member(backend).tick(capacity=3).claimed.runs) == 3

    def test_two_nodes_share_what_is_due(self, backend: Counting) -> None:
        schedules = {due().pk for _ in range(10)}
        first, second = Member(backend), Member(backend)
        mine = first.tick(capacity=6).claimed.runs
        theirs = second.tick().claimed.runs
        assert {run.schedule_id for run in mine + theirs} == schedules
        assert len(mine) + len(theirs) == 10


class TestLocks:
    def test_a_loser_at_the_lock_asks_the_database_nothing_more(
        self, backend: Counting, django_assert_num_queries: Any
    ) -> None:
        schedule = due()
        backend.acquire({schedule_lock_name(schedule.pk): new_owner_token()}, 15_000)
        member = Member(backend)
        with django_assert_num_queries(1):  # the read of due schedules
            tick = member.tick()
        assert tick.stood_back == (schedule.key,)
        assert not Run.objects.exists()

    def test_a_loser_does_not_ask_again_at_once(self, backend: Counting) -> None:
        schedule = due()
        backend.acquire({schedule_lock_name(schedule.pk): new_owner_token()}, 15_000)
        member = Member(backend)
        member.tick()
        assert member.tick().stood_back == ()
        assert backend.calls.count("acquire") == 2
        member.clock.ahead = 1.0
        member.tick()
        assert backend.calls.count("acquire") == 3

    def test_the_lease_is_held_while_the_run_lives_and_released_after(
        self, backend: Counting
    ) -> None:
        schedule = due()
        member = Member(backend)
        (run,) = member.tick().claimed.runs
        name = schedule_lock_name(schedule.pk)
        assert backend.inspect([name])[name].owner_token == run.owner_token
        member.finish(run)
        assert backend.inspect([name]) == {}

    def test_a_lock_won_for_a_claim_that_was_lost_is_released(
        self, backend: Counting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        schedule = due()
        member = Member(backend)

        def another_node_was_quicker(*args: Any) -> lifecycle.Claimed:
            return lifecycle.Claimed()

        monkeypatch.setattr(lifecycle, "claim", another_node_was_quicker)
        assert member.tick().claimed.runs == ()
        assert backend.inspect([schedule_lock_name(schedule.pk)]) == {}

    def test_without_the_backend_the_database_decides_alone(self, backend: Counting) -> None:
        due()
        backend.is_away = True
        first, second = Member(backend), Member(backend)
        assert len(first.tick().claimed.runs) == 1
        assert first.dispatcher.away == {"standard": "switched off by the test"}
        assert second.tick().claimed.runs == ()
        assert Run.objects.count() == 1

    def test_a_run_without_a_lease_gets_one_when_the_backend_is_back(
        self, backend: Counting
    ) -> None:
        schedule = due()
        backend.is_away = True
        member = Member(backend)
        (run,) = member.tick().claimed.runs
        backend.is_away = False
        assert member.leases.renew() == {}
        name = schedule_lock_name(schedule.pk)
        assert backend.inspect([name])[name].owner_token == run.owner_token

    def test_a_stuck_lock_delays_a_job_and_never_blocks_it(self, backend: Counting) -> None:
        recent, stuck = due(seconds_ago=10, every=3600), due(seconds_ago=18, every=3600)
        for schedule in (recent, stuck):
            backend.acquire({schedule_lock_name(schedule.pk): new_owner_token()}, 3_600_000)
        tick = Member(backend).tick()
        assert [run.schedule_id for run in tick.claimed.runs] == [stuck.pk]
        assert tick.stood_back == (recent.key,)

    def test_a_wiped_backend_loses_no_run(self, backend: Counting) -> None:
        schedule = due()
        member = Member(backend)
        (run,) = member.tick().claimed.runs
        name = schedule_lock_name(schedule.pk)
        backend.force_release(name)
        assert member.leases.renew() == {}
        assert backend.inspect([name])[name].owner_token == run.owner_token

    def test_a_lease_that_somebody_else_holds_is_lost_and_told_once(
        self, backend: Counting
    ) -> None:
        schedule = due()
        member = Member(backend)
        (run,) = member.tick().claimed.runs
        name = schedule_lock_name(schedule.pk)
        backend.force_release(name)
        backend.acquire({name: new_owner_token()}, 15_000)
        assert set(member.leases.renew()) == {run.run_id}
        assert member.leases.renew() == {}

    def test_a_backend_that_is_away_at_a_renewal_loses_nothing(self, backend: Counting) -> None:
        due()
        member = Member(backend)
        member.tick()
        backend.is_away = True
        assert member.leases.renew() == {}
        backend.is_away = False
        assert member.leases.renew() == {}


class TestOverlap:
    def test_the_holder_decides_about_the_next_occurrence_of_its_schedule(
        self, backend: Counting
    ) -> None:
        schedule = due(every=1, seconds_ago=2)
        member = Member(backend)
        (run,) = member.tick().claimed.runs
        soon = database_now() + timedelta(seconds=0.02)
        Schedule.objects.filter(pk=schedule.pk).update(next_run_at=soon)
        wait_for(lambda: database_now() > soon, timeout=5, what="the instant to be due")
        (skipped,) = member.tick(capacity=0).claimed.skipped
        assert (skipped.reason, skipped.details) == ("overlap", {"blocked_by": run.run_id})

    def test_an_occurrence_that_was_due_before_the_run_began_waits_its_turn(
        self, backend: Counting
    ) -> None:
        due(every=1, seconds_ago=3)
        member = Member(backend)
        ran = []
        for _ in range(3):
            (run,) = member.tick().claimed.runs
            assert member.tick().claimed == lifecycle.Claimed()
            member.finish(run)
            ran.append(run.scheduled_at)
        assert ran[1] - ran[0] == ran[2] - ran[1] == timedelta(seconds=1)
        assert not Run.objects.filter(state="skipped").exists()

    def test_a_long_run_overlaps_what_is_behind_it(self, backend: Counting) -> None:
        schedule = due(every=1, seconds_ago=3)
        member = Member(backend)
        began = database_now()
        (run,) = member.tick().claimed.runs

        def skipped() -> bool:
            return bool(member.tick().claimed.skipped)

        wait_for(skipped, timeout=10, what="the next occurrence to be skipped")
        assert (database_now() - began).total_seconds() >= dispatch.TURN_SECONDS
        row = Run.objects.get(schedule=schedule, state="skipped")
        assert row.details == {"blocked_by": run.run_id}


class TestMisfire:
    def test_after_an_outage_the_newest_runs_and_one_row_stands_for_the_rest(
        self, backend: Counting
    ) -> None:
        schedule = due(every=60, seconds_ago=200)
        first = schedule.next_run_at
        assert first is not None
        tick = Member(backend).tick()
        (run,) = tick.claimed.runs
        assert run.scheduled_at == first + timedelta(seconds=180)
        (skipped,) = tick.claimed.skipped
        assert (skipped.reason, skipped.scheduled_at) == ("coalesced", first)
        assert skipped.details == {
            "first_at": first.isoformat(),
            "last_at": (first + timedelta(seconds=120)).isoformat(),
            "count": 3,
        }
        schedule.refresh_from_db()
        assert schedule.next_run_at == first + timedelta(seconds=240)

    def test_what_is_older_than_the_catch_up_window_is_a_misfire(self, backend: Counting) -> None:
        schedule = due(every=60, seconds_ago=1000)
        tick = Member(backend).tick()
        assert len(tick.claimed.runs) == 1
        rows = Run.objects.filter(schedule=schedule, state="skipped")
        assert {row.reason: row.details["count"] for row in rows} == {
            "misfire": 12,
            "coalesced": 4,
        }

    def test_within_the_grace_a_late_occurrence_just_runs(self, backend: Counting) -> None:
        due(every=3600, seconds_ago=25)
        tick = Member(backend).tick()
        assert (len(tick.claimed.runs), tick.claimed.skipped) == (1, ())


class TestBadRows:
    def test_a_broken_rule_is_marked_and_the_others_run(self, backend: Counting) -> None:
        good = [due() for _ in range(10)]
        broken = [due(), due(), due()]
        changes = [{"timezone": "Mars/Phobos"}, {"kind": "cron", "cron": "0 0 31 2 *"}, {"job": ""}]
        for schedule, change in zip(broken, changes, strict=True):
            Schedule.objects.filter(pk=schedule.pk).update(**change, next_run_at=whole_second(-40))
        tick = Member(backend).tick()
        assert {run.schedule_id for run in tick.claimed.runs} == {row.pk for row in good}
        assert set(tick.invalid) == {schedule.key for schedule in broken}
        for schedule in broken:
            schedule.refresh_from_db()
            assert (schedule.state, schedule.next_run_at) == ("invalid", None)
            assert schedule.state_reason

    def test_a_job_that_this_node_does_not_know_is_left_to_others_for_the_grace(
        self, backend: Counting
    ) -> None:
        schedule = due(seconds_ago=5)
        Schedule.objects.filter(pk=schedule.pk).update(job="billing.new", version=2)
        tick = Member(backend).tick()
        assert (tick.claimed.runs, tick.invalid) == ((), ())
        schedule.refresh_from_db()
        assert schedule.state == "active"

    def test_rows_made_past_the_model_are_planned_or_marked(self) -> None:
        template = {"key": "", "name": "x", "job": "project.demo.heartbeat", "cron": "0 * * * *"}
        good = [Schedule(**template | {"key": f"good-{number}"}) for number in range(10)]
        bad = [
            Schedule(**template | {"key": "never", "cron": "0 0 31 2 *"}),
            Schedule(**template | {"key": "nowhere", "timezone": "Mars/Phobos"}),
            Schedule(**template | {"key": "nothing", "job": ""}),
        ]
        Schedule.objects.bulk_create(good + bad)
        node = make_node()
        swept = Sweeper(config=CONFIG, clock=Clock()).sweep(node.pk, [], 0.0)
        assert set(swept.invalid) == {"never", "nowhere", "nothing"}
        assert Schedule.objects.filter(state="active", next_run_at__isnull=False).count() == 10
        for schedule in Schedule.objects.filter(state="invalid"):
            assert schedule.state_reason

    def test_a_finished_row_at_the_head_does_not_block_what_follows(
        self, backend: Counting
    ) -> None:
        once = make_schedule(kind="once", cron="", run_at=whole_second(3600))
        Schedule.objects.filter(pk=once.pk).update(
            run_at=whole_second(-3), next_run_at=whole_second(-3)
        )
        periodic = [due(), due()]
        member = Member(backend)
        tick = member.tick()
        assert {run.schedule_id for run in tick.claimed.runs} == {
            once.pk,
            *(schedule.pk for schedule in periodic),
        }
        once.refresh_from_db()
        assert once.state == "exhausted"
        Schedule.objects.filter(pk=periodic[0].pk).update(next_run_at=database_now())
        for run in tick.claimed.runs:
            member.finish(run)
        assert len(member.tick().claimed.runs) == 1


class TestQueued:
    def test_a_manual_run_is_claimed_under_the_lock_of_its_schedule(
        self, backend: Counting
    ) -> None:
        schedule = make_schedule()
        lifecycle.queue_manual(schedule, by="operator")
        member = Member(backend)
        (run,) = member.dispatcher.claim_queued(member.row.pk, 5).runs
        name = schedule_lock_name(schedule.pk)
        assert backend.inspect([name])[name].owner_token == run.owner_token

    def test_a_run_whose_earlier_attempt_is_still_here_is_left_to_others(
        self, backend: Counting
    ) -> None:
        taken = make_run(schedule=make_schedule(), state="queued", due_at=whole_second(-2))
        other = make_run(schedule=make_schedule(), state="queued", due_at=whole_second(-1))
        member = Member(backend)
        claim = member.dispatcher.claim_queued
        runs = claim(member.row.pk, 5, still_here={taken.pk}).runs
        assert [run.run_id for run in runs] == [other.pk]
        (run,) = claim(member.row.pk, 5).runs
        assert run.run_id == taken.pk

    def test_runs_behind_a_busy_schedule_do_not_keep_others_waiting(
        self, backend: Counting
    ) -> None:
        busy, free = make_schedule(), make_schedule()
        make_run(schedule=busy, state="running", node=make_node())
        backend.acquire({schedule_lock_name(busy.pk): new_owner_token()}, 15_000)
        for _ in range(3):
            make_run(schedule=busy, state="queued", due_at=whole_second(-2))
        wanted = make_run(schedule=free, state="queued", due_at=whole_second(-1))
        member = Member(backend)
        runs = member.dispatcher.claim_queued(member.row.pk, 2).runs
        assert [run.run_id for run in runs] == [wanted.pk]

    @pytest.mark.parametrize("policy", ["queue_one", "queue_all", "replace"])
    def test_a_due_attempt_goes_before_what_waits_for_its_run(
        self, backend: Counting, policy: str
    ) -> None:
        schedule = make_schedule(overlap=policy)
        between = make_run(
            schedule=schedule, state="queued", attempt=1, reason="retry", due_at=whole_second(-1)
        )
        behind = make_run(
            schedule=schedule, state="queued", reason="overlap", due_at=whole_second(-60)
        )
        member = Member(backend)
        (run,) = member.dispatcher.claim_queued(member.row.pk, 5).runs
        assert run.run_id == between.pk
        member.finish(run)
        (run,) = member.dispatcher.claim_queued(member.row.pk, 5).runs
        assert run.run_id == behind.pk

    def test_what_waits_behind_a_run_between_attempts_does_not_keep_others_waiting(
        self, backend: Counting
    ) -> None:
        busy = make_schedule(overlap="queue_all")
        make_run(schedule=busy, state="queued", attempt=1, due_at=whole_second(3600))
        for _ in range(dispatch.READ_AT_LEAST):
            make_run(schedule=busy, state="queued", reason="overlap", due_at=whole_second(-2))
        wanted = make_run(schedule=make_schedule(), state="queued", due_at=whole_second(-1))
        member = Member(backend)
        runs = member.dispatcher.claim_queued(member.row.pk, 2).runs
        assert [run.run_id for run in runs] == [wanted.pk]

    def test_two_runs_between_attempts_do_not_wait_for_each_other(self, backend: Counting) -> None:
        # As when they were active side by side, and the limit was lowered afterwards.
        schedule = make_schedule(overlap="skip")
        for _ in range(2):
            make_run(schedule=schedule, state="queued", attempt=1, due_at=whole_second(-1))
        member = Member(backend)
        (first,) = member.dispatcher.claim_queued(member.row.pk, 5).runs
        assert member.dispatcher.claim_queued(member.row.pk, 5).runs == ()
        member.finish(first)
        assert len(member.dispatcher.claim_queued(member.row.pk, 5).runs) == 1

    def test_without_capacity_nothing_is_read(
        self, backend: Counting, django_assert_num_queries: Any
    ) -> None:
        member = Member(backend)
        lifecycle.queue_manual(make_schedule(), by="operator")
        with django_assert_num_queries(0):
            assert member.dispatcher.claim_queued(member.row.pk, 0) == lifecycle.Claimed()


class TestUnknownCommit:
    def test_a_claim_whose_answer_was_lost_is_found_by_its_token(
        self, backend: Counting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from django.db import OperationalError

        schedule = due()
        member = Member(backend)
        really = lifecycle.claim

        def commit_and_lose_the_answer(*args: Any) -> lifecycle.Claimed:
            really(*args)
            raise OperationalError("server closed the connection unexpectedly")

        monkeypatch.setattr(lifecycle, "claim", commit_and_lose_the_answer)
        with pytest.raises(OperationalError):
            member.tick()
        (run,) = member.dispatcher.settle(member.row.pk)
        assert run.schedule_id == schedule.pk
        name = schedule_lock_name(schedule.pk)
        assert backend.inspect([name])[name].owner_token == run.owner_token
        assert member.dispatcher.settle(member.row.pk) == []

    def test_a_claim_that_was_not_committed_is_dropped_and_its_lock_released(
        self, backend: Counting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from django.db import OperationalError

        schedule = due()
        member = Member(backend)

        def fail(*args: Any) -> lifecycle.Claimed:
            raise OperationalError("connection refused")

        monkeypatch.setattr(lifecycle, "claim", fail)
        with pytest.raises(OperationalError):
            member.tick()
        assert member.dispatcher.settle(member.row.pk) == []
        assert backend.inspect([schedule_lock_name(schedule.pk)]) == {}


class TestSweep:
    def test_nobody_is_declared_dead_before_the_database_was_up_for_a_lease(self) -> None:
        node, silent = make_node(), make_node(expires_at=whole_second(-60))
        sweeper = Sweeper(config=CONFIG, clock=Clock())
        assert sweeper.sweep(node.pk, [], database_up_seconds=14.0).dead == ()
        assert sweeper.sweep(node.pk, [], database_up_seconds=15.0).dead == (silent.pk,)

    def test_runs_of_a_dead_node_are_recovered_in_the_same_sweep(self) -> None:
        node, silent = make_node(), make_node(expires_at=whole_second(-60))
        run = make_run(state="running", node=silent)
        swept = Sweeper(config=CONFIG, clock=Clock()).sweep(node.pk, [], 60.0)
        assert swept.recovered.lost == (run.pk,)


class Members(Member):
    """A node whose schedules may be at a gate level, a strict one, or one that is not there."""

    def __init__(self, gate: Counting, strict: Counting) -> None:
        super().__init__(gate)
        backends = {"standard": (("redis",), gate), "quorum": (("redlock",), strict)}

        def find(name: str) -> Level:
            if name not in backends:
                raise ConfigurationError("LOCK_LEVELS", f"level {name!r} is unknown.", "")
            parts, backend = backends[name]
            return Level(name=name, parts=parts, backend=backend)

        self.dispatcher = Dispatcher(
            config=CONFIG, clock=self.clock, find_level=find, leases=self.leases
        )


class TestLevels:
    @pytest.fixture
    def strict(self) -> Counting:
        return Counting()

    @pytest.fixture
    def member(self, backend: Counting, strict: Counting) -> Members:
        return Members(backend, strict)

    def at(self, level: str, **values: Any) -> Schedule:
        schedule = due(**values)
        Schedule.objects.filter(pk=schedule.pk).update(
            lock_level=level, next_run_at=schedule.next_run_at
        )
        schedule.refresh_from_db()
        return schedule

    def test_each_level_of_a_batch_is_asked_once(
        self, member: Members, backend: Counting, strict: Counting
    ) -> None:
        schedules = {self.at(level).pk for level in ("standard", "quorum") for _ in range(3)}
        assert {run.schedule_id for run in member.tick().claimed.runs} == schedules
        assert (backend.calls, strict.calls) == (["acquire"], ["acquire"])
        assert len(strict.held()) == len(backend.held()) == 3

    def test_a_strict_level_that_is_away_claims_nothing_and_the_others_go_on(
        self, member: Members, strict: Counting
    ) -> None:
        waiting, other = self.at("quorum"), self.at("standard")
        strict.is_away = True
        tick = member.tick()
        assert [run.schedule_id for run in tick.claimed.runs] == [other.pk]
        assert tick.stood_back == ()
        assert member.dispatcher.away == {"quorum": "switched off by the test"}
        assert Schedule.objects.get(pk=waiting.pk).next_run_at == waiting.next_run_at

    def test_what_waits_for_a_strict_level_does_not_crowd_out_the_others(
        self, member: Members, strict: Counting
    ) -> None:
        for _ in range(dispatch.READ_AT_LEAST + 6):
            self.at("quorum", seconds_ago=5)
        other = self.at("standard")
        strict.is_away, strict.state = True, "open"
        member.dispatcher.away["quorum"] = "known from before"
        (run,) = member.tick(capacity=1).claimed.runs
        assert run.schedule_id == other.pk

    def test_a_strict_level_that_is_back_claims_what_waited(
        self, member: Members, strict: Counting
    ) -> None:
        schedule = self.at("quorum")
        strict.is_away, strict.state = True, "open"
        assert member.tick().claimed.runs == ()
        assert member.tick().claimed.runs == ()
        strict.is_away, strict.state = False, "closed"
        member.clock.ahead = 1.0
        assert [run.schedule_id for run in member.tick().claimed.runs] == [schedule.pk]
        assert member.dispatcher.away == {}

    def test_a_level_that_is_back_with_nothing_due_is_not_shown_as_away(
        self, member: Members, strict: Counting
    ) -> None:
        schedule = self.at("quorum")
        strict.is_away, strict.state = True, "open"
        member.tick()
        member.tick()
        Schedule.objects.filter(pk=schedule.pk).update(state="paused")
        strict.is_away, strict.state = False, "closed"
        member.tick()
        assert member.dispatcher.away == {}

    def test_a_strict_lock_is_never_ignored_however_late(
        self, member: Members, backend: Counting, strict: Counting
    ) -> None:
        gate, guarded = (self.at(level, seconds_ago=25) for level in ("standard", "quorum"))
        for where, schedule in ((backend, gate), (strict, guarded)):
            where.acquire({schedule_lock_name(schedule.pk): new_owner_token()}, 3_600_000)
        assert [run.schedule_id for run in member.tick().claimed.runs] == [gate.pk]

    def test_a_level_that_is_not_there_makes_the_row_invalid_and_stops_no_other(
        self, member: Members
    ) -> None:
        bad, good = self.at("money"), self.at("standard")
        tick = member.tick()
        assert tick.invalid == (bad.key,)
        assert [run.schedule_id for run in tick.claimed.runs] == [good.pk]
        bad.refresh_from_db()
        assert (bad.state, "money" in bad.state_reason) == ("invalid", True)

    def test_a_queued_run_waits_for_its_strict_level(
        self, member: Members, strict: Counting
    ) -> None:
        schedule = self.at("quorum", every=3600)
        Schedule.objects.filter(pk=schedule.pk).update(state="paused")
        make_run(schedule=schedule, state="queued")
        strict.is_away = True
        assert member.dispatcher.claim_queued(member.row.pk, 10).runs == ()
        strict.is_away = False
        (run,) = member.dispatcher.claim_queued(member.row.pk, 10).runs
        name = schedule_lock_name(schedule.pk)
        assert strict.inspect([name])[name].owner_token == run.owner_token

    def test_a_strict_lease_that_was_gone_for_a_moment_is_lost(
        self, member: Members, strict: Counting
    ) -> None:
        schedule = self.at("quorum")
        (run,) = member.tick().claimed.runs
        name = schedule_lock_name(schedule.pk)
        strict.force_release(name)
        assert member.leases.renew() == {
            run.run_id: f"lock '{name}' is gone at level 'quorum'",
        }
        assert strict.inspect([name]) == {}

    def test_a_strict_lease_is_lost_before_it_ends_unrenewed_and_a_gate_is_not(
        self, member: Members, backend: Counting, strict: Counting
    ) -> None:
        self.at("standard")
        guarded = self.at("quorum")
        runs = {run.schedule_id: run.run_id for run in member.tick().claimed.runs}
        strict.is_away = backend.is_away = True
        member.clock.ahead = 4.0
        assert member.leases.renew() == {}
        member.clock.ahead = 10.5
        assert set(member.leases.renew()) == {runs[guarded.pk]}
        assert member.leases.renew() == {}

    def test_without_its_strict_lock_a_node_decides_only_what_overlaps(
        self, member: Members, strict: Counting
    ) -> None:
        schedule = self.at("quorum", every=1, seconds_ago=2)
        (run,) = member.tick().claimed.runs
        lifecycle.start([run], member.row.pk)
        # Another node took this one for dead; the job still runs here, and holds the lock.
        Run.objects.filter(pk=run.run_id).update(state="lost")
        soon = database_now() + timedelta(seconds=0.02)
        Schedule.objects.filter(pk=schedule.pk).update(next_run_at=soon)
        wait_for(lambda: database_now() > soon, timeout=5, what="the instant to be due")
        member.clock.ahead = 1.0
        assert member.tick().claimed == lifecycle.Claimed()
        assert Schedule.objects.get(pk=schedule.pk).next_run_at == soon
        Run.objects.filter(pk=run.run_id).update(state="running")
        (skipped,) = member.tick().claimed.skipped
        assert skipped.reason == "overlap"

    def test_a_strict_lease_whose_renewals_hang_is_lost_before_it_ends(
        self, member: Members, strict: Counting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        guarded = self.at("quorum")
        (run,) = member.tick().claimed.runs

        def hang(leases: Collection[Lease], ttl_ms: int) -> dict[str, Lease]:
            member.clock.ahead += 2.0
            raise LockUnavailable("memory", "no answer in 2 s")

        monkeypatch.setattr(strict, "renew", hang)
        # Asked at 6.5, known at 8.5; the next try would have failed at 15.5, the end is at 15.
        member.clock.ahead = 6.5
        assert set(member.leases.renew()) == {run.run_id}
        assert run.schedule_id == guarded.pk


class TestLateOnes:
    def late(self, **values: Any) -> Schedule:
        """Return a minutely schedule whose last five instants were missed, 90 s late and more."""
        return due(seconds_ago=330, every=60, **values)

    def rows(self, schedule: Schedule) -> list[tuple[int, str, str]]:
        """Return (minutes after the first instant, state, reason) of each run."""
        first = schedule.next_run_at
        assert first is not None
        return [
            (round((run.scheduled_at - first).total_seconds() / 60), run.state, run.reason)
            for run in Run.objects.filter(schedule=schedule).order_by("scheduled_at")
            if run.scheduled_at is not None
        ]

    def test_run_latest_folds_the_older_ones_into_the_newest(self, backend: Counting) -> None:
        schedule = self.late(catchup_window_seconds=3600)
        Member(backend).tick()
        assert self.rows(schedule) == [(0, "skipped", "coalesced"), (5, "claimed", "")]

    def test_run_all_claims_the_oldest_and_queues_the_others(self, backend: Counting) -> None:
        schedule = self.late(misfire="run_all", catchup_window_seconds=3600)
        Member(backend).tick()
        assert self.rows(schedule) == [
            (0, "claimed", ""),
            *((minute, "queued", "catch_up") for minute in (1, 2, 3, 4, 5)),
        ]
        stored = Schedule.objects.get(pk=schedule.pk)
        assert (stored.runs_planned, stored.next_run_at) == (
            6,
            schedule.next_run_at + timedelta(minutes=6),  # type: ignore[operator]
        )

    def test_run_all_runs_one_after_the_other(self, backend: Counting) -> None:
        self.late(misfire="run_all", catchup_window_seconds=3600)
        member = Member(backend)
        (run,) = member.tick().claimed.runs
        order = [run.scheduled_at]
        assert member.dispatcher.claim_queued(member.row.pk, 10).runs == ()
        for _ in range(5):
            member.finish(run)
            (run,) = member.dispatcher.claim_queued(member.row.pk, 10).runs
            order.append(run.scheduled_at)
        assert order == sorted(order)
        assert len(set(order)) == 6

    def test_run_all_is_paced(self, backend: Counting) -> None:
        self.late(misfire="run_all", catchup_window_seconds=3600, catchup_per_minute=4)
        Member(backend).tick()
        dues = [run.due_at for run in Run.objects.filter(state="queued").order_by("scheduled_at")]
        assert [(later - earlier).total_seconds() for earlier, later in pairwise(dues)] == [
            15.0
        ] * 4

    def test_skip_leaves_one_row_for_the_span(self, backend: Counting) -> None:
        schedule = self.late(misfire="skip", misfire_grace_seconds=10)
        Member(backend).tick()
        assert self.rows(schedule) == [(0, "skipped", "misfire")]
        (row,) = Run.objects.all()
        assert isinstance(row.details, dict)
        assert row.details["count"] == 6

    def test_the_schedule_s_own_grace_counts(self, backend: Counting) -> None:
        patient = due(seconds_ago=45, every=3600, misfire="skip", misfire_grace_seconds=60)
        strict = due(seconds_ago=45, every=3600, misfire="skip")
        Member(backend).tick()
        assert [self.rows(each)[0][1:] for each in (patient, strict)] == [
            ("claimed", ""),
            ("skipped", "misfire"),
        ]

    def test_what_may_not_start_so_late_is_skipped_as_expired(self, backend: Counting) -> None:
        schedule = due(seconds_ago=25, every=3600, start_deadline_seconds=10)
        Member(backend).tick()
        assert self.rows(schedule) == [(0, "skipped", "expired")]

    def test_a_queued_run_expires_when_its_time_to_start_is_over(self) -> None:
        schedule = make_schedule(start_deadline_seconds=10)
        now = database_now()
        old, young, begun = (
            make_run(
                schedule=schedule,
                state="queued",
                reason="overlap",
                scheduled_at=now - timedelta(seconds=seconds),
                due_at=now - timedelta(seconds=seconds),
                attempt=attempt,
            )
            for seconds, attempt in ((11, 0), (3, 0), (60, 1))
        )
        unlimited = make_run(state="queued", due_at=now - timedelta(days=1))
        assert lifecycle.expire() == 1
        states = {run.pk: run.state for run in Run.objects.all()}
        assert states == {
            old.pk: "skipped",
            young.pk: "queued",
            begun.pk: "queued",
            unlimited.pk: "queued",
        }
        assert Run.objects.get(pk=old.pk).reason == "expired"
