"""What every lock backend offers: leases on batches of names.

A lock is a gate: it keeps nodes out of each other's way. Who owns a run is decided
by the database, so a lost lock costs work and never correctness.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import secrets
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta

__all__ = [
    "Lease",
    "LockBackend",
    "LockInfo",
    "checked_ttl",
    "is_scope_lock",
    "named_lock_name",
    "new_owner_token",
    "occurrence_lock_name",
    "schedule_id_of",
    "schedule_lock_name",
    "scope_lock_name",
]

_EPOCH = datetime.fromtimestamp(0, UTC)
_MILLISECOND = timedelta(milliseconds=1)
_SCOPE = "scope:"
# Digits of a 64-bit id; a longer one would overflow in the database.
_LONGEST_ID = 19


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A lock held until ``expires_at``, in seconds of ``Clock.monotonic()``.

    The end is counted from before the request was sent, so the backend never drops
    the lock earlier than the holder believes.
    """

    name: str
    owner_token: str
    expires_at: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LockInfo:
    """A held lock as people see it.

    ``owner_token`` is None when it cannot be read; ``note`` is the label of the holder.
    ``ttl_ms`` is what is left of ``granted_ms``, the TTL of the last grant; it is None when
    the lock never expires, which only a foreign hand can cause, and for a database lock of
    another node, whose TTL only that node knows. ``age_ms`` counts from the
    first grant and ``renewals`` those since; all three are None where they are not known.
    """

    name: str
    owner_token: str | None
    note: str
    ttl_ms: int | None
    granted_ms: int | None = None
    age_ms: int | None = None
    renewals: int | None = None


class LockBackend(abc.ABC):
    """Mutual exclusion by name between nodes. Every method may be called by any thread.

    Every method raises LockUnavailable when the backend did not answer or refused;
    then nothing is known about who owns the locks.
    """

    name: str
    # "open" only for a backend behind a Breaker that has given up for the moment.
    state: str = "closed"

    @abc.abstractmethod
    def acquire(self, wanted: Mapping[str, str], ttl_ms: int) -> dict[str, Lease]:
        """Take the locks that are free and return them by name; losing is no error.

        ``wanted`` maps each name to a fresh token of ``new_owner_token()``. A name
        held under the same token counts as won, so a caller that lost the reply may
        ask again. One round trip for any number of names. After LockUnavailable the
        backend gives up these tokens again as soon as it can.
        """

    @abc.abstractmethod
    def renew(self, leases: Collection[Lease], ttl_ms: int) -> dict[str, Lease]:
        """Extend the leases that are still ours and return them; a missing name is lost."""

    @abc.abstractmethod
    def release(self, leases: Collection[Lease]) -> set[str]:
        """End the leases that are still ours and return their names; twice is harmless."""

    @abc.abstractmethod
    def inspect(self, names: Collection[str]) -> dict[str, LockInfo]:
        """Return what is known of those names that are held."""

    @abc.abstractmethod
    def held(self) -> list[LockInfo]:
        """Return all held locks of this namespace, ordered by name."""

    @abc.abstractmethod
    def force_release(self, name: str) -> bool:
        """End a lock whoever owns it, for an operator; True when there was one."""

    @abc.abstractmethod
    def ping(self) -> float:
        """Return how many seconds the backend took to answer."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what this object holds in this process."""


def new_owner_token() -> str:
    """Return a fresh random owner token, 128 bits in hexadecimal."""
    return secrets.token_hex(16)


def schedule_lock_name(schedule_id: int) -> str:
    """Return the name of a schedule's lock; ids only, never text typed by people.

    >>> schedule_lock_name(42)
    'schedule:42'
    """
    return f"schedule:{schedule_id:d}"


def occurrence_lock_name(schedule_id: int, instant: datetime) -> str:
    """Return the name of the lock of one occurrence, where runs may be side by side.

    >>> occurrence_lock_name(42, datetime.fromtimestamp(1_800_000_000, UTC))
    'schedule:42@1800000000000'
    """
    # Whole milliseconds, never rounded: instants a millisecond apart have names of their own.
    return f"{schedule_lock_name(schedule_id)}@{(instant - _EPOCH) // _MILLISECOND}"


def scope_lock_name(concurrency_key: str) -> str:
    """Return the name of the lock of a scope, from the key with its arguments filled in.

    >>> scope_lock_name("invoices-acme")
    'scope:1475bbde093a02e8f8540036e6598252'
    """
    return f"{_SCOPE}{hashlib.sha256(concurrency_key.encode()).hexdigest()[:32]}"


def is_scope_lock(name: str) -> bool:
    """Return True for the name of a scope's lock."""
    return name.startswith(_SCOPE)


def schedule_id_of(name: str) -> int | None:
    """Return the id in the name of a schedule's lock; None for a lock of another kind.

    >>> schedule_id_of("schedule:42"), schedule_id_of("schedule:42@1"), schedule_id_of("name:42")
    (42, 42, None)
    """
    kind, _, rest = name.partition(":")
    digits = rest.partition("@")[0]
    is_id = digits.isascii() and digits.isdigit() and len(digits) < _LONGEST_ID
    is_ours = kind == "schedule" and is_id and str(int(digits)) == digits
    return int(digits) if is_ours else None


def named_lock_name(name: str) -> str:
    """Return the lock's name for a ``name`` that code chose; apart from those of schedules.

    >>> named_lock_name("export")
    'name:export'
    """
    return f"name:{name}"


def checked_ttl(ttl_ms: int) -> int:
    """Return ``ttl_ms``. Raise ValueError below 1: a lock must live to be renewed."""
    if ttl_ms < 1:
        raise ValueError(f"Lock TTL: got {ttl_ms} ms. Use a whole number from 1.")
    return ttl_ms
