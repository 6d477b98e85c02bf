"""Settings of the nodes that the system tests start; everything comes from the environment."""

from __future__ import annotations

import json
import os
from typing import Any

from project.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "tests.system.app"]  # noqa: F405
SECRET_KEY = "tests-only"
USE_TZ = os.environ.get("DISTCRON_SYSTEM_USE_TZ", "1") == "1"
# Fast enough to watch a node being taken for dead; otherwise what a deployment has.
_FAST: dict[str, Any] = {
    "NODE_LEASE_SECONDS": 3.0,
    "HEARTBEAT_SECONDS": 0.75,
    "LOCK_TTL_SECONDS": 3.0,
    "PROCESSES": 1,
    "THREADS": 4,
}
DISTCRON = {**_FAST, **json.loads(os.environ.get("DISTCRON_SYSTEM_CONFIG", "{}"))}
