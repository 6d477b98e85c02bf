"""``manage.py locked`` as a process: exit codes, streams, signals, and a lock that is lost."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.services import free_port, wait_for

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = """
from project.settings import *
DISTCRON = {"LOCK_BACKEND": "file", "LOCK_DIRECTORY": "{folder}/locks", "NODE_NAME": "web-1"}
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_settings.py").write_text(SETTINGS.replace("{folder}", str(tmp_path)))
    return tmp_path


@pytest.fixture
def environ(folder: Path) -> dict[str, str]:
    """An environment whose database cannot be reached."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{folder}:{ROOT}",
        "DJANGO_SETTINGS_MODULE": "own_settings",
        "DATABASE_URL": f"postgres://postgres@127.0.0.1:{free_port()}/none",
        "DISTCRON_DATA_DIR": str(folder),
    }


@pytest.fixture
def start(environ: dict[str, str]) -> Iterator[Start]:
    """Start ``locked`` with these words; it and its command are killed after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*words: str, **changes: str) -> subprocess.Popen[str]:
        processes.append(
            subprocess.Popen(
                [sys.executable, "manage.py", "locked", *words],
                cwd=ROOT,
                env=environ | changes,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        commands = commands_of(process)
        process.kill()
        for command in commands:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command, signal.SIGKILL)
        process.communicate()


def commands_of(process: subprocess.Popen[str]) -> list[int]:
    if process.poll() is not None:
        return []
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children]


@pytest.fixture
def run(start: Start) -> Callable[..., tuple[int, str, str]]:
    def run(*words: str, given: str = "", **changes: str) -> tuple[int, str, str]:
        process = start(*words, **changes)
        out, err = process.communicate(given, timeout=60)
        return process.returncode, out, err

    return run


@pytest.fixture
def holder(start: Start) -> subprocess.Popen[str]:
    """A command that holds "nightly" until its input ends."""
    process = start("nightly", "--ttl", "60", "--", "sh", "-c", "echo started; cat")
    assert line_of(process) == "started"
    return process


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def lose(folder: Path) -> None:
    (folder / "locks" / "name:nightly.lock").unlink()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_streams_pass_through(run):
    code, out, err = run("nightly", "--", "sh", "-c", "cat; echo talk >&2", given="data\n")
    assert (code, out, err) == (0, "data\n", "talk\n")


def test_words_reach_the_command_as_they_are(run):
    code, out, _ = run("nightly", "--", "printf", "%s|", "a b", "$HOME", "--", "--ttl")
    assert (code, out) == (0, "a b|$HOME|--|--ttl|")


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["sh", "-c", "exit 3"], 3, ""),
        (["sh", "-c", "kill -KILL $$"], 137, ""),
        (
            ["no-such-program"],
            127,
            "error: command 'no-such-program': cannot be started, No such file or directory.\n",
        ),
        (["/etc/passwd"], 126, "error: command '/etc/passwd': cannot be started, Permission"),
    ],
)
def test_exit_code_is_that_of_the_command(run, words, code, error):
    got, _, err = run("nightly", "--", *words)
    assert got == code
    assert err.startswith(error)
    assert (err == "") == (error == "")


def test_lock_is_free_after_a_command_that_failed(run):
    assert run("nightly", "--", "false")[0] == 1
    assert run("nightly", "--", "no-such-program")[0] == 127
    assert run("nightly", "--", "true")[0] == 0


def test_taken_lock_says_who_holds_it_and_exits_0(run, holder):
    code, out, err = run("nightly", "--", "echo", "two inside")
    assert (code, out) == (0, "")
    assert re.fullmatch(
        rf"lock 'nightly': held by web-1 pid {holder.pid} sh since \d+\.\d s, "
        r"TTL left [45]\d\.\d s\. The command was not run\.\n",
        err,
    )


def test_taken_lock_exits_with_the_chosen_code(run, holder):
    assert run("nightly", "--busy-exit-code", "75", "--", "true")[0] == 75


def test_taken_lock_is_silent_when_asked_for(run, holder):
    assert run("nightly", "-v", "0", "--", "echo", "two inside") == (0, "", "")


def test_other_name_runs_beside_it(run, holder):
    assert run("hourly", "--", "echo", "ran")[:2] == (0, "ran\n")


