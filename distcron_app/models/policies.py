"""What a schedule does when things do not go as planned: columns, choices and their limits."""

from __future__ import annotations

import re
from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from distcron_app.conf import STANDARD
from distcron_app.locks import level_problem
from distcron_app.timetable import DEFAULT_CATCHUP_MAX

__all__ = ["POLICY_FIELDS", "Policies", "is_exclusive"]

POLICY_FIELDS = (
    "overlap",
    "max_active",
    "max_queued",
    "misfire",
    "misfire_grace_seconds",
    "catchup_window_seconds",
    "catchup_max",
    "catchup_per_minute",
    "start_deadline_seconds",
    "max_attempts",
    "backoff",
    "backoff_delays",
    "backoff_longest_seconds",
    "backoff_jitter",
    "retry_on",
    "give_up_on",
    "retry_stops_at_next",
    "on_resume",
    "auto_pause_after",
    "auto_pause_minutes",
    "run_timeout_seconds",
    "total_timeout_seconds",
    "kill_grace_seconds",
    "retry_on_timeout",
    "isolation",
    "memory_limit_mb",
    "max_recoveries",
    "concurrency_key",
    "queue",
    "priority",
    "lock_level",
    "keep_days",
    "keep_succeeded",
    "keep_failed",
)
_LONGEST_BACKOFF_SECONDS = 30 * 86_400
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
# Numbers of which 0 would mean never.
_AT_LEAST_ONE = (
    "max_active",
    "max_attempts",
    "misfire_grace_seconds",
    "catchup_max",
    "catchup_per_minute",
    "start_deadline_seconds",
    "auto_pause_after",
    "auto_pause_minutes",
)
# As for the project's settings of the same names.
_KEEP_AT_MOST = {"keep_days": 36_500, "keep_succeeded": 10_000_000, "keep_failed": 10_000_000}
_AT_MOST = {"auto_pause_after": 100, "auto_pause_minutes": 525_600}


