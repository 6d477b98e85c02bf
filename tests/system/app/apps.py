"""Arms what a test asked for by environment variables, in each node as it starts."""

from __future__ import annotations

from django.apps import AppConfig


class SystemConfig(AppConfig):
    name = "tests.system.app"
    label = "system"

    def ready(self) -> None:
        from tests.system.app import failpoints, observer, weaknesses

        failpoints.install()
        observer.install()
        weaknesses.install()
