"""Why an instant of a schedule ran, did not run, or was never planned: one true sentence.

``explain_instant`` says only what the rows prove. Where they leave it open the code is
``unknown``, ``pruned`` or ``before_edit``, and the facts are all that is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta, tzinfo

from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _

from distcron_app import audit
from distcron_app.conf import get_config
from distcron_app.errors import ConfigurationError, TimetableError
from distcron_app.explanations import chain_words, explain, inert, node_label
from distcron_app.history import Membership, membership, start_of
from distcron_app.instants import parse_wall
from distcron_app.locks import get_level
from distcron_app.models import TIMETABLE_FIELDS, AuditEntry, Node, Run, RunQuerySet, Schedule
from distcron_app.timetable import Timetable, Union, WallTimetable, clock_change, parts, zone
from distcron_app.timetable.calendars import Excluding

__all__ = ["Fact", "InstantAnswer", "explain_instant", "read_when"]

FIRST_YEAR, LAST_YEAR = 1970, 2199  # beyond is a slip of the hand

_MICROSECOND = timedelta(microseconds=1)
_SECOND = timedelta(seconds=1)
# A row that stands for several occurrences is the nearest before them; rows of an older
# rule may be between.
_SPANS_LOOKED_AT = 20
# Rows of nodes that are gone are kept for a day after their last heartbeat, by
# nodes.forget; an hour less, because a lease outlives the heartbeat.
_NODES_KEPT = timedelta(hours=23)
# A rule that shifts has few instants around a gap of less than three hours.
_GAP_INSTANTS = 400
_RULE_FIELDS = frozenset(
    {*TIMETABLE_FIELDS, "starts_at", "ends_at", "max_runs", "calendar", "calendar_action"}
)
_SPAN_REASONS = (Run.Reason.MISFIRE, Run.Reason.COALESCED, Run.Reason.CALENDAR)
# Which field of the schedule decides about a skipped occurrence.
_POLICY_OF = {
    Run.Reason.OVERLAP: "overlap",
    Run.Reason.MISFIRE: "misfire",
    Run.Reason.COALESCED: "misfire",
    Run.Reason.EXPIRED: "start_deadline_seconds",
    Run.Reason.CALENDAR: "calendar",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that is known; ``code`` never changes, ``label`` is for people."""

    code: str
    label: str
    value: datetime | str | int

    @property
    def is_instant(self) -> bool:
        """Return True where the value is an instant, which people read in their zone."""
        return isinstance(self.value, datetime)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InstantAnswer:
    """Why ``at`` is as it is: a stable ``code``, one sentence, and what it rests on."""

    at: datetime
    code: str
    sentence: str
    facts: tuple[Fact, ...] = ()
    run: Run | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """The instant that is meant, and what its wall time is in the schedule's zone.

    ``at`` is the schedule's own instant within the second that was asked for, where there
    is one. ``wall`` is naive; ``skipped`` where the clocks jump over it.
    """

    at: datetime
    wall: datetime
    skipped: bool = False
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """All that is read about one question."""

    schedule: Schedule
    rule: Timetable
    asked: _Asked
    now: datetime
    entries: Sequence[AuditEntry]
    problem: str

    @property
    def at(self) -> datetime:
        return self.asked.at

    @property
    def was_replanned(self) -> bool:
        """Return True where the rule may have been another one at the instant."""
        planned_from = self.schedule.planned_from
        return planned_from is not None and planned_from > self.at

    @property
    def rule_edit(self) -> AuditEntry | None:
        """Return the first change of the rule after the instant, as the audit has it."""
        return next(
            (
                entry
                for entry in self.entries
                if entry.at > self.at
                and entry.verb == AuditEntry.Verb.CHANGE
                and _RULE_FIELDS.intersection(entry.after or {})
            ),
            None,
        )


def read_when(text: str) -> datetime:
    """Return what a person typed, naive without an offset. Raise ValueError with the words."""
    try:
        when = parse_wall(text)
    except ValueError:
        message = _("%r: not a date or time. Write 2027-03-12T06:00 or 2027-03-12T06:00Z.")
        raise ValueError(message % text) from None
    if not FIRST_YEAR <= when.year <= LAST_YEAR:
        message = _("%(text)r: year must be from %(first)d to %(last)d.")
        raise ValueError(message % {"text": text, "first": FIRST_YEAR, "last": LAST_YEAR})
    return when


