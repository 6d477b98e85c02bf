"""``schedulerctl prune``: counts, asks, deletes in batches, and can be stopped."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import override_settings

from distcron_app import lifecycle, operations
from distcron_app.instants import database_now
from distcron_app.lifecycle import Limits
from distcron_app.models import AuditEntry, Run, Schedule
from tests.integration.schedulerctl_builders import ctl, make_run, make_schedule

pytestmark = pytest.mark.django_db

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def thirty_and_ninety_days() -> Iterator[None]:
    with override_settings(DISTCRON=settings.DISTCRON | {"KEEP_DAYS": 30, "KEEP_FAILED_DAYS": 90}):
        yield


def old_runs(schedule: Schedule, count: int, state: str = "succeeded", days: int = 40) -> None:
    for _ in range(count):
        make_run(schedule, state, finished_at=database_now() - timedelta(days=days))


@pytest.fixture
def history() -> Schedule:
    """Three runs beyond the project's days and two within."""
    schedule = make_schedule()
    old_runs(schedule, 3)
    old_runs(schedule, 2, days=1)
    return schedule


def test_a_dry_run_counts_and_deletes_nothing(history: Schedule) -> None:
    answer = ctl("prune", "--dry-run")
    assert (answer.code, answer.out) == (0, "3 of 5 runs would be deleted.\n")
    assert answer.error == "Nothing was changed: this was a dry run.\n"
    assert Run.objects.count() == 5
    assert not AuditEntry.objects.exists()


def test_without_a_terminal_it_needs_yes(history: Schedule) -> None:
    answer = ctl("prune")
    assert (answer.code, answer.out) == (5, "")
    assert "Delete 3 of 5 runs? Not confirmed. Add --yes" in answer.error
    assert Run.objects.count() == 5


def test_deletes_and_is_audited_with_the_count(
    history: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ops")
    answer = ctl("prune", "--yes", "--reason", "disk is full")
    assert (answer.code, answer.out) == (0, "3 runs deleted.\n")
    assert Run.objects.count() == 2
    entry = AuditEntry.objects.get()
    assert (entry.actor, entry.via, entry.verb, entry.reason) == (
        "cli:ops",
        "cli",
        "prune",
        "disk is full",
    )
    assert (entry.object_type, entry.object_id, entry.object_label) == ("run", "", "runs")
    assert entry.after == {"deleted": 3}


def test_limits_and_schedule_of_the_command_line_come_first(history: Schedule) -> None:
    other = make_schedule("other")
    old_runs(other, 2)
    old_runs(history, 3, "failed", days=2)
    words = ["prune", "--schedule", "invoice-close", "--keep-days", "0", "--keep-failed", "1"]
    assert ctl(*words, "--yes").out == "2 runs deleted.\n"
    assert Run.objects.filter(schedule=other).count() == 2
    entry = AuditEntry.objects.get()
    assert (entry.object_type, entry.object_id) == ("schedule", str(history.pk))
    assert entry.after == {"deleted": 2, "keep_days": 0, "keep_failed": 1}


def test_nothing_to_delete_is_said_and_not_audited() -> None:
    answer = ctl("prune")
    assert (answer.code, answer.out) == (
        0,
        "Nothing to delete: all runs are within their limits.\n",
    )
    assert not AuditEntry.objects.exists()


def test_json_has_the_numbers(history: Schedule) -> None:
    asked = {"version": 1, "verb": "prune", "schedule": None, "runs": 5, "prunable": 3}
    assert ctl("prune", "--dry-run", "--json").data == asked | {"dry_run": True, "deleted": 0}
    assert ctl("prune", "--yes", "--json").data == asked | {"dry_run": False, "deleted": 3}


def test_a_pipe_gets_plain_lines(history: Schedule) -> None:
    answer = ctl("prune", "--yes", "--batch", "1")
    lines = answer.error.splitlines()
    assert [line.partition("  ")[0] for line in lines] == [
        "1 of 3 runs deleted",
        "2 of 3 runs deleted",
        "3 of 3 runs deleted",
    ]
    assert "33 %" in lines[0]
    assert "\r" not in answer.error
    assert ctl("prune", "--yes", "-q").error == ""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--schedule", "invoice-clos"], "Did you mean invoice-close?"),
        (["--keep-days", "-1"], "--keep-days: got '-1', allowed 0 to 36500"),
        (["--keep-failed", "x"], "--keep-failed: got 'x', allowed 0 to 10000000"),
        (["--batch", "0"], "--batch: got '0', allowed 1 to 10000"),
        (["--user", "nobody"], "user 'nobody': not found"),
    ],
)
def test_wrong_words_name_what_is_allowed(history: Schedule, words: list[str], text: str) -> None:
    answer = ctl("prune", *words, "--yes")
    assert answer.code != 0
    assert text in answer.error
    assert Run.objects.count() == 5


