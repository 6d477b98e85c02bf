"""Locks: leases on batches of names, at levels from one machine to a quorum and a database."""

from distcron_app.locks.base import (
    Lease,
    LockBackend,
    LockInfo,
    is_scope_lock,
    named_lock_name,
    new_owner_token,
    occurrence_lock_name,
    schedule_id_of,
    schedule_lock_name,
    scope_lock_name,
)
from distcron_app.locks.database import pooling_problem
from distcron_app.locks.effects import EffectLock
from distcron_app.locks.levels import (
    Level,
    close_backends,
    get_backend,
    get_level,
    level_names,
    level_problem,
    part_backends,
)
from distcron_app.locks.named import Held, NamedLock, lock

__all__ = [
    "EffectLock",
    "Held",
    "Lease",
    "Level",
    "LockBackend",
    "LockInfo",
    "NamedLock",
    "close_backends",
    "get_backend",
    "get_level",
    "is_scope_lock",
    "level_names",
    "level_problem",
    "lock",
    "named_lock_name",
    "new_owner_token",
    "occurrence_lock_name",
    "part_backends",
    "pooling_problem",
    "schedule_id_of",
    "schedule_lock_name",
    "scope_lock_name",
]
