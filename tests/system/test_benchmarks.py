"""The benchmark of the locks runs from the command line, on servers of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]


def test_the_benchmark_prints_one_json_line_and_a_table() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.locks", "p6", "--rounds", "1", "--samples", "20"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["benchmark"], found["id"], found["rounds"], found["samples"]) == (
        *("locks", "P6"),
        *(1, 20),
    )
    assert list(found["ms"]) == ["distcron", "redis-py", "django-redis", "SET NX PX"]
    assert all(row["acquire_p50"] > 0 for row in found["ms"].values())
    assert list(found["names_per_second"]) == ["distcron", "pipeline", "one by one"]
    assert [claim["what"] for claim in found["target"]] == [
        "p50 to redis-py's Lock",
        "names per second in one call",
    ]
    assert "redis-py" in done.stderr


def test_a_target_that_is_not_known_is_refused_by_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.locks", "p7"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "p7: choose from p5, p6, p8." in done.stderr
