"""What is to happen to running attempts, and when."""

from __future__ import annotations

from typing import Literal

__all__ = ["Deadlines", "Step"]

# limit: it is told to stop. terminate, kill: its process is signalled. stuck: its thread
# has not stopped in time and cannot be made to.
Step = Literal["limit", "terminate", "kill", "stuck"]


class Deadlines:
    """Instants of one monotonic clock, in seconds. It holds few entries: one run has at most two.

    >>> deadlines = Deadlines()
    >>> deadlines.put(7, "limit", 100.0)
    >>> deadlines.seconds_left(98.5)
    1.5
    >>> deadlines.take(100.0)
    [(7, 'limit')]
    >>> deadlines.take(100.0)
    []
    """

    def __init__(self) -> None:
        self._at: dict[tuple[int, Step], float] = {}

    def put(self, run_id: int, step: Step, at: float) -> None:
        """Enter a step, in the place of an earlier entry of the same."""
        self._at[run_id, step] = at

    def drop(self, run_id: int) -> None:
        """Forget every step of a run that has ended."""
        for key in [key for key in self._at if key[0] == run_id]:
            del self._at[key]

    def seconds_left(self, now: float) -> float:
        """Return how long until the next step; infinity where there is none."""
        return max(0.0, min(self._at.values()) - now) if self._at else float("inf")

    def take(self, now: float) -> list[tuple[int, Step]]:
        """Return the steps whose time has come, in their order, and forget them."""
        due = sorted((at, key) for key, at in self._at.items() if at <= now)
        for _at, key in due:
            del self._at[key]
        return [key for _at, key in due]