def explain_instant(schedule: Schedule, when: datetime, *, now: datetime) -> InstantAnswer:
    """Return why ``schedule`` ran or did not run at ``when``, to the second.

    A naive ``when`` is wall time of the schedule's zone. At most ten queries; writes
    nothing and asks no lock backend.
    """
    rule, problem = _rule_of(schedule)
    case = _Case(
        schedule=schedule,
        rule=rule,
        asked=_asked(schedule, rule, when),
        now=now,
        entries=_audit_of(schedule),
        problem=problem,
    )
    answer = _answer(case)
    return dataclasses.replace(answer, facts=(*_common_facts(case), *answer.facts))


def _rule_of(schedule: Schedule) -> tuple[Timetable, str]:
    """Return the timetable and no problem; for a rule that is not valid, one without instants."""
    try:
        return schedule.timetable(), ""
    except TimetableError as error:
        return Union(()), str(error)


# --- which instant is meant -------------------------------------------------------


def _asked(schedule: Schedule, rule: Timetable, when: datetime) -> _Asked:
    where = _zone_of(schedule)
    if when.tzinfo is not None:
        at = _own_instant(rule, when.astimezone(UTC).replace(microsecond=0))
        return _Asked(at, at.astimezone(where).replace(tzinfo=None))
    wall = when.replace(microsecond=0)
    passes = [wall.replace(tzinfo=where, fold=fold).astimezone(UTC) for fold in (0, 1)]
    shown = [each.astimezone(where).replace(tzinfo=None) for each in passes]
    if wall not in shown:
        return _skipped_wall(rule, wall, passes)
    first, second = _own_instant(rule, passes[0]), _own_instant(rule, passes[1])
    if passes[0] == passes[1]:
        return _Asked(first, wall)
    if not rule.matches(first) and rule.matches(second):
        return _Asked(second, wall, note=_("This wall time happens twice; the second is meant."))
    return _Asked(first, wall, note=_("This wall time happens twice; the first is meant."))


def _zone_of(schedule: Schedule) -> tzinfo:
    try:
        return zone(schedule.timezone)
    except TimetableError:
        return UTC


def _own_instant(rule: Timetable, second: datetime) -> datetime:
    """Return the instant of the rule within the second, else the second itself."""
    found = rule.next_after(second - _MICROSECOND)
    return found if found is not None and found < second + _SECOND else second


def _skipped_wall(rule: Timetable, wall: datetime, passes: Sequence[datetime]) -> _Asked:
    """Return the instant that makes up for a wall time that the clocks jump over."""
    note = _("This wall time does not exist: the clocks jump over it.")
    if any(_names_wall(part, wall) for part in parts(_inner(rule))):
        around = rule.between(min(passes) - _MICROSECOND, max(passes), limit=_GAP_INSTANTS)
        for at in around:
            change = clock_change(_inner(rule), at)
            if change is not None and change.kind == "gap":
                return _Asked(at, wall, note=note)
    return _Asked(max(passes), wall, skipped=True, note=note)


def _names_wall(part: Timetable, wall: datetime) -> bool:
    """Return True where the rule names this wall time, whatever the clocks of its zone do."""
    if not isinstance(part, WallTimetable) or not dataclasses.is_dataclass(part):
        return False
    return bool(dataclasses.replace(part, timezone="UTC").matches(wall.replace(tzinfo=UTC)))


def _inner(rule: Timetable) -> Timetable:
    return rule.timetable if isinstance(rule, Excluding) else rule


def _audit_of(schedule: Schedule) -> list[AuditEntry]:
    entries = AuditEntry.objects.filter(object_type="schedule", object_id=str(schedule.pk))
    return list(entries.order_by("at", "id"))


# --- the order of the questions ---------------------------------------------------


