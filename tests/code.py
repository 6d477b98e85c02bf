"""Jobs with schedules, as if some code had them by now; gone after the test."""

from __future__ import annotations

import dataclasses

import pytest

from distcron_app import job, registry
from distcron_app.definitions import Definition

__all__ = ["Code"]


def _close_books(batch: int = 100, day: str = "") -> None:
    """Close the books."""


class Code:
    """The code of a project: nothing of what is really registered has a schedule."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        jobs = {
            name: dataclasses.replace(each, schedules=()) for name, each in registry._jobs.items()
        }
        monkeypatch.setattr(registry, "_jobs", jobs)

    def define(
        self, *definitions: Definition, name: str = "shop.close_books", at: str = "shop.jobs:42"
    ) -> None:
        """Have a job with these schedules, in place of what it had before."""
        self.drop(name)
        job(name=name, schedule=definitions)(_close_books)
        registry._jobs[name] = dataclasses.replace(registry.get(name), source=at)

    def drop(self, name: str = "shop.close_books") -> None:
        """Delete the job from the code, with its schedules."""
        registry._jobs.pop(name, None)
