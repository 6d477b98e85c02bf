"""The list of cases names tests that are there and say what they show."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.cases.operations import CASES

ROOT = Path(__file__).resolve().parents[2]


def docstring_of(node_id: str) -> str:
    """Return the docstring of a test; raise StopIteration for one that is not there."""
    path, *names = node_id.split("::")
    found: ast.AST = ast.parse((ROOT / path).read_text())
    for name in names:
        body = found.body  # type: ignore[attr-defined]
        found = next(node for node in body if getattr(node, "name", "") == name)
    assert isinstance(found, ast.FunctionDef)
    return ast.get_docstring(found) or ""


# Every case that operational reports name, and the faults that concern locks and nodes.
OPERATIONS = [
    *(*range(1, 48, 2), 50, 52, 54, 55, 57, 59, 62, 64, 66, 68, 70, 72, 74, 76, 79, 81, 83, 85),
    88,
]
FAULTS = [*range(3, 18), 19, 21, 32, 36, 45]


def test_every_case_is_listed() -> None:
    operations = [f"OP-{number:02}" for number in OPERATIONS]
    assert list(CASES) == operations + [f"F{number}" for number in FAULTS]


@pytest.mark.parametrize(
    ("case", "node_id"), [(case, each) for case, tests in CASES.items() for each in tests]
)
def test_the_test_of_a_case_exists_and_names_it(case: str, node_id: str) -> None:
    cases = docstring_of(node_id).partition(":")[0].rstrip(".").split(", ")
    assert case in cases
