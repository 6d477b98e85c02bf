"""Wiring of the app: checks are registered and jobs discovered when Django is ready."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DistcronConfig(AppConfig):
    name = "distcron_app"
    label = "distcron"
    verbose_name = _("Distributed cron")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from distcron_app import builtin_jobs, checks, registry  # noqa: F401

        registry.autodiscover()
