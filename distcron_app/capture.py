"""Capture of what a job writes, apart for each run although runs share a process.

``install()`` replaces ``sys.stdout`` and ``sys.stderr`` by routers and adds a handler
to the root logger. Each looks up the buffer of the run that is active in its context
(a context variable) and falls back to the original stream where none is. It also lets
threads, and what is submitted to a pool of threads, inherit the context of whoever
starts or submits them. Not seen: writes of a C library or an inherited child process
straight to descriptors 1 and 2, and threads that do not go through ``threading``.

A buffer keeps the first and the last part of the output. Its memory is bounded by
twice its limit, whatever the job writes.
"""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import io
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

__all__ = ["OutputBuffer", "captured", "clean_text", "install", "uninstall", "write"]

# PostgreSQL refuses NUL in text, and a lone surrogate has no UTF-8 form.
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
# Characters encoded at a time, so that one huge write needs no huge copy.
_SLICE_LENGTH = 65_536
# A cut moves to the end of a line when one is at most this far away.
_LONGEST_LINE = 4096
_LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"

_active: contextvars.ContextVar[OutputBuffer | None] = contextvars.ContextVar(
    "distcron_output", default=None
)
_install_lock = threading.Lock()
_start_thread = threading.Thread.start
_submit = ThreadPoolExecutor.submit


def clean_text(text: str) -> str:
    """Return ``text`` with NUL and lone surrogates replaced by U+FFFD."""
    return _UNSTORABLE.sub("\ufffd", text)


class OutputBuffer:
    """The first and the last part of a text, ``limit_bytes`` of UTF-8 together.

    Any thread may write, and any thread may read while another writes.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._head_limit = limit_bytes // 2
        self._tail_limit = limit_bytes - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0
        self._lock = threading.Lock()
        self.is_closed = False

    @property
    def total_bytes(self) -> int:
        """Return how much was written, kept or not."""
        return self._total

    def write(self, text: str) -> None:
        """Append ``text``."""
        for start in range(0, len(text), _SLICE_LENGTH):
            encoded = clean_text(text[start : start + _SLICE_LENGTH]).encode()
            with self._lock:
                self._append(encoded)

    def text(self) -> str:
        """Return what is kept; a line in the middle says how many bytes were cut."""
        with self._lock:
            head, tail, total = bytes(self._head), bytes(self._tail), self._total
        if total == len(head) + len(tail) and total <= self._head_limit + self._tail_limit:
            return (head + tail).decode()
        # Only the two cut edges can hold part of a character.
        first = _up_to_line_end(head.decode(errors="ignore"))
        last = tail[len(tail) - min(len(tail), self._tail_limit) :].decode(errors="ignore")
        last = _from_line_start(last)
        cut = total - len(first.encode()) - len(last.encode())
        gap = "" if not first or first.endswith("\n") else "\n"
        return f"{first}{gap}[... {cut} bytes cut ...]\n{last}"

    def _append(self, encoded: bytes) -> None:
        self._total += len(encoded)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += encoded[:room]
            encoded = encoded[room:]
        self._tail += encoded
        # Cutting only at twice the limit keeps a write's cost constant on average.
        if len(self._tail) > 2 * self._tail_limit:
            del self._tail[: len(self._tail) - self._tail_limit]


@contextlib.contextmanager
def captured(limit_bytes: int) -> Iterator[OutputBuffer]:
    """Collect what the block writes, in this context, into a new buffer."""
    buffer = OutputBuffer(limit_bytes)
    token = _active.set(buffer)
    try:
        yield buffer
    finally:
        _active.reset(token)
        buffer.is_closed = True


def write(text: str) -> None:
    """Write to the active run's buffer, or to ``sys.stdout`` where no run is active."""
    buffer = _active_buffer()
    if buffer is None:
        sys.stdout.write(text)
    else:
        buffer.write(text)


