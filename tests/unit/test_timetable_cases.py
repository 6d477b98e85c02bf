"""Every case of tests/cases/cron.json: rules from public bug reports, with the right answer."""

import json
import time
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from distcron_app import timetable
from distcron_app.errors import TimetableError

CASES = json.loads((Path(__file__).parent.parent / "cases" / "cron.json").read_text("utf-8"))


def expression_of(case: dict[str, Any]) -> str:
    if "expr" in case:
        return case["expr"]
    build = case["expr_build"]
    return build["repeat"] * build["times"] + build["then"]


def answer(case: dict[str, Any], length: int) -> list[datetime] | str:
    try:
        rule = timetable.build(kind="cron", cron=expression_of(case), timezone=case["tz"])
    except TimetableError:
        return "error"
    start = datetime.fromisoformat(case["start"])
    end = datetime.fromisoformat("2200-01-01T00:00:00+00:00")
    return list(islice(rule.between(start, end), length))


def instants(expected: list[str] | str) -> list[datetime] | str:
    if isinstance(expected, str):
        return expected
    return [datetime.fromisoformat(text) for text in expected]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    accepted = [instants(expected) for expected in [case["expect"], *case.get("also_ok", [])]]
    assert any(answer(case, len(expected)) == expected for expected in accepted)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case_is_answered_quickly(case: dict[str, Any]) -> None:
    answer(case, 1)  # fills the caches of zone data
    began = time.thread_time()
    answer(case, 1)
    assert time.thread_time() - began < 0.05


def test_there_are_81_cases() -> None:
    assert len(CASES) == 81
