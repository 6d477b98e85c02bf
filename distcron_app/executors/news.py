"""What a pool of workers tells its node, and how it fails."""

from __future__ import annotations

import dataclasses
from typing import Any

from distcron_app.errors import DistcronError
from distcron_app.runner import Outcome

__all__ = [
    "Checkpointed",
    "Died",
    "Ended",
    "News",
    "OverLimit",
    "PoolBroken",
    "Printed",
    "Progressed",
    "Recycled",
    "Stuck",
    "UnsafeToFork",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A worker executed an attempt; ``outcome`` says how it ended."""

    outcome: Outcome


@dataclasses.dataclass(frozen=True, slots=True)
class Progressed:
    """A running job told how far it is."""

    run_id: int
    percent: float
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpointed:
    """A running job stored something for a later attempt of its run; ``data`` is JSON."""

    run_id: int
    data: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Printed:
    """What a running job has written so far, all that is kept of it."""

    run_id: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Died:
    """A worker process ended with these runs in it; ``cause`` is for people."""

    run_ids: tuple[int, ...]
    cause: str


@dataclasses.dataclass(frozen=True, slots=True)
class OverLimit:
    """A run took longer than its limit and was told to stop."""

    run_id: int
    cause: str


@dataclasses.dataclass(frozen=True, slots=True)
class Stuck:
    """A run in a thread has not stopped in the time it had; it keeps its slot until it ends.

    ``is_replaced`` says that its worker had no other thread left and a new one took its place.
    """

    run_id: int
    is_replaced: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Recycled:
    """A worker process takes no more work and another one took its place; ``cause`` says why."""

    pid: int
    runs: int
    cause: str


News = Ended | Progressed | Checkpointed | Printed | Died | OverLimit | Stuck | Recycled


class PoolBroken(DistcronError):
    """The template process is gone, so no worker can be replaced: the node must restart."""


class UnsafeToFork(DistcronError):
    """The pool was to be started by a process that has open database connections."""
