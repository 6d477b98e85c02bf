"""The delivery ``transactional``: what a job writes and its success are one commit.

(1) Begin a transaction on the database of the scheduler; (2) at a lock level that has a lock
of the database, take one on this very connection; (3) run the job; (4) where it succeeded,
write so under the run's tokens, which changes no row where another attempt has begun;
(5) commit. Whatever else happens undoes everything: the job raised, was told to stop or was
killed, the run was taken over, the link was lost. So a run has succeeded exactly where its
writes are there, however often it was started.

Not part of it: what the job does elsewhere, on another connection or in another thread, and
statements that commit by themselves (DDL on MariaDB and MySQL, a COMMIT of the job's own).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from django.db import DatabaseError, Error, InterfaceError, InternalError, connection, transaction
from django.utils.translation import gettext as _

from distcron_app import lifecycle
from distcron_app.atomicity import atomicity_problem
from distcron_app.conf import get_config
from distcron_app.context import JobContext
from distcron_app.errors import LockNotAcquired, NotCommitted
from distcron_app.lifecycle import Finished
from distcron_app.locks import EffectLock
from distcron_app.models import Run
from distcron_app.runner import Assignment, Facts

__all__ = ["run_in_transaction"]

logger = logging.getLogger("distcron.transactional")

# How long an attempt waits for the transaction of an earlier one to end.
LOCK_WAIT_SECONDS = 30.0
_LOCK_POLL_SECONDS = 0.25
# How long a commit whose answer was lost is looked for. Then the node reports a failure,
# which the tokens refuse where the commit arrived after all.
_READ_BACK_SECONDS = 60.0
_READ_BACK_POLL_SECONDS = 0.5

# A transaction of the caller's own choice keeps a stronger synchronous_commit. With the
# keepalives the server notices within 20 s that a machine is gone, and undoes its writes.
_PREPARE_POSTGRES = """
SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit')
                  WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, true),
       set_config('tcp_keepalives_idle', '5', true),
       set_config('tcp_keepalives_interval', '5', true),
       set_config('tcp_keepalives_count', '3', true),
       set_config('tcp_user_timeout', '20000', true)
"""


class _Undone(Exception):
    """Leaves the transaction without a commit; the facts of the attempt stand."""


def run_in_transaction(
    assignment: Assignment, context: JobContext, attempt: Callable[[], Facts]
) -> Facts:
    """Run ``attempt``; return its facts, with ``committed`` where it is over in the database.

    Blocks for as long as the job, and up to 30 s for the lock of an earlier attempt. Raise
    LockNotAcquired when that lasts longer, RunStopped when the run is told to stop meanwhile,
    NotCommitted where the transaction cannot be committed, and what the database raises.
    """
    problem = atomicity_problem()
    if problem:
        raise NotCommitted(_label(assignment), problem)
    facts: Facts = {}
    is_written = False
    try:
        with _freed_afterwards(_lock_of(assignment)) as lock, transaction.atomic(durable=True):
            _prepare()
            _wait_for(lock, context)
            facts = _checked(assignment, attempt)
            if facts["state"] != Run.State.SUCCEEDED:
                raise _Undone
            if not _write(assignment, context, facts):
                facts = _stale(assignment)
                raise _Undone
            is_written = True
    except _Undone:
        return facts
    except KeyboardInterrupt:
        raise
    except BaseException:
        if not is_written or not _was_committed(assignment, context):
            raise
        # The answer to the commit was lost, or what the job left for after it failed.
        logger.exception("after_commit_failed run=%s", assignment.run_id)
    return facts | {"committed": True}


def _lock_of(assignment: Assignment) -> EffectLock | None:
    if not assignment.effect_lock:
        return None
    return EffectLock(connection, get_config().namespace, assignment.effect_lock)


@contextlib.contextmanager
def _freed_afterwards(lock: EffectLock | None) -> Iterator[EffectLock | None]:
    try:
        yield lock
    finally:
        if lock is not None:
            try:
                lock.free()
            except Error:
                connection.close()  # the session's end frees it


def _prepare() -> None:
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(_PREPARE_POSTGRES)


def _wait_for(lock: EffectLock | None, context: JobContext) -> None:
    if lock is None:
        return
    deadline = context.clock.monotonic() + LOCK_WAIT_SECONDS
    while not lock.try_take():
        if context.clock.monotonic() >= deadline:
            holder = _("an earlier attempt, whose transaction has not ended")
            raise LockNotAcquired(_("effects of run %d") % context.run_id, holder)
        context.wait(_LOCK_POLL_SECONDS)


def _checked(assignment: Assignment, attempt: Callable[[], Facts]) -> Facts:
    """Return the facts of the attempt; raise NotCommitted where it spoiled the transaction."""
    depth = len(connection.savepoint_ids)
    facts = attempt()
    if facts["state"] != Run.State.SUCCEEDED:
        return facts
    if connection.needs_rollback:
        raise NotCommitted(
            _label(assignment),
            _(
                "the job asked for it, closed the connection, or went on after a database error. "
                "Put statements that may fail into transaction.atomic()"
            ),
        )
    if len(connection.savepoint_ids) != depth or not connection.in_atomic_block:
        raise NotCommitted(_label(assignment), _("the job left a block of atomic() open"))
    return facts


def _write(assignment: Assignment, context: JobContext, facts: Facts) -> bool:
    report = Finished(
        run_id=assignment.run_id,
        fencing_token=assignment.fencing_token,
        owner_token=assignment.owner_token,
        state=facts["state"],
        finished_at=context.clock.now(),
        result=facts.get("result"),
        output=context.output(),
    )
    try:
        return lifecycle.finish_with_effects(report)
    except InternalError as error:
        # PostgreSQL: "current transaction is aborted".
        raise NotCommitted(
            _label(assignment),
            _(
                "the job went on after a database error. Put statements that may fail into "
                "transaction.atomic()"
            ),
        ) from error


def _stale(assignment: Assignment) -> Facts:
    told = _("run %d was taken over or settled meanwhile; what the job wrote was undone.")
    return {
        "state": Run.State.FAILED.value,
        "reason": Run.Reason.STALE.value,
        "error": told % assignment.run_id,
    }


def _was_committed(assignment: Assignment, context: JobContext) -> bool:
    """Ask the database, on a new connection, whether the outcome is there."""
    never = threading.Event()
    deadline = context.clock.monotonic() + _READ_BACK_SECONDS
    while True:
        try:
            connection.close()
            return lifecycle.has_succeeded(
                assignment.run_id, assignment.fencing_token, assignment.owner_token
            )
        except (DatabaseError, InterfaceError) as error:
            logger.warning("read_back_failed run=%s error=%s", assignment.run_id, error)
            if context.clock.monotonic() >= deadline:
                return False
            context.clock.wait(never, _READ_BACK_POLL_SECONDS)


def _label(assignment: Assignment) -> str:
    return _("Run %d") % assignment.run_id
