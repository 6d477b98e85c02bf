"""``schedulerctl locks``: the list, one lock, a release, and what a terminal shows."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.conf import settings
from django.test import override_settings
from django.utils.formats import number_format

from distcron_app.cli.width import display_width
from distcron_app.locks import new_owner_token
from distcron_app.models import AuditEntry, Run, Schedule
from tests.integration.lock_rows import NO_REDIS, ODD, hold, is_held, redis_locks, remove_ttl
from tests.integration.schedulerctl_builders import Answer, ctl, make_node, make_run, make_schedule

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "f" * 32

pytestmark = pytest.mark.django_db


@pytest.fixture
def namespace() -> Iterator[str]:
    with redis_locks() as used:
        yield used


@pytest.fixture
def running(namespace: str) -> Run:
    """Return an active run whose schedule's lock is held."""
    schedule = make_schedule()
    Schedule.objects.filter(pk=schedule.pk).update(fencing_token=4712)
    run = make_run(schedule, "running", node=make_node(), fencing_token=4712)
    hold(f"schedule:{schedule.pk}", TOKEN, holder="web-1", namespace=namespace)
    return run


def release(*words: str) -> Answer:
    return ctl("locks", "release", *words, "--reason", "node hangs", "--yes")


class TestList:
    def test_shows_holder_run_fencing_token_and_verdict(self, running: Run) -> None:
        header, row = ctl("locks").lines

        assert header.split() == ["NAME", "HOLDER", "RUN", "AGE", "TTL", "FENCING", "VERDICT"]
        assert row.split()[:4] == ["invoice-close", "web-1", "ffffffff…", str(running.pk)]
        assert row.endswith("4712  ✔ healthy")

    def test_wide_shows_level_node_renewals_owner_and_why(self, running: Run) -> None:
        header, row = ctl("locks", "--wide").lines

        for title in ("LOCK", "LEVEL", "NODE", "RENEWALS", "OWNER", "WHY"):
            assert title in header.split()
        assert f"schedule:{running.schedule_id}  standard" in row
        assert "web-1, alive" in row
        assert TOKEN in row
        assert row.endswith("Its run is active and its node is alive.")

    def test_a_stuck_lock_says_how_to_end_it(self, namespace: str) -> None:
        hold(f"name:{ODD}", TOKEN, holder="web-1", namespace=namespace)
        remove_ttl(f"name:{ODD}", namespace)

        answer = ctl("locks", "--no-header")

        assert answer.out.split()[-3:] == ["-", "✖", "STUCK"]
        assert "none" in answer.out.split()
        assert answer.error == (
            f"name:{ODD}: It has no TTL, which only a foreign hand can cause. Release it. "
            f"schedulerctl locks release 'name:{ODD}' --reason TEXT\n"
        )

    def test_json_says_which_levels_answer(self, running: Run) -> None:
        document = ctl("locks", "--json").data

        standard = document["levels"][0]
        assert standard.pop("ping_ms") >= 0
        assert standard == {
            "name": "standard",
            "backend": "redis",
            "answers": True,
            "problem": "",
            "members": [],
        }
        assert [lock["run"] for lock in document["locks"]] == [running.pk]

    def test_a_level_that_is_away_hides_no_other_and_exits_with_6(self) -> None:
        config = {"LOCK_BACKEND": "redis", "LOCK_LEVELS": {"local": ["memory"]}}
        with override_settings(CACHES=NO_REDIS, DISTCRON=config):
            answer = ctl("locks", "--json")

        assert answer.code == 6
        assert answer.data["locks"] == []
        assert [level["answers"] for level in answer.data["levels"][:2]].count(False) == 1
        assert answer.error.startswith("Lock backend 'redis': unavailable, ConnectionError")

    def test_a_level_that_answers_alone_is_no_failure(self) -> None:
        config = {"LOCK_BACKEND": "redis", "LOCK_LEVELS": {"local": ["memory"]}}
        with override_settings(CACHES=NO_REDIS, DISTCRON=config):
            answer = ctl("locks", "--level", "local", "--json")

        assert (answer.code, answer.error) == (0, "")
        assert [level["name"] for level in answer.data["levels"]] == ["local"]

    def test_a_level_that_is_asked_for_is_never_left_out(self) -> None:
        config = {"LOCK_BACKEND": "memory", "LOCK_LEVELS": {"spare": ["redis"]}}
        with override_settings(CACHES=NO_REDIS, DISTCRON=config):
            every, spare = ctl("locks"), ctl("locks", "--level", "spare")

        assert (every.code, spare.code) == (0, 6)
        assert spare.error.startswith("Lock backend 'redis': unavailable")

    def test_an_unknown_level_names_the_known_ones(self, namespace: str) -> None:
        answer = ctl("locks", "--level", "stadnard")

        assert answer.code == 2
        assert answer.error.startswith("Lock level 'stadnard': not known. Choose one of standard")

    def test_only_the_locks_of_a_level(self, running: Run) -> None:
        config = settings.DISTCRON | {"LOCK_LEVELS": {"local": ["memory"]}}
        with override_settings(DISTCRON=config):
            answer = ctl("locks", "--level", "local", "--json")

        assert answer.data["locks"] == []


