"""Brings the rows to what the code asks for, one transaction for each that changes.

Each is decided again under its lock, so that several may sync at once: every change is
done, and is in the audit, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from distcron_app import audit, operations
from distcron_app.instants import database_now
from distcron_app.models import DEFINED_FIELDS, Calendar, Schedule
from distcron_app.sync.wanted import COLUMNS, Wanted, all_wanted

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractBaseUser

__all__ = ["Author", "Outcome", "SyncReport", "Synced", "sync"]

Outcome = Literal[
    "created", "changed", "adopted", "returned", "left", "unchanged", "refused", "unusable"
]
# Of these the row is not written.
_UNWRITTEN = ("unchanged", "refused", "unusable")
_FIELDS = (*DEFINED_FIELDS, "defined_in", "left_code_at")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """Who asked for the sync; ``user`` is None for whoever has no account here."""

    actor: str
    user: AbstractBaseUser | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """What became of one definition, or of one row that the code has dropped.

    ``changed`` are the columns that differed; ``problems`` say why it was refused, or
    cannot be used.
    """

    key: str
    job: str
    defined_in: str
    outcome: Outcome
    changed: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What a sync did, or would do; one entry for each definition and each dropped row."""

    entries: tuple[Synced, ...]

    @property
    def problems(self) -> list[str]:
        """Return what a person must mend, each with the place in the code."""
        message = _("Schedule %(key)r (%(place)s): %(problem)s")
        return [
            message % {"key": entry.key, "place": entry.defined_in, "problem": problem}
            for entry in self.entries
            for problem in entry.problems
        ]

    def has(self, *outcomes: Outcome) -> bool:
        """Return True where an entry ended in one of ``outcomes``."""
        return any(entry.outcome in outcomes for entry in self.entries)

    def in_words(self) -> str:
        """Return how many ended in which way: ``2 created, 1 changed``."""
        words: dict[Outcome, str] = {
            "created": _("%d created"),
            "changed": _("%d changed"),
            "adopted": _("%d taken over"),
            "returned": _("%d back in code"),
            "left": _("%d no longer in code"),
            "unchanged": _("%d unchanged"),
            "refused": _("%d refused"),
            "unusable": _("%d unusable"),
        }
        counts = {
            word: sum(entry.outcome == outcome for entry in self.entries)
            for outcome, word in words.items()
        }
        parts = [word % count for word, count in counts.items() if count]
        return ", ".join(parts) or _("none")


