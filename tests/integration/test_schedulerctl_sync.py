"""``schedulerctl sync``, and where ``list`` says that a schedule is defined in code."""

from __future__ import annotations

import pytest

from distcron_app import cron, every
from distcron_app.models import AuditEntry, Schedule
from tests.code import Code
from tests.factories import make_user
from tests.integration.schedulerctl_builders import ctl, make_schedule

pytestmark = pytest.mark.django_db

KEY = "shop-close-books"


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Code:
    code = Code(monkeypatch)
    code.define(cron("0 2 * * *", timezone="Asia/Jakarta"))
    return code


def test_sync_shows_what_it_did_and_then_that_nothing_is_left_to_do(code: Code) -> None:
    first, second, wide = ctl("sync"), ctl("sync"), ctl("sync", "--wide")

    assert first.lines == [
        "OUTCOME  KEY               DEFINED IN    DIFFERS IN",
        "created  shop-close-books  shop.jobs:42",
    ]
    assert (first.code, first.error) == (0, "Schedules in code: 1 created.\n")
    assert (second.code, second.out, second.error) == (0, "", "Schedules in code: 1 unchanged.\n")
    assert wide.lines[1].startswith("unchanged  shop-close-books")


def test_a_change_names_the_columns(code: Code) -> None:
    ctl("sync")
    code.define(cron("0 3 * * *", timezone="Asia/Jakarta", max_attempts=3))
    assert ctl("sync", "--no-header").lines == [
        "changed  shop-close-books  shop.jobs:42  cron, max_attempts"
    ]


def test_sync_says_it_all_as_json(code: Code) -> None:
    make_schedule("mine")
    code.define(cron("0 2 * * *"), every(5, "minutes", key="mine"), cron("bad", key="bad"))

    answer = ctl("sync", "--json")

    assert answer.code == 1
    assert (answer.data["verb"], answer.data["dry_run"]) == ("sync", False)
    found = {entry["key"]: entry for entry in answer.data["schedules"]}
    assert {key: entry["outcome"] for key, entry in found.items()} == {
        KEY: "created",
        "mine": "refused",
        "bad": "unusable",
    }
    assert found[KEY] == {
        "key": KEY,
        "job": "shop.close_books",
        "defined_in": "shop.jobs:42",
        "outcome": "created",
        "changed": [],
        "problems": [],
    }
    assert found["bad"]["problems"][0].startswith("cron: ")


def test_what_is_left_out_is_named_and_decides_the_exit_code(code: Code) -> None:
    make_schedule(KEY)
    refused = ctl("sync", "-q")
    code.define(cron("bad", key="bad"))
    unusable = ctl("sync", "-q")

    assert refused.code == 5
    assert refused.error.startswith("error: Schedule 'shop-close-books' (shop.jobs:42): a schedule")
    assert refused.error.endswith("1 schedule in code was left out; the others were not.")
    assert unusable.code == 1
    assert "error: Schedule 'bad' (shop.jobs:42): cron: " in unusable.error


def test_a_dry_run_changes_nothing(code: Code) -> None:
    answer = ctl("sync", "--dry-run")
    assert (answer.code, "created  shop-close-books" in answer.out) == (0, True)
    assert answer.error.endswith("Nothing was changed: this was a dry run.\n")
    assert Schedule.objects.count() == AuditEntry.objects.count() == 0


def test_adopt_takes_over_what_people_made(code: Code) -> None:
    make_schedule(KEY)
    answer = ctl("sync", "--adopt", KEY)
    assert answer.code == 0
    assert answer.lines[1].startswith("taken over  shop-close-books")
    assert Schedule.objects.get().is_in_code


def test_adopt_of_a_key_that_no_code_has_changes_nothing(code: Code) -> None:
    answer = ctl("sync", "--adopt", "shop-close-bocks")
    assert answer.code == 4
    assert answer.error.endswith("no schedule in code has this key. Did you mean shop-close-books?")
    assert Schedule.objects.count() == 0


@pytest.mark.parametrize("held", [[], ["distcron.change_schedule"], ["distcron.add_schedule"]])
def test_a_user_needs_to_add_and_to_change(code: Code, held: list[str]) -> None:
    make_user(*held, username="siti")
    answer = ctl("sync", "--user", "siti")
    assert answer.code == 5
    assert "lacks the permission distcron." in answer.error
    assert Schedule.objects.count() == 0


def test_the_audit_names_who_asked(code: Code) -> None:
    make_user("distcron.add_schedule", "distcron.change_schedule", username="siti")
    ctl("sync", "--user", "siti")
    entry = AuditEntry.objects.get()
    assert (entry.actor, entry.via, entry.user is not None) == ("siti", "code", True)
    code.drop()
    ctl("sync")
    assert AuditEntry.objects.latest("id").actor.startswith("cli:")


def test_without_schedules_in_code_sync_shows_how_to_define_one(code: Code) -> None:
    code.drop()
    answer = ctl("sync")
    assert (answer.code, answer.out) == (0, "")
    assert "Schedules in code: none.\nDefine one: @job(schedule=cron(" in answer.error


def test_list_says_where_a_schedule_is_defined(code: Code) -> None:
    make_schedule("mine")
    ctl("sync")
    found = {each["key"]: each for each in ctl("list", "--json").data["schedules"]}
    assert (found[KEY]["defined_in"], found[KEY]["left_code_at"]) == ("shop.jobs:42", None)
    assert found["mine"]["defined_in"] == ""
    lines = ctl("list", "--wide").lines
    assert "DEFINED IN" in lines[0]
    assert ["shop.jobs:42" in line for line in lines[1:]] == [False, True]

    code.drop()
    ctl("sync")
    (gone,) = [each for each in ctl("list", "--json").data["schedules"] if each["key"] == KEY]
    assert gone["defined_in"] == "shop.jobs:42"
    assert gone["left_code_at"].endswith("Z")
    assert ctl("list", "--wide").lines[2].endswith("No longer defined in code (was shop.jobs:42)")
