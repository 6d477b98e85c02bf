"""The checker finds each kind of wrong history, and nothing in a right one."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from distcron_app.lifecycle import TRANSITIONS
from tests.system.checker import (
    Evidence,
    Mark,
    Planned,
    RunRow,
    Transition,
    every,
    violations,
)

pytestmark = pytest.mark.system

FIRST = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
SECOND = FIRST + timedelta(seconds=1)
THIRD = FIRST + timedelta(seconds=2)


def a_run(number: int, at: datetime, state: str = "succeeded", **values: Any) -> RunRow:
    values = {"fencing_token": number, **values}
    return RunRow(id=number, schedule_id=7, scheduled_at=at, state=state, **values)


def marks(number: int, at: datetime, began: float, **values: Any) -> tuple[Mark, Mark]:
    values = {"attempt": 1, "fencing_token": number, "ended": began + 0.1, **values}
    effect = Mark(kind="effect", schedule_id=7, scheduled_at=at, node_pid=1, began=began, **values)
    return dataclasses.replace(effect, kind="begin", ended=began), effect


def changes(number: int, *states: str, token: int | None = None) -> list[Transition]:
    return [
        Transition(
            run_id=number,
            schedule_id=7,
            before=before,
            after=after,
            fencing_token=token or number,
        )
        for before, after in zip(("", *states), states, strict=False)
    ]


RAN = ("claimed", "running", "succeeded")


def a_history(delivery: str = "at_most_once", **values: Any) -> Evidence:
    """Two instants that both ran once, with some of it replaced."""
    right: dict[str, Any] = {
        "planned": (Planned(schedule_id=7, delivery=delivery, instants=(FIRST, SECOND)),),
        "runs": (a_run(1, FIRST), a_run(2, SECOND)),
        "marks": (*marks(1, FIRST, 10.0), *marks(2, SECOND, 11.0)),
        "transitions": (*changes(1, *RAN), *changes(2, *RAN)),
    }
    return Evidence(**{**right, **values})


def found(evidence: Evidence) -> set[str]:
    """Return the numbers of the rules that were broken."""
    return {line.split()[0] for line in violations(evidence, TRANSITIONS)}


def test_a_right_history_has_no_violations() -> None:
    assert violations(a_history(), TRANSITIONS) == []
    assert violations(a_history("at_least_once"), TRANSITIONS) == []


def test_every_lists_the_instants_before_the_end() -> None:
    assert every(1, FIRST, THIRD) == (FIRST, SECOND)


def test_a_second_effect_under_at_most_once_is_found() -> None:
    twice = (*marks(1, FIRST, 10.0), *marks(1, FIRST, 10.5), *marks(2, SECOND, 11.0))
    assert found(a_history(marks=twice)) == {"I1"}


def test_a_second_start_without_an_effect_is_found() -> None:
    begin, _ = marks(1, FIRST, 10.5)
    assert found(a_history(marks=(*a_history().marks, begin))) == {"I1"}


def test_an_instant_without_a_row_is_found() -> None:
    evidence = a_history(
        runs=(a_run(1, FIRST),), marks=marks(1, FIRST, 10.0), transitions=(*changes(1, *RAN),)
    )
    assert found(evidence) == {"I2"}


def test_two_rows_of_one_instant_are_found() -> None:
    doubled = (*a_history().runs, a_run(3, SECOND))
    assert found(a_history(runs=doubled)) == {"I2"}


def test_a_row_of_an_instant_that_nobody_planned_is_found() -> None:
    evidence = a_history(
        runs=(*a_history().runs, a_run(3, THIRD)),
        marks=(*a_history().marks, *marks(3, THIRD, 12.0)),
        transitions=(*a_history().transitions, *changes(3, *RAN)),
    )
    assert found(evidence) == {"I2"}


def test_a_span_covers_its_instants() -> None:
    evidence = a_history(runs=(a_coalesced(count=2), a_run(2, THIRD)), **_after_a_span())
    assert found(evidence) == set()


def test_a_span_that_counts_wrong_is_found() -> None:
    evidence = a_history(runs=(a_coalesced(count=3), a_run(2, THIRD)), **_after_a_span())
    assert found(evidence) == {"I2"}


def a_coalesced(count: int) -> RunRow:
    span = {"first_at": FIRST.isoformat(), "last_at": SECOND.isoformat(), "count": count}
    return a_run(1, FIRST, "skipped", reason="coalesced", details=span, attempt=0)


def _after_a_span() -> dict[str, Any]:
    instants = (FIRST, SECOND, THIRD)
    return {
        "planned": (Planned(schedule_id=7, delivery="at_most_once", instants=instants),),
        "marks": marks(2, THIRD, 12.0),
        "transitions": (*changes(1, "skipped"), *changes(2, *RAN)),
    }


def test_an_effect_of_a_run_that_never_started_is_found() -> None:
    never = (*changes(1, *RAN), *changes(2, "claimed"))
    assert found(a_history(transitions=never)) == {"I3"}


def test_an_effect_under_a_token_that_never_started_is_found() -> None:
    wrong = (*marks(1, FIRST, 10.0), *marks(9, SECOND, 11.0))
    assert found(a_history(marks=wrong)) == {"I3"}


def test_a_success_without_an_effect_is_found() -> None:
    assert found(a_history(marks=marks(1, FIRST, 10.0))) == {"I4"}


def test_a_loss_without_a_reason_is_found() -> None:
    evidence = a_history(
        runs=(a_run(1, FIRST), a_run(2, SECOND, "lost")),
        marks=marks(1, FIRST, 10.0),
        transitions=(*changes(1, *RAN), *changes(2, "claimed", "running", "lost")),
    )
    assert found(evidence) == {"I4"}


def test_a_loss_with_a_reason_is_right() -> None:
    evidence = a_history(
        runs=(a_run(1, FIRST), a_run(2, SECOND, "lost", reason="node_died")),
        marks=marks(1, FIRST, 10.0),
        transitions=(*changes(1, *RAN), *changes(2, "claimed", "running", "lost")),
    )
    assert found(evidence) == set()


def test_a_skip_that_had_an_effect_is_found() -> None:
    skipped = a_run(2, SECOND, "skipped", reason="overlap", details={"blocked_by": 1})
    assert found(a_history(runs=(a_run(1, FIRST), skipped))) == {"I4"}


def test_a_skip_for_a_run_that_does_not_exist_is_found() -> None:
    skipped = a_run(2, SECOND, "skipped", reason="overlap", details={"blocked_by": 99})
    evidence = a_history(
        runs=(a_run(1, FIRST), skipped),
        marks=marks(1, FIRST, 10.0),
        transitions=(*changes(1, *RAN), *changes(2, "skipped")),
    )
    assert found(evidence) == {"I4"}


LEDGER = ((7, FIRST), (7, SECOND))


def test_a_transactional_run_has_one_row_in_the_ledger_where_it_succeeded() -> None:
    assert found(a_history("transactional", ledger=LEDGER)) == set()
    assert found(a_history("transactional", ledger=LEDGER[:1])) == {"I6"}
    assert found(a_history("transactional", ledger=(*LEDGER, LEDGER[0]))) == {"I6"}


def test_a_transactional_run_that_failed_has_none() -> None:
    runs = (a_run(1, FIRST), a_run(2, SECOND, "failed", reason="error"))
    changed = (*changes(1, *RAN), *changes(2, "claimed", "running", "failed"))
    history = a_history("transactional", runs=runs, transitions=changed, ledger=LEDGER[:1])
    assert found(history) == set()
    assert found(dataclasses.replace(history, ledger=LEDGER)) == {"I6"}


def test_a_second_effect_under_at_least_once_needs_a_second_attempt() -> None:
    twice = (*marks(1, FIRST, 10.0), *marks(1, FIRST, 10.5), *marks(2, SECOND, 11.0))
    assert found(a_history("at_least_once", marks=twice)) == {"I5"}


def test_an_attempt_without_a_recovery_is_found() -> None:
    evidence = a_history("at_least_once", runs=(a_run(1, FIRST, attempt=2), a_run(2, SECOND)))
    assert found(evidence) == {"I5"}


def test_a_recovered_run_is_right() -> None:
    recovered = a_run(1, FIRST, attempt=2, recoveries=1, fencing_token=2)
    second = a_run(2, SECOND, fencing_token=3)
    evidence = a_history(
        "at_least_once",
        runs=(recovered, second),
        marks=(
            *marks(1, FIRST, 10.0, ended=14.0),
            *marks(2, FIRST, 13.0, attempt=2),
            *marks(3, SECOND, 15.0),
        ),
        transitions=(
            *changes(1, "running", "queued"),
            *changes(1, "queued", "claimed", "running", "succeeded", token=2)[1:],
            *changes(2, "running", "succeeded", token=3),
        ),
    )
    assert found(evidence) == set()


def test_a_start_with_a_smaller_fencing_token_is_found() -> None:
    evidence = a_history(
        runs=(a_run(1, FIRST, fencing_token=5), a_run(2, SECOND, fencing_token=4)),
        marks=(*marks(5, FIRST, 10.0), *marks(4, SECOND, 11.0)),
        transitions=(*changes(1, *RAN, token=5), *changes(2, *RAN, token=4)),
    )
    assert found(evidence) == {"I7"}


def test_a_final_state_that_changed_is_found() -> None:
    evidence = a_history(transitions=(*changes(1, *RAN, "failed"), *changes(2, *RAN)))
    assert found(evidence) == {"I8", "I12"}


@pytest.mark.parametrize("settled", ["succeeded", "failed", "cancelled"])
def test_a_lost_run_may_be_settled_late(settled: str) -> None:
    late = (*changes(1, "claimed", "running", "lost", settled), *changes(2, *RAN))
    assert found(a_history(transitions=late)) == set()


def test_two_jobs_of_one_schedule_at_a_time_are_found() -> None:
    beside = (*marks(1, FIRST, 10.0, ended=11.5), *marks(2, SECOND, 11.0))
    assert found(a_history(marks=beside)) == {"I9"}


def test_a_job_may_run_on_beside_the_next_after_its_node_was_taken_for_dead() -> None:
    beside = (*marks(1, FIRST, 10.0, ended=11.5), *marks(2, SECOND, 11.0))
    evidence = a_history(
        runs=(a_run(1, FIRST, late=True), a_run(2, SECOND)),
        marks=beside,
        transitions=(*changes(1, "claimed", "running", "lost", "succeeded"), *changes(2, *RAN)),
    )
    assert found(evidence) == set()


@pytest.mark.parametrize(
    "left",
    [{"lock_keys": ("schedule:7",)}, {"processes": (4242,)}],
    ids=["lock", "process"],
)
def test_what_is_left_after_the_drain_is_found(left: dict[str, Any]) -> None:
    assert found(a_history(**left)) == {"I11"}


def test_an_open_run_after_the_drain_is_found() -> None:
    evidence = a_history(runs=(a_run(1, FIRST), a_run(2, SECOND, "running")))
    assert "I11" in found(evidence)


def test_a_change_outside_the_table_is_found() -> None:
    jumped = (*changes(1, *RAN), *changes(2, "queued", "running", "succeeded"))
    assert found(a_history(transitions=jumped)) == {"I12"}
