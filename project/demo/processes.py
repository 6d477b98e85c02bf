"""Child processes of the demo, each in a session of its own and with a pid file.

The pid file holds the process id and the moment the process was born, so that a
leftover of a killed demo is found later and a stranger who got its number is not hurt.
Standard library only: it runs before the packages are installed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = [
    "AlreadyRunning",
    "Processes",
    "install_stop_signals",
    "stop_leftovers",
    "wait_until",
]

STOP_SECONDS = 8.0
OWNER = "demo"


class AlreadyRunning(Exception):
    """Another demo uses the folder."""


class Processes:
    """Starts and stops the demo's processes. Output goes to ``<folder>/log/<name>.log``."""

    def __init__(self, folder: Path) -> None:
        self._pids = folder / "pid"
        self._logs = folder / "log"
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._pids.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)

    def own_folder(self) -> None:
        """Write this process's pid file. Raise AlreadyRunning while another demo lives."""
        other = _living(self._pids / OWNER)
        if other not in (None, os.getpid()):
            raise AlreadyRunning(f"A demo runs already (pid {other}). Stop it: make demo-stop")
        _write_pid_file(self._pids / OWNER, os.getpid())

    def leave_folder(self) -> None:
        """Remove this process's pid file."""
        (self._pids / OWNER).unlink(missing_ok=True)

    def log(self, name: str) -> Path:
        """Return where the output of ``name`` is."""
        return self._logs / f"{name}.log"

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> int:
        """Start ``command`` and return its pid. Raise OSError when it cannot be executed."""
        with open(self.log(name), "ab") as log:
            child = subprocess.Popen(  # noqa: S603 - commands of the demo itself
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {})},
                # Ctrl-C reaches the demo alone, which then stops the others in order.
                start_new_session=True,
            )
        self._children[name] = child
        _write_pid_file(self._pids / name, child.pid)
        return child.pid

    def finish(self, name: str, command: Sequence[str]) -> bool:
        """Run ``command`` to its end; True when it succeeded."""
        with contextlib.suppress(OSError):
            self.start(name, command)
            return self._reap(name, self._children[name].wait()) == 0
        return False

    def exit_code(self, name: str) -> int | None:
        """Return the exit code of a process that ended, else None."""
        child = self._children.get(name)
        return None if child is None else child.poll()

    def running(self) -> list[str]:
        """Return the names of what was started and not stopped, oldest first."""
        return list(self._children)

    def kill(self, name: str) -> None:
        """End one process as a power cut would, and wait for its end."""
        child = self._children[name]
        child.kill()
        self._reap(name, child.wait())

    def stop_all(self) -> None:
        """Ask all to stop, newest first, wait, and kill the groups of those that did not."""
        for child in reversed(self._children.values()):
            _signal_group(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for name, child in reversed(list(self._children.items())):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            _signal_group(child.pid, signal.SIGKILL)
            self._reap(name, child.wait())

    def _reap(self, name: str, code: int) -> int:
        del self._children[name]
        (self._pids / name).unlink(missing_ok=True)
        return code


def install_stop_signals() -> None:
    """Turn SIGTERM and SIGHUP into SystemExit, so that ``finally`` stops the children."""

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)


def stop_leftovers(folder: Path, *, owner_too: bool = False) -> list[str]:
    """Stop what a killed demo left behind; with ``owner_too`` a running demo as well.

    Return the names of what was stopped.
    """
    stopped = []
    owner = _living(folder / "pid" / OWNER)
    if owner_too and owner is not None:
        os.kill(owner, signal.SIGTERM)
        if not wait_until(lambda: _living(folder / "pid" / OWNER) is None, STOP_SECONDS * 2):
            os.kill(owner, signal.SIGKILL)
        stopped.append(OWNER)
    elif owner is not None:
        return []
    left = [file for file in sorted((folder / "pid").glob("*")) if _is_other(_living(file))]
    for how, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 2.0)):
        for pid_file in left:
            _signal_group(_living(pid_file), how)
        wait_until(lambda: not any(map(_living, left)), seconds)
    for pid_file in (folder / "pid").glob("*"):
        pid_file.unlink()
    return stopped + [file.name for file in left]


def _is_other(pid: int | None) -> bool:
    return pid is not None and pid != os.getpid()


def _signal_group(pid: int | None, signum: signal.Signals) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signum)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Ask ``condition`` every 50 ms until it is true; False when the seconds have passed."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _write_pid_file(path: Path, pid: int) -> None:
    path.write_text(f"{pid} {_birth(pid)}")


def _living(pid_file: Path) -> int | None:
    """Return the pid in the file while the very process that it was written for lives."""
    try:
        number, _, birth = pid_file.read_text().partition(" ")
    except OSError:
        return None
    if not number.isdigit() or not birth or _birth(int(number)) != birth:
        return None
    return int(number)


def _birth(pid: int) -> str:
    """Return what tells a process from a later one with the same number; "" when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return shown.stdout.strip()
