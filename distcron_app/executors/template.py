"""The template process: forks workers on request and reports how each one ended.

It is forked from the node before any thread or connection exists and stays that way,
so a fork of it is always safe. Requests are lines on a control socket, with the
worker's end of its socket as a passed file descriptor. When the node is gone, by any
signal, the control socket ends: every worker is killed and the template exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

__all__ = ["start_template"]

_PR_SET_PDEATHSIG = 1


def start_template(worker_main: Callable[[socket.socket], None]) -> tuple[int, socket.socket]:
    """Fork the template; return its pid and the node's end of the control socket.

    ``worker_main`` runs in each forked worker with its socket and is expected not to
    return before its work is done.
    """
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _run_and_exit(lambda: _serve(theirs, worker_main))
    theirs.close()
    return pid, ours


def _run_and_exit(body: Callable[[], None]) -> None:
    status = 1
    try:
        body()
        status = 0
    except BaseException:  # noqa: BLE001 - the last frame of a forked process
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _serve(control: socket.socket, worker_main: Callable[[socket.socket], None]) -> None:
    _ignore_stop_signals()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, _do_nothing)
    children: set[int] = set()
    sources: list[socket.socket | int] = [control, wake_read]
    while True:
        readable, _, _ = select.select(sources, [], [])
        if wake_read in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
        _report_ended(control, children)
        if control in readable:
            data, fds = _requests(control)
            if not data:
                _kill(children)
                return
            for fd in fds:
                pid = _fork_worker(fd, [control.fileno(), wake_read, wake_write], worker_main)
                children.add(pid)
                _send(control, {"spawned": pid})


def _requests(control: socket.socket) -> tuple[bytes, list[int]]:
    try:
        data, fds, _, _ = socket.recv_fds(control, 4096, 64)
    except ConnectionError:
        return b"", []  # the node is gone, without having read what was sent to it
    return data, fds


def _fork_worker(fd: int, ours: list[int], worker_main: Callable[[socket.socket], None]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for inherited in ours:
            os.close(inherited)
        _die_with_parent(parent)
        _run_and_exit(lambda: worker_main(socket.socket(fileno=fd)))
    os.close(fd)
    return pid


def _die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when the template dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _ignore_stop_signals() -> None:
    # A supervisor may signal the whole group; the node alone decides how to drain.
    # Handlers rather than SIG_IGN: they are reset in programs that a job starts.
    signal.signal(signal.SIGTERM, _do_nothing)
    signal.signal(signal.SIGINT, _do_nothing)
    signal.signal(signal.SIGHUP, _do_nothing)


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    return None


def _report_ended(control: socket.socket, children: set[int]) -> None:
    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        children.discard(pid)
        _send(control, {"ended": pid, "exit_code": os.waitstatus_to_exitcode(status)})


def _send(control: socket.socket, message: dict[str, int]) -> None:
    # The node may be gone; the next read of the control socket says so.
    with contextlib.suppress(OSError):
        control.sendall(json.dumps(message).encode() + b"\n")


def _kill(children: set[int]) -> None:
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in children:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
