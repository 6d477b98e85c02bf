"""A lock around any code outside schedules: views, management commands, scripts.

    from distcron_app.locks import lock

    with lock("export", ttl=60):
        export()

Of all threads and processes that use the same lock backend, one at a time is inside. It
is always strict: no database arbiter stands behind it, so while the backend is away nobody
gets in. A thread of this process renews the lease every third of its TTL; a process that
is killed frees it by the TTL. Whoever is inside when the lease ends (paused for longer than
the TTL, force-released, Redis wiped) is told by ``Held.check()`` and cannot be stopped by
force: guard what must not be written twice at the place where it is written.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
import os
import random
import sys
import threading
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Literal, ParamSpec, TypeVar

from django.utils.translation import gettext as _

from distcron_app.clock import Clock
from distcron_app.conf import STANDARD, get_config
from distcron_app.errors import (
    ConfigurationError,
    LeaseLost,
    LockNotAcquired,
    LockUnavailable,
)
from distcron_app.locks.base import Lease, LockBackend, named_lock_name, new_owner_token
from distcron_app.locks.levels import get_level

__all__ = ["Held", "NamedLock", "lock"]

logger = logging.getLogger("distcron.locks")

_LONGEST_NAME = 200
_SHORTEST_TTL, _LONGEST_TTL = 1, 3600  # seconds, as of LOCK_TTL_SECONDS
# A waiter asks again soon at first, then about once a second, so that a thousand of them
# are a thousand requests a second at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_RENEWALS_PER_TTL = 3
# After a renewal that failed: a second try within the shortest TTL.
_RETRY_SECONDS = 0.25
# An upper bound for waits without a deadline; Event.wait refuses infinity.
_LONGEST_SLEEP = 60.0
_LONGEST_PROGRAM = 60
# Requests of this process at once: a pool of connections raises when threads exhaust it.
_MOST_REQUESTS = 4

P = ParamSpec("P")
R = TypeVar("R")

_clock = Clock()
_requests = threading.BoundedSemaphore(_MOST_REQUESTS)


def lock(
    name: str,
    ttl: float | None = None,
    *,
    wait: float = 0.0,
    level: str = STANDARD,
    busy: Literal["raise", "skip"] = "raise",
    program: str = "",
) -> NamedLock:
    """Return the lock ``name`` for a ``with`` block, or to decorate a function.

    ``ttl`` and ``wait`` are seconds: how long the lock outlives a killed holder (1 to 3600,
    by default LOCK_TTL_SECONDS), and how long to ask for it while somebody else has it (0:
    once). ``busy="skip"`` is for the decorator: the call returns None instead of raising.
    ``program`` is what people see as the holder, by default this process' program. Raise
    TypeError or ValueError for values that cannot be used.
    """
    _check_name(name)
    if ttl is not None:
        _check_seconds(name, "ttl", ttl, _SHORTEST_TTL, _LONGEST_TTL)
    _check_seconds(name, "wait", wait, 0, math.inf)
    if busy not in ("raise", "skip"):
        raise ValueError(
            _("Lock %(name)r: busy is %(value)r. Use 'raise' or 'skip'.")
            % {"name": name, "value": busy}
        )
    return NamedLock(name=name, ttl=ttl, wait=wait, level=level, busy=busy, program=program)


class Held:
    """A lock while its block runs. Every method may be called by any thread, at no cost."""

    def __init__(self, name: str, *, lease: Lease, backend: LockBackend, ttl_ms: int) -> None:
        self.name = name
        self._lease = lease
        self._backend = backend
        self._ttl_ms = ttl_ms
        self._cause = ""
        self._renew_at = 0.0
        self._plan_renewal()
        self._mutex = threading.Lock()

    @property
    def lost(self) -> bool:
        """Return True when somebody else may be inside by now; it stays so."""
        if not self._cause:
            late = _clock.monotonic() - self._lease.expires_at
            if late >= 0:
                self._lose(_("not renewed for %.1f s") % (late + self._ttl_ms / 1000))
        return bool(self._cause)

    @property
    def cause(self) -> str:
        """Return why the lease was lost; empty while it is not."""
        return self._cause if self.lost else ""

    def check(self) -> None:
        """Raise LeaseLost when the lease was lost; call it wherever stopping is safe."""
        if self.lost:
            raise LeaseLost(_("Lock %r") % self.name, self._cause)

    def _lose(self, cause: str) -> None:
        with self._mutex:
            if self._cause:
                return
            self._cause = cause
        logger.warning("lock_lost name=%r cause=%r", self.name, cause)

    def _plan_renewal(self) -> None:
        third = self._ttl_ms / 1000 / _RENEWALS_PER_TTL
        self._renew_at = math.inf if self._cause else _clock.monotonic() + third

    def _extend(self, lease: Lease) -> None:
        # A loss is not taken back: the block may have been told already.
        with self._mutex:
            if not self._cause:
                self._lease = lease


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class NamedLock:
    """What ``lock()`` returns. The same name taken again inside is refused as anybody's is.

    An object may be used by several threads and again afterwards; each use has an owner
    token of its own and nothing belongs to a thread, so a block may end in another one.
    """

    name: str
    ttl: float | None
    wait: float
    level: str
    busy: str
    program: str
    _held: Held | None = dataclasses.field(default=None, init=False, repr=False)

    def __enter__(self) -> Held:
        """Take the lock, asking again for ``wait`` seconds while somebody else has it.

        Raise LockNotAcquired where it is taken, LockUnavailable at once where the backend
        does not answer, ConfigurationError for a level that cannot be used here.
        """
        if self.busy == "skip":
            raise TypeError(
                _(
                    "Lock %r: busy='skip' is for the decorator, since a block cannot be skipped. "
                    "Catch LockNotAcquired around it."
                )
                % self.name
            )
        return self._take()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the lock. What goes wrong here is logged, and the block's outcome stays."""
        self._give_back()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return ``function`` under the lock, taken anew by each call.

        With ``busy="skip"`` the call returns None while somebody else has it. Raise
        TypeError for a function whose work would be done after it returned.
        """
        self._refuse_deferred(function)

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            # An object for each call, as calls may overlap after a loss.
            guard = dataclasses.replace(self)
            try:
                guard._take()
            except LockNotAcquired as error:
                if self.busy == "raise":
                    raise
                logger.info("lock_busy name=%r holder=%r skipped=1", self.name, error.holder)
                return None  # type: ignore[return-value]
            try:
                return function(*args, **kwargs)
            finally:
                guard._give_back()

        return locked

    def _refuse_deferred(self, function: Callable[P, R]) -> None:
        is_deferred = (
            inspect.iscoroutinefunction(function)
            or inspect.isgeneratorfunction(function)
            or inspect.isasyncgenfunction(function)
        )
        if is_deferred:
            raise TypeError(
                _(
                    "Lock %(name)r: cannot decorate %(function)s, which is async or a generator: "
                    "the lock would be free before its work is done. Decorate a plain function, "
                    "and call it through asgiref's sync_to_async from async code."
                )
                % {"name": self.name, "function": getattr(function, "__qualname__", function)}
            )

    def _take(self) -> Held:
        backend = self._backend()
        ttl = get_config().lock_ttl_seconds if self.ttl is None else self.ttl
        give_up_at = _clock.monotonic() + self.wait
        pause = _FIRST_PAUSE
        while not (held := self._try(backend, round(ttl * 1000))):
            left = give_up_at - _clock.monotonic()
            if left <= 0:
                raise self._not_acquired(backend)
            # The random part keeps waiters that came together from asking together.
            _pause(min(left, pause * random.uniform(0.5, 1.5)))  # noqa: S311
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        return held

    def _backend(self) -> LockBackend:
        level = get_level(self.level, note=_holder(self.program))
        if "none" in level.parts:
            raise ConfigurationError(
                "LOCK_BACKEND",
                _("'none' excludes nobody, and lock(%r) has no database behind it.") % self.name,
                _("Choose redis or file."),
            )
        return level.backend

    def _try(self, backend: LockBackend, ttl_ms: int) -> Held | None:
        if self._held is not None:
            # A block of this very object has not ended, although it may have lost its lease.
            return None
        name = named_lock_name(self.name)
        with _requests:
            lease = backend.acquire({name: new_owner_token()}, ttl_ms).get(name)
        if lease is None:
            return None
        held = Held(self.name, lease=lease, backend=backend, ttl_ms=ttl_ms)
        if lease.expires_at <= _clock.monotonic():
            _release(held)
            raise LockUnavailable(
                backend.name, _("its answer came later than the TTL of %g s") % (ttl_ms / 1000)
            )
        try:
            is_first = _renewer.add(held, self)
        except BaseException:
            _release(held)
            raise
        if not is_first:
            _release(held)
            return None
        return held

    def _not_acquired(self, backend: LockBackend) -> LockNotAcquired:
        name = named_lock_name(self.name)
        try:
            with _requests:
                info = backend.inspect([name]).get(name)
        except LockUnavailable:
            info = None
        if info is None:
            return LockNotAcquired(self.name)
        return LockNotAcquired(self.name, info.note, info.ttl_ms, age_ms=info.age_ms)

    def _give_back(self) -> None:
        held = _renewer.remove(self)
        if held is None:
            # The copy of a forked child, whose parent holds the lock.
            return
        if not _release(held) and not held.lost:
            held._lose(_("it was gone when it was released"))
        if held.lost:
            logger.warning("lock_left_after_loss name=%r cause=%r", held.name, held.cause)


class _Renewer:
    """Renews what this process holds, in one thread that lives while something is held."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self._guards: dict[Held, NamedLock] = {}

    def add(self, held: Held, guard: NamedLock) -> bool:
        """Enter ``held`` as the one of ``guard``; False where another thread was faster."""
        with self._mutex:
            if guard._held is not None:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="distcron-locks", daemon=True)
                thread.start()
                self._thread = thread
            earlier = [
                other
                for other in self._guards
                if other._backend is held._backend and other._lease.name == held._lease.name
            ]
            self._guards[held] = guard
            guard._held = held
        for other in earlier:
            other._lose(_("it ended, and another block of this process has it"))
        self._changed.set()
        return True

    def remove(self, guard: NamedLock) -> Held | None:
        """Return what ``guard`` holds, which is renewed no more; None where that is nothing."""
        with self._mutex:
            held, guard._held = guard._held, None
            if held is not None:
                del self._guards[held]
        self._changed.set()
        return held

    def disown(self) -> None:
        """Tell everybody inside, in a forked child, that the parent has the lock."""
        for held, guard in self._guards.items():
            guard._held = None
            held._mutex = threading.Lock()
            held._cause = held._cause or _("this process was forked inside the block")

    def _run(self) -> None:
        while (pause := self._pause()) is not None:
            _clock.wait(self._changed, pause)
            self._changed.clear()
            for (backend, ttl_ms), due in self._due().items():
                self._renew(backend, ttl_ms, due)

    def _pause(self) -> float | None:
        """Return the seconds until the next renewal; None when this thread is to end."""
        with self._mutex:
            if not self._guards:
                self._thread = None
                return None
            next_at = min(held._renew_at for held in self._guards)
        return min(max(0.0, next_at - _clock.monotonic()), _LONGEST_SLEEP)

    def _due(self) -> dict[tuple[LockBackend, int], list[Held]]:
        now = _clock.monotonic()
        groups: dict[tuple[LockBackend, int], list[Held]] = {}
        with self._mutex:
            for held in self._guards:
                if held._renew_at <= now:
                    groups.setdefault((held._backend, held._ttl_ms), []).append(held)
        return groups

    def _renew(self, backend: LockBackend, ttl_ms: int, due: Collection[Held]) -> None:
        kept = [held for held in due if not held.lost]
        for held in due:
            held._plan_renewal()
        try:
            renewed = backend.renew([held._lease for held in kept], ttl_ms) if kept else {}
        except LockUnavailable as error:
            logger.warning("lock_renew_failed count=%d error=%s", len(kept), error)
            self._again_soon(kept)
        except Exception:
            # Whatever it is, the other leases of this process need the thread.
            logger.exception("lock_renew_failed count=%d", len(kept))
            self._again_soon(kept)
        else:
            self._enter(kept, renewed)

    def _again_soon(self, kept: Collection[Held]) -> None:
        for held in kept:
            held._renew_at = _clock.monotonic() + _RETRY_SECONDS

    def _enter(self, kept: Collection[Held], renewed: dict[str, Lease]) -> None:
        with self._mutex:
            current = set(self._guards)
        for held in kept:
            lease = renewed.get(held._lease.name)
            if lease is None or lease.owner_token != held._lease.owner_token:
                if held in current:
                    held._lose(_("it ended in the lock backend: expired, released or wiped"))
                    held._plan_renewal()
            elif held in current:
                held._extend(lease)
            else:
                # The block ended during the renewal, which may have come last.
                _release(held)