class TestTtl:
    @pytest.mark.parametrize("by", ["key", "name"])
    def test_shows_one_lock_by_key_or_name(self, running: Run, by: str) -> None:
        name = {"key": "invoice-close", "name": f"schedule:{running.schedule_id}"}[by]

        answer = ctl("locks", "ttl", name)

        assert answer.code == 0
        shown = dict(line.split("  ", 1) for line in answer.lines)
        assert shown["lock"].strip() == f"invoice-close (schedule:{running.schedule_id})"
        assert shown["node"].strip() == "web-1, alive"
        assert shown["run"].strip() == f"{running.pk}, running"
        assert shown["verdict"].strip() == "healthy. Its run is active and its node is alive."
        assert number_format(29, 0) in shown["TTL"] or "30" in shown["TTL"]

    @pytest.mark.parametrize("name", [ODD, f"name:{ODD}"])
    def test_shows_a_public_lock_by_its_text(self, namespace: str, name: str) -> None:
        hold(f"name:{ODD}", TOKEN, holder="app-7", namespace=namespace)

        facts = ctl("locks", "ttl", name, "--json").data["lock"]

        assert (facts["name"], facts["holder"], facts["schedule"]) == (f"name:{ODD}", "app-7", None)
        assert 0 < facts["ttl_ms"] <= 30_000

    def test_an_unknown_name_says_what_is_held(self, running: Run) -> None:
        answer = ctl("locks", "ttl", "invoice-clsoe")

        assert (answer.code, answer.out) == (4, "")
        assert answer.error == "lock 'invoice-clsoe': not held. Held: invoice-close"

    def test_without_locks_says_that_none_is_held(self, namespace: str) -> None:
        make_schedule()

        assert ctl("locks", "ttl", "invoice-close").error == (
            "lock 'invoice-close': not held; no lock is."
        )

    def test_a_name_of_two_locks_is_refused_with_both(self, namespace: str) -> None:
        schedule = make_schedule("export")
        for name in (f"schedule:{schedule.pk}", "name:export"):
            hold(name, TOKEN, holder="web-1", namespace=namespace)

        answer = ctl("locks", "ttl", "export")

        assert answer.code == 2
        assert answer.error == (
            "lock 'export': several are meant. "
            f"Write one of 'schedule:{schedule.pk}', 'name:export'."
        )


