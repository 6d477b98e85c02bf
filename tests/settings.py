"""Settings of the tests. TEST_DATABASE picks sqlite (default), postgresql or mariadb."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pymysql

from project.service_urls import cache_settings, database_settings
from project.settings import *  # noqa: F403

# Django asks for a mysqlclient version; PyMySQL speaks the same protocol.
pymysql.version_info = (2, 2, 7, "final", 0)
pymysql.install_as_MySQLdb()

TEST_URLS = {
    "sqlite": "",
    "postgresql": os.environ.get(
        "TEST_POSTGRESQL_URL", "postgres://postgres@127.0.0.1:5432/distcron"
    ),
    "mariadb": os.environ.get("TEST_MARIADB_URL", "mariadb://root@127.0.0.1:3306/distcron"),
}
TEST_DATABASE = os.environ.get("TEST_DATABASE", "sqlite")
DATA_DIR = Path(os.environ.get("TEST_DATA_DIR") or tempfile.mkdtemp(prefix="distcron-test-"))
if "TEST_DATA_DIR" not in os.environ:
    atexit.register(shutil.rmtree, DATA_DIR, ignore_errors=True)

DATABASES = {"default": database_settings(TEST_URLS[TEST_DATABASE], DATA_DIR)}
if TEST_DATABASE == "sqlite":
    # A file, since worker threads each open a connection of their own.
    DATABASES["default"]["TEST"] = {"NAME": str(DATA_DIR / "test.sqlite3")}
if TEST_DATABASE == "mariadb":
    DATABASES["default"]["OPTIONS"] = {
        "charset": "utf8mb4",
        "isolation_level": "read committed",
    }
CACHES = cache_settings(os.environ.get("TEST_REDIS_URL", "redis://127.0.0.1:6379/13"))
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
INSTALLED_APPS = [*INSTALLED_APPS, "tests"]  # noqa: F405
SECRET_KEY = "tests-only"
# The demo's schedule in code must not be in the database of every test.
DISTCRON = {**DISTCRON, "SYNC_ON_MIGRATE": False}  # noqa: F405
STATIC_ROOT = DATA_DIR
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.InMemoryStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
}
if os.environ.get("TEST_USE_TZ") == "0":
    USE_TZ = False
    TIME_ZONE = "America/New_York"
