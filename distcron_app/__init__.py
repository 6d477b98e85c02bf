"""Distributed cron as a reusable Django app.

Public names: ``job`` registers a callable, ``JobContext`` is what a running job
may ask about itself, with a ``ParentRun`` where another schedule started it, and
``current_context()`` finds it without a parameter. A job raises
``RetryLater`` for another attempt after a while, ``GiveUp`` for none. ``cron()``,
``every()`` and ``once()`` say in code when it runs: ``@job(schedule=cron("0 2 * * *"))``.
"""

from distcron_app.context import JobContext, ParentRun, current_context
from distcron_app.definitions import cron, every, once
from distcron_app.errors import GiveUp, RetryLater
from distcron_app.registry import job

__all__ = [
    "GiveUp",
    "JobContext",
    "ParentRun",
    "RetryLater",
    "__version__",
    "cron",
    "current_context",
    "every",
    "job",
    "once",
]

__version__ = "0.1.0"
