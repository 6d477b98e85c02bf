"""A worker process: threads that execute assignments and send outcomes back in batches."""

from __future__ import annotations

import functools
import os
import queue
import socket
import threading
from typing import Any

from distcron_app import capture
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
        self._output_limit_bytes = output_limit_bytes
        self._work: queue.SimpleQueue[Assignment | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._contexts: dict[int, JobContext] = {}

    def main(self, link: socket.socket) -> None:
        """Serve until the link ends, then leave at once: nobody is there to report to."""
        capture.install()
        threading.Thread(target=self._send_news, args=[link], name="send", daemon=True).start()
        for number in range(self._threads):
            threading.Thread(target=self._execute, name=f"job-{number}", daemon=True).start()
        reader = FrameReader()
        while data := link.recv(65536):
            for verb, payload in reader.feed(data):
                self._obey(verb, payload)
        os._exit(0)

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
        self._news.put(["progress", run_id, percent, capture.clean_text(message)])

    def _execute(self) -> None:
        while (assignment := self._work.get()) is not None:
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
                    batch.append(self._news.get_nowait())  # type: ignore[arg-type]
                except queue.Empty:
                    break
            try:
                link.sendall(encode(batch))
            except OSError:
                os._exit(0)
