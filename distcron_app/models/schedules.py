"""Schedules: which job runs when, with which arguments and policies."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Mapping
from datetime import datetime, time, timedelta
from typing import Any
from uuid import UUID

from django.core.exceptions import ValidationError
from django.db import Error, models, transaction
from django.db.models import F, Q
from django.urls import reverse
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _

from distcron_app import registry, wakeup
from distcron_app.atomicity import atomicity_problem
from distcron_app.clock import utc_now
from distcron_app.errors import InvalidArguments, StaleVersion, TimetableError, UnknownJob
from distcron_app.instants import DatabaseNow, InstantField, database_now
from distcron_app.locks import level_problem
from distcron_app.models.calendars import Calendar, default_timezone, exclusions_of
from distcron_app.models.policies import POLICY_FIELDS, Policies
from distcron_app.scopes import key_problem, rendered_key
from distcron_app.timetable import (
    MAX_TEXT,
    Timetable,
    build,
    canonical,
    first_after,
    tzdata_version,
    union,
)
from distcron_app.timetable.calendars import Excluding
from distcron_app.timetable.spread import MAX_OFFSET_SECONDS, spread_instant
from distcron_app.wording import describe

__all__ = [
    "DEFINED_FIELDS",
    "PERSON_FIELDS",
    "PLANNING_FIELDS",
    "TIMETABLE_FIELDS",
    "Schedule",
    "ScheduleQuerySet",
    "timetable_of",
]

logger = logging.getLogger("distcron.models")

MAX_CRON_LINES = 10
MAX_CRON_TEXT = MAX_CRON_LINES * (MAX_TEXT + 2)  # with line ends as browsers send them


class ScheduleQuerySet(models.QuerySet["Schedule"]):
    """Verbs on schedules."""

    def due(self, within_seconds: float = 0.0) -> ScheduleQuerySet:
        """Return active schedules whose next instant has come, or comes within the seconds."""
        horizon = DatabaseNow(timedelta(seconds=within_seconds))
        return self.filter(state=Schedule.State.ACTIVE, next_run_at__lte=horizon).order_by(
            "next_run_at"
        )

    def by_priority(self) -> ScheduleQuerySet:
        """Return them with the highest priority first, of the same one the oldest instant."""
        return self.order_by("-priority", "next_run_at")

    def unplanned(self) -> ScheduleQuerySet:
        """Return active schedules that lack their next instant: new, or edited past the model."""
        return self.filter(state=Schedule.State.ACTIVE, next_run_at=None).exclude(
            kind=Schedule.Kind.MANUAL
        )

    def from_code(self) -> ScheduleQuerySet:
        """Return schedules that code defines, or defined until it dropped them."""
        return self.exclude(defined_in="")

    def pause_over(self) -> ScheduleQuerySet:
        """Return paused schedules whose pause has an end, and that has come.

        Not those that have left the code since they were paused: they stay paused.
        """
        is_wanted = Q(left_code_at=None) | Q(state_at__gt=F("left_code_at"))
        return self.filter(is_wanted, state=Schedule.State.PAUSED, paused_until__lte=DatabaseNow())

    def watched(self) -> ScheduleQuerySet:
        """Return active schedules that are to be paused after failures in a row."""
        return self.filter(state=Schedule.State.ACTIVE, auto_pause_after__isnull=False)

    def planned_before(self, zones: str) -> ScheduleQuerySet:
        """Return active schedules, not due yet, that were planned with older zone data."""
        return self.filter(
            state=Schedule.State.ACTIVE, next_run_at__gt=DatabaseNow(), planned_zones__lt=zones
        )

    def overdue(self, seconds: float) -> ScheduleQuerySet:
        """Return active schedules that nobody has claimed for ``seconds`` after they were due."""
        return self.due(within_seconds=-seconds)

    def unserved(self, served: Collection[str] | None) -> ScheduleQuerySet:
        """Return active schedules in none of the queues ``served``; None means every queue."""
        if served is None:
            return self.none()
        return self.filter(state=Schedule.State.ACTIVE).exclude(queue__in=served)

    def with_last_run(self) -> ScheduleQuerySet:
        """Annotate ``last_run_id``, the newest run of each schedule."""
        runs: Any = Schedule.runs.rel.related_model
        newest = runs.objects.filter(schedule=models.OuterRef("pk")).order_by("-id")
        return self.annotate(last_run_id=models.Subquery(newest.values("id")[:1]))

    def plan_anew(self) -> int:
        """Let the sweep compute the next instant of active rows again, from now."""
        active = self.filter(state=Schedule.State.ACTIVE)
        return super(ScheduleQuerySet, active).update(next_run_at=None, planned_from=DatabaseNow())

    def mark_invalid(self, reason: str) -> int:
        """Take rows that cannot run out of the loop, with the reason; return how many.

        The scheduler's own write: it does not count as an edit, so nobody's form gets stale.
        """
        return super().update(
            state=Schedule.State.INVALID, state_reason=reason[:500], next_run_at=None
        )

    def write_plan(self, planned: Schedule) -> int:
        """Store where ``planned`` stands now; the scheduler's own write, as ``mark_invalid``."""
        return super().update(
            next_run_at=planned.next_run_at,
            planned_zones=planned.planned_zones,
            cron_canonical=planned.cron_canonical,
            state=planned.state,
            state_reason=planned.state_reason,
        )

    def leave_code(self, at: datetime) -> int:
        """Note since when code defines them no more; nothing that a form shows changes."""
        return super().update(left_code_at=at)

    def write_origins(self, moved: Collection[Schedule]) -> None:
        """Store where code defines the rows by now; no edit either."""
        plain: models.QuerySet[Schedule] = models.QuerySet(Schedule, using=self.db)
        plain.bulk_update(moved, ["defined_in"], batch_size=500)

    def write_claims(self, claimed: Collection[Schedule], batch_size: int) -> None:
        """Store where claimed schedules stand now; the scheduler's own write, as ``mark_invalid``.

        By a plain queryset: ``bulk_update`` goes through ``update``, which would count it as
        an edit, and every open form would be stale after each tick.
        """
        plain: models.QuerySet[Schedule] = models.QuerySet(Schedule, using=self.db)
        plain.bulk_update(
            claimed,
            ["next_run_at", "fencing_token", "runs_planned", "state", "state_reason"],
            batch_size,
        )

    def update(self, **values: Any) -> int:
        """Update rows; a change to what decides the next instant makes it be planned anew.

        ``update(state="active")`` resumes as the admin does, by the schedule's ``on_resume``;
        only the row that says which instants of the pause did not run is not written.
        """
        if "state" in values:
            # Who, when and until belonged to the state before.
            values = {"state_by": "", "state_at": DatabaseNow(), "paused_until": None} | values
        planning = {"calendar", *PLANNING_FIELDS}.intersection(values)
        if planning and "next_run_at" not in values:
            start = _resumed_from() if planning == {"state"} else DatabaseNow()
            # First, since MariaDB lets what follows see the columns that are set before it.
            values = {"next_run_at": None, "planned_from": start} | values
        if set(PERSON_FIELDS).intersection(values) and "version" not in values:
            values["version"] = F("version") + 1
        return super().update(**values)


