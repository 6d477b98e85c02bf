"""Keeps two nodes from deciding about one scope at once: schedules with the same concurrency key.

The rows of two schedules do not serialize them, so each scope has a row that is locked
before the schedules. Without a concurrency key nothing of this costs a statement.
"""

from __future__ import annotations

from collections.abc import Collection

from django.db import connection

from distcron_app.models import ScopeLock, scope_bucket

__all__ = ["lock_scopes"]


def lock_scopes(keys: Collection[str], *, waits: bool = False) -> set[str]:
    """Lock the scopes until the transaction ends; return those that this call got.

    In key order, and before any schedule. What somebody else holds is left out, unless it
    ``waits`` for that. One statement, and more only where a row is missing or held; none
    without keys.
    """
    buckets = {key: scope_bucket(key) for key in keys if key}
    if not buckets:
        return set()
    wanted = set(buckets.values())
    locked = _lock(wanted, waits=waits)
    if locked != wanted:
        there = set(ScopeLock.objects.filter(pk__in=wanted).values_list("pk", flat=True))
        missing = sorted(wanted - there)
        ScopeLock.objects.bulk_create(map(ScopeLock, missing), ignore_conflicts=True)
        # Of two that insert the same one only one may go on: whoever locks it.
        locked |= _lock(missing, waits=waits)
    return {key for key, bucket in buckets.items() if bucket in locked}


def _lock(buckets: Collection[int], *, waits: bool) -> set[int]:
    can_skip = connection.features.has_select_for_update_skip_locked
    rows = ScopeLock.objects.select_for_update(skip_locked=can_skip and not waits)
    return set(rows.filter(pk__in=buckets).order_by("pk").values_list("pk", flat=True))
