"""A worker process: threads that execute assignments and send outcomes back in batches.

A process of its own executes one assignment, in its main thread, where SIGTERM can raise
an error in the job, and ends with it.
"""

from __future__ import annotations

import functools
import os
import queue
import signal
import socket
import threading
from types import FrameType
from typing import Any

from distcron_app import capture
from distcron_app.clock import Clock
from distcron_app.context import JobContext
from distcron_app.executors.frames import FrameReader, encode
from distcron_app.runner import Assignment, execute

__all__ = ["Worker"]

# Outcomes sent in one frame at most.
_BATCH = 500


class Worker:
    """Executes what the node sends on ``link`` until the node says stop or goes away."""

    def __init__(self, *, threads: int, output_limit_bytes: int) -> None:
        self._threads = threads
        self._clock = Clock()
        # A frame is written by one thread at a time.
        self._sending = threading.Lock()
        self._output_limit_bytes = output_limit_bytes
        self._work: queue.SimpleQueue[Assignment | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._contexts: dict[int, JobContext] = {}

    def main(self, link: socket.socket) -> None:
        """Serve until the link ends, then leave at once: nobody is there to report to."""
        capture.install()
        threading.Thread(target=self._send_news, args=[link], name="send", daemon=True).start()
        for number in range(self._threads):
            threading.Thread(
                target=self._execute, args=[link], name=f"job-{number}", daemon=True
            ).start()
        self._read(link, FrameReader())
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
        threading.Thread(target=self._follow, args=[link, reader], name="read", daemon=True).start()
        sender = threading.Thread(target=self._send_news, args=[link], name="send", daemon=True)
        sender.start()
        signal.signal(signal.SIGTERM, functools.partial(self._terminated, assignment.run_id))
        self._execute_one(link, assignment)
        self._news.put(None)
        sender.join()

    def _follow(self, link: socket.socket, reader: FrameReader) -> None:
        self._read(link, reader)
        os.killpg(0, signal.SIGKILL)

    def _terminated(self, run_id: int, signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
        context = self._contexts.get(run_id)
        if context is not None:
            context.terminate(signal.Signals(signum).name)

    def _read(self, link: socket.socket, reader: FrameReader) -> None:
        while data := link.recv(65536):
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
        self._contexts[assignment.run_id] = JobContext(
            run_id=assignment.run_id,
            schedule_id=assignment.schedule_id,
            schedule_key=assignment.schedule_key,
            job=assignment.job,
            scheduled_at=assignment.scheduled_at,
            attempt=assignment.attempt,
            fencing_token=assignment.fencing_token,
            is_recovery=assignment.is_recovery,
            on_progress=functools.partial(self._progressed, assignment.run_id),
        )
        return assignment

    def _progressed(self, run_id: int, percent: float, message: str) -> None:
        self._news.put(["progress", run_id, percent, message])

    def _execute(self, link: socket.socket) -> None:
        while (assignment := self._work.get()) is not None:
            self._execute_one(link, assignment)

    def _execute_one(self, link: socket.socket, assignment: Assignment) -> None:
        if assignment.timeout_seconds is not None:
            # At once and from this thread: a job that holds the interpreter lets no other send.
            self._send(link, [["began", assignment.run_id, self._clock.monotonic()]])
        outcome = execute(
            assignment,
            context=self._contexts[assignment.run_id],
            output_limit_bytes=self._output_limit_bytes,
        )
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
                    self._send(link, batch)
                    return
                batch.append(following)
            self._send(link, batch)

    def _send(self, link: socket.socket, batch: list[Any]) -> None:
        try:
            with self._sending:
                link.sendall(encode(batch))
        except OSError:
            os._exit(0)
