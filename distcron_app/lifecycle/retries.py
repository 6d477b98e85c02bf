"""Whether a failed attempt is followed by another one, and when; ``decide`` is pure."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from distcron_app.errors import GiveUp
from distcron_app.models import Schedule

__all__ = ["RetryPolicy", "Verdict", "decide", "retry_policy"]

logger = logging.getLogger("distcron.lifecycle")

# A backoff that doubles reaches any limit by then; larger powers overflow.
_MOST_DOUBLINGS = 40
_GIVE_UP = f"{GiveUp.__module__}.{GiveUp.__qualname__}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The retry policy of a schedule; delays in seconds.

    ``backoff`` is "fixed" (``delays[0]`` each time), "exponential" (doubling from
    ``delays[0]`` up to ``longest``) or "list" (one after the other, the last one again).
    ``jitter`` is "full" (anything from 0), "equal" (from a half) or "none".
    ``retry_on`` and ``give_up_on`` are dotted names of exceptions; an empty ``retry_on``
    means any. ``on_timeout`` decides alone about an attempt that took too long.
    """

    max_attempts: int
    backoff: str
    delays: tuple[float, ...]
    longest: float
    jitter: str
    retry_on: frozenset[str]
    give_up_on: frozenset[str]
    stop_at_next: bool
    on_timeout: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """When the next attempt is due, or None with ``why`` there is none."""

    due_at: datetime | None
    why: str = ""


def retry_policy(schedule: Schedule) -> RetryPolicy:
    """Return the retry policy of a schedule.

    One whose pauses were changed past the model to what cannot be read has no further
    attempt.
    """
    attempts = schedule.max_attempts
    try:
        delays = schedule.delays()
    except ValueError:
        attempts, delays = 1, (0.0,)
        logger.warning(
            "retry_policy_unreadable schedule=%s backoff_delays=%.40r",
            schedule.key,
            schedule.backoff_delays,
        )
    return RetryPolicy(
        max_attempts=attempts,
        backoff=schedule.backoff,
        delays=delays,
        longest=schedule.backoff_longest_seconds,
        jitter=schedule.backoff_jitter,
        retry_on=frozenset(schedule.retry_on.split()),
        # Above any policy: the job itself knows.
        give_up_on=frozenset(schedule.give_up_on.split()) | {_GIVE_UP},
        stop_at_next=schedule.retry_stops_at_next,
        on_timeout=schedule.retry_on_timeout,
    )


def decide(
    policy: RetryPolicy,
    *,
    attempt: int,
    exceptions: Sequence[str],
    wanted_delay: float | None,
    now: datetime,
    next_run_at: datetime | None,
    timed_out: bool = False,
    stop_at: datetime | None = None,
) -> Verdict:
    """Decide about the attempt after number ``attempt``, which failed.

    ``exceptions`` are the dotted names of the error's class and its bases;
    ``wanted_delay`` are the seconds that the job asked for by RetryLater, which go before
    the backoff and carry no jitter. No attempt starts at ``stop_at`` or later.
    """
    if attempt >= policy.max_attempts:
        return Verdict(due_at=None, why="attempts")
    if timed_out and not policy.on_timeout:
        return Verdict(due_at=None, why="timeout")
    if not timed_out and not _is_worth_it(policy, exceptions, asked=wanted_delay is not None):
        return Verdict(due_at=None, why="exception")
    delay = _delay(policy, attempt) if wanted_delay is None else max(0.0, wanted_delay)
    due_at = now + timedelta(seconds=delay)
    if policy.stop_at_next and next_run_at is not None and due_at >= next_run_at:
        return Verdict(due_at=None, why="next_occurrence")
    if stop_at is not None and due_at >= stop_at:
        return Verdict(due_at=None, why="total_timeout")
    return Verdict(due_at=due_at)


def _is_worth_it(policy: RetryPolicy, exceptions: Collection[str], *, asked: bool) -> bool:
    if not policy.give_up_on.isdisjoint(exceptions):
        return False
    return asked or not policy.retry_on or not policy.retry_on.isdisjoint(exceptions)


def _delay(policy: RetryPolicy, attempt: int) -> float:
    """Return the pause after attempt number ``attempt``, counted from 1."""
    if policy.backoff == "list":
        delay = policy.delays[min(attempt, len(policy.delays)) - 1]
    elif policy.backoff == "exponential":
        delay = policy.delays[0] * 2 ** min(attempt - 1, _MOST_DOUBLINGS)
    else:
        delay = policy.delays[0]
    delay = min(delay, policy.longest)
    # Full and equal jitter as in "Exponential Backoff And Jitter" (AWS Architecture Blog).
    low = {"full": 0.0, "equal": delay / 2}.get(policy.jitter, delay)
    return random.uniform(low, delay)  # noqa: S311
