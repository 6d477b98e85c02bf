"""Schedules in code: what the calls keep, what they refuse, and what the system check finds."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from distcron_app import cron, every, job, once, registry
from distcron_app.definitions import Definition, Options, default_key
from distcron_app.models import DEFINED_FIELDS, POLICY_FIELDS, TIMETABLE_FIELDS, Schedule
from distcron_app.sync import check_definitions, defined_keys
from distcron_app.sync.wanted import all_wanted
from tests.code import Code

NOON = datetime.fromisoformat("2027-01-04T12:00")  # naive, as a wall clock shows it
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "code-schedules.md").read_text()
CALLED: list[Any] = [cron, every, once]


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Code:
    return Code(monkeypatch)


def row_of(definition: Definition) -> Schedule:
    job(name="shop.close_books", schedule=definition)(_close_books)
    (wanted,) = all_wanted(calendars={})
    assert wanted.problems == ()
    assert wanted.row is not None
    return wanted.row


def problem_of(*definitions: Definition) -> list[tuple[str, str, str]]:
    job(name="shop.close_books", schedule=definitions)(_close_books)
    return [(each.id, str(each.obj), each.msg) for each in check_definitions(None)]


def _close_books(batch: int = 100, day: date | None = None) -> None:
    """Close the books."""


# --- the call ---------------------------------------------------------------------------


def test_the_options_are_the_columns_that_people_may_write() -> None:
    made_by_the_call = {*TIMETABLE_FIELDS} - {"timezone", "gap", "fold"}
    assert set(Options.__annotations__) == {*DEFINED_FIELDS} - made_by_the_call - {"job"}


@pytest.mark.parametrize("function", CALLED)
def test_an_unknown_keyword_names_the_nearest(function: Any) -> None:
    with pytest.raises(TypeError) as caught:
        function(NOON if function is once else 5 if function is every else "* * * * *", overlp="x")
    assert str(caught.value) == (
        f"{function.__name__}(): got the unknown keyword 'overlp'. Did you mean 'overlap'?"
    )


def test_a_keyword_like_no_other_gets_the_list() -> None:
    with pytest.raises(TypeError, match="Known are: key, name, arguments, "):
        cron("* * * * *", zzz=1)  # type: ignore[call-arg]


def test_an_unknown_unit_is_refused_with_the_units() -> None:
    with pytest.raises(
        ValueError, match=r"unit 'years'\. Choose one of seconds, minutes, hours, d"
    ):
        every(1, "years")  # type: ignore[arg-type]


def test_a_timedelta_has_its_own_unit() -> None:
    with pytest.raises(
        ValueError, match=r"a timedelta and the unit 'minutes'\. Leave out the unit"
    ):
        every(timedelta(seconds=30), "minutes")


@pytest.mark.parametrize("given", ["0 2 * * *", 5, ["0 2 * * *"], None])
def test_a_job_takes_definitions_alone(given: Any, code: Code) -> None:
    with pytest.raises(TypeError, match=r"Use cron\(\), every\(\) or once\(\), or a list of them"):
        job(name="shop.close_books", schedule=given)(_close_books)


def test_a_definition_changes_nothing_for_the_job(code: Code) -> None:
    decorated = job(name="shop.close_books", schedule=cron("0 2 * * *"))(_close_books)
    assert decorated is _close_books
    assert registry.get("shop.close_books").source.startswith("tests.unit.test_definitions:")


# --- the row that it asks for -----------------------------------------------------------


def test_key_and_name_come_from_the_job(code: Code) -> None:
    row = row_of(cron("0 2 * * *"))
    assert (row.key, row.name, row.job) == (
        "shop-close-books",
        "Shop close books",
        "shop.close_books",
    )


@pytest.mark.parametrize(
    ("name", "key"),
    [("billing.close_invoices", "billing-close-invoices"), ("A.b__C-d.", "a-b-c-d")],
)
def test_a_default_key_is_a_slug(name: str, key: str) -> None:
    assert default_key(name) == key


def test_the_name_follows_a_given_key(code: Code) -> None:
    row = row_of(cron("0 2 * * *", key="month_end"))
    assert (row.key, row.name) == ("month_end", "Month end")


def test_what_is_left_out_has_the_default_of_the_form(code: Code, settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Makassar"
    row = row_of(cron("0 2 * * *"))
    assert (row.timezone, row.overlap, row.max_attempts) == ("Asia/Makassar", "skip", 1)


def test_several_rules_are_one_schedule(code: Code) -> None:
    row = row_of(cron("0 2 * * *", "30 14 * * sat"))
    assert row.cron == "0 2 * * *\n30 14 * * sat"


@pytest.mark.parametrize(
    ("definition", "seconds"),
    [
        (every(30), 30),
        (every(5, "minutes"), 300),
        (every(2, "hours"), 7200),
        (every(timedelta(minutes=1, seconds=30)), 90),
    ],
)
def test_elapsed_time_is_counted_from_1970(
    definition: Definition, seconds: int, code: Code
) -> None:
    row = row_of(definition)
    assert (row.kind, row.interval_seconds) == ("interval", seconds)
    assert row.interval_anchor == datetime(1970, 1, 1, tzinfo=UTC)


def test_days_keep_the_time_of_day_of_their_start(code: Code) -> None:
    row = row_of(every(2, "weeks", start=NOON, timezone="Asia/Jakarta"))
    assert (row.kind, row.calendar_every, row.calendar_unit) == ("calendar", 2, "weeks")
    assert row.first_after(datetime(2027, 1, 5, tzinfo=UTC)) == datetime(
        2027, 1, 18, 5, 0, tzinfo=UTC
    )


def test_once_is_one_instant(code: Code) -> None:
    row = row_of(once(datetime(2027, 1, 4, tzinfo=UTC)))
    assert (row.kind, row.run_at) == ("once", datetime(2027, 1, 4, tzinfo=UTC))


def test_lists_and_exceptions_become_the_text_that_is_stored(code: Code) -> None:
    row = row_of(
        cron(
            "0 2 * * *",
            max_attempts=3,
            backoff="list",
            backoff_delays=[10, 60, 300],
            retry_on=[TimeoutError, "shop.errors.Busy"],
        )
    )
    assert row.backoff_delays == "10, 60, 300"
    assert row.retry_on == "builtins.TimeoutError\nshop.errors.Busy"


def test_arguments_may_be_python_values(code: Code) -> None:
    row = row_of(cron("0 2 * * *", arguments={"batch": 5, "day": date(2027, 1, 4)}))
    assert row.arguments == {"batch": 5, "day": "2027-01-04"}


# --- the check --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("definition", "text"),
    [
        (cron("0 25 * * *"), "cron: Hour '25': must be from 0 to 23"),
        (cron(), "cron: "),
        (cron("0 2 30 2 *"), "cron: Cron rule '0 2 30 2 *': never runs"),
        (cron("0 2 * * *", timezone="WIB"), "timezone: Time zone 'WIB'"),
        (cron("0 2 * * *", timezone=7), "timezone: got 7. Write a text."),  # type: ignore[arg-type]
        (every(0), "interval_seconds: Interval '0'"),
        (every(timedelta(seconds=1.5)), "interval_seconds: got 1.5. Write a whole number."),
        (every(5, start=NOON), "interval_anchor: got datetime.datetime(2027, 1, 4, 12, 0). "),
        (every(1, "days"), "calendar_start: Start: missing. Give a local date and time."),
        (every(1, "days", start=NOON.replace(tzinfo=UTC)), "calendar_start: Start '2027-01-04 12"),
        (every(0, "days", start=NOON), "calendar_every: Every '0' days"),
        (once(NOON), "run_at: got datetime.datetime(2027, 1, 4, 12, 0). Write a datetime with"),
        (
            cron("0 2 * * *", overlap="queue"),
            "overlap: got 'queue'. Choose one of skip, queue_one, queue_all, replace, allow.",
        ),
        (cron("0 2 * * *", max_attempts=0), "max_attempts: At least 1, or empty."),
        (cron("0 2 * * *", max_queued=-1), "max_queued: "),
        (cron("0 2 * * *", max_queued=None), "max_queued: This field cannot be null."),  # type: ignore[arg-type]
        (cron("0 2 * * *", lock_level="gold"), "lock_level: "),
        (cron("0 2 * * *", key="no slug"), "key: "),
        (cron("0 2 * * *", key="x" * 101), "key: "),
        (cron("0 2 * * *", arguments={"bach": 5}), "arguments: bach: is not a parameter. Did"),
        (cron("0 2 * * *", arguments=[5]), "arguments: must be"),  # type: ignore[arg-type]
        (cron("0 2 * * *", calendar=7), "calendar: got 7. Write a text."),  # type: ignore[arg-type]
        (
            cron("0 2 * * *", starts_at=NOON),
            "starts_at: got datetime.datetime(2027, 1, 4, 12, 0). Write a datetime with a time",
        ),
    ],
)
def test_the_check_names_place_field_and_problem(
    definition: Definition, text: str, code: Code
) -> None:
    ((code_id, place, message),) = problem_of(definition)
    assert code_id == ("distcron.E031" if text.startswith("key") else "distcron.E030")
    assert place.startswith("tests.unit.test_definitions:")
    assert message.partition(": ")[2].startswith(text)


def test_the_check_finds_nothing_in_what_can_be_used(code: Code) -> None:
    assert problem_of(cron("0 2 * * *", calendar="holidays"), every(5, key="often")) == []


def test_the_check_leaves_settings_that_cannot_be_used_to_their_own_error(
    code: Code, settings: Any
) -> None:
    settings.DISTCRON = {"THREDS": 3}
    assert problem_of(cron("0 25 * * *")) == []


def test_two_definitions_need_two_keys(code: Code) -> None:
    ((code_id, _place, message),) = problem_of(cron("0 2 * * *"), every(5), every(6, key="six"))
    assert code_id == "distcron.E031"
    assert "'shop-close-books' is used by 2 definitions: tests.unit.test_definitions:" in message
    assert defined_keys() == {"shop-close-books", "six"}


def test_the_values_of_all_definitions_are_checked_at_once(code: Code) -> None:
    found = problem_of(cron("bad", overlap="x", max_active="y"), every(0, key="often"))  # type: ignore[arg-type]
    fields = [message.split(": ")[1] for _id, _place, message in found]
    assert fields == ["interval_seconds", "overlap", "max_active"]


# --- the page ---------------------------------------------------------------------------


def test_the_example_of_the_page_can_be_used(code: Code) -> None:
    example = re.search(r"```python\n# billing/jobs.py\n(.*?)```", PAGE, re.DOTALL)
    assert example
    exec(example[1], {"__name__": "billing.jobs"})
    assert check_definitions(None) == []
    keys = {"billing-close-invoices", "billing-sync-orders", "orders-month-end"}
    assert defined_keys() == keys


def test_the_page_names_every_keyword_that_is_no_policy() -> None:
    paragraph = PAGE[PAGE.index("All of them take") : PAGE.index("What is left out")]
    named = set(re.findall(r"`(\w+)`", paragraph))
    assert named == set(Options.__annotations__) - set(POLICY_FIELDS) | {"lock_level"}
