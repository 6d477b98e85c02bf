"""Who did what to which object, and why: one AuditEntry per change, never altered.

An entry is written in the transaction of the change that it describes, so that
neither exists without the other. Where the user is known, Django's LogEntry gets a
line too, for the history page of the admin. Secret arguments are masked before they
are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, time
from typing import TYPE_CHECKING, Any, Literal

from django.apps import apps
from django.db import models

from distcron_app import registry
from distcron_app.models import PERSON_FIELDS, AuditEntry, Schedule

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractBaseUser

__all__ = ["Via", "changes", "json_value", "masked", "record", "shown", "snapshot"]

Via = Literal["admin", "dashboard", "cli", "scheduler", "code"]

# Fields that say who changed the state; a diff would only repeat the entry's own columns.
_BOOKKEEPING = frozenset({"state_by", "state_at"})
_SHOWN_LENGTH = 200


def record(
    *,
    actor: str,
    user: AbstractBaseUser | None = None,
    via: Via,
    verb: str,
    target: models.Model | type[models.Model] | str,
    reason: str = "",
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    idempotency_key: str | None = None,
    log_message: str | list[dict[str, Any]] = "",
) -> AuditEntry:
    """Write one entry, and a LogEntry where ``user`` is given and the admin is installed.

    ``target`` is the row that was changed, a model where many rows were, or the name of a
    lock that belongs to no row.
    ``log_message`` replaces the text of the LogEntry. Raise IntegrityError when an entry
    has the idempotency key already.
    """
    entry = AuditEntry.objects.create(
        actor=actor[:150],
        user_id=None if user is None else user.pk,
        via=via,
        verb=verb,
        **_object(target),
        reason=reason,
        before=None if before is None else masked(before),
        after=None if after is None else masked(after),
        idempotency_key=idempotency_key,
    )
    in_admin = apps.is_installed("django.contrib.admin")
    if user is not None and in_admin and isinstance(target, models.Model):
        _mirror(entry, user, target, log_message or _sentence(entry))
    return entry


def snapshot(schedule: Schedule) -> dict[str, Any]:
    """Return what people may edit of a schedule, as JSON values; secrets are not masked."""
    return {name: json_value(getattr(schedule, name)) for name in PERSON_FIELDS}


def changes(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parts of two snapshots that differ, as (before, after), secrets masked."""
    names = [name for name in after if name not in _BOOKKEEPING and before.get(name) != after[name]]
    return (
        masked({name: before.get(name) for name in names}),
        masked({name: after[name] for name in names}),
    )


def json_value(value: Any) -> Any:
    """Return a column's value for a snapshot; an instant in UTC, a row by its name."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, (date, time)):
        return value.isoformat()
    return str(value) if isinstance(value, models.Model) else value


def masked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy in which the secrets among ``arguments`` read ``••••``."""
    arguments = values.get("arguments")
    if not isinstance(arguments, Mapping):
        return dict(values)
    return {**values, "arguments": registry.masked_arguments(arguments)}


def shown(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str:
    """Return a difference as text: ``cron: 0 2 * * * → 0 3 * * *``; values where none was."""
    if before is None or after is None:
        return "; ".join(
            f"{name}: {_short(value)}" for name, value in (before or after or {}).items()
        )
    return "; ".join(
        f"{name}: {_short(before.get(name))} → {_short(value)}" for name, value in after.items()
    )


def _sentence(entry: AuditEntry) -> str:
    difference = shown(entry.before, entry.after)
    parts = [
        entry.get_verb_display(),
        entry.reason and f"“{entry.reason}”",
        difference and f"({difference})",
    ]
    return " ".join(part for part in parts if part)


def _object(target: models.Model | type[models.Model] | str) -> dict[str, str]:
    if isinstance(target, str):
        return {"object_type": "lock", "object_id": target[:40], "object_label": target[:200]}
    if isinstance(target, type):
        label = str(target._meta.verbose_name_plural)
        return {
            "object_type": target._meta.model_name or "",
            "object_id": "",
            "object_label": label,
        }
    return {
        "object_type": target._meta.model_name or "",
        "object_id": str(target.pk),
        "object_label": str(target)[:200],
    }


def _short(value: Any) -> str:
    text = "∅" if value in (None, "", {}) else str(value)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}…"


def _mirror(
    entry: AuditEntry,
    user: AbstractBaseUser,
    target: models.Model,
    message: str | list[dict[str, Any]],
) -> None:
    # The admin is optional; its models cannot be imported where it is not installed.
    from django.contrib.admin.models import ADDITION, CHANGE, DELETION, LogEntry

    flags = {"add": ADDITION, "delete": DELETION}
    LogEntry.objects.log_actions(
        user_id=user.pk,
        queryset=[target],
        action_flag=flags.get(entry.verb, CHANGE),
        change_message=message,
        single_object=True,
    )
