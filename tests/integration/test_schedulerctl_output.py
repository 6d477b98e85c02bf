"""``schedulerctl output``: what a run has written, so far and as it comes."""

from __future__ import annotations

import doctest
import json
import threading

import pytest
from django.db import connection, transaction

from distcron_app.cli import output
from distcron_app.cli.output import newer_part
from distcron_app.models import Run, RunOutput
from tests.integration.schedulerctl_builders import ctl, make_run, make_schedule
from tests.services import wait_for

pytestmark = pytest.mark.django_db


def written(run: Run, text: str) -> None:
    RunOutput.objects.update_or_create(run=run, defaults={"output": text})


def test_prints_what_a_running_job_has_written_so_far() -> None:
    run = make_run(make_schedule(), "running", attempt=1)
    written(run, "page 1\npage 2\n")

    answer = ctl("output", f"#{run.pk}")

    assert (answer.code, answer.out, answer.error) == (0, "page 1\npage 2\n", "")


def test_a_run_that_wrote_nothing_says_so_beside_an_empty_output() -> None:
    run = make_run(make_schedule(), "succeeded")

    answer = ctl("output", str(run.pk))

    assert (answer.code, answer.out) == (0, "")
    assert answer.error == f"run {run.pk} (succeeded) has written nothing\n"


def test_an_unknown_run_exits_with_4() -> None:
    assert ctl("output", "7").code == 4


def test_control_characters_do_not_reach_the_terminal() -> None:
    run = make_run(make_schedule(), "running", attempt=1)
    written(run, "\x1b[31mred\x1b[0m\x07\n")

    assert ctl("output", str(run.pk)).out == "red\\x07\n"


def test_json_has_the_run_and_its_output() -> None:
    run = make_run(make_schedule(), "failed", attempt=1)
    written(run, "page 1\n")

    answer = ctl("output", str(run.pk), "--json")

    shown = json.loads(answer.out)
    assert (shown["verb"], shown["run"]["id"], shown["output"]) == ("output", run.pk, "page 1\n")
    assert answer.code == 0


def test_to_follow_a_run_that_failed_exits_with_1_and_says_why() -> None:
    run = make_run(make_schedule(), "failed", attempt=1, error="OSError: no route")
    written(run, "page 1")

    answer = ctl("output", str(run.pk), "--follow")

    assert (answer.code, answer.out) == (1, "page 1\n")
    assert answer.error == f"run {run.pk}: failed, OSError: no route"


@pytest.mark.django_db(transaction=True)
def test_follows_a_run_to_its_end_and_through_a_second_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "_POLL_SECONDS", 0.01)
    run = make_run(make_schedule(), "running", attempt=1)
    written(run, "one\n")
    printed: list[str] = []
    real = output._print
    monkeypatch.setattr(output, "_print", lambda c, text: (printed.append(text), real(c, text)))

    def work() -> None:
        def saw(text: str) -> None:
            wait_for(lambda: text in "".join(printed), 10, f"{text!r} to be printed")

        try:
            saw("one\n")
            written(run, "one\ntwo")
            saw("two")
            with transaction.atomic():
                RunOutput.objects.filter(run=run).delete()
                Run.objects.filter(pk=run.pk).update(attempt=2)
            written(run, "again\n")
            saw("again")
            Run.objects.filter(pk=run.pk).update(state="succeeded")
        finally:
            connection.close()

    thread = threading.Thread(target=work)
    thread.start()
    answer = ctl("output", str(run.pk), "--follow")
    thread.join()

    assert (answer.code, answer.out, answer.error) == (0, "one\ntwoagain\n", "attempt 2\n")


def test_the_examples_of_the_docstrings_hold() -> None:
    result = doctest.testmod(output)
    assert (result.failed, result.attempted > 0) == (0, True)


def test_a_text_of_which_nothing_is_left_is_shown_as_a_whole() -> None:
    assert newer_part("one\n", "[... 4 bytes cut ...]\nnine\n") is None
