"""Runs, their attempts and their long text."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.db import models
from django.db.models import Exists, Q
from django.db.models.functions import MD5, Coalesce
from django.urls import reverse
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from distcron_app.instants import DatabaseNow, InstantField
from distcron_app.models.backfills import Backfill
from distcron_app.models.nodes import Node
from distcron_app.models.schedules import Schedule

__all__ = ["Attempt", "Run", "RunDay", "RunOutput", "RunQuerySet", "ended_attempt"]


# Behind every priority.
_LAST_RANK = 1000


class RunQuerySet(models.QuerySet["Run"]):
    """Verbs on runs."""

    def open(self) -> RunQuerySet:
        """Return runs that are not final."""
        return self.filter(state__in=Run.OPEN_STATES)

    def active(self) -> RunQuerySet:
        """Return runs that hold their schedule: claimed, running, or queued between attempts."""
        return self.open().exclude(state=Run.State.QUEUED, attempt=0)

    def over_limit(self) -> RunQuerySet:
        """Return running runs that take longer than their limit."""
        return self.filter(state=Run.State.RUNNING, over_limit_at__isnull=False)

    def in_the_way(self) -> RunQuerySet:
        """Return open runs behind which another one of their schedule would have to wait."""
        return self.open().exclude(_waits_in_backfill())

    def queued_due(self, within_seconds: float = 0.0) -> RunQuerySet:
        """Return queued runs whose time has come, or comes within the seconds.

        Those whose time has come are first: by priority, the highest first, of the same
        one the oldest. Without those that wait in a backfill: thousands of them would fill
        each read.
        """
        horizon = DatabaseNow(timedelta(seconds=within_seconds))
        is_due = models.Q(due_at__lte=DatabaseNow())
        # What is still to come must not fill the batch, whatever its priority.
        rank = models.Case(models.When(is_due, then=-models.F("priority")), default=_LAST_RANK)
        queued = self.filter(state=Run.State.QUEUED, due_at__lte=horizon)
        return queued.exclude(_waits_in_backfill()).order_by(rank, "due_at", "id")

    def next_of_backfills(self, within_seconds: float = 0.0) -> RunQuerySet:
        """Return the next run of each active backfill that may start one by its own rule.

        Asks at once which those are, by one query, and nothing more where there are none.
        What a run that waits for its next attempt keeps is seen by the claim.
        """
        waiting = Run.objects.filter(_waits_in_backfill(), backfill=models.OuterRef("pk"))
        first = models.Subquery(waiting.order_by("nominal_at").values("pk")[:1])
        found = Backfill.objects.active().order_by().annotate(first=first)
        ids = [pk for pk in found.values_list("first", flat=True) if pk is not None]
        if not ids:
            return self.none()
        active = Run.objects.filter(
            schedule=models.OuterRef("schedule"), state__in=Run.ACTIVE_STATES
        ).order_by()
        of_backfill = (
            active.filter(backfill=models.OuterRef("backfill"))
            .values("backfill")
            .annotate(count=models.Count("pk"))
            .values("count")
        )
        alone = Q(backfill__overlap=Backfill.Overlap.ONE_BY_ONE) & Q(~Exists(active))
        beside = Q(backfill__overlap=Backfill.Overlap.SIDE_BY_SIDE) & (
            Q(backfill__most_active=None) | Q(beside__lt=models.F("backfill__most_active"))
        )
        return (
            self.filter(pk__in=ids, due_at__lte=DatabaseNow(timedelta(seconds=within_seconds)))
            .annotate(beside=Coalesce(models.Subquery(of_backfill), 0))
            .filter(alone | beside)
            .order_by("due_at", "id")
        )

    def startable(self) -> RunQuerySet:
        """Leave out queued runs that must wait for others of their schedule, or scope.

        They would fill the batch of each read, and stand before the one that they wait for: a
        run between two attempts keeps its place, and is due later than what waits behind it.
        A spread occurrence stays in: what becomes of it is decided when it is due.
        """
        limit = models.Case(
            models.When(schedule__max_active__isnull=False, then="schedule__max_active"),
            models.When(schedule__overlap=Schedule.Overlap.ALLOW, then=models.Value(2**31 - 1)),
            default=models.Value(1),
        )
        # As equal as Python finds keys: a collation may take more for the same.
        exactly = MD5("concurrency_key")
        executing = Run.objects.filter(state__in=Run.ACTIVE_STATES)
        of_schedule = executing.filter(schedule=models.OuterRef("schedule"))
        of_scope = (
            executing.exclude(concurrency_key="")
            .filter(concurrency_key=models.OuterRef("concurrency_key"))
            .annotate(exactly=exactly)
            .filter(exactly=MD5(models.OuterRef("concurrency_key")))
        )
        count = models.Case(
            models.When(concurrency_key="", then=_count(of_schedule, "schedule")),
            default=_count(of_scope, "concurrency_key"),
        )
        # With the runs between attempts as many as may be active. Counted once for all rows:
        # for each row it would take the square of a long queue. Schedules of one scope may
        # have limits of their own, so there the runs between attempts count by themselves.
        active = Run.objects.active().order_by()
        schedules = _full(active.annotate(of=Coalesce("schedule_id", 0)), limit)
        between = active.filter(state=Run.State.QUEUED).exclude(concurrency_key="")
        scopes = _full(between.annotate(of=exactly), limit)
        is_alone = Q(concurrency_key="")
        is_crowded = Q(is_alone, schedule__in=schedules) | Q(~is_alone, exactly__in=scopes)
        has_place = Q(attempt__gt=0) | ~is_crowded
        is_spread = Q(due_at__gt=models.F("scheduled_at"), attempt=0, reason="")
        return self.annotate(
            executing_count=Coalesce(count, 0), limit=limit, exactly=exactly
        ).filter(is_spread | Q(has_place, executing_count__lt=models.F("limit")))

    def orphaned(self) -> RunQuerySet:
        """Return claimed and running runs whose node is dead or left."""
        gone = Node.objects.exclude(state__in=Node.MEMBER_STATES).values("id")
        return self.filter(state__in=["claimed", "running"], node__in=gone)


def _full(runs: Any, limit: models.Case) -> Any:
    """Return by ``of``, an annotation, what has as many of these runs as may be active."""
    counted = runs.values("of").annotate(
        # The same in each row of a schedule; MariaDB asks for an aggregate here.
        count=models.Count("pk"),
        limit=models.Max(limit),
    )
    return counted.filter(count__gte=models.F("limit")).values("of")


def _count(runs: RunQuerySet, column: str) -> models.Subquery:
    counted = runs.order_by().values(column).annotate(count=models.Count("pk"))
    return models.Subquery(counted.values("count"))


class Run(models.Model):
    """One occurrence that ran or was decided upon, or one run on request.

    ``scheduled_at`` is the timetable's instant and None for a run on request, so that the
    unique key holds for the timetable's runs alone. ``nominal_at`` is the instant that a
    run on request stands for: each of a backfill, one by hand where somebody gave it one.
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
        CHAIN = "chain", _("another schedule")
        BACKFILL = "backfill", _("backfill")

    class Reason(models.TextChoices):
        NONE = "", ""
        ERROR = "error", _("the job raised an error")
        EXIT_CODE = "exit_code", _("the program ended with an error code")
        JOB_NOT_FOUND = "job_not_found", _("the job is not registered on the node")
        INVALID_ARGUMENTS = "invalid_arguments", _("the arguments do not fit the job")
        TIMEOUT = "timeout", _("it took longer than its limit")
        WORKER_DIED = "worker_died", _("the worker process ended")
        NODE_DIED = "node_died", _("the node stopped without finishing the run")
        CANCELLED = "cancelled", _("it was told to stop")
        RELEASED = "released", _("its lock was released by a person")
        LEASE_LOST = "lease_lost", _("the job stopped because its lease was lost")
        SHUTDOWN = "shutdown", _("the node was stopped before the run ended")
        STALE = "stale", _("it no longer owned the run, so its writes were undone")
        AGAIN = "again", _("started again by a person")
        RETRY = "retry", _("waits for its next attempt")
        RECOVERY = "recovery", _("runs again after a crash")
        OVERLAP = "overlap", _("the previous run was still active")
        MISFIRE = "misfire", _("too late to run")
        COALESCED = "coalesced", _("folded into a later occurrence")
        CATCH_UP = "catch_up", _("runs late, after an outage")
        EXPIRED = "expired", _("it could not start in time")
        CALENDAR = "calendar", _("excluded by a calendar")
        PAUSED = "paused", _("the schedule was paused")
        DELETED = "deleted", _("the schedule was deleted")
        INVALID = "invalid", _("the schedule is invalid")
        CHAIN_DEPTH = "chain_depth", _("the chain of schedules is too long")

    # What no person asked for: it says how the schedule is doing by itself.
    AUTOMATIC_TRIGGERS = (Trigger.TIMETABLE, Trigger.CHAIN)
    OPEN_STATES = ("queued", "claimed", "running")
    ACTIVE_STATES = ("claimed", "running")
    # From these a person may start a run again.
    AGAIN_STATES = ("failed", "cancelled", "lost")
    # Why an attempt ended that was cut off in the middle: the next one is a recovery.
    CUT_OFF_REASONS = ("node_died", "worker_died", "released", "lease_lost", "shutdown")
    # How history is kept: bad ends longer than the others.
    ENDED_STATES = ("succeeded", "skipped", "cancelled")
    BROKEN_STATES = ("failed", "lost")

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
    # Of the schedule when the run was decided upon.
    queue = models.CharField(_("queue"), max_length=50, default="default")
    priority = models.SmallIntegerField(_("priority"), default=0)
    # The concurrency key with the arguments filled in; empty where there is none.
    concurrency_key = models.CharField(_("concurrency key"), max_length=200, blank=True, default="")
    parent = models.ForeignKey(
        "self",
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        null=True,
        related_name="children",
        verbose_name=_("started by the run"),
    )
    scheduled_at = InstantField(_("scheduled"), null=True)
    nominal_at = InstantField(_("for the instant"), null=True)
    backfill = models.ForeignKey(
        Backfill,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        null=True,
        related_name="runs",
        verbose_name=_("backfill"),
    )
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
    # Of the first attempt since the run was queued by the timetable or a person.
    first_started_at = InstantField(_("first started"), null=True)
    # Since when the attempt that runs, or ran last, is over its limit.
    over_limit_at = InstantField(_("over its limit since"), null=True)
    finished_at = InstantField(_("finished"), null=True)
    cancel_requested_at = InstantField(_("asked to stop"), null=True)
    cancel_cause = models.CharField(_("why it was asked"), max_length=200, blank=True, default="")
    late = models.BooleanField(_("reported late"), default=False)
    progress_percent = models.FloatField(_("progress"), null=True)
    progress_message = models.CharField(_("progress message"), max_length=200, blank=True)
    # The last thing the job wanted to be remembered for a recovery or a further attempt.
    checkpoint = models.JSONField(_("checkpoint"), null=True, blank=True)
    result = models.JSONField(_("result"), null=True, blank=True)
    error = models.CharField(_("error"), max_length=500, blank=True, default="")

    objects = RunQuerySet.as_manager()

    class Meta:
        verbose_name = _("run")
        verbose_name_plural = _("runs")
        ordering = ["-id"]
        permissions = [
            ("view_output", _("Can view the output of a run")),
            ("cancel_run", _("Can cancel a run")),
        ]
        indexes = [
            models.Index(fields=["schedule", "-id"], name="distcron_run_history"),
            models.Index(
                fields=["-id"],
                name="distcron_run_trouble",
                condition=Q(state__in=["failed", "lost"]),
            ),
            # For pruning and charts.
            models.Index(
                fields=["schedule", "state", "finished_at"],
                name="distcron_run_ended",
                condition=Q(finished_at__isnull=False),
            ),
            models.Index(
                fields=["schedule", "state"],
                name="distcron_run_open",
                condition=Q(state__in=["queued", "claimed", "running"]),
            ),
            models.Index(
                fields=["schedule", "nominal_at"],
                name="distcron_run_nominal",
                condition=Q(nominal_at__isnull=False),
            ),
            models.Index(
                fields=["concurrency_key"],
                name="distcron_run_scope",
                condition=Q(state__in=["queued", "claimed", "running"]) & ~Q(concurrency_key=""),
            ),
        ]
        constraints = [
            # The arbiter: one row per occurrence, whatever happens to Redis.
            models.UniqueConstraint(
                fields=["schedule", "scheduled_at"], name="distcron_run_occurrence"
            ),
            models.UniqueConstraint(
                fields=["backfill", "nominal_at"], name="distcron_run_backfill"
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
    def instant(self) -> datetime | None:
        """Return the instant that the run stands for, None for one by hand without any."""
        instant: datetime | None = self.scheduled_at or self.nominal_at
        return instant

    @property
    def waits_in_backfill(self) -> bool:
        """Return True for a run of a backfill that has not had its turn yet."""
        is_queued = self.state == self.State.QUEUED and self.attempt == 0 and not self.reason
        return is_queued and self.backfill_id is not None

    @property
    def is_held_back(self) -> bool:
        """Return True for a spread occurrence about which nothing was decided yet."""
        spread = self.scheduled_at is not None and self.due_at > self.scheduled_at
        return spread and self.attempt == 0 and not self.reason

    @property
    def is_undecided(self) -> bool:
        """Return True where a pause of its schedule still keeps it from running.

        So it is with a spread occurrence, and with a run that another schedule has started.
        """
        is_followed_up = self.trigger == self.Trigger.CHAIN and self.attempt == 0
        return self.is_held_back or (is_followed_up and self.reason != self.Reason.AGAIN)

    @property
    def is_final(self) -> bool:
        """Return True when no machine will change the state any more (a lost run's owner may)."""
        return self.state not in self.OPEN_STATES

    @property
    def is_over_limit(self) -> bool:
        """Return True while the job goes on although it took longer than its limit."""
        return self.state == self.State.RUNNING and self.over_limit_at is not None

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
    error = models.CharField(_("error"), max_length=500, blank=True, default="")
    # How far it had come, as far as it told.
    progress_percent = models.FloatField(_("progress"), null=True)
    progress_message = models.CharField(_("progress message"), max_length=200, blank=True)
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


class RunDay(models.Model):
    """What was pruned of one schedule's runs that ended on one day in UTC, for charts.

    Only pruning writes it, in the transaction that deletes the runs: what is left of them
    and these rows add up to the same totals at any moment.
    """

    schedule = models.ForeignKey(
        Schedule,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="pruned_days",
        verbose_name=_("schedule"),
    )
    day = models.DateField(_("day"))
    succeeded = models.PositiveBigIntegerField(_("succeeded"), default=0)
    failed = models.PositiveBigIntegerField(_("failed"), default=0)
    cancelled = models.PositiveBigIntegerField(_("cancelled"), default=0)
    lost = models.PositiveBigIntegerField(_("lost"), default=0)
    skipped = models.PositiveBigIntegerField(_("skipped"), default=0)
    # Of the runs that started and ended; the others took no time that is known.
    timed = models.PositiveBigIntegerField(_("runs with a duration"), default=0)
    total_seconds = models.FloatField(_("duration of all (seconds)"), default=0.0)
    longest_seconds = models.FloatField(_("longest duration (seconds)"), default=0.0)

    class Meta:
        verbose_name = _("pruned day")
        verbose_name_plural = _("pruned days")
        constraints = [
            models.UniqueConstraint(fields=["schedule", "day"], name="distcron_runday_day")
        ]

    def __str__(self) -> str:
        return f"{self.schedule_id} {self.day}"


def _waits_in_backfill() -> Q:
    """Return the condition of ``Run.waits_in_backfill``."""
    return Q(state=Run.State.QUEUED, attempt=0, reason="", backfill__isnull=False)


def ended_attempt(run: Run, reason: str, at: datetime, error: str = "") -> Attempt:
    """Return the record of the attempt that ends now while its run goes on; saves nothing."""
    return Attempt(
        run=run,
        number=run.attempt,
        node_id=run.node_id,
        fencing_token=run.fencing_token,
        started_at=run.started_at,
        ended_at=at,
        reason=reason,
        error=error,
        progress_percent=run.progress_percent,
        progress_message=run.progress_message,
    )
