"""Settings of the demo project.

``DATABASE_URL`` and ``REDIS_URL`` choose the servers; without them it runs on
SQLite and file locks, on one machine. Everything else has a safe default for
development, and production values come from the environment.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from project.service_urls import cache_settings, database_settings

BASE_DIR = Path(__file__).resolve().parent.parent
DATA_DIR = Path(os.environ.get("DISTCRON_DATA_DIR", BASE_DIR / ".demo"))

DEBUG = os.environ.get("DJANGO_DEBUG", "") == "1"
# A key for development only; `check --deploy` refuses it in production.
SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY", "django-insecure-demo-only-change-me")
ALLOWED_HOSTS = os.environ.get("DJANGO_ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]").split(",")
CSRF_TRUSTED_ORIGINS = [
    origin for origin in os.environ.get("DJANGO_CSRF_TRUSTED_ORIGINS", "").split(",") if origin
]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "distcron_app",
    "project.demo",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "project.urls"
WSGI_APPLICATION = "project.wsgi.application"

TEMPLATES: list[dict[str, Any]] = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASES = {"default": database_settings(os.environ.get("DATABASE_URL", ""), DATA_DIR)}
CACHES = cache_settings(os.environ.get("REDIS_URL", ""))
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "distcron:overview"
LOGOUT_REDIRECT_URL = "login"

LANGUAGE_CODE = os.environ.get("DJANGO_LANGUAGE", "en")
LANGUAGES = [("en", "English"), ("id", "Bahasa Indonesia")]
TIME_ZONE = os.environ.get("DJANGO_TIME_ZONE", "Asia/Jakarta")
USE_I18N = True
LOCALE_PATHS = [BASE_DIR / "project" / "locale"]
USE_TZ = True

STATIC_URL = "static/"
STATIC_ROOT = Path(os.environ.get("DJANGO_STATIC_ROOT", BASE_DIR / "staticfiles"))

DISTCRON = {
    "NODE_NAME": os.environ.get("DISTCRON_NODE_NAME", ""),
}

# Behind the TLS proxy of nginx/: DJANGO_BEHIND_TLS=1 turns on what needs https.
_BEHIND_TLS = os.environ.get("DJANGO_BEHIND_TLS", "") == "1"
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if _BEHIND_TLS else None
SECURE_SSL_REDIRECT = _BEHIND_TLS
# Probes ask gunicorn directly, without TLS.
SECURE_REDIRECT_EXEMPT = [r"^(cron/)?(live|ready)$"]
SECURE_HSTS_SECONDS = 31_536_000 if _BEHIND_TLS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = _BEHIND_TLS
SECURE_HSTS_PRELOAD = _BEHIND_TLS
SECURE_REFERRER_POLICY = "same-origin"
SESSION_COOKIE_SECURE = _BEHIND_TLS
CSRF_COOKIE_SECURE = _BEHIND_TLS
X_FRAME_OPTIONS = "DENY"
