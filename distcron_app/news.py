"""What the running jobs of a node told, kept until it is written: the newest of each run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from distcron_app import lifecycle
from distcron_app.clock import Clock
from distcron_app.executors import Checkpointed, Printed, Progressed

__all__ = ["News", "Told"]

Told = Progressed | Checkpointed | Printed
_WRITE_SECONDS = 1.0


class News:
    """Written once a second for all runs together; for one thread.

    What could not be written stays, and is written when the database is back.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._write_at = 0.0
        self._progress: dict[int, tuple[float, str]] = {}
        self._checkpoints: dict[int, Any] = {}
        self._outputs: dict[int, str] = {}

    def take(self, told: Told) -> None:
        """Keep what a job told, in the place of what it told before."""
        if isinstance(told, Progressed):
            self._progress[told.run_id] = (told.percent, told.message)
        elif isinstance(told, Checkpointed):
            self._checkpoints[told.run_id] = told.data
        else:
            self._outputs[told.run_id] = told.text

    def ended(self, run_id: int, *, succeeded: bool) -> None:
        """Drop what the report of the run's end replaces; a checkpoint is for its next attempt."""
        self._progress.pop(run_id, None)
        self._outputs.pop(run_id, None)
        if succeeded:
            self._checkpoints.pop(run_id, None)

    def forget(self, run_ids: Collection[int]) -> None:
        """Drop everything about runs that are no longer this node's."""
        for run_id in run_ids:
            self.ended(run_id, succeeded=True)

    @property
    def wait_seconds(self) -> float:
        """Return in how long something is to be written; infinity where nothing is."""
        if not (self._progress or self._checkpoints or self._outputs):
            return math.inf
        return max(0.0, self._write_at - self._clock.monotonic())

    def write(
        self,
        tokens_of: Callable[[Collection[int]], Mapping[int, tuple[int, str]]],
        *,
        now: Collection[int] = (),
    ) -> None:
        """Write everything when it is time, and what is about the runs ``now`` at once.

        A fixed number of statements. Raise DatabaseError.
        """
        is_time = self.wait_seconds <= 0.0
        if is_time:
            self._write_at = self._clock.monotonic() + _WRITE_SECONDS
        for kept, store in (
            (self._progress, lifecycle.report_progress),
            (self._checkpoints, lifecycle.store_checkpoints),
            (self._outputs, lifecycle.store_live_output),
        ):
            part: dict[int, Any] = {pk: kept[pk] for pk in kept if is_time or pk in now}
            if part:
                store(part, tokens_of(part))
                for run_id in part:
                    del kept[run_id]
