"""Schedules in code become rows: the code decides what they are, people whether they are paused."""

from __future__ import annotations

import io
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command, load_command_class
from django.core.management.base import OutputWrapper
from django.core.management.sql import emit_post_migrate_signal
from django.db import connection
from django.test.utils import CaptureQueriesContext

from distcron_app import cron, every, maintenance, once, operations, sync
from distcron_app.instants import database_now
from distcron_app.models import AuditEntry, Calendar, Run, Schedule
from distcron_app.sync import Author, SyncReport
from tests.code import Code
from tests.factories import make_schedule, make_user

pytestmark = pytest.mark.django_db

KEY = "shop-close-books"
DAILY = cron("0 2 * * *", timezone="Asia/Jakarta")
WHO: dict[str, Any] = {"actor": "siti", "via": "admin"}


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Code:
    return Code(monkeypatch)


def synced(**options: Any) -> SyncReport:
    return sync.sync(Author(actor="cli:deploy"), **options)


def outcomes(report: SyncReport) -> dict[str, str]:
    return {entry.key: entry.outcome for entry in report.entries}


def row() -> Schedule:
    return Schedule.objects.get(key=KEY)


def audit() -> list[tuple[str, str, str]]:
    entries = AuditEntry.objects.filter(via="code").order_by("id")
    return [(entry.verb, entry.actor, entry.reason) for entry in entries]


# --- created and unchanged --------------------------------------------------------------


def test_a_definition_becomes_a_row_that_is_planned_from_now(code: Code) -> None:
    code.define(cron("0 2 * * *", timezone="Asia/Jakarta", arguments={"batch": 5}, max_attempts=3))
    now = database_now()

    assert outcomes(synced()) == {KEY: "created"}

    found = row()
    assert (found.job, found.cron, found.max_attempts) == ("shop.close_books", "0 2 * * *", 3)
    assert (found.arguments, found.name) == ({"batch": 5}, "Shop close books")
    assert (found.defined_in, found.is_in_code, found.state) == ("shop.jobs:42", True, "active")
    assert found.next_run_at is not None and now < found.next_run_at <= now + timedelta(days=1)
    assert audit() == [("add", "cli:deploy", "Defined in shop.jobs:42")]


def test_a_row_that_differs_in_nothing_is_not_written(code: Code) -> None:
    code.define(
        DAILY, every(5, "minutes", key="often"), once(datetime(2090, 1, 1, tzinfo=UTC), key="x")
    )
    synced()
    # An instant that is due and not claimed yet must not be planned away.
    Schedule.objects.filter(key=KEY).update(next_run_at=database_now() - timedelta(seconds=3))
    before = list(Schedule.objects.order_by("key").values())

    report = synced()

    assert set(outcomes(report).values()) == {"unchanged"}
    assert list(Schedule.objects.order_by("key").values()) == before
    assert len(audit()) == 3


def test_what_differs_in_nothing_costs_a_fixed_number_of_queries(code: Code) -> None:
    code.define(*(cron(f"{number} 2 * * *", key=f"k-{number}") for number in range(50)))
    synced()
    with CaptureQueriesContext(connection) as queries:
        synced()
    assert len(queries) == 3


def test_a_job_that_moved_within_its_file_is_no_edit(code: Code) -> None:
    code.define(DAILY, every(5, "minutes", key="often"))
    synced()
    before = row()
    code.define(DAILY, every(5, "minutes", key="often"), at="shop.jobs:57")

    with CaptureQueriesContext(connection) as queries:
        assert set(outcomes(synced()).values()) == {"unchanged"}

    assert sum("UPDATE" in query["sql"] for query in queries) == 1
    assert (row().defined_in, row().version) == ("shop.jobs:57", before.version)
    assert (row().next_run_at, row().updated_at) == (before.next_run_at, before.updated_at)


def test_a_single_instant_of_the_past_never_runs(code: Code) -> None:
    code.define(once(database_now() - timedelta(minutes=1)))
    synced()
    assert (row().state, row().next_run_at) == ("exhausted", None)
    assert outcomes(synced()) == {KEY: "unchanged"}


def test_a_calendar_is_named(code: Code) -> None:
    calendar = Calendar.objects.create(name="Holidays", timezone="Asia/Jakarta")
    code.define(cron("0 2 * * *", calendar="Holidays"))
    synced()
    assert row().calendar == calendar
    assert outcomes(synced()) == {KEY: "unchanged"}


# --- changed ----------------------------------------------------------------------------