class Schedule(Policies):
    """One row that says which job runs when, with which arguments and policies."""

    class State(models.TextChoices):
        ACTIVE = "active", _("active")
        PAUSED = "paused", _("paused")  # by a person, with a reason
        EXHAUSTED = "exhausted", _("finished")  # no instant will come any more
        INVALID = "invalid", _("invalid")  # the row cannot run; state_reason says why

    class Kind(models.TextChoices):
        CRON = "cron", _("cron expression")
        INTERVAL = "interval", _("every N seconds")
        CALENDAR = "calendar", _("every N days, weeks or months")
        ONCE = "once", _("once")
        MANUAL = "manual", _("only by hand or after another schedule")

    class CalendarUnit(models.TextChoices):
        DAYS = "days", _("days")
        WEEKS = "weeks", _("weeks")
        MONTHS = "months", _("months")

    class Gap(models.TextChoices):
        SHIFT = "shift", _("run right after the gap")
        SKIP = "skip", _("do not run")

    class Fold(models.TextChoices):
        FIRST = "first", _("run in the first pass")
        SECOND = "second", _("run in the second pass")
        BOTH = "both", _("run in both passes")

    class Spread(models.TextChoices):
        HASHED = "hashed", _("the same delay each time")
        RANDOM = "random", _("another delay each time")

    class Excluded(models.TextChoices):
        SKIP = "skip", _("do not run")
        NEXT = "next", _("run on the next allowed day")
        PREVIOUS = "previous", _("run on the allowed day before")

    class Delivery(models.TextChoices):
        AT_MOST_ONCE = "at_most_once", _("at most once: never started twice, may be lost")
        AT_LEAST_ONCE = "at_least_once", _("at least once: run again after a crash")
        TRANSACTIONAL = (
            "transactional",
            _("transactional: writes to this database and the outcome in one commit"),
        )

    # After a crash in the middle these are run again, up to the limit of recoveries.
    REPEATING_DELIVERIES = (Delivery.AT_LEAST_ONCE, Delivery.TRANSACTIONAL)

    key = models.SlugField(
        _("key"),
        max_length=100,
        unique=True,
        help_text=_("Short name for the command line. Letters, digits, '-' and '_'."),
    )
    name = models.CharField(_("name"), max_length=200)
    job = models.CharField(_("job"), max_length=100)
    arguments = models.JSONField(
        _("arguments"),
        default=dict,
        blank=True,
        help_text=_('A JSON object of keyword arguments, for example {"batch": 100}.'),
    )
    kind = models.CharField(_("kind"), max_length=10, choices=Kind, default=Kind.CRON)
    cron = models.CharField(
        _("cron expression"),
        max_length=MAX_CRON_TEXT,
        blank=True,
        help_text=_(
            "Five fields: minute hour day month weekday. For example: 30 2 * * mon-fri. "
            "Several rules, one in each line, run at the instants of all of them."
        ),
    )
    # What the typed text means, in the one spelling that is computed with.
    cron_canonical = models.CharField(max_length=MAX_CRON_TEXT, blank=True, editable=False)
    timezone = models.CharField(_("time zone"), max_length=64, default=default_timezone)
    interval_seconds = models.PositiveIntegerField(
        _("every (seconds)"), null=True, blank=True, help_text=_("1 to 31,536,000.")
    )
    interval_anchor = InstantField(
        _("counted from"),
        null=True,
        blank=True,
        help_text=_("The first instant of the interval; now when empty."),
    )
    run_at = InstantField(_("run once at"), null=True, blank=True)
    calendar_every = models.PositiveSmallIntegerField(_("every"), null=True, blank=True)
    calendar_unit = models.CharField(
        _("unit"), max_length=6, choices=CalendarUnit, default=CalendarUnit.DAYS
    )
    calendar_date = models.DateField(
        _("first day"),
        null=True,
        blank=True,
        help_text=_("Counted from this day. Day 31 becomes the last day of shorter months."),
    )
    calendar_time = models.TimeField(_("time of day"), null=True, blank=True)
    gap = models.CharField(
        _("time that the clocks jump over"),
        max_length=6,
        choices=Gap,
        default=Gap.SHIFT,
        help_text=_("For rules with a fixed time of day."),
    )
    fold = models.CharField(
        _("time that comes twice"),
        max_length=6,
        choices=Fold,
        default=Fold.FIRST,
        help_text=_("For rules with a fixed time of day."),
    )
    starts_at = InstantField(_("not before"), null=True, blank=True)
    ends_at = InstantField(_("not after"), null=True, blank=True)
    max_runs = models.PositiveIntegerField(
        _("at most this many runs"),
        null=True,
        blank=True,
        help_text=_("The schedule is finished afterwards. Runs by hand do not count."),
    )
    calendar = models.ForeignKey(
        Calendar,
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="schedules",
        verbose_name=_("days to keep clear of"),
    )
    calendar_action = models.CharField(
        _("on an excluded day"), max_length=8, choices=Excluded, default=Excluded.SKIP
    )
    spread_seconds = models.PositiveIntegerField(
        _("spread over (seconds)"),
        default=0,
        help_text=_("Start up to this much later, so that not everything starts at once."),
    )
    spread_by = models.CharField(
        _("spread by"), max_length=6, choices=Spread, default=Spread.HASHED
    )
    spread_key = models.CharField(
        _("spread key"),
        max_length=100,
        blank=True,
        help_text=_("Schedules with the same key get the same delay; by default each its own."),
    )
    delivery = models.CharField(
        _("delivery"),
        max_length=20,
        choices=Delivery,
        default=Delivery.AT_MOST_ONCE,
        help_text=_(
            "What a crash in the middle means. At most once: the run is shown as lost and a "
            "person decides. At least once: it runs again, so the job must be idempotent. "
            "Transactional: it runs again, and what the job wrote to the scheduler's own database "
            "before the crash is undone, so it counts once; other effects may repeat."
        ),
    )
    notes = models.TextField(_("notes"), blank=True)

    # "module:line" of the job that brings this schedule with it; empty for people's own.
    defined_in = models.CharField(
        _("defined in code"), max_length=255, blank=True, default="", editable=False
    )
    left_code_at = InstantField(_("left the code"), null=True, blank=True, editable=False)

    state = models.CharField(_("state"), max_length=10, choices=State, default=State.ACTIVE)
    state_reason = models.CharField(_("reason"), max_length=500, blank=True)
    state_by = models.CharField(_("changed by"), max_length=150, blank=True)
    state_at = InstantField(_("changed at"), null=True, blank=True)
    paused_until = InstantField(_("paused until"), null=True, blank=True)

    next_run_at = InstantField(_("next run"), null=True, blank=True, editable=False)
    planned_from = InstantField(null=True, blank=True, editable=False)
    # The zone data that next_run_at was computed with; newer data computes it again.
    planned_zones = models.CharField(max_length=10, blank=True, default="", editable=False)
    runs_planned = models.PositiveIntegerField(_("runs so far"), default=0, editable=False)
    fencing_token = models.BigIntegerField(_("fencing token"), default=0, editable=False)
    version = models.PositiveIntegerField(_("version"), default=1, editable=False)
    created_at = InstantField(_("created"), default=utc_now, editable=False)
    updated_at = InstantField(_("updated"), default=utc_now, editable=False)

    objects = ScheduleQuerySet.as_manager()

    class Meta:
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")
        ordering = ["name", "id"]
        permissions = [
            ("view_dashboard", _("Can view the dashboard")),
            ("run_schedule", _("Can run a schedule now")),
            ("backfill_schedule", _("Can run a past range of a schedule")),
            ("pause_schedule", _("Can pause and resume a schedule")),
            ("view_lock", _("Can view locks")),
            ("force_release_lock", _("Can release a lock that somebody holds")),
        ]
        indexes = [
            models.Index(fields=["state", "next_run_at"], name="distcron_schedule_due"),
            # Read only where more is due than a node reads at once.
            models.Index(
                fields=["state", "-priority", "next_run_at"], name="distcron_schedule_priority"
            ),
            # Partial, so that a claim, which writes next_run_at, does not write these as well.
            models.Index(
                fields=["paused_until"],
                name="distcron_schedule_pause_end",
                condition=Q(paused_until__isnull=False),
            ),
            models.Index(
                fields=["auto_pause_after"],
                name="distcron_schedule_watched",
                condition=Q(auto_pause_after__isnull=False),
            ),
        ]
        constraints = [
            models.CheckConstraint(
                name="distcron_schedule_state",
                condition=Q(state__in=["active", "paused", "exhausted", "invalid"]),
            ),
            models.CheckConstraint(
                name="distcron_schedule_kind",
                condition=Q(kind__in=["cron", "interval", "calendar", "once", "manual"]),
            ),
            models.CheckConstraint(
                name="distcron_schedule_delivery",
                condition=Q(delivery__in=["at_most_once", "at_least_once", "transactional"]),
            ),
        ]

    def __str__(self) -> str:
        return self.name or self.key

    def save(self, *args: Any, **options: Any) -> None:
        """Write the person's columns and plan the next instant anew where they decide it.

        Raise StaleVersion when somebody saved the row since it was read. An instant that
        is already past is never run because of an edit. The nodes are told on commit.
        """
        if self._state.adding:
            self._plan_after_edit(database_now())
            super().save(*args, **options)
        else:
            self._save_guarded(options)
        self._planned = self._planning_values()
        transaction.on_commit(wakeup.announce)

    def get_absolute_url(self) -> str:
        return reverse("distcron:schedule", args=[self.pk])

    @classmethod
    def from_db(cls, *args: Any, **options: Any) -> Schedule:
        schedule: Schedule = super().from_db(*args, **options)
        schedule._planned = schedule._planning_values()
        return schedule

    def refresh_from_db(self, *args: Any, **options: Any) -> None:
        super().refresh_from_db(*args, **options)
        # What was read again is no edit; a part that was read says nothing about the rest.
        if not args and options.get("fields") is None:
            self._planned = self._planning_values()

    def clean(self) -> None:
        """Refuse what could not run: the error names the field that is wrong."""
        problems: dict[str, list[Any]] = {}
        self.cron = "\n".join(line.strip() for line in self.cron.splitlines() if line.strip())
        if self.kind != self.Kind.INTERVAL:
            self.interval_seconds = None
        elif self.interval_anchor is None:
            self.interval_anchor = utc_now().replace(microsecond=0)
        try:
            self.timetable()
        except TimetableError as error:
            problems[_FIELD_OF.get(error.field, error.field)] = [error.message]
        try:
            found = registry.get(self.job)
            self.arguments = found.dump(found.check(self.arguments))
            if problem := key_problem(self.concurrency_key, found, self.arguments):
                problems["concurrency_key"] = [problem]
        except UnknownJob as error:
            problems["job"] = [str(error)]
        except InvalidArguments as error:
            problems["arguments"] = [
                message if parameter == registry.WHOLE else f"{parameter}: {message}"
                for parameter, message in error.problems.items()
            ]
        if self.max_runs is not None and self.max_runs < max(1, self.runs_planned):
            message = _("Must be at least 1, and not less than the %(count)d runs so far.")
            problems["max_runs"] = [message % {"count": self.runs_planned}]
        if self.starts_at and self.ends_at and self.ends_at <= self.starts_at:
            problems["ends_at"] = [_("Must be later than “not before”.")]
        problems |= self._delivery_problems() | self._wrong_values()
        if problems:
            raise ValidationError(problems)

    def _delivery_problems(self) -> dict[str, list[Any]]:
        problem = ""
        if self.delivery == self.Delivery.TRANSACTIONAL:
            # A database that does not answer is no problem of the schedule; its runs say it.
            with contextlib.suppress(Error):
                problem = atomicity_problem()
        message = _("“transactional” cannot work here: %(problem)s. Choose another delivery.")
        return {"delivery": [message % {"problem": problem}]} if problem else {}

    def timetable(self) -> Timetable:
        """Return what names the instants. Raise TimetableError for the field that is wrong.

        Excluded days are moved here where the schedule says so; where they are skipped,
        their instants stay, and each leaves a row that says why it did not run.
        """
        calendar = None if self.calendar is None else (self.calendar.pk, self.calendar.revision)
        columns = tuple(getattr(self, name) for name in TIMETABLE_FIELDS)
        return timetable_of(columns, calendar, self.calendar_action)

    def excluded(self, instant: datetime) -> str:
        """Return why the schedule skips the instant, in the active language, or ""."""
        if self.calendar is None or self.calendar_action != self.Excluded.SKIP:
            return ""
        return exclusions_of(self.calendar.pk, self.calendar.revision).excluded(instant)

    def spread(self, instant: datetime) -> datetime:
        """Return when the occurrence of ``instant`` is due: later by the schedule's offset."""
        return spread_instant(
            self.spread_by, self.spread_seconds, self.spread_key or str(self.pk), instant
        )

    @property
    def has_timetable(self) -> bool:
        """Return False where it runs only by hand or after another schedule."""
        return self.kind != self.Kind.MANUAL

    @property
    def is_in_code(self) -> bool:
        """Return True while code defines the schedule: people may pause it, and not edit it."""
        return bool(self.defined_in) and self.left_code_at is None

    @property
    def waits_for_code(self) -> bool:
        """Return True where it is paused and nobody touched that since it left the code."""
        left, since = self.left_code_at, self.state_at
        return left is not None and (since is None or since <= left)

    @property
    def is_paused_by_code(self) -> bool:
        """Return True where leaving the code is what paused it, so that a return resumes it."""
        is_paused = self.state == self.State.PAUSED
        return is_paused and self.left_code_at is not None and self.state_at == self.left_code_at

    def in_words(self) -> str:
        """Return the rule in words, in the active language; as it is stored where it is invalid."""
        try:
            return describe(self.timetable(), timezone=self.timezone)
        except TimetableError:
            return self.cron or str(self.get_kind_display())

    def scope(self, arguments: Mapping[str, Any] | None = None) -> str:
        """Return the concurrency key of a run with these arguments; "" for the schedule itself.

        By default with the schedule's own. Schedules that return the same one count as one
        for overlapping runs.
        """
        given = self.arguments if arguments is None else arguments
        return rendered_key(self.concurrency_key, self.job, given)

    def first_after(self, instant: datetime) -> datetime | None:
        """Return the first instant after ``instant`` within the bounds, or None."""
        return first_after(
            self.timetable(),
            instant,
            starts_at=self.starts_at,
            ends_at=self.ends_at,
            max_runs=self.max_runs,
            runs_so_far=self.runs_planned,
        )

    def upcoming(self, count: int) -> list[datetime]:
        """Return the next ``count`` instants from ``next_run_at`` on; empty where nothing comes."""
        instants: list[datetime] = []
        if self.max_runs is not None:
            count = min(count, self.max_runs - self.runs_planned)
        instant = self.next_run_at if self.state == self.State.ACTIVE else None
        while instant is not None and len(instants) < count:
            instants.append(instant)
            instant = self.first_after(instant)
        return instants

    def planning_start(self, now: datetime) -> datetime:
        """Return the instant after which planning goes on: never the past, no instant twice.

        A row that was changed past the model is planned from the moment of the change.
        """
        start: datetime = self.planned_from or now
        if self.pk is None:
            return start
        newest = self.runs.aggregate(at=models.Max("scheduled_at"))
        return max(start, newest["at"] or start)

    def plan_next(self, after: datetime) -> None:
        """Set ``next_run_at`` and ``state`` for a row that is not planned yet; saves nothing.

        A row that cannot run becomes ``invalid`` with the reason, one without a further
        instant ``exhausted``, unless it never has any.
        """
        problem = self._problem()
        if problem:
            self.state, self.state_reason, self.next_run_at = self.State.INVALID, problem, None
            return
        self.next_run_at = self.first_after(after)
        self.planned_zones = tzdata_version()
        self.cron_canonical = self._canonical_text()
        if self.next_run_at is None and self.has_timetable:
            self.state = self.State.EXHAUSTED
            self.state_reason = str(_("No instant of the timetable is left."))

    def _canonical_text(self) -> str:
        if self.kind != self.Kind.CRON:
            return ""
        return "\n".join(canonical(line) for line in self.cron.splitlines() if line.strip())

    def _problem(self) -> str:
        """Return what keeps the row from running, or "": it may have come past ``clean``."""
        try:
            self.timetable()
            registry.get(self.job).check(self.arguments)
        except (TimetableError, UnknownJob, InvalidArguments) as error:
            return str(error)[:500]
        except Exception:
            # The job's own check is foreign code; its runs fail with the traceback.
            logger.exception("check_failed schedule=%s job=%s", self.key, self.job)
        problem = level_problem(self.lock_level) or self._wrong_choice() or self._wrong_value()
        return problem[:500]

    def _wrong_choice(self) -> str:
        message = _("%(field)s %(value).40r: not known. Choose one of %(allowed)s.")
        for field in self._meta.concrete_fields:
            allowed = [value for value, _label in field.flatchoices]
            value = getattr(self, field.attname)
            if allowed and value not in allowed:
                return message % (_facts(field, value) | {"allowed": ", ".join(allowed)})
        return ""

    def _wrong_values(self) -> dict[str, list[Any]]:
        problems = self.policy_problems()
        if self.spread_seconds > MAX_OFFSET_SECONDS:
            problems["spread_seconds"] = [_("At most 86,400 seconds, one day.")]
        return problems

    def _wrong_value(self) -> str:
        message = _("%(field)s %(value).40r: %(problem)s")
        for name, problems in self._wrong_values().items():
            field = self._meta.get_field(name)
            return message % (_facts(field, getattr(self, name)) | {"problem": problems[0]})
        return ""

    def _planning_values(self) -> dict[str, Any]:
        return {name: self.__dict__.get(name) for name in PLANNING_FIELDS}

    def _plan_after_edit(self, now: datetime) -> None:
        self.planned_from = self._edited_from(now)
        self.next_run_at = None
        self.updated_at = now
        if self.state in (self.State.INVALID, self.State.EXHAUSTED):
            # The edit may have mended the row; planning decides.
            self.state, self.state_reason = self.State.ACTIVE, ""
        if self.state != self.State.PAUSED:
            self.paused_until = None
        if self.state == self.State.ACTIVE:
            self.plan_next(self.planning_start(now))

    def _edited_from(self, now: datetime) -> datetime:
        """Return from where on nothing is decided yet: ``now``, except for a pure pause or resume.

        A pause begins with the occurrence that is due and not claimed. A resume begins
        where the pause did, if the misfire policy decides about its instants.
        """
        if self._state.adding or _differing(self._planned, self._planning_values()) != {"state"}:
            return now
        start: datetime | None = None
        if self.state == self.State.PAUSED and self.next_run_at is not None:
            start = self.next_run_at - _TICK
        elif self._planned["state"] == self.State.PAUSED and self.on_resume == _DECIDED_LATER:
            start = self.planned_from
        return now if start is None else min(now, start)

    def _save_guarded(self, options: dict[str, Any]) -> None:
        fields = set(options.pop("update_fields", None) or PERSON_FIELDS)
        with transaction.atomic(using=options.get("using")):
            stored = Schedule.objects.select_for_update().filter(pk=self.pk).values("version")
            current = stored.first()
            if current is None or current["version"] != self.version:
                raise StaleVersion(self.key, self.version)
            self.updated_at = database_now()
            broken = self.state in (self.State.INVALID, self.State.EXHAUSTED)
            if broken or self._planning_values() != self._planned:
                self._plan_after_edit(self.updated_at)
                fields |= PLAN_FIELDS
            self.version += 1
            super().save(update_fields=fields | {"version", "updated_at"}, **options)


