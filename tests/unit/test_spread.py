"""Offsets that spread starts: stable, in range, even."""

import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta, timezone

import pytest

from distcron_app.errors import TimetableError
from distcron_app.timetable.hashing import stable_number
from distcron_app.timetable.spread import offset_seconds

AT = datetime(2026, 11, 29, 10, 17, tzinfo=UTC)


def test_hashed_offset_is_the_same_at_every_instant() -> None:
    found = {
        offset_seconds("hashed", 300, "billing", AT + timedelta(days=days)) for days in range(50)
    }
    assert len(found) == 1


def test_random_offset_differs_from_instant_to_instant() -> None:
    found = {
        offset_seconds("random", 300, "billing", AT + timedelta(days=days)) for days in range(50)
    }
    assert len(found) == 50


def test_random_offset_is_the_same_for_the_same_instant_in_any_zone() -> None:
    local = AT.astimezone(timezone(timedelta(hours=7)))
    assert offset_seconds("random", 300, "7", local) == offset_seconds("random", 300, "7", AT)


@pytest.mark.parametrize("kind", ["random", "hashed"])
def test_offset_is_the_same_in_another_process(kind: str) -> None:
    code = (
        "from datetime import UTC, datetime\n"
        "from distcron_app.timetable.spread import offset_seconds\n"
        f"print(repr(offset_seconds({kind!r}, 300, 'billing', datetime(2026, 11, 29, 10, 17, "
        "tzinfo=UTC))))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(ran.stdout) == offset_seconds(kind, 300, "billing", AT)


def test_values_never_change_between_versions() -> None:
    assert round(offset_seconds("hashed", 300, "billing", AT), 6) == 260.759811
    assert round(offset_seconds("random", 300, "billing", AT), 6) == 147.668032


@pytest.mark.parametrize("kind", ["random", "hashed"])
def test_offsets_fill_the_range_evenly(kind: str) -> None:
    found = [offset_seconds(kind, 60, f"schedule {number}", AT) for number in range(6000)]
    assert all(0 <= offset < 60 for offset in found)
    assert all(60 <= count <= 140 for count in Counter(map(int, found)).values())


def test_no_limit_is_no_offset() -> None:
    assert offset_seconds("random", 0, "billing", AT) == 0


@pytest.mark.parametrize(
    ("kind", "limit", "field", "message"),
    [
        ("even", 5, "spread", "Spread 'even': not known. Choose one of random, hashed."),
        ("random", -1, "spread_seconds", "Spread of -1 s: must be from 0 to 86400 seconds."),
        (
            "hashed",
            float("nan"),
            "spread_seconds",
            "Spread of nan s: must be from 0 to 86400 seconds.",
        ),
    ],
)
def test_refusal_names_the_field(kind: str, limit: float, field: str, message: str) -> None:
    with pytest.raises(TimetableError) as caught:
        offset_seconds(kind, limit, "billing", AT)
    assert (caught.value.field, str(caught.value)) == (field, message)


def test_naive_instant_is_refused() -> None:
    with pytest.raises(ValueError, match="has no time zone"):
        offset_seconds("random", 5, "billing", datetime(2026, 1, 1))  # noqa: DTZ001


def test_stable_number_is_in_range_and_stable() -> None:
    assert {stable_number("billing", 60) for _ in range(3)} == {stable_number("billing", 60)}
    assert {stable_number(str(key), 60) for key in range(2000)} == set(range(60))