def test_another_rule_is_planned_from_now_and_runs_nothing_of_the_past(code: Code) -> None:
    code.define(DAILY)
    synced()
    version = row().version
    code.define(cron("* * * * *", timezone="Asia/Jakarta"), at="shop.jobs:43")
    now = database_now()

    report = synced()

    (entry,) = report.entries
    assert (entry.outcome, entry.changed) == ("changed", ("cron",))
    found = row()
    assert found.next_run_at is not None and now < found.next_run_at <= now + timedelta(minutes=1)
    assert (found.version, found.defined_in) == (version + 1, "shop.jobs:43")
    last = AuditEntry.objects.latest("id")
    assert last.after is not None and last.after["cron"] == "* * * * *"
    assert Run.objects.count() == 0


def test_another_policy_leaves_the_next_instant_as_it_is(code: Code) -> None:
    code.define(DAILY)
    synced()
    due = database_now() - timedelta(seconds=2)
    Schedule.objects.filter(key=KEY).update(next_run_at=due)
    code.define(cron("0 2 * * *", timezone="Asia/Jakarta", max_attempts=5))

    synced()

    assert (row().max_attempts, row().next_run_at) == (5, due)


def test_what_the_code_leaves_out_again_goes_back_to_its_default(code: Code) -> None:
    code.define(cron("0 2 * * *", notes="Ask Ratna.", max_active=2, overlap="allow"))
    synced()
    code.define(cron("0 2 * * *"))
    synced()
    assert (row().notes, row().max_active, row().overlap) == ("", None, "skip")


def test_an_edit_past_the_admin_is_set_back(code: Code) -> None:
    code.define(DAILY)
    synced()
    Schedule.objects.filter(key=KEY).update(cron="0 3 * * *")
    assert outcomes(synced()) == {KEY: "changed"}
    assert row().cron == "0 2 * * *"


def test_a_row_that_an_older_node_could_not_run_is_mended(code: Code) -> None:
    code.define(DAILY)
    synced()
    Schedule.objects.filter(key=KEY).mark_invalid("Job 'shop.close_books': not registered.")
    assert outcomes(synced()) == {KEY: "changed"}
    assert (row().state, row().state_reason) == ("active", "")
    assert row().next_run_at is not None


# --- paused by people -------------------------------------------------------------------


def test_the_pause_of_a_person_survives_every_sync(code: Code) -> None:
    code.define(DAILY)
    synced()
    operations.pause([row()], reason="books are closed", **WHO)
    pause = ("paused", "books are closed", "siti")

    synced()
    assert (row().state, row().state_reason, row().state_by) == pause
    code.define(cron("0 3 * * *", timezone="Asia/Jakarta"))
    synced()
    assert (row().state, row().state_reason, row().state_by) == pause
    assert (row().cron, row().next_run_at) == ("0 3 * * *", None)
    code.drop()
    synced()
    assert (row().state, row().state_reason, row().state_by) == pause
    assert row().left_code_at is not None
    code.define(DAILY)
    synced()
    assert (row().state, row().state_reason, row().state_by) == pause
    assert row().is_in_code


# --- left and returned ------------------------------------------------------------------


def test_what_left_the_code_is_paused_and_kept(code: Code) -> None:
    code.define(DAILY)
    synced()
    code.drop()

    assert outcomes(synced()) == {KEY: "left"}

    found = row()
    assert (found.state, found.state_by, found.next_run_at) == ("paused", "cli:deploy", None)
    assert found.state_reason == "No longer defined in code (was shop.jobs:42)"
    assert not found.is_in_code
    assert audit()[1:] == [("pause", "cli:deploy", "No longer defined in code (was shop.jobs:42)")]
    assert outcomes(synced()) == {}
    assert len(audit()) == 2


def test_what_returns_to_the_code_goes_on_from_now(code: Code) -> None:
    code.define(DAILY)
    synced()
    code.drop()
    synced()
    code.define(cron("0 4 * * *", timezone="Asia/Jakarta"), at="shop.jobs:7")
    now = database_now()

    assert outcomes(synced()) == {KEY: "returned"}

    found = row()
    assert (found.state, found.state_reason, found.cron) == ("active", "", "0 4 * * *")
    assert (found.is_in_code, found.defined_in) == (True, "shop.jobs:7")
    assert found.next_run_at is not None and found.next_run_at > now
    assert [verb for verb, _actor, _reason in audit()] == ["add", "pause", "change", "resume"]
    assert Run.objects.exclude(state="skipped").count() == 0
    assert outcomes(synced()) == {KEY: "unchanged"}


def test_a_finished_schedule_that_leaves_stays_finished(code: Code) -> None:
    code.define(once(database_now() - timedelta(minutes=1)))
    synced()
    code.drop()
    synced()
    assert (row().state, row().is_in_code) == ("exhausted", False)
    assert audit()[-1] == ("change", "cli:deploy", "No longer defined in code (was shop.jobs:42)")


