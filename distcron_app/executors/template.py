"""The template process: forks workers on request, signals them, and reports how each ended.

It is forked from the node before any thread or connection exists and stays that way,
so a fork of it is always safe; each fork looks again. Requests are lines on a control
socket, with the worker's end of its socket as a passed file descriptor. When the node is
gone, by any signal, the control socket ends: every worker is killed and the template exits.

A worker of the kind "own" runs one job and leads a session and process group of its own.
What is left of the group is killed when its leader ends. Only the template signals
workers: it is their parent, so it knows that a process id still means the same process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Literal

from django.db import connections

__all__ = ["Kind", "start_template", "unsafe_to_fork"]

Kind = Literal["shared", "own"]
Mains = Mapping[Kind, Callable[[socket.socket], None]]

_PR_SET_PDEATHSIG = 1
# A process that forks while it is looked for is found in the next round.
KILL_ROUNDS = 10


def unsafe_to_fork() -> list[str]:
    """Return what a fork of this process would share or leave behind: connections, threads.

    A database connection in two processes mixes their answers, and a lock that another
    thread holds at the fork is held for ever in the child.
    """
    open_aliases = [
        each.alias for each in connections.all(initialized_only=True) if each.connection is not None
    ]
    others = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    return [f"database connection {alias!r}" for alias in open_aliases] + [
        f"thread {name!r}" for name in others
    ]


def start_template(mains: Mains) -> tuple[int, socket.socket]:
    """Fork the template; return its pid and the node's end of the control socket.

    ``mains`` has for each kind what runs in a forked worker with its socket; it is expected
    not to return before its work is done.
    """
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _run_and_exit(lambda: _Template(theirs, mains).serve())
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


class _Template:
    """Serves one node until its end of the control socket is gone."""

    def __init__(self, control: socket.socket, mains: Mains) -> None:
        self._control = control
        self._mains = mains
        self._children: dict[int, Kind] = {}
        self._buffer = b""
        # Passed for requests to spawn, in their order.
        self._descriptors: list[int] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def serve(self) -> None:
        # Collections in a worker then leave what it shares with this process untouched.
        gc.freeze()
        _ignore_stop_signals()
        signal.set_wakeup_fd(self._wake_write)
        signal.signal(signal.SIGCHLD, _do_nothing)
        sources: list[socket.socket | int] = [self._control, self._wake_read]
        while True:
            readable, _, _ = select.select(sources, [], [])
            if self._wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            self._report_ended()
            if self._control in readable:
                data = self._receive()
                if not data:
                    self._kill_all()
                    return
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))

    def _receive(self) -> bytes:
        """Return what the node asks for; nothing when it is gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 4096, 64)
        except ConnectionResetError:  # it ended without having read what was sent to it
            return b""
        self._descriptors.extend(fds)
        return data

    def _obey(self, request: dict[str, Any]) -> None:
        if "spawn" in request:
            pid = self._fork(request["spawn"], self._descriptors.pop(0))
            self._children[pid] = request["spawn"]
            self._send({"spawned": pid})
        elif request["pid"] in self._children:
            self._signal(request["pid"], request["signal"])

    def _fork(self, kind: Kind, fd: int) -> int:
        unsafe = unsafe_to_fork()
        if unsafe:
            raise RuntimeError(f"The template of the workers has {', '.join(unsafe)}.")
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ours = (self._control.fileno(), self._wake_read, self._wake_write)
            for inherited in (*ours, *self._descriptors):
                os.close(inherited)
            if kind == "own":
                os.setsid()
            _die_with_parent(parent)
            _run_and_exit(lambda: self._mains[kind](socket.socket(fileno=fd)))
        os.close(fd)
        return pid

    def _signal(self, pid: int, signum: int) -> None:
        """Signal a worker that is not reaped, with its whole group where it leads one."""
        if self._children[pid] == "own":
            try:
                os.killpg(pid, signum)
                return
            except (ProcessLookupError, PermissionError):
                pass  # it does not lead its group yet, or has ended
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

    def _report_ended(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if self._children.get(pid) == "own":
                # What its job left behind keeps the number of the group from being used again.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                if status != 0:
                    # It could not end what it has put into other groups.
                    _kill_session(pid)
            self._children.pop(pid, None)
            self._send({"ended": pid, "exit_code": os.waitstatus_to_exitcode(status)})

    def _send(self, message: dict[str, int]) -> None:
        # The node may be gone; the next read of the control socket says so.
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def _kill_all(self) -> None:
        for pid in self._children:
            self._signal(pid, signal.SIGKILL)
        for pid, kind in self._children.items():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            if kind == "own":
                _kill_session(pid)


def _kill_session(leader: int) -> None:
    """Kill what is left of the session of a process that has ended; needs ``/proc``."""
    for _round in range(KILL_ROUNDS):
        members = [pid for pid in _processes() if _session_of(pid) == leader]
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not members:
            return


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []


def _session_of(pid: int) -> int:
    """Return the session of a process; 0 for one that has ended, a zombie included."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            state, _parent, _group, session = stat.read().rpartition(b")")[2].split()[:4]
    except (OSError, ValueError):
        return 0
    return 0 if state == b"Z" else int(session)


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
