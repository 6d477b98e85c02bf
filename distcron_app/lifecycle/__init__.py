"""The life of a run: the only code that writes ``Run.state``.

    (new) ──► queued ──► claimed ──► running ──► succeeded, failed
      │        │  ▲         │         │   │
      │        │  └─────────┴─────────┘   └────► lost ──► succeeded, failed
      │        │     given back, recovered         (the late report of its owner)
      │        ├──► cancelled   by a person, or its schedule is gone
      │        └──► skipped     spread, and busy or paused when it is due
      ├──► claimed, or running where a crash may repeat the run (timetable)
      └──► skipped

Where other schedules follow the end of a run (``chains``), their runs are inserted, queued or
skipped, in the transaction that ends it.

Each transition is one conditional write that names the state it leaves, and, where a
node acts on what it owns, the owner token and the fencing token. It returns who won;
losing is not an error. On PostgreSQL a batch of any size costs a fixed number of
statements; MariaDB and SQLite take the portable path, which locks the rows, decides
and writes, in key order.

Two guards make one claim per occurrence, and either would do: the schedule's
``next_run_at`` moves by compare-and-set in the transaction that inserts the run, and
(schedule, scheduled_at) is unique. The first still holds after history is pruned, the
second after an edit moves ``next_run_at`` back.
"""

from distcron_app.lifecycle.cancel import CancelResult, Stops, request_cancel, stops
from distcron_app.lifecycle.claim import claim, claim_queued, queue_again, queue_manual, read_back
from distcron_app.lifecycle.outcome import (
    FinishResult,
    finish,
    note_lease_lost,
    report_progress,
    start,
)
from distcron_app.lifecycle.pauses import failed_in_a_row, skip_paused
from distcron_app.lifecycle.pruning import PRUNE_BATCH, Limits, Pruned, count_prunable, prune
from distcron_app.lifecycle.recovery import (
    Recovered,
    Released,
    cancel_without_schedule,
    expire,
    give_back,
    recover,
    recover_owned,
    release,
    runs_again,
    settle_strays,
)
from distcron_app.lifecycle.values import (
    TRANSITIONS,
    Claimed,
    ClaimedRun,
    Decision,
    Failure,
    Finished,
    Skip,
    SkippedRun,
)

__all__ = [
    "PRUNE_BATCH",
    "TRANSITIONS",
    "CancelResult",
    "Claimed",
    "ClaimedRun",
    "Decision",
    "Failure",
    "FinishResult",
    "Finished",
    "Limits",
    "Pruned",
    "Recovered",
    "Released",
    "Skip",
    "SkippedRun",
    "Stops",
    "cancel_without_schedule",
    "claim",
    "claim_queued",
    "count_prunable",
    "expire",
    "failed_in_a_row",
    "finish",
    "give_back",
    "note_lease_lost",
    "prune",
    "queue_again",
    "queue_manual",
    "read_back",
    "recover",
    "recover_owned",
    "release",
    "report_progress",
    "request_cancel",
    "runs_again",
    "settle_strays",
    "skip_paused",
    "start",
    "stops",
]
