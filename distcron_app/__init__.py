"""Distributed cron as a reusable Django app.

Public names: ``job`` registers a callable, ``JobContext`` is what a running job
may ask about itself, ``current_context()`` finds it without a parameter.
"""

from distcron_app.context import JobContext, current_context
from distcron_app.registry import job

__all__ = ["JobContext", "__version__", "current_context", "job"]

__version__ = "0.1.0"
