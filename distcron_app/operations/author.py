"""Who acts, why, and the key that makes a form that is sent twice act once."""

from __future__ import annotations

import dataclasses
import hashlib
from datetime import datetime
from typing import TYPE_CHECKING

from django.utils.translation import gettext as _

from distcron_app import audit
from distcron_app.instants import database_now
from distcron_app.models import AuditEntry

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractBaseUser
    from django.db.models import QuerySet

__all__ = ["REASON_LENGTH", "Author", "check_reason", "check_until", "entries_of", "row_key"]

REASON_LENGTH = 500


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """Who acts, from where, and for which reason."""

    actor: str
    user: AbstractBaseUser | None
    via: audit.Via
    reason: str


def check_reason(reason: str) -> None:
    """Raise ValueError for a reason that does not fit into the audit."""
    if len(reason) > REASON_LENGTH:
        message = _("Reason: %(length)s characters, allowed %(limit)s. Shorten it.")
        raise ValueError(message % {"length": len(reason), "limit": REASON_LENGTH})


def check_until(until: datetime | None) -> None:
    """Raise ValueError for an end, aware, that is over; None is no end."""
    if until is not None and until <= database_now():
        message = _("Until: %s is over. Choose a later time.")
        raise ValueError(message % until.isoformat(" ", "seconds"))


def row_key(verb: str, pk: int, idempotency_key: str | None) -> str | None:
    """Return the key of one row of a form that may name many; always 64 characters."""
    if not idempotency_key:
        return None
    return hashlib.sha256(f"{verb}:{pk}:{idempotency_key}".encode()).hexdigest()


def entries_of(key: str) -> QuerySet[AuditEntry]:
    """Return the entry that a form with this key has left, if any."""
    return AuditEntry.objects.filter(idempotency_key=key)
