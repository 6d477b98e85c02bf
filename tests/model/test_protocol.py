"""The protocol as built breaks nothing; without any one of its guards something breaks.

DISTCRON_MODEL=deep adds the larger configurations; ``make test-model`` runs them and prints
what each explored and how each guard's absence is found.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from distcron_app.lifecycle import TRANSITIONS
from distcron_app.models import Run
from tests.model.explorer import Explored, explore
from tests.model.protocol import FAULTS, GUARDS, Protocol
from tests.model.world import ACTIVE, OPEN, World

AGAIN = "at_least_once"
PEOPLE = frozenset({"release", "cancel", "again", "slow"})
# The default: two processes, one occurrence, at_most_once; crash, slow and unanswered.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "nothing fails": {"faults": 0, "occurrences": 2},
    "locks fail, one fault": {"faults": 1},
    "locks fail, at least once, people": {"faults": 1, "delivery": AGAIN, "kinds": PEOPLE},
    "a planted lock": {"faults": 1, "redis": "steady", "kinds": frozenset({"plant", "crash"})},
    "no Redis, two faults": {"redis": "away"},
    "no Redis, two faults, at least once": {"redis": "away", "delivery": AGAIN},
    "people": {"redis": "away", "kinds": PEOPLE},
    "people, at least once": {"redis": "away", "kinds": PEOPLE, "delivery": AGAIN},
    "two occurrences, edits and pruning": {
        "redis": "away",
        "occurrences": 2,
        "prunes": True,
        "kinds": frozenset({"edit", "edit_back"}),
    },
    "two occurrences, one fault, pruning": {
        "redis": "away",
        "occurrences": 2,
        "prunes": True,
        "faults": 1,
        "kinds": frozenset({"crash", "unanswered", "edit_back"}),
    },
    "retries, workers and maintenance": {
        "redis": "away",
        "max_attempts": 2,
        "faults": 1,
        "delivery": AGAIN,
        "kinds": frozenset({"slow", "worker", "give_back"}),
    },
    "three processes": {
        "redis": "away",
        "processes": 3,
        "faults": 1,
        "kinds": frozenset({"slow", "crash"}),
    },
    "two schedules": {
        "redis": "away",
        "schedules": 2,
        "faults": 1,
        "kinds": frozenset({"crash"}),
    },
}
DEEP: dict[str, dict[str, Any]] = {
    "locks fail, two faults": {},
    "locks fail, two faults, at least once": {"delivery": AGAIN},
    "no Redis, three faults": {"redis": "away", "faults": 3},
    "no Redis, three faults, at least once": {
        "redis": "away",
        "faults": 3,
        "delivery": AGAIN,
    },
    "people, three faults": {
        "redis": "away",
        "faults": 3,
        "kinds": PEOPLE | {"crash", "unanswered", "edit"},
    },
    "people, three faults, at least once": {
        "redis": "away",
        "faults": 3,
        "kinds": PEOPLE | {"crash"},
        "delivery": AGAIN,
    },
    "two occurrences, two faults, pruning": {
        "redis": "away",
        "occurrences": 2,
        "prunes": True,
        "kinds": frozenset({"crash", "slow", "unanswered", "edit_back"}),
    },
    "retries, two faults": {
        "redis": "away",
        "max_attempts": 2,
        "delivery": AGAIN,
        "kinds": frozenset({"slow", "worker", "give_back", "cancel"}),
    },
    "three processes, two faults": {"redis": "away", "processes": 3},
    "three processes, two occurrences": {
        "redis": "away",
        "processes": 3,
        "occurrences": 2,
        "faults": 1,
        "kinds": frozenset({"slow", "crash"}),
    },
    "two schedules, any fault": {"redis": "away", "schedules": 2, "faults": 1},
}
IS_DEEP = os.environ.get("DISTCRON_MODEL") == "deep"

TOO_OFTEN = "at_most_once: a job begins no more often than it may"
# What breaks without a guard, and the smallest setting in which it does.
WITHOUT: list[tuple[str, str, dict[str, Any]]] = [
    ("unique row", TOO_OFTEN, {"faults": 1, "kinds": {"edit_back"}}),
    ("compare-and-set of next_run_at", TOO_OFTEN, {"faults": 0, "occurrences": 2, "prunes": True}),
    (
        "one transaction for next_run_at and row",
        "every instant that next_run_at has passed has its row",
        {"faults": 1, "kinds": {"crash"}},
    ),
    (
        "compare-and-set of the start",
        TOO_OFTEN,
        {"faults": 1, "kinds": {"release"}, "only": TOO_OFTEN},
    ),
    (
        "tokens at the start",
        "only the owner of a claim starts it",
        {"faults": 1, "kinds": {"release"}},
    ),
    (
        "lease at the start",
        "a node that was declared dead starts nothing",
        {"faults": 1, "kinds": {"slow"}},
    ),
    (
        "tokens at the finish",
        "at most one live attempt may still write",
        {"faults": 1, "kinds": {"slow"}, "delivery": AGAIN},
    ),
    (
        "state at the finish",
        "succeeded does not become succeeded",
        {"faults": 1, "kinds": {"unanswered"}},
    ),
    (
        "owner token at the release",
        "a lock is ended by its owner alone",
        {"faults": 0, "redis": "fails"},
    ),
    ("dead node before recovery", "without a fault nothing is lost", {"faults": 0}),
    ("delivery at the recovery", TOO_OFTEN, {"faults": 1, "kinds": {"slow"}}),
    (
        "limit of recoveries",
        "at_least_once: a job begins no more often than it may",
        {"faults": 2, "kinds": {"slow"}, "delivery": AGAIN},
    ),
    (
        "overlap",
        "never more active runs than the policy allows",
        {"faults": 0, "occurrences": 2},
    ),
    ("recovery", "stuck", {"faults": 1, "kinds": {"crash"}}),
    ("strays", "stuck", {"faults": 1, "kinds": {"unanswered"}}),
    (
        "read back",
        "no job begins without its row",
        {"faults": 1, "kinds": {"unanswered"}, "delivery": AGAIN},
    ),
    ("backstop", "stuck", {"faults": 1, "kinds": {"plant"}, "redis": "steady"}),
    (
        "growing fencing token",
        "fencing tokens grow from start to start",
        {"faults": 0, "occurrences": 2},
    ),
    (
        "new instants only",
        TOO_OFTEN,
        {"faults": 1, "kinds": {"edit_back"}, "occurrences": 2, "prunes": True},
    ),
]
# Of the table of transitions; nothing here is spread, queued by hand, or expires.
NOT_MODELLED = {("", "queued"), ("queued", "skipped")}


def run(protocol: Protocol, *, with_twins: bool = True) -> Explored[World]:
    return explore(
        protocol.initial(),
        steps=protocol.steps,
        broken=protocol.broken,
        is_end=protocol.is_end,
        twins=protocol.twins if with_twins else None,
    )


@pytest.mark.parametrize("name", [*CONFIGURATIONS, *(DEEP if IS_DEEP else [])])
def test_the_protocol_as_built_holds(name: str) -> None:
    found = run(Protocol(**(CONFIGURATIONS | DEEP)[name]))
    print(f"\n{name}: {found}")
    assert not found.broken, str(found)


@pytest.mark.parametrize(("guard", "broken", "setting"), WITHOUT, ids=[row[0] for row in WITHOUT])
def test_without_a_guard_something_breaks(guard: str, broken: str, setting: dict[str, Any]) -> None:
    setting = {"redis": "away"} | setting | {"kinds": frozenset(setting.get("kinds", ()))}
    found = run(Protocol(**setting, without=frozenset({guard})), with_twins=False)
    print(f"\nwithout {guard}, {found}")
    assert found.broken == broken
    assert found.trace
    # With the guard the same setting breaks nothing: it is the guard that was missing.
    assert not run(Protocol(**setting)).broken


def test_each_guard_is_taken_out_once_and_each_fault_happens() -> None:
    assert {guard for guard, _, _ in WITHOUT} == GUARDS
    default = Protocol().kinds
    happen = (setting.get("kinds", default) for setting in CONFIGURATIONS.values())
    assert frozenset().union(*happen) == FAULTS


def test_the_model_changes_states_as_the_code_does() -> None:
    written: set[tuple[str, str]] = set()
    kinds = frozenset({"slow", "worker", "cancel", "again"})
    for occurrences, delivery in ((1, "at_most_once"), (1, AGAIN), (2, "at_most_once")):
        protocol = Protocol(
            redis="away",
            processes=1 if occurrences == 2 else 2,
            occurrences=occurrences,
            delivery=delivery,
            max_attempts=2,
            kinds=kinds if occurrences == 1 else frozenset(),
        )
        assert not run(protocol).broken
        written |= protocol.written
    table = {(old, new) for old, news in TRANSITIONS.items() for new in news}
    assert written | NOT_MODELLED == table
    assert not written & NOT_MODELLED


def test_the_model_knows_the_states_of_the_code() -> None:
    assert (ACTIVE, OPEN) == (Run.ACTIVE_STATES, Run.OPEN_STATES)