class TestRelease:
    def test_takes_the_lock_and_the_run_and_is_audited(self, running: Run) -> None:
        answer = release("invoice-close")

        assert answer.code == 0
        assert answer.out == (
            f"invoice-close: The lock is released. Run {running.pk} is shown as lost. "
            "The fencing token is 4713.\n"
        )
        running.refresh_from_db()
        assert (running.state, running.reason) == ("lost", "released")
        assert not is_held(f"schedule:{running.schedule_id}")
        entry = AuditEntry.objects.get()
        assert (entry.via, entry.verb, entry.reason) == ("cli", "release_lock", "node hangs")
        assert entry.actor.startswith("cli:")

    def test_says_before_what_will_follow(self, running: Run) -> None:
        error = release("invoice-close").error

        assert "Node web-1 is alive and will lose the lock" in error
        assert f"Its run {running.pk} will be shown as lost, and no node starts it again." in error
        assert "The fencing token becomes 4713." in error

    def test_a_run_that_may_repeat_is_queued_again(self, running: Run) -> None:
        Run.objects.filter(pk=running.pk).update(delivery="at_least_once")

        document = release("invoice-close", "--json").data

        assert document["released"] == {
            "name": f"schedule:{running.schedule_id}",
            "level": "standard",
            "schedule": "invoice-close",
            "was_held": True,
            "problem": "",
            "fencing_token": 4713,
            "requeued": [running.pk],
            "lost": [],
        }

    @pytest.mark.parametrize("name", [ODD, f"name:{ODD}"])
    def test_a_public_lock_is_released_by_its_text(self, namespace: str, name: str) -> None:
        hold(f"name:{ODD}", TOKEN, holder="app-7", namespace=namespace)

        answer = release(name)

        assert (answer.code, answer.out) == (0, f"name:{ODD}: The lock is released.\n")
        assert not is_held(f"name:{ODD}")
        assert AuditEntry.objects.get().object_type == "lock"

    def test_a_lock_without_a_ttl_is_released(self, namespace: str) -> None:
        hold("name:orphan", TOKEN, holder="", namespace=namespace)
        remove_ttl("name:orphan", namespace)

        assert release("orphan").code == 0
        assert not is_held("name:orphan")

    def test_without_yes_and_terminal_nothing_is_released(self, running: Run) -> None:
        answer = ctl("locks", "release", "invoice-close", "--reason", "node hangs")

        assert answer.code == 5
        assert "Release the lock 'invoice-close'? Not confirmed. Add --yes." in answer.error
        assert is_held(f"schedule:{running.schedule_id}")
        assert not AuditEntry.objects.exists()

    @pytest.mark.parametrize("reason", ["", "  "])
    def test_an_empty_reason_is_refused(self, running: Run, reason: str) -> None:
        answer = ctl("locks", "release", "invoice-close", "--reason", reason, "--yes")

        assert (answer.code, answer.error[:18]) == (2, "--reason: missing.")
        assert is_held(f"schedule:{running.schedule_id}")

    def test_an_unknown_name_releases_nothing(self, running: Run) -> None:
        answer = release("nope")

        assert (answer.code, answer.error) == (4, "lock 'nope': not held. Held: invoice-close")
        assert not AuditEntry.objects.exists()

    def test_an_idle_schedule_has_no_lock_to_release(self, running: Run) -> None:
        make_schedule("mail-digest")

        assert release("mail-digest").code == 4

    def test_a_user_without_the_permission_is_refused(
        self, running: Run, django_user_model: type
    ) -> None:
        django_user_model.objects.create_user("siti")  # type: ignore[attr-defined]

        answer = release("invoice-close", "--user", "siti")

        assert answer.code == 5
        assert answer.error == "user 'siti': lacks the permission distcron.force_release_lock."
        assert is_held(f"schedule:{running.schedule_id}")

    def test_while_redis_is_away_the_run_is_still_taken_from_its_node(self) -> None:
        with override_settings(CACHES=NO_REDIS, DISTCRON={"LOCK_BACKEND": "redis"}):
            run = make_run(make_schedule(), "running", node=make_node())

            answer = release("invoice-close")

        run.refresh_from_db()
        assert (answer.code, run.state) == (6, "lost")
        assert "so the lock itself ends with its TTL" in answer.out

    def test_while_redis_is_away_an_unknown_lock_is_not_called_free(self) -> None:
        with override_settings(CACHES=NO_REDIS, DISTCRON={"LOCK_BACKEND": "redis"}):
            answer = release("export")

        assert answer.code == 6
        assert answer.error.startswith("Lock backend 'redis': unavailable")


