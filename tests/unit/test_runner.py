"""One attempt: what each kind of job ending becomes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import threading
import time
from datetime import UTC, date, datetime

import pytest
from django.contrib.auth.models import Group
from django.db import connection, connections, transaction

from distcron_app import JobContext, ParentRun, capture, current_context, job, registry
from distcron_app.capture import write
from distcron_app.context import EarlierAttempt
from distcron_app.errors import LeaseLost
from distcron_app.runner import Assignment, Outcome, execute


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_jobs", dict(registry._jobs))


def assignment(**changes) -> Assignment:
    facts = {
        "run_id": 7,
        "schedule_id": 3,
        "schedule_key": "nightly",
        "job": "test.job",
        "arguments": {},
        "scheduled_at": datetime(2026, 1, 31, 1, 0, tzinfo=UTC),
        "attempt": 1,
        "fencing_token": 12,
    }
    return Assignment(**{**facts, **changes})


def run(function, *, limit: int = 10_000, **arguments) -> Outcome:
    job(name="test.job")(function)
    given = assignment(arguments=arguments)
    return execute(given, context=given.context(), output_limit_bytes=limit)


def raising(error: BaseException):
    def fail(**rest):
        raise error

    return fail


# Success and results


def test_success_carries_result_and_identity():
    outcome = run(lambda size: {"pages": size}, size=4)
    assert outcome == Outcome(
        run_id=7, fencing_token=12, state="succeeded", reason="", result={"pages": 4}
    )


def test_arguments_arrive_as_the_types_of_the_signature():
    def report(day):
        return [type(day).__name__, day.year]

    report.__annotations__ = {"day": date}
    assert run(report, day="2026-01-31").result == ["date", 2026]


def test_emoji_arguments_arrive_and_return():
    assert run(lambda name: name, name="👩‍🚀 é 你好").result == "👩‍🚀 é 你好"


def test_job_receives_its_context():
    assert run(lambda ctx: [ctx.run_id, ctx.idempotency_key]).result == [
        7,
        "3:2026-01-31T01:00:00+00:00",
    ]


def test_context_is_found_without_a_parameter_and_gone_after():
    assert run(lambda: current_context().run_id).result == 7
    assert current_context() is None


def test_async_job_runs_with_context_and_captured_output():
    async def fetch(size: int, control: JobContext):
        await asyncio.sleep(0)
        write("async\n")
        return [size, control.run_id, current_context() is control]

    outcome = run(fetch, size=2)
    assert (outcome.result, outcome.output) == ([2, 7, True], "async\n")


def test_sync_function_that_returns_a_coroutine_is_awaited():
    async def inner():
        return "awaited"

    assert run(lambda: inner()).result == "awaited"


def test_result_that_is_not_json_is_kept_as_its_repr():
    assert run(lambda: {1, 2}).result == {"repr": "{1, 2}"}


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_result_without_a_json_form_is_kept_as_its_repr(number):
    assert run(lambda: number).result == {"repr": repr(number)}


def test_huge_result_is_kept_as_a_short_repr():
    """OP-76."""
    outcome = run(lambda: "x" * 1_000_000)
    assert outcome.state == "succeeded"
    assert len(outcome.result["repr"]) <= 500


def test_result_that_contains_itself_is_kept_as_its_repr():
    loop = []
    loop.append(loop)
    assert "repr" in run(lambda: loop).result


def test_result_whose_repr_fails_names_its_type():
    class Broken:
        def __repr__(self):
            raise RuntimeError("no")

    assert run(Broken).result["repr"].startswith("<Broken")


def test_result_is_storable_and_masked():
    outcome = run(lambda token: {"a\x00": ["\ud800", f"t={token}"]}, token="hunter22")
    assert outcome.result == {"a\ufffd": ["\ufffd", "t=••••"]}


# Failures


def test_exception_becomes_one_error_line_and_a_traceback():
    outcome = run(raising(TypeError("first\nsecond")))
    assert (outcome.state, outcome.reason) == ("failed", "error")
    assert outcome.error == "TypeError: first second"
    assert outcome.traceback.endswith("TypeError: first\nsecond\n")


def test_traceback_starts_at_the_job():
    frames = [
        line for line in run(raising(ValueError("x"))).traceback.splitlines() if "File" in line
    ]
    assert len(frames) == 1
    assert "in fail" in frames[0]


def test_traceback_of_an_async_job_starts_at_the_job():
    async def fetch():
        raise ValueError("x")

    frames = [line for line in run(fetch).traceback.splitlines() if "File" in line]
    assert len(frames) == 1
    assert "in fetch" in frames[0]


def test_traceback_shows_causes():
    def chained():
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    text = run(chained).traceback
    assert text.index("KeyError: 'inner'") < text.index("ValueError: outer")


def test_exception_group_is_formatted():
    text = run(raising(ExceptionGroup("two", [ValueError("a"), KeyError("b")]))).traceback
    assert "ValueError: a" in text
    assert "KeyError: 'b'" in text


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("deep"), GeneratorExit()])
def test_grave_errors_fail_the_run_only(error):
    outcome = run(raising(error))
    assert (outcome.reason, outcome.error.split(":")[0]) == ("error", type(error).__name__)


def test_cancelled_async_job_is_a_failure():
    async def fetch():
        raise asyncio.CancelledError

    assert run(fetch).error == "CancelledError"


def test_error_line_is_cut_at_500_characters():
    error = run(raising(ValueError("x" * 5_000_000))).error
    assert len(error) == 500
    assert error.endswith("x…")


def test_exception_whose_text_fails_is_still_reported():
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError("no")

    assert run(raising(Broken())).error == "Broken: (its text cannot be read)"


@pytest.mark.parametrize("code", [None, 0])
def test_exit_without_a_code_is_success(code):
    assert run(raising(SystemExit(code))).state == "succeeded"


@pytest.mark.parametrize(
    ("code", "error"), [(3, "SystemExit: exit code 3"), ("no disk", "SystemExit: no disk")]
)
def test_exit_with_a_code_is_a_failure(code, error):
    outcome = run(raising(SystemExit(code)))
    assert (outcome.state, outcome.reason, outcome.error) == ("failed", "exit_code", error)


def test_exit_of_an_async_job_is_an_exit_code():
    async def fetch():
        sys.exit(4)

    assert run(fetch).error == "SystemExit: exit code 4"


def test_failed_child_process_is_an_exit_code():
    assert run(raising(subprocess.CalledProcessError(2, "tool"))).reason == "exit_code"


def test_keyboard_interrupt_passes_through():
    with pytest.raises(KeyboardInterrupt):
        run(raising(KeyboardInterrupt()))


def test_lost_lease_seen_by_the_job_names_the_cause():
    job(name="test.job")(lambda ctx: ctx.check())
    given = assignment()
    context = given.context()
    context.cancel("the lock expired")
    outcome = execute(given, context=context, output_limit_bytes=1000)
    assert (outcome.state, outcome.reason) == ("cancelled", "lease_lost")
    assert outcome.error == (
        "LeaseLost: Run 7: lease lost, the lock expired. Stop as soon as it is safe."
    )


def test_a_lost_lock_of_the_job_itself_is_its_error():
    outcome = run(raising(LeaseLost("Lock 'export'", "it expired")))
    assert (outcome.state, outcome.reason) == ("failed", "error")


def test_unknown_job_fails_with_its_reason():
    given = assignment(job="project.demo.gret")
    outcome = execute(given, context=given.context(), output_limit_bytes=1000)
    assert (outcome.state, outcome.reason) == ("failed", "job_not_found")
    assert "Did you mean 'project.demo.greet'?" in outcome.error


def test_wrong_arguments_fail_before_the_job_starts():
    started = []
    outcome = run(lambda size: started.append(size), sise=5)
    assert (outcome.reason, started) == ("invalid_arguments", [])
    assert "size: is required." in outcome.error


def test_crash_in_own_validation_is_a_failure():
    job(name="test.job", validate=lambda: 1 / 0)(lambda: None)
    given = assignment()
    outcome = execute(given, context=given.context(), output_limit_bytes=1000)
    assert (outcome.reason, outcome.error) == ("error", "ZeroDivisionError: division by zero")


# Sizes


def test_message_of_five_megabytes_is_cut_in_the_traceback():
    """OP-76."""
    text = run(raising(ValueError("y" * 5_000_000))).traceback
    assert len(text.encode()) < 66_000
    assert "bytes cut" in text


def test_deep_recursion_keeps_the_innermost_frames():
    """OP-76."""

    def down(n):
        if n == 0:
            raise ValueError("bottom")
        up(n - 1)

    def up(n):
        down(n)

    text = run(lambda: down(300)).traceback
    assert text.startswith("[502 outer frames cut]\n")
    assert text.endswith("ValueError: bottom\n")
    assert text.count("in down") == 50


def test_huge_traceback_costs_less_than_50_megabytes():
    """OP-76."""
    code = textwrap.dedent("""
        import os, resource, sys
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        import django; django.setup()
        from distcron_app import job
        from tests.unit.test_runner import assignment, execute
        sys.setrecursionlimit(60_000)

        @job(name="test.job")
        def deep(n=0):
            try:
                if n == 20_000:
                    raise ValueError("x" * 5_000_000)
                deep(n + 1)
            finally:
                global peak
                if n == 0:
                    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        given = assignment()
        outcome = execute(given, context=given.context(), output_limit_bytes=1000)
        assert outcome.error.startswith("ValueError: xxx"), outcome.error
        assert len(outcome.traceback.encode()) < 66_000
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) * (1 if sys.platform == "darwin" else 1024) < 50_000_000


