"""What every test has, wherever it is."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let processes under test be stopped although those of a background job ignore signals."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
