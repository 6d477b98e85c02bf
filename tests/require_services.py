"""A pytest plugin: with REQUIRE_SERVICES=1 a skipped test is a failure of the whole run.

python -m pytest -p tests.require_services
"""

from __future__ import annotations

import os

import pytest


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Turn a green run with skipped tests red."""
    if exitstatus == pytest.ExitCode.OK and _skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Say why the run is red."""
    skipped = _skipped(config)
    if skipped:
        terminalreporter.write_line(f"REQUIRE_SERVICES=1: {skipped} tests were skipped.", red=True)


def _skipped(config: pytest.Config) -> int:
    if os.environ.get("REQUIRE_SERVICES") != "1":
        return 0
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return len(reporter.stats.get("skipped", [])) if reporter else 0
