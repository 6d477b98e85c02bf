"""What all integration tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection
from django.utils import translation

from distcron_app.locks import close_backends


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of something that the database at hand does not have."""
    foreign = [item for item in items if not _belongs_here(item)]
    if foreign:
        config.hook.pytest_deselected(items=foreign)
        items[:] = [item for item in items if item not in foreign]


def _belongs_here(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("databases")
    return marker is None or connection.vendor in marker.args


@pytest.fixture(scope="session", autouse=True)
def _no_session_left_open(django_db_setup: None) -> Iterator[None]:
    """End the sessions that hold database locks, or the test database cannot be dropped."""
    yield
    close_backends()


@pytest.fixture(autouse=True)
def _no_language_left_behind() -> Iterator[None]:
    """Undo what a request in another language activated for this thread."""
    yield
    translation.deactivate()
