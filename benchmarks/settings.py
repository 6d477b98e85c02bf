"""Settings of the nodes that benchmarks start: the project's own, and a job that leaves a trace."""

from __future__ import annotations

from project.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "benchmarks"]  # noqa: F405
