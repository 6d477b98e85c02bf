"""The explorer itself, on graphs small enough to see."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.model.explorer import Explored, Step, explore

# From each state to its steps; the ones in capitals are faults.
GRAPH = {
    0: {"a": 1, "b": 2},
    1: {"c": 3},
    2: {"d": 4, "e": 3},
    3: {"f": 5, "FAULT": 6},
    4: {"g": 3},
    5: {},
    6: {"h": 6},
}


def search(*, broken: int | None = None, end: int = 5, **options: int) -> Explored[int]:
    def steps(state: int) -> Iterator[Step[int]]:
        for label, after in GRAPH[state].items():
            yield Step(label, label.isupper(), after)

    return explore(
        0,
        steps=steps,
        broken=lambda state: "wrong" if state == broken else "",
        is_end=lambda state: state == end,
        **options,
    )


def test_the_trace_to_a_broken_state_is_the_shortest() -> None:
    found = search(broken=3)
    assert (found.broken, found.trace, found.last) == ("wrong", ("a", "c"), 3)


def test_a_state_that_leads_to_no_end_is_stuck() -> None:
    found = search()
    assert (found.broken, found.trace) == ("stuck", ("a", "c", "FAULT"))


def test_a_fault_is_no_way_to_an_end() -> None:
    assert search(end=6).trace == ()
    assert search(end=6).broken == "stuck"


def test_what_was_explored_is_counted() -> None:
    found = search(broken=99, end=5)
    assert (found.states, found.transitions, found.depth) == (7, 9, 3)


def test_more_states_than_the_bound_are_an_error() -> None:
    with pytest.raises(OverflowError, match="more than 3 states"):
        search(most=3)


def test_of_twins_one_is_explored() -> None:
    def steps(state: tuple[int, int]) -> Iterator[Step[tuple[int, int]]]:
        for after in ((state[0] + 1, state[1]), (state[0], state[1] + 1)):
            if max(after) <= 3:
                yield Step("+1", False, after)

    def count(**options: object) -> int:
        return explore(
            (0, 0),
            steps=steps,
            broken=lambda state: "",
            is_end=lambda state: state == (3, 3),
            **options,  # type: ignore[arg-type]
        ).states

    assert count() == 16
    assert count(twins=lambda state: [(state[1], state[0])]) == 10
