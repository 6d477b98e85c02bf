"""``schedulerctl locks``: which locks are held, and how to end one by hand."""

from __future__ import annotations

import math
import shlex
import sys
import threading
from datetime import datetime
from typing import Any

from django.utils import formats
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from distcron_app import holdings, operations
from distcron_app.cli import states, times
from distcron_app.cli.console import Cell, Column, Console
from distcron_app.cli.exits import DEPENDENCY_DOWN, NOT_FOUND, REFUSED, USAGE, Exit
from distcron_app.cli.lookup import actor_name, permitted_user
from distcron_app.cli.width import display_width, pad
from distcron_app.clock import Clock
from distcron_app.holdings import HeldLock, Holdings, LevelState
from distcron_app.instants import database_now
from distcron_app.locks import level_problem
from distcron_app.models import Schedule

__all__ = ["show_locks"]

_CLEAR_SCREEN = "\x1b[H\x1b[2J"
_MOST_NAMED = 10  # locks that an error lists

_VERDICTS = {
    holdings.HEALTHY: gettext_lazy("healthy"),
    holdings.EXPIRES: gettext_lazy("expires by itself"),
    holdings.STUCK: gettext_lazy("STUCK"),
}
_COLUMNS = (
    Column(title=gettext_lazy("NAME"), flexible=True),
    Column(title=gettext_lazy("LOCK"), only_wide=True),
    Column(title=gettext_lazy("LEVEL"), only_wide=True),
    Column(title=gettext_lazy("HOLDER"), flexible=True),
    Column(title=gettext_lazy("NODE"), only_wide=True),
    Column(title=gettext_lazy("RUN"), right=True),
    Column(title=gettext_lazy("AGE"), right=True),
    Column(title=gettext_lazy("TTL"), right=True),
    Column(title=gettext_lazy("RENEWALS"), right=True, only_wide=True),
    Column(title=gettext_lazy("FENCING"), right=True),
    Column(title=gettext_lazy("OWNER"), only_wide=True),
    Column(title=gettext_lazy("VERDICT")),
    Column(title=gettext_lazy("WHY"), only_wide=True),
)


def show_locks(console: Console, options: dict[str, Any]) -> None:
    """Show the locks that are held, or look at one, or release one."""
    if options["level"] and (problem := level_problem(options["level"])):
        raise Exit(USAGE, problem)
    _ACTIONS[options["action"]](console, options)


# --- the list ---------------------------------------------------------------------------------


def _list(console: Console, options: dict[str, Any]) -> None:
    if options["watch"] is None:
        _show_all(console, options, _held(options, database_now()))
        return
    clock, never = Clock(), threading.Event()
    while True:
        now = database_now()
        held = _held(options, now)
        if not console.view.as_json:
            _begin_again(console, now, options["watch"])
        try:
            _show_all(console, options, held)
        except Exit as error:
            console.error(str(error))
        console.out.flush()
        clock.wait(never, options["watch"])


def _begin_again(console: Console, now: datetime, every: float) -> None:
    """Clear a terminal, which then shows the newest reading; a pipe keeps all of them."""
    if console.out.is_tty:
        console.out.write(_CLEAR_SCREEN, end="")
    facts = {"time": times.short_moment(now, console.view.zone, now), "seconds": every}
    console.line(_("locks at %(time)s, every %(seconds)g s, Ctrl-C ends") % facts, "grey")


def _show_all(console: Console, options: dict[str, Any], held: Holdings) -> None:
    if options["level"]:
        held = _only(held, options["level"])
    if any(level.answers for level in held.levels):
        _show(console, held)
    if held.unknown:
        raise Exit(DEPENDENCY_DOWN, _unknown_text(held))


def _held(options: dict[str, Any], now: datetime) -> Holdings:
    return holdings.held_locks(now, level=options["level"] or "")


def _only(held: Holdings, level: str) -> Holdings:
    return Holdings(
        levels=tuple(each for each in held.levels if each.name == level),
        locks=tuple(lock for lock in held.locks if lock.level == level),
    )


def _show(console: Console, held: Holdings) -> None:
    locks = held.locks
    if console.view.as_json:
        console.json(
            "locks",
            backend=held.levels[0].backend,
            levels=[_level_facts(level) for level in held.levels],
            locks=[_facts(lock) for lock in locks],
        )
        return
    if not locks:
        console.say(_("No lock is held (backend: %s).") % held.levels[0].backend)
        return
    console.table(_COLUMNS, [_row(lock) for lock in locks])
    for lock in locks:
        if lock.verdict == holdings.STUCK:
            command = f"schedulerctl locks release {shlex.quote(lock.handle)} --reason TEXT"
            console.say(f"{lock.handle}: {lock.why} {command}", "red")


