"""The scripted failure: kill the node that runs a report, and time what happens next."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from distcron_app.models import Node, Run, Schedule
from project.demo.schedules import SLOW_REPORT

__all__ = ["Failover"]

# The report has got somewhere, and the next counted instant is not near.
RUNS_FOR = timedelta(seconds=2)
QUIET_FOR = timedelta(seconds=1.5)
GIVE_UP_AFTER = timedelta(seconds=60)


class Failover:
    """Kills one node by SIGKILL once and watches another one take its run over.

    ``kill`` and ``restart`` get the label of the node.
    """

    def __init__(
        self,
        *,
        say: Callable[[str], None],
        kill: Callable[[str], None],
        restart: Callable[[str], object],
    ) -> None:
        self._say = say
        self._kill = kill
        self._restart = restart
        self._run_id = 0
        self._victim: Node | None = None
        self._killed_at: datetime | None = None
        self.seconds: float | None = None
        self.failed = False

    @property
    def is_over(self) -> bool:
        """Return True once the run was taken over, or was not for too long."""
        return self.failed or self.seconds is not None

    @property
    def down(self) -> str:
        """Return the label of the node that is killed and not started again, or ""."""
        is_down = self._victim is not None and self.seconds is None
        return self._victim.name if self._victim and is_down else ""

    def advance(self, now: datetime, next_counted_at: datetime) -> None:
        """Do what it is time for."""
        if self.is_over:
            return
        if self._killed_at is None:
            self._strike(now, next_counted_at)
        else:
            self._watch(now, self._killed_at)

    def _strike(self, now: datetime, next_counted_at: datetime) -> None:
        schedule = Schedule.objects.get(key=SLOW_REPORT)
        run = (
            Run.objects.filter(schedule_id=schedule.pk, state=Run.State.RUNNING)
            .select_related("node")
            .first()
        )
        if run is None or run.node is None or run.started_at is None:
            return
        if now - run.started_at < RUNS_FOR or next_counted_at - now < QUIET_FOR:
            return
        self._victim, self._run_id, self._killed_at = run.node, run.pk, now
        self._say(f'demo kills {run.node.name} with SIGKILL while it runs "{SLOW_REPORT}" …')
        self._kill(run.node.name)

    def _watch(self, now: datetime, killed_at: datetime) -> None:
        run = Run.objects.select_related("node").get(pk=self._run_id)
        victim = self._victim
        if victim and run.attempt > 1 and run.started_at and run.node_id != victim.pk:
            self.seconds = (run.started_at - killed_at).total_seconds()
            node = run.node.name if run.node else "another node"
            self._say(
                f"lease of {victim.name} expired; {node} runs the report "
                f"as attempt {run.attempt} ✔ failover {self.seconds:.1f} s"
            )
            self._restart(victim.name)
            self._say(f"{victim.name} is started again, under a new id")
        elif now - killed_at > GIVE_UP_AFTER:
            self.failed = True
            self._say(f"✖ nobody took run {run.pk} over; it is {run.state}")
