"""The times of the settings, against each other. No input or output here."""

from __future__ import annotations

from django.utils.translation import gettext as _

from distcron_app.conf import Config
from distcron_app.diagnosis.finding import OK, WARNING, Finding

__all__ = ["judge_timing"]

# The longest pause between two sweeps of a node, in which the dead are noticed.
_SWEEP_SECONDS = 3.0


def judge_timing(config: Config) -> Finding:
    """Judge how long a schedule whose node died waits for another one."""
    said = {
        "ttl": config.lock_ttl_seconds,
        "lease": config.node_lease_seconds,
        "heartbeat": config.heartbeat_seconds,
        "grace": config.misfire_grace_seconds,
        "takeover": max(config.lock_ttl_seconds, config.node_lease_seconds) + _SWEEP_SECONDS,
    }
    text = _("lock TTL %(ttl)g s, node lease %(lease)g s, heartbeat %(heartbeat)g s") % said
    if said["takeover"] <= config.misfire_grace_seconds:
        return Finding(code="timing.takeover", level=OK, text=text)
    return Finding(
        code="timing.takeover",
        level=WARNING,
        text=text + ", " + _("misfire grace %(grace)g s") % said,
        consequence=_(
            "After a crash the next node starts up to %(takeover)g s later, which is a misfire."
        )
        % said,
        fix=_("Lower LOCK_TTL_SECONDS and NODE_LEASE_SECONDS, or raise MISFIRE_GRACE_SECONDS."),
    )
