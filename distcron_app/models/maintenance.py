"""The switch that keeps all nodes from claiming."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from distcron_app.instants import DatabaseNow, InstantField

__all__ = ["Maintenance"]


class MaintenanceQuerySet(models.QuerySet["Maintenance"]):
    """Verbs on the switch."""

    def on(self) -> MaintenanceQuerySet:
        """Return the row while the switch is on and its end has not come, else nothing."""
        lasts = Q(until=None) | Q(until__gt=DatabaseNow())
        return self.filter(lasts, pk=Maintenance.ONLY, is_on=True)


class Maintenance(models.Model):
    """The one row of the switch. While it is on, nodes claim nothing and finish what runs."""

    ONLY = 1

    id = models.PositiveSmallIntegerField(primary_key=True, default=ONLY)
    is_on = models.BooleanField(_("on"), default=False)
    until = InstantField(_("until"), null=True, blank=True)
    reason = models.CharField(_("reason"), max_length=500, blank=True)
    by = models.CharField(_("by"), max_length=150, blank=True)
    at = InstantField(_("at"), null=True, blank=True)

    objects = MaintenanceQuerySet.as_manager()

    class Meta:
        verbose_name = _("maintenance")
        verbose_name_plural = _("maintenance")

    def __str__(self) -> str:
        return gettext("maintenance")