def test_waiting_runs_the_command_when_the_lock_is_free(start, holder):
    waiter = start("nightly", "--wait", "30", "--", "echo", "ran")
    with pytest.raises(subprocess.TimeoutExpired):
        waiter.wait(2)
    holder.communicate()
    assert waiter.communicate(timeout=30)[0] == "ran\n"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_signal_reaches_the_command(start, number, code):
    script = f"trap 'echo got; exit {code}' TERM INT HUP; echo started; while :; do sleep 0.1; done"
    process = start("nightly", "--", "sh", "-c", script)
    assert line_of(process) == "started"
    process.send_signal(number)
    assert line_of(process) == "got"
    assert process.wait(10) == code


def test_command_that_a_signal_ended_is_told_as_a_shell_does(start):
    process = start("nightly", "--", "sh", "-c", "echo started; exec sleep 60")
    assert line_of(process) == "started"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143


def test_ignored_hangup_stays_ignored(start):
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start("nightly", "--", "sh", "-c", "echo started; cat")
    finally:
        signal.signal(signal.SIGHUP, old)
    assert line_of(process) == "started"
    process.send_signal(signal.SIGHUP)
    assert process.communicate("still here\n", timeout=10)[0] == "still here\n"
    assert process.returncode == 0


def test_killed_process_frees_the_lock(run, start):
    process = start("nightly", "--ttl", "1", "--", "sh", "-c", "echo $$; exec sleep 60")
    command = int(line_of(process))
    process.kill()
    process.wait()
    os.kill(command, signal.SIGKILL)
    assert run("nightly", "--wait", "10", "--", "echo", "ran")[:2] == (0, "ran\n")


def test_lost_lock_stops_the_command_and_what_it_started(start, folder):
    process = start("nightly", "--ttl", "1", "--", "sh", "-c", "sleep 60 & echo $!; wait")
    started = int(line_of(process))
    lose(folder)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 8
    assert "lock 'nightly': lost, it ended in the lock backend: " in err
    assert "The command is told to stop.\n" in err
    wait_for(lambda: not is_running(started), what="the end of what the command started")


def test_command_that_does_not_stop_is_killed_after_ten_seconds(start, folder):
    script = "trap '' TERM; echo $$; while :; do sleep 0.1; done"
    process = start("nightly", "--ttl", "1", "--", "sh", "-c", script)
    command = int(line_of(process))
    lose(folder)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(8)
    assert is_running(command)
    assert process.wait(20) == 8
    assert not is_running(command)


def test_lost_lock_is_only_reported_where_it_is_asked_for(start, folder):
    process = start("nightly", "--ttl", "1", "--on-lost", "warn", "--", "sh", "-c", "echo on; cat")
    assert line_of(process) == "on"
    lose(folder)
    assert process.stderr is not None
    said = []
    for text in process.stderr:
        said.append(text)
        if text.startswith("lock 'nightly': lost"):
            break
    assert said[-1].endswith("The command goes on without it.\n")
    out, _ = process.communicate("the end\n", timeout=10)
    assert (process.returncode, out) == (0, "the end\n")


def test_backend_that_is_away_is_6_and_the_command_is_not_run(run, folder):
    (folder / "own_settings.py").write_text(
        "from project.settings import *\nDISTCRON = {'LOCK_BACKEND': 'redis'}\n"
    )
    code, out, err = run(
        "nightly", "--", "echo", "ran", REDIS_URL=f"redis://127.0.0.1:{free_port()}/0"
    )
    assert (code, out) == (6, "")
    assert err.startswith("error: Lock backend 'redis': unavailable, ConnectionError: ")


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["nightly"], 2, "the following arguments are required: COMMAND"),
        (["nightly", "--ttl", "0", "--", "true"], 2, "error: Lock 'nightly': ttl is 0.0 s"),
        (["nightly", "--wait", "soon", "--", "true"], 2, "got 'soon'. Write a number of seconds"),
        (["nightly", "--busy-exit-code", "256", "--", "true"], 2, "got '256', allowed 0 to 255"),
        (["n" * 201, "--", "true"], 2, "error: Lock name: must have 1 to 200 characters, got 201"),
        (["nightly", "--level", "iron", "--", "true"], 1, "Lock level 'iron': not known."),
    ],
)
def test_wrong_use_is_refused(run, words, code, error):
    got, out, err = run(*words)
    assert (got, out) == (code, "")
    assert error in err


def test_examples_of_the_help_run(run):
    code, text, _ = run("--help")
    assert code == 0
    examples = text.partition("examples:\n")[2].partition("exit codes:")[0].splitlines()
    assert len(examples) == 2
    assert all(line.startswith("  manage.py locked ") for line in examples)
    answers = [run(*shlex.split(line)[2:]) for line in examples]
    assert answers == [(0, "done\n", ""), (0, "one\ntwo\n", "")]