class Policies(models.Model):
    """The policies of a schedule; docs/policies.md says what each choice means."""

    class Overlap(models.TextChoices):
        SKIP = "skip", _("skip the new one")
        QUEUE_ONE = "queue_one", _("let one wait, skip the others")
        QUEUE_ALL = "queue_all", _("let them wait, in order")
        REPLACE = "replace", _("stop the old one, then start the new one")
        ALLOW = "allow", _("run them side by side")

    class Misfire(models.TextChoices):
        RUN_LATEST = "run_latest", _("run the newest, fold the others into it")
        RUN_ALL = "run_all", _("run all, the oldest first")
        SKIP = "skip", _("run none of them")

    class OnResume(models.TextChoices):
        FROM_NOW = "from_now", _("go on from now: none of them runs")
        MISFIRE = "misfire", _("decide as after an outage")

    class Backoff(models.TextChoices):
        EXPONENTIAL = "exponential", _("twice as long each time")
        FIXED = "fixed", _("the same each time")
        LIST = "list", _("one after the other, as listed")

    class Jitter(models.TextChoices):
        FULL = "full", _("anything from 0 to it")
        EQUAL = "equal", _("a half of it to all of it")
        NONE = "none", _("exactly it")

    class Isolation(models.TextChoices):
        SHARED = "shared", _("a thread in one of the node's worker processes")
        OWN = "own", _("a process of its own")

    overlap = models.CharField(
        _("while a run is still active"),
        max_length=10,
        choices=Overlap,
        default=Overlap.SKIP,
        help_text=_("What becomes of an occurrence that is due while an earlier one still runs."),
    )
    max_active = models.PositiveSmallIntegerField(
        _("active runs at most"),
        null=True,
        blank=True,
        help_text=_("Empty: one, and no limit where runs may be side by side."),
    )
    max_queued = models.PositiveSmallIntegerField(
        _("waiting runs at most"),
        default=100,
        help_text=_("Where they wait in order; what comes beyond is skipped."),
    )
    misfire = models.CharField(
        _("occurrences that are late"),
        max_length=10,
        choices=Misfire,
        default=Misfire.RUN_LATEST,
        help_text=_("What to do after an outage. Each one leaves a row, or a span of them one."),
    )
    misfire_grace_seconds = models.PositiveIntegerField(
        _("late after (seconds)"),
        null=True,
        blank=True,
        help_text=_("How late is too late; empty takes the project's setting."),
    )
    catchup_window_seconds = models.PositiveIntegerField(
        _("look back (seconds)"),
        null=True,
        blank=True,
        help_text=_(
            "Late ones older than this never run. Empty: the period of the timetable, at least "
            "5 minutes and at most 24 hours."
        ),
    )
    catchup_max = models.PositiveSmallIntegerField(
        _("run at most"),
        default=DEFAULT_CATCHUP_MAX,
        help_text=_("Of the late ones, the newest so many, where all are run."),
    )
    catchup_per_minute = models.PositiveSmallIntegerField(
        _("at most in a minute"),
        null=True,
        blank=True,
        help_text=_("Empty: each as soon as the one before has ended."),
    )
    start_deadline_seconds = models.PositiveIntegerField(
        _("start within (seconds)"),
        null=True,
        blank=True,
        help_text=_("A run that could not start within this after its instant is skipped."),
    )
    max_attempts = models.PositiveSmallIntegerField(
        _("attempts at most"),
        default=1,
        help_text=_("How often a job that raises an error is tried. 1: no second time."),
    )
    backoff = models.CharField(
        _("pause before the next"), max_length=12, choices=Backoff, default=Backoff.EXPONENTIAL
    )
    backoff_delays = models.CharField(
        _("pause (seconds)"),
        max_length=200,
        default="10",
        help_text=_("One number, or several where they are listed: 10, 60, 300."),
    )
    backoff_longest_seconds = models.PositiveIntegerField(
        _("longest pause (seconds)"), default=3600
    )
    backoff_jitter = models.CharField(
        _("the pause is"),
        max_length=5,
        choices=Jitter,
        default=Jitter.FULL,
        help_text=_("Chance keeps jobs that failed together from trying again together."),
    )
    retry_on = models.TextField(
        _("errors that are tried again"),
        blank=True,
        help_text=_("Dotted names of exceptions, one in each line. Empty: all of them."),
    )
    give_up_on = models.TextField(
        _("errors that are final"),
        blank=True,
        help_text=_("Dotted names of exceptions, one in each line."),
    )
    retry_stops_at_next = models.BooleanField(
        _("no attempt past the next occurrence"), default=False
    )
    on_resume = models.CharField(
        _("instants of a pause"),
        max_length=10,
        choices=OnResume,
        default=OnResume.FROM_NOW,
        help_text=_("What becomes of them when the schedule is resumed."),
    )
    auto_pause_after = models.PositiveSmallIntegerField(
        _("pause after failures in a row"),
        null=True,
        blank=True,
        help_text=_(
            "So many runs that failed or were lost, one after the other, each with all its "
            "attempts. Runs by hand do not count. Empty: never."
        ),
    )
    auto_pause_minutes = models.PositiveIntegerField(
        _("then resume after (minutes)"),
        null=True,
        blank=True,
        help_text=_("Empty: it stays paused until somebody resumes it."),
    )
    run_timeout_seconds = models.PositiveIntegerField(
        _("an attempt takes at most (seconds)"),
        null=True,
        blank=True,
        help_text=_("Then it is told to stop. Empty: as long as it likes."),
    )
    total_timeout_seconds = models.PositiveIntegerField(
        _("all attempts take at most (seconds)"),
        null=True,
        blank=True,
        help_text=_("Counted from the start of the first one. Empty: no limit."),
    )
    kill_grace_seconds = models.PositiveSmallIntegerField(
        _("time to stop (seconds)"),
        default=10,
        help_text=_("A job in a process of its own that has not stopped by then is killed."),
    )
    retry_on_timeout = models.BooleanField(_("try again after a timeout"), default=False)
    isolation = models.CharField(
        _("isolation"),
        max_length=10,
        choices=Isolation,
        default=Isolation.SHARED,
        help_text=_(
            "In a process of its own a job can be killed, and its memory limited; a thread "
            "can only be asked to stop."
        ),
    )
    memory_limit_mb = models.PositiveIntegerField(
        _("memory at most (MB)"),
        null=True,
        blank=True,
        help_text=_("For a process of its own. Empty: no limit."),
    )
    max_recoveries = models.PositiveSmallIntegerField(
        _("recoveries at most"),
        default=1,
        help_text=_("How often a run whose node or worker died is run again, where it may be."),
    )
    concurrency_key = models.CharField(
        _("concurrency key"),
        max_length=200,
        blank=True,
        help_text=_(
            "Schedules with the same key count as one for overlapping runs. Arguments may be "
            "named: invoices-{customer}. Empty: each schedule by itself."
        ),
    )
    queue = models.SlugField(
        _("queue"),
        max_length=50,
        default="default",
        db_index=False,
        help_text=_("Only nodes that serve this queue run it."),
    )
    priority = models.SmallIntegerField(
        _("priority"), default=0, help_text=_("What has more goes first: -100 to 100.")
    )
    lock_level = models.CharField(
        _("lock level"),
        max_length=20,
        default=STANDARD,
        help_text=_(
            "Which lock keeps other nodes away while it runs. Standard goes on without Redis, "
            "since the database decides; the others stop until their lock can be had again."
        ),
    )
    keep_days = models.PositiveIntegerField(
        _("keep runs (days)"),
        null=True,
        blank=True,
        help_text=_("Older ones are deleted. Empty: the project's setting. 0: no limit."),
    )
    keep_succeeded = models.PositiveIntegerField(
        _("keep at most"),
        null=True,
        blank=True,
        help_text=_("Runs that succeeded, were skipped or cancelled; empty and 0 as before."),
    )
    keep_failed = models.PositiveIntegerField(
        _("keep failed at most"),
        null=True,
        blank=True,
        help_text=_("Runs that failed or are lost; empty and 0 as before."),
    )

    class Meta:
        abstract = True

    @property
    def active_limit(self) -> int | None:
        """Return how many runs may be active at once; None means any number."""
        if self.max_active is None and self.overlap == self.Overlap.ALLOW:
            return None
        return self.max_active or 1

    def delays(self) -> tuple[float, ...]:
        """Return the pauses between attempts in seconds. Raise ValueError for other text."""
        delays = tuple(float(part) for part in self.backoff_delays.replace(",", " ").split())
        if not delays or not all(0 <= delay <= _LONGEST_BACKOFF_SECONDS for delay in delays):
            raise ValueError(self.backoff_delays)
        return delays

    def policy_problems(self) -> dict[str, list[Any]]:
        """Return what is wrong with the policies, by field; nothing where they can be used."""
        problems = self._wrong_bounds() | self._wrong_retries()
        problem = level_problem(self.lock_level)
        return problems | ({"lock_level": [problem]} if problem else {})

    def _wrong_bounds(self) -> dict[str, list[Any]]:
        problems: dict[str, list[Any]] = {}
        for name in _AT_LEAST_ONE:
            if getattr(self, name) == 0:
                problems[name] = [_("At least 1, or empty.")]
        for name, most in _AT_MOST.items():
            if (getattr(self, name) or 0) > most:
                problems[name] = [_("At most %(most)d, or empty.") % {"most": most}]
        if self.auto_pause_minutes and not self.auto_pause_after:
            problems["auto_pause_minutes"] = [
                _("Is for a pause after failures. Say after how many.")
            ]
        for name, most in _KEEP_AT_MOST.items():
            if (getattr(self, name) or 0) > most:
                problems[name] = [_("At most %(most)d; 0 is no limit.") % {"most": most}]
        return problems

    def _wrong_retries(self) -> dict[str, list[Any]]:
        problems: dict[str, list[Any]] = {}
        try:
            delays = self.delays()
        except ValueError:
            message = _("Write numbers from 0 to %(most)d, such as 10 or 10, 60, 300.")
            problems["backoff_delays"] = [message % {"most": _LONGEST_BACKOFF_SECONDS}]
        else:
            if len(delays) > 1 and self.backoff != self.Backoff.LIST:
                problems["backoff_delays"] = [_("Several pauses are for the choice “as listed”.")]
        for name in ("retry_on", "give_up_on"):
            wrong = [each for each in getattr(self, name).split() if not _DOTTED.fullmatch(each)]
            if wrong:
                message = _("%(wrong)r is no dotted name, such as builtins.TimeoutError.")
                problems[name] = [message % {"wrong": wrong[0]}]
        return problems


def is_exclusive(overlap: str, max_active: int | None) -> bool:
    """Return True for a schedule of which one run at most is active at a time."""
    return max_active == 1 or (max_active is None and overlap != Policies.Overlap.ALLOW)
