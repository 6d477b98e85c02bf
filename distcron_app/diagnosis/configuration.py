"""The registered system checks of distcron, as findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from django.core import checks
from django.utils.translation import gettext as _

from distcron_app.diagnosis.finding import OK, PROBLEM, WARNING, Finding

__all__ = ["judge_messages", "look_at_settings"]


def look_at_settings() -> list[Finding]:
    """Return what the system checks say; no network."""
    return list(judge_messages(checks.run_checks(tags=["distcron"])))


def judge_messages(messages: Iterable[checks.CheckMessage]) -> Iterator[Finding]:
    """Yield a finding for each message that was not silenced, or one that all is well."""
    shown = [
        message
        for message in messages
        if message.level >= checks.WARNING and not message.is_silenced()
    ]
    if not shown:
        yield Finding(code="settings.checks", level=OK, text=_("the system checks pass"))
    for message in shown:
        yield Finding(
            code=message.id or "settings.checks",
            level=PROBLEM if message.level >= checks.ERROR else WARNING,
            text=str(message.msg),
            fix=str(message.hint or ""),
        )
