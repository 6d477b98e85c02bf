"""Notes, in the order of the node, which locks it won and which claims it sent.

Armed by DISTCRON_SYSTEM_OBSERVER=<file>; one JSON line per event, appended in one write.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from django.db.backends.signals import connection_created

# The statement of a claim that names the schedules it is about.
_CLAIM_MARK = "FOR UPDATE OF s SKIP LOCKED"
_WRITES = ("INSERT", "UPDATE", "DELETE")


def install() -> None:
    """Watch the locks and the statements of this process, if a test asked for it."""
    path = os.environ.get("DISTCRON_SYSTEM_OBSERVER")
    if not path:
        return
    from distcron_app.locks.redis import RedisLockBackend

    note = functools.partial(_note, path)
    RedisLockBackend.acquire = _acquire(RedisLockBackend.acquire, note)  # type: ignore[method-assign]
    RedisLockBackend.release = _release(RedisLockBackend.release, note)  # type: ignore[method-assign]
    connection_created.connect(functools.partial(_watch, note), weak=False)


def _note(path: str, event: str, schedules: Collection[int] = (), sql: str = "") -> None:
    entry = {"pid": os.getpid(), "event": event, "schedules": sorted(schedules), "sql": sql}
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, json.dumps(entry).encode() + b"\n")
    finally:
        os.close(file)


def _acquire(inner: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    def acquire(self: Any, wanted: Mapping[str, str], ttl_ms: int) -> Any:
        won = inner(self, wanted, ttl_ms)
        note("won", _ids(won))
        note("missed", _ids(wanted.keys() - won.keys()))
        return won

    return acquire


def _release(inner: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    def release(self: Any, leases: Collection[Any]) -> Any:
        note("released", _ids(lease.name for lease in leases))
        return inner(self, leases)

    return release


def _ids(names: Any) -> list[int]:
    return [int(name.partition(":")[2]) for name in names]


def _watch(note: Callable[..., None], *, connection: Any, **_: Any) -> None:
    def execute(
        run: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]
    ) -> Any:
        if _CLAIM_MARK in sql:
            note("claim", params[0])
        elif sql.lstrip().startswith(_WRITES):
            note("write", sql=sql.strip()[:120])
        return run(sql, params, many, context)

    connection.execute_wrappers.append(execute)
