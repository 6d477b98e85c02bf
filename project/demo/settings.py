"""Settings of `make demo`: the project's, with a short lease so that a failover is quick."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from project import settings as _project
from project.settings import *  # noqa: F403
from project.settings import DATA_DIR


def _kept_secret(path: Path) -> str:
    """Return the key in ``path``, made at the first start."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(50))
    return path.read_text()


SECRET_KEY = _kept_secret(DATA_DIR / "secret-key")
STATIC_ROOT = DATA_DIR / "static"
STATIC_ROOT.mkdir(parents=True, exist_ok=True)
# No collectstatic: the files are served from where they are.
WHITENOISE_USE_FINDERS = True

DISTCRON: dict[str, Any] = {  # type: ignore[no-redef]
    **_project.DISTCRON,
    "NAMESPACE": "distcron-demo",
    "LOCK_DIRECTORY": str(DATA_DIR / "locks"),
    "LOCK_TTL_SECONDS": 4.0,
    "NODE_LEASE_SECONDS": 4.0,
    "HEARTBEAT_SECONDS": 1.0,
    "DRAIN_SECONDS": 3.0,
    "PROCESSES": 1,
    "THREADS": 6,
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["stderr"], "level": os.environ.get("DEMO_LOG_LEVEL", "WARNING")},
}
