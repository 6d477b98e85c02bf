"""Jobs of the benchmarks."""

from __future__ import annotations

import os

from distcron_app import JobContext, job


@job
def trace(context: JobContext) -> None:
    """Append the instant to a file, so that a second execution shows outside the database."""
    line = f"{context.scheduled_at.isoformat()}\n".encode()
    # One write to a file opened with O_APPEND: lines of several processes never mix.
    file = os.open(os.environ["DISTCRON_BENCH_TRACE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line)
    finally:
        os.close(file)