def sync(author: Author, *, adopt: Collection[str] = (), dry_run: bool = False) -> SyncReport:
    """Make the rows what the code defines, and return what was done, or would be.

    Keys in ``adopt`` are taken over from people. A fixed number of queries where nothing
    differs; each row that does costs one short transaction.
    """
    wanted = all_wanted({calendar.name: calendar for calendar in Calendar.objects.all()})
    keys = {each.key for each in wanted}
    stored = Schedule.objects.in_bulk(keys, field_name="key")
    dropped = [
        row
        for row in Schedule.objects.from_code().filter(left_code_at=None).order_by("key")
        if row.key not in keys
    ]
    steps = _Steps(author=author, adopt=frozenset(adopt), is_dry=dry_run)
    entries = [steps.bring(each, stored.get(each.key)) for each in wanted]
    entries += [steps.drop(row) for row in dropped]
    if not dry_run:
        _follow_moved_lines(entries, stored)
    return SyncReport(entries=tuple(entries))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """What is done to one row after the other."""

    author: Author
    adopt: frozenset[str]
    is_dry: bool

    def bring(self, wanted: Wanted, seen: Schedule | None) -> Synced:
        """Make the row what ``wanted`` asks for; ``seen`` was read without a lock."""
        outcome, changed = self._decide(wanted, seen)
        if outcome not in _UNWRITTEN and not self.is_dry:
            outcome, changed = self._write(wanted)
        problems = tuple(f"{field}: {problem}" for field, problem in wanted.problems)
        if outcome == "refused":
            problems = (_made_by_people(wanted.key),)
        return Synced(
            key=wanted.key,
            job=wanted.job.name,
            defined_in=wanted.job.source,
            outcome=outcome,
            changed=changed,
            problems=problems,
        )

    def drop(self, seen: Schedule) -> Synced:
        """Pause a row that the code defines no more, and say so; a paused one stays as it is."""
        if not self.is_dry:
            with transaction.atomic():
                self._drop_locked(seen)
        return Synced(key=seen.key, job=seen.job, defined_in=seen.defined_in, outcome="left")

    def _decide(self, wanted: Wanted, stored: Schedule | None) -> tuple[Outcome, tuple[str, ...]]:
        if wanted.row is None:
            return "unusable", ()
        if stored is None:
            return "created", ()
        changed = _differing(stored, wanted.row)
        if not stored.defined_in:
            return ("adopted", changed) if wanted.key in self.adopt else ("refused", ())
        if stored.left_code_at is not None:
            return "returned", changed
        # What is wanted can run, so a row that could not is mended by planning it again.
        is_broken = stored.state == Schedule.State.INVALID
        return ("changed" if changed or is_broken else "unchanged"), changed

    def _write(self, wanted: Wanted) -> tuple[Outcome, tuple[str, ...]]:
        try:
            with transaction.atomic():
                return self._write_locked(wanted)
        except IntegrityError:
            # Another sync created it between the look and the write. Not in the same
            # transaction: two whose insert was refused would wait for each other on MariaDB.
            with transaction.atomic():
                return self._write_locked(wanted)

    def _write_locked(self, wanted: Wanted) -> tuple[Outcome, tuple[str, ...]]:
        stored = _locked(key=wanted.key)
        outcome, changed = self._decide(wanted, stored)
        if stored is None:
            self._create(wanted)
        elif outcome not in _UNWRITTEN:
            self._change(stored, wanted, changed)
        return outcome, changed

    def _create(self, wanted: Wanted) -> None:
        row = wanted.row
        assert row is not None  # noqa: S101 - what cannot be used is not written
        row.defined_in = wanted.job.source
        row.save()
        self._record(row, "add", None, audit.snapshot(row), _("Defined in %s") % row.defined_in)

    def _change(self, stored: Schedule, wanted: Wanted, changed: Sequence[str]) -> None:
        before = audit.snapshot(stored)
        goes_on = stored.is_paused_by_code
        for name in changed:
            setattr(stored, name, getattr(wanted.row, name))
        stored.defined_in, stored.left_code_at = wanted.job.source, None
        stored.save(update_fields=_FIELDS)
        old, new = audit.changes(before, audit.snapshot(stored))
        self._record(stored, "change", old, new, _("Defined in %s") % stored.defined_in)
        if goes_on:
            reason = _("Defined in code again, in %s") % stored.defined_in
            operations.resume([stored], reason=reason, via="code", **self._who())

    def _drop_locked(self, seen: Schedule) -> None:
        row = _locked(pk=seen.pk)
        if row is None or not row.is_in_code or row.key != seen.key:
            return  # somebody else was here first
        reason = _("No longer defined in code (was %s)") % row.defined_in
        done = operations.pause(
            [row],
            reason=reason,
            via="code",
            only_if=lambda each: each.state != Schedule.State.EXHAUSTED,
            **self._who(),
        )
        # The instant of the pause itself: by that a return knows whose pause it was.
        left_at = done.changed[0].state_at if done.changed else database_now()
        Schedule.objects.filter(pk=row.pk).leave_code(left_at)
        if not done.changed:
            after = {"left_code_at": audit.json_value(left_at)}
            self._record(row, "change", {"left_code_at": None}, after, reason)

    def _record(
        self,
        row: Schedule,
        verb: str,
        before: Mapping[str, Any] | None,
        after: Mapping[str, Any],
        reason: str,
    ) -> None:
        audit.record(
            via="code",
            verb=verb,
            target=row,
            reason=reason,
            before=before,
            after=after,
            **self._who(),
        )

    def _who(self) -> dict[str, Any]:
        return {"actor": self.author.actor, "user": self.author.user}


def _locked(**which: Any) -> Schedule | None:
    return Schedule.objects.select_for_update().filter(**which).first()


def _differing(stored: Schedule, wanted: Schedule) -> tuple[str, ...]:
    return tuple(
        name
        for name, column in COLUMNS.items()
        if getattr(stored, column.attname) != getattr(wanted, column.attname)
    )


def _follow_moved_lines(entries: Collection[Synced], stored: Mapping[str, Schedule]) -> None:
    """Store where unchanged definitions are by now, all at once."""
    moved = []
    for entry in entries:
        row = stored.get(entry.key)
        if entry.outcome == "unchanged" and row and row.defined_in != entry.defined_in:
            row.defined_in = entry.defined_in
            moved.append(row)
    Schedule.objects.write_origins(moved)


def _made_by_people(key: str) -> str:
    message = _(
        "a schedule with this key was made by people. Give the one in code another key, or take "
        "theirs over: manage.py schedulerctl sync --adopt %s"
    )
    return message % key
