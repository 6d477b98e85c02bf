"""The layers of the package, as data: a module imports only from lower ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.unit.sources import PACKAGE, Source, dotted, sources

# Lowest first. A folder counts as one module; "__init__" is the package itself.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "clock"),
    ("conf", "signals", "timetable", "context", "instants", "capture"),
    ("arguments", "definitions", "wakeup", "locks", "wording"),
    ("registry", "leases", "lock_checks"),
    ("__init__", "runner", "console", "checks", "builtin_jobs"),
    ("models",),
    ("lifecycle", "nodes", "executors", "audit", "history", "explanations", "migrations"),
    ("explained_instants", "operations", "holdings", "keeper", "dispatch", "filters"),
    ("maintenance", "forms", "sync"),
    ("scheduler",),
    ("diagnosis",),
    ("admin", "views", "api", "cli", "templatetags", "metrics"),
    ("management", "urls", "apps"),
)
LAYER_OF = {module: number for number, layer in enumerate(LAYERS) for module in layer}
CLOCK_READS = {
    *(f"time.{name}" for name in ("time", "monotonic", "perf_counter", "time_ns")),
    *("time.monotonic_ns", "time.perf_counter_ns", "time.clock_gettime", "time.localtime"),
    *("datetime.now", "datetime.utcnow", "datetime.today", "datetime.datetime.now"),
    *("date.today", "datetime.date.today", "timezone.now", "django_timezone.now"),
    *("timezone.localtime", "timezone.localdate"),
}
# Readings that decide nothing, by module and function.
ALLOWED_READS = {
    ("admin.display", "_wall"): "whether the year is worth showing to a person",
    ("admin.display", "_relative"): "how long ago, for a person",
}


def imports(source: Source) -> Iterator[str]:
    """Yield the modules at the top of the package that ``source`` imports, in functions too."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _own(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield from _own([*node.module.split("."), alias.name])


def _own(parts: list[str]) -> Iterator[str]:
    if parts[0] != "distcron_app":
        return
    is_module = len(parts) > 1 and (
        (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").exists()
    )
    yield parts[1] if is_module else "__init__"


def clock_reads(tree: ast.AST, function: str = "") -> Iterator[tuple[str, str]]:
    """Yield (function, call) for each call that reads a clock; a reference is not a call."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from clock_reads(node, node.name)
            continue
        if isinstance(node, ast.Call) and dotted(node.func) in CLOCK_READS:
            yield function, dotted(node.func)
        yield from clock_reads(node, function)


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
def test_a_module_imports_only_from_lower_layers(source: Source) -> None:
    upward = {
        imported
        for imported in imports(source)
        if imported != source.unit and LAYER_OF[imported] >= LAYER_OF[source.unit]
    }
    assert upward == set(), f"{source.name} imports from its own layer or above: {upward}"


def test_each_module_has_a_layer() -> None:
    assert {source.unit for source in sources()} - set(LAYER_OF) == set()


def test_no_module_is_in_two_layers() -> None:
    assert len(LAYER_OF) == sum(map(len, LAYERS))


def test_the_architecture_page_shows_these_layers() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", page, re.MULTILINE)
    shown = {int(number): set(re.findall(r"`(\w+)/?`", modules)) for number, modules in rows}
    units = {source.unit for source in sources()} - {"__init__", "migrations"}
    assert shown == {number: units.intersection(layer) for number, layer in enumerate(LAYERS)}


def test_an_import_in_a_function_is_seen() -> None:
    tree = ast.parse("def f():\n    from distcron_app import scheduler\n")
    assert list(imports(Source("errors", "errors", tree))) == ["scheduler"]


def test_no_node_syncs_what_code_defines() -> None:
    """One with older code would undo, when it starts, what newer code asked for."""
    users = {source.unit for source in sources() if "sync" in imports(source)}
    assert users - {"sync"} == {"apps", "cli"}


def test_croniter_is_used_by_the_time_modules_alone() -> None:
    users = {
        source.unit
        for source in sources()
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.Import) and node.names[0].name.startswith("croniter"))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("croniter"))
    }
    assert users == {"timetable"}


def test_only_the_clock_module_reads_a_clock() -> None:
    found = {
        (source.name, function, call)
        for source in sources()
        for function, call in clock_reads(source.tree)
        if source.name != "clock" and (source.name, function) not in ALLOWED_READS
    }
    assert found == set()


@pytest.mark.parametrize(
    "code",
    ["time.time()", "datetime.now(UTC)", "timezone.now().year", "f(time.monotonic())"],
)
def test_a_clock_read_is_seen(code: str) -> None:
    assert [function for function, _ in clock_reads(ast.parse(f"def f():\n  {code}"))] == ["f"]


def test_a_field_default_is_no_clock_read() -> None:
    assert list(clock_reads(ast.parse("at = Field(default=timezone.now)"))) == []
