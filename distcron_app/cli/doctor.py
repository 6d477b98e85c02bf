"""``schedulerctl doctor``: what can make the promises untrue, with the consequence and the fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

import distcron_app
from distcron_app.cli import states, times
from distcron_app.cli.console import Console
from distcron_app.cli.exits import DEPENDENCY_DOWN, FAILED, USAGE, Exit
from distcron_app.cli.width import display_width, pad, wrapped
from distcron_app.clock import utc_now
from distcron_app.diagnosis import OK, PROBLEM, WARNING, Finding, diagnose

__all__ = ["show_diagnosis"]

_CLEAR_LINE = "\r\x1b[K"
_GAP = "  "
# On a terminal that is narrower than this, lines may break where they like.
_NARROWEST = 20
_MARKS = {
    OK: ("ok", gettext_lazy("ok")),
    WARNING: ("warn", gettext_lazy("warning")),
    PROBLEM: ("bad", gettext_lazy("problem")),
}
_AREAS = {
    "settings": gettext_lazy("settings"),
    "database": gettext_lazy("database"),
    "redis": gettext_lazy("redis"),
    "quorum": gettext_lazy("quorum"),
    "clocks": gettext_lazy("clock"),
    "nodes": gettext_lazy("nodes"),
    "schedules": gettext_lazy("schedules"),
    "host": gettext_lazy("host"),
    "timing": gettext_lazy("timing"),
    "stopping": gettext_lazy("stopping"),
}


def show_diagnosis(console: Console, options: dict[str, Any]) -> None:
    """Show every finding. Raise Exit when something needs a person."""
    progress = _Progress(console)
    try:
        findings = diagnose(
            latency_seconds=options["redis_latency"],
            supervisor_conf=options["supervisor_conf"],
            progress=progress,
        )
    except OSError as error:
        text = _("--supervisor-conf: cannot be read: %s") % (error.strerror or error)
        raise Exit(USAGE, text) from error
    finally:
        progress.clear()
    counts = {level: _count(findings, level) for level in _MARKS}
    healthy = not counts[PROBLEM] and not (options["strict"] and counts[WARNING])
    if console.view.as_json:
        _show_json(console, findings, counts, healthy=healthy)
    else:
        _show_table(console, findings)
    _conclude(console, findings, counts, healthy=healthy)


def _count(findings: Sequence[Finding], level: str) -> int:
    return sum(finding.level == level for finding in findings)


def _conclude(
    console: Console, findings: Sequence[Finding], counts: dict[str, int], *, healthy: bool
) -> None:
    problems = ngettext("%d problem", "%d problems", counts[PROBLEM]) % counts[PROBLEM]
    warnings = ngettext("%d warning", "%d warnings", counts[WARNING]) % counts[WARNING]
    text = f"{problems}, {warnings}"
    if healthy:
        console.say(text)
        return
    is_outage = any(finding.is_outage for finding in findings)
    raise Exit(DEPENDENCY_DOWN if is_outage else FAILED, text)


def _show_json(
    console: Console, findings: Sequence[Finding], counts: dict[str, int], *, healthy: bool
) -> None:
    console.json(
        "doctor",
        at=times.iso(utc_now()),
        distcron=distcron_app.__version__,
        healthy=healthy,
        problems=counts[PROBLEM],
        warnings=counts[WARNING],
        findings=[_facts(finding) for finding in findings],
    )


def _facts(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "area": finding.area,
        "subject": finding.subject or None,
        "level": finding.level,
        "text": finding.text,
        "consequence": finding.consequence,
        "fix": finding.fix,
        "outage": finding.is_outage,
    }


def _show_table(console: Console, findings: Sequence[Finding]) -> None:
    marks = {level: states.cell(state, label) for level, (state, label) in _MARKS.items()}
    mark_width = max(display_width(mark.text) for mark in marks.values())
    area_width = max(display_width(str(label)) for label in _AREAS.values())
    indent = mark_width + area_width + 2 * len(_GAP)
    for finding in _gathered(findings):
        mark = marks[finding.level]
        shown = console.out.shown(mark.text)
        head = console.out.painted(shown, mark.colour) + pad("", mark_width - display_width(shown))
        area = pad(str(_AREAS[finding.area]), area_width)
        for line in _paragraphs(console, finding, indent):
            console.out.write(f"{head}{_GAP}{area}{_GAP}{line}")
            head, area = " " * mark_width, " " * area_width


def _gathered(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings, with all that is well about one subject in one of them."""
    well: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        if finding.level == OK:
            well.setdefault((finding.area, finding.subject), []).append(finding.text)
    for finding in findings:
        if finding.level != OK:
            yield finding
        elif texts := well.pop((finding.area, finding.subject), None):
            yield Finding(
                code=finding.code, level=OK, subject=finding.subject, text=" · ".join(texts)
            )


def _paragraphs(console: Console, finding: Finding, indent: int) -> Iterator[str]:
    """Yield the lines of a finding, broken to a terminal and whole in a pipe."""
    said = f"{finding.subject}: {finding.text}" if finding.subject else finding.text
    fix = _("fix: %s") % finding.fix if finding.fix else ""
    for text in filter(None, (said, finding.consequence, fix)):
        shown = console.out.shown(text)
        if console.out.is_tty and not console.view.is_wide:
            yield from wrapped(shown, max(_NARROWEST, console.out.columns - indent))
        else:
            yield shown


class _Progress:
    """Overwrites one line of a terminal with how far a longer sample is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._percent = -1

    def __call__(self, subject: str, share: float) -> None:
        percent = int(min(share, 1.0) * 100)
        err = self._console.err
        if percent == self._percent or not err.is_tty or self._console.view.is_quiet:
            return
        self._percent = percent
        said = {"subject": subject, "percent": percent}
        text = _("measuring %(subject)s: %(percent)d %%") % said
        err.write(f"{_CLEAR_LINE}{err.shown(text)}", end="")
        err.flush()

    def clear(self) -> None:
        """Take the line away, if there is one."""
        if self._percent >= 0:
            self._console.err.write(_CLEAR_LINE, end="")
