"""The repository keeps its word: documents, requirements and the wheel fit the code."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from distcron_app.conf import Config
from distcron_app.lifecycle import TRANSITIONS
from tests.services import wait_for

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "distcron_app"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = (ROOT / "README.md").read_text()


# --- the wheel ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    done = subprocess.run(
        [*command, "--outdir", str(folder), str(ROOT)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("distcron-0.1.0-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_carries_every_file_of_the_package(wheel_names: set[str]) -> None:
    files = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files - wheel_names == set()


@pytest.mark.parametrize(
    "name",
    [
        "distcron_app/py.typed",
        "distcron_app/migrations/0001_initial.py",
        "distcron_app/management/commands/runscheduler.py",
        "distcron_app/templates/admin/distcron/schedule/change_form.html",
        "distcron_app/templates/distcron_app/overview.html",
        "distcron_app/static/distcron_app/distcron.css",
    ],
)
def test_the_wheel_carries(wheel_names: set[str], name: str) -> None:
    assert name in wheel_names


def test_each_translation_is_compiled_in_the_wheel(wheel_names: set[str]) -> None:
    sources = {name for name in wheel_names if name.endswith(".po")}
    assert {name.replace(".po", ".mo") for name in sources} - wheel_names == set()


def test_the_wheel_carries_the_app_alone(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert tops == {"distcron_app", "distcron-0.1.0.dist-info"}


# --- requirements -----------------------------------------------------------------------


def lines_of(name: str) -> set[str]:
    lines = (ROOT / name).read_text().splitlines()
    return {line for line in lines if line and not line.startswith(("#", "-r"))}


def project() -> dict[str, list[str]]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        facts = tomllib.load(file)["project"]
    return {"": facts["dependencies"], **facts["optional-dependencies"]}


def test_the_requirements_are_those_of_the_package_the_server_and_postgresql() -> None:
    wanted = {*project()[""], *project()["server"], *project()["postgres"]}
    # The server asks for the same redis with its C parser.
    wanted.discard("redis>=8.1,<9")
    assert lines_of("requirements.txt") == wanted


@pytest.mark.parametrize("extra", ["bench", "demo", "dev"])
def test_the_requirements_of_an_extra_are_those_of_the_package(extra: str) -> None:
    assert lines_of(f"requirements-{extra}.txt") == set(project()[extra])


# --- documents ----------------------------------------------------------------------------


def test_the_settings_page_lists_the_keys_and_defaults_of_the_code() -> None:
    page = (ROOT / "docs" / "settings.md").read_text().partition("\n## ")[0]
    rows = re.findall(r"^\| `([A-Z_]+)` \| `(.*?)` \|", page, re.MULTILINE)
    documented = {key: ast.literal_eval(default) for key, default in rows}
    fields = dataclasses.fields(Config)
    assert documented == {field.name.upper(): field.default for field in fields}


def test_the_lifecycle_page_lists_the_transitions_of_the_code() -> None:
    page = (ROOT / "docs" / "lifecycle.md").read_text()
    rows = re.findall(r"^\| `([a-z]+)` \| .* \|(.*)\|$", page, re.MULTILINE)
    documented = {state: frozenset(re.findall(r"`([a-z]+)`", leaves)) for state, leaves in rows}
    assert documented == {state: to for state, to in TRANSITIONS.items() if state}


def test_the_environment_of_the_settings_page_is_the_one_that_is_read() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    table = page[page.index("## The environment") :]
    documented = set(re.findall(r"`((?:DATABASE|REDIS|DISTCRON|DJANGO)_[A-Z_]+)`", table))
    settings = (ROOT / "project" / "settings.py").read_text()
    read = set(re.findall(r'environ\.get\(\s*"([A-Z_]+)"', settings))
    assert read - documented == set()


def links() -> Iterator[tuple[Path, str]]:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
            if "://" not in target:
                yield document, target


@pytest.mark.parametrize(("document", "target"), list(links()), ids=str)
def test_a_link_between_documents_leads_somewhere(document: Path, target: str) -> None:
    assert (document.parent / target).exists()


def test_each_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name
        for document in DOCUMENTS
        for name in re.findall(r"(?:`|^)make ([a-z-]+)", document.read_text(), re.MULTILINE)
    }
    assert {"demo", "test"} <= named
    assert named - targets == set()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 250


# --- the README's own project ---------------------------------------------------------------


def block(first_line: str) -> str:
    """Return the README's code block that begins with this comment."""
    found = re.search(rf"```python\n{re.escape(first_line)}\n(.*?)```", README, re.DOTALL)
    assert found, f"README.md has no block that begins with {first_line!r}."
    return found[1]


@pytest.fixture
def own_project(tmp_path: Path) -> Path:
    """Return a fresh Django project with the README's blocks put in."""
    folder = tmp_path / "own"
    folder.mkdir()
    run("-m", "django", "startproject", "shop", str(folder), cwd=tmp_path)
    (folder / "billing").mkdir()
    (folder / "billing" / "__init__.py").touch()
    (folder / "billing" / "jobs.py").write_text(block("# billing/jobs.py"))
    for name, first_line in (("settings.py", "# settings.py"), ("urls.py", "# urls.py")):
        with open(folder / "shop" / name, "a") as file:
            file.write("\n" + block(first_line))
    return folder


def run(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    cleared = {**os.environ, "PYTHONPATH": str(ROOT)}
    cleared.pop("DJANGO_SETTINGS_MODULE", None)
    return cleared


def test_the_project_of_the_readme_runs_its_job(own_project: Path) -> None:
    run("manage.py", "migrate", "--verbosity=0", cwd=own_project)
    run("manage.py", "shell", "-c", block("# python manage.py shell"), cwd=own_project)
    soon = (
        "from distcron_app.instants import database_now as now\n"
        "from distcron_app.models import Schedule\n"
        "Schedule.objects.filter(key='invoices').update(kind='once', run_at=now())\n"
        "Schedule.objects.filter(key='invoices').update(next_run_at=now())\n"
    )
    run("manage.py", "shell", "-c", soon, cwd=own_project)
    with subprocess.Popen(
        [sys.executable, "manage.py", "runscheduler"],
        cwd=own_project,
        env=environment(),
        stdout=subprocess.DEVNULL,
    ) as node:
        try:
            wait_for(lambda: rows(own_project), 30, "the run to end")
        finally:
            node.send_signal(signal.SIGTERM)
    assert node.returncode == 0
    assert rows(own_project) == [("succeeded", '{"closed": 50}')]


def rows(folder: Path) -> list[tuple[str, str]]:
    connection = sqlite3.connect(folder / "db.sqlite3", timeout=10)
    try:
        return connection.execute(
            "SELECT state, result FROM distcron_run WHERE finished_at IS NOT NULL"
        ).fetchall()
    finally:
        connection.close()


def test_the_checks_find_nothing_in_the_cache_of_the_readme(own_project: Path) -> None:
    with open(own_project / "shop" / "settings.py", "a") as file:
        file.write(block("# settings.py, for several hosts"))
    listing = (
        "from django.core.checks import run_checks\n"
        "print([message.id for message in run_checks()])\n"
    )
    # The fresh project is on SQLite without the options for several nodes.
    shown = run("manage.py", "shell", "-c", listing, cwd=own_project)
    assert shown.splitlines()[-1] == "['distcron.W004']"
