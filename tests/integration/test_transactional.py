"""Delivery transactional: what a job writes and its outcome, in one commit or not at all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Group
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.db import DatabaseError, OperationalError, connection, connections, transaction

from distcron_app import JobContext, atomicity, job, lifecycle, registry, transactional
from distcron_app.instants import database_now
from distcron_app.lifecycle import Finished
from distcron_app.locks import EffectLock
from distcron_app.locks.database import DatabaseLockBackend
from distcron_app.models import ChainLink, Run, RunOutput
from distcron_app.runner import Assignment, Outcome, execute
from distcron_app.transactional import run_in_transaction
from tests.factories import make_node, make_run, make_schedule
from tests.services import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

EFFECT = "the effect"


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_jobs", dict(registry._jobs))


def running(**values: Any) -> Run:
    """Return a run that its node has started, with the delivery transactional."""
    return make_run(
        state="running",
        delivery="transactional",
        node=make_node(),
        started_at=database_now(),
        attempt=1,
        fencing_token=4,
        owner_token=uuid4().hex,
        **values,
    )


def assigned(run: Run, **values: Any) -> Assignment:
    defaults: dict[str, Any] = {
        "run_id": run.pk,
        "schedule_id": run.schedule_id,
        "schedule_key": "key",
        "job": "test.job",
        "arguments": {},
        "scheduled_at": run.due_at,
        "attempt": run.attempt,
        "fencing_token": run.fencing_token,
        "owner_token": run.owner_token,
        "delivery": "transactional",
    }
    return Assignment(**defaults | values)


def attempt(run: Run, body: Callable[..., Any], **values: Any) -> Outcome:
    """Run ``body`` as the job of the run, in this thread."""
    job(name="test.job")(body)
    given = assigned(run, **values)
    return execute(
        given, context=given.context(), output_limit_bytes=10_000, transact=run_in_transaction
    )


def write() -> str:
    Group.objects.create(name=EFFECT)
    return "written"


def has_effect() -> bool:
    return Group.objects.filter(name=EFFECT).exists()


def state_of(run: Run) -> str:
    return str(Run.objects.values_list("state", flat=True).get(pk=run.pk))


def report(run: Run, outcome: Outcome) -> Finished:
    return Finished(
        run_id=run.pk,
        fencing_token=run.fencing_token,
        owner_token=run.owner_token,
        state=outcome.state,
        reason=outcome.reason,
        finished_at=database_now(),
        error=outcome.error,
        output=outcome.output,
        committed=outcome.committed,
    )


@contextlib.contextmanager
def another_session() -> Iterator[Any]:
    session = connections["default"].copy()
    session.inc_thread_sharing()
    try:
        yield session
    finally:
        session.close()


# The outcome is committed with the writes


def test_a_success_is_committed_with_what_the_job_wrote() -> None:
    run = running(progress_percent=40, checkpoint={"page": 3})
    outcome = attempt(run, write)
    assert (outcome.state, outcome.committed, has_effect()) == ("succeeded", True, True)
    run.refresh_from_db()
    assert (run.state, run.result, run.late, run.error) == ("succeeded", "written", False, "")
    assert run.finished_at is not None
    assert run.started_at is not None
    assert run.finished_at >= run.started_at
    # Nothing is left to go on with.
    assert (run.progress_percent, run.checkpoint) == (100, None)


def test_nobody_sees_the_outcome_before_the_writes() -> None:
    run = running()
    seen: list[tuple[str, bool]] = []

    def look() -> None:
        seen.append((state_of(run), has_effect()))
        connection.close()

    def body() -> None:
        write()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    attempt(run, body)
    assert seen == [("running", False)]
    assert (state_of(run), has_effect()) == ("succeeded", True)


def test_its_output_is_committed_too_and_completed_by_the_node() -> None:
    from distcron_app.capture import write as say

    def body() -> None:
        say("one\n")
        transaction.on_commit(lambda: say("after the commit\n"))

    run = running()
    outcome = attempt(run, body)
    assert RunOutput.objects.get(pk=run.pk).output == "one\n"
    result = lifecycle.finish([report(run, outcome)])
    assert result.accepted == {run.pk}
    assert RunOutput.objects.get(pk=run.pk).output == "one\nafter the commit\n"


def test_the_report_of_a_commit_changes_nothing_but_the_text() -> None:
    run = running()
    outcome = attempt(run, write)
    run.refresh_from_db()
    lifecycle.finish([report(run, outcome)])
    again = Run.objects.get(pk=run.pk)
    assert (again.finished_at, again.result) == (run.finished_at, "written")


def test_callbacks_run_after_the_commit_and_undo_nothing_when_they_fail() -> None:
    run = running()
    seen: list[str] = []

    def fail() -> None:
        seen.append(state_of(run))
        raise OSError("no mail server")

    def body() -> None:
        write()
        transaction.on_commit(fail)

    outcome = attempt(run, body)
    assert seen == ["succeeded"]
    assert (outcome.state, outcome.committed, has_effect()) == ("succeeded", True, True)


@pytest.mark.parametrize("is_stale", [False, True])
def test_what_its_end_starts_is_in_the_same_commit(is_stale: bool) -> None:
    parent, follower = make_schedule(delivery="transactional"), make_schedule()
    ChainLink.objects.create(schedule=parent, follower=follower, event="succeeded")
    run = running(schedule=parent)
    seen: list[int] = []

    def body() -> None:
        if is_stale:
            Run.objects.filter(pk=run.pk).update(fencing_token=9)
        transaction.on_commit(lambda: seen.append(Run.objects.filter(schedule=follower).count()))

    outcome = attempt(run, body)
    assert outcome.committed is not is_stale
    assert seen == ([] if is_stale else [1])
    # The report to the node starts nothing more.
    lifecycle.finish([report(run, outcome)])
    assert Run.objects.filter(schedule=follower).count() == (0 if is_stale else 1)


# Whatever else happens undoes everything


def test_a_job_that_raises_has_written_nothing_and_is_reported_as_ever() -> None:
    run = running()

    def body() -> None:
        write()
        raise ValueError("half way")

    outcome = attempt(run, body)
    assert (outcome.state, outcome.reason, outcome.error) == (
        "failed",
        "error",
        "ValueError: half way",
    )
    assert (outcome.committed, has_effect(), state_of(run)) == (False, False, "running")
    assert "half way" in outcome.traceback
    assert lifecycle.finish([report(run, outcome)]).accepted == {run.pk}
    assert state_of(run) == "failed"


def test_a_job_that_stops_when_it_is_told_to_has_written_nothing() -> None:
    run = running()

    def body(ctx: JobContext) -> None:
        write()
        ctx.cancel("the node is stopping", reason="shutdown")
        ctx.check()

    outcome = attempt(run, body)
    assert (outcome.state, outcome.reason, has_effect()) == ("cancelled", "shutdown", False)


@pytest.mark.parametrize(
    "moved",
    [
        {"fencing_token": 5},
        {"owner_token": "somebody else"},
        {"state": "lost"},
        {"state": "queued", "owner_token": ""},
        {"state": "failed"},
        {"state": "succeeded"},
    ],
)
def test_an_attempt_that_was_superseded_is_stale_and_undone(moved: dict[str, Any]) -> None:
    run = running()
    Run.objects.filter(pk=run.pk).update(**moved)
    before = Run.objects.filter(pk=run.pk).values().get()
    outcome = attempt(run, write)
    assert (outcome.state, outcome.reason, outcome.committed) == ("failed", "stale", False)
    assert has_effect() is False
    assert Run.objects.filter(pk=run.pk).values().get() == before


@pytest.mark.databases("postgresql", "mysql")
def test_an_attempt_that_is_superseded_in_the_middle_is_undone() -> None:
    run = running()

    def take_over() -> None:
        Run.objects.filter(pk=run.pk).update(fencing_token=5, owner_token="another")
        connection.close()

    def body() -> None:
        write()
        thread = threading.Thread(target=take_over)
        thread.start()
        thread.join()

    outcome = attempt(run, body)
    assert (outcome.reason, has_effect(), state_of(run)) == ("stale", False, "running")


def test_a_late_stale_report_settles_a_lost_run_as_failed() -> None:
    run = running()
    Run.objects.filter(pk=run.pk).update(state="lost")
    outcome = attempt(run, write)
    assert lifecycle.finish([report(run, outcome)]).late == {run.pk}
    run.refresh_from_db()
    assert (run.state, run.reason, has_effect()) == ("failed", "stale", False)


# Jobs that spoil their transaction


def test_a_job_that_asks_for_a_rollback_has_failed() -> None:
    run = running()

    def body() -> None:
        write()
        transaction.set_rollback(True)

    outcome = attempt(run, body)
    assert (outcome.state, has_effect(), state_of(run)) == ("failed", False, "running")
    assert outcome.error.startswith(
        f"NotCommitted: Run {run.pk}: what the job wrote was undone, the job asked for it"
    )


def test_a_job_that_leaves_a_block_open_has_failed() -> None:
    run = running()

    def body() -> None:
        transaction.atomic().__enter__()
        write()

    outcome = attempt(run, body)
    assert (outcome.state, has_effect(), state_of(run)) == ("failed", False, "running")
    assert "left a block of atomic() open" in outcome.error


def test_a_job_that_closes_the_connection_has_failed() -> None:
    run = running()

    def body() -> None:
        write()
        connection.close()

    outcome = attempt(run, body)
    assert (outcome.state, has_effect(), state_of(run)) == ("failed", False, "running")
    assert outcome.error.startswith("NotCommitted: ")


@pytest.mark.databases("postgresql")
def test_a_job_that_goes_on_after_a_database_error_has_failed() -> None:
    run = running()

    def body() -> None:
        write()
        with contextlib.suppress(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")

    outcome = attempt(run, body)
    assert (outcome.state, has_effect(), state_of(run)) == ("failed", False, "running")
    assert "went on after a database error" in outcome.error


def test_an_error_in_a_block_of_its_own_spoils_nothing() -> None:
    run = running()

    def body() -> None:
        write()
        with contextlib.suppress(DatabaseError), transaction.atomic():
            write()

    assert attempt(run, body).committed is True
    assert Group.objects.count() == 1


# Async jobs


def test_the_calls_of_an_async_job_are_in_the_transaction() -> None:
    run = running()

    async def body() -> int:
        await Group.objects.acreate(name=EFFECT)
        return await Group.objects.acount()

    outcome = attempt(run, body)
    assert (outcome.error, outcome.committed, outcome.result, has_effect()) == ("", True, 1, True)


def test_an_async_job_that_raises_has_written_nothing() -> None:
    run = running()

    async def body() -> None:
        await Group.objects.acreate(name=EFFECT)
        raise ValueError("half way")

    outcome = attempt(run, body)
    assert (outcome.state, has_effect(), state_of(run)) == ("failed", False, "running")


# A commit whose answer is lost


def lose_the_answer(monkeypatch: pytest.MonkeyPatch, *, commits: bool) -> None:
    """Let the next commit raise as a cut link does, after or without having been carried out."""
    real = type(connections["default"])._commit
    left = [None]

    def commit(self: Any) -> None:
        if not left:
            real(self)
            return
        left.clear()
        if commits:
            real(self)
        raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(type(connections["default"]), "_commit", commit)


def test_a_commit_whose_answer_was_lost_is_found_by_reading_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = running()
    lose_the_answer(monkeypatch, commits=True)
    outcome = attempt(run, write)
    assert (outcome.state, outcome.committed, has_effect()) == ("succeeded", True, True)


def test_a_commit_that_did_not_arrive_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    run = running()
    lose_the_answer(monkeypatch, commits=False)
    outcome = attempt(run, write)
    assert (outcome.state, outcome.committed) == ("failed", False)
    assert outcome.error.startswith("OperationalError: server closed")
    assert "django.db.utils.OperationalError" in outcome.exceptions
    assert (has_effect(), state_of(run)) == (False, "running")


def test_where_the_database_stays_away_the_tokens_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    run = running()
    lose_the_answer(monkeypatch, commits=True)
    monkeypatch.setattr(transactional, "_READ_BACK_SECONDS", 0.0)

    def away(*_: object) -> bool:
        raise OperationalError("connection refused")

    monkeypatch.setattr(lifecycle, "has_succeeded", away)
    outcome = attempt(run, write)
    assert (outcome.state, outcome.committed) == ("failed", False)
    # The commit had arrived: the report of a failure is refused.
    assert lifecycle.finish([report(run, outcome)]).rejected == {run.pk}
    assert (state_of(run), has_effect()) == ("succeeded", True)


# The lock on the connection of the writes


@pytest.mark.databases("postgresql", "mysql")
def test_an_attempt_waits_for_the_transaction_of_an_earlier_one() -> None:
    run = running()
    with another_session() as session:
        session.set_autocommit(False)
        lock = EffectLock(session, "distcron", "schedule:7")
        assert lock.try_take() is True

        def end_it() -> None:
            session.rollback()
            lock.free()

        timer = threading.Timer(0.4, end_it)
        timer.start()
        outcome = attempt(run, write, effect_lock="schedule:7")
        timer.join()
    assert (outcome.committed, has_effect()) == (True, True)


@pytest.mark.databases("postgresql", "mysql")
def test_an_attempt_does_not_begin_beside_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactional, "LOCK_WAIT_SECONDS", 0.3)
    run = running()
    began: list[None] = []
    with another_session() as session:
        session.set_autocommit(False)
        assert EffectLock(session, "distcron", "schedule:7").try_take() is True
        outcome = attempt(run, lambda: began.append(None), effect_lock="schedule:7")
    assert (outcome.state, outcome.reason, began) == ("failed", "error", [])
    assert outcome.error == (
        f"LockNotAcquired: Lock 'effects of run {run.pk}': held by an earlier attempt, "
        "whose transaction has not ended."
    )
    # A policy may try it again.
    assert "distcron_app.errors.LockNotAcquired" in outcome.exceptions


@pytest.mark.databases("postgresql", "mysql")
def test_an_attempt_that_is_told_to_stop_while_it_waits_is_cancelled() -> None:
    run = running()
    job(name="test.job")(write)
    given = assigned(run, effect_lock="schedule:7")
    context = given.context()
    context.cancel("the node is stopping", reason="shutdown")
    with another_session() as session:
        session.set_autocommit(False)
        assert EffectLock(session, "distcron", "schedule:7").try_take() is True
        outcome = execute(
            given, context=context, output_limit_bytes=1000, transact=run_in_transaction
        )
    assert (outcome.state, outcome.reason, has_effect()) == ("cancelled", "shutdown", False)


@pytest.mark.databases("postgresql", "mysql")
@pytest.mark.parametrize("body", [write, lambda: 1 / 0], ids=["success", "failure"])
def test_the_lock_is_free_after_the_attempt(body: Callable[[], Any]) -> None:
    attempt(running(), body, effect_lock="schedule:7")
    with another_session() as session:
        session.set_autocommit(False)
        assert EffectLock(session, "distcron", "schedule:7").try_take() is True


@pytest.mark.databases("postgresql", "mysql")
def test_when_its_session_is_ended_the_lock_and_the_writes_go_together() -> None:
    run = running()
    freed: list[bool] = []

    def body() -> None:
        write()
        with another_session() as session:
            session.set_autocommit(False)
            lock = EffectLock(session, "distcron", "schedule:7")
            assert lock.try_take() is False
            end_session(session)
            wait_for(lock.try_take, 10, "the lock of the session that was ended")
            freed.append(True)
            with session.cursor() as cursor:
                cursor.execute("SELECT count(*) FROM auth_group")
                assert cursor.fetchone() == (0,)
            lock.free()

    outcome = attempt(run, body, effect_lock="schedule:7")
    assert freed == [True]
    assert (outcome.state, outcome.committed) == ("failed", False)
    assert (has_effect(), state_of(run)) == (False, "running")


def end_session(other: Any) -> None:
    """Let the server end the session of this thread's connection."""
    identify, end = {
        "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend(%s)"),
        "mysql": ("SELECT CONNECTION_ID()", "KILL %s"),
    }[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(identify)
        (number,) = cursor.fetchone()
    with other.cursor() as cursor:
        cursor.execute(end, [number])


@pytest.mark.databases("postgresql", "mysql")
def test_the_lock_is_none_of_those_that_the_nodes_hold() -> None:
    """A node holds the schedule's lock itself, in another session."""
    node = DatabaseLockBackend("default", "distcron")
    try:
        assert node.acquire({"schedule:7": "token"}, 10_000)
        assert attempt(running(), write, effect_lock="schedule:7").committed is True
    finally:
        node.close()


# What the transaction asks of the database


@pytest.mark.databases("postgresql")
@pytest.mark.parametrize(("before", "within"), [("off", "on"), ("remote_apply", "remote_apply")])
def test_the_commit_is_durable_whatever_the_session_says(before: str, within: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET synchronous_commit = {before}")

    def body() -> str:
        with connection.cursor() as cursor:
            cursor.execute("SHOW synchronous_commit")
            return str(cursor.fetchone()[0])

    try:
        assert attempt(running(), body).result == within
    finally:
        connection.close()


def test_without_a_transaction_to_run_in_nothing_is_run() -> None:
    run = running()
    job(name="test.job")(write)
    given = assigned(run)
    with pytest.raises(ValueError, match="no transaction to run in"):
        execute(given, context=given.context(), output_limit_bytes=1000)
    assert has_effect() is False


class Elsewhere:
    """A router that keeps the tables of this app in another database."""

    def db_for_write(self, model: Any, **_: object) -> str | None:
        return "elsewhere" if model._meta.app_label == "distcron" else None


def test_a_router_that_sends_the_models_elsewhere_is_an_error(settings: Any) -> None:
    settings.DATABASE_ROUTERS = ["tests.integration.test_transactional.Elsewhere"]
    assert "'elsewhere'" in atomicity.setting_problem()
    with pytest.raises(Exception, match=r"distcron\.E040"):
        call_command("check", "--tag", "distcron")


def test_a_schedule_cannot_ask_for_what_the_database_cannot_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = make_schedule()
    schedule.delivery = "transactional"
    schedule.full_clean()
    monkeypatch.setattr(
        "distcron_app.models.schedules.atomicity_problem", lambda: "the tables are MyISAM"
    )
    with pytest.raises(ValidationError) as caught:
        schedule.full_clean()
    assert caught.value.message_dict == {
        "delivery": [
            "“transactional” cannot work here: the tables are MyISAM. Choose another delivery."
        ]
    }


def test_a_database_that_does_not_answer_is_no_problem_of_a_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away() -> str:
        raise OperationalError("connection refused")

    schedule = make_schedule()
    schedule.delivery = "transactional"
    monkeypatch.setattr("distcron_app.models.schedules.atomicity_problem", away)
    schedule.full_clean()


@pytest.mark.databases("mysql")
def test_a_default_of_myisam_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert atomicity.atomicity_problem() == ""
    monkeypatch.setitem(connection.features.__dict__, "supports_transactions", False)
    assert "MyISAM" in atomicity.atomicity_problem()
    outcome = attempt(running(), write)
    assert (outcome.state, has_effect()) == ("failed", False)
