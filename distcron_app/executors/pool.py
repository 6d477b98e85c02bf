"""The node's side of its worker processes.

One thread owns a pool. ``poll`` is the only place where it waits: for outcomes, for
the end of a worker, for ``wake`` from another thread or a signal handler, or for the
time to pass.
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
from collections.abc import Iterable, Mapping
from typing import Any

from distcron_app.errors import DistcronError
from distcron_app.executors.frames import FrameReader, encode
from distcron_app.executors.template import start_template
from distcron_app.executors.worker import Worker
from distcron_app.runner import Assignment, Outcome

__all__ = ["Died", "Ended", "PoolBroken", "ProcessPool", "Progressed"]


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
class Died:
    """A worker process ended with these runs in it; ``cause`` is for people."""

    run_ids: tuple[int, ...]
    cause: str


class PoolBroken(DistcronError):
    """The template process is gone, so no worker can be replaced: the node must restart."""


_TEMPLATE_ENDED = "The template process of the workers ended. Restart the node."


class _Link:
    """One worker as the node sees it."""

    def __init__(self, ours: socket.socket) -> None:
        self.socket = ours
        self.pid = 0
        self.reader = FrameReader()
        self.outbox = bytearray()
        self.run_ids: set[int] = set()


class ProcessPool:
    """``processes`` workers with ``threads`` threads each.

    Start it before the process has threads or database connections.
    """

    def __init__(self, *, processes: int, threads: int, output_limit_bytes: int) -> None:
        self._processes = processes
        self._threads = threads
        self._output_limit_bytes = output_limit_bytes
        self._links: list[_Link] = []
        self._unnamed: list[_Link] = []
        self._control_buffer = b""

    def start(self) -> None:
        """Fork the template and the workers. Returns before the workers are ready."""
        worker = functools.partial(
            _worker_main, threads=self._threads, output_limit_bytes=self._output_limit_bytes
        )
        self._template_pid, self._control = start_template(worker)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        for _ in range(self._processes):
            self._spawn()

    @property
    def wake_fd(self) -> int:
        """Return the descriptor for ``signal.set_wakeup_fd``: a signal ends ``poll``."""
        return self._wake_write

    @property
    def free_slots(self) -> int:
        """Return how many runs would start at once."""
        return sum(max(0, self._threads - len(link.run_ids)) for link in self._links)

    @property
    def in_flight(self) -> int:
        """Return how many submitted runs have not been reported."""
        return sum(len(link.run_ids) for link in self._links)

    def wake(self) -> None:
        """End a ``poll`` that is waiting. Safe from any thread and from signal handlers."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"w")

    def submit(self, assignments: Iterable[Assignment]) -> None:
        """Hand runs to the workers with the most free threads, one frame per worker."""
        batches: dict[int, list[Any]] = {}
        for assignment in assignments:
            number = min(range(len(self._links)), key=lambda n: len(self._links[n].run_ids))
            self._links[number].run_ids.add(assignment.run_id)
            batches.setdefault(number, []).append(assignment.to_wire())
        for number, wires in batches.items():
            self._send(self._links[number], ["run", wires])

    def cancel(self, causes: Mapping[int, str], *, reason: str) -> None:
        """Set the cancelled flag of running jobs; the jobs decide when to look at it."""
        for link in self._links:
            mine = [[run_id, causes[run_id], reason] for run_id in link.run_ids & causes.keys()]
            if mine:
                self._send(link, ["cancel", mine])

    def poll(self, seconds: float) -> list[Ended | Progressed | Died]:
        """Wait up to ``seconds`` for news; return what there is, which may be nothing.

        Raise PoolBroken when the template process is gone.
        """
        news: list[Ended | Progressed | Died] = []
        for key, mask in self._selector.select(max(0.0, seconds)):
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
        return news

    def kill(self) -> None:
        """Kill the workers at once, with everything they run. Blocks until they are gone."""
        self._control.close()  # the template kills its workers when its node goes away
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._template_pid, 0)
        for link in self._links:
            link.socket.close()
        self._links = []
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        link = _Link(ours)
        try:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise PoolBroken(_TEMPLATE_ENDED) from error
        finally:
            theirs.close()
        self._links.append(link)
        self._unnamed.append(link)
        self._selector.register(ours, selectors.EVENT_READ, link)

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
        with contextlib.suppress(KeyError):
            self._selector.modify(link.socket, wanted, link)

    def _read(self, link: _Link) -> list[Ended | Progressed | Died]:
        news: list[Ended | Progressed | Died] = []
        while True:
            try:
                data = link.socket.recv(262_144)
            except BlockingIOError:
                return news
            except OSError:
                data = b""
            if not data:
                with contextlib.suppress(KeyError):  # it may have been read to its end before
                    self._selector.unregister(link.socket)
                return news
            for batch in link.reader.feed(data):
                news.extend(self._news(link, item) for item in batch)

    def _news(self, link: _Link, item: list[Any]) -> Ended | Progressed:
        if item[0] == "progress":
            return Progressed(*item[1:])
        outcome = Outcome.from_wire(item[1:])
        link.run_ids.discard(outcome.run_id)
        return Ended(outcome)

    def _read_control(self) -> list[Ended | Progressed | Died]:
        try:
            data = self._control.recv(65536)
        except ConnectionError:
            data = b""  # it ended without reading what was sent to it
        if not data:
            raise PoolBroken(_TEMPLATE_ENDED)
        *lines, self._control_buffer = (self._control_buffer + data).split(b"\n")
        news: list[Ended | Progressed | Died] = []
        for line in lines:
            message = json.loads(line)
            if "spawned" in message:
                self._unnamed.pop(0).pid = message["spawned"]
            else:
                news.extend(self._bury(message["ended"], message["exit_code"]))
        return news

    def _bury(self, pid: int, exit_code: int) -> list[Ended | Progressed | Died]:
        link = next(link for link in self._links if link.pid == pid)
        # What it sent before it died is still in the socket and counts.
        news = self._read(link)
        self._links.remove(link)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.socket.close()
        if link.run_ids:
            news.append(Died(tuple(sorted(link.run_ids)), _cause(exit_code)))
        self._spawn()
        return news


def _worker_main(link: socket.socket, *, threads: int, output_limit_bytes: int) -> None:
    Worker(threads=threads, output_limit_bytes=output_limit_bytes).main(link)


def _cause(exit_code: int) -> str:
    if exit_code >= 0:
        return f"worker process ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = ", possibly out of memory" if -exit_code == signal.SIGKILL else ""
    return f"worker process killed by signal {-exit_code} ({name}){hint}"
