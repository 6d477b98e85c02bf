"""What a node tells of runs while they are running; nothing here changes a state.

Each call is set-based, and leaves a run alone that moved on: a node that is no longer its
owner writes nothing. ``tokens`` maps run ids to the fencing and owner token of the claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.db import transaction

from distcron_app.instants import DatabaseNow
from distcron_app.lifecycle.owned import lock_owned, store_text
from distcron_app.models import Run, RunOutput

__all__ = [
    "note_lease_lost",
    "note_over_limit",
    "report_progress",
    "store_checkpoints",
    "store_live_output",
]

Tokens = Mapping[int, tuple[int, str]]


def report_progress(progress: Mapping[int, tuple[float, str]], tokens: Tokens) -> None:
    """Store percent and message."""
    with transaction.atomic():
        rows = [
            Run(pk=pk, progress_percent=progress[pk][0], progress_message=progress[pk][1][:200])
            for pk in _running(progress, tokens)
        ]
        if rows:
            Run.objects.bulk_update(rows, ["progress_percent", "progress_message"])


def store_checkpoints(checkpoints: Mapping[int, Any], tokens: Tokens) -> None:
    """Store what the jobs want to be remembered for a later attempt."""
    with transaction.atomic():
        rows = [Run(pk=pk, checkpoint=checkpoints[pk]) for pk in _running(checkpoints, tokens)]
        if rows:
            Run.objects.bulk_update(rows, ["checkpoint"])


def store_live_output(outputs: Mapping[int, str], tokens: Tokens) -> None:
    """Store the output so far; what the run reports at its end takes its place."""
    with transaction.atomic():
        store_text([RunOutput(run_id=pk, output=outputs[pk]) for pk in _running(outputs, tokens)])


def note_lease_lost(causes: Mapping[int, str], tokens: Tokens) -> None:
    """Note that the lease was lost and why; the outcome is not changed by it."""
    with transaction.atomic():
        rows = [
            Run(pk=pk, details={"lease_lost": causes[pk][:200]}) for pk in _running(causes, tokens)
        ]
        if rows:
            Run.objects.bulk_update(rows, ["details"])


def note_over_limit(tokens: Tokens) -> None:
    """Note that the runs are over their limit, from now on."""
    with transaction.atomic():
        running = _running(tokens, tokens)
        Run.objects.filter(pk__in=running).update(over_limit_at=DatabaseNow())


def _running(run_ids: Iterable[int], tokens: Tokens) -> list[int]:
    return lock_owned({pk: tokens[pk] for pk in run_ids if pk in tokens}, [Run.State.RUNNING])
