"""How much memory a process uses and may use."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

__all__ = ["limited", "resident_mb"]

_MB = 1024 * 1024


@contextlib.contextmanager
def limited(limit_mb: int | None) -> Iterator[None]:
    """Let this process have at most ``limit_mb`` of data in the block; None is no limit.

    What is allocated beyond raises MemoryError; a library that cannot say so may end the
    process. Counted is what the process has allocated and may write to (RLIMIT_DATA), with
    what it had before the block, and each child process by itself. It is for a process that
    does one thing: the limit holds for all its threads.
    """
    if limit_mb is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = limit_mb * _MB
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    try:
        yield
    finally:
        # What reports about the block needs memory as well.
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def resident_mb(pid: int) -> float | None:
    """Return how much memory a process has in use; None where the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / _MB
