"""How states look: a symbol and a word, with a colour that only repeats them."""

from __future__ import annotations

from distcron_app.cli.console import Cell
from distcron_app.models import Run, Schedule

__all__ = ["cell", "run_label", "schedule_label"]

# Symbol and colour of each state that is stored or computed.
_LOOKS = {
    "active": ("●", "green"),
    "paused": ("⏸", "yellow"),
    "exhausted": ("■", "grey"),
    "invalid": ("⚠", "red"),
    "failing": ("✖", "red"),
    "queued": ("○", "cyan"),
    "claimed": ("○", "cyan"),
    "running": ("▶", "cyan"),
    "succeeded": ("✔", "green"),
    "failed": ("✖", "red"),
    "cancelled": ("■", "grey"),
    "lost": ("✖", "red"),
    "skipped": ("⤼", "yellow"),
    "alive": ("✔", "green"),
    "suspect": ("⚠", "yellow"),
    "draining": ("⏸", "yellow"),
    "left": ("■", "grey"),
    "dead": ("✖", "red"),
    "healthy": ("✔", "green"),
    "expires": ("○", "yellow"),
    "stuck": ("✖", "red"),
    "ok": ("✔", "green"),
    "warn": ("⚠", "yellow"),
    "bad": ("✖", "red"),
}


def cell(state: str, label: object) -> Cell:
    """Return the state as symbol and word."""
    symbol, colour = _LOOKS[state]
    return Cell(f"{symbol} {label}", colour)


def schedule_label(state: str) -> str:
    """Return the word for a stored state of a schedule."""
    return str(Schedule.State(state).label)


def run_label(state: str) -> str:
    """Return the word for a state of a run."""
    return str(Run.State(state).label)