def test_a_person_may_resume_what_left_the_code_and_no_sync_pauses_it_again(code: Code) -> None:
    code.define(DAILY)
    synced()
    code.define()
    synced()
    operations.resume([row()], **WHO)

    assert outcomes(synced()) == {}
    assert row().state == "active"
    operations.pause([row()], reason="enough", **WHO)
    code.define(DAILY)
    synced()
    assert (row().state, row().state_reason) == ("paused", "enough")


def test_a_pause_with_an_end_does_not_end_after_the_schedule_left_the_code(code: Code) -> None:
    code.define(DAILY)
    synced()
    soon = database_now() + timedelta(seconds=30)
    operations.pause([row()], reason="until soon", until=soon, **WHO)
    code.drop()
    synced()
    Schedule.objects.filter(key=KEY).update(
        paused_until=database_now() - timedelta(seconds=1), state_at=row().state_at
    )

    assert list(Schedule.objects.pause_over()) == []
    assert maintenance._resume_over() == ()
    # As a sweep sees it that read the row before it left the code.
    assert not maintenance._is_over(row(), database_now())
    assert row().state == "paused"
    code.define(DAILY)
    synced()
    assert maintenance._resume_over() == (KEY,)


def test_a_pause_of_a_person_after_it_left_ends_as_any_other(code: Code) -> None:
    code.define(DAILY)
    synced()
    code.drop()
    synced()
    operations.resume([row()], **WHO)
    soon = database_now() + timedelta(seconds=30)
    operations.pause([row()], reason="until soon", until=soon, **WHO)
    Schedule.objects.filter(key=KEY).update(
        paused_until=database_now() - timedelta(seconds=1), state_at=row().state_at
    )
    assert maintenance._resume_over() == (KEY,)


# --- refused, adopted, unusable ---------------------------------------------------------


def test_a_schedule_that_people_made_is_not_taken_over(code: Code) -> None:
    make_schedule(key=KEY, cron="0 9 * * *")
    before = Schedule.objects.filter(key=KEY).values().get()
    code.define(DAILY, every(5, "minutes", key="often"))

    report = synced()

    assert outcomes(report) == {"often": "created", KEY: "refused"}
    assert Schedule.objects.filter(key=KEY).values().get() == before
    (problem,) = report.problems
    assert problem.startswith(
        "Schedule 'shop-close-books' (shop.jobs:42): a schedule with this key"
    )
    assert problem.endswith("manage.py schedulerctl sync --adopt shop-close-books")


def test_an_adopted_schedule_keeps_its_history_and_its_pause(code: Code) -> None:
    schedule = make_schedule(key=KEY, cron="0 9 * * *")
    operations.pause([schedule], reason="books are closed", **WHO)
    code.define(DAILY)

    assert outcomes(synced(adopt=[KEY])) == {KEY: "adopted"}

    assert (row().pk, row().cron, row().state) == (schedule.pk, "0 2 * * *", "paused")
    assert row().is_in_code
    last = AuditEntry.objects.latest("id")
    assert last.before is not None and last.before["cron"] == "0 9 * * *"
    assert outcomes(synced(adopt=[KEY])) == {KEY: "unchanged"}


def test_a_definition_that_cannot_be_used_stops_no_other_and_leaves_its_row(code: Code) -> None:
    code.define(DAILY)
    synced()
    before = Schedule.objects.filter(key=KEY).values().get()
    code.define(cron("0 25 * * *"), every(5, "minutes", key="often"))

    report = synced()

    assert outcomes(report) == {"often": "created", KEY: "unusable"}
    assert Schedule.objects.filter(key=KEY).values().get() == before
    (problem,) = report.problems
    assert "(shop.jobs:42): cron: Hour '25'" in problem


def test_a_calendar_that_does_not_exist_is_a_problem_of_one_definition(code: Code) -> None:
    code.define(cron("0 2 * * *", calendar="Holidays"), every(5, "minutes", key="often"))
    report = synced()
    assert outcomes(report) == {"often": "created", KEY: "unusable"}
    assert "calendar: 'Holidays' does not exist." in report.problems[0]


def test_a_key_that_is_used_twice_is_nobodys(code: Code) -> None:
    code.define(DAILY)
    synced()
    code.define(DAILY, every(5, "minutes"))
    assert outcomes(synced()) == {KEY: "unusable"}
    assert (row().kind, row().state) == ("cron", "active")


def test_a_dry_run_says_it_all_and_writes_nothing(code: Code) -> None:
    make_schedule(key="mine")
    code.define(DAILY, every(5, "minutes", key="often"))
    synced()
    code.define(cron("0 3 * * *"), cron("0 4 * * *", key="new"), cron("0 5 * * *", key="mine"))
    before = list(Schedule.objects.order_by("id").values())

    report = synced(dry_run=True)

    assert outcomes(report) == {
        KEY: "changed",
        "mine": "refused",
        "new": "created",
        "often": "left",
    }
    assert list(Schedule.objects.order_by("id").values()) == before
    assert len(audit()) == 2


