"""The value that every look gives back."""

from __future__ import annotations

import dataclasses

__all__ = ["OK", "PROBLEM", "WARNING", "Finding"]

OK = "ok"
WARNING = "warning"  # something works less well, or may break
PROBLEM = "problem"  # a promise does not hold, or nothing runs

# The ids of system checks have the app as their first part.
_SYSTEM_CHECKS = "distcron"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact about one subject, such as a cache alias or a node; "" where there is only one.

    ``code`` is stable and names what was looked at, whatever the level. ``consequence``
    and ``fix`` are for people, and empty where all is well. ``is_outage`` marks a database
    or lock backend that does not answer.
    """

    code: str
    level: str
    text: str
    subject: str = ""
    consequence: str = ""
    fix: str = ""
    is_outage: bool = False

    @property
    def area(self) -> str:
        """Return what the finding is about: the first part of its code."""
        area = self.code.partition(".")[0]
        return "settings" if area == _SYSTEM_CHECKS else area
