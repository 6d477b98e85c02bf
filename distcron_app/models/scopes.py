"""What serializes the claims of one scope: schedules with the same concurrency key."""

from __future__ import annotations

import hashlib

from django.db import models

__all__ = ["SCOPE_BUCKETS", "ScopeLock", "scope_bucket"]

# Scopes share so many rows by the hash of their key: none has to be made or deleted with
# them, and two of one bucket only wait for each other's transaction.
SCOPE_BUCKETS = 256


class ScopeLock(models.Model):
    """A row to lock: who holds it decides about every scope of its bucket, nobody else."""

    bucket = models.PositiveSmallIntegerField(primary_key=True)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.bucket)


def scope_bucket(concurrency_key: str) -> int:
    """Return the bucket of a scope, from the key with its arguments filled in."""
    digest = hashlib.sha256(concurrency_key.encode()).digest()
    return int.from_bytes(digest[:4], "big") % SCOPE_BUCKETS
