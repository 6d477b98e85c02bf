"""The verbs that act: run, cancel, again, pause and resume."""

from __future__ import annotations

import argparse
import shlex

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.core.management import call_command, load_command_class

from distcron_app import job
from distcron_app.cli.arguments import VERBS
from distcron_app.cli.exits import Exit
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


@job(name="tests.guarded", permission="auth.view_group")
def guarded() -> None:
    """Do what only some may start."""


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

    def test_on_a_terminal_a_busy_schedule_names_the_way_out(self) -> None:
        make_run(make_schedule(), "running")

        with pytest.raises(Exit) as refused:
            call_command("schedulerctl", "run", "invoice-close")

        assert refused.value.hint == "To queue it behind that run: --behind"

    def test_behind_queues_it_on_a_busy_schedule(self) -> None:
        active = make_run(make_schedule(), "running")

        answer = ctl("run", "invoice-close", "--behind", "--json")

        assert answer.code == 0
        queued = Run.objects.get(state="queued")
        assert (queued.reason, queued.details) == ("overlap", {"blocked_by": active.pk})
        assert answer.data["run"]["reason"] == "overlap"

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
            "cancel_requested_at": None,
            "cancel_cause": "",
            "trigger": "manual",
            "scheduled_at": None,
            "backfill": None,
            "attempt": 0,
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


class TestCancel:
    def test_a_queued_run_is_cancelled_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOGNAME", "ops")
        run = make_run(make_schedule(), "queued")

        answer = ctl("cancel", str(run.pk), "--reason", "wrong month")

        assert answer.out == f"run {run.pk} · ■ cancelled\n"
        assert answer.error == f"Run {run.pk} is cancelled.\n"
        run.refresh_from_db()
        assert (run.state, run.error) == ("cancelled", "by cli:ops: wrong month")
        entry = AuditEntry.objects.get()
        assert (entry.actor, entry.via, entry.verb) == ("cli:ops", "cli", "cancel")

    def test_a_running_one_is_asked(self) -> None:
        run = make_run(make_schedule(), "running", attempt=1)

        answer = ctl("cancel", f"#{run.pk}", "--reason", "wrong month", "--json")

        assert answer.code == 0
        assert answer.data["verb"] == "cancel"
        assert answer.data["outcome"] == "asked"
        assert answer.data["run"]["state"] == "running"
        assert answer.data["run"]["cancel_requested_at"].endswith("Z")
        assert answer.data["run"]["cancel_cause"].endswith(": wrong month")

    def test_asking_again_changes_nothing_and_says_so(self) -> None:
        run = make_run(make_schedule(), "running", attempt=1)
        ctl("cancel", str(run.pk), "--reason", "first")

        answer = ctl("cancel", str(run.pk), "--reason", "second")

        assert answer.code == 0
        assert answer.error == f"Run {run.pk} was asked to stop already. Nothing was changed.\n"
        assert AuditEntry.objects.count() == 1

    def test_a_final_run_exits_with_5(self) -> None:
        run = make_run(make_schedule(), "succeeded")

        answer = ctl("cancel", str(run.pk), "--reason", "late")

        assert answer.code == 5
        assert answer.error == f"Run {run.pk}: succeeded by now, so it was not cancelled."
        assert answer.out == ""

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            (["7", "--reason", "x"], 4),
            (["7", "--reason", " "], 2),
        ],
    )
    def test_what_cannot_be_cancelled_has_its_exit_code(self, words: list[str], code: int) -> None:
        assert ctl("cancel", *words).code == code

    @pytest.mark.parametrize(
        ("words", "problem"),
        [
            (["7"], "the following arguments are required: --reason"),
            (["seven", "--reason", "x"], "got 'seven'. Write the number of a run"),
            (["9" * 30, "--reason", "x"], "Write the number of a run"),
        ],
    )
    def test_a_command_line_that_is_wrong_says_what(self, words: list[str], problem: str) -> None:
        answer = ctl("cancel", *words)

        assert problem in answer.error

    def test_a_user_needs_the_permission_and_is_in_the_audit(self) -> None:
        run = make_run(make_schedule(), "queued")
        make_user("ana", "run_schedule")
        make_user("siti", "cancel_run")

        refused = ctl("cancel", str(run.pk), "--reason", "x", "--user", "ana")
        done = ctl("cancel", str(run.pk), "--reason", "x", "--user", "siti")

        assert (refused.code, done.code) == (5, 0)
        assert "lacks the permission distcron.cancel_run" in refused.error
        assert AuditEntry.objects.get().actor == "siti"


class TestAgain:
    def test_a_failed_run_is_queued_again(self) -> None:
        run = make_run(make_schedule(), "failed", attempt=1, error="boom")

        answer = ctl("again", str(run.pk), "--reason", "disk was full", "--json")

        assert answer.code == 0
        assert answer.data["verb"] == "again"
        facts = answer.data["run"]
        assert (facts["id"], facts["state"], facts["reason"]) == (run.pk, "queued", "again")
        assert (facts["error"], facts["attempt"], facts["schedule"]) == ("", 1, "invoice-close")
        entry = AuditEntry.objects.get()
        assert (entry.verb, entry.via, entry.reason) == ("run_again", "cli", "disk was full")

    def test_a_run_that_succeeded_exits_with_5(self) -> None:
        run = make_run(make_schedule(), "succeeded")

        answer = ctl("again", str(run.pk))

        assert answer.code == 5
        assert answer.error == (
            f"Run {run.pk}: succeeded by now. Only a failed, cancelled or lost run can be run "
            "again."
        )

    def test_a_busy_schedule_exits_with_5_and_names_the_run(self) -> None:
        schedule = make_schedule()
        failed = make_run(schedule, "failed", attempt=1)
        active = make_run(schedule, "running", attempt=1)

        answer = ctl("again", str(failed.pk))

        assert answer.code == 5
        assert answer.error == f"schedule 'invoice-close': busy, blocked by run {active.pk}."

    def test_an_unknown_run_exits_with_4(self) -> None:
        answer = ctl("again", "7")

        assert answer.code == 4
        assert answer.error == "run 7: not found, or its history was pruned."

    def test_a_user_needs_the_permission_of_the_job_too(self) -> None:
        run = make_run(make_schedule(job="tests.guarded", arguments={}), "failed", attempt=1)
        make_user("ana", "run_schedule")
        make_user("siti", "run_schedule", "view_group")

        refused = ctl("again", str(run.pk), "--user", "ana")
        done = ctl("again", str(run.pk), "--user", "siti")

        assert (refused.code, done.code) == (5, 0)
        assert "lacks the permission auth.view_group" in refused.error


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("verb", VERBS)
def test_the_two_examples_of_the_help_run(verb: str) -> None:
    for number, key in enumerate(("invoice-close", "mail-digest")):
        schedule = make_schedule(key)
        if verb == "cancel":
            make_run(schedule, "running", id=88140 + number, attempt=1)
        if verb == "again":
            make_run(schedule, "failed", id=88123 + number, attempt=1)

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
