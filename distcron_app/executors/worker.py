"""A worker process: threads that execute assignments and send outcomes back in batches.

A process of its own executes one assignment, in its main thread, where SIGTERM can raise
an error in the job, and ends with it.
"""

from __future__ import annotations

import functools
import os
import queue
import select
import signal
import socket
import threading
from types import FrameType
from typing import Any

from django.db import connections

from distcron_app import capture
from distcron_app.clock import Clock
from distcron_app.context import JobContext
from distcron_app.executors.frames import FrameReader, encode
from distcron_app.executors.live import LiveNews
from distcron_app.runner import Assignment, Transact, execute

__all__ = ["Worker"]

# Outcomes sent in one frame at most.
_BATCH = 500
# How long the main thread has to notice SIGTERM before it is woken.
NOTICE_SECONDS = 0.05


class Worker:
    """Executes what the node sends on ``link`` until the node says stop or goes away."""

    def __init__(self, *, threads: int, output_limit_bytes: int, transact: Transact | None) -> None:
        self._threads = threads
        self._clock = Clock()
        # A frame is written by one thread at a time.
        self._sending = threading.Lock()
        self._output_limit_bytes = output_limit_bytes
        self._transact = transact
        self._work: queue.SimpleQueue[Assignment | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._contexts: dict[int, JobContext] = {}
        self._live = LiveNews(self._news.put)
        self._all_sent = threading.Event()
        self._was_terminated = False

    def main(self, link: socket.socket) -> None:
        """Serve until the link ends, then leave at once: nobody is there to report to."""
        capture.install()
        threading.Thread(target=self._send_news, args=[link], name="send", daemon=True).start()
        threading.Thread(target=self._live.watch, name="live", daemon=True).start()
        for number in range(self._threads):
            threading.Thread(
                target=self._execute, args=[link], name=f"job-{number}", daemon=True
            ).start()
        reader = FrameReader()
        while data := link.recv(65536):
            for verb, payload in reader.feed(data):
                self._obey(verb, payload)
        os._exit(0)

    def main_once(self, link: socket.socket) -> None:
        """Execute the first assignment in this thread, report, and leave.

        The process leads a process group; when the node goes away it takes the group along.
        """
        capture.install()
        reader = FrameReader()
        # No thread runs before there is work: what waits for it must stay cheap and still.
        while not self._contexts:
            data = link.recv(65536)
            if not data:
                os._exit(0)
            for verb, payload in reader.feed(data):
                self._obey(verb, payload)
        assignment = self._work.get()
        assert assignment is not None  # noqa: S101 - the node has sent one
        wake = self._prepare_signals(assignment.run_id)
        # Only the main thread takes SIGTERM: one that another thread got would not wake it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        for name, follow, arguments in (
            ("read", self._follow, (link, reader, wake)),
            ("send", self._send_news, (link,)),
            ("live", self._live.watch, ()),
        ):
            threading.Thread(target=follow, args=arguments, name=name, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        self._execute_one(link, assignment)
        self._news.put(None)
        self._all_sent.wait()
        connections.close_all()

    def _prepare_signals(self, run_id: int) -> int:
        """Let SIGTERM raise an error in the job; return a descriptor that tells of signals."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGURG, _do_nothing)
        signal.signal(signal.SIGTERM, functools.partial(self._on_sigterm, run_id))
        return wake_read

    def _on_sigterm(self, run_id: int, signum: int, frame: FrameType | None) -> None:
        self._was_terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
        context = self._contexts.get(run_id)
        if context is not None:
            context.terminate(signal.Signals(signum).name)

    def _follow(self, link: socket.socket, reader: FrameReader, wake: int) -> None:
        """Read what the node says, and see to it that the main thread notices SIGTERM.

        A signal that comes just before the main thread begins to wait for a lock does not
        end that wait (Python's handlers run between two instructions); another one does.
        """
        is_unnoticed = False
        sources: list[socket.socket | int] = [link, wake]
        while True:
            timeout = NOTICE_SECONDS if is_unnoticed else None
            readable, _, _ = select.select(sources, [], [], timeout)
            if wake in readable:
                is_unnoticed = is_unnoticed or signal.SIGTERM in os.read(wake, 4096)
            elif is_unnoticed and not self._was_terminated:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
            is_unnoticed = is_unnoticed and not self._was_terminated
            if link in readable:
                data = link.recv(65536)
                if not data:
                    os.killpg(0, signal.SIGKILL)
                for verb, payload in reader.feed(data):
                    self._obey(verb, payload)

    def _obey(self, verb: str, payload: list[Any]) -> None:
        if verb == "run":
            for wire in payload:
                self._work.put(self._prepared(Assignment.from_wire(wire)))
        elif verb == "cancel":
            for run_id, cause, reason in payload:
                context = self._contexts.get(run_id)
                if context is not None:
                    context.cancel(cause, reason=reason)

    def _prepared(self, assignment: Assignment) -> Assignment:
        # The context exists before a thread is free, so that a cancel cannot miss it.
        self._contexts[assignment.run_id] = assignment.context(
            on_progress=functools.partial(self._progressed, assignment.run_id),
            on_checkpoint=functools.partial(self._live.checkpoint, assignment.run_id),
        )
        return assignment

    def _progressed(self, run_id: int, percent: float, message: str) -> None:
        self._news.put(["progress", run_id, percent, capture.clean_text(message)])

    def _execute(self, link: socket.socket) -> None:
        while (assignment := self._work.get()) is not None:
            self._execute_one(link, assignment)

    def _execute_one(self, link: socket.socket, assignment: Assignment) -> None:
        if assignment.timeout_seconds is not None:
            # At once and from this thread: a job that holds the interpreter lets no other send.
            self._send(link, [["began", assignment.run_id, self._clock.monotonic()]])
        context = self._contexts[assignment.run_id]
        self._live.begin(context)
        outcome = execute(
            assignment,
            context=context,
            output_limit_bytes=self._output_limit_bytes,
            transact=self._transact,
        )
        self._live.end(assignment.run_id)
        self._contexts.pop(assignment.run_id, None)
        self._news.put(["ended", *outcome.to_wire()])

    def _send_news(self, link: socket.socket) -> None:
        while (first := self._news.get()) is not None:
            batch = [first]
            while len(batch) < _BATCH:
                try:
                    following = self._news.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    self._news.put(None)
                    break
                batch.append(following)
            self._send(link, batch)
        self._all_sent.set()

    def _send(self, link: socket.socket, batch: list[Any]) -> None:
        try:
            with self._sending:
                link.sendall(encode(batch))
        except OSError:
            os._exit(0)


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    return None
