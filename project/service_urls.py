"""``DATABASE_URL`` and ``REDIS_URL`` turned into Django's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

__all__ = ["cache_settings", "database_settings"]

_ENGINES = {
    "postgres": "django.db.backends.postgresql",
    "postgresql": "django.db.backends.postgresql",
    "mysql": "django.db.backends.mysql",
    "mariadb": "django.db.backends.mysql",
}


def database_settings(url: str, data_dir: Path) -> dict[str, Any]:
    """Return ``DATABASES["default"]`` for ``url``; SQLite in ``data_dir`` when it is empty.

    Raise ValueError for a scheme other than postgres, mysql, mariadb and sqlite.
    """
    parts = urlsplit(url)
    if not url or parts.scheme == "sqlite":
        data_dir.mkdir(parents=True, exist_ok=True)
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": unquote(parts.path) if url else str(data_dir / "db.sqlite3"),
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "timeout": 10,
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;",
            },
        }
    if parts.scheme not in _ENGINES:
        raise ValueError(
            f"DATABASE_URL: scheme {parts.scheme!r} is not known. "
            "Use postgres://, mysql://, mariadb:// or sqlite:///path."
        )
    return {
        "ENGINE": _ENGINES[parts.scheme],
        "NAME": unquote(parts.path.lstrip("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        "CONN_MAX_AGE": 60,
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": dict(parse_qsl(parts.query)),
    }


def cache_settings(url: str) -> dict[str, Any]:
    """Return ``CACHES``; the alias ``distcron`` exists only where ``url`` names a Redis.

    The locks have an alias and a database number of their own: ``cache.clear()`` is
    FLUSHDB and would free them.
    """
    caches: dict[str, Any] = {
        "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
    }
    if url:
        caches["distcron"] = {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": url,
            "KEY_PREFIX": "distcron",
            "OPTIONS": {
                "SERIALIZER": "django_redis.serializers.json.JSONSerializer",
                "SOCKET_TIMEOUT": 0.5,
                "SOCKET_CONNECT_TIMEOUT": 0.5,
                "CONNECTION_POOL_KWARGS": {
                    "max_connections": 20,
                    "health_check_interval": 15,
                    "client_name": "distcron",
                },
            },
        }
    return caches
