"""Instants: a column of aware UTC, the database's now, and as people write them.

Django stores naive local time where USE_TZ is False, which is ambiguous for one
hour a year; a scheduler cannot live with that. Decisions of the kind "is it due,
has it expired" compare columns with DatabaseNow inside the statement.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from django.db import connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.sql.compiler import SQLCompiler
from django.utils import timezone

__all__ = ["DatabaseNow", "InstantField", "SecondsBetween", "UtcDay", "database_now", "parse_wall"]

if TYPE_CHECKING:
    _DateTimeField = models.DateTimeField[Any, Any]
else:
    _DateTimeField = models.DateTimeField

_SQLITE_FORMAT = "%%Y-%%m-%%d %%H:%%M:%%f000"


class InstantField(_DateTimeField):
    """An instant. Takes and returns aware datetimes; stored in UTC.

    A naive value is refused with ValueError, except from forms, where it means the
    current time zone.
    """

    def get_prep_value(self, value: Any) -> datetime | None:
        value = self.to_python(value)
        if value is None:
            return None
        if timezone.is_naive(value):
            raise ValueError(f"{self.name}: got the naive instant {value}. Pass an aware datetime.")
        return value.astimezone(UTC)  # type: ignore[no-any-return]

    def get_db_prep_value(
        self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False
    ) -> Any:
        if not prepared:
            value = self.get_prep_value(value)
        if not isinstance(value, datetime) or connection.vendor == "postgresql":
            return value
        naive = value.astimezone(UTC).replace(tzinfo=None)
        return naive.isoformat(sep=" ", timespec="microseconds")

    def from_db_value(
        self, value: datetime | None, expression: Any, connection: BaseDatabaseWrapper
    ) -> datetime | None:
        if value is None:
            return None
        if connection.vendor != "postgresql":
            return value.replace(tzinfo=UTC)
        if timezone.is_naive(value):
            # USE_TZ is False: PostgreSQL answers in the session's zone; fold is kept.
            value = value.replace(tzinfo=ZoneInfo(connection.timezone_name))
        return value.astimezone(UTC)

    def clean(self, value: Any, model_instance: models.Model | None) -> Any:
        value = self.to_python(value)
        if value is not None and timezone.is_naive(value):
            value = timezone.make_aware(value)
        return super().clean(value, model_instance)


class DatabaseNow(models.Expression):
    """The database's clock at the start of the statement, plus ``offset``."""

    def __init__(self, offset: timedelta = timedelta()) -> None:
        super().__init__(output_field=InstantField())
        self.offset = offset

    def as_sql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper
    ) -> tuple[str, tuple[Any, ...]]:
        seconds = self.offset.total_seconds()
        if connection.vendor == "postgresql":
            return "(STATEMENT_TIMESTAMP() + make_interval(secs => %s))", (seconds,)
        if connection.vendor == "mysql":
            return "(UTC_TIMESTAMP(6) + INTERVAL %s MICROSECOND)", (round(seconds * 1_000_000),)
        return f"STRFTIME('{_SQLITE_FORMAT}', 'now', %s)", (f"{seconds:+.3f} seconds",)


class UtcDay(models.Func):
    """The day in UTC of a column of instants, whatever the session's zone is."""

    function = "DATE"
    output_field = models.DateField()

    def as_postgresql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **options: Any
    ) -> Any:
        template = "(%(expressions)s AT TIME ZONE 'UTC')::date"
        return super().as_sql(compiler, connection, template=template, **options)


class SecondsBetween(models.Func):
    """The seconds from one column of instants to another; NULL where one is."""

    arity = 2
    output_field = models.FloatField()

    def as_postgresql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **options: Any
    ) -> Any:
        template = "EXTRACT(EPOCH FROM -(%(expressions)s))::float8"
        return super().as_sql(compiler, connection, template=template, arg_joiner=" - ", **options)

    def as_mysql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **options: Any
    ) -> Any:
        template = "(TIMESTAMPDIFF(MICROSECOND, %(expressions)s) / 1e6)"
        return super().as_sql(compiler, connection, template=template, **options)

    def as_sqlite(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **options: Any
    ) -> Any:
        # Django's own function, in microseconds: text has no difference.
        template = "(-django_timestamp_diff(%(expressions)s) / 1000000.0)"
        return super().as_sql(compiler, connection, template=template, **options)


_NOW_SQL = {
    "postgresql": "SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8",
    "mysql": "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1000000",
    # Text, as DatabaseNow writes it: a number of days would round to another instant.
    "sqlite": "SELECT STRFTIME('%Y-%m-%d %H:%M:%f', 'now')",
}


def database_now(using: str = "default") -> datetime:
    """Return the database's clock, aware UTC. One round trip."""
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute(_NOW_SQL[connection.vendor])
        (now,) = cursor.fetchone()
    if connection.vendor == "sqlite":
        return datetime.fromisoformat(now).replace(tzinfo=UTC)
    return datetime.fromtimestamp(float(now), UTC)


def parse_wall(text: str) -> datetime:
    """Return the date and time as written: naive without an offset. Raise ValueError.

    A date means its first moment.
    """
    try:
        return datetime.combine(date.fromisoformat(text), time())
    except ValueError:
        return datetime.fromisoformat(text)
