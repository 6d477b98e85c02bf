"""``schedulerctl output``: print what a run has written, and on request what follows."""

from __future__ import annotations

import threading
from typing import Any

from django.utils.translation import gettext as _

from distcron_app.cli.console import Console
from distcron_app.cli.exits import FAILED, Exit
from distcron_app.cli.lookup import find_run
from distcron_app.cli.running import outcome_text, run_facts
from distcron_app.clock import Clock
from distcron_app.explanations import inert
from distcron_app.models import Run, RunOutput

__all__ = ["newer_part", "show_output"]

_POLL_SECONDS = 0.5
# So much of what was printed last is looked for in a text whose middle was cut since.
_ANCHOR_LENGTH = 400


def show_output(console: Console, options: dict[str, Any]) -> None:
    """Print the output of a run to stdout; with ``--follow`` end with its outcome, 0 or 1."""
    run = _with_text(options["run"])
    follows = options["follow"]
    if console.view.as_json:
        if follows:
            run = _Follower(console, run, is_silent=True).until_final()
        console.json("output", run=run_facts(run), output=_text_of(run))
    elif follows:
        run = _Follower(console, run).until_final()
    else:
        _print(console, _whole_lines(_text_of(run)))
        if not _text_of(run):
            facts = {"run": run.pk, "state": run.get_state_display()}
            console.say(_("run %(run)d (%(state)s) has written nothing") % facts)
    if follows and run.state != Run.State.SUCCEEDED:
        raise Exit(FAILED, outcome_text(run))


def newer_part(before: str, now: str) -> str | None:
    """Return what ``now`` has beyond ``before``; None where they have nothing in common.

    The middle of a long text is cut, so its end may be all that is left of ``before``.

    >>> newer_part("one\\n", "one\\ntwo\\n")
    'two\\n'
    >>> newer_part("one\\ntwo\\nthree\\n", "one\\n[... 4 bytes cut ...]\\nthree\\nfour\\n")
    'four\\n'
    """
    if now.startswith(before):
        return now[len(before) :]
    anchor = before[-_ANCHOR_LENGTH:]
    while anchor:
        at = now.rfind(anchor)
        if at >= 0:
            return now[at + len(anchor) :]
        # From the next line on: the cut may be in the middle of what was printed last.
        anchor = anchor.partition("\n")[2]
    return None


class _Follower:
    """Prints what is new of a run's output."""

    def __init__(self, console: Console, run: Run, *, is_silent: bool = False) -> None:
        self._console = console
        self._run = run
        self._is_silent = is_silent
        self._clock = Clock()
        self._attempt = run.attempt
        self._printed = ""

    def until_final(self) -> Run:
        """Block until the run is final; return it as it is then."""
        never = threading.Event()
        while True:
            run = _with_text(self._run.pk)
            if not self._is_silent:
                self._tell(run)
            if run.is_final:
                _print(self._console, _whole_lines(self._printed)[len(self._printed) :])
                return run
            self._clock.wait(never, _POLL_SECONDS)

    def _tell(self, run: Run) -> None:
        if run.attempt != self._attempt:
            self._console.say(_("attempt %d") % run.attempt)
            self._attempt, self._printed = run.attempt, ""
        text = _text_of(run)
        new = newer_part(self._printed, text)
        if new is None:
            self._console.say(_("a part of the output was not seen"))
            new = text
        self._printed = text
        _print(self._console, new)


def _print(console: Console, text: str) -> None:
    console.out.write(inert(text), end="")
    console.out.flush()


def _whole_lines(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"


def _with_text(run_id: int) -> Run:
    # By one query: the state and the text of one moment.
    run = Run.objects.select_related("schedule", "node", "text").filter(pk=run_id).first()
    return run or find_run(run_id)


def _text_of(run: Run) -> str:
    text: RunOutput | None = getattr(run, "text", None)
    return text.output if text else ""
