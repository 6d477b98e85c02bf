"""Makes rows of the schedules that code defines: on ``migrate`` and by ``schedulerctl sync``.

The code is the truth for what it defines, people for whether it is paused:

* a row is created, changed where it differs from the code, or, when the code has dropped it,
  paused with a reason that says so; it is never deleted, and goes on when the code is back;
* a row that differs in nothing is not written: it keeps its version and its next instant;
* a row of the same key that people made is refused, unless it is named to be adopted;
* a definition that cannot be used is reported and stops no other; its row stays as it was.

A node never does this when it starts: one with older code would undo what newer code did.
"""

from distcron_app.sync.migrating import sync_after_migrate
from distcron_app.sync.rows import Author, Outcome, Synced, SyncReport, sync
from distcron_app.sync.wanted import check_definitions, defined_keys

__all__ = [
    "Author",
    "Outcome",
    "SyncReport",
    "Synced",
    "check_definitions",
    "defined_keys",
    "sync",
    "sync_after_migrate",
]
