"""The demo itself: servers, three nodes, and a commentary computed from the rows."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import django

from project.demo.processes import Processes, install_stop_signals, wait_until
from project.demo.redis_ladder import choose_locks, free_port

ROOT = Path(__file__).resolve().parent.parent.parent
NODES = ("node-1", "node-2", "node-3")
START_SECONDS = 30.0
_WORDS = [
    "angin",
    "api",
    "awan",
    "batu",
    "bintang",
    "bukit",
    "bulan",
    "bunga",
    "daun",
    "embun",
    "garam",
    "gula",
    "hujan",
    "jeruk",
    "kayu",
    "kelapa",
    "kopi",
    "laut",
    "madu",
    "mangga",
    "matahari",
    "ombak",
    "padi",
    "pasir",
    "perahu",
    "rotan",
    "sungai",
    "teh",
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--locks", default="auto")
    parser.add_argument("--seconds", type=float)
    options = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    install_stop_signals()
    processes = Processes(Path(os.environ["DISTCRON_DATA_DIR"]))
    processes.own_folder()
    code = 130
    try:
        code = Session(processes, options.seconds).run(options.locks)
    except KeyboardInterrupt:
        _say("\nstopping …\n")
    finally:
        _stop(processes)
    raise SystemExit(code)


def _stop(processes: Processes) -> None:
    try:
        processes.stop_all()
    except KeyboardInterrupt:
        # A second Ctrl-C: no more patience, and still nothing is left behind.
        for name in processes.running():
            processes.kill(name)
    processes.leave_folder()
    with contextlib.suppress(OSError):
        _say("everything is stopped\n")


class Session:
    """Starts everything, comments, and returns the exit code."""

    def __init__(self, processes: Processes, seconds: float | None) -> None:
        self._processes = processes
        self._seconds = seconds
        self._environment: dict[str, str] = {}
        self._web_port = free_port()

    def run(self, locks: str) -> int:
        """Run until the time is over or a signal comes; 0 when all went as promised."""
        self._start_storage(locks)
        self._start_web()
        self._start_nodes()
        from project.demo.commentary import Commentary

        return Commentary(
            say=_say,
            kill=self._processes.kill,
            restart=self._start_node,
            ended=self._ended,
            seconds=self._seconds,
        ).run()

    def _start_storage(self, wanted: str) -> None:
        _say("[3/6] database … ")
        # Before Django reads its settings, which name the server of the locks.
        locks = choose_locks(self._processes, wanted)
        os.environ["REDIS_URL"] = locks.url
        django.setup()
        from django.core.management import call_command

        from project.demo.schedules import seed

        call_command("migrate", verbosity=0, interactive=False)
        _say(
            f"{_database_words()} migrated, {seed()} demo schedules\n[4/6] redis … {locks.words}\n"
        )

    def _start_web(self) -> None:
        from django.conf import settings

        _say("[5/6] web … ")
        password = _make_user()
        address = f"127.0.0.1:{self._web_port}"
        command = [sys.executable, "-m", "gunicorn", "-c", "project/gunicorn.conf.py"]
        environment = {"WEB_BIND": address, "WEB_WORKERS": "1"}
        self._processes.start("web", [*command, "project.wsgi"], environment)
        self._wait("web", lambda: _answers(f"http://{address}/admin/login/"))
        _say(
            f"http://{address}{_home()}   user demo · password (generated) {password}   "
            f"(zone {settings.TIME_ZONE})\n"
        )

    def _start_nodes(self) -> None:
        from distcron_app.models import Node

        _say(f"[6/6] {len(NODES)} scheduler nodes … ")
        pids = {self._start_node(name) for name in NODES}
        self._wait("node-1", lambda: Node.objects.alive().filter(pid__in=pids).count() == len(pids))
        _say(f"started: {' '.join(NODES)}   (logs: {self._processes.log('node-N')})\n")

    def _start_node(self, name: str) -> int:
        command = [sys.executable, "manage.py", "runscheduler", "--name", name]
        return self._processes.start(name, command)

    def _wait(self, name: str, condition: Callable[[], bool]) -> None:
        wait_until(
            lambda: condition() or self._processes.exit_code(name) is not None, START_SECONDS
        )
        if not condition():
            lines = self._processes.log(name).read_text(errors="replace").splitlines()[-10:]
            _say("failed\n  " + "\n  ".join(lines) + "\n")
            raise SystemExit(1)

    def _ended(self) -> list[str]:
        """Return the names of processes that ended by themselves."""
        running = self._processes.running()
        return [name for name in running if self._processes.exit_code(name) is not None]


def _database_words() -> str:
    from django.db import connection

    if connection.vendor == "sqlite":
        name = Path(str(connection.settings_dict["NAME"]))
        shown = name.relative_to(ROOT) if name.is_relative_to(ROOT) else name
        return f"SQLite {shown} (set DATABASE_URL for PostgreSQL) …"
    parts = urlsplit(os.environ.get("DATABASE_URL", ""))
    where = f"{parts.hostname}:{parts.port or ''}{parts.path}"
    return f"{connection.display_name} at {where} (the demo adds schedules and a user) …"


def _make_user() -> str:
    from django.contrib.auth import get_user_model

    password = "-".join(secrets.choice(_WORDS) for _ in range(3)) + f"-{secrets.randbelow(90) + 10}"
    user, _ = get_user_model().objects.get_or_create(
        username="demo", defaults={"is_staff": True, "is_superuser": True}
    )
    user.set_password(password)
    user.save()
    return password


def _home() -> str:
    from django.urls import NoReverseMatch, reverse

    try:
        return reverse("distcron:overview")
    except NoReverseMatch:
        return reverse("admin:index")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:  # noqa: S310 - our own loopback URL
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
