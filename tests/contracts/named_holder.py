"""One more process that uses ``lock()``: ``python -m tests.contracts.named_holder '{...}'``.

``{"settings": {...}, "do": "check"}`` takes the lock "export", prints ``held``, waits for a
line of its input, and prints what ``check()`` then raises. ``"fork"`` does the same in a
forked child, which then leaves the block. ``"count"`` adds one to the number in the file
``counter``, ``times`` times in each of ``threads`` threads.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

NAME = "export"


def count(counter: Path, times: int) -> None:
    """Add one to the number in ``counter``, ``times`` times, each under the lock."""
    from distcron_app.locks import lock

    for _ in range(times):
        with lock(NAME, ttl=30, wait=120):
            # Read, then write: two at once lose an increment.
            counter.write_text(str(int(counter.read_text()) + 1))


def count_in_threads(counter: Path, *, times: int, threads: int) -> None:
    """Let so many threads count at once."""
    started = [threading.Thread(target=count, args=(counter, times)) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def check(held: Any) -> None:
    """Print what ``check()`` says."""
    from distcron_app.errors import LeaseLost

    try:
        held.check()
    except LeaseLost as error:
        print(error, flush=True)
    else:
        print("still held", flush=True)


def main(given: dict[str, Any]) -> None:
    from django.conf import settings

    settings.configure(USE_I18N=False, **given["settings"])
    from distcron_app.locks import lock

    if given["do"] == "count":
        count_in_threads(Path(given["counter"]), times=given["times"], threads=given["threads"])
        return
    with lock(NAME, ttl=given.get("ttl", 30)) as held:
        if given["do"] == "fork" and (child := os.fork()):
            os.waitpid(child, 0)
            check(held)
            return
        print("held", flush=True)
        sys.stdin.readline()
        check(held)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