def _answer(case: _Case) -> InstantAnswer:
    run = None if case.asked.skipped else _run_of(case)
    if run is not None:
        return _of_run(case, run)
    if case.problem:
        why = _("The rule of the schedule is not valid, so it names no instants: %s")
        return InstantAnswer(at=case.at, code="invalid", sentence=why % case.problem)
    if case.at > case.now:
        return _of_rule(case) or _of_coming(case)
    if case.at < case.schedule.created_at:
        return _before_creation(case)
    paused = _of_pause(case)
    if case.rule_edit is not None:
        return paused or _before_edit(case, case.rule_edit)
    return _of_rule(case) or paused or _of_past(case)


def _run_of(case: _Case) -> Run | None:
    """Return the row of the occurrence, else the row that stands for it among others."""
    runs = Run.objects.filter(schedule=case.schedule.pk).select_related("node", "schedule")
    second = case.at.replace(microsecond=0)
    exact = runs.filter(scheduled_at__gte=second, scheduled_at__lt=second + _SECOND).first()
    if exact is not None:
        return exact
    # Another schedule started it, for an instant of its own.
    started = runs.filter(
        chain_start__schedule=case.schedule.pk,
        chain_start__scheduled_at__gte=second,
        chain_start__scheduled_at__lt=second + _SECOND,
    ).last()
    if started is not None or case.rule_edit is not None or not case.rule.matches(case.at):
        return started
    before = runs.filter(scheduled_at__lt=case.at, state=Run.State.SKIPPED)
    spans = before.filter(reason__in=_SPAN_REASONS).order_by("-scheduled_at")
    return next((run for run in spans[:_SPANS_LOOKED_AT] if _covers(run, case)), None)


def _covers(run: Run, case: _Case) -> bool:
    """Return True where the row stands for the instant, and today's rule had made the row."""
    last, own = _last_of(run), run.scheduled_at or run.due_at
    if case.at > last:
        return False
    decided_at, planned_from = run.finished_at, case.schedule.planned_from
    if planned_from is None or (decided_at is not None and planned_from <= decided_at):
        return True
    details = run.details if isinstance(run.details, dict) else {}
    return case.rule.count(own - _MICROSECOND, last) == details.get("count")


def _last_of(run: Run) -> datetime:
    """Return the last occurrence that the row stands for; its own where there is one only."""
    own: datetime = run.scheduled_at or run.due_at
    details = run.details if isinstance(run.details, dict) else {}
    try:
        last = parse_datetime(str(details.get("last_at", "")))
    except ValueError:
        return own
    return own if last is None or last.tzinfo is None else last


# --- a row exists -----------------------------------------------------------------


def _of_run(case: _Case, run: Run) -> InstantAnswer:
    attempts = list(run.attempts.order_by("number"))
    found = explain(run, case.now, attempts)
    sentence, code = found.why, _code_of(run)
    if run.reason == Run.Reason.CALENDAR and case.at != run.scheduled_at:
        # The row names the reason of its first day, which may be another one.
        sentence = _("It did not run: a calendar excludes the day.")
    gap = _node_gap(case) if run.reason in (Run.Reason.MISFIRE, Run.Reason.COALESCED) else ()
    if gap and run.reason == Run.Reason.MISFIRE:
        sentence = _("It did not run: no node was alive, and when one looked it was too late.")
    if run.state == Run.State.QUEUED and run.due_at > case.now and run.is_held_back:
        sentence = _("It waits for its time: the schedule spreads its starts.")
    facts: list[Fact] = [Fact(code="run", label=_("run"), value=run.pk)]
    start = start_of(run)
    if start is not None:
        facts.append(Fact(code="parent", label=_("started by run"), value=start.parent_id))
        facts.append(Fact(code="started_by", label=_("how"), value=inert(chain_words(start))))
    facts += _decided(run)
    if found.blocked_by is not None:
        facts.append(Fact(code="blocked_by", label=_("blocked by run"), value=found.blocked_by))
    if found.stretch is not None:
        facts += _stretch_facts(found.stretch.first, found.stretch.last, found.stretch.count)
    facts += [*gap, *_policy(case.schedule, run)]
    facts += _texts(error=inert(run.error), advice=found.advice, warning=found.warning)
    return InstantAnswer(at=case.at, code=code, sentence=sentence, facts=tuple(facts), run=run)


