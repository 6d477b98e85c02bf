"""What every test has, wherever it is."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let processes under test be interrupted although a background job ignores SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
