"""The built-in jobs: what they refuse, and that nothing of a program is left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import UTC, datetime

import pytest
from django.test import override_settings

from distcron_app import builtin_jobs, registry
from distcron_app.errors import InvalidArguments
from distcron_app.runner import Assignment, Outcome, execute

PYTHON = sys.executable
allow_python = override_settings(DISTCRON={"SHELL_COMMANDS": [PYTHON, "/bin/sh", "/nowhere/tool"]})


def assignment(job: str, arguments: dict) -> Assignment:
    return Assignment(
        run_id=7,
        schedule_id=3,
        schedule_key="nightly",
        job=job,
        arguments=arguments,
        scheduled_at=datetime(2026, 1, 31, 1, 0, tzinfo=UTC),
        attempt=1,
        fencing_token=12,
    )


def run(job: str, *, limit: int = 10_000, **arguments) -> Outcome:
    given = assignment(job, arguments)
    return execute(given, context=given.context(), output_limit_bytes=limit)


def python(code: str, *words: str, **options) -> Outcome:
    return run("distcron.shell_command", argv=[PYTHON, "-c", code, *words], **options)


def problems_of(job: str, arguments: dict) -> dict[str, str]:
    with pytest.raises(InvalidArguments) as caught:
        registry.get(job).check(arguments)
    return caught.value.problems


def wait_for(condition, seconds: float = 8) -> None:
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        pause.wait(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        # An orphan waiting for init to reap it is dead too.
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Management commands


def test_listed_management_command_runs_with_its_output_captured():
    with override_settings(DISTCRON={"MANAGEMENT_COMMANDS": ["diffsettings"]}):
        outcome = run(
            "distcron.management_command", command="diffsettings", args=["--output=unified"]
        )
    assert outcome.state == "succeeded"
    assert "+ SECRET_KEY = 'tests-only'" in outcome.output


def test_other_management_command_is_refused_at_save_with_the_setting():
    assert problems_of("distcron.management_command", {"command": "flush"}) == {
        "command": "'flush' is not allowed. Allowed: clearsessions. "
        "Add it to DISTCRON['MANAGEMENT_COMMANDS']."
    }


def test_management_command_is_checked_again_at_start():
    outcome = run("distcron.management_command", command="flush", args=["--no-input"])
    assert (outcome.state, outcome.reason) == ("failed", "invalid_arguments")


def test_allow_list_holds_for_a_direct_call():
    with pytest.raises(InvalidArguments, match="MANAGEMENT_COMMANDS"):
        builtin_jobs.management_command("flush")


def test_failing_management_command_is_an_error():
    with override_settings(DISTCRON={"MANAGEMENT_COMMANDS": ["diffsettings"]}):
        outcome = run("distcron.management_command", command="diffsettings", args=["--bad"])
    assert outcome.reason == "error"
    assert "unrecognized arguments: --bad" in outcome.error


# Programs: what may run


def test_no_program_is_allowed_by_default():
    assert problems_of("distcron.shell_command", {"argv": ["/bin/ls"]}) == {
        "argv": "'/bin/ls' is not allowed. Allowed: none. Add it to DISTCRON['SHELL_COMMANDS']."
    }


@pytest.mark.parametrize(
    "argv", [[], [""], ["sh"], ["/bin/../bin/sh"], ["/bin/sh "], ["//bin/sh"], ["/bin/shx"]]
)
@allow_python
def test_only_the_exact_path_is_allowed(argv):
    assert list(problems_of("distcron.shell_command", {"argv": argv})) == ["argv"]


def test_relative_path_is_refused_even_when_listed():
    with override_settings(DISTCRON={"SHELL_COMMANDS": ["sh"]}):
        assert list(problems_of("distcron.shell_command", {"argv": ["sh"]})) == ["argv"]


@allow_python
def test_timeout_below_one_second_is_refused():
    assert problems_of("distcron.shell_command", {"argv": [PYTHON], "timeout_seconds": 0}) == {
        "timeout_seconds": "must be at least 1 second, got 0."
    }


def test_program_is_checked_again_at_start():
    assert python("print(1)").reason == "invalid_arguments"


# Programs: how they end


@allow_python
def test_output_of_both_streams_is_captured_in_order():
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr); print('😀')"
    outcome = python(code)
    assert (outcome.state, outcome.output) == ("succeeded", "out\nerr\n😀\n")


@allow_python
def test_arguments_are_not_read_by_a_shell():
    outcome = python("import sys; print(sys.argv[1:])", "$(id)", "; ls", "*", "é😀")
    assert outcome.output == "['$(id)', '; ls', '*', 'é😀']\n"


@allow_python
def test_exit_code_is_a_failure_with_the_code():
    outcome = python("raise SystemExit(3)")
    assert (outcome.state, outcome.reason) == ("failed", "exit_code")
    assert outcome.error == f"ProgramFailed: {PYTHON}: exited with code 3."


@allow_python
def test_death_by_signal_is_a_failure_with_the_signal():
    outcome = python("import os; os.kill(os.getpid(), 9)")
    assert outcome.reason == "exit_code"
    assert outcome.error == f"ProgramFailed: {PYTHON}: killed by signal 9."


@allow_python
def test_missing_program_is_an_error():
    outcome = run("distcron.shell_command", argv=["/nowhere/tool"])
    assert outcome.reason == "error"
    assert outcome.error.startswith("FileNotFoundError")
    assert "/nowhere/tool" in outcome.error


@allow_python
def test_program_reads_nothing_from_the_nodes_input():
    assert python("import sys; print(repr(sys.stdin.read()))").output == "''\n"


@allow_python
def test_fifty_megabytes_of_output_are_cut():
    code = "import sys\nfor _ in range(800): sys.stdout.write('x' * 65535 + '\\n')"
    outcome = python(code, limit=10_000)
    assert outcome.state == "succeeded"
    assert "bytes cut" in outcome.output
    assert len(outcome.output) < 10_100


@allow_python
def test_program_starts_with_default_signals_and_its_own_session():
    code = (
        "import os, signal; print(os.getsid(0) == os.getpid(),"
        "signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,"
        "signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        outcome = python(code)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert outcome.output == "True True set()\n"


@allow_python
def test_program_inherits_no_descriptor_but_the_three():
    with open(os.devnull) as held:
        code = f"import os; os.fstat({held.fileno()})"
        assert "exited with code 1" in python(code).error


@allow_python
def test_no_descriptor_is_left_open():
    before = os.listdir("/proc/self/fd")
    python("print(1)")
    run("distcron.shell_command", argv=["/nowhere/tool"])
    assert len(os.listdir("/proc/self/fd")) == len(before)


@allow_python
def test_program_over_its_time_is_ended():
    outcome = python("import time; print('on', flush=True); time.sleep(600)", timeout_seconds=1)
    assert outcome.error == f"TimeoutError: {PYTHON}: still running after 1 s."
    assert outcome.output == "on\n"


@allow_python
def test_rest_of_the_group_is_killed_when_the_program_exits(tmp_path):
    note = tmp_path / "pid"
    code = (
        "import subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(note)!r}, 'w').write(str(child.pid))"
    )
    started = time.monotonic()
    assert python(code).state == "succeeded"
    assert time.monotonic() - started < 10
    wait_for(lambda: not is_alive(int(note.read_text())))


class Started:
    """A program in a thread, until it has written its process ids to a file."""

    def __init__(self, code: str, note) -> None:
        given = assignment("distcron.shell_command", {"argv": [PYTHON, "-c", code, str(note)]})
        self.context = given.context()
        self.outcomes: list[Outcome] = []
        self.thread = threading.Thread(target=self._run, args=(given,))
        self.thread.start()
        wait_for(lambda: note.exists() and note.read_text().endswith("\n"))
        self.pids = [int(word) for word in note.read_text().split()]

    def _run(self, given: Assignment) -> None:
        self.outcomes.append(execute(given, context=self.context, output_limit_bytes=10_000))


@allow_python
def test_cancel_ends_the_program_and_its_children_politely(tmp_path):
    code = (
        "import os, signal, subprocess, sys, time\n"
        "def bye(*_):\n    print('bye', flush=True); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, bye)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1], 'w').write(f'{os.getpid()} {child.pid}\\n')\n"
        "time.sleep(600)\n"
    )
    program = Started(code, tmp_path / "pids")
    program.context.cancel("operator")
    program.thread.join(4)
    outcome = program.outcomes[0]
    assert outcome.error.startswith("LeaseLost: Run 7: lease lost, operator.")
    assert outcome.output == "bye\n"
    wait_for(lambda: not any(is_alive(pid) for pid in program.pids))


@allow_python
def test_program_that_ignores_sigterm_is_killed_after_the_grace(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin_jobs, "STOP_GRACE_SECONDS", 0.3)
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(sys.argv[1], 'w').write(f'{os.getpid()}\\n')\n"
        "time.sleep(600)\n"
    )
    program = Started(code, tmp_path / "pids")
    program.context.cancel("operator")
    program.thread.join(4)
    assert program.outcomes[0].error.startswith("LeaseLost")
    wait_for(lambda: not is_alive(program.pids[0]))


@allow_python
def test_descendant_that_left_the_group_does_not_hold_the_run(tmp_path):
    note = tmp_path / "pid"
    code = (
        "import subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True);"
        f"open({str(note)!r}, 'w').write(str(child.pid))"
    )
    started = time.monotonic()
    outcome = python(code)
    os.kill(int(note.read_text()), signal.SIGKILL)
    assert outcome.state == "succeeded"
    assert time.monotonic() - started < 10
