"""The node's side of its worker processes.

One thread owns a pool. ``poll`` is the only place where it waits: for outcomes, for
the end of a worker, for ``wake`` from another thread or a signal handler, for a limit of
a run, or for the time to pass.

Limits are kept here and not in the worker, where a job that holds the interpreter would
delay them. A run's time begins when its worker says that it does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from django.utils.translation import gettext as _

from distcron_app.clock import Clock
from distcron_app.context import LEASE_LOST, TIMEOUT, WORKER_DIED
from distcron_app.errors import RunStopped, RunTimedOut
from distcron_app.executors.deadlines import Deadlines, Step
from distcron_app.executors.frames import FrameReader, encode
from distcron_app.executors.news import (
    Checkpointed,
    Died,
    Ended,
    News,
    OverLimit,
    PoolBroken,
    Printed,
    Progressed,
    Recycled,
    Stuck,
    UnsafeToFork,
)
from distcron_app.executors.template import Kind, start_template, unsafe_to_fork
from distcron_app.executors.worker import Worker
from distcron_app.memory import resident_mb
from distcron_app.runner import Assignment, Outcome, Transact

__all__ = ["ProcessPool"]

_KINDS: tuple[Kind, ...] = ("shared", "own")
# Idle processes that wait for a job of its own, once there has been one: a fork costs
# milliseconds, and several may come due together.
OWN_STOCK = 2
MEMORY_LOOK_SECONDS = 2.0
# A process that is to be signalled and whose number the template has not told yet.
NUMBER_WAIT_SECONDS = 0.05
# What a running job tells, by the word that its worker uses.
_TOLD: dict[str, Callable[..., News]] = {
    "progress": Progressed,
    "checkpoint": Checkpointed,
    "output": Printed,
}


@dataclasses.dataclass(slots=True)
class _Stop:
    """How a process of its own is being stopped."""

    reason: str
    cause: str
    asked_at: float
    killed_after: float | None = None


_TEMPLATE_ENDED = "The template process of the workers ended. Restart the node."


class _Link:
    """One worker as the node sees it."""

    def __init__(self, ours: socket.socket, kind: Kind) -> None:
        self.socket = ours
        self.kind = kind
        self.pid = 0
        self.reader = FrameReader()
        self.outbox = bytearray()
        self.running: dict[int, Assignment] = {}
        self.given = 0
        # Runs that are over their limit and whose thread does not stop.
        self.stuck: set[int] = set()
        # Takes nothing new and ends when it is empty.
        self.is_retired = False
        # Its runs count for no slot any more: another worker has its place.
        self.is_abandoned = False
        self.stop: _Stop | None = None
        # Of a process of its own, until that has ended with all that it started.
        self.outcome: Outcome | None = None


class ProcessPool:
    """``processes`` workers with ``threads`` threads each, and processes for single runs.

    Start it before the process has threads or database connections. ``transact`` runs, in a
    worker, the attempts of transactional runs. A worker is replaced after ``max_runs`` runs
    or beyond ``max_memory_mb``; 0 is never.
    """

    def __init__(
        self,
        *,
        processes: int,
        threads: int,
        output_limit_bytes: int,
        transact: Transact | None = None,
        max_runs: int = 0,
        max_memory_mb: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self._transact = transact
        self._processes = processes
        self._threads = threads
        self._output_limit_bytes = output_limit_bytes
        self._max_runs = max_runs
        self._max_memory_mb = max_memory_mb
        self._clock = clock or Clock()
        self._links: list[_Link] = []
        self._unnamed: list[_Link] = []
        self._spares: list[_Link] = []
        self._where: dict[int, _Link] = {}
        # Runs that get a process of their own as soon as there is a slot.
        self._waiting: dict[int, Assignment] = {}
        self._deadlines = Deadlines()
        self._pending: list[News] = []
        self._control_buffer = b""
        self._memory_at = 0.0
        self._has_template = False

    def start(self) -> None:
        """Fork the template and the workers. Returns before the workers are ready.

        Raise UnsafeToFork where this process has an open database connection.
        """
        shared = [what for what in unsafe_to_fork() if what.startswith("database")]
        if shared:
            raise UnsafeToFork(f"The workers would share {', '.join(shared)}. Close it first.")
        mains: dict[Kind, functools.partial[None]] = {
            kind: functools.partial(
                _worker_main,
                kind=kind,
                threads=self._threads,
                output_limit_bytes=self._output_limit_bytes,
                transact=self._transact,
            )
            for kind in _KINDS
        }
        self._template_pid, self._control = start_template(mains)
        self._has_template = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        for _number in range(self._processes):
            self._spawn("shared")

    @property
    def wake_fd(self) -> int:
        """Return the descriptor for ``signal.set_wakeup_fd``: a signal ends ``poll``."""
        return self._wake_write

    @property
    def free_slots(self) -> int:
        """Return how many runs would start at once."""
        threads = sum(max(0, self._threads - len(link.running)) for link in self._taking())
        return max(0, min(threads, self._slots - self.taken_slots))

    @property
    def taken_slots(self) -> int:
        """Return how many slots are in use or promised, with those of threads that do not stop."""
        return self._executing() + len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Return how many submitted runs have not been reported."""
        return len(self._where) + len(self._waiting)

    @property
    def stuck(self) -> int:
        """Return how many runs are over their limit in a thread that does not stop."""
        return sum(len(link.stuck) for link in self._links)

    def wake(self) -> None:
        """End a ``poll`` that is waiting. Safe from any thread and from signal handlers."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"w")

    def submit(self, assignments: Iterable[Assignment]) -> None:
        """Hand runs to the workers with the most free threads, one frame per worker.

        Each run that wants one gets a process of its own, as soon as there is a slot.
        """
        batches: dict[_Link, list[Any]] = {}
        for assignment in assignments:
            if assignment.own_process and self._executing() >= self._slots:
                self._waiting[assignment.run_id] = assignment
                continue
            link = self._own_process() if assignment.own_process else self._least_busy()
            link.running[assignment.run_id] = assignment
            link.given += 1
            self._where[assignment.run_id] = link
            batches.setdefault(link, []).append(assignment.to_wire())
            if link.kind == "shared" and self._max_runs and link.given >= self._max_runs:
                self._recycle(link, f"after {link.given} runs")
        for link, wires in batches.items():
            self._send(link, ["run", wires])
        if any(link.kind == "own" for link in batches):
            self._fill_stock()

    def cancel(
        self, causes: Mapping[int, str], *, reason: str, within: float | None = None
    ) -> None:
        """Set the cancelled flag of running jobs; in threads they decide when to look at it.

        A process of its own gets SIGTERM after half of its grace and is killed at its end,
        unless the reason is a lost lease, which changes no outcome. ``within`` is for a node
        that kills all of them after so many seconds: then it is half of that, and no kill.
        """
        for run_id in [run_id for run_id in self._waiting if run_id in causes]:
            stop = _Stop(reason, causes[run_id], 0.0)
            told = _stopped(self._waiting.pop(run_id), stop, "it had not begun")
            self._pending.append(Ended(told))
        for link in self._links:
            mine = {run_id: causes[run_id] for run_id in link.running if run_id in causes}
            if not mine:
                continue
            self._send(link, ["cancel", [[run_id, mine[run_id], reason] for run_id in mine]])
            if link.kind == "own" and reason != LEASE_LOST:
                (cause,) = mine.values()
                self._stop(link, reason, cause, within=within)

    def poll(self, seconds: float) -> list[News]:
        """Wait up to ``seconds`` for news; return what there is, which may be nothing.

        Raise PoolBroken when the template process is gone.
        """
        self._look_at_memory()
        news, self._pending = self._pending, []
        wait = 0.0 if news else self._deadlines.seconds_left(self._clock.monotonic())
        for key, mask in self._selector.select(max(0.0, min(seconds, wait))):
            if key.fileobj is self._control:
                news.extend(self._read_control())
            elif key.fileobj == self._wake_read:
                os.read(self._wake_read, 4096)
            elif key.data in self._links:  # or its end was told in this very round
                link: _Link = key.data
                if mask & selectors.EVENT_WRITE:
                    self._flush(link)
                if mask & selectors.EVENT_READ:
                    news.extend(self._read(link))
        news.extend(self._act())
        while self._waiting and self._executing() < self._slots:
            self.submit([self._waiting.pop(next(iter(self._waiting)))])
        return news

    def kill(self) -> None:
        """Kill the workers at once, with everything they run. Blocks until they are gone."""
        self._control.close()  # the template kills its workers when its node goes away
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._template_pid, 0)
        for link in self._links:
            link.socket.close()
            if link.kind == "own" and link.pid and not self._has_template:
                # What such a process has started does not end with it.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(link.pid, signal.SIGKILL)
        self._links = []
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    @property
    def _slots(self) -> int:
        return self._processes * self._threads

    def _executing(self) -> int:
        return sum(len(link.running) for link in self._links if not link.is_abandoned)

    # --- workers --------------------------------------------------------------

    def _taking(self) -> Iterator[_Link]:
        return (link for link in self._links if link.kind == "shared" and not link.is_retired)

    def _least_busy(self) -> _Link:
        return min(self._taking(), key=lambda link: len(link.running))

    def _own_process(self) -> _Link:
        return self._spares.pop(0) if self._spares else self._spawn("own")

    def _fill_stock(self) -> None:
        while len(self._spares) < OWN_STOCK:
            self._spares.append(self._spawn("own"))

    def _spawn(self, kind: Kind) -> _Link:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        link = _Link(ours, kind)
        request = json.dumps({"spawn": kind}).encode() + b"\n"
        try:
            socket.send_fds(self._control, [request], [theirs.fileno()])
        except OSError as error:
            ours.close()
            self._has_template = False
            raise PoolBroken(_TEMPLATE_ENDED) from error
        finally:
            theirs.close()
        self._links.append(link)
        self._unnamed.append(link)
        self._selector.register(ours, selectors.EVENT_READ, link)
        return link

    def _look_at_memory(self) -> None:
        now = self._clock.monotonic()
        if not self._max_memory_mb or now < self._memory_at:
            return
        self._memory_at = now + MEMORY_LOOK_SECONDS
        for link in list(self._taking()):
            used = resident_mb(link.pid) if link.pid else None
            if used is not None and used > self._max_memory_mb:
                self._recycle(link, f"at {used:.0f} MB")

    def _recycle(self, link: _Link, cause: str) -> None:
        """Put a new worker in the place of this one, which finishes what it has."""
        self._replace(link)
        self._pending.append(Recycled(link.pid, link.given, cause))

    def _replace(self, link: _Link) -> None:
        link.is_retired = True
        self._spawn("shared")
        self._end_if_done(link)

    def _end_if_done(self, link: _Link) -> None:
        if link.is_retired and not link.running:
            with contextlib.suppress(OSError):
                link.socket.shutdown(socket.SHUT_WR)

    def _signal(self, link: _Link, signum: int) -> None:
        request = json.dumps({"pid": link.pid, "signal": signum}).encode() + b"\n"
        with contextlib.suppress(OSError):  # its end is read with the next poll
            self._control.sendall(request)

    # --- limits ---------------------------------------------------------------

    def _act(self) -> list[News]:
        """Take the steps whose time has come."""
        news: list[News] = []
        for run_id, step in self._deadlines.take(self._clock.monotonic()):
            link = self._where.get(run_id)
            if link is None:
                continue
            if step == "limit":
                news.append(self._over_limit(link, run_id))
            elif step == "stuck":
                news.append(self._found_stuck(link, run_id))
            else:
                self._force(link, run_id, step)
        return news

    def _over_limit(self, link: _Link, run_id: int) -> News:
        assignment = link.running[run_id]
        cause = assignment.timeout_cause
        self._send(link, ["cancel", [[run_id, cause, TIMEOUT]]])
        if link.kind == "own":
            self._stop(link, TIMEOUT, cause)
        else:
            at = self._clock.monotonic() + assignment.kill_grace_seconds
            self._deadlines.put(run_id, "stuck", at)
        return OverLimit(run_id, cause)

    def _stop(self, link: _Link, reason: str, cause: str, *, within: float | None = None) -> None:
        """Plan the signals for a process of its own; the first reason is kept."""
        now = self._clock.monotonic()
        (assignment,) = link.running.values()
        if within is not None:
            # Who has so little time kills it at the end by itself.
            self._deadlines.put(assignment.run_id, "terminate", now + within / 2)
        elif link.stop is None:
            grace = assignment.kill_grace_seconds
            self._deadlines.put(assignment.run_id, "terminate", now + grace / 2)
            self._deadlines.put(assignment.run_id, "kill", now + grace)
        link.stop = link.stop or _Stop(reason, cause, now)

    def _force(self, link: _Link, run_id: int, step: Step) -> None:
        now = self._clock.monotonic()
        if not link.pid:
            self._deadlines.put(run_id, step, now + NUMBER_WAIT_SECONDS)
            return
        if step == "kill" and link.stop is not None:
            link.stop.killed_after = now - link.stop.asked_at
        self._signal(link, signal.SIGKILL if step == "kill" else signal.SIGTERM)

    def _found_stuck(self, link: _Link, run_id: int) -> News:
        """Note that a thread does not stop; a worker of which no other is left is replaced.

        At most as many are replaced at a time as the node has workers: each of them costs
        memory for as long as its jobs go on.
        """
        link.stuck.add(run_id)
        is_full = link.is_retired or len(link.running) >= self._threads
        abandoned = sum(1 for each in self._links if each.is_abandoned)
        if is_full and link.stuck >= link.running.keys() and abandoned < self._processes:
            link.is_abandoned = True
            if not link.is_retired:
                self._replace(link)
        return Stuck(run_id, link.is_abandoned)

    # --- sockets --------------------------------------------------------------

    def _send(self, link: _Link, message: Any) -> None:
        link.outbox += encode(message)
        self._flush(link)

    def _flush(self, link: _Link) -> None:
        # Never blocks: a stopped worker must not stop its node.
        try:
            while link.outbox:
                del link.outbox[: link.socket.send(link.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            link.outbox.clear()  # the worker died; its end is reported by the template
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outbox else 0)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(link.socket, wanted, link)

    def _read(self, link: _Link) -> list[News]:
        news: list[News] = []
        while True:
            try:
                data = link.socket.recv(262_144)
            except BlockingIOError:
                return news
            except OSError:
                data = b""
            if not data:
                # It may have been read to its end before, or be buried.
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(link.socket)
                return news
            for batch in link.reader.feed(data):
                for item in batch:
                    news.extend(self._news(link, item))

    def _news(self, link: _Link, item: list[Any]) -> Iterator[News]:
        told = _TOLD.get(item[0])
        if told is not None:
            yield told(*item[1:])
        elif item[0] == "began":
            _verb, run_id, began_at = item
            limit = link.running[run_id].timeout_seconds
            self._deadlines.put(run_id, "limit", began_at + (limit or 0.0))
        else:
            outcome = Outcome.from_wire(item[1:])
            if link.stop is not None and outcome.reason == WORKER_DIED:
                # The signal came before the word of it.
                outcome = dataclasses.replace(
                    outcome, state=_state(link.stop), reason=link.stop.reason
                )
            if link.kind == "own":
                link.outcome = outcome
                self._deadlines.drop(outcome.run_id)
            else:
                self._let_go(link, outcome.run_id)
                yield Ended(outcome)

    def _let_go(self, link: _Link, run_id: int) -> None:
        link.running.pop(run_id, None)
        link.stuck.discard(run_id)
        self._where.pop(run_id, None)
        self._deadlines.drop(run_id)
        self._end_if_done(link)

    def _read_control(self) -> list[News]:
        try:
            data = self._control.recv(65536)
        except ConnectionError:
            data = b""  # it ended without reading what was sent to it
        if not data:
            self._has_template = False
            raise PoolBroken(_TEMPLATE_ENDED)
        *lines, self._control_buffer = (self._control_buffer + data).split(b"\n")
        news: list[News] = []
        for line in lines:
            message = json.loads(line)
            if "spawned" in message:
                self._unnamed.pop(0).pid = message["spawned"]
            else:
                news.extend(self._bury(message["ended"], message["exit_code"]))
        return news

    def _bury(self, pid: int, exit_code: int) -> list[News]:
        link = next(link for link in self._links if link.pid == pid)
        # What it sent before it died is still in the socket and counts.
        news = self._read(link)
        self._links.remove(link)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.socket.close()
        if link in self._spares:
            self._spares.remove(link)
        if link.running:
            news.append(Ended(link.outcome) if link.outcome else _end_of(link, exit_code))
            for run_id in list(link.running):
                self._where.pop(run_id, None)
                self._deadlines.drop(run_id)
        if link.kind == "shared" and not link.is_retired:
            self._spawn("shared")
        return news


def _worker_main(link: socket.socket, *, kind: Kind, **options: Any) -> None:
    worker = Worker(**options)
    if kind == "own":
        worker.main_once(link)
    else:
        worker.main(link)


def _end_of(link: _Link, exit_code: int) -> News:
    """Return what became of the runs of a process that ended in the middle of them."""
    if link.stop is None:
        return Died(tuple(sorted(link.running)), _cause(link, exit_code))
    if link.stop.killed_after is not None and exit_code == -signal.SIGKILL:
        how = f"killed by signal 9 (SIGKILL) after {link.stop.killed_after:.0f} s"
    elif exit_code == -signal.SIGTERM:
        how = "stopped by SIGTERM"
    else:
        how = _cause(link, exit_code)
    (assignment,) = link.running.values()
    return Ended(_stopped(assignment, link.stop, how))


def _stopped(assignment: Assignment, stop: _Stop, how: str) -> Outcome:
    """Return the outcome of a run whose job cannot report it."""
    kind = RunTimedOut if stop.reason == TIMEOUT else RunStopped
    told = kind(_("Run %d") % assignment.run_id, f"{stop.cause}; {how}")
    return Outcome(
        run_id=assignment.run_id,
        fencing_token=assignment.fencing_token,
        state=_state(stop),
        reason=stop.reason,
        error=f"{kind.__name__}: {told}"[:500],
    )


def _state(stop: _Stop) -> Literal["failed", "cancelled"]:
    return "failed" if stop.reason == TIMEOUT else "cancelled"


def _cause(link: _Link, exit_code: int) -> str:
    process = "worker process" if link.kind == "shared" else "the job's own process"
    if exit_code >= 0:
        return f"{process} ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = ", possibly out of memory" if -exit_code == signal.SIGKILL else ""
    for assignment in link.running.values():
        if link.kind == "own" and assignment.memory_limit_mb is not None:
            hint = f", possibly out of memory: its limit is {assignment.memory_limit_mb} MB"
    return f"{process} killed by signal {-exit_code} ({name}){hint}"
