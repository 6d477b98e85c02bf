"""Who acts, why, and the key that makes a form that is sent twice act once."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from distcron_app import audit, wakeup
from distcron_app.instants import database_now
from distcron_app.models import AuditEntry

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractBaseUser
    from django.db.models import QuerySet

__all__ = [
    "REASON_LENGTH",
    "Author",
    "check_reason",
    "check_until",
    "done_before",
    "entries_of",
    "once",
    "row_key",
]

REASON_LENGTH = 500
T = TypeVar("T")
# Reads what was done from what the audit entry says of it.
Done = Callable[[dict[str, Any]], T | None]


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


def done_before(key: str | None, done: Done[T]) -> T | None:
    """Return what a form with this key did, as ``done`` reads its entry; None for a new one."""
    entry = None if key is None else entries_of(key).first()
    return None if entry is None or entry.after is None else done(entry.after)


def once(key: str | None, done: Done[T], act: Callable[[], T], *refusals: type[Exception]) -> T:
    """Return what a form with this key did before, else ``act`` in a transaction, tell the nodes.

    Of two clicks at once one commits first; ``act`` of the other meets its audit entry, or one
    of the ``refusals``, and what the first did is returned. Any other refusal is raised.
    """
    earlier = done_before(key, done)
    if earlier is not None:
        return earlier
    raced: tuple[type[Exception], ...] = (IntegrityError, *refusals)
    try:
        with transaction.atomic():
            acted = act()
            transaction.on_commit(wakeup.announce)
    except raced:
        earlier = done_before(key, done)
        if earlier is None:
            raise
        return earlier
    return acted
