"""The database of the nodes, seen without Django: rows in, rows out, a trigger that watches."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg.rows import dict_row

__all__ = ["Database"]

_JSON = frozenset({"arguments", "details", "result"})

_WATCH_POSTGRES = """
CREATE TABLE system_transition (
  id bigserial PRIMARY KEY, run_id bigint, schedule_id bigint, before text, after text,
  fencing_token bigint, at timestamptz DEFAULT clock_timestamp());
CREATE FUNCTION system_watch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'INSERT' THEN
    INSERT INTO system_transition (run_id, schedule_id, before, after, fencing_token)
    VALUES (NEW.id, NEW.schedule_id, '', NEW.state, NEW.fencing_token);
  ELSIF NEW.state <> OLD.state THEN
    INSERT INTO system_transition (run_id, schedule_id, before, after, fencing_token)
    VALUES (NEW.id, NEW.schedule_id, OLD.state, NEW.state, NEW.fencing_token);
  END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER system_watch AFTER INSERT OR UPDATE ON distcron_run
FOR EACH ROW EXECUTE FUNCTION system_watch();
"""

_WATCH_SQLITE = """
CREATE TABLE system_transition (
  id INTEGER PRIMARY KEY AUTOINCREMENT, run_id INTEGER, schedule_id INTEGER, before TEXT,
  after TEXT, fencing_token INTEGER);
CREATE TRIGGER system_inserted AFTER INSERT ON distcron_run BEGIN
  INSERT INTO system_transition (run_id, schedule_id, before, after, fencing_token)
  VALUES (NEW.id, NEW.schedule_id, '', NEW.state, NEW.fencing_token);
END;
CREATE TRIGGER system_updated AFTER UPDATE ON distcron_run WHEN NEW.state <> OLD.state BEGIN
  INSERT INTO system_transition (run_id, schedule_id, before, after, fencing_token)
  VALUES (NEW.id, NEW.schedule_id, OLD.state, NEW.state, NEW.fencing_token);
END;
"""


class Database:
    """One database by its URL. ``%s`` stands for a parameter; instants come back aware."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_sqlite = url.startswith("sqlite")
        self._connection: psycopg.Connection[dict[str, Any]] | None = None

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Run one statement and return its rows. It survives a restart of the server."""
        if self.is_sqlite:
            return self._rows_sqlite(sql, params)
        if self._connection is None or self._connection.broken:
            self._connection = self._connect()
        try:
            cursor = self._connection.execute(sql, params)
        except psycopg.OperationalError:
            # The server closed the link, as tests make it do; a second failure is real.
            self._connection = self._connect()
            cursor = self._connection.execute(sql, params)
        return cursor.fetchall() if cursor.description else []

    def value(self, sql: str, params: Sequence[Any] = ()) -> Any:
        """Return the first column of the first row."""
        (row, *_) = self.rows(sql, params)
        return next(iter(row.values()))

    def watch(self) -> None:
        """Make the database note every change of a run's state."""
        if not self.is_sqlite:
            self.rows(_WATCH_POSTGRES)
            return
        with self._open_sqlite() as connection:
            connection.executescript(_WATCH_SQLITE)
        connection.close()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> psycopg.Connection[dict[str, Any]]:
        if self._connection is not None:
            self._connection.close()
        return psycopg.connect(
            self.url.replace("postgres://", "postgresql://"),
            autocommit=True,
            row_factory=dict_row,
            connect_timeout=5,
            options="-c timezone=UTC",
        )

    def _open_sqlite(self) -> sqlite3.Connection:
        connection = sqlite3.connect(urlsplit(self.url).path, timeout=30)
        connection.row_factory = sqlite3.Row
        return connection

    def _rows_sqlite(self, sql: str, params: Sequence[Any]) -> list[dict[str, Any]]:
        connection = self._open_sqlite()
        try:
            with connection:
                found = connection.execute(sql.replace("%s", "?"), [_stored(p) for p in params])
                return [
                    {key: _loaded(key, row[key]) for key in row.keys()}  # noqa: SIM118
                    for row in found.fetchall()
                ]
        finally:
            connection.close()


def _stored(value: Any) -> Any:
    if isinstance(value, datetime):
        naive = value.astimezone(UTC).replace(tzinfo=None)
        return naive.isoformat(sep=" ", timespec="microseconds")
    return value


def _loaded(key: str, value: Any) -> Any:
    if isinstance(value, str) and key.endswith("_at"):
        return datetime.fromisoformat(value).replace(tzinfo=UTC)
    if isinstance(value, str) and key in _JSON:
        return json.loads(value)
    return value