def install() -> None:
    """Route this process's output. Call it once, after logging is configured.

    A second call changes nothing.
    """
    with _install_lock:
        if isinstance(sys.stdout, _Router):
            return
        sys.stdout = _Router(sys.stdout)
        sys.stderr = _Router(sys.stderr)
        logging.getLogger().addHandler(_RunHandler())
        threading.Thread.start = _start_in_context  # type: ignore[assignment, method-assign]
        ThreadPoolExecutor.submit = _submit_in_context  # type: ignore[assignment, method-assign]


def uninstall() -> None:
    """Put the original streams back."""
    with _install_lock:
        if isinstance(sys.stdout, _Router):
            sys.stdout = sys.stdout.original
        if isinstance(sys.stderr, _Router):
            sys.stderr = sys.stderr.original
        root = logging.getLogger()
        for handler in [each for each in root.handlers if isinstance(each, _RunHandler)]:
            root.removeHandler(handler)
        threading.Thread.start = _start_thread  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = _submit  # type: ignore[method-assign]


def _start_in_context(thread: threading.Thread) -> None:
    if _active_buffer() is not None:
        # A copy for each: a context cannot be entered by two threads at once.
        context, run = contextvars.copy_context(), thread.run
        thread.run = lambda: context.run(run)  # type: ignore[method-assign]
    _start_thread(thread)


def _submit_in_context(
    pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **options: Any
) -> Future[Any]:
    # Its threads may have been started by another run, and serve several.
    context = contextvars.copy_context()
    return _submit(pool, context.run, function, *args, **options)


# Half a line could show half a secret, which masking by value would not find.
def _up_to_line_end(text: str) -> str:
    end = text.rfind("\n", max(0, len(text) - _LONGEST_LINE))
    return text if end < 0 else text[: end + 1]


def _from_line_start(text: str) -> str:
    start = text.find("\n", 0, _LONGEST_LINE)
    return text if start < 0 else text[start + 1 :]


def _active_buffer() -> OutputBuffer | None:
    buffer = _active.get()
    # A thread that outlived its run still carries the run's context.
    return None if buffer is None or buffer.is_closed else buffer


class _Router(io.TextIOBase):
    """A text stream that writes to the active run, or to the stream it replaced."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original
        self.buffer = _BinaryRouter(self)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "replace"

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        buffer = _active_buffer()
        if buffer is not None:
            buffer.write(text)
        elif self.original is not None:
            self.original.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if _active_buffer() is None and self.original is not None:
            self.original.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return _active_buffer() is None and self.original is not None and self.original.isatty()

    def fileno(self) -> int:
        if self.original is None:
            raise io.UnsupportedOperation("fileno")
        return int(self.original.fileno())

    def close(self) -> None:
        """Stay open: one run must not close the output of the others."""


class _BinaryRouter(io.RawIOBase):
    """``sys.stdout.buffer`` of a router: bytes are read as UTF-8."""

    def __init__(self, router: _Router) -> None:
        super().__init__()
        self._router = router

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if _active_buffer() is None and hasattr(self._router.original, "buffer"):
            return int(self._router.original.buffer.write(data))
        self._router.write(codecs.decode(bytes(data), "utf-8", "replace"))
        return len(data)

    def flush(self) -> None:
        self._router.flush()

    def close(self) -> None:
        """Stay open, as the router does."""


class _RunHandler(logging.Handler):
    """Write log records to the active run's buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_LOG_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        buffer = _active_buffer()
        if buffer is None:
            self._emit_outside(record)
            return
        try:
            buffer.write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - a record that cannot be formatted must not fail the job
            self.handleError(record)

    def _emit_outside(self, record: logging.LogRecord) -> None:
        # Being the only handler, this one has displaced the last resort.
        last_resort = logging.lastResort
        is_alone = logging.getLogger().handlers == [self]
        if is_alone and last_resort and record.levelno >= last_resort.level:
            last_resort.handle(record)
