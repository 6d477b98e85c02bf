"""Locks: leases on batches of names, at levels from one machine to a quorum and a database."""

from distcron_app.locks.base import (
    Lease,
    LockBackend,
    LockInfo,
    named_lock_name,
    new_owner_token,
    occurrence_lock_name,
    schedule_id_of,
    schedule_lock_name,
)
from distcron_app.locks.levels import (
    Level,
    close_backends,
    get_backend,
    get_level,
    level_names,
    level_problem,
)

__all__ = [
    "Lease",
    "Level",
    "LockBackend",
    "LockInfo",
    "close_backends",
    "get_backend",
    "get_level",
    "level_names",
    "level_problem",
    "named_lock_name",
    "new_owner_token",
    "occurrence_lock_name",
    "schedule_id_of",
    "schedule_lock_name",
]