def _code_of(run: Run) -> str:
    if run.state == Run.State.SKIPPED:
        return f"skipped_{run.reason}" if run.reason else "skipped"
    return {"succeeded": "ran", "claimed": "running"}.get(run.state, str(run.state))


def _decided(run: Run) -> Iterator[Fact]:
    node = node_label(run)
    if node:
        yield Fact(code="node", label=_("node"), value=node)
    if run.state == Run.State.QUEUED:
        yield Fact(code="due_at", label=_("starts at"), value=run.due_at)
    for code, label, value in (
        ("decided_at", _("decided at"), run.claimed_at),
        ("started_at", _("started at"), run.started_at),
        ("finished_at", _("finished at"), run.finished_at),
    ):
        if value is not None:
            yield Fact(code=code, label=label, value=value)


def _stretch_facts(first: datetime, last: datetime, count: int) -> Iterator[Fact]:
    yield Fact(code="occurrences", label=_("decided together, occurrences"), value=count)
    yield Fact(code="first_at", label=_("the first"), value=first)
    yield Fact(code="last_at", label=_("the last"), value=last)


def _policy(schedule: Schedule, run: Run) -> Iterator[Fact]:
    """Yield the policy of the schedule that decides such a case, as it stands now."""
    if run.state != Run.State.SKIPPED or run.reason not in _POLICY_OF:
        return
    name = _POLICY_OF[Run.Reason(run.reason)]
    value = getattr(schedule, name)
    if value in (None, ""):
        return
    label = str(Schedule._meta.get_field(name).verbose_name)  # type: ignore[union-attr]
    facts = {"field": label, "value": value}
    yield Fact(code="policy", label=_("policy now"), value=f"{name} = {value}")
    yield Fact(
        code="change",
        label=_("to change it"),
        value=_("edit “%(field)s” of the schedule, now %(value)s") % facts,
    )


def _texts(*, error: str, advice: str, warning: str) -> Iterator[Fact]:
    for code, label, text in (
        ("error", _("error"), error),
        ("advice", _("advice"), advice),
        ("warning", _("warning"), warning),
    ):
        if text:
            yield Fact(code=code, label=label, value=text)


def _node_gap(case: _Case) -> tuple[Fact, ...]:
    """Return from when to when no node was alive around the instant; nothing if not certain."""
    if case.at < case.now - _NODES_KEPT:
        return ()
    nodes = list(Node.objects.values_list("started_at", "expires_at"))
    if any(started <= case.at <= expires for started, expires in nodes):
        return ()
    ended = [expires for _started, expires in nodes if expires < case.at]
    begun = [started for started, _expires in nodes if started > case.at]
    if not begun:
        return ()
    facts = [Fact(code="no_node_until", label=_("no node alive until"), value=min(begun))]
    if ended:
        facts.insert(0, Fact(code="no_node_from", label=_("no node alive from"), value=max(ended)))
    return tuple(facts)


# --- the rule does not plan it ----------------------------------------------------


def _of_rule(case: _Case) -> InstantAnswer | None:
    """Return why today's rule, bounds and calendar do not plan the instant; None if they do."""
    schedule, at = case.schedule, case.at
    if case.asked.skipped or not case.rule.matches(at):
        return _not_of_rule(case)
    if schedule.starts_at is not None and at < schedule.starts_at:
        fact = Fact(code="starts_at", label=_("not before"), value=schedule.starts_at)
        why = _("the instant is before the schedule's “not before”")
        return _unplanned(case, "before_start", why, (fact,))
    if schedule.ends_at is not None and at > schedule.ends_at:
        fact = Fact(code="ends_at", label=_("not after"), value=schedule.ends_at)
        why = _("the instant is after the schedule's “not after”")
        return _unplanned(case, "after_end", why, (fact,))
    excluded = schedule.excluded(at)
    if excluded:
        return _unplanned(case, "calendar", inert(excluded), _calendar(schedule))
    return None


