"""One writer for runs and one for nodes, proved by reading the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.unit.sources import dotted, sources

WRITES = {
    *("create", "get_or_create", "update_or_create", "bulk_create"),
    *("update", "bulk_update", "delete", "save", "_raw_delete"),
}
# The tables and the names that variables with their rows have.
TABLES = {
    "Run": ("distcron_run", re.compile(r"^(.*_)?runs?$")),
    "Node": ("distcron_node", re.compile(r"^(.*_)?nodes?$")),
}


def writes(tree: ast.AST, model: str) -> Iterator[str]:
    """Yield a description of everything in ``tree`` that writes rows of ``model``."""
    table, variable = TABLES[model]
    statement = re.compile(rf"\b(UPDATE|INTO|FROM)\s+{table}\b(?!_)", re.IGNORECASE)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _call(node, model, variable)
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            yield from _assignment(node, variable)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = statement.search(node.value)
            if found and ("FROM" not in found[0].upper() or "DELETE" in node.value.upper()):
                yield f"line {node.lineno}: {found[0]}"


def _call(node: ast.Call, model: str, variable: re.Pattern[str]) -> Iterator[str]:
    name = dotted(node.func)
    first, _, rest = name.partition(".")
    last = rest.rpartition(".")[2]
    # A bare primary key names a row, as for a link, and holds nothing that could be saved.
    fields = {keyword.arg for keyword in node.keywords} - {"pk", "id"}
    if name == model and (fields or node.args):
        yield f"line {node.lineno}: {model}(…)"
    elif last in WRITES and (first == model or variable.match(first)):
        yield f"line {node.lineno}: {name}"


def _assignment(
    node: ast.Assign | ast.AugAssign | ast.AnnAssign, variable: re.Pattern[str]
) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        if isinstance(target, ast.Attribute) and target.attr == "state":
            owner = dotted(target.value)
            if variable.match(owner):
                yield f"line {node.lineno}: {owner}.state ="


def found(model: str, *, apart_from: str) -> dict[str, list[str]]:
    return {
        source.name: lines
        for source in sources()
        if source.unit not in (apart_from, "migrations")
        and (lines := list(writes(source.tree, model)))
    }


def test_only_the_lifecycle_writes_runs() -> None:
    assert found("Run", apart_from="lifecycle") == {}


def test_only_the_membership_writes_nodes() -> None:
    assert found("Node", apart_from="nodes") == {}


def test_the_lifecycle_itself_is_seen_to_write() -> None:
    writers = {
        source.name
        for source in sources()
        if source.unit == "lifecycle" and list(writes(source.tree, "Run"))
    }
    parts = ("cancel", "chains", "claim", "outcome", "pauses", "pruning", "recovery")
    assert writers == {f"lifecycle.{part}" for part in parts}


@pytest.mark.parametrize(
    "code",
    [
        "Run(state='queued')",
        "Run.objects.create(state='queued')",
        "Run.objects.filter(pk=1).update(state='lost')",
        "Run.objects.open()[:5].delete()",
        "Run.objects.bulk_update(rows, ['state'])",
        "run.state = 'lost'",
        "old_run.state = Run.State.LOST",
        "run.save(update_fields=['state'])",
        "stuck_runs.filter(x=1).update(state='lost')",
        "cursor.execute('UPDATE distcron_run SET state = %s')",
        "cursor.execute('INSERT INTO distcron_run (id) VALUES (1)')",
        "cursor.execute('DELETE FROM distcron_run')",
    ],
)
def test_a_write_is_seen(code: str) -> None:
    assert len(list(writes(ast.parse(code), "Run"))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "Run.objects.filter(state='lost').count()",
        "Run(pk=5)",
        "schedule.state = 'paused'",
        "cursor.execute('SELECT id FROM distcron_run WHERE state = %s')",
        "details.update(run=5)",
        "cursor.execute('UPDATE distcron_runoutput SET output = 1')",
    ],
)
def test_reading_is_no_write(code: str) -> None:
    assert list(writes(ast.parse(code), "Run")) == []
