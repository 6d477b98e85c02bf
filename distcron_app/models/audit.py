"""The audit: who did what, and why."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from distcron_app.clock import utc_now
from distcron_app.instants import InstantField

__all__ = ["AuditEntry"]


class AuditEntry(models.Model):
    """Who did what to which object, and why. Rows are only ever added."""

    class Via(models.TextChoices):
        ADMIN = "admin", _("admin")
        DASHBOARD = "dashboard", _("dashboard")
        CLI = "cli", _("command line")
        SCHEDULER = "scheduler", _("scheduler")
        CODE = "code", _("code")

    class Verb(models.TextChoices):
        ADD = "add", pgettext_lazy("verb", "add")
        CHANGE = "change", pgettext_lazy("verb", "change")
        DELETE = "delete", pgettext_lazy("verb", "delete")
        RUN_NOW = "run_now", _("run now")
        PAUSE = "pause", _("pause")
        RESUME = "resume", _("resume")
        RELEASE_LOCK = "release_lock", _("release lock")
        CANCEL = "cancel", pgettext_lazy("verb", "cancel")
        RUN_AGAIN = "run_again", _("run again")
        PRUNE = "prune", pgettext_lazy("verb", "prune")
        MAINTENANCE_ON = "maintenance_on", _("begin maintenance")
        MAINTENANCE_OFF = "maintenance_off", _("end maintenance")

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
