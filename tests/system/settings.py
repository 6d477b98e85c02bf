"""Settings of the nodes that the system tests start; everything comes from the environment."""

from __future__ import annotations

import json
import os
from typing import Any

from project.service_urls import cache_settings
from project.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "tests.system.app"]  # noqa: F405
SECRET_KEY = "tests-only"
USE_TZ = os.environ.get("DISTCRON_SYSTEM_USE_TZ", "1") == "1"
# Independent Redis instances of the level "quorum", as a list of URLs.
_QUORUM = {
    f"quorum-{number}": cache_settings(url)["distcron"]
    for number, url in enumerate(json.loads(os.environ.get("DISTCRON_SYSTEM_QUORUM", "[]")))
}
# In place of what REDIS_URL says, as JSON.
_CACHES = json.loads(os.environ.get("DISTCRON_SYSTEM_CACHES", "{}"))
CACHES = {**CACHES, **_CACHES, **_QUORUM}  # noqa: F405
# Fast enough to watch a node being taken for dead; otherwise what a deployment has.
_FAST: dict[str, Any] = {
    "NODE_LEASE_SECONDS": 3.0,
    "HEARTBEAT_SECONDS": 0.75,
    "LOCK_TTL_SECONDS": 3.0,
    "PROCESSES": 1,
    "THREADS": 4,
    "QUORUM_ALIASES": list(_QUORUM),
    "SYNC_ON_MIGRATE": False,
}
DISTCRON = {**_FAST, **json.loads(os.environ.get("DISTCRON_SYSTEM_CONFIG", "{}"))}
