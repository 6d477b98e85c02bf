"""Whether whoever stops a node waits until its jobs are done.

Supervisor and systemd kill a process that has not ended in time. Their files are read
where this user may read them; Kubernetes' grace period cannot be seen from inside.
"""

from __future__ import annotations

import configparser
import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from django.utils.translation import gettext as _

from distcron_app.conf import Config
from distcron_app.diagnosis.finding import OK, PROBLEM, WARNING, Finding
from distcron_app.scheduler import CANCEL_GRACE_SECONDS

__all__ = [
    "Service",
    "judge_service",
    "look_at_stopping",
    "supervisor_services",
    "systemd_service",
]

_COMMAND = "runscheduler"
_SUPERVISOR = (
    *("/etc/supervisord.conf", "/etc/supervisor*/*.conf", "/etc/supervisor*/*.ini"),
    *("/etc/supervisor*/conf.d/*.conf", "/etc/supervisor*/conf.d/*.ini"),
)
_SYSTEMD = (
    *("/etc/systemd/system/*.service", "/run/systemd/system/*.service"),
    *("/lib/systemd/system/*.service", "/usr/local/lib/systemd/system/*.service"),
)
_SUPERVISOR_DEFAULT_SECONDS = 10.0
_SYSTEMD_DEFAULT_SECONDS = 90.0
_DRAIN_FLAG = re.compile(r"--drain-seconds[= ]\s*([\d.]+)")
# TERM is what both send by default; INT drains as well.
_DRAINING_SIGNALS = ("TERM", "INT")
_SPAN = re.compile(r"([\d.]+)\s*([a-zA-Z]*)")
_UNITS = {
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("us", "usec"), 0.000001),
    **dict.fromkeys(("ms", "msec"), 0.001),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A program that runs a node, as its supervisor knows it.

    ``stop_seconds`` is how long it waits before it kills; infinite for ever, None where
    its value cannot be read. ``drain_seconds`` is the command's own, None without one.
    """

    name: str
    setting: str
    stop_seconds: float | None
    stop_signal: str = "TERM"
    drain_seconds: float | None = None


def look_at_stopping(config: Config, supervisor_conf: str = "") -> list[Finding]:
    """Judge every node's service that can be read here, with ``supervisor_conf`` as well.

    That is a file, or a folder of files. Raise OSError where it cannot be read.
    """
    found = [
        judge_service(service, config.drain_seconds)
        for service in (*_under_supervisor(_named(supervisor_conf)), *_under_systemd())
    ]
    if supervisor_conf and not found:
        text = _("%s: no program runs runscheduler") % supervisor_conf
        found = [
            Finding(
                code="stopping.wait",
                level=WARNING,
                text=text,
                consequence=_("Whether jobs may finish at a stop is not known."),
                fix=_("Name the file with the [program:…] section in --supervisor-conf."),
            )
        ]
    return found


def judge_service(service: Service, drain_seconds: float) -> Finding:
    """Judge whether the service waits longer than the node drains."""
    drain = drain_seconds if service.drain_seconds is None else service.drain_seconds
    needed = drain + CANCEL_GRACE_SECONDS
    if service.stop_signal not in _DRAINING_SIGNALS:
        return _wrong_signal(service)
    if service.stop_seconds is None:
        return Finding(
            code="stopping.wait",
            level=WARNING,
            subject=service.name,
            text=_("%s cannot be read as a number of seconds") % service.setting,
            consequence=_("Whether jobs may finish at a stop is not known."),
            fix=_("Make sure that it is more than %g s.") % needed,
        )
    said = {"setting": service.setting, "wait": service.stop_seconds, "drain": drain}
    text = _("%(setting)s is %(wait)g s, a node drains for up to %(drain)g s") % said
    if service.stop_seconds > needed:
        return Finding(code="stopping.wait", level=OK, subject=service.name, text=text)
    return Finding(
        code="stopping.wait",
        level=PROBLEM,
        subject=service.name,
        text=text,
        consequence=_("At each stop and update, jobs are killed in the middle and shown as lost."),
        fix=_("Set %(setting)s to more than %(needed)g, or lower DRAIN_SECONDS.")
        % {"setting": service.setting, "needed": needed},
    )


def supervisor_services(text: str) -> list[Service]:
    """Return the programs of one file of Supervisor that run a node.

    Raise configparser.Error where it is no such file.
    """
    parser = configparser.ConfigParser(
        strict=False, interpolation=None, inline_comment_prefixes=(";", "#")
    )
    parser.read_string(text)
    return [
        Service(
            name=name.partition(":")[2],
            setting="stopwaitsecs",
            stop_seconds=_number(section.get("stopwaitsecs"), _SUPERVISOR_DEFAULT_SECONDS),
            stop_signal=section.get("stopsignal", "TERM").upper().removeprefix("SIG"),
            drain_seconds=_drain_flag(section.get("command", "")),
        )
        for name, section in parser.items()
        if name.startswith("program:") and _COMMAND in section.get("command", "")
    ]


def systemd_service(name: str, texts: Iterable[str]) -> Service | None:
    """Return the unit, given as its file and its drop-ins in order; None if it runs no node."""
    values: dict[str, str] = {}
    for text in texts:
        values |= dict(_assignments(text))
    command = values.get("ExecStart", "")
    if _COMMAND not in command:
        return None
    given = values.get("TimeoutStopSec", values.get("TimeoutSec"))
    return Service(
        name=name,
        setting="TimeoutStopSec",
        stop_seconds=_SYSTEMD_DEFAULT_SECONDS if given is None else _span(given),
        stop_signal=values.get("KillSignal", "TERM").upper().removeprefix("SIG"),
        drain_seconds=_drain_flag(command),
    )


def _named(path: str) -> list[Path]:
    if not path:
        return []
    named = Path(path)
    if named.is_dir():
        return sorted([*named.rglob("*.conf"), *named.rglob("*.ini")])
    named.read_bytes()  # a file that cannot be read is told, unlike those that are only tried
    return [named]


def _under_supervisor(named: Iterable[Path]) -> Iterator[Service]:
    for path in dict.fromkeys([*named, *_files(_SUPERVISOR)]):
        try:
            yield from supervisor_services(_content(path))
        except configparser.Error:
            continue  # Supervisor would refuse it as well


def _under_systemd() -> Iterator[Service]:
    # The first folder wins, as it does for systemd.
    units = {path.name: path for path in reversed(_files(_SYSTEMD))}
    for name, path in units.items():
        drop_ins = sorted(
            drop_in
            for folder in ("/lib/systemd/system", "/run/systemd/system", "/etc/systemd/system")
            for drop_in in Path(folder).glob(f"{name}.d/*.conf")
        )
        service = systemd_service(name, [_content(each) for each in (path, *drop_ins)])
        if service is not None:
            yield service


def _files(patterns: Iterable[str]) -> list[Path]:
    return [
        path for pattern in patterns for path in sorted(Path("/").glob(pattern.removeprefix("/")))
    ]


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        key, separator, value = line.strip().partition("=")
        if separator and not key.startswith(("#", ";")):
            yield key.strip(), value.strip()


def _number(text: str | None, default: float) -> float | None:
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        return None


def _span(text: str) -> float | None:
    """Return the seconds of a time span of systemd, such as "1min 30s"; infinite for none."""
    if text in ("infinity", "0"):
        return float("inf")
    parts = _SPAN.findall(text)
    if not parts or _SPAN.sub("", text).strip() or any(unit not in _UNITS for _n, unit in parts):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def _drain_flag(command: str) -> float | None:
    found = _DRAIN_FLAG.search(command)
    return float(found[1]) if found else None


def _wrong_signal(service: Service) -> Finding:
    return Finding(
        code="stopping.signal",
        level=PROBLEM,
        subject=service.name,
        text=_("it is stopped by %s") % service.stop_signal,
        consequence=_("The node does not drain: its jobs are killed and shown as lost."),
        fix=_("Stop it by TERM: stopsignal in Supervisor, KillSignal in systemd."),
    )
