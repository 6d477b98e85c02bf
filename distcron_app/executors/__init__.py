"""How attempts reach workers: a pool of processes, each with threads.

Workers are forked from a template process that is started before any thread or
connection exists, so that a worker that died can be replaced at any time. Work and
outcomes cross in batches over one socket per worker; see ``pool``.
"""

from distcron_app.executors.pool import (
    Died,
    Ended,
    OverLimit,
    PoolBroken,
    ProcessPool,
    Progressed,
    Recycled,
    Stuck,
)
from distcron_app.executors.template import unsafe_to_fork

__all__ = [
    "Died",
    "Ended",
    "OverLimit",
    "PoolBroken",
    "ProcessPool",
    "Progressed",
    "Recycled",
    "Stuck",
    "unsafe_to_fork",
]
