"""Takes guards out of a claim, to show which of them stand behind each other.

Armed by DISTCRON_SYSTEM_WITHOUT, names separated by commas. The unique row must be taken out
of the database by the test as well.
"""

from __future__ import annotations

import importlib
import os

_GUARDS = {
    # The schedule still stands where it was seen.
    "cursor": ("_LOCK_SQL", "s.next_run_at = p.seen AND "),
    # One row per occurrence.
    "unique_row": ("_CLAIM_SQL", "ON CONFLICT (schedule_id, scheduled_at) DO NOTHING"),
}


def install() -> None:
    """Take out what a test asked for."""
    claim = importlib.import_module("distcron_app.lifecycle.claim")
    for name in filter(None, os.environ.get("DISTCRON_SYSTEM_WITHOUT", "").split(",")):
        statement, guard = _GUARDS[name]
        text = getattr(claim, statement)
        assert guard in text, f"{name}: {guard!r} is no part of {statement} any more"
        setattr(claim, statement, text.replace(guard, ""))
