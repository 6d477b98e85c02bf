"""Backfills: what is counted, what is inserted, in which order it runs, and how it ends."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.db import IntegrityError, transaction

from distcron_app import lifecycle, operations
from distcron_app.clock import Clock
from distcron_app.conf import Config
from distcron_app.dispatch import Dispatcher
from distcron_app.errors import BackfillMovedOn, InvalidArguments, InvalidBackfill
from distcron_app.instants import database_now
from distcron_app.leases import LeaseBook
from distcron_app.lifecycle import Finished
from distcron_app.locks import Level
from distcron_app.locks.memory import MemoryLockBackend
from distcron_app.models import AuditEntry, Backfill, Calendar, Node, Run, Schedule
from distcron_app.operations import BackfillRequest, plan_backfill
from tests.factories import make_node, make_run, make_schedule
from tests.integration.test_overlap import claim, due
from tests.services import wait_for

pytestmark = pytest.mark.django_db

CONFIG = Config(lock_backend="memory", lock_ttl_seconds=15, misfire_grace_seconds=30)
JAKARTA = ZoneInfo("Asia/Jakarta")
KEY = "0123456789abcdef"
DAY = timedelta(days=1)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=JAKARTA).astimezone(UTC)


def request(**values: Any) -> BackfillRequest:
    """Return ten days of June 2026, of which a schedule daily at 02:30 has ten instants."""
    given = {"first_at": at("2026-06-01"), "last_at": at("2026-06-10T23:59")}
    return BackfillRequest(**given | values)


def begin(schedule: Schedule, *, key: str | None = None, **values: Any) -> Backfill:
    return operations.backfill(
        schedule, request(**values), actor="siti", via="cli", idempotency_key=key
    )


def hourly(**values: Any) -> Schedule:
    return make_schedule(cron="0 * * * *", timezone="UTC", **values)


def due_and_old(**values: Any) -> Schedule:
    """Return a schedule that is due and has had an instant each minute since June 2026."""
    schedule = due(**values)
    found = Schedule.objects.filter(pk=schedule.pk)
    found.update(interval_anchor=at("2026-06-01"))
    found.update(next_run_at=schedule.next_run_at)
    schedule.refresh_from_db()
    return schedule


def instants(backfill: Backfill) -> list[datetime]:
    return list(backfill.runs.order_by("due_at").values_list("nominal_at", flat=True))


class Claimer:
    """A node that claims queued runs with locks of its own, and finishes what it is told."""

    def __init__(self) -> None:
        level = Level(name="standard", parts=("memory",), backend=MemoryLockBackend())
        self.leases = LeaseBook(15_000, clock=Clock())
        self.dispatcher = Dispatcher(
            config=CONFIG, clock=Clock(), find_level=lambda _name: level, leases=self.leases
        )
        self.node: Node = make_node()

    def claim(self) -> list[Run]:
        claimed = self.dispatcher.claim_queued(self.node.pk, 8)
        return list(Run.objects.filter(pk__in=[run.run_id for run in claimed.runs]))

    def finish(self, run: Run, state: str = "succeeded") -> None:
        run.refresh_from_db()
        owned = lifecycle.read_back([run.owner_token], self.node.pk)
        lifecycle.start(owned, self.node.pk)
        done = Finished(
            run_id=run.pk,
            fencing_token=run.fencing_token,
            owner_token=run.owner_token,
            state=state,
            finished_at=database_now(),
        )
        lifecycle.finish([done])
        self.leases.let_go([run.pk])


@pytest.fixture
def claimer() -> Claimer:
    return Claimer()


# --- the dry count ----------------------------------------------------------------


def test_each_instant_of_the_range_is_one_queued_run_of_the_backfill() -> None:
    schedule = make_schedule()
    backfill = begin(schedule)
    runs = list(backfill.runs.order_by("due_at"))
    assert [run.nominal_at for run in runs] == [
        at(f"2026-06-{day:02}T02:30") for day in range(1, 11)
    ]
    first = runs[0]
    assert (first.state, first.trigger, first.triggered_by) == ("queued", "backfill", "siti")
    assert (first.scheduled_at, first.instant) == (None, first.nominal_at)
    assert (backfill.planned, backfill.state, backfill.by) == (10, "active", "siti")


def test_both_ends_belong_to_the_range() -> None:
    ends = {"first_at": at("2026-06-01T02:30"), "last_at": at("2026-06-02T02:30")}
    assert plan_backfill(make_schedule(), request(**ends)).count == 2


def test_a_dry_count_writes_nothing() -> None:
    plan_backfill(make_schedule(), request())
    assert not Run.objects.exists()
    assert not Backfill.objects.exists()


def test_a_clock_change_is_filled_as_the_timetable_runs_it() -> None:
    schedule = make_schedule(cron="30 2 * * *", timezone="Europe/Riga")
    riga = ZoneInfo("Europe/Riga")
    ends = {
        "first_at": datetime(2026, 3, 28, tzinfo=riga),
        "last_at": datetime(2026, 3, 30, 23, tzinfo=riga),
    }
    assert [each.isoformat() for each in plan_backfill(schedule, request(**ends)).instants] == [
        "2026-03-28T00:30:00+00:00",
        "2026-03-29T00:30:00+00:00",
        "2026-03-29T23:30:00+00:00",
    ]
    jumped = make_schedule(cron="30 3 * * *", timezone="Europe/Riga")
    skipping = make_schedule(cron="30 3 * * *", timezone="Europe/Riga", gap="skip")
    found = plan_backfill(jumped, request(**ends)).instants
    assert [each.isoformat() for each in found] == [
        "2026-03-28T01:30:00+00:00",
        "2026-03-29T01:00:00+00:00",
        "2026-03-30T00:30:00+00:00",
    ]
    assert plan_backfill(skipping, request(**ends)).count == 2


def test_the_spread_of_the_schedule_is_not_applied() -> None:
    schedule = make_schedule(spread_seconds=3600)
    backfill = begin(schedule)
    assert instants(backfill)[0] == at("2026-06-01T02:30")
    soon = database_now() + timedelta(seconds=1)
    assert not backfill.runs.filter(due_at__gt=soon).exists()


def test_excluded_days_are_left_out_and_counted() -> None:
    calendar = Calendar.objects.create(name="Closed", timezone="Asia/Jakarta", weekdays="6,7")
    schedule = make_schedule(calendar=calendar, calendar_action="skip")
    plan = plan_backfill(schedule, request())
    assert (plan.count, plan.excluded) == (8, 2)
    assert date(2026, 6, 6) not in {each.astimezone(JAKARTA).date() for each in plan.instants}
    assert begin(schedule).planned == 8


def test_bounds_of_the_schedule_are_kept_and_counted() -> None:
    schedule = make_schedule(starts_at=at("2026-06-03"), ends_at=at("2026-06-08"))
    plan = plan_backfill(schedule, request())
    assert (plan.count, plan.outside) == (5, 5)


@pytest.mark.parametrize(
    ("state", "repeat", "fate"),
    [
        ("succeeded", "none", "existing"),
        ("succeeded", "failed", "existing"),
        ("succeeded", "all", "repeated"),
        ("failed", "none", "existing"),
        ("failed", "failed", "repeated"),
        ("lost", "failed", "repeated"),
        ("cancelled", "failed", "repeated"),
        ("cancelled", "all", "repeated"),
        ("queued", "all", "existing"),
        ("running", "all", "existing"),
        ("skipped", "none", "new"),
    ],
)
def test_an_instant_that_has_a_run(state: str, repeat: str, fate: str) -> None:
    schedule = make_schedule()
    make_run(schedule=schedule, state=state, scheduled_at=at("2026-06-04T02:30"))
    plan = plan_backfill(schedule, request(repeat=repeat))
    assert (plan.existing, plan.repeated) == (int(fate == "existing"), int(fate == "repeated"))
    assert plan.count == (9 if fate == "existing" else 10)


def test_a_run_by_hand_for_the_instant_counts_as_one() -> None:
    schedule = make_schedule()
    make_run(schedule=schedule, trigger="manual", nominal_at=at("2026-06-04T02:30"))
    assert plan_backfill(schedule, request()).existing == 1


def test_what_the_timetable_still_has_to_run_is_left_to_it() -> None:
    schedule = hourly()
    now = database_now().replace(minute=0, second=0, microsecond=0)
    Schedule.objects.filter(pk=schedule.pk).update(next_run_at=now - timedelta(hours=2))
    schedule.refresh_from_db()
    ends = {"first_at": now - timedelta(hours=5), "last_at": now + DAY}
    plan = plan_backfill(schedule, request(**ends))
    assert (plan.count, plan.upcoming) == (3, 3)
    assert plan.last == now - timedelta(hours=3)


def test_instants_of_a_pause_are_left_to_a_resume_that_runs_them() -> None:
    now = database_now().replace(minute=0, second=0, microsecond=0)
    ends = {"first_at": now - timedelta(hours=5), "last_at": now}
    for on_resume, count in (("misfire", 2), ("from_now", 6)):
        schedule = hourly(on_resume=on_resume)
        Schedule.objects.filter(pk=schedule.pk).update(
            state="paused", next_run_at=None, planned_from=now - timedelta(hours=3, minutes=30)
        )
        schedule.refresh_from_db()
        assert plan_backfill(schedule, request(**ends)).count == count


def test_a_range_of_too_many_instants_is_refused_with_the_limit() -> None:
    ends = {"first_at": at("2020-01-01"), "last_at": at("2021-06-01")}
    assert plan_backfill(hourly(), request(**ends | {"last_at": at("2021-02-01")})).count > 9000
    with pytest.raises(InvalidBackfill, match="more than 10000 instants") as refused:
        plan_backfill(hourly(), request(**ends))
    assert refused.value.field == "last_at"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"last_at": at("2026-05-01")}, "last_at"),
        ({"first_at": at("2098-01-01"), "last_at": at("2098-01-02")}, "first_at"),
        ({"per_minute": 0}, "per_minute"),
        ({"per_minute": 6001}, "per_minute"),
        ({"most_active": 2}, "most_active"),
        ({"overlap": "side_by_side", "most_active": 2}, "most_active"),
        ({"overlap": "side_by_side", "most_active": 0}, "most_active"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidBackfill) as refused:
        plan_backfill(make_schedule(), request(**given))
    assert refused.value.field == field


def test_the_pace_says_how_long_it_takes() -> None:
    assert plan_backfill(make_schedule(), request(per_minute=6)).paced_seconds == 90.0
    assert plan_backfill(make_schedule(), request()).paced_seconds == 0.0


def _rules() -> Iterator[tuple[dict[str, Any], datetime]]:
    draw = random.Random(11)
    zones = ["Asia/Jakarta", "Europe/Riga", "America/New_York", "Australia/Lord_Howe", "UTC"]
    for _ in range(25):
        minute, hour = draw.randrange(60), draw.choice(["*", "*/2", "1", "2,3", "23"])
        rule: dict[str, Any] = {
            "cron": f"{minute} {hour} * * {draw.choice(['*', 'mon-fri', '0'])}",
            "timezone": draw.choice(zones),
            "gap": draw.choice(["shift", "skip"]),
            "fold": draw.choice(["first", "second", "both"]),
        }
        if draw.random() < 0.2:
            anchor = datetime(2026, 1, 1, 0, 0, draw.randrange(60), tzinfo=UTC)
            seconds = draw.randrange(1800, 90_000)
            rule |= {"kind": "interval", "cron": "", "interval_seconds": seconds}
            rule["interval_anchor"] = anchor
        start = datetime(2026, draw.choice([3, 4, 6, 10]), draw.randrange(1, 28), tzinfo=UTC)
        yield rule, start + timedelta(minutes=draw.randrange(1440))


@pytest.mark.parametrize(("rule", "start"), list(_rules()))
def test_the_dry_count_equals_what_is_inserted(rule: dict[str, Any], start: datetime) -> None:
    schedule = make_schedule(**rule)
    wanted = BackfillRequest(first_at=start, last_at=start + timedelta(days=9))
    by_hand = [
        each
        for each in schedule.timetable().between(start - timedelta(microseconds=1), start + 9 * DAY)
    ]
    for instant in by_hand[::3]:
        make_run(schedule=schedule, scheduled_at=instant, state="succeeded")
    plan = plan_backfill(schedule, wanted)
    assert list(plan.instants) == [each for each in by_hand if each not in by_hand[::3]]
    if not plan.instants:
        return
    backfill = operations.backfill(schedule, wanted, actor="siti", via="cli", expected=plan.count)
    assert instants(backfill) == list(plan.instants)
    assert backfill.planned == backfill.runs.count() == plan.count


# --- the rows ---------------------------------------------------------------------


def test_a_form_sent_twice_begins_one_backfill() -> None:
    schedule = make_schedule()
    first, second = (begin(schedule, key=KEY) for _ in range(2))
    assert first == second
    assert Run.objects.count() == 10
    (entry,) = AuditEntry.objects.all()
    assert (entry.verb, entry.actor, entry.after["runs"]) == ("backfill", "siti", 10)


def test_a_second_backfill_of_the_range_has_nothing_to_run() -> None:
    schedule = make_schedule()
    begin(schedule)
    with pytest.raises(BackfillMovedOn, match="nothing of the range is left to run"):
        begin(schedule)
    assert Backfill.objects.count() == 1


def test_another_count_than_the_one_agreed_to_begins_nothing() -> None:
    schedule = make_schedule()
    with pytest.raises(BackfillMovedOn, match="10 runs by now instead of 9"):
        operations.backfill(schedule, request(), actor="siti", via="cli", expected=9)
    assert not Backfill.objects.exists()


def test_no_instant_is_twice_in_a_backfill() -> None:
    backfill = begin(make_schedule())
    twin = backfill.runs.first()
    twin.pk = None
    with pytest.raises(IntegrityError), transaction.atomic():
        twin.save(force_insert=True)


def test_a_crash_while_the_rows_are_inserted_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_args: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("distcron_app.lifecycle.queue_backfill", crash)
    with pytest.raises(KeyboardInterrupt):
        begin(make_schedule())
    assert not Backfill.objects.exists()
    assert not AuditEntry.objects.exists()


def test_arguments_are_replaced_for_all_its_runs_and_checked_first() -> None:
    schedule = make_schedule(job="tests.echo", arguments={"text": "daily"})
    backfill = begin(schedule, arguments={"text": "again"})
    assert set(map(json.dumps, backfill.runs.values_list("arguments", flat=True))) == {
        '{"text": "again"}'
    }
    with pytest.raises(InvalidArguments, match="text"):
        begin(schedule, arguments={"text": 3})


def test_its_runs_are_paced() -> None:
    dues = list(begin(make_schedule(), per_minute=4).runs.values_list("due_at", flat=True))
    steps = {later - earlier for earlier, later in pairwise(sorted(dues))}
    assert steps == {timedelta(seconds=15)}


def test_the_timetable_keeps_its_own_run_of_the_same_instant() -> None:
    schedule = due(overlap="allow")
    make_run(schedule=schedule, nominal_at=schedule.next_run_at, trigger="manual")
    claim(schedule, make_node())
    found = Run.objects.get(schedule=schedule, scheduled_at=schedule.next_run_at)
    assert found.state == "claimed"


# --- who goes first ---------------------------------------------------------------


def test_its_runs_go_one_after_the_other_the_oldest_first(claimer: Claimer) -> None:
    backfill = begin(make_schedule(overlap="allow"))
    done = []
    for _ in range(3):
        (run,) = claimer.claim()
        assert claimer.claim() == []
        claimer.finish(run)
        done.append(run.nominal_at)
    assert done == instants(backfill)[:3]


def test_one_by_one_waits_for_the_active_run_of_the_schedule(claimer: Claimer) -> None:
    schedule = make_schedule(overlap="allow")
    active = make_run(schedule=schedule, state="running", attempt=1, node=claimer.node)
    begin(schedule)
    assert claimer.claim() == []
    claimer.finish(active)
    assert len(claimer.claim()) == 1


def test_side_by_side_ends_at_its_number_and_at_the_limit_of_the_schedule(
    claimer: Claimer,
) -> None:
    begin(make_schedule(overlap="allow"), overlap="side_by_side", most_active=3)
    for _ in range(3):
        assert len(wait_for(claimer.claim, what="the next run of the backfill")) == 1
    assert [len(claimer.claim()) for _ in range(2)] == [0, 0]
    begin(make_schedule(overlap="allow", max_active=2), overlap="side_by_side")
    assert [len(claimer.claim()) for _ in range(4)] == [1, 1, 0, 0]


def test_the_claim_itself_keeps_the_rule_of_the_backfill() -> None:
    node = make_node()
    backfill = begin(make_schedule(overlap="allow"))
    both = backfill.runs.order_by("due_at")[:2]
    tokens = {run.pk: f"{run.pk:032}" for run in both}
    assert [run.run_id for run in lifecycle.claim_queued(tokens, node.pk).runs] == [both[0].pk]


def test_the_claim_itself_lets_an_occurrence_that_waits_go_first() -> None:
    schedule, node = make_schedule(), make_node()
    backfill = begin(schedule)
    waiting = make_run(
        schedule=schedule, state="queued", reason="overlap", scheduled_at=at("2026-07-01")
    )
    first = backfill.runs.order_by("due_at").first()
    assert lifecycle.claim_queued({first.pk: "a" * 32}, node.pk).runs == ()
    claimed = lifecycle.claim_queued({waiting.pk: "b" * 32}, node.pk).runs
    assert [run.run_id for run in claimed] == [waiting.pk]


def test_a_run_of_a_backfill_is_told_its_instant(claimer: Claimer) -> None:
    backfill = begin(make_schedule())
    claimed = claimer.dispatcher.claim_queued(claimer.node.pk, 4)
    assert claimed.runs[0].scheduled_at == instants(backfill)[0]


def test_a_long_backfill_leaves_room_for_other_queued_runs(claimer: Claimer) -> None:
    begin(hourly(), last_at=at("2026-06-20"))
    begin(hourly(), last_at=at("2026-06-20"))
    other = operations.run_now(make_schedule(), actor="siti", via="cli")
    claimed = claimer.claim()
    assert other in claimed
    assert len(claimed) == 3


@pytest.mark.parametrize("policy", ["skip", "queue_one", "queue_all", "replace", "allow"])
def test_an_occurrence_waits_behind_a_backfill_and_then_goes_first(
    claimer: Claimer, policy: str
) -> None:
    schedule = due_and_old(overlap=policy, max_active=1)
    backfill = begin(schedule, last_at=at("2026-06-01T01:00"))
    (running,) = claimer.claim()
    claim(schedule, claimer.node)
    occurrence = Run.objects.get(schedule=schedule, scheduled_at=schedule.next_run_at)
    assert (occurrence.state, occurrence.reason) == ("queued", "overlap")
    running.refresh_from_db()
    assert running.cancel_requested_at is None
    assert claimer.claim() == []
    claimer.finish(running)
    assert claimer.claim() == [occurrence]
    claimer.finish(occurrence)
    (following,) = claimer.claim()
    assert following.nominal_at == instants(backfill)[1]


def test_only_one_occurrence_waits_behind_a_backfill(claimer: Claimer) -> None:
    schedule = due_and_old(overlap="skip")
    begin(schedule, last_at=at("2026-06-01T01:00"))
    claimer.claim()
    claim(schedule, claimer.node)
    schedule.refresh_from_db()
    Schedule.objects.filter(pk=schedule.pk).update(next_run_at=schedule.next_run_at)
    claim(schedule, claimer.node)
    states = Run.objects.filter(trigger="timetable").order_by("scheduled_at")
    assert list(states.values_list("state", flat=True)) == ["queued", "skipped"]


def test_what_waits_in_a_backfill_is_not_in_the_way_of_run_now() -> None:
    schedule = make_schedule()
    begin(schedule)
    assert operations.run_now(schedule, actor="siti", via="cli").reason == ""


def test_a_deadline_to_start_is_not_for_a_backfill() -> None:
    schedule = make_schedule(start_deadline_seconds=60)
    backfill = begin(schedule)
    Run.objects.filter(backfill=backfill).update(due_at=database_now() - timedelta(hours=1))
    assert lifecycle.expire() == 0


# --- how it ends ------------------------------------------------------------------


def test_it_is_done_when_its_last_run_has_ended(claimer: Claimer) -> None:
    backfill = begin(make_schedule(), last_at=at("2026-06-02T23:00"))
    for _ in range(2):
        assert lifecycle.settle_backfills() == 0
        (run,) = claimer.claim()
        claimer.finish(run)
    assert lifecycle.settle_backfills() == 1
    backfill.refresh_from_db()
    assert backfill.state == "done"
    assert backfill.state_at is not None
    progress = backfill.progress()
    assert (progress.total, progress.ended, progress.percent) == (2, 2, 100)
    assert progress.remaining_seconds(database_now()) == 0


def test_cancel_ends_what_waits_and_asks_what_runs(claimer: Claimer) -> None:
    backfill = begin(make_schedule())
    (run,) = claimer.claim()
    lifecycle.start(lifecycle.read_back([run.owner_token], claimer.node.pk), claimer.node.pk)
    done = operations.cancel_backfill(backfill, reason="wrong month", actor="rudi", via="cli")
    assert (done.cancelled, done.asked) == (9, 1)
    run.refresh_from_db()
    assert (run.state, run.cancel_cause) == ("running", "by rudi: wrong month")
    backfill.refresh_from_db()
    assert (backfill.state, backfill.state_by, backfill.state_reason) == (
        "cancelled",
        "rudi",
        "wrong month",
    )
    cancelled = backfill.runs.filter(state="cancelled").first()
    assert (cancelled.reason, cancelled.error) == ("cancelled", "by rudi: wrong month")
    assert claimer.claim() == []
    entry = AuditEntry.objects.get(verb="cancel_backfill")
    assert (entry.actor, entry.reason, entry.after) == (
        "rudi",
        "wrong month",
        {"backfill": backfill.pk, "cancelled": 9, "asked": 1},
    )


def test_cancel_may_let_what_runs_go_on(claimer: Claimer) -> None:
    backfill = begin(make_schedule())
    (run,) = claimer.claim()
    lifecycle.start(lifecycle.read_back([run.owner_token], claimer.node.pk), claimer.node.pk)
    done = operations.cancel_backfill(
        backfill, reason="enough", is_stopping=False, actor="rudi", via="cli"
    )
    assert (done.cancelled, done.asked) == (9, 0)
    run.refresh_from_db()
    assert run.cancel_requested_at is None


def test_cancel_needs_a_reason_and_acts_once() -> None:
    backfill = begin(make_schedule())
    with pytest.raises(ValueError, match="Reason: missing"):
        operations.cancel_backfill(backfill, reason=" ", actor="rudi", via="cli")
    given: dict[str, Any] = {"reason": "enough", "actor": "rudi", "via": "cli"}
    first, second = (
        operations.cancel_backfill(backfill, idempotency_key=KEY, **given) for _ in range(2)
    )
    assert first == second
    with pytest.raises(BackfillMovedOn, match="has ended"):
        operations.cancel_backfill(backfill, **given)


def test_one_of_its_runs_may_be_run_again_after_it_was_cancelled(claimer: Claimer) -> None:
    backfill = begin(make_schedule())
    operations.cancel_backfill(backfill, reason="enough", actor="rudi", via="cli")
    again = operations.run_again(backfill.runs.first(), actor="siti", via="cli")
    assert claimer.claim() == [again]


def test_it_ends_with_its_schedule() -> None:
    schedule = make_schedule()
    backfill = begin(schedule)
    schedule.delete()
    assert lifecycle.cancel_without_schedule() == 10
    assert lifecycle.settle_backfills() == 1
    backfill.refresh_from_db()
    assert backfill.state == "cancelled"


def test_it_is_forgotten_with_the_last_of_its_runs() -> None:
    backfill = begin(make_schedule())
    operations.cancel_backfill(backfill, reason="enough", actor="rudi", via="cli")
    assert lifecycle.forget_backfills() == 0
    keep = backfill.runs.first()
    Run.objects.filter(backfill=backfill).exclude(pk=keep.pk).delete()
    progress = backfill.progress()
    assert (progress.pruned, progress.ended, progress.percent) == (9, 10, 100)
    Run.objects.all().delete()
    assert lifecycle.forget_backfills() == 1


def test_thousands_of_runs_are_inserted_and_cancelled_in_seconds() -> None:
    schedule = make_schedule(kind="interval", cron="", interval_seconds=60, timezone="UTC")
    first = at("2026-06-01")
    ends = {"first_at": first, "last_at": first + timedelta(minutes=2999, seconds=30)}
    Schedule.objects.filter(pk=schedule.pk).update(interval_anchor=first)
    schedule.refresh_from_db()
    begun = database_now()
    backfill = operations.backfill(schedule, request(**ends), actor="siti", via="cli")
    assert backfill.planned == 3000
    done = operations.cancel_backfill(backfill, reason="enough", actor="siti", via="cli")
    assert done.cancelled == 3000
    assert (database_now() - begun).total_seconds() < 20


# --- run now for an instant -------------------------------------------------------


def test_run_now_for_an_instant_stands_for_it(claimer: Claimer) -> None:
    schedule = make_schedule()
    make_run(schedule=schedule, scheduled_at=at("2026-06-04T02:30"))
    run = operations.run_now(schedule, actor="siti", via="cli", nominal_at=at("2026-06-04T02:30"))
    assert (run.scheduled_at, run.instant) == (None, at("2026-06-04T02:30"))
    claimed = claimer.dispatcher.claim_queued(claimer.node.pk, 4)
    assert claimed.runs[0].scheduled_at == at("2026-06-04T02:30")
    entry = AuditEntry.objects.get()
    assert entry.after["nominal_at"] == "2026-06-03T19:30:00+00:00"


def test_run_now_for_the_next_instant_leaves_it_to_the_timetable() -> None:
    schedule = due(overlap="allow")
    operations.run_now(schedule, actor="siti", via="cli", nominal_at=schedule.next_run_at)
    (run,) = claim(schedule, make_node()).runs
    assert run.scheduled_at == schedule.next_run_at
