"""queued, claimed → cancelled at once; running is asked to stop, and its node told by its sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from django.db import transaction

from distcron_app.instants import database_now
from distcron_app.lifecycle.values import ClaimedRun
from distcron_app.models import Run

__all__ = ["CancelResult", "Stops", "request_cancel", "stops"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CancelResult:
    """Ids of the runs that are cancelled now, and of those that were asked to stop."""

    cancelled: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """Which of a node's runs should stop: ``gone`` are no longer its own, ``asked`` by cause."""

    gone: frozenset[int]
    asked: dict[int, str]


def request_cancel(run_ids: Collection[int], *, cause: str) -> CancelResult:
    """Cancel runs for ``cause``, words such as "by siti: wrong data"; final ones are left alone.

    One that has not started is cancelled at once: its owner's start then changes no row.
    A running one is asked, and ends as its job decides: it may also succeed first.
    """
    with transaction.atomic():
        rows = list(
            Run.objects.select_for_update()
            .filter(pk__in=list(run_ids), state__in=Run.OPEN_STATES)
            .order_by("pk")
        )
        now = database_now()
        cancelled = [run for run in rows if run.state != Run.State.RUNNING]
        for run in cancelled:
            run.state, run.reason, run.error = (
                Run.State.CANCELLED,
                Run.Reason.CANCELLED,
                cause[:500],
            )
            run.owner_token, run.finished_at = "", now
        asked = [
            run
            for run in rows
            if run.state == Run.State.RUNNING and run.cancel_requested_at is None
        ]
        for run in asked:
            run.cancel_requested_at, run.cancel_cause = now, cause[:200]
        Run.objects.bulk_update(
            [*cancelled, *asked],
            [
                "state",
                "reason",
                "error",
                "owner_token",
                "finished_at",
                "cancel_requested_at",
                "cancel_cause",
            ],
            batch_size=200,
        )
    return CancelResult(
        cancelled=tuple(run.pk for run in cancelled), asked=tuple(run.pk for run in asked)
    )


def stops(runs: Collection[ClaimedRun]) -> Stops:
    """Return which of a node's runs should stop, by one read.

    Gone are those that were recovered, released or cancelled before they started. A lost
    run is still its owner's: nobody else starts it, and a late report settles it.
    """
    tokens = {run.run_id: run.owner_token for run in runs}
    states = [*Run.ACTIVE_STATES, Run.State.LOST]
    rows = Run.objects.filter(pk__in=tokens, state__in=states).order_by()
    found = {
        pk: (at, cause)
        for pk, token, at, cause in rows.values_list(
            "pk", "owner_token", "cancel_requested_at", "cancel_cause"
        )
        if tokens[pk] == token
    }
    return Stops(
        gone=frozenset(tokens.keys() - found.keys()),
        asked={pk: cause for pk, (at, cause) in found.items() if at is not None},
    )
