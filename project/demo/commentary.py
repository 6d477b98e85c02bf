"""The live part of the demo: what the rows say, a line for each event."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime
from zoneinfo import ZoneInfo

from django.conf import settings
from django.db import OperationalError, close_old_connections, connection

from distcron_app.clock import Clock
from distcron_app.instants import database_now
from distcron_app.models import Node, Run, Schedule
from project.demo.failover import Failover
from project.demo.schedules import HEARTBEAT
from project.demo.tally import Tally, Verdict

__all__ = ["Commentary"]

ROUND_SECONDS = 0.25
# A longer gap between two rounds means that the machine slept.
SLEPT_SECONDS = 10.0
_NUMBERS = {1: "one", 2: "two", 3: "three"}
_RULE = "─" * 78


class Commentary:
    """Counts the heartbeat's instants, plays the failover and tells other news.

    ``say`` writes text, ``kill`` and ``restart`` get the label of a node, ``ended``
    returns the processes that ended by themselves.
    """

    def __init__(
        self,
        *,
        say: Callable[[str], None],
        kill: Callable[[str], None],
        restart: Callable[[str], object],
        ended: Callable[[], list[str]],
        seconds: float | None,
    ) -> None:
        self._write = say
        self._ended = ended
        self._seconds = seconds
        self._clock = Clock()
        self._zone = ZoneInfo(settings.TIME_ZONE)
        self._now = database_now()
        self._heartbeat = Schedule.objects.get(key=HEARTBEAT)
        self._tally = Tally(self._heartbeat, self._now)
        self._failover = Failover(say=self._say, kill=kill, restart=restart)
        self._told_up_to = Run.objects.order_by("-id").values_list("id", flat=True).first() or 0
        self._untold: set[int] = set()
        self._crashed: set[str] = set()

    def run(self) -> int:
        """Comment until the time is over; return 0 when there was no miss and a failover."""
        self._write(f" live {_RULE}\n")
        self._write(" Open the page above, or stop with Ctrl-C. Removed by: make demo-clean\n")
        started = last = self._clock.monotonic()
        never = threading.Event()
        while self._seconds is None or self._clock.monotonic() - started < self._seconds:
            if self._clock.monotonic() - last > SLEPT_SECONDS:
                self._count_anew("the machine slept")
            last = self._clock.monotonic()
            self._round()
            self._clock.wait(never, ROUND_SECONDS)
        return self._conclude()

    def _round(self) -> None:
        try:
            close_old_connections()
            self._now = database_now()
            if self._tally.was_edited():
                self._count_anew("the heartbeat was edited")
            for verdict in self._tally.judge(self._now):
                self._tell_verdict(verdict)
            self._failover.advance(self._now, self._tally.next_at)
            self._tell_news()
        except OperationalError as error:
            connection.close()
            self._say(f"✖ database: {error}")
        for name in set(self._ended()) - self._crashed:
            self._crashed.add(name)
            self._say(f"✖ {name} ended by itself; see .demo/log/{name}.log")

    def _count_anew(self, why: str) -> None:
        self._tally.skip_to(database_now())
        self._say(f"{why}; its instants are counted from now on")

    def _tell_verdict(self, verdict: Verdict) -> None:
        alive = sorted(Node.objects.alive().values_list("name", flat=True))
        others = [name for name in alive if name not in (verdict.node, self._failover.down)]
        count = f"({self._tally.exact}/{self._tally.total} so far)"
        if verdict.is_exact:
            stood_back = f", {' and '.join(others)} stood back" if others else ""
            of = _NUMBERS.get(len(others) + 1, str(len(others) + 1))
            text = f"{HEARTBEAT} due → {verdict.node} ran it{stood_back}"
            text = f"{text:<62} exactly one of {of} ✔ {count}"
        else:
            text = f"{HEARTBEAT} due → ✖ not exactly one: {verdict.detail} {count}"
        self._say(text, verdict.scheduled_at)

    def _tell_news(self) -> None:
        """Tell how runs of the other schedules ended."""
        fresh = Run.objects.filter(pk__gt=self._told_up_to).exclude(schedule=self._heartbeat.pk)
        self._untold.update(fresh.values_list("pk", flat=True))
        self._told_up_to = max(self._untold | {self._told_up_to})
        runs = Run.objects.filter(pk__in=self._untold).select_related("node").order_by("pk")
        for run in runs:
            if run.is_final:
                self._untold.discard(run.pk)
                self._say(_news(run))

    def _conclude(self) -> int:
        counts = f"{self._tally.exact} of {self._tally.total} instants ran exactly once"
        seconds = self._failover.seconds
        failover = "no failover was seen" if seconds is None else f"failover {seconds:.1f} s"
        good = self._tally.exact > 0 and not self._tally.missed and not self._crashed
        self._write(f" {_RULE}\n {counts}, {failover}\n")
        return 0 if good and seconds is not None else 1

    def _say(self, text: str, at: datetime | None = None) -> None:
        stamp = (at or database_now()).astimezone(self._zone).strftime("%H:%M:%S")
        self._write(f" {stamp}  {text}\n")


def _news(run: Run) -> str:
    node = run.node.name if run.node else "no node"
    if run.state == Run.State.SKIPPED:
        blocked_by = (run.details or {}).get("blocked_by", "?")
        why = f"run {blocked_by} is still active" if run.reason == "overlap" else run.reason
        return f"{run.schedule_name} skipped: {why}"
    if run.state == Run.State.LOST:
        return f"{run.schedule_name} on {node}: lost ✖ (at most once: a person decides)"
    symbol = "✔" if run.state == Run.State.SUCCEEDED else "✖"
    return f"{run.schedule_name} on {node}: {run.state} {symbol} {run.error}".rstrip()
