"""run now and again, cancel, pause and resume: idempotent, audited, and never a run of the past."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection

from distcron_app import lifecycle, operations
from distcron_app.errors import InvalidArguments, RunMovedOn, ScheduleBusy, UnknownJob
from distcron_app.instants import database_now
from distcron_app.locks import (
    Lease,
    LockBackend,
    get_backend,
    get_level,
    named_lock_name,
    new_owner_token,
    schedule_lock_name,
)
from distcron_app.models import AuditEntry, Run, Schedule
from project.service_urls import cache_settings
from tests.factories import make_node, make_run, make_schedule, make_user
from tests.services import free_port

pytestmark = pytest.mark.django_db

WHO = {"actor": "siti", "via": "cli"}


def test_run_now_queues_one_manual_run() -> None:
    schedule = make_schedule(arguments={})
    run = operations.run_now(schedule, **WHO)
    stored = Run.objects.get(pk=run.pk)
    assert (stored.state, stored.trigger, stored.triggered_by) == ("queued", "manual", "siti")
    assert stored.scheduled_at is None


def test_run_now_twice_with_one_key_returns_the_same_run() -> None:
    schedule = make_schedule()
    first = operations.run_now(schedule, idempotency_key="k", **WHO)
    second = operations.run_now(schedule, idempotency_key="k", **WHO)
    assert first.pk == second.pk
    assert Run.objects.count() == 1


def test_run_now_with_an_old_key_returns_the_finished_run() -> None:
    schedule = make_schedule()
    first = operations.run_now(schedule, idempotency_key="k", **WHO)
    Run.objects.filter(pk=first.pk).update(state="succeeded")
    assert operations.run_now(schedule, idempotency_key="k", **WHO).pk == first.pk
    assert Run.objects.count() == 1


def test_one_key_names_one_run_of_each_schedule() -> None:
    runs = {operations.run_now(make_schedule(), idempotency_key="k", **WHO).pk for _ in range(2)}
    assert len(runs) == 2


def test_run_now_is_refused_while_a_run_is_active() -> None:
    schedule = make_schedule()
    active = make_run(schedule=schedule, state="running")
    with pytest.raises(ScheduleBusy, match=f"busy, blocked by run {active.pk}"):
        operations.run_now(schedule, idempotency_key="k", **WHO)
    assert AuditEntry.objects.count() == 0


def test_run_now_works_on_a_paused_schedule_and_leaves_it_paused() -> None:
    schedule = make_schedule(state="paused")
    operations.run_now(schedule, **WHO)
    assert Schedule.objects.get().state == "paused"


def test_run_now_refuses_an_unknown_job_before_it_writes() -> None:
    schedule = make_schedule()
    Schedule.objects.update(job="gone")
    schedule.refresh_from_db()
    with pytest.raises(UnknownJob):
        operations.run_now(schedule, **WHO)
    assert Run.objects.count() == 0


def test_run_now_refuses_arguments_that_do_not_fit() -> None:
    schedule = make_schedule(job="project.demo.greet", arguments={"name": "Ani"})
    with pytest.raises(InvalidArguments, match="language"):
        operations.run_now(schedule, arguments={"name": "Ani", "language": "xx"}, **WHO)
    assert Run.objects.count() == 0


def test_run_now_takes_arguments_for_this_run_alone() -> None:
    schedule = make_schedule(job="project.demo.greet", arguments={"name": "Ani"})
    run = operations.run_now(schedule, arguments={"name": "Budi"}, **WHO)
    assert Run.objects.get(pk=run.pk).arguments == {"name": "Budi"}
    assert Schedule.objects.get().arguments == {"name": "Ani"}


def test_pause_keeps_who_why_and_when() -> None:
    schedule = make_schedule()
    before = database_now() - timedelta(seconds=1)
    operations.pause([schedule], reason="migration", **WHO)
    stored = Schedule.objects.get()
    assert (stored.state, stored.state_reason, stored.state_by) == ("paused", "migration", "siti")
    assert stored.state_at is not None and stored.state_at > before
    assert stored.next_run_at is None


def test_pause_without_a_reason_is_refused() -> None:
    schedule = make_schedule()
    with pytest.raises(ValueError, match="Reason: missing"):
        operations.pause([schedule], reason="  ", **WHO)
    assert Schedule.objects.get().state == "active"


def test_a_reason_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="501 characters, allowed 500"):
        operations.pause([make_schedule()], reason="x" * 501, **WHO)


def test_pausing_a_paused_schedule_is_reported_as_unchanged() -> None:
    schedule = make_schedule()
    operations.pause([schedule], reason="first", **WHO)
    again = operations.pause([schedule], reason="second", **WHO)
    assert again.changed == () and [row.pk for row in again.unchanged] == [schedule.pk]
    assert Schedule.objects.get().state_reason == "first"
    assert AuditEntry.objects.count() == 1


def test_resuming_an_active_schedule_is_reported_as_unchanged() -> None:
    schedule = make_schedule()
    again = operations.resume([schedule], **WHO)
    assert again.changed == () and len(again.unchanged) == 1
    assert AuditEntry.objects.count() == 0


def test_a_pause_that_is_sent_again_after_a_resume_does_not_act_again() -> None:
    schedule = make_schedule()
    operations.pause([schedule], reason="r", idempotency_key="k", **WHO)
    operations.resume([schedule], **WHO)
    operations.pause([schedule], reason="r", idempotency_key="k", **WHO)
    assert Schedule.objects.get().state == "active"


def test_resume_plans_from_now() -> None:
    schedule = make_schedule(kind="interval", interval_seconds=3600)
    operations.pause([schedule], reason="r", **WHO)
    now = database_now()
    operations.resume([schedule], **WHO)
    stored = Schedule.objects.get()
    assert stored.state == "active" and stored.state_reason == ""
    assert stored.next_run_at is not None and stored.next_run_at > now


def test_resuming_a_row_that_cannot_run_any_more_makes_it_invalid() -> None:
    schedule = make_schedule()
    operations.pause([schedule], reason="r", **WHO)
    Schedule.objects.update(job="gone")
    operations.resume([schedule], **WHO)
    stored = Schedule.objects.get()
    assert stored.state == "invalid" and "'gone': not registered" in stored.state_reason


def test_a_person_who_edits_meanwhile_is_not_overwritten_by_a_pause() -> None:
    stale = make_schedule(name="old")
    Schedule.objects.update(name="new")
    operations.pause([stale], reason="r", **WHO)
    assert Schedule.objects.get().name == "new"


def test_a_deleted_schedule_is_left_out() -> None:
    schedule = make_schedule()
    Schedule.objects.all().delete()
    assert operations.pause([schedule], reason="r", **WHO) == operations.StateChange()


def test_every_change_is_audited_with_before_and_after() -> None:
    schedule = make_schedule()
    operations.pause([schedule], reason="migration", **WHO)
    entry = AuditEntry.objects.get()
    assert (entry.verb, entry.actor, entry.via, entry.reason) == (
        "pause",
        "siti",
        "cli",
        "migration",
    )
    assert (entry.object_type, entry.object_id) == ("schedule", str(schedule.pk))
    assert entry.before == {"state": "active", "state_reason": ""}
    assert entry.after == {"state": "paused", "state_reason": "migration"}


def test_secret_arguments_are_masked_when_written() -> None:
    schedule = make_schedule(job="tests.call_api", arguments={"api_key": "s3cret-value"})
    run = operations.run_now(schedule, **WHO)
    assert AuditEntry.objects.get().after == {"run": run.pk, "arguments": {"api_key": "••••"}}
    assert Run.objects.get().arguments == {"api_key": "s3cret-value"}


def test_a_known_user_gets_a_log_entry() -> None:
    user = make_user(username="siti")
    schedule = make_schedule()
    operations.pause([schedule], reason="migration", user=user, **WHO)
    entry = LogEntry.objects.get()
    assert (entry.user_id, entry.object_id) == (user.pk, str(schedule.pk))
    assert "migration" in entry.change_message


def test_no_log_entry_without_a_user() -> None:
    operations.pause([make_schedule()], reason="r", **WHO)
    assert LogEntry.objects.count() == 0


@pytest.mark.django_db(transaction=True)
def test_ten_simultaneous_clicks_of_one_form_make_one_run() -> None:
    schedule = make_schedule()
    start = threading.Barrier(10)
    runs: list[int] = []

    def click() -> None:
        try:
            start.wait(10)
            runs.append(operations.run_now(schedule, idempotency_key="k", **WHO).pk)
        finally:
            connection.close()

    threads = [threading.Thread(target=click) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(runs) == 10 and len(set(runs)) == 1
    assert Run.objects.count() == AuditEntry.objects.count() == 1


@pytest.fixture
def memory(settings: Any) -> LockBackend:
    settings.DISTCRON = {"LOCK_BACKEND": "memory"}
    return get_backend()


def hold(backend: LockBackend, name: str) -> Lease:
    return backend.acquire({name: new_owner_token()}, 60_000)[name]


class TestReleaseLock:
    def test_the_lock_is_freed_and_its_run_taken_from_its_node(self, memory: LockBackend) -> None:
        schedule = make_schedule()
        run = make_run(schedule=schedule, state="running")
        name = schedule_lock_name(schedule.pk)
        hold(memory, name)
        done = operations.release_lock(name, reason="node is hung", **WHO)
        assert (done.was_held, done.fencing_token, done.lost) == (True, 1, (run.pk,))
        assert memory.inspect([name]) == {}
        run.refresh_from_db()
        assert (run.state, run.reason) == ("lost", "released")

    def test_it_is_audited_with_the_reason_and_what_became_of_the_run(
        self, memory: LockBackend
    ) -> None:
        schedule = make_schedule()
        run = make_run(schedule=schedule, state="running")
        name = schedule_lock_name(schedule.pk)
        operations.release_lock(name, reason="node is hung", **WHO)
        entry = AuditEntry.objects.get()
        assert (entry.verb, entry.actor, entry.reason) == ("release_lock", "siti", "node is hung")
        assert entry.after == {
            "lock": name,
            "fencing_token": 1,
            "requeued": [],
            "lost": [run.pk],
        }

    def test_a_lock_of_code_is_freed_and_audited_by_its_name(self, memory: LockBackend) -> None:
        name = named_lock_name("export 🦜")
        hold(memory, name)
        done = operations.release_lock(name, reason="stuck", **WHO)
        assert (done.was_held, done.fencing_token) == (True, None)
        entry = AuditEntry.objects.get()
        assert (entry.object_type, entry.object_label) == ("lock", "name:export 🦜")

    def test_the_level_of_the_schedule_decides_where(self, settings: Any) -> None:
        settings.DISTCRON = {"LOCK_BACKEND": "file", "LOCK_LEVELS": {"inside": ["memory"]}}
        inside = get_level("inside").backend
        schedule = make_schedule(lock_level="inside")
        name = schedule_lock_name(schedule.pk)
        hold(inside, name)
        assert operations.release_lock(name, reason="stuck", **WHO).was_held is True
        assert inside.inspect([name]) == {}

    @pytest.mark.parametrize("reason", ["", "  "])
    def test_without_a_reason_nothing_happens(self, memory: LockBackend, reason: str) -> None:
        name = named_lock_name("export")
        hold(memory, name)
        with pytest.raises(ValueError, match="Reason: missing"):
            operations.release_lock(name, reason=reason, **WHO)
        assert set(memory.inspect([name])) == {name}
        assert not AuditEntry.objects.exists()

    def test_a_second_click_releases_nobody_elses_lock(self, memory: LockBackend) -> None:
        schedule = make_schedule()
        name = schedule_lock_name(schedule.pk)
        hold(memory, name)
        first = operations.release_lock(name, reason="stuck", idempotency_key="k", **WHO)
        hold(memory, name)
        second = operations.release_lock(name, reason="stuck", idempotency_key="k", **WHO)
        assert (first.fencing_token, second.fencing_token) == (1, 1)
        assert set(memory.inspect([name])) == {name}
        assert AuditEntry.objects.count() == 1

    def test_a_backend_that_is_away_is_said_and_the_run_is_taken_all_the_same(
        self, settings: Any
    ) -> None:
        settings.CACHES = cache_settings(f"redis://127.0.0.1:{free_port()}/9")
        settings.DISTCRON = {"LOCK_BACKEND": "redis"}
        schedule = make_schedule()
        run = make_run(schedule=schedule, state="running")
        done = operations.release_lock(
            schedule_lock_name(schedule.pk), reason="node is hung", **WHO
        )
        assert (done.was_held, done.lost) == (None, (run.pk,))
        assert "Connection refused" in done.problem


class TestBehind:
    """A person queues a run on a busy schedule."""

    def test_it_waits_for_the_active_run(self) -> None:
        schedule = make_schedule()
        active = make_run(schedule=schedule, state="running")
        run = operations.run_now(schedule, behind=True, **WHO)
        assert (run.state, run.reason) == ("queued", "overlap")
        assert run.details == {"blocked_by": active.pk}
        assert list(Run.objects.queued_due().startable()) == []

    def test_it_starts_when_the_active_run_has_ended(self) -> None:
        node = make_node()
        schedule = make_schedule()
        active = make_run(schedule=schedule, state="running")
        run = operations.run_now(schedule, behind=True, **WHO)
        token = {run.pk: new_owner_token()}
        assert lifecycle.claim_queued(token, node.pk).runs == ()
        Run.objects.filter(pk=active.pk).update(state="succeeded")
        (claimed,) = lifecycle.claim_queued(token, node.pk).runs
        assert claimed.run_id == run.pk

    def test_a_full_queue_does_not_refuse_a_person(self) -> None:
        schedule = make_schedule(overlap="queue_one")
        make_run(schedule=schedule, state="running")
        make_run(schedule=schedule, state="queued", reason="overlap")
        operations.run_now(schedule, behind=True, **WHO)
        operations.run_now(schedule, behind=True, **WHO)
        assert Run.objects.filter(state="queued").count() == 3

    def test_on_a_free_schedule_it_waits_for_nothing(self) -> None:
        run = operations.run_now(make_schedule(), behind=True, **WHO)
        assert (run.reason, run.details) == ("", None)

    def test_without_a_limit_it_waits_for_nothing(self) -> None:
        schedule = make_schedule(overlap="allow")
        make_run(schedule=schedule, state="running")
        run = operations.run_now(schedule, behind=True, **WHO)
        assert (run.reason, run.details) == ("", None)


class TestCancel:
    @pytest.mark.parametrize("state", ["queued", "claimed"])
    def test_a_run_that_has_not_started_is_cancelled_at_once(self, state: str) -> None:
        run = make_run(state=state)
        done = operations.cancel_run(run, reason="wrong data", **WHO)
        run.refresh_from_db()
        assert (done.outcome, run.state, run.reason) == ("cancelled", "cancelled", "cancelled")
        assert run.error == "by siti: wrong data"
        assert done.in_words() == f"Run {run.pk} is cancelled."

    def test_a_running_one_is_asked_and_goes_on_until_its_job_looks(self) -> None:
        run = make_run(state="running", attempt=1)
        done = operations.cancel_run(run, reason="wrong data", **WHO)
        run.refresh_from_db()
        assert (done.outcome, run.state) == ("asked", "running")
        assert run.cancel_requested_at is not None
        assert run.cancel_cause == "by siti: wrong data"

    def test_it_is_audited_on_the_run(self) -> None:
        run = make_run(state="running", attempt=1)
        operations.cancel_run(run, reason="wrong data", **WHO)
        entry = AuditEntry.objects.get()
        assert (entry.verb, entry.actor, entry.reason) == ("cancel", "siti", "wrong data")
        assert (entry.object_type, entry.object_id) == ("run", str(run.pk))
        assert entry.after == {"run": run.pk, "outcome": "asked"}

    def test_without_a_reason_it_is_refused(self) -> None:
        run = make_run(state="queued")
        with pytest.raises(ValueError, match="Reason: missing"):
            operations.cancel_run(run, reason=" ", **WHO)
        assert Run.objects.get().state == "queued"

    @pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled", "lost", "skipped"])
    def test_a_final_run_is_left_alone(self, state: str) -> None:
        run = make_run(state=state)
        with pytest.raises(RunMovedOn, match=f"Run {run.pk}: {state} by now, so it was not"):
            operations.cancel_run(run, reason="late", idempotency_key="k", **WHO)
        assert Run.objects.get().state == state
        assert AuditEntry.objects.count() == 0

    def test_asking_twice_keeps_the_first_cause(self) -> None:
        run = make_run(state="running", attempt=1)
        operations.cancel_run(run, reason="first", **WHO)
        done = operations.cancel_run(run, reason="second", **WHO)
        run.refresh_from_db()
        assert (done.outcome, run.cancel_cause) == ("asked_before", "by siti: first")
        assert AuditEntry.objects.count() == 1

    def test_a_form_sent_again_answers_what_it_did_and_acts_once(self) -> None:
        run = make_run(state="queued")
        first = operations.cancel_run(run, reason="x", idempotency_key="k", **WHO)
        lifecycle.queue_again(run.pk)
        again = operations.cancel_run(run, reason="x", idempotency_key="k", **WHO)
        assert again == first
        assert Run.objects.get().state == "queued"
        assert AuditEntry.objects.count() == 1


class TestRunAgain:
    @pytest.mark.parametrize("state", ["failed", "cancelled", "lost"])
    def test_the_same_run_is_queued_again(self, state: str) -> None:
        run = make_run(state=state, attempt=1, reason="error", error="boom")
        queued = operations.run_again(run, reason="disk was full", **WHO)
        stored = Run.objects.get()
        assert (queued.pk, stored.state, stored.reason) == (run.pk, "queued", "again")
        assert stored.error == ""
        assert [attempt.error for attempt in stored.attempts.all()] == ["boom"]
        entry = AuditEntry.objects.get()
        assert (entry.verb, entry.object_type, entry.reason) == (
            "run_again",
            "run",
            "disk was full",
        )
        assert entry.after == {"run": run.pk, "after_attempt": 1}

    @pytest.mark.parametrize("state", ["queued", "running", "succeeded", "skipped"])
    def test_a_run_in_another_state_is_left_alone(self, state: str) -> None:
        run = make_run(state=state)
        with pytest.raises(RunMovedOn, match=f"Run {run.pk}: {state} by now. Only a failed,"):
            operations.run_again(run, **WHO)
        assert Run.objects.get().state == state
        assert AuditEntry.objects.count() == 0

    def test_a_run_whose_schedule_is_gone_says_so(self) -> None:
        run = make_run(state="failed")
        Schedule.objects.all().delete()
        with pytest.raises(RunMovedOn, match="its schedule was deleted"):
            operations.run_again(run, **WHO)

    def test_a_busy_schedule_refuses_it(self) -> None:
        run = make_run(state="failed")
        active = make_run(schedule=run.schedule, state="running")
        with pytest.raises(ScheduleBusy, match=f"blocked by run {active.pk}"):
            operations.run_again(run, **WHO)
        assert AuditEntry.objects.count() == 0

    def test_an_unknown_job_is_refused_before_it_writes(self) -> None:
        run = make_run(state="failed", job="gone")
        with pytest.raises(UnknownJob):
            operations.run_again(run, **WHO)
        assert Run.objects.get().state == "failed"

    def test_a_form_sent_again_acts_once(self) -> None:
        run = make_run(state="failed", attempt=1)
        operations.run_again(run, idempotency_key="k", **WHO)
        Run.objects.update(state="failed")
        assert operations.run_again(run, idempotency_key="k", **WHO).pk == run.pk
        assert Run.objects.get().state == "failed"
        assert AuditEntry.objects.count() == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("verb", ["cancel", "again"])
def test_two_clicks_at_once_on_a_run_act_once(verb: str) -> None:
    run = make_run(state="queued" if verb == "cancel" else "failed", attempt=0)
    barrier, errors = threading.Barrier(2), []

    def click() -> None:
        try:
            barrier.wait()
            if verb == "cancel":
                operations.cancel_run(run, reason="x", idempotency_key="k", **WHO)
            else:
                operations.run_again(run, idempotency_key="k", **WHO)
        except Exception as error:
            errors.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=click) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert Run.objects.get().state == ("cancelled" if verb == "cancel" else "queued")
    assert AuditEntry.objects.count() == 1
