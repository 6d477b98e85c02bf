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
from pathlib import Path
from typing import NoReturn

from project.demo.processes import (
    AlreadyRunning,
    Processes,
    install_stop_signals,
    stop_leftovers,
)

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / ".demo"
VENV = FOLDER / "venv"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = ROOT / "requirements.txt"
OPTIONAL_REQUIREMENTS = ROOT / "requirements-demo.txt"


def main() -> None:
    options = _parser().parse_args()
    if isinstance(sys.stdout.encoding, str):
        sys.stdout.reconfigure(errors="replace", line_buffering=False)  # type: ignore[union-attr]
    if options.stop or options.clean:
        _stop(clean=options.clean)
        return
    install_stop_signals()
    with contextlib.suppress(KeyboardInterrupt):
        _run(options)
        return
    _say("\n")
    raise SystemExit(130)


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
    parser.add_argument("--stop", action="store_true", help="stop a running or killed demo")
    parser.add_argument("--clean", action="store_true", help="stop it and remove .demo")
    return parser


def _run(options: argparse.Namespace) -> None:
    _say("[1/6] virtualenv .demo/venv … ")
    if sys.version_info < (3, 11):  # noqa: UP036 - any python3 may run this file
        _fail(f"Python {sys.version.split()[0]} is too old, 3.11 or later is needed.")
    stop_leftovers(FOLDER)
    processes = Processes(FOLDER)
    try:
        processes.own_folder()
    except AlreadyRunning as error:
        _fail(str(error))
    try:
        _prepare(processes, options)
    finally:
        processes.stop_all()
        processes.leave_folder()
    environment = {
        **os.environ,
        "DISTCRON_DATA_DIR": str(FOLDER),
        "DJANGO_SETTINGS_MODULE": "project.demo.settings",
        "PYTHONUNBUFFERED": "1",
    }
    command = [str(PYTHON), "-m", "project.demo.session", "--locks", options.locks]
    if options.seconds is not None:
        command += ["--seconds", str(options.seconds)]
    os.chdir(ROOT)
    os.execve(PYTHON, command, environment)  # noqa: S606 - same pid, so Ctrl-C reaches the session


def _prepare(processes: Processes, options: argparse.Namespace) -> None:
    started = time.monotonic()
    uv = _working_uv()
    if not PYTHON.exists() or not _runs(str(PYTHON), "-c", "pass"):
        _make_venv(processes, uv)
    _say(f"ok {_since(started)}\n[2/6] packages … ")
    started = time.monotonic()
    wants_wheel = _wants_wheel(options.locks)
    stamp, state = VENV / ".installed", _wanted_state(wants_wheel)
    if not stamp.exists() or stamp.read_text() != state:
        _install(processes, uv, wants_wheel=wants_wheel)
        stamp.write_text(state)
    _say(f"{_installed()} … ok {_since(started)}\n")


def _make_venv(processes: Processes, uv: str | None) -> None:
    shutil.rmtree(VENV, ignore_errors=True)
    if uv:
        command = [uv, "venv", "--quiet", "--python", sys.executable, str(VENV)]
    else:
        command = [sys.executable, "-m", "venv", str(VENV)]
    if not processes.finish("venv", command):
        _fail(
            "No virtualenv could be made. On Debian: apt-get install python3-venv. "
            f"Or install uv. Output: {processes.log('venv')}"
        )


def _install(processes: Processes, uv: str | None, *, wants_wheel: bool) -> None:
    if uv:
        install = [uv, "pip", "install", "--quiet", "--python", str(PYTHON)]
    else:
        if not _runs(str(PYTHON), "-m", "pip", "--version"):
            processes.finish("ensurepip", [str(PYTHON), "-m", "ensurepip"])
        install = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not processes.finish("packages", [*install, "-r", str(REQUIREMENTS)]):
        lines = processes.log("packages").read_text(errors="replace").strip().splitlines()
        _fail("The packages could not be installed:\n  " + "\n  ".join(lines[-8:]))
    if wants_wheel and not processes.finish("wheel", [*install, "-r", str(OPTIONAL_REQUIREMENTS)]):
        _say("(no Redis in a wheel for this machine) ")


def _wants_wheel(locks: str) -> bool:
    if locks == "auto":
        return not os.environ.get("REDIS_URL") and shutil.which("redis-server") is None
    return locks == "wheel"


def _wanted_state(wants_wheel: bool) -> str:
    files = [REQUIREMENTS, OPTIONAL_REQUIREMENTS] if wants_wheel else [REQUIREMENTS]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _installed() -> str:
    question = (
        "from importlib.metadata import version as v;"
        "names = ('django', 'django-redis', 'croniter', 'gunicorn');"
        "print(', '.join(f'{n} {v(n)}' for n in names))"
    )
    shown = subprocess.run(  # noqa: S603 - the demo's own interpreter
        [str(PYTHON), "-c", question], capture_output=True, text=True, check=False
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


def _stop(*, clean: bool) -> None:
    stopped = stop_leftovers(FOLDER, owner_too=True)
    _say(f"stopped: {', '.join(stopped)}\n" if stopped else "nothing was running\n")
    if clean:
        shutil.rmtree(FOLDER, ignore_errors=True)
        _say(f"removed {FOLDER}\n")


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