def _unknown_text(held: Holdings) -> str:
    """Return which backends do not answer and why, each once."""
    texts = {
        _("Lock backend %(backend)r: unavailable, %(cause)s.")
        % {"backend": level.backend or level.name, "cause": level.problem}: None
        for level in held.unknown
    }
    return " ".join(texts)


# --- one lock ---------------------------------------------------------------------------------


def _show_one(console: Console, options: dict[str, Any]) -> None:
    lock = _found(options)
    if console.view.as_json:
        console.json("locks", lock=_facts(lock))
        return
    details = _details(lock)
    width = max(display_width(title) for title, _text in details)
    for title, text in details:
        console.line(f"{pad(title, width)}  {text}")


def _release(console: Console, options: dict[str, Any]) -> None:
    if not options["reason"]:
        raise Exit(USAGE, _("--reason: missing. Say why the lock is taken from its holder."))
    user = permitted_user(options["user"], operations.FORCE_RELEASE_LOCK)
    lock = _found(options)
    _confirm(console, lock, is_agreed=options["yes"])
    done = operations.release_lock(
        lock.name,
        level=lock.level,
        reason=options["reason"],
        actor=user.get_username() if user else actor_name(),
        user=user,
        via="cli",
    )
    if console.view.as_json:
        console.json("locks", released=_release_facts(lock, done))
    else:
        console.line(f"{lock.handle}: {done.in_words()}")
    if done.problem:
        raise Exit(DEPENDENCY_DOWN, done.problem)


def _found(options: dict[str, Any]) -> HeldLock:
    """Return the lock that is named, held or that of an active run. Raise Exit for none."""
    wanted, level = options["name"], options["level"] or ""
    held = _held(options, database_now())
    locks = holdings.matching(held, wanted, level) or _of_schedule(wanted, held)
    if len(locks) == 1:
        return locks[0]
    if locks:
        raise Exit(USAGE, _ambiguous_text(wanted, locks))
    if held.unknown:
        raise Exit(DEPENDENCY_DOWN, _unknown_text(held))
    raise Exit(NOT_FOUND, _not_held_text(wanted, held))


def _of_schedule(wanted: str, held: Holdings) -> list[HeldLock]:
    """Return the lock that an active run should hold and that was not seen."""
    schedule = Schedule.objects.filter(key=wanted).first()
    now = database_now()
    found = holdings.lock_of(schedule, now) if schedule else holdings.lock_named(wanted, now)
    return list(found.locks)


def _ambiguous_text(wanted: str, locks: list[HeldLock]) -> str:
    if len({lock.name for lock in locks}) == 1:
        message = _("lock %(name)r: held at the levels %(levels)s. Add --level.")
        return message % {"name": wanted, "levels": ", ".join(lock.level for lock in locks)}
    message = _("lock %(name)r: several are meant. Write one of %(names)s.")
    return message % {"name": wanted, "names": ", ".join(repr(lock.name) for lock in locks)}


def _not_held_text(wanted: str, held: Holdings) -> str:
    names = [lock.handle for lock in held.locks[:_MOST_NAMED]]
    if not names:
        return _("lock %r: not held; no lock is.") % wanted
    if len(held.locks) > _MOST_NAMED:
        names.append("…")
    return _("lock %(name)r: not held. Held: %(held)s") % {
        "name": wanted,
        "held": ", ".join(names),
    }


def _confirm(console: Console, lock: HeldLock, *, is_agreed: bool) -> None:
    """Say what follows, and ask on a terminal. Raise Exit when the answer is not yes."""
    if not console.view.as_json:
        for title, text in _details(lock):
            console.say(f"{title}: {text}")
        for text in holdings.follows(lock):
            console.say(text, "yellow")
    if is_agreed:
        return
    question = _("Release the lock %r?") % lock.handle
    if not (sys.stdin.isatty() and console.err.is_tty):
        raise Exit(REFUSED, _("%s Not confirmed. Add --yes.") % question)
    choices = _("[y/N]")
    console.err.write(f"{console.err.shown(question)} {choices} ", end="")
    console.err.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes", "ya"):
        raise Exit(REFUSED, _("not confirmed; nothing was changed."))