def test_a_user_needs_the_permission_to_delete_runs(history: Schedule) -> None:
    siti = get_user_model().objects.create_user("siti")
    refused = ctl("prune", "--yes", "--user", "siti")
    assert refused.code == 5
    assert "distcron.delete_run" in refused.error
    siti.user_permissions.set(Permission.objects.filter(codename="delete_run"))
    assert ctl("prune", "--yes", "--user", "siti").code == 0
    assert AuditEntry.objects.get().actor == "siti"


def test_ends_between_two_batches_where_it_is_told_to(history: Schedule) -> None:
    told: list[int] = []

    def goes_on(count: int) -> bool:
        told.append(count)
        return count < 2

    done = operations.prune_history(Limits(), actor="cli:ops", via="cli", batch=1, goes_on=goes_on)
    assert (done, told) == (2, [1, 2])
    assert lifecycle.count_prunable() == 1
    assert AuditEntry.objects.get().after == {"deleted": 2}


def test_what_was_deleted_before_an_error_is_audited(history: Schedule) -> None:
    def goes_on(_count: int) -> bool:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        operations.prune_history(Limits(), actor="cli:ops", via="cli", batch=2, goes_on=goes_on)
    assert AuditEntry.objects.get().after == {"deleted": 2}


class OnTerminal:
    """The command in a process of its own, on a database file, with a terminal."""

    def __init__(self, folder: Path) -> None:
        self.environment = os.environ | {
            "DJANGO_SETTINGS_MODULE": "project.settings",
            "DATABASE_URL": f"sqlite:///{folder}/db.sqlite3",
            "DISTCRON_DATA_DIR": str(folder),
            "NO_COLOR": "1",
            "TERM": "xterm",
        }
        self.environment.pop("REDIS_URL", None)

    def python(self, code: str) -> str:
        words = [sys.executable, "manage.py", "shell", "--no-imports", "-c", code]
        done = subprocess.run(
            words, env=self.environment, cwd=ROOT, check=True, capture_output=True, text=True
        )
        return done.stdout

    def start(self, *words: str) -> tuple[subprocess.Popen[bytes], int]:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "manage.py", "schedulerctl", "prune", *words],
            env=self.environment,
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        return process, ours


FILL = """
from datetime import timedelta
from distcron_app.instants import database_now
from distcron_app.models import Run, Schedule
s = Schedule.objects.create(key="k", name="k", job="project.demo.heartbeat", cron="0 0 * * *")
at = database_now() - timedelta(days=400)
Run.objects.bulk_create([
    Run(schedule=s, schedule_name="k", job="x", delivery="at_most_once", due_at=at,
        finished_at=at, state="succeeded") for _ in range(2000)])
"""
LEFT = """
from distcron_app.models import AuditEntry, Run
import json
pruned = AuditEntry.objects.filter(verb="prune")
print(json.dumps([Run.objects.count(), [entry.after["deleted"] for entry in pruned]]))
"""


@pytest.fixture
def project(tmp_path: Path) -> OnTerminal:
    terminal = OnTerminal(tmp_path)
    words = [sys.executable, "manage.py", "migrate", "-v", "0"]
    subprocess.run(words, env=terminal.environment, cwd=ROOT, check=True)
    terminal.python(FILL)
    return terminal


def read(terminal: int) -> bytes:
    select.select([terminal], [], [], 60)
    try:
        return os.read(terminal, 65_536)
    except OSError:  # the other end is closed
        return b""


def rest_of(terminal: int) -> str:
    shown = b"".join(iter(lambda: read(terminal), b""))
    os.close(terminal)
    return shown.decode()


def left(project: OnTerminal) -> Any:
    return json.loads(project.python(LEFT))


def test_a_terminal_is_asked_and_shows_a_bar(project: OnTerminal) -> None:
    process, terminal = project.start("--batch", "500")
    os.write(terminal, b"y\n")
    shown = rest_of(terminal)
    assert process.wait(60) == 0
    assert "Delete 2,000 of 2,000 runs? [y/N]" in shown
    assert "\r500 of 2,000 runs deleted  ▓▓▓▓▓░░░░░░░░░░░░░░░ 25 %" in shown
    assert "ETA 0:00" in shown
    assert shown.splitlines()[-1] == "2,000 runs deleted."
    assert left(project) == [0, [2000]]


def test_no_on_a_terminal_changes_nothing(project: OnTerminal) -> None:
    process, terminal = project.start()
    os.write(terminal, b"n\n")
    shown = rest_of(terminal)
    assert process.wait(60) == 5
    assert "not confirmed; nothing was changed." in shown
    assert left(project) == [2000, []]


def test_ctrl_c_ends_between_two_batches_and_is_audited(project: OnTerminal) -> None:
    process, terminal = project.start("--yes", "--batch", "1")
    shown = b""
    while b"runs deleted" not in shown:
        shown += read(terminal)
    process.send_signal(signal.SIGINT)
    text = shown.decode() + rest_of(terminal)
    assert process.wait(60) == 130
    assert "interrupted between two batches" in text
    assert "Traceback" not in text
    rows, (deleted,) = left(project)
    assert 0 < deleted < 2000
    assert rows == 2000 - deleted
