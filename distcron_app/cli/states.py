"""How states look: a symbol and a word, with a colour that only repeats them."""

from __future__ import annotations

from django.utils.translation import gettext_lazy

from distcron_app.cli.console import Cell
from distcron_app.models import Run, Schedule

__all__ = ["cell", "node_label", "run_label", "schedule_label"]

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
    "over_limit": ("⚠", "yellow"),
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
# Words of the states of a node that are computed.
_NODE_LABELS = {
    "alive": gettext_lazy("alive"),
    "suspect": gettext_lazy("SUSPECT"),
    "draining": gettext_lazy("draining"),
    "left": gettext_lazy("left"),
    "dead": gettext_lazy("dead"),
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


def node_label(state: str) -> str:
    """Return the word for a computed state of a node."""
    return str(_NODE_LABELS[state])