def _not_of_rule(case: _Case) -> InstantAnswer:
    inner, asked = _inner(case.rule), case.asked
    if not case.schedule.has_timetable:
        why = _("the schedule has no timetable, it runs only by hand or after another one")
        return _unplanned(case, "no_timetable", why, ())
    if not asked.skipped and inner.matches(asked.at):
        why = _("the calendar excludes this day and moves its occurrences to another day")
        found = (*_calendar(case.schedule), *_nearest(case))
        return _unplanned(case, "calendar_moved", why, found)
    if any(_names_wall(part, asked.wall) for part in parts(inner)):
        field = "gap" if asked.skipped else "fold"
        value = f"{field} = {getattr(case.schedule, field)}"
        policy = Fact(code="policy", label=_("policy now"), value=value)
        return _unplanned(case, f"clock_{field}", _clock_reason(field), (policy, *_nearest(case)))
    facts = {"rule": case.schedule.in_words(), "zone": case.schedule.timezone}
    why = _("the rule means “%(rule)s” (%(zone)s)") % facts
    return _unplanned(case, "not_in_rule", why, _nearest(case))


def _clock_reason(field: str) -> str:
    if field == "gap":
        return _("the clocks jump over this time, and the rule leaves it out")
    return _("the clocks show this time twice, and the rule runs at the other one")


def _unplanned(case: _Case, code: str, why: str, facts: Sequence[Fact]) -> InstantAnswer:
    """Return the answer in the tense that is certain: the rule may have been another one."""
    if case.at > case.now:
        sentence = _("It will not run: %s.")
    elif case.was_replanned:
        sentence = _("No run is recorded. As the schedule stands now, %s.")
        facts = (*facts, *_planned_from(case.schedule))
    elif code == "calendar":
        sentence = _("It did not run: %s.")
    else:
        sentence = _("It was never planned: %s.")
    return InstantAnswer(at=case.at, code=code, sentence=sentence % why, facts=tuple(facts))


def _planned_from(schedule: Schedule) -> tuple[Fact, ...]:
    if schedule.planned_from is None:
        return ()
    label = _("planned anew from")
    return (Fact(code="planned_from", label=label, value=schedule.planned_from),)


def _calendar(schedule: Schedule) -> tuple[Fact, ...]:
    action = f"calendar_action = {schedule.calendar_action}"
    return (
        Fact(code="calendar", label=_("calendar"), value=str(schedule.calendar)),
        Fact(code="policy", label=_("policy now"), value=action),
    )


def _nearest(case: _Case) -> tuple[Fact, ...]:
    """Return the nearest instants of today's rule on both sides."""
    found = (
        ("before", _("nearest before"), case.rule.previous_before(case.at)),
        ("after", _("nearest after"), case.rule.next_after(case.at)),
    )
    return tuple(Fact(code=code, label=label, value=value) for code, label, value in found if value)


# --- the rule plans it, and no row exists -----------------------------------------


def _before_creation(case: _Case) -> InstantAnswer:
    fact = Fact(code="created_at", label=_("created at"), value=case.schedule.created_at)
    why = _("It was never planned: the schedule was created later.")
    return InstantAnswer(at=case.at, code="before_creation", sentence=why, facts=(fact,))


def _before_edit(case: _Case, entry: AuditEntry) -> InstantAnswer:
    facts = (
        Fact(code="edited_at", label=_("changed at"), value=entry.at),
        Fact(code="edited_by", label=_("changed by"), value=entry.actor),
        Fact(code="edit", label=_("change"), value=inert(audit.shown(entry.before, entry.after))),
    )
    why = _("No run is recorded, and the timetable has been changed since.")
    return InstantAnswer(at=case.at, code="before_edit", sentence=why, facts=facts)


def _of_pause(case: _Case) -> InstantAnswer | None:
    """Return who had paused the schedule at the instant, from the audit; None if nobody."""
    changes = [entry for entry in case.entries if "state" in (entry.after or {})]
    earlier = [entry for entry in changes if entry.at <= case.at]
    if not earlier or (earlier[-1].after or {})["state"] != Schedule.State.PAUSED:
        return _of_standing_pause(case) if not changes else None
    entry = earlier[-1]
    resumed = next((each for each in changes if each.at > case.at), None)
    until = None if resumed is None else resumed.at
    reason = entry.reason or str((entry.after or {}).get("state_reason", ""))
    return _paused(case, since=entry.at, by=entry.actor, reason=reason, until=until)


