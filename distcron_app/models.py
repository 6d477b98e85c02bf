"""The rows of distcron. Who may write what:

* people (admin, pages, command line) write a schedule's PERSON_FIELDS, guarded by
  ``version``: two editors cannot overwrite each other;
* the scheduler writes a schedule's ``next_run_at``, ``fencing_token`` and, where a
  row cannot run any more, ``state`` and ``state_reason``;
* ``Run.state`` is written by ``lifecycle`` only, ``Node`` rows by ``nodes`` only.

Foreign keys of history rows carry no database constraint: deleting a schedule of a
million runs is one row, and its history stays with the names as they were.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import models, transaction
from django.db.models import F, Q
from django.urls import reverse
from django.utils.translation import gettext, pgettext_lazy
from django.utils.translation import gettext_lazy as _

from distcron_app import registry, wakeup
from distcron_app.clock import utc_now
from distcron_app.errors import InvalidArguments, StaleVersion, TimetableError, UnknownJob
from distcron_app.instants import DatabaseNow, InstantField, database_now
from distcron_app.timetable import MAX_TEXT, Timetable, build, first_after
from distcron_app.wording import describe

__all__ = ["Attempt", "AuditEntry", "Node", "Run", "RunOutput", "Schedule"]


def default_timezone() -> str:
    """Return the project's zone, never UTC by accident."""
    return settings.TIME_ZONE


class ScheduleQuerySet(models.QuerySet["Schedule"]):
    """Verbs on schedules."""

    def due(self, within_seconds: float = 0.0) -> ScheduleQuerySet:
        """Return active schedules whose next instant has come, or comes within the seconds."""
        horizon = DatabaseNow(timedelta(seconds=within_seconds))
        return self.filter(state=Schedule.State.ACTIVE, next_run_at__lte=horizon).order_by(
            "next_run_at"
        )

    def unplanned(self) -> ScheduleQuerySet:
        """Return active schedules without a next instant: new rows, or edited past the model."""
        return self.filter(state=Schedule.State.ACTIVE, next_run_at=None)

    def overdue(self, seconds: float) -> ScheduleQuerySet:
        """Return active schedules that nobody has claimed for ``seconds`` after they were due."""
        return self.due(within_seconds=-seconds)

    def with_last_run(self) -> ScheduleQuerySet:
        """Annotate ``last_run_id``, the newest run of each schedule."""
        newest = Run.objects.filter(schedule=models.OuterRef("pk")).order_by("-id")
        return self.annotate(last_run_id=models.Subquery(newest.values("id")[:1]))

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
            state=planned.state,
            state_reason=planned.state_reason,
        )

    def write_claims(self, claimed: Collection[Schedule], batch_size: int) -> None:
        """Store where claimed schedules stand now; the scheduler's own write, as ``mark_invalid``.

        By a plain queryset: ``bulk_update`` goes through ``update``, which would count it as
        an edit, and every open form would be stale after each tick.
        """
        plain: models.QuerySet[Schedule] = models.QuerySet(Schedule, using=self.db)
        plain.bulk_update(
            claimed, ["next_run_at", "fencing_token", "state", "state_reason"], batch_size
        )

    def update(self, **values: Any) -> int:
        """Update rows; a change to what decides the next instant makes it be planned anew.

        ``update(state="active")`` therefore never runs an instant that passed while the
        schedule was paused, exactly as the admin's resume.
        """
        if PLANNING_FIELDS.intersection(values) and "next_run_at" not in values:
            values |= {"next_run_at": None, "planned_from": DatabaseNow()}
        if set(PERSON_FIELDS).intersection(values) and "version" not in values:
            values["version"] = F("version") + 1
        return super().update(**values)


