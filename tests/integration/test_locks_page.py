"""The code of docs/locks.md, executed as it stands there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from distcron_app import JobContext, registry
from distcron_app.errors import LeaseLost, LockNotAcquired
from distcron_app.locks import lock

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "locks.md").read_text()


def execute(first_line: str, **names: Any) -> dict[str, Any]:
    """Execute the block that begins with this comment; return what it defines."""
    found = re.search(rf"```python\n({re.escape(first_line)}\n.*?)```", PAGE, re.DOTALL)
    assert found, f"docs/locks.md has no block that begins with {first_line!r}."
    exec(compile(found[1], first_line, "exec"), names)
    return names


@pytest.fixture
def table(transactional_db: None) -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE billing_account (id integer PRIMARY KEY, total integer NOT NULL,"
            " fencing_token bigint NOT NULL DEFAULT 0)"
        )
        cursor.execute("INSERT INTO billing_account (id, total) VALUES (1, 0), (2, 0)")
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE billing_account")


@pytest.fixture
def close_account(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(registry, "_jobs", dict(registry._jobs))
    execute("# billing/jobs.py")
    return registry.get("billing.close_account").function


def context(fencing_token: int) -> JobContext:
    return JobContext(
        run_id=fencing_token,
        schedule_id=1,
        schedule_key="close-account",
        job="billing.close_account",
        scheduled_at=datetime(2027, 3, 1, tzinfo=UTC),
        attempt=1,
        fencing_token=fencing_token,
    )


def rows() -> list[tuple[int, int, int]]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT id, total, fencing_token FROM billing_account ORDER BY id")
        return list(cursor.fetchall())


def test_late_write_of_an_older_holder_changes_no_row(table: None, close_account: Any) -> None:
    close_account(context(8), account=1, total=80)
    with pytest.raises(LeaseLost, match="Run 7: lease lost, a newer run has written this account"):
        close_account(context(7), account=1, total=70)
    assert rows() == [(1, 80, 8), (2, 0, 0)]


def test_write_of_a_newer_holder_changes_the_row(table: None, close_account: Any) -> None:
    close_account(context(7), account=1, total=70)
    close_account(context(8), account=1, total=80)
    assert rows() == [(1, 80, 8), (2, 0, 0)]


def test_holder_writes_again_also_what_is_there_already(table: None, close_account: Any) -> None:
    for _ in range(2):
        close_account(context(7), account=1, total=70)
    assert rows() == [(1, 70, 7), (2, 0, 0)]


def test_write_to_no_row_is_noticed(table: None, close_account: Any) -> None:
    with pytest.raises(LeaseLost):
        close_account(context(7), account=3, total=70)


@pytest.fixture
def memory_locks(settings: Any) -> None:
    settings.DISTCRON = {"LOCK_BACKEND": "memory"}


def test_block_of_the_page_runs_under_the_lock(memory_locks: None) -> None:
    def export() -> None:
        with pytest.raises(LockNotAcquired), lock("export"):
            raise AssertionError("two inside")
        done.append(1)

    done: list[int] = []
    execute("# shop/export.py", export=export)
    assert done == [1]


def test_decorated_function_of_the_page_is_skipped_while_busy(memory_locks: None) -> None:
    send_report = execute("# shop/reports.py", deliver=lambda: 5)["send_report"]
    assert send_report() == 5
    with lock("report"):
        assert send_report() is None
