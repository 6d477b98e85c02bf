"""Django signals that distcron sends, and the one function that sends them.

===================  ==========================================================
signal               keyword arguments
===================  ==========================================================
run_finished         ``run_id``, ``schedule_id``, ``state``, ``reason``, ``late``
run_lost             ``run_id``, ``schedule_id``, ``node_id``
node_dead            ``node_id``
schedule_paused      ``schedule_id``, ``reason``, ``until`` (after failures in a row)
===================  ==========================================================

They are sent by the scheduler process, after the database has committed.
"""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

__all__ = ["emit", "node_dead", "run_finished", "run_lost", "schedule_paused"]

logger = logging.getLogger("distcron.signals")

run_finished = Signal()
run_lost = Signal()
node_dead = Signal()
schedule_paused = Signal()


def emit(signal: Signal, **facts: Any) -> None:
    """Send ``signal``; a receiver that raises is logged and never disturbs the caller."""
    for receiver, outcome in signal.send_robust(sender=None, **facts):
        if isinstance(outcome, Exception):
            logger.error(
                "receiver_failed receiver=%r error=%r", receiver, outcome, exc_info=outcome
            )
