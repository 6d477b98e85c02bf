"""Places where a node can be made to die, once, without a trace in the code that is tested.

A node that was started with DISTCRON_SYSTEM_FAILPOINT=<name> kills itself by SIGKILL when it
first reaches that place. The file DISTCRON_SYSTEM_FLAG tells the test that it happened.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

NAMES = (
    "before_lock",
    "after_lock",
    "in_claim_transaction",
    "after_claim_commit",
    "after_start",
    "in_job",
    "after_effect",
    "in_finish",
    "after_finish",
)
# Reached only where a run's end starts another schedule: its end is written, that is not.
IN_CHAIN = "in_chain"
# Set before the workers are forked, so that a job knows its node.
NODE_PID = os.getpid()


def install() -> None:
    """Wrap the functions around the place that was asked for."""
    from distcron_app import lifecycle
    from distcron_app.locks.redis import RedisLockBackend

    claim = importlib.import_module("distcron_app.lifecycle.claim")
    outcome = importlib.import_module("distcron_app.lifecycle.outcome")
    _wrap(RedisLockBackend, "acquire", before="before_lock", after="after_lock")
    _wrap(claim, "_claim_postgres", after="in_claim_transaction")
    _wrap(lifecycle, "claim", after="after_claim_commit")
    _wrap(lifecycle, "start", after="after_start")
    _wrap(outcome, "_finish_postgres", after="in_finish")
    chains = importlib.import_module("distcron_app.lifecycle.chains")
    _wrap(chains, "_insert", before=IN_CHAIN)
    _wrap(lifecycle, "finish", after="after_finish")


def reach(name: str) -> None:
    """Die here, if this is the place and nobody died here before."""
    if os.environ.get("DISTCRON_SYSTEM_FAILPOINT") != name:
        return
    try:
        os.close(os.open(os.environ["DISTCRON_SYSTEM_FLAG"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(NODE_PID, signal.SIGKILL)
    # In a worker: its node is gone, and it is about to be killed as well.
    threading.Event().wait()


def _wrap(owner: Any, name: str, *, before: str = "", after: str = "") -> None:
    inner: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(*args: Any, **options: Any) -> Any:
        if before:
            reach(before)
        answer = inner(*args, **options)
        if after and _did_something(answer):
            reach(after)
        return answer

    setattr(owner, name, wrapped)


def _did_something(answer: Any) -> bool:
    """Return False for a claim or a call that won nothing."""
    return bool(getattr(answer, "runs", getattr(answer, "accepted", answer)))
