"""A counter without protection of its own, incremented under a lock.

Run as a program it is one more node: ``python -m tests.contracts.counting
'{"settings": {...}, "counter": path, "times": 100}'``. With ``"hold": name`` it takes that
lock instead, prints ``held`` (or ``busy``, or the error) and keeps it until its input ends; for
each line of that it renews and prints whether it could. With ``"fork": true`` a forked child
waits beside it. ``"user": [uid, gid]`` becomes that user first, ``"umask": 63`` takes these
bits from the modes of its files.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pymysql
from django.utils.translation import gettext

NAME = "schedule:1"
TTL_MS = 30_000


def count(backend: Any, counter: Path, times: int) -> None:
    """Add one to the number in ``counter``, ``times`` times, each under the lock."""
    from distcron_app.locks import new_owner_token

    for _ in range(times):
        while not (won := backend.acquire({NAME: new_owner_token()}, TTL_MS)):
            time.sleep(0.0002)
        # Read, then write: two at once lose an increment.
        counter.write_text(str(int(counter.read_text()) + 1))
        assert backend.release(won.values()) == {NAME}


def main(given: dict[str, Any]) -> None:
    from django.conf import settings

    settings.configure(**given["settings"])
    pymysql.version_info = (2, 2, 7, "final", 0)
    pymysql.install_as_MySQLdb()
    from distcron_app.errors import LockUnavailable
    from distcron_app.locks import get_level, new_owner_token

    if "user" in given:
        _become(*given["user"])
    os.umask(given.get("umask", 0o022))
    backend = get_level(given.get("level", "standard")).backend
    if "hold" in given:
        ttl_ms = given.get("ttl_ms", TTL_MS)
        try:
            won = backend.acquire({given["hold"]: new_owner_token()}, ttl_ms)
        except LockUnavailable as error:
            sys.exit(print(error))
        if given.get("fork") and os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        print("held" if won else "busy", flush=True)
        for _line in sys.stdin:
            print("renewed" if backend.renew(won.values(), ttl_ms) else "lost", flush=True)
    else:
        count(backend, Path(given["counter"]), given["times"])


def _become(user: int, group: int) -> None:
    # Not by starting it so: another user may not reach the interpreter, nor what it would
    # import later.
    gettext("")
    if (user, group) != (os.getuid(), os.getgid()):
        os.setgroups([group])
        os.setgid(user)
        os.setuid(user)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
