"""What ``runscheduler`` prints: lines for a person, or one JSON object per event.

It writes to its stream directly, so that a node is never silent whatever LOGGING says.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TextIO
from zoneinfo import ZoneInfo

from django.utils import formats
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from distcron_app.clock import Clock
from distcron_app.timetable import zone

__all__ = ["JsonConsole", "TextConsole"]

# Lines about single runs in one second; more are counted and summed up.
LINES_PER_SECOND = 40
_RUN_EVENTS = frozenset({"run_started", "run_finished", "skipped", "stood_back"})
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\x1b": "\\e", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_SYMBOLS = {
    "run_started": ("▶", ">"),
    "succeeded": ("✔", "+"),
    "failed": ("✖", "x"),
    "skipped": ("⤼", "~"),
    "stood_back": ("·", "."),
    "warning": ("⚠", "!"),
    "good": ("✔", "+"),
}
_COLOURS = {"succeeded": "32", "good": "32", "failed": "31", "warning": "33", "stood_back": "2"}


class JsonConsole:
    """One line of JSON per event: ``{"at": …, "event": …, …facts}``."""

    def __init__(self, stream: TextIO, clock: Clock | None = None) -> None:
        self._stream = stream
        self._clock = clock or Clock()
        self._lock = threading.Lock()

    def __call__(self, event: str, **facts: Any) -> None:
        """Write one event. Safe from any thread."""
        entry = {"at": self._clock.now().isoformat(), "event": event, **facts}
        line = json.dumps(entry, default=str, ensure_ascii=False)
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()


class TextConsole:
    """Readable lines: time in the project's zone, a symbol and a word, the facts."""

    def __init__(
        self, stream: TextIO, *, time_zone: str, colour: bool, clock: Clock | None = None
    ) -> None:
        self._stream = stream
        self._zone: ZoneInfo = zone(time_zone)
        self._colour = colour
        self._clock = clock or Clock()
        self._lock = threading.Lock()
        self._started: dict[int, float] = {}
        self._second = 0
        self._lines = 0
        self._unsaid = 0
        self._plain = not _can_encode(stream)

    def say(self, text: str) -> None:
        """Write a line as it is, for the banner."""
        with self._lock:
            self._write(text)

    def __call__(self, event: str, **facts: Any) -> None:
        """Write one event. Safe from any thread."""
        described = getattr(self, f"_on_{event}", None)
        symbol, text = described(facts) if described else ("warning", _unknown(event, facts))
        with self._lock:
            if event in _RUN_EVENTS and self._is_crowded():
                self._unsaid += 1
                return
            at = self._clock.now().astimezone(self._zone)
            stamp = at.strftime("%H:%M:%S.") + f"{at.microsecond // 1000:03d}"
            self._write(f"{stamp} {self._symbol(symbol)} {_one_line(text)}")

    def _is_crowded(self) -> bool:
        second = int(self._clock.monotonic())
        if second != self._second:
            unsaid, self._unsaid = self._unsaid, 0
            self._second, self._lines = second, 0
            if unsaid:
                more = ngettext("… and %d more event", "… and %d more events", unsaid) % unsaid
                self._write(" " * 15 + more)
        self._lines += 1
        return self._lines > LINES_PER_SECOND

    def _symbol(self, name: str) -> str:
        fancy, plain = _SYMBOLS[name]
        symbol = plain if self._plain else fancy
        colour = _COLOURS.get(name)
        return f"\x1b[{colour}m{symbol}\x1b[0m" if self._colour and colour else symbol

    def _write(self, text: str) -> None:
        if self._plain:
            text = text.encode("ascii", "replace").decode()
        self._stream.write(text + "\n")
        self._stream.flush()

    # --- one method per event: symbol and text ------------------------------------

    def _on_started(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        return "good", _("node %(node)s is active") % {"node": str(facts["node"])[:8]}

    def _on_run_started(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        self._started[facts["run"]] = self._clock.monotonic()
        lag = (self._clock.now() - facts["due_at"]).total_seconds()
        again = "" if facts["attempt"] == 1 else _("  attempt %d") % facts["attempt"]
        lag_text = _("lag %s") % _seconds(max(0.0, lag))
        return "run_started", f"{_column(facts)} {lag_text}{again}"

    def _on_run_finished(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        since = self._started.pop(facts["run"], None)
        took = "" if since is None else _seconds(self._clock.monotonic() - since)
        late = _("  reported late") if facts["late"] else ""
        error = f"  {facts['error']}" if facts["error"] else ""
        symbol = "succeeded" if facts["state"] == "succeeded" else "failed"
        return symbol, f"{_column(facts)} {took}{error}{late}"

    def _on_report_rejected(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        self._started.pop(facts["run"], None)
        text = _("report refused: the run was taken from this node")
        return "warning", f"{_column(facts)} {text}"

    def _on_skipped(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        details = facts["details"] or {}
        reasons = {
            "overlap": _("skipped: run %(blocked_by)s is still active"),
            "misfire": _("skipped: too late to run (%(count)s)"),
            "coalesced": _("skipped: folded into a later occurrence (%(count)s)"),
            "calendar": _("skipped: %(why)s"),
            "paused": _("skipped: the schedule is paused"),
        }
        known = {"count": 1, "blocked_by": "?", "why": ""} | details
        return "skipped", f"{_column(facts)} {reasons.get(facts['reason'], '') % known}"

    def _on_stood_back(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        text = _("another node has it")
        return "stood_back", f"{facts['schedule']:<24} {text}"

    def _on_invalid(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        text = _("cannot run and was marked invalid; its page says why")
        return "warning", f"{facts['schedule']:<24} {text}"

    def _on_paused(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        text = _("was paused, since it keeps failing; its page says more")
        return "warning", f"{facts['schedule']:<24} {text}"

    def _on_resumed(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        text = _("goes on, its pause is over")
        return "good", f"{facts['schedule']:<24} {text}"

    def _on_maintenance_on(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        return "warning", _("maintenance, nothing is claimed: %(reason)s (%(by)s)") % dict(facts)

    def _on_maintenance_off(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        return "good", _("maintenance is over, it claims again")

    def _on_node_dead(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        text = _("node %(node)s is dead: its lease expired") % {"node": str(facts["node"])[:8]}
        return "warning", text

    def _on_pruned(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        count = facts["runs"]
        text = ngettext("pruned %d run of the history", "pruned %d runs of the history", count)
        return "info", text % count

    def _on_recovered(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        parts = []
        if facts["requeued"]:
            parts.append(_("queued again: %s") % _numbers(facts["requeued"]))
        if facts["lost"]:
            parts.append(_("lost: %s") % _numbers(facts["lost"]))
        return "warning", _("recovered runs; %s") % "; ".join(parts)

    def _on_lease_lost(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        return "warning", _("run %(run)s was told to stop: %(cause)s") % dict(facts)

    def _on_worker_died(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        return "failed", _("%(cause)s, with %(runs)s") % {
            "cause": facts["cause"],
            "runs": _numbers(facts["runs"]),
        }

    def _on_worker_recycled(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        text = _("worker process %(pid)s is replaced by a fresh one, %(cause)s")
        return "good", text % dict(facts)

    def _on_over_limit(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        return "warning", _("run %(run)s was told to stop: %(cause)s") % dict(facts)

    def _on_stuck(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        text = _("run %(run)s is over its limit in a thread that does not stop")
        if facts["replaced"]:
            text = _("run %(run)s does not stop; a fresh worker takes the place of its worker")
        return "warning", text % dict(facts)

    def _on_start_refused(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        text = _("not started, others have taken over: %s") % _numbers(facts["runs"])
        return "warning", text

    def _on_fenced(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        text = _("other nodes declared this one dead; it goes on as node %(node)s")
        return "warning", text % {"node": str(facts["node"])[:8]}

    def _on_database_away(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        text = _("database unreachable, nothing is claimed until it is back: %s")
        return "failed", text % facts["cause"]

    def _on_database_back(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        return "good", _("database is back")

    def _on_locks_away(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        if facts["waits"]:
            text = _("lock level %(level)s unavailable, its schedules wait: %(cause)s")
            return "failed", text % facts
        return "warning", _("locks unavailable, the database decides alone: %(cause)s") % facts

    def _on_locks_back(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        return "good", _("locks are back (level %(level)s)") % facts

    def _on_retry_planned(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        self._started.pop(facts["run"], None)
        pause = (facts["due_at"] - self._clock.now()).total_seconds()
        text = _("tries again in %s") % _seconds(max(0.0, pause))
        return "warning", f"{_column(facts)} {text}  {facts['error']}"

    def _on_draining(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        text = ngettext(
            "draining: %(running)d run left, at most %(seconds)g s; a second signal stops at once",
            "draining: %(running)d runs left, at most %(seconds)g s; a second signal stops at once",
            facts["running"],
        )
        return "warning", text % dict(facts)

    def _on_cut(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        return "failed", _("cut off while running: %s") % _numbers(facts["runs"])

    def _on_left(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        return "good", _("node %(node)s has left") % {"node": str(facts["node"])[:8]}


def _unknown(event: str, facts: Mapping[str, Any]) -> str:
    return " ".join([event, *(f"{name}={value}" for name, value in facts.items())])


def _column(facts: Mapping[str, Any]) -> str:
    run = _("run %(numbers)s") % {"numbers": facts["run"]}
    return f"{facts['schedule']:<24} {run} "


def _numbers(run_ids: Sequence[int]) -> str:
    shown = ", ".join(str(run_id) for run_id in run_ids[:10])
    more = " …" if len(run_ids) > 10 else ""
    return _("run %(numbers)s") % {"numbers": shown + more}


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return _("%s ms") % round(seconds * 1000)
    if seconds < 100:
        return _("%s s") % formats.number_format(seconds, 2)
    return _("%s min") % formats.number_format(seconds / 60, 1)


def _one_line(text: str) -> str:
    """Escape what could forge a second line or move the cursor; colour is added later."""
    return "".join(_ESCAPES.get(character, character) for character in text)


def _can_encode(stream: TextIO) -> bool:
    try:
        "▶".encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
