"""Rows that came past the model's checks: none stops the others, and each says what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import pytest
from django.db import DatabaseError, models, transaction

from distcron_app import lifecycle, maintenance, registry
from distcron_app.instants import database_now
from distcron_app.lifecycle import Failure, Finished
from distcron_app.models import Run, Schedule
from tests.integration.test_dispatch import Counting, Member, due

pytestmark = pytest.mark.django_db

FIRST, LAST = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
DAY = {"kind": "calendar", "calendar_date": date(2026, 1, 1), "calendar_time": time(1)}
CRON: dict[str, Any] = {"kind": "cron", "cron": "* * * * *"}

# What the row has, and what is said about it.
INVALID: list[tuple[dict[str, Any], str]] = [
    (CRON | {"cron": "0 0 31 2 *"}, "never runs"),
    (CRON | {"cron": ""}, "empty"),
    (CRON | {"cron": "@reboot"}, "@reboot"),
    (CRON | {"cron": "R * * * *"}, "Minute 'r': not supported"),
    (CRON | {"cron": "* * * * * * * *"}, "fields"),
    (CRON | {"cron": "* * * * *\n" * 11}, "11 rules: at most 10"),
    (CRON | {"timezone": "Mars/Phobos"}, "Time zone 'Mars/Phobos': not known"),
    (CRON | {"timezone": ""}, "Time zone: empty"),
    (CRON | {"timezone": "../etc/passwd"}, "Time zone '../etc/passwd': not known"),
    ({"job": ""}, "Job '': not registered"),
    ({"job": "os.system"}, "Job 'os.system': not registered"),
    ({"arguments": []}, "must be a JSON object"),
    ({"arguments": "text"}, "must be a JSON object"),
    ({"arguments": 5}, "must be a JSON object"),
    ({"arguments": {"unknown": 1}}, "unknown: is not a parameter"),
    (CRON | {"gap": "bogus"}, "bogus"),
    (CRON | {"fold": "bogus"}, "bogus"),
    (DAY | {"calendar_every": 1, "calendar_unit": "bogus"}, "Calendar unit 'bogus': not known"),
    (DAY | {"calendar_every": 0}, "must be a whole number from 1"),
    (DAY | {"calendar_every": 1, "calendar_date": date(1, 1, 1)}, "year must be from"),
    ({"kind": "calendar"}, "must be a whole number from 1"),
    ({"kind": "interval", "interval_seconds": 0}, "Interval '0': must be a whole number"),
    ({"kind": "interval", "interval_seconds": None}, "Interval 'None': must be a whole number"),
    ({"kind": "once", "run_at": None}, "Time: missing"),
    (
        {"spread_seconds": 2**31 - 1},
        "Spread over (seconds) 2147483647: At most 86,400 seconds, one day.",
    ),
    ({"spread_by": "bogus"}, "Spread by 'bogus': not known. Choose one of hashed, random."),
    ({"overlap": "bogus"}, "While a run is still active 'bogus': not known. Choose one of skip,"),
    ({"misfire": "bogus"}, "Occurrences that are late 'bogus': not known"),
    ({"calendar_action": "bogus"}, "On an excluded day 'bogus': not known"),
    ({"on_resume": "bogus"}, "Instants of a pause 'bogus': not known"),
    ({"backoff": "bogus"}, "Pause before the next 'bogus': not known"),
    ({"backoff_jitter": "bogus"}, "The pause is 'bogus': not known"),
    ({"isolation": "bogus"}, "Isolation 'bogus': not known"),
    ({"lock_level": "bogus"}, "Lock level 'bogus': not known"),
    ({"backoff_delays": ""}, "Pause (seconds) '': Write numbers from 0"),
    ({"backoff_delays": "soon"}, "Pause (seconds) 'soon': Write numbers from 0"),
    ({"backoff_delays": "-1"}, "Pause (seconds) '-1': Write numbers from 0"),
    ({"backoff_delays": "nan"}, "Pause (seconds) 'nan': Write numbers from 0"),
    ({"backoff_delays": "1e999"}, "Pause (seconds) '1e999': Write numbers from 0"),
    ({"retry_on": "nodot"}, "'nodot' is no dotted name"),
    ({"give_up_on": "1.2"}, "'1.2' is no dotted name"),
    ({"max_active": 0}, "Active runs at most 0: At least 1, or empty."),
    ({"max_attempts": 0}, "Attempts at most 0: At least 1, or empty."),
    ({"start_deadline_seconds": 0}, "Start within (seconds) 0: At least 1, or empty."),
    ({"auto_pause_minutes": 5}, "Say after how many"),
]
# What the database itself refuses.
REFUSED: list[dict[str, Any]] = [
    {"kind": "bogus"},
    {"delivery": "bogus"},
    {"state": "bogus"},
    {"arguments": None},
    *(
        {name: -1}
        for name in ("interval_seconds", "max_active", "max_attempts", "max_runs", "spread_seconds")
    ),
]
# Odd, and no reason not to run: the row becomes this.
ODD: list[tuple[dict[str, Any], str]] = [
    ({"starts_at": FIRST}, "active"),
    ({"starts_at": LAST}, "exhausted"),
    ({"ends_at": FIRST}, "exhausted"),
    ({"kind": "once", "run_at": FIRST}, "exhausted"),
    ({"kind": "once", "run_at": LAST}, "active"),
    ({"kind": "interval", "interval_seconds": 5, "interval_anchor": FIRST}, "active"),
    ({"kind": "interval", "interval_seconds": 5, "interval_anchor": LAST}, "active"),
    ({"catchup_window_seconds": 2**31 - 1}, "active"),
    ({"name": ""}, "active"),
]
# Past the queryset's own update, too, as by SQL.
plain: models.QuerySet[Schedule] = models.QuerySet(Schedule)


BAD = [values for values, _ in [*INVALID, *ODD]]


def rows(*bad: dict[str, Any]) -> list[Schedule]:
    """Return rows that are not saved, a good one before and after each of these."""
    base = {"name": "n", "job": "project.demo.heartbeat", "kind": "cron", "cron": "* * * * *"}
    given: dict[str, dict[str, Any]] = {"good": {}}
    for number, values in enumerate(bad):
        given |= {f"bad-{number}": values, f"good-{number}": {}}
    return [Schedule(**base | {"key": key} | values) for key, values in given.items()]


def test_rows_that_cannot_run_say_why_and_those_among_them_run() -> None:
    """OP-70: all made through the ORM in one batch, without validation."""
    bad = {f"bad-{number}": problem for number, (_, problem) in enumerate(INVALID)}
    Schedule.objects.bulk_create(rows(*(values for values, _ in INVALID)))

    assert set(maintenance._adopt()) == set(bad)
    assert set(Schedule.objects.filter(next_run_at=None).values_list("key", flat=True)) == set(bad)
    assert set(Schedule.objects.filter(state="invalid").values_list("key", flat=True)) == set(bad)
    said = dict(Schedule.objects.values_list("key", "state_reason"))
    assert [(said[key], problem) for key, problem in bad.items() if problem not in said[key]] == []


def test_what_no_column_can_hold_is_refused_by_the_database() -> None:
    """OP-70."""
    for values in REFUSED:
        with pytest.raises(DatabaseError), transaction.atomic():
            Schedule.objects.bulk_create(rows(values))


def test_an_odd_row_is_planned_as_it_says() -> None:
    """OP-70."""
    Schedule.objects.bulk_create(rows(*(values for values, _ in ODD)))
    assert maintenance._adopt() == ()
    states = dict(Schedule.objects.values_list("key", "state"))
    assert [states[f"bad-{number}"] for number in range(len(ODD))] == [state for _, state in ODD]


def test_rows_that_went_bad_after_they_were_planned_stop_no_tick() -> None:
    """OP-70: neither the claim, nor the start, nor the end of their runs and of the others."""
    settings = {"max_attempts": 3, "overlap": "queue_all"}
    good = due(**settings)
    for values in BAD:
        plain.filter(pk=due(**settings).pk).update(**values)
    member = Member(Counting())

    runs = {run.schedule_id: run for run in member.tick().claimed.runs}
    assert good.pk in runs
    started = lifecycle.start(list(runs.values()), member.row.pk)
    again_due = database_now() - timedelta(seconds=1)
    plain.filter(state="active").update(next_run_at=again_due)
    Member(Counting()).tick()
    assert Run.objects.filter(schedule=good).count() == 2
    retried = lifecycle.finish([failed(run) for run in runs.values() if run.run_id in started])
    assert runs[good.pk].run_id in retried.retried
    member.leases.let_go([run.run_id for run in runs.values()])
    Run.objects.filter(state="queued").update(due_at=again_due)
    claimed = member.dispatcher.claim_queued(member.row.pk, 100).runs
    assert good.pk in {run.schedule_id for run in claimed}


def failed(run: lifecycle.ClaimedRun) -> Finished:
    return Finished(
        run_id=run.run_id,
        fencing_token=run.fencing_token,
        owner_token=run.owner_token,
        state="failed",
        reason="error",
        error="OSError: no route",
        finished_at=database_now(),
        failure=Failure(exceptions=("builtins.OSError",)),
    )


@pytest.fixture
def broken_check() -> Iterator[str]:
    """A job whose own check of its arguments is broken."""
    name = "tests.broken_check"

    def check(**_: object) -> None:
        raise KeyError("rates")

    registry.job(name=name, validate=check)(_nothing)
    yield name
    del registry._jobs[name]


def _nothing() -> None:
    """Do nothing."""


def test_a_check_that_is_broken_itself_stops_nobody_and_its_runs_will_say_so(
    broken_check: str,
) -> None:
    """OP-70."""
    Schedule.objects.bulk_create(rows({"job": broken_check}))
    assert maintenance._adopt() == ()
    assert not Schedule.objects.filter(next_run_at=None).exists()