class OnTerminal:
    """A project of its own whose locks are in the Redis of the tests."""

    def __init__(self, folder: Path) -> None:
        self.namespace = f"test-{new_owner_token()}"
        self.environment = {
            "PATH": os.environ["PATH"],
            "DJANGO_SETTINGS_MODULE": "tests.system.settings",
            "DATABASE_URL": f"sqlite://{folder}/db.sqlite3",
            "DISTCRON_DATA_DIR": str(folder),
            "REDIS_URL": settings.CACHES["distcron"]["LOCATION"],
            "DISTCRON_SYSTEM_CONFIG": json.dumps({"NAMESPACE": self.namespace}),
            "DISTCRON_SYSTEM_EFFECTS": str(folder / "effects"),
            "PYTHONIOENCODING": "utf-8",
            "TERM": "xterm",
            "COLUMNS": "80",
        }
        subprocess.run(
            [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
            env=self.environment,
            cwd=ROOT,
            check=True,
        )

    def start(self, *words: str, out: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "manage.py", "schedulerctl", "locks", *words],
            env=self.environment,
            cwd=ROOT,
            stdin=out if os.isatty(out) else subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )

    def run(self, *words: str, answer: str = "") -> tuple[int, str]:
        """Run with all streams on one terminal; return the exit code and what it showed."""
        ours, theirs = pty.openpty()
        process = self.start(*words, out=theirs)
        os.close(theirs)
        os.write(ours, answer.encode())
        shown = b"".join(iter(lambda: read(ours), b""))
        os.close(ours)
        return process.wait(60), shown.decode().replace("\r\n", "\n")


def read(terminal: int) -> bytes:
    select.select([terminal], [], [], 60)
    try:
        return os.read(terminal, 65_536)
    except OSError:  # the process has closed its end
        return b""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnTerminal]:
    with redis_locks() as namespace:
        made = OnTerminal(tmp_path_factory.mktemp("ctl"))
        made.namespace = namespace
        made.environment["DISTCRON_SYSTEM_CONFIG"] = json.dumps({"NAMESPACE": namespace})
        yield made


def test_the_table_fits_80_columns(project: OnTerminal) -> None:
    hold(
        "name:a-public-lock-with-quite-a-long-name-for-a-terminal",
        TOKEN,
        holder="a-node-with-a-long-name.shop.internal",
        namespace=project.namespace,
    )
    hold(f"name:{ODD}", TOKEN, holder="web-1", namespace=project.namespace)
    hold("schedule:88123", TOKEN, holder="web-1", namespace=project.namespace)

    code, shown = project.run("--no-color")

    assert code == 0
    lines = shown.splitlines()
    assert lines[0].split()[0] == "NAME"
    assert len(lines) == 4
    assert max(map(display_width, lines)) <= 80
    assert any(line.endswith("○ expires by itself") for line in lines)


@pytest.mark.parametrize(("answer", "code", "held"), [("n\n", 5, True), ("y\n", 0, False)])
def test_a_terminal_is_asked_before_a_release(
    project: OnTerminal, answer: str, code: int, held: bool
) -> None:
    hold("name:asked", TOKEN, holder="web-1", namespace=project.namespace)

    ended, shown = project.run("release", "asked", "--reason", "test", "--no-color", answer=answer)

    assert ended == code, shown
    assert "Release the lock 'name:asked'? [y/N]" in shown
    with override_settings(DISTCRON={"LOCK_BACKEND": "redis", "NAMESPACE": project.namespace}):
        assert is_held("name:asked") is held


def test_watch_appends_to_a_pipe_and_ends_with_ctrl_c(project: OnTerminal) -> None:
    hold("name:watched", TOKEN, holder="web-1", namespace=project.namespace)
    ours, theirs = os.pipe()
    process = project.start("--watch", "0.1", out=theirs)
    os.close(theirs)
    shown = b""
    while shown.count(b"name:watched") < 2:
        piece = read(ours)
        assert piece, shown.decode()
        shown += piece
    process.send_signal(signal.SIGINT)
    while piece := read(ours):
        shown += piece
    os.close(ours)

    assert process.wait(60) == 130
    assert b"\x1b" not in shown
    assert b"Traceback" not in shown
    assert shown.decode().splitlines()[0].endswith("every 0.1 s, Ctrl-C ends")


def test_watch_refreshes_a_terminal_in_place(project: OnTerminal) -> None:
    hold("name:watched", TOKEN, holder="web-1", namespace=project.namespace)
    ours, theirs = pty.openpty()
    process = project.start("--watch", "0.1", out=theirs)
    os.close(theirs)
    shown = b""
    while shown.count(b"name:watched") < 2:
        shown += read(ours)
    process.send_signal(signal.SIGINT)
    while piece := read(ours):
        shown += piece
    os.close(ours)

    assert process.wait(60) == 130
    assert shown.count(b"\x1b[H") >= 2
    assert b"Traceback" not in shown