def test_output_is_cut_at_the_given_limit():
    def noisy():
        for _ in range(1000):
            write("0123456789\n")

    outcome = run(noisy, limit=220)
    assert outcome.output == "0123456789\n" * 10 + "[... 10791 bytes cut ...]\n" + (
        "0123456789\n" * 9
    )


# Secrets


def test_secret_is_masked_in_error_traceback_and_output():
    def login(password):
        write(f"trying {password}\n")
        raise PermissionError(f"refused {password}")

    outcome = run(login, password="hunter22")
    assert outcome.error == "PermissionError: refused ••••"
    assert outcome.output == "trying ••••\n"
    assert "hunter22" not in repr(outcome)


def test_secret_in_wrong_arguments_is_masked():
    def login(token: int) -> None:
        pass

    login.__annotations__ = {"token": int}
    assert "hunter22" not in repr(run(login, token="hunter22"))


def test_live_output_is_readable_and_masked():
    def login(ctx, password):
        write(f"trying {password}\n")
        return ctx.output()

    assert run(login, password="hunter22").result == "trying ••••\n"


def told(job_function, **arguments) -> list:
    """Return what a job tells of its progress and its checkpoints."""
    heard: list = []
    job(name="test.job")(job_function)
    given = assignment(arguments=arguments)
    context = given.context(lambda *told: heard.append(told), heard.append)
    assert execute(given, context=context, output_limit_bytes=1000).error == ""
    return heard


