"""The package's modules as syntax trees, for the tests that read the code."""

from __future__ import annotations

import ast
import dataclasses
import functools
from pathlib import Path

__all__ = ["PACKAGE", "Source", "dotted", "sources"]

PACKAGE = Path(__file__).resolve().parent.parent.parent / "distcron_app"


@dataclasses.dataclass(frozen=True)
class Source:
    """One module. ``unit`` is its file at the top of the package, or the folder it is in."""

    name: str
    unit: str
    tree: ast.Module


@functools.cache
def sources() -> tuple[Source, ...]:
    """Return every module of distcron_app."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found.append(Source(".".join(parts), parts[0], tree))
    return tuple(found)


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for a chain of names, calls left out: ``Run.objects.filter.update``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    return ""
