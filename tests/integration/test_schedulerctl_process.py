"""What only a real process shows: exit codes, streams, terminals, encodings and imports."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULE = ("next", "30 2 * * *", "--tz", "UTC", "--from", "2027-03-13", "-n", "1")

_SETUP = """
import django; django.setup()
from django.core.management import call_command
from distcron_app.models import Schedule
call_command("migrate", verbosity=0)
Schedule.objects.all().delete()  # what the demo defines in code
for key in ("invoice-close", "mail-digest-of-the-whole-company"):
    Schedule(key=key, name=key, job="project.demo.invoice_close", cron="0 2 * * *").save()
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the environment of a project with a database of its own and two schedules."""
    folder = tmp_path_factory.mktemp("ctl")
    environ = {
        "PATH": os.environ["PATH"],
        "DJANGO_SETTINGS_MODULE": "project.settings",
        "DATABASE_URL": f"sqlite://{folder}/db.sqlite3",
        "DISTCRON_DATA_DIR": str(folder),
        "PYTHONIOENCODING": "utf-8",
    }
    subprocess.run([sys.executable, "-c", _SETUP], env=environ, cwd=ROOT, check=True)
    yield environ


def run_ctl(environment: dict[str, str], *words: str, **changes: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "manage.py", "schedulerctl", *words],
        env=environment | changes,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def run_on_terminal(
    environment: dict[str, str], *words: str, answer: str = "", **changes: str
) -> tuple[int, str]:
    """Run with all streams on one terminal; return the exit code and what it showed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "manage.py", "schedulerctl", *words],
        env=environment | {"TERM": "xterm", "COLUMNS": "200"} | changes,
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    os.write(ours, answer.encode())
    shown = b"".join(iter(lambda: _read(ours), b""))
    os.close(ours)
    return process.wait(60), shown.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    select.select([terminal], [], [], 60)
    try:
        return os.read(terminal, 65_536)
    except OSError:  # the process has closed its end
        return b""


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["list"], 0, ""),
        (["nodes"], 1, "error: no node is alive. Start one: manage.py runscheduler\n"),
        (["lits"], 2, "error: verb 'lits': not known. Did you mean list? Verbs: list, next,"),
        ([], 2, "error: a verb is missing. Choose one of: list, next, explain, forecast, run,"),
        (["list", "--state", "gone"], 2, "got 'gone', allowed: active, paused"),
        (["next", "0 25 * * *"], 2, "error: Hour '25': must be from 0 to 23"),
        (["pause", "invoice-close"], 2, "arguments are required: --reason"),
        (["run", "invoice-clos"], 4, "Did you mean invoice-close?\n"),
        (["resume", "--all", "--state", "active"], 0, "0 schedules changed.\n"),
        (["pause", "--all", "--reason", "x"], 5, "error: Pause 2 schedules? Not confirmed."),
    ],
)
def test_exit_code_and_stderr(
    environment: dict[str, str], words: list[str], code: int, error: str
) -> None:
    got, _out, err = run_ctl(environment, *words)

    assert got == code
    assert error in err


def test_a_refusal_is_one_line_when_piped(environment: dict[str, str]) -> None:
    code, out, err = run_ctl(environment, "next", "0 25 * * *")

    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_refusal_has_carets_on_a_terminal(environment: dict[str, str]) -> None:
    code, shown = run_on_terminal(environment, "next", " 0  25 * * *", "--no-color")

    assert code == 2
    assert shown == (
        "error: Hour '25': must be from 0 to 23, in at most two digits.\n  0 25 * * *\n    ^^\n"
    )


def test_a_rule_needs_no_database(environment: dict[str, str]) -> None:
    closed = "postgres://nobody@127.0.0.1:1/none"

    code, out, err = run_ctl(environment, *RULE, DATABASE_URL=closed)

    assert (code, err) == (0, "")
    assert "Sat 13 Mar 2027 02:30 UTC" in out


def test_a_database_that_is_away_exits_with_6(environment: dict[str, str]) -> None:
    closed = "postgres://nobody@127.0.0.1:1/none"

    code, out, err = run_ctl(environment, "list", DATABASE_URL=closed)

    assert (code, out) == (6, "")
    assert err.startswith("error: the database does not answer: ")


def test_a_database_without_tables_names_the_fix(
    environment: dict[str, str], tmp_path: Path
) -> None:
    code, _out, err = run_ctl(environment, "list", DATABASE_URL=f"sqlite://{tmp_path}/new.sqlite3")

    assert code == 6
    assert err == "error: a table is missing: no such table: distcron_schedule. " + (
        "Run: manage.py migrate\n"
    )


