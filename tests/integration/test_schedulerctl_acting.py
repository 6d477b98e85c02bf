"""The verbs that act: run, pause and resume."""

from __future__ import annotations

import argparse
import shlex

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.core.management import load_command_class

from distcron_app import job
from distcron_app.cli.arguments import VERBS
from distcron_app.models import AuditEntry, Run, Schedule
from tests.integration.schedulerctl_builders import (
    ctl,
    make_node,
    make_run,
    make_schedule,
    node_that_finishes,
)

pytestmark = pytest.mark.django_db


@job(name="tests.call_partner")
def call_partner(api_token: str) -> None:
    """Take a secret."""


def make_user(name: str, *permissions: str) -> None:
    user = get_user_model().objects.create_user(name)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))


def states() -> dict[str, str]:
    return dict(Schedule.objects.values_list("key", "state"))


class TestRun:
    def test_queues_a_run_of_this_operating_system_user(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOGNAME", "ops")
        make_schedule()
        make_node()

        answer = ctl("run", "invoice-close", "--reason", "month end")

        run = Run.objects.get()
        assert (run.state, run.triggered_by, run.arguments) == ("queued", "cli:ops", {"batch": 5})
        assert answer.out == f"run {run.pk} · ○ queued\n"
        assert answer.error == f"run {run.pk} of invoice-close queued.\n"
        entry = AuditEntry.objects.get()
        assert (entry.actor, entry.via, entry.verb, entry.reason) == (
            "cli:ops",
            "cli",
            "run_now",
            "month end",
        )

    def test_without_a_node_warns_that_it_waits_for_one(self) -> None:
        make_schedule()

        answer = ctl("run", "invoice-close")

        assert answer.code == 0
        assert answer.error.endswith(
            "No node is alive: the run waits for one. Start: manage.py runscheduler\n"
        )

    def test_a_busy_schedule_exits_with_5_and_names_the_run(self) -> None:
        run = make_run(make_schedule(), "running")

        answer = ctl("run", "invoice-close")

        assert answer.code == 5
        assert answer.error == f"schedule 'invoice-close': busy, blocked by run {run.pk}."

    def test_an_argument_replaces_only_its_own_value(self) -> None:
        make_schedule(job="project.demo.greet", arguments={"name": "Ana", "language": "id"})

        ctl("run", "invoice-close", "--arg", "name=7")

        assert Run.objects.get().arguments == {"name": "7", "language": "id"}

    def test_json_replaces_all_arguments(self) -> None:
        make_schedule(job="project.demo.greet", arguments={"name": "Ana", "language": "id"})

        ctl("run", "invoice-close", "--arguments", '{"name": "Bo"}')

        assert Run.objects.get().arguments == {"name": "Bo"}

    def test_an_argument_completes_the_json(self) -> None:
        make_schedule(job="project.demo.greet", arguments={"name": "Ana"})

        ctl("run", "invoice-close", "--arguments", '{"language": "id"}', "--arg", "name=Bo")

        assert Run.objects.get().arguments == {"language": "id", "name": "Bo"}

    def test_quiet_leaves_only_the_data(self) -> None:
        make_schedule()

        answer = ctl("run", "invoice-close", "-q")

        assert answer.error == ""
        assert answer.out.endswith(" · ○ queued\n")

    @pytest.mark.parametrize(
        ("words", "error"),
        [
            (
                ["--arguments", '{"batch": 1, "batch": 2}'],
                "arguments: must not give 'batch' twice.",
            ),
            (["--arg", "batch=x"], "batch: must be a whole number such as 5, got 'x'."),
            (["--arg", "bacth=1"], "bacth: is not a parameter. Did you mean 'batch'?"),
            (["--arguments", "{"], "arguments: must be JSON: "),
            (["--arguments", "[1]"], "arguments: must be"),
        ],
    )
    def test_arguments_that_do_not_fit_the_job_are_refused(
        self, words: list[str], error: str
    ) -> None:
        make_schedule()

        answer = ctl("run", "invoice-close", *words)

        assert answer.code == 2
        assert answer.error.startswith(error)
        assert not Run.objects.exists()

    def test_secret_arguments_are_masked(self) -> None:
        make_schedule(job="tests.call_partner", arguments={"api_token": "s3cret-value"})

        answer = ctl("run", "invoice-close", "--json")

        assert answer.data["run"]["arguments"] == {"api_token": "••••"}

    def test_json_has_these_keys(self) -> None:
        make_schedule()

        facts = ctl("run", "invoice-close", "--arg", "batch=7", "--json").data["run"]

        assert facts.pop("due_at").endswith("Z")
        assert facts == {
            "id": Run.objects.get().pk,
            "schedule": "invoice-close",
            "job": "project.demo.invoice_close",
            "arguments": {"batch": 7},
            "state": "queued",
            "reason": "",
            "error": "",
            "node": None,
            "started_at": None,
            "finished_at": None,
            "duration_seconds": None,
            "result": None,
        }

    def test_a_user_without_the_permission_is_refused(self) -> None:
        make_schedule()
        make_user("ana")

        answer = ctl("run", "invoice-close", "--user", "ana")

        assert answer.code == 5
        assert answer.error == "user 'ana': lacks the permission distcron.run_schedule."
        assert not Run.objects.exists()

    def test_a_user_with_the_permission_is_the_actor(self) -> None:
        make_schedule()
        make_user("ana", "run_schedule")

        assert ctl("run", "invoice-close", "--user", "ana").code == 0
        assert AuditEntry.objects.get().actor == "ana"

    def test_an_unknown_user_exits_with_4(self) -> None:
        make_schedule()

        assert ctl("run", "invoice-close", "--user", "nobody").code == 4

    def test_waiting_longer_than_the_timeout_exits_with_7(self) -> None:
        make_schedule()

        answer = ctl("run", "invoice-close", "--wait", "--timeout", "0.3")

        run = Run.objects.get()
        assert answer.code == 7
        assert answer.error.endswith(f"run {run.pk}: still queued after 0.3 s. It goes on.")
        assert run.state == "queued"


@pytest.mark.django_db(transaction=True)
class TestRunAndWait:
    def test_a_success_exits_with_0(self) -> None:
        make_schedule()

        with node_that_finishes("succeeded", result={"closed": 5}):
            answer = ctl("run", "invoice-close", "--wait", "--timeout", "20", "--json")

        assert answer.code == 0
        assert answer.data["run"]["state"] == "succeeded"
        assert answer.data["run"]["result"] == {"closed": 5}

    def test_a_failure_exits_with_1_and_the_cause(self) -> None:
        make_schedule()

        with node_that_finishes("failed", reason="error", error="ValueError: no batch"):
            answer = ctl("run", "invoice-close", "--wait", "--timeout", "20")

        pk = Run.objects.get().pk
        assert answer.code == 1
        assert answer.error.endswith(f"run {pk}: failed, ValueError: no batch")
        assert answer.out.startswith(f"run {pk} · ✖ failed · ")


class TestPauseAndResume:
    def test_pause_keeps_reason_and_author(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOGNAME", "ops")
        make_schedule("one")
        make_schedule("two")
        make_schedule("three")

        answer = ctl("pause", "one", "two", "--reason", "books are closed")

        assert answer.code == 0
        assert answer.error == "2 schedules changed.\n"
        assert states() == {"one": "paused", "two": "paused", "three": "active"}
        one = Schedule.objects.get(key="one")
        assert (one.state_reason, one.state_by) == ("books are closed", "cli:ops")

    def test_one_unknown_key_leaves_all_as_they_are(self) -> None:
        make_schedule("one")

        answer = ctl("pause", "one", "tow", "--reason", "x")

        assert answer.code == 4
        assert states() == {"one": "active"}

    def test_pause_of_a_paused_schedule_changes_nothing(self) -> None:
        make_schedule("one", state="paused", state_reason="first")

        answer = ctl("pause", "one", "--reason", "second", "--json")

        assert answer.data == {
            "version": 1,
            "verb": "pause",
            "dry_run": False,
            "schedules": [
                {
                    "key": "one",
                    "state": "paused",
                    "state_reason": "first",
                    "state_by": "",
                    "paused_until": None,
                    "changed": False,
                }
            ],
        }

    def test_an_empty_reason_is_refused(self) -> None:
        make_schedule("one")

        assert ctl("pause", "one", "--reason", " ").code == 2
        assert states() == {"one": "active"}

    def test_a_reason_that_is_too_long_is_refused(self) -> None:
        make_schedule("one")

        answer = ctl("pause", "one", "--reason", "x" * 501)

        assert "argument --reason: got 501 characters, allowed 500" in answer.error
        assert states() == {"one": "active"}

    def test_all_without_confirmation_is_refused_with_the_count(self) -> None:
        make_schedule("one")
        make_schedule("two", state="paused")
        make_schedule("three")

        answer = ctl("pause", "--all", "--reason", "move")

        assert answer.code == 5
        assert answer.error == (
            "Pause 2 schedules? Not confirmed. Add --yes, or --dry-run to look."
        )
        assert states() == {"one": "active", "two": "paused", "three": "active"}

    def test_all_with_yes_changes_those_in_the_state(self) -> None:
        make_schedule("one", state="paused")
        make_schedule("two")

        assert ctl("resume", "--all", "--state", "paused", "--yes").code == 0
        assert states() == {"one": "active", "two": "active"}

    def test_a_dry_run_shows_and_changes_nothing(self) -> None:
        make_schedule("one")

        answer = ctl("pause", "--all", "--reason", "move", "--dry-run")

        assert answer.lines[1].split() == ["●", "active", "one", "would", "change"]
        assert answer.error == "Nothing was changed: this was a dry run.\n"
        assert states() == {"one": "active"}

    @pytest.mark.parametrize("words", [[], ["one", "--all"], ["one", "--state", "active"]])
    def test_keys_and_all_exclude_each_other(self, words: list[str]) -> None:
        make_schedule("one")

        assert ctl("resume", *words).code == 2

    def test_a_user_needs_the_permission(self) -> None:
        make_schedule("one")
        make_user("ana")

        assert ctl("pause", "one", "--reason", "x", "--user", "ana").code == 5
        assert states() == {"one": "active"}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("verb", VERBS)
def test_the_two_examples_of_the_help_run(verb: str) -> None:
    make_schedule("invoice-close")
    make_schedule("mail-digest")

    with node_that_finishes("succeeded"):
        answers = [ctl(*words) for words in _examples(verb)]

    assert [answer.code for answer in answers] == [0, 0]


def _examples(verb: str) -> list[list[str]]:
    """Return the example lines of the verb's help as the words after ``schedulerctl``."""
    parser = load_command_class("distcron_app", "schedulerctl").create_parser(
        "manage.py", "schedulerctl"
    )
    (verbs,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    text = verbs.choices[verb].format_help()
    start = f"  manage.py schedulerctl {verb}"
    shown = text[text.index("examples:") :].splitlines()[1:]
    assert len(shown) == 2
    assert all(line.startswith(start) for line in shown)
    return [shlex.split(line)[2:] for line in shown]