_TICK = timedelta(microseconds=1)
_DECIDED_LATER = Schedule.OnResume.MISFIRE
# What a timetable is built from; see timetable_of.
TIMETABLE_FIELDS = (
    "kind",
    "cron",
    "timezone",
    "interval_seconds",
    "interval_anchor",
    "run_at",
    "calendar_every",
    "calendar_unit",
    "calendar_date",
    "calendar_time",
    "gap",
    "fold",
)
# A change to one of these makes the next instant be computed anew, from now.
PLANNING_FIELDS = frozenset(
    {
        *TIMETABLE_FIELDS,
        "starts_at",
        "ends_at",
        "max_runs",
        "calendar_id",
        "calendar_action",
        "state",
    }
)
# What a person writes in the form, or code defines.
DEFINED_FIELDS = (
    "key",
    "name",
    "job",
    "arguments",
    *TIMETABLE_FIELDS,
    "starts_at",
    "ends_at",
    "max_runs",
    "calendar",
    "calendar_action",
    "spread_seconds",
    "spread_by",
    "spread_key",
    "delivery",
    *POLICY_FIELDS,
    "notes",
)
PERSON_FIELDS = (
    *DEFINED_FIELDS,
    "defined_in",
    "left_code_at",
    "state",
    "state_reason",
    "state_by",
    "state_at",
    "paused_until",
)
# What planning writes.
PLAN_FIELDS = frozenset(
    {
        "next_run_at",
        "planned_from",
        "planned_zones",
        "cron_canonical",
        "state",
        "state_reason",
        "paused_until",
    }
)
# Where timetable.build names a parameter that is two columns here.
_FIELD_OF = {"calendar_start": "calendar_date", "spread": "spread_by"}


