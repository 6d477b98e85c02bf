"""Who holds which lock, and the verdict: what the page and the command line read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.test import override_settings

from distcron_app import holdings
from distcron_app.holdings import HeldLock, follows, held_locks, lock_named, lock_of, matching
from distcron_app.instants import database_now
from distcron_app.locks import get_backend, get_level
from distcron_app.locks.memory import MemoryLockBackend
from distcron_app.models import Schedule
from tests.integration.lock_rows import NO_REDIS, ODD, hold, redis_locks, remove_ttl
from tests.integration.schedulerctl_builders import make_node, make_run, make_schedule
from tests.services import wait_for

pytestmark = pytest.mark.django_db

TOKEN = "f" * 32


@pytest.fixture
def namespace() -> Iterator[str]:
    with redis_locks() as used:
        yield used


def found() -> dict[str, HeldLock]:
    return {lock.name: lock for lock in held_locks(database_now()).locks}


def held_by(schedule: Schedule, namespace: str, holder: str = "web-1", token: str = TOKEN) -> str:
    name = f"schedule:{schedule.pk}"
    hold(name, token, holder=holder, namespace=namespace)
    return name


def test_a_lock_whose_run_is_active_on_a_live_node_is_healthy(namespace: str) -> None:
    schedule = make_schedule()
    run = make_run(schedule, "running", node=make_node(), fencing_token=7)
    name = held_by(schedule, namespace)

    lock = found()[name]

    assert (lock.verdict, lock.why) == ("healthy", "Its run is active and its node is alive.")
    assert (lock.schedule, lock.run, lock.level) == (schedule, run, "standard")
    assert (lock.info.note if lock.info else "", lock.owner_prefix) == ("web-1", "ffffffff")
    assert (lock.handle, lock.label) == ("invoice-close", "invoice-close")


def test_a_lock_of_a_dead_node_expires_by_itself(namespace: str) -> None:
    schedule = make_schedule()
    make_run(schedule, "running", node=make_node(heartbeat_age_seconds=60))
    name = held_by(schedule, namespace)

    lock = found()[name]

    assert (lock.verdict, lock.node_state) == ("expires", "dead")
    assert lock.why == "Node web-1 is dead, so nobody renews it. It expires by itself in 30 s."


def test_a_lock_of_another_owner_than_the_run_says_so(namespace: str) -> None:
    schedule = make_schedule()
    run = make_run(schedule, "running", node=make_node())
    name = held_by(schedule, namespace, holder="web-9", token="a" * 32)

    lock = found()[name]

    assert lock.verdict == "expires"
    assert lock.why.startswith(f"Another owner than its active run {run.pk} holds it.")
    assert lock.node is None


def test_the_holder_of_a_lock_without_a_run_is_found_by_its_name(namespace: str) -> None:
    make_node("web-3", heartbeat_age_seconds=900)
    name = held_by(make_schedule(), namespace, holder="web-3")

    lock = found()[name]

    assert (lock.node.name if lock.node else "", lock.node_state) == ("web-3", "dead")
    assert lock.verdict == "expires"
    assert lock.why.startswith("Node web-3 is dead, so nobody renews it.")


def test_a_name_that_a_dead_and_a_live_node_had_is_the_live_one(namespace: str) -> None:
    make_node("web-3")
    make_node("web-3", heartbeat_age_seconds=900)
    name = held_by(make_schedule(), namespace, holder="web-3")

    assert found()[name].node_state == "alive"


def test_a_lock_without_a_ttl_is_stuck_and_comes_first(namespace: str) -> None:
    hold("name:abc", TOKEN, holder="web-1", namespace=namespace)
    hold("name:orphan", TOKEN, holder="", namespace=namespace)
    remove_ttl("name:orphan", namespace)

    locks = held_locks(database_now()).locks

    assert [(lock.name, lock.verdict) for lock in locks] == [
        ("name:orphan", "stuck"),
        ("name:abc", "healthy"),
    ]
    assert locks[0].info is not None
    assert locks[0].info.ttl_ms is None


def test_the_text_of_a_public_lock_is_kept_whatever_it_is(namespace: str) -> None:
    hold(f"name:{ODD}", TOKEN, holder="app-7 pid 12", namespace=namespace)

    lock = found()[f"name:{ODD}"]

    assert (lock.label, lock.handle, lock.verdict) == (ODD, f"name:{ODD}", "healthy")


def test_a_lock_that_expired_is_not_held(namespace: str) -> None:
    hold("name:brief", TOKEN, holder="web-1", namespace=namespace, ttl_ms=50)
    wait_for(lambda: "name:brief" not in found(), what="the end of the TTL")


def test_a_lock_of_a_deleted_schedule_belongs_to_nobody(namespace: str) -> None:
    hold("schedule:424242", TOKEN, holder="web-1", namespace=namespace)

    lock = found()["schedule:424242"]

    assert (lock.schedule, lock.verdict) == (None, "expires")
    assert lock.why.startswith("It belongs to no schedule that is known here.")


def test_queries_do_not_grow_with_the_locks(namespace: str, django_assert_num_queries: Any) -> None:
    def grow(prefix: str) -> None:
        for number in range(5):
            schedule = make_schedule(f"{prefix}-{number}")
            if number % 2:
                make_run(schedule, "running", node=make_node(f"{prefix}-{number}"))
            held_by(schedule, namespace, holder=f"{prefix}-{number}")

    now = database_now()
    for prefix in ("few", "more", "most"):
        grow(prefix)
        with django_assert_num_queries(3):
            held_locks(now)


def test_levels_say_what_they_are_made_of_and_how_fast_they_answer(namespace: str) -> None:
    standard = held_locks(database_now()).levels[0]

    assert (standard.name, standard.backend, standard.answers) == ("standard", "redis", True)
    assert standard.ping_ms is not None
    assert 0 < standard.ping_ms < 1000
    assert standard.problem == ""


def test_a_level_that_is_away_hides_no_other() -> None:
    settings = {"LOCK_BACKEND": "redis", "LOCK_LEVELS": {"local": ["memory"]}}
    with override_settings(CACHES=NO_REDIS, DISTCRON=settings):
        get_level("local").backend.acquire({"name:here": TOKEN}, 60_000)
        held = held_locks(database_now())

    assert [level.name for level in held.unknown if level.name in ("standard", "local")] == [
        "standard"
    ]
    assert held.unknown[0].problem.startswith("ConnectionError")
    assert [(lock.name, lock.level) for lock in held.locks] == [("name:here", "local")]


def test_a_level_that_is_away_and_that_nobody_uses_is_left_out() -> None:
    settings = {"LOCK_BACKEND": "memory", "LOCK_LEVELS": {"spare": ["redis"]}}
    with override_settings(CACHES=NO_REDIS, DISTCRON=settings):
        names = [level.name for level in held_locks(database_now()).levels]
        schedule = make_schedule()
        Schedule.objects.filter(pk=schedule.pk).update(lock_level="spare")
        held = held_locks(database_now())

    assert "spare" not in names
    assert [level.name for level in held.unknown] == ["spare"]


def test_one_backend_of_two_levels_is_asked_once() -> None:
    settings = {"LOCK_BACKEND": "memory", "LOCK_LEVELS": {"twin": ["memory"]}}
    with override_settings(DISTCRON=settings):
        get_backend().acquire({"name:once": TOKEN}, 60_000)
        locks = held_locks(database_now()).locks

    assert [(lock.name, lock.level) for lock in locks] == [("name:once", "standard")]


def test_a_lock_in_all_parts_of_a_level_is_that_levels(tmp_path: Any) -> None:
    settings = {
        "LOCK_BACKEND": "memory",
        "LOCK_DIRECTORY": str(tmp_path / "locks"),
        "LOCK_LEVELS": {"both": ["memory", "file"], "files": ["file"]},
    }
    with override_settings(DISTCRON=settings):
        get_level("both").backend.acquire({"name:x": TOKEN}, 60_000)
        get_level("files").backend.acquire({"name:y": TOKEN}, 60_000)
        get_backend().acquire({"name:z": TOKEN, "name:y": TOKEN}, 60_000)
        locks = sorted((lock.name, lock.level) for lock in held_locks(database_now()).locks)
        for level in ("both", "files"):
            get_level(level).backend.force_release("name:x")
        get_level("files").backend.force_release("name:y")

    assert locks == [("name:x", "both"), ("name:y", "both"), ("name:z", "standard")]


def test_an_active_run_whose_lock_is_not_seen_is_found_by_the_name_of_its_lock(
    namespace: str,
) -> None:
    schedule = make_schedule()
    run = make_run(schedule, "running", node=make_node())

    (lock,) = lock_named(f"schedule:{schedule.pk}", database_now()).locks

    assert (lock.info, lock.run, lock.verdict) == (None, run, "")
    assert held_locks(database_now()).locks == ()


def test_the_lock_of_an_idle_schedule_is_free(namespace: str) -> None:
    assert lock_of(make_schedule(), database_now()).locks == ()


@pytest.mark.parametrize(
    ("state", "fields", "text"),
    [
        ("claimed", {}, "Its run %d will be queued again."),
        ("running", {"delivery": "at_least_once"}, "Its run %d will be queued again."),
        (
            "running",
            {"delivery": "at_least_once", "recoveries": 1},
            "Its run %d will be shown as lost, and no node starts it again.",
        ),
        (
            "running",
            {"delivery": "at_most_once"},
            "Its run %d will be shown as lost, and no node starts it again.",
        ),
    ],
)
def test_what_follows_a_release_is_said_before(
    namespace: str, state: str, fields: dict[str, Any], text: str
) -> None:
    schedule = make_schedule()
    Schedule.objects.filter(pk=schedule.pk).update(fencing_token=4712)
    run = make_run(schedule, state, node=make_node(), **fields)
    name = held_by(schedule, namespace)

    following = follows(found()[name])

    assert following.run == text % run.pk
    assert following.fencing == "The fencing token becomes 4713."
    assert following.holder.startswith("Node web-1 is alive and will lose the lock")
    assert following.session == ""


def test_what_a_person_calls_a_lock_finds_it(namespace: str) -> None:
    schedule = make_schedule("export")
    name = held_by(schedule, namespace)
    hold("name:backup", TOKEN, holder="web-1", namespace=namespace)
    held = held_locks(database_now())

    def names(wanted: str, level: str = "") -> list[str]:
        return [lock.name for lock in matching(held, wanted, level)]

    assert names("export") == names(name) == [name]
    assert names("backup") == names("name:backup") == ["name:backup"]
    assert names("backup", "critical") == names("nothing") == []


def test_a_name_that_means_two_locks_finds_both(namespace: str) -> None:
    name = held_by(make_schedule("export"), namespace)
    hold("name:export", TOKEN, holder="web-1", namespace=namespace)

    locks = matching(held_locks(database_now()), "export")

    assert sorted(lock.name for lock in locks) == ["name:export", name]


@pytest.fixture
def in_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the memory backend count as one whose locks a database session holds."""
    monkeypatch.setattr(holdings, "_SESSION_PARTS", frozenset({"memory"}))
    with override_settings(DISTCRON={"LOCK_BACKEND": "memory", "NODE_NAME": "web-3"}):
        yield


def test_a_lock_that_a_backend_cannot_list_is_asked_for_by_name(
    in_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryLockBackend, "held", lambda backend: [])
    schedule, idle = make_schedule(), make_schedule("idle")
    make_run(schedule, "running", node=make_node("web-3"))
    names = [f"schedule:{each.pk}" for each in (schedule, idle)]
    get_backend().acquire(dict.fromkeys(names, TOKEN), 60_000)

    assert {name: lock.verdict for name, lock in found().items()} == {names[0]: "healthy"}


def test_a_session_lock_of_a_dead_node_is_stuck(in_session: None) -> None:
    make_node("web-3", heartbeat_age_seconds=900)
    name = f"schedule:{make_schedule().pk}"
    get_backend().acquire({name: TOKEN}, 60_000)

    lock = found()[name]

    assert (lock.verdict, lock.in_session) == ("stuck", True)
    assert lock.why == ("Node web-3 is dead, and the database still keeps its session. Release it.")
    assert follows(lock).session == (
        "Its database session is ended, and every other lock in it is lost as well."
    )
