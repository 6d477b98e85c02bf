"""Explores every state that a model can reach, breadth first, so that traces are shortest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Explored", "Step", "explore"]

State = TypeVar("State", bound=Hashable)


class Step(NamedTuple, Generic[State]):
    """One step of the model: what happens, whether it is a fault, and the state after it."""

    label: str
    is_fault: bool
    after: State


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explored(Generic[State]):
    """What was found. ``broken`` names the invariant, and ``trace`` is the way there.

    ``broken`` is "stuck" where no end can be reached any more although no further fault comes.
    """

    states: int
    transitions: int
    depth: int
    broken: str = ""
    trace: tuple[str, ...] = ()
    last: State | None = None

    def __str__(self) -> str:
        size = f"{self.states} states, {self.transitions} transitions, depth {self.depth}"
        if not self.broken:
            return f"no violation: {size}"
        lines = [f"{number:3}. {label}" for number, label in enumerate(self.trace, 1)]
        return "\n".join([f"broken after {size}: {self.broken}", *lines])


def explore(
    initial: State,
    *,
    steps: Callable[[State], Iterable[Step[State]]],
    broken: Callable[[State], str],
    is_end: Callable[[State], bool],
    twins: Callable[[State], Iterable[State]] | None = None,
    most: int = 2_000_000,
) -> Explored[State]:
    """Visit all states; stop at the first that is ``broken``.

    Then, from every state, an end must be reachable by steps that are no faults. ``twins``
    are states that differ in names alone, of which one is enough; a trace then changes names
    on its way. Raise OverflowError beyond ``most`` states: that would prove nothing.
    """
    numbers: dict[State, int] = {initial: 0}
    parents: list[int] = [0]
    labels: list[str] = [""]
    depths: list[int] = [0]
    # For each state, those that lead to it without a fault.
    sources: list[list[int]] = [[]]
    ends: list[int] = []
    transitions = 0
    frontier = [initial]
    for state in frontier:  # grows while it is walked
        number = numbers[state]
        if is_end(state):
            ends.append(number)
        for step in steps(state):
            transitions += 1
            known = numbers.get(step.after)
            if known is None and twins is not None:
                same = map(numbers.get, twins(step.after))
                known = next((twin for twin in same if twin is not None), None)
            if known is None:
                known = len(parents)
                if known >= most:
                    raise OverflowError(f"more than {most} states")
                numbers[step.after] = known
                parents.append(number)
                labels.append(step.label)
                depths.append(depths[number] + 1)
                sources.append([])
                frontier.append(step.after)
                problem = broken(step.after)
                if problem:
                    return Explored(
                        states=len(parents),
                        transitions=transitions,
                        depth=depths[-1],
                        broken=problem,
                        trace=_trace(known, parents, labels),
                        last=step.after,
                    )
            if not step.is_fault and known != number:
                sources[known].append(number)
    stuck = _first_stuck(sources, ends)
    return Explored(
        states=len(parents),
        transitions=transitions,
        depth=depths[-1],
        broken="" if stuck is None else "stuck",
        trace=() if stuck is None else _trace(stuck, parents, labels),
        last=None if stuck is None else frontier[stuck],
    )


def _trace(number: int, parents: list[int], labels: list[str]) -> tuple[str, ...]:
    found: list[str] = []
    while number:
        found.append(labels[number])
        number = parents[number]
    return tuple(reversed(found))


def _first_stuck(sources: list[list[int]], ends: list[int]) -> int | None:
    """Return the first state from which no end can be reached, walking back from the ends."""
    reaches = bytearray(len(sources))
    waiting = list(ends)
    for number in ends:
        reaches[number] = 1
    while waiting:
        for source in sources[waiting.pop()]:
            if not reaches[source]:
                reaches[source] = 1
                waiting.append(source)
    missing = reaches.find(0)
    return None if missing < 0 else missing
