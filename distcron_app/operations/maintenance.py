"""The switch that keeps all nodes from claiming."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from django.db import transaction
from django.utils.translation import gettext as _

from distcron_app import audit, wakeup
from distcron_app.instants import database_now
from distcron_app.models import Maintenance
from distcron_app.operations.author import Author, check_reason, check_until

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractBaseUser

__all__ = ["begin_maintenance", "end_maintenance"]


def begin_maintenance(
    *,
    reason: str,
    actor: str,
    user: AbstractBaseUser | None = None,
    via: audit.Via,
    until: datetime | None = None,
) -> Maintenance:
    """Keep all nodes from claiming, from their next sweep on; return the switch.

    What runs is finished, and what comes due stays due. At ``until`` it ends by itself.
    Where it is on already, reason and end are replaced. Raise ValueError without a reason,
    or for an ``until`` that is over.
    """
    if not reason.strip():
        raise ValueError(_("Reason: missing. Say why, for whoever finds that nothing starts."))
    check_until(until)
    author = Author(actor=actor, user=user, via=via, reason=reason.strip())
    with transaction.atomic():
        return _switch(author, is_on=True, until=until)


def end_maintenance(
    *,
    reason: str = "",
    actor: str,
    user: AbstractBaseUser | None = None,
    via: audit.Via,
) -> Maintenance | None:
    """Let the nodes claim again; return the switch, or None where it was off.

    What came due meanwhile is late, and decided by the misfire policy of its schedule.
    """
    author = Author(actor=actor, user=user, via=via, reason=reason.strip())
    with transaction.atomic():
        if not Maintenance.objects.on().select_for_update().exists():
            return None
        return _switch(author, is_on=False, until=None)


def _switch(author: Author, *, is_on: bool, until: datetime | None) -> Maintenance:
    check_reason(author.reason)
    row, _created = Maintenance.objects.select_for_update().get_or_create(pk=Maintenance.ONLY)
    before = {"is_on": row.is_on, "until": audit.json_value(row.until)}
    row.is_on, row.until, row.reason = is_on, until, author.reason
    row.by, row.at = author.actor[:150], database_now()
    row.save()
    audit.record(
        actor=author.actor,
        user=author.user,
        via=author.via,
        verb="maintenance_on" if is_on else "maintenance_off",
        target=row,
        reason=author.reason,
        before=before,
        after={"is_on": is_on, "until": audit.json_value(until)},
    )
    transaction.on_commit(wakeup.announce)
    return row