def _of_standing_pause(case: _Case) -> InstantAnswer | None:
    """Return a pause that is on the row alone, because it was made past the audit."""
    schedule = case.schedule
    since = schedule.state_at
    if schedule.state != Schedule.State.PAUSED or since is None or since > case.at:
        return None
    return _paused(
        case, since=since, by=schedule.state_by, reason=schedule.state_reason, until=None
    )


def _paused(
    case: _Case, *, since: datetime, by: str, reason: str, until: datetime | None
) -> InstantAnswer:
    facts = [Fact(code="paused_from", label=_("paused from"), value=since)]
    if until is not None:
        facts.append(Fact(code="paused_until", label=_("paused until"), value=until))
    said = {"by": inert(by) or _("somebody"), "reason": inert(reason) or _("no reason given")}
    why = _("It was not planned: %(by)s had paused the schedule (%(reason)s).") % said
    return InstantAnswer(at=case.at, code="paused", sentence=why, facts=tuple(facts))


def _of_past(case: _Case) -> InstantAnswer:
    schedule, at = case.schedule, case.at
    is_planned = schedule.state == Schedule.State.ACTIVE and schedule.next_run_at is not None
    if is_planned and schedule.next_run_at <= at:
        return _of_due(case)
    oldest, newest = _kept(schedule)
    is_limited = schedule.max_runs is not None and schedule.runs_planned >= schedule.max_runs
    if is_limited and newest is not None and newest < at:
        return _beyond_limit(case)
    if oldest is None or at < oldest:
        missing = schedule.runs_planned - _occurrence_rows(schedule).count()
        if missing > 0:
            return _pruned(case, missing, oldest)
    if schedule.state == Schedule.State.INVALID:
        return _invalid(case)
    if case.was_replanned:
        why = _("No run is recorded: the schedule was planned anew later, and from then on only.")
        return InstantAnswer(at=at, code="before_edit", sentence=why, facts=_planned_from(schedule))
    return _unknown(case)


def _occurrence_rows(schedule: Schedule) -> RunQuerySet:
    return Run.objects.filter(schedule=schedule.pk, scheduled_at__isnull=False)


def _kept(schedule: Schedule) -> tuple[datetime | None, datetime | None]:
    """Return the oldest and the newest occurrence that have a row."""
    planned = _occurrence_rows(schedule).order_by("scheduled_at")
    instants = planned.values_list("scheduled_at", flat=True)
    return instants.first(), instants.last()


def _pruned(case: _Case, missing: int, oldest: datetime | None) -> InstantAnswer:
    facts = [Fact(code="missing", label=_("runs deleted"), value=missing)]
    if oldest is not None:
        facts.append(Fact(code="oldest_at", label=_("oldest run kept"), value=oldest))
    why = _("Not known any more: the history of that time was deleted.")
    return InstantAnswer(at=case.at, code="pruned", sentence=why, facts=tuple(facts))


def _beyond_limit(case: _Case) -> InstantAnswer:
    schedule = case.schedule
    facts = (
        Fact(code="max_runs", label=_("runs at most"), value=schedule.max_runs or 0),
        Fact(code="runs_planned", label=_("runs so far"), value=schedule.runs_planned),
    )
    why = _("It was never planned: the schedule had all of its runs already.")
    return InstantAnswer(at=case.at, code="beyond_max_runs", sentence=why, facts=facts)


def _invalid(case: _Case) -> InstantAnswer:
    reason = inert(case.schedule.state_reason)
    why = _("No run is recorded, and the schedule is invalid now: %s") % reason
    return InstantAnswer(at=case.at, code="invalid", sentence=why)


def _unknown(case: _Case) -> InstantAnswer:
    schedule = case.schedule
    facts = [Fact(code="state", label=_("state now"), value=str(schedule.get_state_display()))]
    if schedule.next_run_at is not None:
        facts.append(Fact(code="next_run_at", label=_("next run"), value=schedule.next_run_at))
    facts += _planned_from(schedule)
    why = _("Not known: today's rule names this instant, and no run of it is recorded.")
    return InstantAnswer(at=case.at, code="unknown", sentence=why, facts=tuple(facts))


