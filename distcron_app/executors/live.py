"""What the jobs of a worker tell while they run: their output so far, and checkpoints.

A job may print or store checkpoints as fast as it likes. Of each run the newest is sent, and
no more often than somebody can use it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from distcron_app.clock import Clock
from distcron_app.context import JobContext

__all__ = ["LiveNews"]

# How often the runs are looked at; a checkpoint waits this long at most.
_LOOK_SECONDS = 0.25
_OUTPUT_SECONDS = 1.0
# The text is sent whole, since masking and the cut in its middle change what was sent before.
# A long one is sent less often, so that no run costs more than this.
_OUTPUT_BYTES_PER_SECOND = 65_536


@dataclasses.dataclass(slots=True)
class _Live:
    context: JobContext
    sent_bytes: int = 0
    output_at: float = 0.0
    checkpoint_at: float = 0.0
    # A list of the newest checkpoint that was not sent yet; empty: none.
    held: list[Any] = dataclasses.field(default_factory=list)


class LiveNews:
    """Watches the runs of one process. ``send`` gets the messages for the node; any thread."""

    def __init__(self, send: Callable[[list[Any]], None], *, clock: Clock | None = None) -> None:
        self._send = send
        self._clock = clock or Clock()
        self._lock = threading.Lock()
        self._runs: dict[int, _Live] = {}
        self._busy = threading.Event()

    def begin(self, context: JobContext) -> None:
        """Watch a run from now on."""
        now = self._clock.monotonic()
        with self._lock:
            self._runs[context.run_id] = _Live(context, output_at=now + _OUTPUT_SECONDS)
            self._busy.set()

    def end(self, run_id: int) -> None:
        """Send what the run still holds, and nothing of it afterwards."""
        with self._lock:
            live = self._runs.pop(run_id, None)
            if live is not None:
                self._send_held(run_id, live)
            if not self._runs:
                self._busy.clear()

    def checkpoint(self, run_id: int, data: Any) -> None:
        """Send the checkpoint, or hold it for a moment where the last one was just sent."""
        now = self._clock.monotonic()
        with self._lock:
            live = self._runs.get(run_id)
            if live is None:
                return
            live.held = [data]
            if now >= live.checkpoint_at:
                live.checkpoint_at = now + _LOOK_SECONDS
                self._send_held(run_id, live)

    def watch(self) -> None:
        """Look at the runs for ever; while there is none it waits without waking up."""
        never = threading.Event()
        while True:
            self._busy.wait()
            self.look()
            self._clock.wait(never, _LOOK_SECONDS)

    def look(self) -> None:
        """Send what is new and due."""
        now = self._clock.monotonic()
        with self._lock:
            runs = list(self._runs.items())
        for run_id, live in runs:
            # Read apart from the lock: it may be long, and a job that ends must not wait.
            text = self._new_output(live, now)
            with self._lock:
                if self._runs.get(run_id) is not live:
                    continue
                self._send_held(run_id, live)
                if text is not None:
                    self._send(["output", run_id, text])

    def _new_output(self, live: _Live, now: float) -> str | None:
        written = live.context.output_bytes
        if now < live.output_at or written == live.sent_bytes:
            return None
        text = live.context.output()
        live.sent_bytes = written
        live.output_at = now + max(_OUTPUT_SECONDS, len(text) / _OUTPUT_BYTES_PER_SECOND)
        return text

    def _send_held(self, run_id: int, live: _Live) -> None:
        held, live.held = live.held, []
        for data in held:
            self._send(["checkpoint", run_id, data])