def test_a_user_who_asked_is_in_the_audit(code: Code) -> None:
    user = make_user(username="ratna")
    code.define(DAILY)
    sync.sync(Author(actor="ratna", user=user))
    assert AuditEntry.objects.get().user == user


# --- several at once --------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_ten_syncs_at_once_do_everything_once(code: Code) -> None:
    code.define(DAILY, every(5, "minutes", key="leaves"))
    synced()
    code.define(cron("0 3 * * *"), *(cron(f"{n} 4 * * *", key=f"new-{n}") for n in range(5)))
    start, errors = threading.Barrier(10), []

    def compete() -> None:
        try:
            start.wait(10)
            synced()
        except Exception as error:
            errors.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=compete) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert errors == []
    assert Schedule.objects.count() == 7
    verbs = sorted(verb for verb, _actor, _reason in audit())
    assert verbs == ["add"] * 7 + ["change", "pause"]
    assert set(outcomes(synced()).values()) == {"unchanged"}


# --- after a migration ------------------------------------------------------------------


def migrated(**options: Any) -> str:
    """Send what ``migrate`` sends at its end; return what was printed."""
    out = io.StringIO()
    emit_post_migrate_signal(
        verbosity=options.pop("verbosity", 1),
        interactive=False,
        db=options.pop("db", "default"),
        stdout=out,
        apps=apps,
        plan=[],
    )
    return out.getvalue()


def test_migrate_syncs_and_warns(code: Code, settings: Any, capsys: Any) -> None:
    settings.DISTCRON = {**settings.DISTCRON, "SYNC_ON_MIGRATE": True}
    make_schedule(key="mine")
    code.define(DAILY, every(5, "minutes", key="mine"), cron("bad", key="bad"))

    out = migrated()

    assert "Schedules in code: 1 created, 1 refused, 1 unusable.\n" in out
    err = capsys.readouterr().err
    assert "warning: Schedule 'mine' (shop.jobs:42): a schedule with this key was made" in err
    assert "warning: Schedule 'bad' (shop.jobs:42): cron: " in err
    assert row().is_in_code
    assert AuditEntry.objects.get(verb="add").actor == "migrate"


def test_migrate_has_nothing_to_say_where_nothing_changed(code: Code, settings: Any) -> None:
    settings.DISTCRON = {**settings.DISTCRON, "SYNC_ON_MIGRATE": True}
    code.define(DAILY)
    assert migrated(verbosity=0) == ""
    assert "Schedules in code" not in migrated()


def test_the_setting_keeps_migrate_from_syncing(code: Code, settings: Any) -> None:
    settings.DISTCRON = {**settings.DISTCRON, "SYNC_ON_MIGRATE": False}
    code.define(DAILY)
    migrated()
    assert Schedule.objects.count() == 0


def test_a_migration_of_another_database_syncs_nothing(code: Code, settings: Any) -> None:
    settings.DISTCRON = {**settings.DISTCRON, "SYNC_ON_MIGRATE": True}
    code.define(DAILY)
    sync.sync_after_migrate(using="ledger", verbosity=1)
    assert Schedule.objects.count() == 0


def test_a_migration_to_an_older_state_syncs_nothing(code: Code, settings: Any) -> None:
    from django.db.migrations.recorder import MigrationRecorder

    settings.DISTCRON = {**settings.DISTCRON, "SYNC_ON_MIGRATE": True}
    code.define(DAILY)
    MigrationRecorder.Migration.objects.filter(app="distcron", name__startswith="0002").delete()
    migrated()
    assert Schedule.objects.count() == 0


def test_a_wrong_schedule_in_code_is_an_error_of_check(code: Code) -> None:
    code.define(cron("0 25 * * *"))
    err = io.StringIO()
    with pytest.raises(Exception, match="System check identified some issues") as caught:
        call_command("check", stderr=err)
    assert "shop.jobs:42: (distcron.E030) Schedule 'shop-close-books': cron: Hour '25'" in str(
        caught.value
    )


def test_a_wrong_schedule_in_code_is_a_warning_to_a_node_that_starts(code: Code) -> None:
    code.define(cron("0 25 * * *"))
    err = io.StringIO()
    node = load_command_class("distcron_app", "runscheduler")
    node.stderr = OutputWrapper(err)

    node.check()

    assert "WARNINGS:" in err.getvalue()
    assert "shop.jobs:42: (distcron.E030) Schedule 'shop-close-books': cron: " in err.getvalue()