@pytest.mark.parametrize(
    ("flags", "changes", "has_colour"),
    [
        ([], {}, True),
        ([], {"NO_COLOR": "1"}, False),
        ([], {"NO_COLOR": ""}, True),
        ([], {"TERM": "dumb"}, False),
        (["--no-color"], {}, False),
        (["--force-color"], {"NO_COLOR": "1"}, True),
    ],
)
def test_colour_on_a_terminal(
    environment: dict[str, str], flags: list[str], changes: dict[str, str], has_colour: bool
) -> None:
    _code, shown = run_on_terminal(environment, *RULE, *flags, **changes)

    assert ("\x1b[" in shown) is has_colour


@pytest.mark.parametrize(
    ("words", "has_colour"),
    [(RULE, False), ((*RULE, "--force-color"), True), (("--force-color", *RULE), True)],
)
def test_colour_in_a_pipe_before_or_after_the_verb(
    environment: dict[str, str], words: tuple[str, ...], has_colour: bool
) -> None:
    _code, out, _err = run_ctl(environment, *words)

    assert ("\x1b[" in out) is has_colour


def test_errors_follow_no_color_on_a_terminal(environment: dict[str, str]) -> None:
    _code, shown = run_on_terminal(environment, "nodes", NO_COLOR="1")

    assert shown == "error: no node is alive. Start one: manage.py runscheduler\n"


def test_a_table_is_cut_to_the_terminal_and_whole_in_a_pipe(environment: dict[str, str]) -> None:
    _code, shown = run_on_terminal(environment, "list", "--no-color", COLUMNS="80")
    _code, out, _err = run_ctl(environment, "list")

    assert max(map(len, shown.splitlines())) == 80
    assert "mail-digest-of-the-whole-company" not in shown
    assert "mail-digest-of-the-whole-company" in out


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_stream_without_utf8_gets_ascii_symbols(
    environment: dict[str, str], encoding: str
) -> None:
    code, out, _err = run_ctl(environment, "list", "--no-header", PYTHONIOENCODING=encoding)

    assert code == 0
    assert out.startswith("* active  invoice-close")


@pytest.mark.parametrize(("answer", "code"), [("n\n", 5), ("y\n", 0)])
def test_a_terminal_is_asked_with_the_count(
    environment: dict[str, str], answer: str, code: int
) -> None:
    words = ("pause", "--all", "--job", "invoice", "--reason", "move", "--no-color")

    got, shown = run_on_terminal(environment, *words, answer=answer)

    run_ctl(environment, "resume", "--all", "--yes")
    assert got == code
    assert "Pause 2 schedules? [y/N] " in shown


def test_waiting_overwrites_one_line_on_a_terminal(environment: dict[str, str]) -> None:
    words = ("run", "mail-digest-of-the-whole-company", "--wait", "--timeout", "0.7", "--no-color")

    code, shown = run_on_terminal(environment, *words)

    assert code == 7
    assert shown.count("\r\x1b[Krun ") >= 2
    assert " · queued · 0 s" in shown


def test_the_language_of_the_environment_is_spoken(environment: dict[str, str]) -> None:
    _code, out, _err = run_ctl(environment, *RULE, LANGUAGE="id_ID:en")

    assert "Sab 13 Mar 2027" in out


def test_a_reader_that_has_seen_enough_is_no_error(environment: dict[str, str]) -> None:
    words = ("next", "* * * * *", "-n", "1000")
    process = subprocess.Popen(
        [sys.executable, "manage.py", "schedulerctl", *words],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()

    _out, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (0, b"")


def test_an_interrupt_while_waiting_exits_with_130(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "manage.py", "schedulerctl", "run", "invoice-close", "--wait"],
        env=environment | {"PYTHONUNBUFFERED": "1"},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = list(iter_until(process.stderr.readline, "queued · 0 s"))
    process.send_signal(2)

    _out, err = process.communicate(timeout=60)

    assert process.returncode == 130
    assert seen[0].endswith("of invoice-close queued.\n")
    assert err.endswith("goes on without this command. See: schedulerctl list\n")


def iter_until(read: Callable[[], str], wanted: str) -> Iterator[str]:
    """Yield lines up to the one that contains ``wanted``; fail at the end of the stream."""
    for line in iter(read, ""):
        yield line
        if wanted in line:
            return
    raise AssertionError(f"no line with {wanted!r}")


def test_version_is_that_of_distcron(environment: dict[str, str]) -> None:
    assert run_ctl(environment, "--version") == (0, "0.1.0\n", "")


@pytest.mark.parametrize("words", [["--help"], ["next", "--help"]])
def test_help_goes_to_stdout(environment: dict[str, str], words: list[str]) -> None:
    code, out, err = run_ctl(environment, *words)

    assert (code, err) == (0, "")
    assert out.startswith("usage: manage.py schedulerctl")
