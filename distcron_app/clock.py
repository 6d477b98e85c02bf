"""The only reader of a clock, so that tests can drive time.

Wall time is for people and for the database's columns; waiting and every local
deadline use the monotonic clock. Decisions (is it due, has it expired) belong to
the database's clock and are taken inside SQL.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime

__all__ = ["Clock", "utc_now"]


class Clock:
    """Real time. A test passes a subclass that it moves by hand."""

    def now(self) -> datetime:
        """Return the host's wall time, aware UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start that never go backwards.

        Linux's CLOCK_BOOTTIME counts time asleep too, so that a suspended host
        finds its leases expired when it wakes.
        """
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Block until ``event`` is set or ``seconds`` passed; True when it was set."""
        return event.wait(max(0.0, seconds))


def utc_now() -> datetime:
    """Return the host's wall time, aware UTC; the default of columns, whatever USE_TZ says."""
    return Clock().now()