def test_secret_is_masked_in_progress_and_checkpoint():
    def login(ctx, password):
        ctx.progress(10, f"as {password}")
        ctx.checkpoint({"with": [password]})

    assert told(login, password="hunter22") == [(10.0, "as ••••"), {"with": ["••••"]}]


def test_what_databases_refuse_does_not_leave_the_worker():
    def odd(ctx):
        ctx.progress(10, "a\x00b\ud800")
        ctx.checkpoint({"a\x00": "\udfff"})

    assert told(odd) == [(10.0, "a\ufffdb\ufffd"), {"a\ufffd": "\ufffd"}]


# Threads and connections


def test_output_of_two_runs_at_once_is_never_mixed(capsys):
    together = threading.Barrier(2)

    def talk(letter):
        together.wait(5)
        for _ in range(500):
            print(letter)

    job(name="test.job")(talk)
    outputs = {}

    def work(letter):
        given = assignment(arguments={"letter": letter})
        outcome = execute(given, context=given.context(), output_limit_bytes=100_000)
        outputs[letter] = outcome.output

    capture.install()
    try:
        threads = [threading.Thread(target=work, args=(each,)) for each in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    finally:
        capture.uninstall()
    assert outputs == {"a": "a\n" * 500, "b": "b\n" * 500}


def test_no_connection_is_opened_for_a_job_that_needs_none():
    opened = []

    def work():
        run(lambda: None)
        opened.extend(connections.all(initialized_only=True))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert opened == []


@pytest.mark.django_db(transaction=True)
def test_dead_idle_connection_is_replaced_before_the_job():
    connection.ensure_connection()
    connection.connection.close()
    outcome = run(lambda: Group.objects.count())
    assert (outcome.error, outcome.result) == ("", 0)


@pytest.mark.django_db(transaction=True)
def test_connection_does_not_outlive_its_age():
    def use_an_expired_one():
        Group.objects.count()
        connection.close_at = 0.0

    run(use_an_expired_one)
    assert connection.connection is None


@pytest.mark.django_db(transaction=True)
def test_transaction_left_open_by_a_job_is_rolled_back(caplog):
    def careless():
        transaction.atomic().__enter__()
        Group.objects.create(name="half done")

    run(careless)
    assert "transaction_left_open" in caplog.text
    assert Group.objects.filter(name="half done").count() == 0


@pytest.mark.django_db(transaction=True)
def test_transaction_of_the_caller_is_left_alone():
    with transaction.atomic():
        run(lambda: Group.objects.create(name="together"))
        assert connection.in_atomic_block is True
    assert Group.objects.filter(name="together").exists()


@pytest.mark.django_db(transaction=True)
def test_async_orm_uses_the_connection_of_this_thread():
    async def count():
        await Group.objects.acreate(name="async")
        return await Group.objects.acount()

    with transaction.atomic():
        assert run(count).result == 1
        transaction.set_rollback(True)
    assert Group.objects.count() == 0


# Wire and demo jobs


def test_assignment_survives_the_wire():
    earlier = EarlierAttempt(number=1, reason="node_died", checkpoint={"page": 3})
    given = assignment(arguments={"name": "👋"}, recovered_from=earlier, last_checkpoint=[1])
    assert Assignment.from_wire(json.loads(json.dumps(given.to_wire()))) == given


def test_the_parent_run_survives_the_wire_and_reaches_the_job():
    parent = ParentRun(
        run_id=4,
        attempt=2,
        schedule_key="load",
        state="succeeded",
        reason="",
        scheduled_at=datetime(2026, 1, 31, tzinfo=UTC),
        result={"rows": [1, None]},
    )
    given = assignment(parent=parent)
    assert Assignment.from_wire(json.loads(json.dumps(given.to_wire()))) == given
    assert given.context().parent == parent
    assert given.context().idempotency_key == "3:after:4:2"


def test_outcome_survives_the_wire():
    outcome = run(raising(ValueError("é")))
    assert Outcome.from_wire(json.loads(json.dumps(outcome.to_wire()))) == outcome


def test_wire_of_another_length_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        Assignment.from_wire([1, 2, 3])


def demo(demo_name: str, *, run_id: int = 1, **arguments) -> Outcome:
    given = assignment(job=f"project.demo.{demo_name}", run_id=run_id, arguments=arguments)
    return execute(given, context=given.context(), output_limit_bytes=10_000)


def test_demo_tell_failure_works_by_hand():
    assert demo("tell_failure").result == "Nothing has failed: started by hand."


def test_demo_greet_speaks_indonesian():
    assert demo("greet", name="Ayu", language="id").result == "Halo, Ayu!"


def test_demo_flaky_mail_fails_for_two_of_three_runs():
    states = [demo("flaky_mail", run_id=number).state for number in (3, 4, 5)]
    assert states == ["failed", "failed", "succeeded"]


def test_demo_invoice_close_counts_its_batch():
    assert demo("invoice_close", batch=3).result == {"closed": 3}


def test_demo_heartbeat_is_alive():
    assert demo("heartbeat").result == "alive"


def test_demo_slow_report_stops_when_cancelled():
    given = assignment(job="project.demo.slow_report", arguments={"seconds": 600})
    reported = threading.Event()
    context = given.context(lambda percent, message: reported.set())
    outcomes = []
    thread = threading.Thread(
        target=lambda: outcomes.append(execute(given, context=context, output_limit_bytes=100))
    )
    started = time.monotonic()
    thread.start()
    assert reported.wait(5)
    context.cancel("operator")
    thread.join(5)
    assert outcomes[0].error.startswith("LeaseLost: Run 7: lease lost, operator.")
    assert time.monotonic() - started < 5


def test_demo_slow_report_finishes_at_100_percent():
    seen = []
    given = assignment(job="project.demo.slow_report", arguments={"seconds": 0})
    execute(given, context=given.context(lambda *report: seen.append(report)), output_limit_bytes=9)
    assert seen[-1] == (100.0, "Done")
