from __future__ import annotations

import re
import threading
from datetime import UTC, datetime, timedelta

import pytest

from distcron_app.conf import Config
from distcron_app.locks import (
    get_backend,
    new_owner_token,
    occurrence_lock_name,
    schedule_lock_name,
)
from distcron_app.locks.breaker import Breaker
from distcron_app.locks.file import FileLockBackend
from distcron_app.locks.memory import MemoryLockBackend
from distcron_app.locks.none import NoLockBackend


def test_owner_tokens_are_128_random_bits():
    tokens = {new_owner_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", token) for token in tokens)


def test_schedule_lock_is_named_after_its_id():
    assert schedule_lock_name(42) == "schedule:42"


def test_occurrences_a_millisecond_apart_have_locks_of_their_own():
    """Rounded, half a millisecond and one and a half were one name: the second waited for ever."""
    instant = datetime(2026, 11, 30, 5, 0, 0, 99_500, tzinfo=UTC)
    names = [occurrence_lock_name(1, instant + n * timedelta(milliseconds=1)) for n in range(1000)]
    assert len(set(names)) == 1000


def test_text_is_no_schedule_id():
    with pytest.raises(ValueError, match="format code 'd'"):
        schedule_lock_name("nightly")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("redis", Breaker),
        ("file", FileLockBackend),
        ("memory", MemoryLockBackend),
        ("none", NoLockBackend),
    ],
)
def test_backend_follows_the_setting(settings, tmp_path, kind, expected):
    settings.DISTCRON = {"LOCK_BACKEND": kind, "LOCK_DIRECTORY": str(tmp_path)}
    assert type(get_backend()) is expected
    assert get_backend().name == kind


def test_auto_means_file_without_the_alias(settings):
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}
    settings.DISTCRON = {}
    assert get_backend().name == "file"


def test_all_threads_share_one_backend(settings):
    settings.DISTCRON = {"LOCK_BACKEND": "memory"}
    found = []
    threads = [threading.Thread(target=lambda: found.append(get_backend())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(backend) for backend in found}) == 1


def test_given_config_is_used_instead_of_the_settings():
    assert get_backend(Config(lock_backend="none")).name == "none"


def test_changed_settings_give_another_backend(settings):
    settings.DISTCRON = {"LOCK_BACKEND": "memory"}
    first = get_backend()
    settings.DISTCRON = {"LOCK_BACKEND": "memory", "THREADS": 3}
    assert get_backend() is not first


class TestNoLocks:
    def test_everything_is_won_by_everybody(self):
        backend = NoLockBackend()
        first = backend.acquire({"schedule:1": "5eed"}, 1000)
        second = backend.acquire({"schedule:1": "f00d"}, 1000)
        assert (set(first), set(second)) == ({"schedule:1"}, {"schedule:1"})

    def test_every_lease_is_renewed_and_released(self):
        backend = NoLockBackend()
        won = backend.acquire({"schedule:1": "5eed"}, 1000)
        assert backend.renew(won.values(), 60_000)["schedule:1"].owner_token == "5eed"
        assert backend.release(won.values()) == {"schedule:1"}

    def test_nothing_is_held(self):
        backend = NoLockBackend()
        backend.acquire({"schedule:1": "5eed"}, 1000)
        assert (backend.held(), backend.inspect(["schedule:1"])) == ([], {})
        assert backend.force_release("schedule:1") is False
        assert backend.ping() == 0.0
