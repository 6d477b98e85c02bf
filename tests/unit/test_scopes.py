"""Concurrency keys: what may be written, and what they become with arguments."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from distcron_app import JobContext, job, registry
from distcron_app.locks import is_scope_lock, schedule_id_of, scope_lock_name
from distcron_app.scopes import MAX_KEY_LENGTH, key_problem, rendered_key


@job(name="tests.invoice")
def invoice(
    context: JobContext,
    customer: str,
    region: str = "eu",
    day: date = date(2027, 3, 1),
    batch: int = 5,
    api_token: str = "",
) -> None:
    """Take arguments of several kinds, one of them secret."""


@job(name="tests.anything")
def anything(**values: Any) -> None:
    """Take whatever is given."""


def rendered(template: str, **arguments: Any) -> str:
    return rendered_key(template, "tests.invoice", arguments)


@pytest.mark.parametrize(
    ("template", "arguments", "key"),
    [
        ("", {}, ""),
        ("reports", {}, "reports"),
        ("invoices-{customer}", {"customer": "acme"}, "invoices-acme"),
        ("{region}/{customer}", {"customer": "é ☃"}, "eu/é ☃"),
        ("{region}", {"region": "us"}, "us"),
        ("{day}", {}, "2027-03-01"),
        ("{day}", {"day": "2027-04-02"}, "2027-04-02"),
        ("{batch}{batch}", {"batch": 7}, "77"),
        ("{{{customer}}}", {"customer": "{region}"}, "{{region}}"),
        ("a{{b}}", {}, "a{b}"),
        # Stored past the form, or the job has lost the argument: shared, and never an error.
        ("x-{gone}", {}, "x-{gone}"),
        ("x-{customer.upper}", {"customer": "a"}, "x-{customer.upper}"),
    ],
)
def test_arguments_are_filled_in(template: str, arguments: dict[str, Any], key: str) -> None:
    assert rendered(template, **arguments) == key


def test_the_key_of_an_unknown_job_still_has_the_given_arguments() -> None:
    assert rendered_key("{a}-{b}", "nobody.knows", {"a": 1}) == "1-{b}"


def test_lists_and_objects_are_filled_in_as_a_hash_of_their_content() -> None:
    def key(**arguments: Any) -> str:
        return rendered_key("{items}", "tests.anything", arguments)

    assert key(items={"password": "pa55", "b": 1}) == key(items={"b": 1, "password": "pa55"})
    assert key(items=[1]) != key(items=[2])
    assert "pa55" not in key(items={"password": "pa55"})


def test_a_long_key_keeps_its_beginning_and_its_difference() -> None:
    first, second = (rendered("{customer}", customer="long " * 60 + end) for end in "ab")
    assert len(first) == len(second) == MAX_KEY_LENGTH
    assert first != second
    assert first.startswith("long long ")
    assert len(rendered("{customer}", customer="x" * MAX_KEY_LENGTH)) == MAX_KEY_LENGTH
    assert "…" not in rendered("{customer}", customer="x" * MAX_KEY_LENGTH)


@pytest.mark.parametrize(
    "template",
    [
        "{}",
        "{0}",
        "{customer.name}",
        "{customer[0]}",
        "{customer!r}",
        "{customer:>10}",
        "{customer:}",
        "{cust omer}",
        "{customer",
        "customer}",
        "{ customer }",
    ],
)
def test_all_but_names_in_braces_is_refused(template: str) -> None:
    assert "such as {customer}" in key_problem(template, registry.get("tests.invoice"), {})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "{custmer}",
            "{custmer} is no argument of the job. Allowed: customer, region, day, batch.",
        ),
        ("{context}", "{context} is no argument of the job."),
        ("{api_token}", "{api_token} is secret, and the key is shown. Allowed: customer, region"),
    ],
)
def test_a_name_that_cannot_be_used_is_named_with_what_can(template: str, text: str) -> None:
    assert key_problem(template, registry.get("tests.invoice"), {}).startswith(text)


def test_a_job_that_takes_anything_allows_what_its_schedule_gives() -> None:
    found = registry.get("tests.anything")
    assert key_problem("{city}", found, {"city": "Bandung"}) == ""
    assert "Allowed: none" in key_problem("{city}", found, {"password": "x"})
    assert "is secret" in key_problem("{password}", found, {"password": "x"})


@pytest.mark.parametrize("template", ["", "plain", "{customer}-{region}", "{{literal}}{day}"])
def test_templates_that_can_be_used_have_no_problem(template: str) -> None:
    assert key_problem(template, registry.get("tests.invoice"), {"customer": "a"}) == ""


def test_the_name_of_a_scopes_lock_is_no_schedules() -> None:
    name = scope_lock_name("schedule:42")
    assert is_scope_lock(name)
    assert schedule_id_of(name) is None
    assert name != scope_lock_name("schedule:43")
