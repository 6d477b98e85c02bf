"""What running jobs tell: who may write it, what becomes of it, and what a later attempt gets."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from distcron_app import lifecycle
from distcron_app.clock import Clock
from distcron_app.executors import Checkpointed, Printed, Progressed
from distcron_app.instants import database_now
from distcron_app.lifecycle import ClaimedRun
from distcron_app.locks import new_owner_token
from distcron_app.models import Attempt, Run, RunOutput, Schedule
from distcron_app.news import News
from distcron_app.scheduler import _assignment
from tests.factories import make_node, make_schedule
from tests.integration.test_lifecycle import bury, report, started_run
from tests.integration.test_retries import again, failed, started

pytestmark = pytest.mark.django_db


def tokens(*runs: ClaimedRun) -> dict[int, tuple[int, str]]:
    return {run.run_id: (run.fencing_token, run.owner_token) for run in runs}


def output_of(run: ClaimedRun) -> str | None:
    return RunOutput.objects.filter(pk=run.run_id).values_list("output", flat=True).first()


def checkpoint_of(run: ClaimedRun) -> Any:
    return Run.objects.values_list("checkpoint", flat=True).get(pk=run.run_id)


def recovered(run: ClaimedRun) -> ClaimedRun:
    """Claim a run for another node whose own is declared dead; it is not started yet."""
    first = Run.objects.select_related("node").get(pk=run.run_id).node
    assert first is not None
    bury(first)
    assert lifecycle.recover().requeued == (run.run_id,)
    (second,) = lifecycle.claim_queued({run.run_id: new_owner_token()}, make_node().pk).runs
    return second


class TestWriting:
    def test_a_checkpoint_and_the_output_are_stored_while_the_job_runs(self) -> None:
        run = started_run(make_node())
        lifecycle.store_checkpoints({run.run_id: {"page": 3}}, tokens(run))
        lifecycle.store_live_output({run.run_id: "page 3\n"}, tokens(run))
        assert (checkpoint_of(run), output_of(run)) == ({"page": 3}, "page 3\n")
        lifecycle.store_checkpoints({run.run_id: {"page": 4}}, tokens(run))
        lifecycle.store_live_output({run.run_id: "page 3\npage 4\n"}, tokens(run))
        assert (checkpoint_of(run), output_of(run)) == ({"page": 4}, "page 3\npage 4\n")

    @pytest.mark.parametrize("moved", [{"fencing_token": 99}, {"owner_token": "x"}, {"state": ""}])
    def test_a_node_that_is_not_the_owner_writes_nothing(self, moved: dict[str, Any]) -> None:
        run = started_run(make_node())
        state = {"state": "lost"} if "state" in moved else moved
        Run.objects.filter(pk=run.run_id).update(**state)
        lifecycle.store_checkpoints({run.run_id: {"page": 3}}, tokens(run))
        lifecycle.store_live_output({run.run_id: "page 3\n"}, tokens(run))
        assert (checkpoint_of(run), output_of(run)) == (None, None)

    def test_it_costs_the_same_for_many_runs_as_for_one(self) -> None:
        node = make_node()

        def statements(runs: list[ClaimedRun]) -> int:
            with CaptureQueriesContext(
                connection,
            ) as captured:
                lifecycle.store_checkpoints({run.run_id: 1 for run in runs}, tokens(*runs))
                lifecycle.store_live_output({run.run_id: "x" for run in runs}, tokens(*runs))
            return len(captured)

        assert statements([started_run(node)]) == statements([started_run(node) for _ in range(9)])

    def test_the_final_text_takes_the_place_of_the_output_so_far(self) -> None:
        run = started_run(make_node())
        lifecycle.store_live_output({run.run_id: "one\n"}, tokens(run))
        lifecycle.finish([report(run, output="one\ntwo\n")])
        assert output_of(run) == "one\ntwo\n"


class TestCrash:
    def test_a_lost_run_keeps_what_it_told_last(self) -> None:
        node = make_node()
        run = started_run(node)
        lifecycle.store_checkpoints({run.run_id: {"page": 3}}, tokens(run))
        lifecycle.store_live_output({run.run_id: "page 3\n"}, tokens(run))
        bury(node)
        assert lifecycle.recover().lost == (run.run_id,)
        assert (checkpoint_of(run), output_of(run)) == ({"page": 3}, "page 3\n")

    def test_a_recovery_gets_the_checkpoint_and_knows_what_it_goes_on_with(self) -> None:
        node = make_node(name="web-1")
        run = started_run(node, delivery="at_least_once")
        lifecycle.store_checkpoints({run.run_id: {"page": 3}}, tokens(run))
        lifecycle.report_progress({run.run_id: (40.0, "page 3")}, tokens(run))
        context = _assignment(recovered(run), "", None, "").context()
        earlier = context.recovered_from
        assert earlier is not None
        assert (earlier.number, earlier.node, earlier.reason) == (1, "web-1", "node_died")
        assert (earlier.progress_percent, earlier.progress_message) == (40.0, "page 3")
        assert earlier.checkpoint == context.last_checkpoint == {"page": 3}
        assert (context.attempt, context.is_recovery) == (2, True)

    def test_the_attempt_of_a_recovery_begins_with_an_empty_output(self) -> None:
        run = started_run(make_node(), delivery="at_least_once")
        lifecycle.store_live_output({run.run_id: "page 3\n"}, tokens(run))
        second = recovered(run)
        assert output_of(run) == "page 3\n"
        owner = Run.objects.values_list("node", flat=True).get(pk=run.run_id)
        assert lifecycle.start([second], owner) == {run.run_id}  # type: ignore[arg-type]
        assert output_of(run) is None
        lifecycle.finish([report(second)])
        assert output_of(run) is None

    def test_a_start_that_is_refused_keeps_the_output(self) -> None:
        run = started_run(make_node(), delivery="at_least_once")
        lifecycle.store_live_output({run.run_id: "page 3\n"}, tokens(run))
        second = recovered(run)
        dead = make_node()
        bury(dead)
        assert lifecycle.start([second], dead.pk) == set()
        assert output_of(run) == "page 3\n"

    def test_a_first_start_asks_nothing_about_outputs(self) -> None:
        node = make_node()
        (run,) = lifecycle.claim_queued(
            {lifecycle.queue_manual(make_schedule(), by="x").pk: new_owner_token()}, node.pk
        ).runs
        with CaptureQueriesContext(connection) as captured:
            lifecycle.start([run], node.pk)
        assert not [each for each in captured if "runoutput" in each["sql"]]


class TestLaterAttempts:
    def test_a_retry_gets_the_checkpoint_and_is_no_recovery(self) -> None:
        node = make_node()
        run = started(node)
        lifecycle.store_checkpoints({run.run_id: [7]}, tokens(run))
        lifecycle.finish([failed(run)])
        context = _assignment(again(node, run.run_id), "", None, "").context()
        assert (context.last_checkpoint, context.recovered_from) == ([7], None)
        assert (context.attempt, context.is_recovery) == (2, False)

    def test_a_retry_after_a_recovery_is_no_recovery(self) -> None:
        node = make_node()
        run = started(node, delivery="at_least_once")
        lifecycle.recover_owned([run], reason="worker_died", unknown="failed", detail="")
        second = again(node, run.run_id)
        assert _assignment(second, "", None, "").context().is_recovery is True
        lifecycle.finish([failed(second)])
        context = _assignment(again(node, run.run_id), "", None, "").context()
        assert (context.attempt, context.is_recovery) == (3, False)

    def test_a_run_that_a_person_starts_again_gets_the_checkpoint(self) -> None:
        node = make_node()
        run = started_run(node)
        lifecycle.store_checkpoints({run.run_id: [7]}, tokens(run))
        bury(node)
        lifecycle.recover()
        assert lifecycle.queue_again(run.run_id) is not None
        other = make_node()
        (second,) = lifecycle.claim_queued({run.run_id: new_owner_token()}, other.pk).runs
        context = _assignment(second, "", None, "").context()
        # It was cut off, so its work may be half done.
        assert (context.last_checkpoint, context.is_recovery) == ([7], True)

    def test_a_success_forgets_the_checkpoint_and_a_failure_keeps_it(self) -> None:
        node = make_node()
        good, bad = started_run(node), started_run(node)
        lifecycle.store_checkpoints({good.run_id: 1, bad.run_id: 2}, tokens(good, bad))
        lifecycle.finish([report(good), report(bad, state="failed", reason="error")])
        assert (checkpoint_of(good), checkpoint_of(bad)) == (None, 2)

    def test_a_first_attempt_knows_of_none(self) -> None:
        context = _assignment(started_run(make_node()), "", None, "").context()
        assert (context.recovered_from, context.last_checkpoint) == (None, None)

    def test_claims_read_earlier_attempts_by_one_query_and_only_where_there_are_some(self) -> None:
        node = make_node()
        runs = [started(node) for _ in range(4)]
        lifecycle.finish([failed(run) for run in runs])
        Run.objects.update(due_at=database_now())
        fresh = lifecycle.queue_manual(make_schedule(), by="x")

        def asked(*run_ids: int) -> int:
            with CaptureQueriesContext(connection) as captured:
                lifecycle.claim_queued({pk: new_owner_token() for pk in run_ids}, node.pk)
            return len([each for each in captured if "FROM" in each["sql"] and _is_read(each)])

        assert asked(*(run.run_id for run in runs)) == 1
        assert asked(fresh.pk) == 0


def _is_read(query: dict[str, str]) -> bool:
    return "distcron_attempt" in query["sql"] and query["sql"].startswith("SELECT")


class TestRecoveries:
    @pytest.mark.parametrize("delivery", ["at_least_once", "transactional"])
    @pytest.mark.parametrize("limit", [0, 1, 3])
    def test_a_run_is_recovered_as_often_as_its_schedule_allows(
        self, limit: int, delivery: str
    ) -> None:
        run = started_run(make_node(), delivery=delivery, max_recoveries=limit)
        for number in range(limit):
            second = recovered(run)
            owner = Run.objects.values_list("node", flat=True).get(pk=run.run_id)
            lifecycle.start([second], owner)  # type: ignore[arg-type]
            assert Run.objects.get().recoveries == number + 1
        node = Run.objects.select_related("node").get().node
        assert node is not None
        bury(node)
        assert lifecycle.recover().lost == (run.run_id,)

    def test_the_limit_is_the_one_at_the_moment_of_the_recovery(self) -> None:
        node = make_node()
        run = started_run(node, delivery="at_least_once", max_recoveries=1)
        Schedule.objects.update(max_recoveries=0)
        bury(node)
        assert lifecycle.recover().lost == (run.run_id,)

    def test_a_run_whose_schedule_is_gone_is_not_started_again(self) -> None:
        node = make_node()
        run = started_run(node, delivery="at_least_once")
        Schedule.objects.all().delete()
        bury(node)
        assert lifecycle.recover().lost == (run.run_id,)

    def test_the_limit_has_a_limit(self) -> None:
        schedule = make_schedule()
        schedule.max_recoveries = 101
        with pytest.raises(ValidationError) as caught:
            schedule.full_clean()
        assert caught.value.message_dict == {"max_recoveries": ["At most 100; 0 is never again."]}


class HandClock(Clock):
    """A clock that the test moves."""

    seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


class TestNews:
    """What a node keeps between the workers and the database."""

    def test_the_newest_of_each_run_is_written_once_a_second(self) -> None:
        run = started_run(make_node())
        clock, mine = HandClock(), tokens(run)
        news = News(clock)
        for page in range(5):
            news.take(Checkpointed(run.run_id, page))
            news.take(Printed(run.run_id, f"page {page}\n"))
            news.take(Progressed(run.run_id, float(page), ""))
            news.write(lambda _ids: mine)
        assert (checkpoint_of(run), output_of(run)) == (0, "page 0\n")
        assert 0 < news.wait_seconds <= 1
        clock.seconds += 1
        news.write(lambda _ids: mine)
        assert (checkpoint_of(run), output_of(run)) == (4, "page 4\n")
        assert Run.objects.get().progress_percent == 4
        assert news.wait_seconds == float("inf")

    def test_what_is_about_a_run_that_ends_is_written_at_once(self) -> None:
        run, other = started_run(make_node()), started_run(make_node())
        news = News(HandClock())
        news.take(Checkpointed(run.run_id, 1))
        news.write(lambda _ids: tokens(run))
        news.take(Checkpointed(run.run_id, 2))
        news.take(Checkpointed(other.run_id, 3))
        news.ended(run.run_id, succeeded=False)
        news.write(lambda _ids: tokens(run, other), now={run.run_id})
        assert (checkpoint_of(run), checkpoint_of(other)) == (2, None)

    def test_what_the_database_did_not_take_is_written_later(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = started_run(make_node())
        clock = HandClock()
        news = News(clock)
        news.take(Checkpointed(run.run_id, 1))

        def away(*_: object) -> None:
            raise OperationalError("away")

        with monkeypatch.context() as patched:
            patched.setattr(lifecycle, "store_checkpoints", away)
            with pytest.raises(OperationalError):
                news.write(lambda _ids: tokens(run))
        clock.seconds += 1
        news.write(lambda _ids: tokens(run))
        assert checkpoint_of(run) == 1

    def test_nothing_of_a_run_that_is_forgotten_is_written(self) -> None:
        run = started_run(make_node())
        news = News(HandClock())
        news.take(Checkpointed(run.run_id, 1))
        news.forget([run.run_id])
        news.write(lambda _ids: tokens(run), now={run.run_id})
        assert checkpoint_of(run) is None

    def test_a_failed_attempt_s_last_checkpoint_is_there_for_the_next(self) -> None:
        node = make_node()
        run = started(node)
        news = News(HandClock())
        news.take(Checkpointed(run.run_id, "late"))
        news.ended(run.run_id, succeeded=False)
        news.write(lambda _ids: tokens(run), now={run.run_id})
        lifecycle.finish([failed(run)])
        assert again(node, run.run_id).checkpoint == "late"


def test_the_progress_of_an_ended_attempt_is_kept_with_it() -> None:
    node = make_node()
    run = started(node)
    lifecycle.report_progress({run.run_id: (40.0, "page 3")}, tokens(run))
    lifecycle.finish([failed(run)])
    attempt = Attempt.objects.get()
    assert (attempt.progress_percent, attempt.progress_message) == (40.0, "page 3")
