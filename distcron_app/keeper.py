"""The threads that keep a node alive: one its heartbeat in the database, one its leases.

Apart from each other and from the loop, so that a database that hangs costs no lease and
a Redis that hangs no heartbeat. There is no heartbeat when the loop has not turned for a
whole lease: a node whose loop hangs must look dead.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connection

from distcron_app import nodes
from distcron_app.clock import Clock
from distcron_app.conf import Config
from distcron_app.instants import database_now
from distcron_app.leases import LeaseBook
from distcron_app.nodes import Vitals

__all__ = ["Keeper"]

logger = logging.getLogger("distcron.keeper")

# Part of the lease after which a node without an acknowledged heartbeat starts nothing.
SELF_FENCE_SHARE = 0.8
RETRY_SECONDS = 0.5


class Keeper:
    """Keeps one node's lease and the leases of its runs. Its flags are read by the loop."""

    def __init__(
        self,
        *,
        config: Config,
        clock: Clock,
        leases: LeaseBook,
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._leases = leases
        self._on_change = on_change
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lost: dict[int, str] = {}
        self._acknowledged_at = 0.0
        self._up_since: float | None = None
        self._ticked_at = 0.0
        self._offset = timedelta()
        self.fenced = False
        self.lag_ms = 0
        self.alert = ""
        self.running = 0
        self.node_id: UUID

    def begin(self, node_id: UUID) -> None:
        """Keep ``node_id`` alive from now on; the threads start with the first call."""
        now = self._clock.monotonic()
        with self._lock:
            self.node_id = node_id
            self.fenced = False
            self._acknowledged_at = self._ticked_at = now
            if self._up_since is None:
                self._up_since = now
        self._measure_offset()
        if not self._threads:
            self._threads = [
                threading.Thread(target=keep, name=name, daemon=True)
                for name, keep in (
                    ("heartbeat", self._keep_heartbeat),
                    ("leases", self._keep_leases),
                )
            ]
            for thread in self._threads:
                thread.start()

    def end(self) -> None:
        """Stop the threads. Blocks until they have ended, at most a few seconds."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def ticked(self) -> None:
        """Tell that the loop is alive."""
        self._ticked_at = self._clock.monotonic()

    @property
    def may_claim(self) -> bool:
        """Return False once a heartbeat is so late that others may soon recover the runs."""
        share = self._config.node_lease_seconds * SELF_FENCE_SHARE
        return not self.fenced and self._clock.monotonic() - self._acknowledged_at < share

    @property
    def database_up_seconds(self) -> float:
        """Return for how long the database has answered this process without a gap of a lease.

        0 while it is away, and while this process has not heard from it since it was paused.
        """
        up_since, now = self._up_since, self._clock.monotonic()
        if up_since is None or now - self._acknowledged_at >= self._config.node_lease_seconds:
            return 0.0
        return now - up_since

    @property
    def clock_offset_ms(self) -> int:
        """Return how far the host's clock is behind the database's, in milliseconds."""
        return round(self._offset.total_seconds() * 1000)

    def database_time(self) -> datetime:
        """Return the database's time as far as this host knows it, aware UTC, without asking."""
        return self._clock.now() + self._offset

    def take_lost(self) -> dict[int, str]:
        """Return runs whose lease was lost since the last call, with the cause."""
        with self._lock:
            lost, self._lost = self._lost, {}
        return lost

    def _keep_heartbeat(self) -> None:
        while not self._stop.is_set():
            ok = self._safely(self._heartbeat)
            pause = self._config.heartbeat_seconds if ok else RETRY_SECONDS
            self._clock.wait(self._stop, pause * random.uniform(0.9, 1.0))  # noqa: S311
        connection.close()

    def _keep_leases(self) -> None:
        # A thread of its own: a database that hangs must not cost the leases in Redis.
        while not self._stop.is_set():
            self._safely(self._renew)
            self._clock.wait(self._stop, self._config.lock_ttl_seconds / 3)
        connection.close()

    def _safely(self, action: Callable[[], bool]) -> bool:
        """Do it; whatever it raises is logged, since a node without these threads is a zombie."""
        try:
            return action()
        except Exception:
            logger.exception("keeper_failed action=%s", action.__name__)
            return False

    def _heartbeat(self) -> bool:
        sent_at = self._clock.monotonic()
        if sent_at - self._ticked_at > self._config.node_lease_seconds:
            logger.error("loop_hangs seconds=%.1f", sent_at - self._ticked_at)
            return False
        node_id = self.node_id
        try:
            alive = nodes.heartbeat(
                self._config,
                node_id,
                Vitals(
                    running=self.running,
                    tick_lag_ms=self.lag_ms,
                    clock_offset_ms=self.clock_offset_ms,
                    alert=self.alert,
                ),
            )
            self._measure_offset()
        except (DatabaseError, InterfaceError) as error:
            logger.warning("heartbeat_failed error=%s", error)
            connection.close()
            self._up_since = None
            return False
        with self._lock:
            gap = sent_at - self._acknowledged_at
            if self._up_since is None or gap >= self._config.node_lease_seconds:
                # After a pause of this process, as after an outage: others may have been
                # paused with it, and their heartbeats deserve the time to arrive.
                self._up_since = sent_at
            if alive:
                self._acknowledged_at = sent_at
            elif node_id == self.node_id:
                self.fenced = True
        if not alive:
            self._on_change()
        return True

    def _measure_offset(self) -> None:
        before = self._clock.now()
        theirs = database_now()
        after = self._clock.now()
        self._offset = theirs - (before + (after - before) / 2)

    def _renew(self) -> bool:
        lost = self._leases.renew()
        if lost:
            with self._lock:
                self._lost.update(lost)
            self._on_change()
        return True