# --- texts ------------------------------------------------------------------------------------


def _row(lock: HeldLock) -> list[Cell | str]:
    info = lock.info
    return [
        lock.handle,
        lock.name,
        lock.level,
        _holder_text(lock),
        _node_text(lock),
        str(lock.run.pk) if lock.run else "-",
        _age_text(info.age_ms if info else None),
        _ttl_text(lock),
        "-" if info is None or info.renewals is None else str(info.renewals),
        str(lock.run.fencing_token) if lock.run else "-",
        (info.owner_token if info else None) or "-",
        states.cell(lock.verdict, _VERDICTS[lock.verdict]),
        lock.why,
    ]


def _details(lock: HeldLock) -> list[tuple[str, str]]:
    """Return title and text of what is known of one lock."""
    verdict = f"{_VERDICTS[lock.verdict]}. {lock.why}" if lock.verdict else _("not seen")
    return [
        (_("lock"), f"{lock.handle} ({lock.name})" if lock.schedule else lock.name),
        (_("level"), lock.level),
        (_("holder"), _holder_text(lock)),
        (_("node"), _node_text(lock)),
        (_("run"), f"{lock.run.pk}, {states.run_label(lock.run.state)}" if lock.run else "-"),
        (_("age"), _age_text(lock.info.age_ms if lock.info else None)),
        (_("TTL"), _ttl_text(lock)),
        (_("fencing token"), str(lock.run.fencing_token) if lock.run else "-"),
        (_("verdict"), verdict),
    ]


def _holder_text(lock: HeldLock) -> str:
    holder = (lock.info.note if lock.info else "") or _("unknown")
    return f"{holder} {lock.owner_prefix}…" if lock.owner_prefix else holder


def _node_text(lock: HeldLock) -> str:
    if lock.node is None:
        return "-"
    return f"{lock.node.name}, {states.node_label(lock.node_state)}"


def _age_text(age_ms: int | None) -> str:
    return "-" if age_ms is None else times.span_text(age_ms / 1000)


def _ttl_text(lock: HeldLock) -> str:
    """Return what is left of the TTL and what was granted, as in ``21.4/30 s``."""
    if lock.info is None:
        return "-"
    if lock.info.ttl_ms is None:
        return _("none")
    left, granted = lock.info.ttl_ms / 1000, lock.info.granted_ms
    if granted is None or granted < lock.info.ttl_ms:
        return times.duration_text(left)
    facts = {"left": _seconds_text(left), "granted": f"{granted / 1000:g}"}
    return _("%(left)s/%(granted)s s") % facts


def _seconds_text(seconds: float) -> str:
    return str(formats.number_format(seconds, 1)) if seconds < 100 else str(math.floor(seconds))


def _facts(lock: HeldLock) -> dict[str, Any]:
    info = lock.info
    return {
        "name": lock.name,
        "level": lock.level,
        "schedule": lock.schedule and lock.schedule.key,
        "concurrency_key": lock.concurrency_key,
        "holder": info and info.note,
        "owner_token": info and info.owner_token,
        "node": lock.node and lock.node.name,
        "node_state": lock.node_state or None,
        "ttl_ms": info and info.ttl_ms,
        "granted_ms": info and info.granted_ms,
        "age_ms": info and info.age_ms,
        "renewals": info and info.renewals,
        "run": lock.run and lock.run.pk,
        "fencing_token": lock.run and lock.run.fencing_token,
        "verdict": lock.verdict or None,
        "why": lock.why,
    }


def _level_facts(level: LevelState) -> dict[str, Any]:
    return {
        "name": level.name,
        "backend": level.backend,
        "answers": level.answers,
        "ping_ms": None if level.ping_ms is None else round(level.ping_ms, 1),
        "problem": level.problem,
        "members": [
            {"alias": member.alias, "state": member.state, "cause": member.cause}
            for member in level.members
        ],
    }


def _release_facts(lock: HeldLock, done: operations.LockRelease) -> dict[str, Any]:
    return {
        "name": lock.name,
        "level": lock.level,
        "schedule": lock.schedule and lock.schedule.key,
        "was_held": done.was_held,
        "problem": done.problem,
        "fencing_token": done.fencing_token,
        "requeued": list(done.requeued),
        "lost": list(done.lost),
    }


_ACTIONS = {None: _list, "ttl": _show_one, "release": _release}
