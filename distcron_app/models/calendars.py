"""Calendars: days on which schedules that use them shall not run."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterable
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import models, transaction
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from distcron_app.errors import TimetableError
from distcron_app.timetable.calendars import Event, Exclusions
from distcron_app.timetable.zones import check_timezone

__all__ = ["Calendar", "CalendarEntry", "default_timezone", "exclusions_of"]


def default_timezone() -> str:
    """Return the project's zone, never UTC by accident."""
    return settings.TIME_ZONE


class Calendar(models.Model):
    """A named set of excluded days: weekdays, and entries of one day or a range."""

    name = models.CharField(_("name"), max_length=100, unique=True)
    timezone = models.CharField(
        _("time zone"),
        max_length=64,
        default=default_timezone,
        help_text=_("Days begin and end in it."),
    )
    weekdays = models.CharField(
        _("excluded weekdays"),
        max_length=13,
        blank=True,
        help_text=_("Monday is 1, Sunday is 7; for example 6,7 for weekends."),
    )
    # Part of the key under which nodes remember the days; another one after each change.
    revision = models.UUIDField(default=uuid.uuid4, editable=False)

    class Meta:
        verbose_name = _("calendar")
        verbose_name_plural = _("calendars")
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def save(self, *args: Any, **options: Any) -> None:
        """Store the calendar and plan its schedules anew, from now."""
        with transaction.atomic():
            self.revision = uuid.uuid4()
            super().save(*args, **options)
            self.schedules.plan_anew()

    def clean(self) -> None:
        """Refuse a zone or weekdays that do not exist."""
        problems: dict[str, Any] = {}
        try:
            check_timezone(self.timezone)
        except TimetableError as error:
            problems["timezone"] = [error.message]
        try:
            self.weekday_numbers()
        except ValueError:
            problems["weekdays"] = [
                _("Weekdays %(given)r: write numbers from 1 to 7 with commas, for example 6,7.")
                % {"given": self.weekdays}
            ]
        if problems:
            raise ValidationError(problems)

    def weekday_numbers(self) -> frozenset[int]:
        """Return the excluded weekdays, Monday = 1. Raise ValueError for anything else."""
        numbers = frozenset(int(part) for part in self.weekdays.split(",") if part.strip())
        if not numbers <= set(range(1, 8)):
            raise ValueError(self.weekdays)
        return numbers

    def replace_entries(self, events: Iterable[Event]) -> int:
        """Store ``events``, as an iCalendar file gives them, in place of all entries."""
        with transaction.atomic():
            self.entries.all().delete()
            rows = [
                CalendarEntry(calendar=self, first=first, last=last, summary=summary[:200])
                for first, last, summary in events
            ]
            CalendarEntry.objects.bulk_create(rows, batch_size=500)
            self.save()
        return len(rows)


class CalendarEntry(models.Model):
    """One excluded day, or all days from the first to the last."""

    calendar = models.ForeignKey(
        Calendar, on_delete=models.CASCADE, related_name="entries", verbose_name=_("calendar")
    )
    first = models.DateField(_("first day"))
    last = models.DateField(_("last day"))
    summary = models.CharField(_("name"), max_length=200, blank=True)

    class Meta:
        verbose_name = _("excluded day")
        verbose_name_plural = _("excluded days")
        ordering = ["first", "last"]
        constraints = [
            models.CheckConstraint(
                name="distcron_calendarentry_order", condition=Q(last__gte=models.F("first"))
            )
        ]

    def __str__(self) -> str:
        days = str(self.first) if self.first == self.last else f"{self.first} – {self.last}"
        return f"{days} {self.summary}".strip()

    def save(self, *args: Any, **options: Any) -> None:
        """Store the entry and plan the schedules of its calendar anew."""
        super().save(*args, **options)
        self.calendar.save()

    def delete(self, *args: Any, **options: Any) -> tuple[int, dict[str, int]]:
        """Delete the entry and plan the schedules of its calendar anew."""
        deleted = super().delete(*args, **options)
        self.calendar.save()
        return deleted

    def clean(self) -> None:
        """Refuse a range that runs backwards."""
        if self.first and self.last and self.last < self.first:
            raise ValidationError({"last": [_("Must not be before the first day.")]})


@functools.lru_cache(maxsize=256)
def exclusions_of(calendar_id: int, revision: uuid.UUID) -> Exclusions:
    """Return the excluded days of a calendar as it stands at ``revision``. Two queries, once."""
    calendar = Calendar.objects.get(pk=calendar_id)
    return Exclusions(
        weekdays=calendar.weekday_numbers(),
        timezone=calendar.timezone,
        events=tuple(
            Event(entry.first, entry.last, entry.summary) for entry in calendar.entries.all()
        ),
    )
