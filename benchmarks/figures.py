"""The arithmetic of the benchmarks, and the facts that belong to a figure."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["Claim", "Summary", "machine", "percentile", "ratios", "summary", "verdict"]


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """The median over rounds, and the distance of the extremes in percent of it."""

    median: float
    spread_percent: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One number of a target beside its limit, which is the most or the least allowed."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Return whether the number keeps to its limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that so many percent of all values do not exceed.

    >>> percentile([4, 1, 3, 2], 50)
    2
    """
    return sorted(values)[max(0, math.ceil(percent * len(values) / 100) - 1)]


def summary(values: Sequence[float]) -> Summary:
    """Return the median and the spread of the rounds.

    >>> summary([1.0, 2.0, 4.0])
    Summary(median=2.0, spread_percent=150.0)
    """
    median = statistics.median(values)
    return Summary(median, 100 * (max(values) - min(values)) / median if median else 0.0)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Summary:
    """Return ours over theirs, taken round by round: what slows both cancels out."""
    return summary([one / other for one, other in zip(ours, theirs, strict=True)])


def verdict(claims: Sequence[Claim]) -> dict[str, Any]:
    """Return the claims and whether all hold, as they are printed."""
    return {
        "target": [
            {
                "what": claim.what,
                "value": round(claim.value, 4),
                "at_least" if claim.at_least else "at_most": round(claim.limit, 4),
                "reached": claim.holds,
            }
            for claim in claims
        ],
        "reached": all(claim.holds for claim in claims),
    }


def machine(*peers: str, **servers: str) -> Mapping[str, Any]:
    """Return what the figures were measured on and with, and when; ``peers`` are packages.

    The load says how busy the machine was with other things when it began.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **servers,
        "django": version("django"),
        "redis-py": version("redis"),
        **{peer: version(peer) for peer in peers},
    }


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()