class Schedule(models.Model):
    """One row that says which job runs when, with which arguments and policies."""

    class State(models.TextChoices):
        ACTIVE = "active", _("active")
        PAUSED = "paused", _("paused")  # by a person, with a reason
        EXHAUSTED = "exhausted", _("finished")  # no instant will come any more
        INVALID = "invalid", _("invalid")  # the row cannot run; state_reason says why

    class Kind(models.TextChoices):
        CRON = "cron", _("cron expression")
        INTERVAL = "interval", _("every N seconds")
        ONCE = "once", _("once")

    class Delivery(models.TextChoices):
        AT_MOST_ONCE = "at_most_once", _("at most once: never started twice, may be lost")
        AT_LEAST_ONCE = "at_least_once", _("at least once: run again after a crash")

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
        max_length=MAX_TEXT,
        blank=True,
        help_text=_("Five fields: minute hour day month weekday. For example: 30 2 * * mon-fri"),
    )
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
    starts_at = InstantField(_("not before"), null=True, blank=True)
    ends_at = InstantField(_("not after"), null=True, blank=True)
    delivery = models.CharField(
        _("delivery"),
        max_length=20,
        choices=Delivery,
        default=Delivery.AT_MOST_ONCE,
        help_text=_(
            "What a crash in the middle means. At most once: the run is shown as lost and a "
            "person decides. At least once: it runs again, so the job must be idempotent."
        ),
    )
    notes = models.TextField(_("notes"), blank=True)

    state = models.CharField(_("state"), max_length=10, choices=State, default=State.ACTIVE)
    state_reason = models.CharField(_("reason"), max_length=500, blank=True)
    state_by = models.CharField(_("changed by"), max_length=150, blank=True)
    state_at = InstantField(_("changed at"), null=True, blank=True)

    next_run_at = InstantField(_("next run"), null=True, blank=True, editable=False)
    planned_from = InstantField(null=True, blank=True, editable=False)
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
            ("pause_schedule", _("Can pause and resume a schedule")),
        ]
        indexes = [
            models.Index(fields=["state", "next_run_at"], name="distcron_schedule_due"),
        ]
        constraints = [
            models.CheckConstraint(
                name="distcron_schedule_state",
                condition=Q(state__in=["active", "paused", "exhausted", "invalid"]),
            ),
            models.CheckConstraint(
                name="distcron_schedule_kind", condition=Q(kind__in=["cron", "interval", "once"])
            ),
            models.CheckConstraint(
                name="distcron_schedule_delivery",
                condition=Q(delivery__in=["at_most_once", "at_least_once"]),
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

    def clean(self) -> None:
        """Refuse what could not run: the error names the field that is wrong."""
        problems: dict[str, list[Any]] = {}
        if self.kind != self.Kind.INTERVAL:
            self.interval_seconds = None
        elif self.interval_anchor is None:
            self.interval_anchor = utc_now().replace(microsecond=0)
        try:
            self.timetable()
        except TimetableError as error:
            problems[error.field] = [error.message]
        try:
            found = registry.get(self.job)
            self.arguments = found.dump(found.check(self.arguments))
        except UnknownJob as error:
            problems["job"] = [str(error)]
        except InvalidArguments as error:
            problems["arguments"] = [
                message if parameter == registry.WHOLE else f"{parameter}: {message}"
                for parameter, message in error.problems.items()
            ]
        if self.starts_at and self.ends_at and self.ends_at <= self.starts_at:
            problems["ends_at"] = [_("Must be later than “not before”.")]
        if problems:
            raise ValidationError(problems)

    def timetable(self) -> Timetable:
        """Return the rule as a timetable. Raise TimetableError for the field that is wrong."""
        return build(
            kind=self.kind,
            cron=self.cron,
            timezone=self.timezone,
            interval_seconds=self.interval_seconds,
            interval_anchor=self.interval_anchor,
            run_at=self.run_at,
        )

    def in_words(self) -> str:
        """Return the rule in words, in the active language; as it is stored where it is invalid."""
        try:
            return describe(self.timetable(), timezone=self.timezone)
        except TimetableError:
            return self.cron or str(self.get_kind_display())

    def first_after(self, instant: datetime) -> datetime | None:
        """Return the first instant after ``instant`` within the bounds, or None."""
        return first_after(
            self.timetable(), instant, starts_at=self.starts_at, ends_at=self.ends_at
        )

    def upcoming(self, count: int) -> list[datetime]:
        """Return the next ``count`` instants from ``next_run_at`` on; empty where nothing comes."""
        instants: list[datetime] = []
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
        newest = Run.objects.filter(schedule_id=self.pk).aggregate(at=models.Max("scheduled_at"))
        return max(start, newest["at"] or start)

    def plan_next(self, after: datetime) -> None:
        """Set ``next_run_at`` and ``state`` for a row that is not planned yet; saves nothing.

        A row that cannot run becomes ``invalid`` with the reason, one without a further
        instant ``exhausted``.
        """
        problem = self._problem()
        if problem:
            self.state, self.state_reason, self.next_run_at = self.State.INVALID, problem, None
            return
        self.next_run_at = self.first_after(after)
        if self.next_run_at is None:
            self.state = self.State.EXHAUSTED
            self.state_reason = str(_("No instant of the timetable is left."))

    def _problem(self) -> str:
        try:
            self.timetable()
            registry.get(self.job).check(self.arguments)
        except (TimetableError, UnknownJob, InvalidArguments) as error:
            return str(error)[:500]
        return ""

    def _planning_values(self) -> tuple[Any, ...]:
        return tuple(self.__dict__.get(name) for name in sorted(PLANNING_FIELDS))

    def _plan_after_edit(self, now: datetime) -> None:
        self.next_run_at = None
        self.planned_from = now
        self.updated_at = now
        if self.state in (self.State.INVALID, self.State.EXHAUSTED):
            # The edit may have mended the row; planning decides.
            self.state, self.state_reason = self.State.ACTIVE, ""
        if self.state == self.State.ACTIVE:
            self.plan_next(self.planning_start(now))

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
                fields |= {"next_run_at", "planned_from", "state", "state_reason"}
            self.version += 1
            super().save(update_fields=fields | {"version", "updated_at"}, **options)


PERSON_FIELDS = (
    "key",
    "name",
    "job",
    "arguments",
    "kind",
    "cron",
    "timezone",
    "interval_seconds",
    "interval_anchor",
    "run_at",
    "starts_at",
    "ends_at",
    "delivery",
    "notes",
    "state",
    "state_reason",
    "state_by",
    "state_at",
)
# A change to one of these makes the next instant be computed anew, from now.
PLANNING_FIELDS = frozenset(
    {
        "kind",
        "cron",
        "timezone",
        "interval_seconds",
        "interval_anchor",
        "run_at",
        "starts_at",
        "ends_at",
        "state",
    }
)


class NodeQuerySet(models.QuerySet["Node"]):
    """Verbs on nodes."""

    def alive(self) -> NodeQuerySet:
        """Return nodes whose lease has not expired by the database's clock."""
        return self.filter(state__in=Node.MEMBER_STATES, expires_at__gt=DatabaseNow())

    def expired(self, grace_seconds: float = 0.0) -> NodeQuerySet:
        """Return nodes that should be alive and whose lease ended ``grace_seconds`` ago."""
        limit = DatabaseNow(timedelta(seconds=-grace_seconds))
        return self.filter(state__in=Node.MEMBER_STATES, expires_at__lte=limit)


class Node(models.Model):
    """One ``runscheduler`` process; its id is fresh at each start, its name only a label."""

    class State(models.TextChoices):
        ACTIVE = "active", _("active")
        DRAINING = "draining", _("draining")  # takes no new claims, finishes what it has
        LEFT = "left", _("left")  # ended by itself
        DEAD = "dead", _("dead")  # lease expired; fenced for good

    MEMBER_STATES = ("active", "draining")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(_("name"), max_length=100)
    host = models.CharField(_("host"), max_length=255)
    pid = models.IntegerField(_("process id"))
    version = models.CharField(_("version"), max_length=40)
    state = models.CharField(_("state"), max_length=10, choices=State, default=State.ACTIVE)
    started_at = InstantField(_("started"))
    heartbeat_at = InstantField(_("heartbeat"))
    expires_at = InstantField(_("lease until"))
    slots = models.PositiveIntegerField(_("slots"), default=0)
    running = models.PositiveIntegerField(_("running"), default=0)
    tick_lag_ms = models.IntegerField(_("tick lag (ms)"), default=0)
    clock_offset_ms = models.IntegerField(_("clock offset (ms)"), default=0)
    alert = models.CharField(_("alert"), max_length=300, blank=True)

    objects = NodeQuerySet.as_manager()

    class Meta:
        verbose_name = _("node")
        verbose_name_plural = _("nodes")
        ordering = ["name", "started_at"]
        indexes = [models.Index(fields=["state", "expires_at"], name="distcron_node_lease")]

    def __str__(self) -> str:
        return f"{self.name} {str(self.id)[:8]}"


class RunQuerySet(models.QuerySet["Run"]):
    """Verbs on runs."""

    def open(self) -> RunQuerySet:
        """Return runs that are not final."""
        return self.filter(state__in=Run.OPEN_STATES)

    def active(self) -> RunQuerySet:
        """Return runs that hold their schedule: claimed, running, or queued between attempts."""
        return self.open().exclude(state=Run.State.QUEUED, attempt=0)

    def queued_due(self) -> RunQuerySet:
        """Return queued runs whose time has come, oldest first."""
        return self.filter(state=Run.State.QUEUED, due_at__lte=DatabaseNow()).order_by(
            "due_at", "id"
        )

    def orphaned(self) -> RunQuerySet:
        """Return claimed and running runs whose node is dead or left."""
        gone = Node.objects.exclude(state__in=Node.MEMBER_STATES).values("id")
        return self.filter(state__in=["claimed", "running"], node__in=gone)


class Run(models.Model):
    """One occurrence that ran or was decided upon, or one manual trigger.

    ``scheduled_at`` is the timetable's instant and None for a manual run, so that the
    unique key holds for the timetable's runs alone.
    """

    class State(models.TextChoices):
        QUEUED = "queued", _("queued")  # decided, waits for its time or a free slot
        CLAIMED = "claimed", _("claimed")  # owned by one node, not started
        RUNNING = "running", _("running")  # start committed; the code may have begun
        SUCCEEDED = "succeeded", _("succeeded")  # final
        FAILED = "failed", _("failed")  # final; reason says how
        CANCELLED = "cancelled", _("cancelled")  # final
        LOST = "lost", _("lost")  # started, outcome unknown; its owner may still report
        SKIPPED = "skipped", _("skipped")  # final: decided not to run

    class Trigger(models.TextChoices):
        TIMETABLE = "timetable", _("timetable")
        MANUAL = "manual", _("by hand")

    class Reason(models.TextChoices):
        NONE = "", ""
        ERROR = "error", _("the job raised an error")
        EXIT_CODE = "exit_code", _("the program ended with an error code")
        JOB_NOT_FOUND = "job_not_found", _("the job is not registered on the node")
        INVALID_ARGUMENTS = "invalid_arguments", _("the arguments do not fit the job")
        WORKER_DIED = "worker_died", _("the worker process ended")
        NODE_DIED = "node_died", _("the node stopped without finishing the run")
        SHUTDOWN = "shutdown", _("the node was stopped before the run ended")
        RECOVERY = "recovery", _("runs again after a crash")
        OVERLAP = "overlap", _("the previous run was still active")
        MISFIRE = "misfire", _("too late to run")
        COALESCED = "coalesced", _("folded into a later occurrence")
        DELETED = "deleted", _("the schedule was deleted")

    OPEN_STATES = ("queued", "claimed", "running")
    ACTIVE_STATES = ("claimed", "running")

    schedule = models.ForeignKey(
        Schedule,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        null=True,
        related_name="runs",
        verbose_name=_("schedule"),
    )
    schedule_name = models.CharField(_("schedule name"), max_length=200)
    job = models.CharField(_("job"), max_length=100)
    arguments = models.JSONField(_("arguments"), default=dict)
    delivery = models.CharField(_("delivery"), max_length=20, choices=Schedule.Delivery)
    trigger = models.CharField(
        _("trigger"), max_length=10, choices=Trigger, default=Trigger.TIMETABLE
    )
    triggered_by = models.CharField(_("triggered by"), max_length=150, blank=True)
    scheduled_at = InstantField(_("scheduled"), null=True)
    due_at = InstantField(_("due"))

    state = models.CharField(_("state"), max_length=10, choices=State)
    reason = models.CharField(_("reason"), max_length=20, choices=Reason, blank=True, default="")
    details = models.JSONField(_("details"), null=True, blank=True)
    attempt = models.PositiveIntegerField(_("attempt"), default=0)
    recoveries = models.PositiveIntegerField(_("recoveries"), default=0)
    fencing_token = models.BigIntegerField(_("fencing token"), default=0)
    owner_token = models.CharField(_("owner token"), max_length=32, blank=True, default="")
    node = models.ForeignKey(
        Node,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        null=True,
        related_name="runs",
        verbose_name=_("node"),
    )
    claimed_at = InstantField(_("claimed"), null=True)
    started_at = InstantField(_("started"), null=True)
    finished_at = InstantField(_("finished"), null=True)
    late = models.BooleanField(_("reported late"), default=False)
    progress_percent = models.FloatField(_("progress"), null=True)
    progress_message = models.CharField(_("progress message"), max_length=200, blank=True)
    result = models.JSONField(_("result"), null=True, blank=True)
    error = models.CharField(_("error"), max_length=500, blank=True, default="")

    objects = RunQuerySet.as_manager()

    class Meta:
        verbose_name = _("run")
        verbose_name_plural = _("runs")
        ordering = ["-id"]
        permissions = [("view_output", _("Can view the output of a run"))]
        indexes = [
            models.Index(fields=["schedule", "-id"], name="distcron_run_history"),
            models.Index(
                fields=["schedule", "state"],
                name="distcron_run_open",
                condition=Q(state__in=["queued", "claimed", "running"]),
            ),
        ]
        constraints = [
            # The arbiter: one row per occurrence, whatever happens to Redis.
            models.UniqueConstraint(
                fields=["schedule", "scheduled_at"], name="distcron_run_occurrence"
            ),
            models.CheckConstraint(
                name="distcron_run_state",
                condition=Q(
                    state__in=[
                        "queued",
                        "claimed",
                        "running",
                        "succeeded",
                        "failed",
                        "cancelled",
                        "lost",
                        "skipped",
                    ]
                ),
            ),
            models.CheckConstraint(
                name="distcron_run_owned",
                condition=~Q(state__in=["claimed", "running"]) | ~Q(owner_token=""),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.schedule_name} #{self.pk}"

    def get_absolute_url(self) -> str:
        return reverse("distcron:run", args=[self.pk])

    @property
    def is_final(self) -> bool:
        """Return True when no machine will change the state any more (a lost run's owner may)."""
        return self.state not in self.OPEN_STATES

    @property
    def duration_seconds(self) -> float | None:
        """Return how long the last attempt ran, or None while it is open or never started."""
        if self.started_at is None or self.finished_at is None:
            return None
        return float((self.finished_at - self.started_at).total_seconds())

    @property
    def lag_seconds(self) -> float | None:
        """Return how long after ``due_at`` the run started, or None when it did not."""
        if self.started_at is None:
            return None
        return float((self.started_at - self.due_at).total_seconds())


class RunOutput(models.Model):
    """The long text of a run, apart from the row so that lists stay fast."""

    run = models.OneToOneField(
        Run, on_delete=models.CASCADE, primary_key=True, related_name="text", verbose_name=_("run")
    )
    output = models.TextField(_("output"), blank=True)
    traceback = models.TextField(_("traceback"), blank=True)

    class Meta:
        verbose_name = _("run output")
        verbose_name_plural = _("run outputs")

    def __str__(self) -> str:
        return gettext("output of run %s") % self.run_id


class Attempt(models.Model):
    """One attempt that ended while its run went on, or that another node took over."""

    run = models.ForeignKey(
        Run, on_delete=models.CASCADE, related_name="attempts", verbose_name=_("run")
    )
    number = models.PositiveIntegerField(_("attempt"))
    node = models.ForeignKey(
        Node,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        null=True,
        related_name="+",
        verbose_name=_("node"),
    )
    fencing_token = models.BigIntegerField(_("fencing token"))
    started_at = InstantField(_("started"), null=True)
    ended_at = InstantField(_("ended"))
    reason = models.CharField(_("reason"), max_length=20, choices=Run.Reason)
    # What the attempt's own node reported after it had been superseded; it changed no run.
    late_state = models.CharField(
        _("late report"), max_length=10, choices=Run.State, blank=True, default=""
    )
    late_at = InstantField(_("late report at"), null=True)

    class Meta:
        verbose_name = _("attempt")
        verbose_name_plural = _("attempts")
        ordering = ["run", "number"]
        constraints = [
            models.UniqueConstraint(fields=["run", "fencing_token"], name="distcron_attempt_token")
        ]

    def __str__(self) -> str:
        facts = {"number": self.number, "run": self.run_id}
        return gettext("attempt %(number)s of run %(run)s") % facts


class AuditEntry(models.Model):
    """Who did what to which object, and why. Rows are only ever added."""

    class Via(models.TextChoices):
        ADMIN = "admin", _("admin")
        DASHBOARD = "dashboard", _("dashboard")
        CLI = "cli", _("command line")

    class Verb(models.TextChoices):
        ADD = "add", pgettext_lazy("verb", "add")
        CHANGE = "change", pgettext_lazy("verb", "change")
        DELETE = "delete", pgettext_lazy("verb", "delete")
        RUN_NOW = "run_now", _("run now")
        PAUSE = "pause", _("pause")
        RESUME = "resume", _("resume")

    at = InstantField(_("at"), default=utc_now)
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="+",
        verbose_name=_("user"),
    )
    actor = models.CharField(_("actor"), max_length=150)
    via = models.CharField(_("via"), max_length=20, choices=Via)
    verb = models.CharField(_("verb"), max_length=30, choices=Verb)
    object_type = models.CharField(_("object type"), max_length=30)
    object_id = models.CharField(_("object id"), max_length=40)
    object_label = models.CharField(_("object"), max_length=200)
    reason = models.CharField(_("reason"), max_length=500, blank=True)
    before = models.JSONField(_("before"), null=True, blank=True)
    after = models.JSONField(_("after"), null=True, blank=True)
    # One per submitted form: a double click finds the first entry instead of acting twice.
    idempotency_key = models.CharField(max_length=64, null=True, blank=True, unique=True)

    class Meta:
        verbose_name = _("audit entry")
        verbose_name_plural = _("audit entries")
        ordering = ["-id"]
        indexes = [models.Index(fields=["object_type", "object_id"], name="distcron_audit_object")]

    def __str__(self) -> str:
        return f"{self.actor}: {self.get_verb_display()} {self.object_label}"
