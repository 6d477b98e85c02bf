"""How attempts reach workers: a pool of processes, each with threads.

Workers are forked from a template process that is started before any thread or
connection exists, so that a worker that died can be replaced at any time. Work and
outcomes cross in batches over one socket per worker; see ``pool``. A run may also have a
process of its own, which can be killed without harm to other runs.
"""

from distcron_app.executors.news import (
    Checkpointed,
    Died,
    Ended,
    News,
    OverLimit,
    PoolBroken,
    Printed,
    Progressed,
    Recycled,
    Stuck,
    UnsafeToFork,
)
from distcron_app.executors.pool import ProcessPool
from distcron_app.executors.template import unsafe_to_fork

__all__ = [
    "Checkpointed",
    "Died",
    "Ended",
    "News",
    "OverLimit",
    "PoolBroken",
    "Printed",
    "ProcessPool",
    "Progressed",
    "Recycled",
    "Stuck",
    "UnsafeToFork",
    "unsafe_to_fork",
]