def _facts(field: Any, value: Any) -> dict[str, Any]:
    return {"field": capfirst(field.verbose_name), "value": value}


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    return {name for name, value in after.items() if before[name] != value}


def _resumed_from() -> models.Case:
    """Return where planning goes on after a change of the state alone, as in ``_edited_from``."""
    is_decided_later = models.When(
        state=Schedule.State.PAUSED,
        on_resume=_DECIDED_LATER,
        planned_from__isnull=False,
        then=F("planned_from"),
    )
    return models.Case(is_decided_later, default=DatabaseNow())


def timetable_of(
    columns: tuple[Any, ...], calendar: tuple[int, UUID] | None, action: str
) -> Timetable:
    """Return the timetable of a row: its TIMETABLE_FIELDS, its calendar's id and revision.

    Remembered, so that a tick builds nothing for rules that it has seen. Raise
    TimetableError for the field that is wrong.
    """
    if calendar is None or action == Schedule.Excluded.SKIP:
        return _rule_of(columns)
    return _moved_rule_of(columns, calendar, action)


@functools.lru_cache(maxsize=16_384)
def _rule_of(columns: tuple[Any, ...]) -> Timetable:
    values = dict(zip(TIMETABLE_FIELDS, columns, strict=True))
    day, time_of_day = values.pop("calendar_date"), values.pop("calendar_time")
    start = None if day is None else datetime.combine(day, time_of_day or time())
    lines = [line for line in values["cron"].splitlines() if line.strip()]
    if values["kind"] != Schedule.Kind.CRON or len(lines) <= 1:
        return build(**values, calendar_start=start)
    if len(lines) > MAX_CRON_LINES:
        message = _("%(count)d rules: at most %(most)d, one in each line.")
        raise TimetableError("cron", message % {"count": len(lines), "most": MAX_CRON_LINES})
    return union([_line_of(values, number, line) for number, line in enumerate(lines, 1)])


def _line_of(values: dict[str, Any], number: int, line: str) -> Timetable:
    try:
        return build(**values | {"cron": line})
    except TimetableError as error:
        if error.field != "cron":
            raise
        message = _("Line %(number)d: %(problem)s")
        facts = {"number": number, "problem": error.message}
        raise TimetableError("cron", message % facts, token=error.token) from error


@functools.lru_cache(maxsize=1024)
def _moved_rule_of(columns: tuple[Any, ...], calendar: tuple[int, UUID], action: str) -> Timetable:
    return Excluding(
        timetable=_rule_of(columns), exclusions=exclusions_of(*calendar), action=action
    )