# --- due, and to come -------------------------------------------------------------


def _of_due(case: _Case) -> InstantAnswer:
    members = membership()
    code, why = _waits_for(case, members)
    late = (case.now - case.at).total_seconds()
    grace = case.schedule.misfire_grace_seconds or get_config().misfire_grace_seconds
    facts = [
        Fact(code="late_seconds", label=_("seconds late"), value=int(late)),
        Fact(code="misfire_grace_seconds", label=_("late after (seconds)"), value=int(grace)),
        Fact(code="nodes_alive", label=_("nodes alive"), value=len(members.alive)),
    ]
    active = Run.objects.filter(schedule=case.schedule.pk).active().order_by("id").first()
    if active is not None:
        facts.append(Fact(code="active_run", label=_("active run"), value=active.pk))
    return InstantAnswer(at=case.at, code=code, sentence=why, facts=tuple(facts))


def _waits_for(case: _Case, members: Membership) -> tuple[str, str]:
    """Return the code and sentence for an occurrence that is due and that nobody claimed."""
    if not members.alive:
        return "due_no_node", _("It is due and waits: no node is alive.")
    taking = [node for node in members.alive if node.state == Node.State.ACTIVE]
    if not taking:
        return "due_draining", _("It is due and waits: all nodes alive are draining.")
    level = case.schedule.lock_level
    alerts = [node.alert for node in taking if level in node.alert]
    if _is_strict(level) and len(alerts) == len(taking):
        why = _("It is due and waits: %s.") % inert(alerts[0]).rstrip(".")
        return "due_lock_away", why
    if all(node.running >= node.slots for node in taking):
        return "due_busy", _(
            "It is due and waits: by their heartbeats, no node that takes runs has a free slot."
        )
    return "due", _("It is due: no node has claimed it yet.")


def _is_strict(level: str) -> bool:
    try:
        return get_level(level).is_strict
    except ConfigurationError:
        return True  # it waits until the level can be used


def _of_coming(case: _Case) -> InstantAnswer:
    schedule, at = case.schedule, case.at
    if schedule.state == Schedule.State.PAUSED:
        said = {
            "by": inert(schedule.state_by) or _("somebody"),
            "reason": inert(schedule.state_reason) or _("no reason given"),
        }
        why = _("It will not run unless resumed: %(by)s has paused the schedule (%(reason)s).")
        return InstantAnswer(at=at, code="paused", sentence=why % said)
    if schedule.state == Schedule.State.INVALID:
        why = _("It will not run: the schedule is invalid: %s") % inert(schedule.state_reason)
        return InstantAnswer(at=at, code="invalid", sentence=why)
    if _is_beyond_limit(schedule, at):
        why = _("It will run only if an earlier one does not: the runs are used up before.")
        return dataclasses.replace(_beyond_limit(case), sentence=why)
    if schedule.state == Schedule.State.EXHAUSTED:
        why = _("It will not run: the schedule is finished. %s") % inert(schedule.state_reason)
        return InstantAnswer(at=at, code="exhausted", sentence=why)
    if schedule.next_run_at is not None and schedule.next_run_at > at:
        return _unknown(case)
    fact = Fact(code="due_at", label=_("starts at"), value=schedule.spread(at))
    why = _("It is still to come.")
    return InstantAnswer(at=at, code="future", sentence=why, facts=(fact,))


def _is_beyond_limit(schedule: Schedule, at: datetime) -> bool:
    """Return True where the limit is reached before the instant if all before it run."""
    if schedule.max_runs is None or schedule.state != Schedule.State.ACTIVE:
        return False
    left = schedule.max_runs - schedule.runs_planned
    if schedule.next_run_at is None:
        return left <= 0
    before = schedule.timetable().count(schedule.next_run_at - _MICROSECOND, at - _MICROSECOND)
    return before >= left


# --- what is said in each case ----------------------------------------------------


def _common_facts(case: _Case) -> Iterable[Fact]:
    if case.asked.note:
        yield Fact(code="wall_time", label=_("wall time"), value=case.asked.note)
    yield Fact(code="rule", label=_("rule now"), value=case.schedule.in_words())
