from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.utils import translation


@pytest.fixture(autouse=True)
def _no_language_left_behind() -> Iterator[None]:
    """Undo what a request in another language activated for this thread."""
    yield
    translation.deactivate()
