"""The list of lock cases names tests that are there and say what they show."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.cases.operations import LOCK_CASES

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


def test_every_case_of_locks_is_listed() -> None:
    operations = [f"OP-{number}" for number in (*range(21, 48, 2), 85)]
    faults = [f"F{number}" for number in (*range(3, 18), 32, 36)]
    assert list(LOCK_CASES) == operations + faults


@pytest.mark.parametrize(
    ("case", "node_id"), [(case, each) for case, tests in LOCK_CASES.items() for each in tests]
)
def test_the_test_of_a_case_exists_and_names_it(case: str, node_id: str) -> None:
    cases = docstring_of(node_id).partition(":")[0].rstrip(".").split(", ")
    assert case in cases
