"""`make demo`: prepare a virtualenv in .demo and hand over to the session in it.

Standard library only, so that it runs on a bare machine with Python 3.11. The first
line is printed before anything slow happens.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from project.demo.processes import (
    AlreadyRunning,
    Processes,
    install_stop_signals,
    stop_leftovers,
)

ROOT = Path(__file__).resolve().parent.parent.parent
REQUIREMENTS = ROOT / "requirements.txt"
OPTIONAL = ROOT / "requirements-demo.txt"


def main() -> None:
    options = _parser().parse_args()
    if isinstance(sys.stdout.encoding, str):
        sys.stdout.reconfigure(errors="replace", line_buffering=False)  # type: ignore[union-attr]
    demo = Launch(options)
    if options.stop or options.clean:
        demo.stop()
        return
    install_stop_signals()
    try:
        demo.run()
    except KeyboardInterrupt:
        _say("\n")
        raise SystemExit(130) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make demo", description="Try distcron on this machine.")
    parser.add_argument(
        "--seconds",
        type=float,
        help="stop after this long; exit 0 only without a miss and with a failover seen",
    )
    parser.add_argument(
        "--locks",
        choices=["auto", "server", "wheel", "file"],
        default="auto",
        help="where the locks are: redis-server, the server of a wheel, or lock files",
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".demo", help="where everything is kept"
    )
    parser.add_argument("--stop", action="store_true", help="stop a running or killed demo")
    parser.add_argument("--clean", action="store_true", help="stop it and remove the folder")
    return parser


class Launch:
    """Prepares the folder of the demo and becomes the session."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder: Path = options.folder.resolve()
        self._venv = self._folder / "venv"
        self._python = self._venv / "bin" / "python"

    def run(self) -> None:
        """Make the virtualenv, install the packages, and replace this process."""
        shown = os.path.relpath(self._venv)
        _say(f"[1/6] virtualenv {shown} … ")
        if sys.version_info < (3, 11):  # noqa: UP036 - any python3 may run this file
            _fail(f"Python {sys.version.split()[0]} is too old, 3.11 or later is needed.")
        stop_leftovers(self._folder)
        processes = Processes(self._folder)
        try:
            processes.own_folder()
        except AlreadyRunning as error:
            _fail(str(error))
        try:
            self._prepare(processes)
        finally:
            processes.stop_all()
            processes.leave_folder()
        self._become_session()

    def stop(self) -> None:
        """Stop a running or killed demo; with --clean remove its folder as well."""
        stopped = stop_leftovers(self._folder, owner_too=True)
        _say(f"stopped: {', '.join(stopped)}\n" if stopped else "nothing was running\n")
        if self._options.clean:
            shutil.rmtree(self._folder, ignore_errors=True)
            _say(f"removed {self._folder}\n")

    def _become_session(self) -> None:
        environment = {
            **os.environ,
            "DISTCRON_DATA_DIR": str(self._folder),
            "DJANGO_SETTINGS_MODULE": "project.demo.settings",
            "PYTHONUNBUFFERED": "1",
        }
        command = [str(self._python), "-m", "project.demo.session"]
        command += ["--locks", self._options.locks]
        if self._options.seconds is not None:
            command += ["--seconds", str(self._options.seconds)]
        os.chdir(ROOT)
        # The same pid, so that Ctrl-C reaches the session.
        os.execve(self._python, command, environment)  # noqa: S606

    def _prepare(self, processes: Processes) -> None:
        started = time.monotonic()
        if not self._python.exists() or not _runs(str(self._python), "-c", "pass"):
            self._make_venv(processes, _working_uv())
        _say(f"ok {_since(started)}\n[2/6] packages … ")
        started = time.monotonic()
        wants_wheel = _wants_wheel(self._options.locks)
        stamp, state = self._venv / ".installed", _wanted_state(wants_wheel)
        if not stamp.exists() or stamp.read_text() != state:
            self._install(processes, wants_wheel=wants_wheel)
            stamp.write_text(state)
        _say(f"{_installed(self._python)} … ok {_since(started)}\n")

    def _make_venv(self, processes: Processes, uv: str | None) -> None:
        shutil.rmtree(self._venv, ignore_errors=True)
        command = [sys.executable, "-m", "venv", str(self._venv)]
        if uv:
            command = [uv, "venv", "--quiet", "--python", sys.executable, str(self._venv)]
        if not processes.finish("venv", command):
            _fail(
                "No virtualenv could be made. On Debian: apt-get install python3-venv. "
                f"Or install uv. Output: {processes.log('venv')}"
            )

    def _install(self, processes: Processes, *, wants_wheel: bool) -> None:
        installers: list[Callable[[Processes], list[str]]] = [self._pip]
        uv = _working_uv()
        if uv:
            # uv may not know the certificates or the index that pip is configured for.
            by_uv = [uv, "pip", "install", "--quiet", "--python", str(self._python)]
            installers.insert(0, lambda processes: by_uv)
        for installer in installers:
            install = installer(processes)
            if processes.finish("packages", [*install, "-r", str(REQUIREMENTS)]):
                break
        else:
            lines = processes.log("packages").read_text(errors="replace").strip().splitlines()
            _fail("The packages could not be installed:\n  " + "\n  ".join(lines[-8:]))
        if wants_wheel and not processes.finish("wheel", [*install, "-r", str(OPTIONAL)]):
            _say("(no Redis in a wheel for this machine) ")

    def _pip(self, processes: Processes) -> list[str]:
        """Return the command of pip, which a virtualenv that uv made does not have."""
        if not _runs(str(self._python), "-m", "pip", "--version"):
            processes.finish("ensurepip", [str(self._python), "-m", "ensurepip"])
        return [str(self._python), "-m", "pip", "install", "--quiet"]


def _wants_wheel(locks: str) -> bool:
    if locks == "auto":
        return not os.environ.get("REDIS_URL") and shutil.which("redis-server") is None
    return locks == "wheel"


def _wanted_state(wants_wheel: bool) -> str:
    files = [REQUIREMENTS, OPTIONAL] if wants_wheel else [REQUIREMENTS]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _installed(python: Path) -> str:
    question = (
        "from importlib.metadata import version as v;"
        "names = ('django', 'django-redis', 'croniter', 'gunicorn');"
        "print(', '.join(f'{n} {v(n)}' for n in names))"
    )
    shown = subprocess.run(  # noqa: S603 - the demo's own interpreter
        [str(python), "-c", question], capture_output=True, text=True, check=False
    )
    return shown.stdout.strip()


def _working_uv() -> str | None:
    # A shim may be on PATH and not work.
    uv = shutil.which("uv")
    return uv if uv and _runs(uv, "--version") else None


def _runs(*command: str) -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603
    return False


def _since(started: float) -> str:
    return f"{time.monotonic() - started:.1f} s"


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _fail(text: str) -> NoReturn:
    _say(f"failed\n{text}\n")
    raise SystemExit(1)


if __name__ == "__main__":
    main()
