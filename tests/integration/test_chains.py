"""Chains: what the end of a run starts, once, in the transaction that ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from distcron_app import ParentRun, lifecycle, maintenance
from distcron_app.errors import ChainCycle
from distcron_app.instants import database_now
from distcron_app.lifecycle import ClaimedRun, Decision, Finished, Skip
from distcron_app.lifecycle.chains import MAX_CHAIN_DEPTH
from distcron_app.locks import new_owner_token
from distcron_app.models import (
    ChainLink,
    ChainStart,
    Node,
    Run,
    RunQuerySet,
    Schedule,
    find_path,
)
from tests.factories import make_node, make_run, make_schedule

pytestmark = pytest.mark.django_db


def due(**values: Any) -> Schedule:
    """Return a schedule whose next instant is two seconds ago."""
    at = database_now().replace(microsecond=0) - timedelta(seconds=2)
    schedule = make_schedule(
        kind="interval", cron="", interval_seconds=60, interval_anchor=at, **values
    )
    Schedule.objects.filter(pk=schedule.pk).update(next_run_at=at)
    schedule.refresh_from_db()
    return schedule


def follower(**values: Any) -> Schedule:
    return make_schedule(kind="manual", cron="", **values)


def link(schedule: Schedule, event: str, then: Schedule) -> ChainLink:
    return ChainLink.objects.create(schedule=schedule, event=event, follower=then)


def decide(schedule: Schedule, **values: Any) -> Decision:
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
    return Decision(**defaults | values)


def begin(schedule: Schedule, node: Node) -> ClaimedRun:
    (run,) = lifecycle.claim([decide(schedule)], node.pk).runs
    if run.state == "claimed":
        assert lifecycle.start([run], node.pk) == {run.run_id}
    return run


def ending(run: ClaimedRun, state: str = "succeeded", **values: Any) -> Finished:
    return Finished(
        run_id=run.run_id,
        fencing_token=run.fencing_token,
        owner_token=run.owner_token,
        state=state,
        finished_at=database_now(),
        **values,
    )


def claim_queued(run: Run, node: Node) -> lifecycle.Claimed:
    return lifecycle.claim_queued({run.pk: new_owner_token()}, node.pk)


def children(schedule: Schedule) -> RunQuerySet:
    return Run.objects.filter(schedule=schedule).order_by("pk")


def three(parent: Schedule) -> dict[str, Schedule]:
    """Return one follower for each event of ``parent``."""
    found = {event: follower() for event in ChainLink.Event.values}
    for event, schedule in found.items():
        link(parent, event, schedule)
    return found


def started(followers: dict[str, Schedule]) -> dict[str, int]:
    counts = {event: children(schedule).count() for event, schedule in followers.items()}
    return {event: count for event, count in counts.items() if count}


class TestWhatFires:
    """Each way in which a run ends, and what it starts."""

    @pytest.mark.parametrize(
        ("state", "events"),
        [
            ("succeeded", {"succeeded": 1}),
            ("failed", {"failed": 1}),
            ("cancelled", {}),
        ],
    )
    def test_a_report(self, state: str, events: dict[str, int]) -> None:
        node, parent = make_node(), due()
        followers = three(parent)
        lifecycle.finish([ending(begin(parent, node), state)])
        assert started(followers) == events

    def test_the_child_knows_its_parent(self) -> None:
        node, parent = make_node(), due()
        then = follower(delivery="at_least_once", arguments={})
        link(parent, "succeeded", then)
        run = begin(parent, node)
        lifecycle.finish([ending(run, result={"rows": 3})])
        (child,) = children(then)
        assert (child.state, child.reason, child.trigger) == ("queued", "", "chain")
        assert (child.parent_id, child.scheduled_at) == (run.run_id, None)
        (owned,) = claim_queued(child, node).runs
        assert owned.parent == ParentRun(
            run_id=run.run_id,
            attempt=1,
            schedule_key=parent.key,
            state="succeeded",
            reason="",
            scheduled_at=run.scheduled_at,
            result={"rows": 3},
        )
        assert owned.scheduled_at == run.scheduled_at
        (again,) = lifecycle.read_back([owned.owner_token], node.pk)
        assert again == owned

    def test_the_context_is_of_the_end_and_not_of_later(self) -> None:
        node, parent = make_node(), due()
        then = follower()
        link(parent, "failed", then)
        run = begin(parent, node)
        die(node)
        lifecycle.recover()
        lifecycle.finish([ending(run, result=1)])
        (owned,) = claim_queued(children(then).get(), make_node()).runs
        assert owned.parent is not None
        assert (owned.parent.state, owned.parent.reason) == ("lost", "node_died")
        assert owned.parent.result is None

    def test_nothing_before_the_last_attempt(self) -> None:
        node, parent = make_node(), due(max_attempts=2, backoff_delays="0")
        followers = three(parent)
        failure = lifecycle.Failure(exceptions=("builtins.ValueError",))
        lifecycle.finish([ending(begin(parent, node), "failed", failure=failure)])
        assert started(followers) == {}
        (run,) = claim_queued(children(parent).get(), node).runs
        lifecycle.start([run], node.pk)
        lifecycle.finish([ending(run, "failed", failure=failure)])
        assert started(followers) == {"failed": 1}

    def test_a_recovered_run_has_not_ended(self) -> None:
        node, parent = make_node(), due(delivery="at_least_once")
        followers = three(parent)
        begin(parent, node)
        die(node)
        lifecycle.recover()
        assert started(followers) == {}

    def test_a_lost_run_has_failed_and_its_late_success_succeeds_too(self) -> None:
        node, parent = make_node(), due()
        followers = three(parent)
        run = begin(parent, node)
        die(node)
        assert lifecycle.recover().lost == (run.run_id,)
        assert started(followers) == {"failed": 1}
        lifecycle.finish([ending(run)])
        assert started(followers) == {"failed": 1, "succeeded": 1}

    def test_a_late_failure_of_a_lost_run_starts_nothing_again(self) -> None:
        node, parent = make_node(), due()
        followers = three(parent)
        run = begin(parent, node)
        die(node)
        lifecycle.recover()
        lifecycle.finish([ending(run, "failed")])
        assert started(followers) == {"failed": 1}

    def test_one_follower_of_both_events_starts_once_for_a_late_report(self) -> None:
        node, parent, then = make_node(), due(), follower(overlap="allow")
        link(parent, "failed", then)
        link(parent, "succeeded", then)
        run = begin(parent, node)
        die(node)
        lifecycle.recover()
        lifecycle.finish([ending(run)])
        assert children(then).count() == 1

    def test_a_dead_worker(self) -> None:
        node, parent = make_node(), due()
        followers = three(parent)
        run = begin(parent, node)
        lifecycle.recover_owned([run], reason="worker_died", unknown="failed", detail="")
        assert started(followers) == {"failed": 1}

    def test_a_run_that_stopped_when_it_was_told_to(self) -> None:
        node, parent = make_node(), due()
        followers = three(parent)
        run = begin(parent, node)
        lifecycle.recover_owned([run], reason="shutdown", unknown="cancelled", detail="")
        assert started(followers) == {}

    def test_a_released_lock(self) -> None:
        node, parent = make_node(), due()
        followers = three(parent)
        begin(parent, node)
        lifecycle.release(parent.pk)
        assert started(followers) == {"failed": 1}

    def test_a_stray(self) -> None:
        node, parent = make_node(), due()
        followers = three(parent)
        begin(parent, node)
        lifecycle.settle_strays(node.pk, (), timedelta(0))
        assert started(followers) == {"failed": 1}

    def test_a_request_to_cancel(self) -> None:
        parent = due()
        followers = three(parent)
        run = make_run(schedule=parent, state="queued")
        lifecycle.request_cancel([run.pk], cause="by a person")
        assert started(followers) == {}

    def test_an_overlap(self) -> None:
        node, parent = make_node(), due()
        followers = three(parent)
        make_run(schedule=parent, state="running", attempt=1)
        lifecycle.claim([decide(parent)], node.pk)
        assert started(followers) == {"skipped": 1}
        (child,) = children(followers["skipped"])
        start = ChainStart.objects.get(run=child)
        assert (start.state, start.reason) == ("skipped", "overlap")
        assert start.scheduled_at == parent.next_run_at

    @pytest.mark.parametrize("reason", ["misfire", "coalesced", "calendar", "expired"])
    def test_a_span_fires_once(self, reason: str) -> None:
        node, parent = make_node(), due()
        followers = three(parent)
        assert parent.next_run_at is not None
        skip = Skip(scheduled_at=parent.next_run_at, reason=reason, details={"count": 1000})
        lifecycle.claim([decide(parent, run_at=None, skips=(skip,))], node.pk)
        assert started(followers) == {"skipped": 1}

    def test_what_a_newer_occurrence_replaces(self) -> None:
        node, parent = make_node(), due(overlap="replace")
        followers = three(parent)
        make_run(schedule=parent, state="running", attempt=1)
        waiting = make_run(schedule=parent, state="queued", reason="overlap")
        lifecycle.claim([decide(parent)], node.pk)
        assert started(followers) == {"skipped": 1}
        assert children(followers["skipped"]).get().parent_id == waiting.pk

    def test_a_spread_occurrence_that_meets_an_active_run(self) -> None:
        node, parent = make_node(), due()
        followers = three(parent)
        make_run(schedule=parent, state="running", attempt=1)
        spread = held_back(parent)
        assert [run.run_id for run in claim_queued(spread, node).skipped] == [spread.pk]
        assert started(followers) == {"skipped": 1}

    def test_a_spread_occurrence_that_is_replaced_for(self) -> None:
        node, parent = make_node(), due(overlap="replace")
        followers = three(parent)
        make_run(schedule=parent, state="running", attempt=1)
        make_run(schedule=parent, state="queued", reason="overlap")
        claim_queued(held_back(parent), node)
        assert started(followers) == {"skipped": 1}

    def test_the_end_of_the_time_to_start(self) -> None:
        parent = due(start_deadline_seconds=1)
        followers = three(parent)
        long_ago = database_now() - timedelta(minutes=1)
        make_run(schedule=parent, state="queued", scheduled_at=long_ago, due_at=long_ago)
        assert lifecycle.expire() == 1
        assert started(followers) == {"skipped": 1}

    def test_a_pause_fires_nothing(self) -> None:
        parent = due()
        followers = three(parent)
        now = database_now()
        held = held_back(parent)
        assert lifecycle.skip_paused(parent, now, now + timedelta(hours=1)) is not None
        Schedule.objects.filter(pk=parent.pk).update(state="paused")
        claim_queued(held, make_node())
        assert started(followers) == {}

    def test_a_run_by_hand_fires_as_well(self) -> None:
        node, parent = make_node(), due()
        followers = three(parent)
        (run,) = claim_queued(lifecycle.queue_manual(parent, by="siti"), node).runs
        lifecycle.start([run], node.pk)
        lifecycle.finish([ending(run)])
        assert started(followers) == {"succeeded": 1}


def die(node: Node) -> None:
    Node.objects.filter(pk=node.pk).update(state="dead")


def held_back(schedule: Schedule) -> Run:
    at = schedule.next_run_at
    assert at is not None
    return make_run(
        schedule=schedule, state="queued", scheduled_at=at, due_at=at + timedelta(seconds=1)
    )


class TestOnce:
    """Repeated reports, crashes and second nodes."""

    def test_a_repeated_report(self) -> None:
        node, parent = make_node(), due()
        followers = three(parent)
        report = ending(begin(parent, node))
        lifecycle.finish([report])
        assert lifecycle.finish([report]).rejected
        assert started(followers) == {"succeeded": 1}

    def test_a_crash_before_the_commit_leaves_neither(self) -> None:
        node, parent = make_node(), due()
        followers = three(parent)
        report = ending(begin(parent, node))
        with pytest.raises(RuntimeError), transaction.atomic():
            lifecycle.finish([report])
            raise RuntimeError
        assert Run.objects.get(pk=report.run_id).state == "running"
        assert started(followers) == {}
        lifecycle.finish([report])
        assert started(followers) == {"succeeded": 1}

    def test_the_database_refuses_a_second_start(self) -> None:
        node, parent, then = make_node(), due(), follower()
        link(parent, "succeeded", then)
        run = begin(parent, node)
        lifecycle.finish([ending(run)])
        row = ChainStart.objects.get(parent=run.run_id)
        row.pk = make_run(schedule=then).pk
        with pytest.raises(IntegrityError), transaction.atomic():
            row.save(force_insert=True)

    def test_run_again_ends_again(self) -> None:
        node, parent = make_node(), due()
        followers = three(parent)
        run = begin(parent, node)
        lifecycle.finish([ending(run, "failed")])
        for state, events in (
            ("failed", {"failed": 2}),
            ("succeeded", {"failed": 2, "succeeded": 1}),
        ):
            for child in Run.objects.filter(state="queued"):
                lifecycle.request_cancel([child.pk], cause="by a test")
            queued = lifecycle.queue_again(run.run_id)
            assert queued is not None
            (again,) = claim_queued(queued, node).runs
            lifecycle.start([again], node.pk)
            lifecycle.finish([ending(again, state)])
            assert started(followers) == events

    @pytest.mark.django_db(transaction=True)
    def test_two_nodes_that_settle_one_run_start_one_child(self) -> None:
        node, parent = make_node(), due()
        followers = three(parent)
        report = ending(begin(parent, node), "failed")
        die(node)
        at_once([lifecycle.recover, lambda: lifecycle.finish([report])])
        assert started(followers) == {"failed": 1}

    @pytest.mark.django_db(transaction=True)
    def test_two_parents_that_end_at_once_meet_the_overlap_policy(self) -> None:
        node, then = make_node(), follower()
        parents = [due(), due()]
        for parent in parents:
            link(parent, "succeeded", then)
        reports = [ending(begin(parent, node)) for parent in parents]
        at_once([lambda report=report: lifecycle.finish([report]) for report in reports])  # type: ignore[misc]
        assert sorted(run.state for run in children(then)) == ["queued", "skipped"]


def at_once(actions: list[Callable[[], Any]]) -> None:
    """Run each action in a thread of its own, from one moment on; fail as the first that does."""
    start = threading.Barrier(len(actions))
    errors: list[BaseException] = []

    def act(action: Callable[[], Any]) -> None:
        try:
            start.wait(10)
            action()
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=act, args=[action]) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []


def occupy(schedule: Schedule, kind: str) -> Run:
    if kind == "running":
        return make_run(schedule=schedule, state="running", attempt=1)
    reason = "overlap" if kind == "waiting" else ""
    return make_run(schedule=schedule, state="queued", trigger="chain", reason=reason)


# policy, limit, open runs of the follower -> state and reason of the new one.
CELLS = [
    ("skip", None, [], "queued", ""),
    ("skip", None, ["running"], "skipped", "overlap"),
    ("skip", None, ["queued"], "skipped", "overlap"),
    ("skip", 2, ["running"], "queued", ""),
    ("queue_one", None, [], "queued", ""),
    ("queue_one", None, ["running"], "queued", "overlap"),
    ("queue_one", None, ["running", "waiting"], "skipped", "overlap"),
    ("queue_all", None, ["running", "waiting"], "queued", "overlap"),
    ("queue_all", None, ["running", "waiting", "waiting", "waiting"], "skipped", "overlap"),
    ("replace", None, ["running"], "queued", "overlap"),
    ("replace", None, ["running", "waiting"], "queued", "overlap"),
    ("allow", None, ["running", "queued"], "queued", ""),
    ("allow", 1, ["running"], "skipped", "overlap"),
]


class TestTheFollower:
    """What state the schedule that is to be started is in."""

    @pytest.mark.parametrize(("policy", "most", "beside", "state", "reason"), CELLS)
    def test_each_cell_of_the_overlap_table(
        self, policy: str, most: int | None, beside: list[str], state: str, reason: str
    ) -> None:
        node, parent = make_node(), due()
        then = follower(overlap=policy, max_active=most, max_queued=3)
        link(parent, "succeeded", then)
        before = [occupy(then, kind) for kind in beside]
        lifecycle.finish([ending(begin(parent, node))])
        child = children(then).last()
        assert child is not None
        assert (child.state, child.reason, child.trigger) == (state, reason, "chain")
        if reason:
            assert isinstance(child.details, dict)
            assert child.details["blocked_by"] == before[0].pk
        if policy == "replace":
            active = children(then).first()
            assert active is not None
            assert active.cancel_requested_at is not None
            waited = children(then).filter(state="skipped")
            assert [run.details["replaced"] for run in waited if run.details] == [True] * (
                len(beside) - 1
            )

    def test_a_newer_child_replaces_one_that_no_node_has_claimed(self) -> None:
        node, then = make_node(), follower(overlap="replace")
        for _ in range(2):
            parent = due()
            link(parent, "succeeded", then)
            lifecycle.finish([ending(begin(parent, node))])
        older, newer = children(then)
        assert (older.state, older.details) == ("skipped", {"blocked_by": None, "replaced": True})
        assert [run.run_id for run in claim_queued(newer, node).runs] == [newer.pk]

    def test_several_ends_in_one_report_are_decided_one_after_the_other(self) -> None:
        node, then = make_node(), follower(overlap="queue_one")
        reports = []
        for _ in range(3):
            parent = due()
            link(parent, "succeeded", then)
            reports.append(ending(begin(parent, node)))
        lifecycle.finish(reports)
        assert [(run.state, run.reason) for run in children(then)] == [
            ("queued", ""),
            ("queued", "overlap"),
            ("skipped", "overlap"),
        ]

    def test_several_ends_in_one_report_replace_each_other(self) -> None:
        node, then = make_node(), follower(overlap="replace")
        reports = []
        for _ in range(2):
            parent = due()
            link(parent, "succeeded", then)
            reports.append(ending(begin(parent, node)))
        lifecycle.finish(reports)
        assert [run.state for run in children(then)] == ["skipped", "queued"]

    def test_a_child_that_waits_takes_a_place_in_the_queue(self) -> None:
        node, parent, then = make_node(), due(), due(overlap="queue_one")
        link(parent, "succeeded", then)
        make_run(schedule=then, state="running", attempt=1)
        lifecycle.finish([ending(begin(parent, node))])
        lifecycle.claim([decide(then)], node.pk)
        newest = children(then).last()
        assert newest is not None
        assert (newest.state, newest.trigger) == ("skipped", "timetable")

    def test_a_newer_occurrence_replaces_a_child_that_waits(self) -> None:
        node, parent, then = make_node(), due(), due(overlap="replace")
        link(parent, "succeeded", then)
        make_run(schedule=then, state="running", attempt=1)
        lifecycle.finish([ending(begin(parent, node))])
        lifecycle.claim([decide(then)], node.pk)
        assert [run.state for run in children(then)] == ["running", "skipped", "queued"]

    @pytest.mark.parametrize(
        ("state", "reason"), [("paused", "paused"), ("invalid", "invalid"), ("exhausted", "")]
    )
    def test_one_that_is_not_active(self, state: str, reason: str) -> None:
        node, parent, then = make_node(), due(), follower()
        link(parent, "succeeded", then)
        Schedule.objects.filter(pk=then.pk).update(state=state)
        lifecycle.finish([ending(begin(parent, node))])
        (child,) = children(then)
        assert (child.state, child.reason) == ("skipped" if reason else "queued", reason)

    def test_a_pause_before_the_claim_skips_it(self) -> None:
        node, parent, then = make_node(), due(), follower()
        last = follower()
        link(parent, "succeeded", then)
        link(then, "skipped", last)
        lifecycle.finish([ending(begin(parent, node))])
        Schedule.objects.filter(pk=then.pk).update(state="paused")
        (skipped,) = claim_queued(children(then).get(), node).skipped
        assert skipped.reason == "paused"
        assert not children(last).exists()

    def test_a_pause_keeps_no_person_from_running_it_again(self) -> None:
        node, parent, then = make_node(), due(), follower()
        link(parent, "succeeded", then)
        lifecycle.finish([ending(begin(parent, node))])
        child = children(then).get()
        lifecycle.request_cancel([child.pk], cause="by a person")
        Schedule.objects.filter(pk=then.pk).update(state="paused")
        queued = lifecycle.queue_again(child.pk)
        assert queued is not None
        (owned,) = claim_queued(queued, node).runs
        assert owned.parent is not None

    def test_one_that_is_deleted_is_followed_by_nothing(self) -> None:
        node, parent, then = make_node(), due(), follower()
        link(parent, "succeeded", then)
        run = begin(parent, node)
        then.delete()
        lifecycle.finish([ending(run)])
        assert not ChainStart.objects.exists()

    def test_a_skipped_child_starts_what_follows_a_skip(self) -> None:
        node, parent, busy, last = make_node(), due(), follower(), follower()
        link(parent, "succeeded", busy)
        link(busy, "skipped", last)
        make_run(schedule=busy, state="running", attempt=1)
        run = begin(parent, node)
        lifecycle.finish([ending(run)])
        child = children(last).get()
        start = ChainStart.objects.get(run=child)
        assert (start.parent_key, start.state, start.depth) == (busy.key, "skipped", 2)
        assert start.scheduled_at == run.scheduled_at

    def test_failures_of_children_pause_a_schedule_that_wants_it(self) -> None:
        then = follower(auto_pause_after=2)
        for _ in range(2):
            make_run(schedule=then, state="failed", trigger="chain", finished_at=database_now())
        assert lifecycle.failed_in_a_row(then, 2) is not None

    def test_pruning_takes_what_a_pruned_child_was_started_by(self) -> None:
        node, parent, then = make_node(), due(), follower()
        link(parent, "succeeded", then)
        lifecycle.finish([ending(begin(parent, node))])
        long_ago = database_now() - timedelta(days=3000)
        children(then).update(state="succeeded", finished_at=long_ago)
        assert lifecycle.prune().count == 1
        assert not ChainStart.objects.exists()


class TestCycles:
    """A chain that comes back to where it began."""

    def test_a_schedule_does_not_follow_itself(self) -> None:
        schedule = follower(key="a")
        with pytest.raises(ChainCycle, match="a → a"):
            link(schedule, "failed", schedule)

    def test_the_way_is_named(self) -> None:
        a, b, c = (follower(key=key) for key in "abc")
        link(b, "succeeded", c)
        link(c, "skipped", a)
        with pytest.raises(ChainCycle) as caught:
            link(a, "failed", b)
        assert caught.value.keys == ("a", "b", "c", "a")
        assert str(caught.value) == (
            "This closes a cycle: a → b → c → a. Choose another schedule, or remove another link."
        )
        with pytest.raises(ValidationError, match="a → b → c → a"):
            ChainLink(schedule=a, event="failed", follower=b).full_clean()

    def test_a_diamond_is_no_cycle(self) -> None:
        a, b, c, d = (follower() for _ in range(4))
        for source, target in ((a, b), (a, c), (b, d), (c, d)):
            link(source, "succeeded", target)

    def test_a_link_that_is_changed_is_judged_without_itself(self) -> None:
        a, b = follower(key="a"), follower(key="b")
        changed = link(a, "succeeded", b)
        changed.schedule, changed.follower = b, a
        changed.save()
        with pytest.raises(ChainCycle):
            link(a, "succeeded", b)

    @pytest.mark.django_db(transaction=True)
    def test_two_people_who_save_halves_at_once(self) -> None:
        a, b = follower(), follower()
        outcomes: list[str] = []

        def add(source: Schedule, target: Schedule) -> None:
            try:
                link(source, "succeeded", target)
            except ChainCycle:
                outcomes.append("refused")
            else:
                outcomes.append("saved")

        at_once([lambda: add(a, b), lambda: add(b, a)])
        assert sorted(outcomes) == ["refused", "saved"]
        assert ChainLink.objects.count() == 1

    def test_a_cycle_written_past_the_model_ends(self) -> None:
        node, first = make_node(), due(overlap="allow")
        second = follower(overlap="allow")
        ChainLink.objects.bulk_create(
            ChainLink(schedule=source, event="succeeded", follower=target)
            for source, target in ((first, second), (second, first))
        )
        run = begin(first, node)
        for _ in range(MAX_CHAIN_DEPTH):
            lifecycle.finish([ending(run)])
            child = Run.objects.filter(state="queued").get()
            (run,) = claim_queued(child, node).runs
            lifecycle.start([run], node.pk)
        lifecycle.finish([ending(run)])
        assert not Run.objects.open().exists()
        assert Run.objects.filter(state="skipped", reason="chain_depth").count() == 1

    def test_a_cycle_of_skips_written_past_the_model_ends_at_once(self) -> None:
        node, first, second = make_node(), due(), follower()
        ChainLink.objects.bulk_create(
            ChainLink(schedule=source, event="skipped", follower=target)
            for source, target in ((first, second), (second, first))
        )
        for schedule in (first, second):
            make_run(schedule=schedule, state="running", attempt=1)
        lifecycle.claim([decide(first)], node.pk)
        skipped = Run.objects.filter(state="skipped")
        assert skipped.filter(reason="chain_depth").count() == 1
        assert skipped.count() == MAX_CHAIN_DEPTH + 2

    def test_paths(self) -> None:
        links = [(1, 2), (2, 3), (3, 4), (1, 3)]
        assert find_path(links, 1, 4) == [1, 3, 4]
        assert find_path(links, 4, 1) == []
        assert find_path(links, 2, 2) == [2]


class TestCost:
    """A batch without links costs no statement more, whatever the rest has."""

    @pytest.fixture
    def linked(self) -> Schedule:
        """Return a schedule with followers, which takes no part."""
        schedule = due()
        three(schedule)
        return schedule

    def statements(self, action: Callable[[], Any]) -> list[str]:
        with CaptureQueriesContext(connection) as queries:
            action()
        return [each["sql"] for each in queries]

    @pytest.mark.usefixtures("linked")
    def test_a_finish(self) -> None:
        node = make_node()
        reports = [ending(begin(due(), node)) for _ in range(3)]
        found = self.statements(lambda: lifecycle.finish(reports))
        # As before there were links: savepoint, lock, read and write in one or three, release.
        assert len(found) == (3 if connection.vendor == "postgresql" else 5)

    @pytest.mark.usefixtures("linked")
    def test_a_claim_with_overlaps(self) -> None:
        node = make_node()
        schedules = [due() for _ in range(3)]
        make_run(schedule=schedules[0], state="running", attempt=1)
        decisions = [decide(schedule) for schedule in schedules]
        found = self.statements(lambda: lifecycle.claim(decisions, node.pk))
        assert len(found) == (4 if connection.vendor == "postgresql" else 10)

    def test_a_batch_with_links_costs_the_same_whatever_its_size(self) -> None:
        node, counts = make_node(), []
        for size in (1, 5):
            reports = []
            for _ in range(size):
                parent = due()
                for _ in range(3):
                    link(parent, "succeeded", follower())
                reports.append(ending(begin(parent, node)))
            counts.append(len(self.statements(lambda: lifecycle.finish(reports))))  # noqa: B023
        assert counts[0] == counts[1]


def test_a_schedule_without_a_timetable_is_left_alone_by_the_sweep() -> None:
    schedule = follower()
    assert (schedule.state, schedule.next_run_at) == ("active", None)
    assert not Schedule.objects.unplanned().exists()
    assert maintenance._adopt() == ()
    schedule.refresh_from_db()
    assert schedule.state == "active"
