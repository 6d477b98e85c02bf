"""Wiring of the app: when Django is ready, checks and the sync are registered, jobs discovered."""

from __future__ import annotations

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.translation import gettext_lazy as _


class DistcronConfig(AppConfig):
    name = "distcron_app"
    label = "distcron"
    verbose_name = _("Distributed cron")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from distcron_app import builtin_jobs, checks, registry  # noqa: F401
        from distcron_app.sync import sync_after_migrate

        registry.autodiscover()
        post_migrate.connect(sync_after_migrate, sender=self, dispatch_uid="distcron_sync")