_renewer = _Renewer()


def _release(held: Held) -> bool:
    """Give the lock back, asking twice; False when it was not ours any more. It never raises."""
    for is_last in (False, True):
        try:
            with _requests:
                return bool(held._backend.release([held._lease]))
        except Exception as error:
            left = max(0.0, held._lease.expires_at - _clock.monotonic())
            logger.warning(
                "lock_release_failed name=%r error=%r next=%r",
                held.name,
                str(error),
                f"free by its TTL in {left:.1f} s" if is_last else "asked once more",
                exc_info=not isinstance(error, LockUnavailable),
            )
    # Not known, and no loss: the lock is not given to anybody before it is free.
    return True


def _pause(seconds: float) -> None:
    _clock.wait(threading.Event(), min(seconds, _LONGEST_SLEEP))


def _holder(program: str) -> str:
    return f"{get_config().label} pid {os.getpid()} {_one_line(program) or _program()}"


def _program() -> str:
    """Return what runs in this process, without its arguments: they may hold secrets."""
    path, *words = sys.argv or [""]
    name = os.path.basename(path)
    if name == "__main__.py":
        name = os.path.basename(os.path.dirname(path))
    is_django = name in ("manage.py", "django-admin", "django")
    command = words[0] if is_django and words and not words[0].startswith("-") else ""
    return _one_line(f"{name} {command}") or "python"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_PROGRAM]


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(_("Lock name: must be text, got %r.") % (name,))
    if not 1 <= len(name) <= _LONGEST_NAME:
        raise ValueError(
            _("Lock name: must have 1 to %(limit)d characters, got %(length)d.")
            % {"limit": _LONGEST_NAME, "length": len(name)}
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(_("Lock name: %r is not valid Unicode.") % name) from error


def _check_seconds(name: str, field: str, value: object, low: float, high: float) -> None:
    facts = {"name": name, "field": field, "value": value, "low": low, "high": high}
    if isinstance(value, bool) or not isinstance(value, int | float):
        message = _("Lock %(name)r: %(field)s must be a number of seconds, got %(value)r.")
        raise TypeError(message % facts)
    if not low <= value <= high:
        message = _("Lock %(name)r: %(field)s is %(value)r s, allowed %(low)g to %(high)g.")
        raise ValueError(message % facts)


def _start_afresh() -> None:
    # The child has none of its parent's threads, which may hold these locks.
    global _renewer, _requests
    _renewer.disown()
    _renewer = _Renewer()
    _requests = threading.BoundedSemaphore(_MOST_REQUESTS)


os.register_at_fork(after_in_child=_start_afresh)
