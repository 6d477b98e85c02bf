"""The rows of distcron. Who may write what:

* people (admin, pages, command line) write a schedule's PERSON_FIELDS, guarded by
  ``version``: two editors cannot overwrite each other; of a schedule that code defines
  ``sync`` writes them, and people only its state;
* the scheduler writes a schedule's ``next_run_at``, ``fencing_token``, ``runs_planned``
  and, where a row cannot run any more, ``state`` and ``state_reason``; it pauses and
  resumes as people do, under the name "distcron";
* ``Run.state`` and ``ChainStart`` rows are written by ``lifecycle`` only, ``Node`` rows by
  ``nodes`` only.

Foreign keys of history rows carry no database constraint: deleting a schedule of a
million runs is one row, and its history stays with the names as they were.
"""

from distcron_app.models.audit import AuditEntry
from distcron_app.models.calendars import (
    Calendar,
    CalendarEntry,
    default_timezone,
    exclusions_of,
)
from distcron_app.models.chains import ChainGraph, ChainLink, ChainStart, find_path
from distcron_app.models.maintenance import Maintenance
from distcron_app.models.nodes import Node
from distcron_app.models.policies import POLICY_FIELDS, is_exclusive
from distcron_app.models.runs import Attempt, Run, RunDay, RunOutput, RunQuerySet, ended_attempt
from distcron_app.models.schedules import (
    DEFINED_FIELDS,
    PERSON_FIELDS,
    PLANNING_FIELDS,
    TIMETABLE_FIELDS,
    Schedule,
    ScheduleQuerySet,
    timetable_of,
)

__all__ = [
    "DEFINED_FIELDS",
    "PERSON_FIELDS",
    "PLANNING_FIELDS",
    "POLICY_FIELDS",
    "TIMETABLE_FIELDS",
    "Attempt",
    "AuditEntry",
    "Calendar",
    "CalendarEntry",
    "ChainGraph",
    "ChainLink",
    "ChainStart",
    "Maintenance",
    "Node",
    "Run",
    "RunDay",
    "RunOutput",
    "RunQuerySet",
    "Schedule",
    "ScheduleQuerySet",
    "default_timezone",
    "ended_attempt",
    "exclusions_of",
    "find_path",
    "is_exclusive",
    "timetable_of",
]
