"""``schedulerctl prune``: deletes history beyond what shall be kept, batch by batch."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from django.utils import formats
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from distcron_app import lifecycle, operations
from distcron_app.cli.console import Console
from distcron_app.cli.exits import INTERRUPTED, REFUSED, Exit
from distcron_app.cli.lookup import actor_name, find_schedule, permitted_user
from distcron_app.clock import Clock
from distcron_app.models import Run

__all__ = ["prune_runs"]

_BAR_CELLS = 20
_LINE_EVERY_PERCENT = 10  # where there is no terminal on which a bar could move


def prune_runs(console: Console, options: dict[str, Any]) -> None:
    """Count what is beyond the limits; then, once confirmed, delete it."""
    user = permitted_user(options["user"], operations.PRUNE_RUNS)
    limits = _limits(options)
    prunable, total = lifecycle.count_prunable(limits), _total(limits)
    if options["dry_run"] or not prunable:
        _finish(console, options, prunable, total, deleted=0)
        return
    _confirm(console, prunable, total, is_agreed=options["yes"])
    progress = _Progress(console, prunable)
    with _stopped_by_interrupt() as stopped:

        def goes_on(count: int) -> bool:
            progress.show(count)
            return not stopped.is_set()

        try:
            deleted = operations.prune_history(
                limits,
                reason=options["reason"],
                actor=user.get_username() if user else actor_name(),
                user=user,
                via="cli",
                batch=options["batch"],
                goes_on=goes_on,
            )
        finally:
            progress.end()
    _finish(console, options, prunable, total, deleted=deleted)
    if stopped.is_set():
        raise Exit(INTERRUPTED, _("interrupted between two batches; the rest is still there."))


def _limits(options: dict[str, Any]) -> lifecycle.Limits:
    key = options["schedule"]
    return lifecycle.Limits(
        schedule_id=None if key is None else find_schedule(key).pk,
        keep_days=options["keep_days"],
        keep_failed=options["keep_failed"],
    )


def _total(limits: lifecycle.Limits) -> int:
    runs = Run.objects.order_by()
    if limits.schedule_id is not None:
        runs = runs.filter(schedule=limits.schedule_id)
    return runs.count()


def _finish(
    console: Console, options: dict[str, Any], prunable: int, total: int, *, deleted: int
) -> None:
    if console.view.as_json:
        console.json(
            "prune",
            dry_run=options["dry_run"],
            schedule=options["schedule"],
            runs=total,
            prunable=prunable,
            deleted=deleted,
        )
        return
    if options["dry_run"]:
        text = ngettext(
            "%(count)s of %(total)s run would be deleted.",
            "%(count)s of %(total)s runs would be deleted.",
            total,
        )
        console.line(text % {"count": _number(prunable), "total": _number(total)})
        console.say(_("Nothing was changed: this was a dry run."), "yellow")
    elif not prunable:
        console.line(_("Nothing to delete: all runs are within their limits."))
    else:
        text = ngettext("%s run deleted.", "%s runs deleted.", deleted)
        console.line(text % _number(deleted))


def _confirm(console: Console, prunable: int, total: int, *, is_agreed: bool) -> None:
    """Ask on a terminal. Raise Exit when the answer is not yes."""
    if is_agreed:
        return
    question = ngettext(
        "Delete %(count)s of %(total)s run?", "Delete %(count)s of %(total)s runs?", total
    ) % {"count": _number(prunable), "total": _number(total)}
    if not (sys.stdin.isatty() and console.err.is_tty):
        raise Exit(REFUSED, _("%s Not confirmed. Add --yes, or --dry-run to look.") % question)
    choices = _("[y/N]")
    console.err.write(f"{console.err.shown(question)} {choices} ", end="")
    console.err.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes", "ya"):
        raise Exit(REFUSED, _("not confirmed; nothing was changed."))


class _Progress:
    """How far the work is: a bar on a terminal, else a line for each tenth of it."""

    def __init__(self, console: Console, goal: int) -> None:
        self._console = console
        self._goal = goal
        self._clock = Clock()
        self._began = self._clock.monotonic()
        self._shown_percent = 0

    def show(self, count: int) -> None:
        """Say that ``count`` runs are deleted."""
        # More may have come beyond the limits since they were counted.
        goal = max(self._goal, count)
        percent = count * 100 // goal
        err = self._console.err
        if self._console.view.is_quiet:
            return
        if err.is_tty:
            err.write(f"\r{err.shown(self._text(count, goal, percent, bar=True))}\x1b[K", end="")
            err.flush()
        elif percent // _LINE_EVERY_PERCENT > self._shown_percent // _LINE_EVERY_PERCENT:
            self._shown_percent = percent
            self._console.say(self._text(count, goal, percent, bar=False))

    def end(self) -> None:
        """Leave the line of the bar."""
        if self._console.err.is_tty and not self._console.view.is_quiet:
            self._console.err.write("")

    def _text(self, count: int, goal: int, percent: int, *, bar: bool) -> str:
        rate = count / max(self._clock.monotonic() - self._began, 0.001)
        left = round((goal - count) / rate) if rate else 0
        done = percent * _BAR_CELLS // 100
        facts = {
            "count": _number(count),
            "goal": _number(goal),
            "bar": f"{'▓' * done}{'░' * (_BAR_CELLS - done)} " if bar else "",
            "percent": percent,
            "rate": _number(round(rate)),
            "left": f"{left // 60}:{left % 60:02}",
        }
        text = _(
            "%(count)s of %(goal)s runs deleted  %(bar)s%(percent)d %%  %(rate)s/s  ETA %(left)s"
        )
        return text % facts


@contextmanager
def _stopped_by_interrupt() -> Iterator[threading.Event]:
    """Let the first Ctrl-C set the event, so that a batch is finished; the second one interrupts.

    A library call from another thread keeps the process's own handling.
    """
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _number(number: int) -> str:
    return str(formats.number_format(number, force_grouping=True))
