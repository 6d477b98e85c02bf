"""``schedulerctl doctor`` against real servers with good and bad settings."""

from __future__ import annotations

import os
import pty
import select
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test import override_settings
from django_redis import get_redis_connection

from distcron_app.instants import database_now
from distcron_app.models import Schedule
from project.service_urls import cache_settings
from tests.integration.schedulerctl_builders import Answer, ctl, make_node, make_run, make_schedule
from tests.services import RedisServer, postgres_cluster, redis_server, wait_for

ROOT = Path(__file__).resolve().parents[2]
DOCTOR_PAGE = (ROOT / "docs" / "doctor.md").read_text()
pytestmark = pytest.mark.django_db

NOBODY = "redis://127.0.0.1:1/0"


def doctor(*words: str) -> Answer:
    return ctl("doctor", "--json", *words)


def found(answer: Answer, code: str) -> list[tuple[str, str | None]]:
    """Return level and subject of each finding with that code."""
    return [
        (finding["level"], finding["subject"])
        for finding in answer.data["findings"]
        if finding["code"] == code
    ]


def level(answer: Answer, code: str) -> str | None:
    findings = found(answer, code)
    assert len(findings) <= 1, findings
    return findings[0][0] if findings else None


@contextmanager
def locks_on(*urls: str, **settings: Any) -> Iterator[None]:
    """Let the locks use these Redis servers, the further ones as the instances of a quorum."""
    caches = cache_settings(urls[0])
    for number, url in enumerate(urls[1:], 1):
        caches[f"quorum-{number}"] = cache_settings(url)["distcron"]
    names = [f"quorum-{number}" for number in range(1, len(urls))]
    values = {"LOCK_BACKEND": "redis", "QUORUM_ALIASES": names} | settings
    with override_settings(CACHES=caches, DISTCRON=values):
        yield


@pytest.fixture(scope="module")
def good_redis() -> Iterator[RedisServer]:
    with redis_server(appendonly=True) as server:
        yield server


@pytest.fixture
def healthy(good_redis: RedisServer) -> Iterator[None]:
    make_node()
    with locks_on(good_redis.url):
        yield


# --- exit codes and output --------------------------------------------------------------


def test_where_all_is_well_it_exits_with_0(healthy: None) -> None:
    answer = doctor()

    assert (answer.code, answer.data["healthy"], answer.data["problems"]) == (0, True, 0)


def test_json_has_the_documented_keys(healthy: None) -> None:
    document = doctor().data

    (keys,) = {tuple(finding) for finding in document["findings"]}
    assert list(document)[:2] == ["version", "verb"]
    assert (document["version"], document["verb"]) == (1, "doctor")
    for key in (*list(document)[2:], *keys):
        assert f"`{key}`" in DOCTOR_PAGE
    areas = {finding["area"] for finding in document["findings"]}
    assert areas == {
        *("settings", "database", "redis", "clocks", "nodes", "schedules", "host", "timing")
    }


def test_without_a_node_it_exits_with_1_and_says_what_to_do() -> None:
    answer = ctl("doctor")

    assert answer.code == 1
    assert answer.error.startswith("1 problem, ")
    place = answer.lines.index("✖ problem  nodes      no node is alive")
    assert answer.lines[place + 1].strip() == "Nothing is run."
    assert answer.lines[place + 2].strip() == "fix: Start one: manage.py runscheduler"


@pytest.mark.parametrize(("flags", "code"), [((), 0), (("--strict",), 1)])
def test_warnings_count_with_strict_alone(healthy: None, flags: tuple[str, ...], code: int) -> None:
    make_node("web-2", version="9.9.9")

    answer = doctor(*flags)

    assert level(answer, "nodes.versions") == "warning"
    assert (answer.code, answer.data["healthy"]) == (code, code == 0)


def test_what_is_well_about_one_subject_is_one_paragraph(healthy: None) -> None:
    lines = [line for line in ctl("doctor").lines if line.startswith("✔ ok       redis")]

    assert len(lines) == 1
    assert "it is a primary · maxmemory is not set, so nothing is evicted · " in lines[0]


def test_unusable_settings_are_findings_and_nothing_else_is_asked() -> None:
    with override_settings(DISTCRON={"THREDS": 3, "PROCESSES": 0}):
        answer = doctor()

    assert answer.code == 1
    assert {finding["code"] for finding in answer.data["findings"]} == {"distcron.E001"}
    assert answer.data["problems"] == 2


def test_system_checks_are_findings(healthy: None, good_redis: RedisServer) -> None:
    caches = cache_settings(good_redis.url)
    del caches["distcron"]["OPTIONS"]["SERIALIZER"]
    with override_settings(CACHES=caches):
        answer = doctor()

    assert level(answer, "distcron.W012") == "warning"
    assert level(answer, "settings.checks") is None


# --- Redis ------------------------------------------------------------------------------


def test_a_good_redis(healthy: None) -> None:
    answer = doctor()

    codes = {
        finding["code"]: finding["level"]
        for finding in answer.data["findings"]
        if finding["area"] == "redis" and finding["code"] != "redis.latency"
    }
    assert codes == dict.fromkeys(
        (
            *("redis.version", "redis.role", "redis.eviction", "redis.persistence"),
            *("redis.access", "redis.clock", "redis.lock", "redis.stuck"),
        ),
        "ok",
    )
    assert found(answer, "redis.latency")[0][1] == "distcron"


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (
            ("--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru"),
            "redis.eviction",
            "problem",
        ),
        (("--maxmemory", "20mb", "--maxmemory-policy", "noeviction"), "redis.eviction", "ok"),
        (("--maxmemory", "200mb"), "redis.memory", "ok"),
        ((), "redis.persistence", "warning"),
        (("--save", "3600 1"), "redis.persistence", "warning"),
        (("--appendonly", "yes"), "redis.persistence", "ok"),
        (("--protected-mode", "no"), "redis.access", "ok"),
        (("--maxclients", "1"), "redis.clients", "warning"),
    ],
)
def test_a_setting_of_redis(options: tuple[str, ...], code: str, expected: str) -> None:
    make_node()
    with redis_server(*options) as server, locks_on(server.url):
        answer = doctor()

    assert level(answer, code) == expected
    assert answer.code == (1 if answer.data["problems"] else 0)
    assert answer.data["problems"] == (expected == "problem")


def test_a_redis_whose_memory_is_nearly_full() -> None:
    make_node()
    with redis_server() as server, locks_on(server.url):
        doctor()  # the connection and the scripts take their memory
        with server.client() as client:
            client.config_set("maxmemory", round(client.info()["used_memory"] * 1.05))
        answer = doctor()

    assert level(answer, "redis.memory") == "warning"


def test_a_password_is_used_and_seen(good_redis: RedisServer) -> None:
    make_node()
    with redis_server() as server:
        with server.client() as client:
            client.config_set("requirepass", "s3cret")
        with locks_on(f"redis://:s3cret@127.0.0.1:{server.port}/0"):
            answer = doctor()
        with locks_on(server.url):
            refused = doctor()

    assert (answer.code, level(answer, "redis.access")) == (0, "ok")
    texts = [finding["text"] for finding in answer.data["findings"]]
    assert "clients without a password are refused" in texts
    assert (refused.code, level(refused, "redis.answers")) == (6, "problem")
    assert "s3cret" not in answer.out + refused.out


def test_a_replica_takes_no_locks(good_redis: RedisServer) -> None:
    make_node()
    with redis_server("--replicaof", "127.0.0.1", str(good_redis.port)) as replica:
        with good_redis.client() as client:
            wait_for(lambda: client.info()["connected_slaves"] == 1, 30, "the replica")
        with locks_on(replica.url):
            answer = doctor()
        with locks_on(good_redis.url):
            primary = doctor()

    assert answer.code == 1
    assert (level(answer, "redis.role"), level(answer, "redis.lock")) == ("problem", "problem")
    assert (level(primary, "redis.role"), level(primary, "redis.replicas")) == ("ok", "warning")


@pytest.fixture
def unsaving_redis() -> Iterator[RedisServer]:
    """Yield a Redis that refuses writes, since its last save has failed."""
    with redis_server("--save", "3600 1") as server:
        (server.folder / "dump.rdb").mkdir()
        with server.client() as client:
            client.bgsave()
            wait_for(lambda: client.info()["rdb_last_bgsave_status"] == "err", 30, "the save")
        yield server


@pytest.mark.parametrize("health_check_interval", [0, 15])
def test_a_redis_that_cannot_save_refuses_locks(
    unsaving_redis: RedisServer, health_check_interval: int
) -> None:
    make_node()
    caches = cache_settings(unsaving_redis.url)
    options = caches["distcron"]["OPTIONS"]
    options["CONNECTION_POOL_KWARGS"]["health_check_interval"] = health_check_interval
    with locks_on(unsaving_redis.url), override_settings(CACHES=caches):
        answer = doctor()

    assert (answer.code, level(answer, "redis.lock")) == (1, "problem")
    # A health check is a PING, and that is refused before anything else can be asked.
    expected = None if health_check_interval else "problem"
    assert level(answer, "redis.saving") == expected
    assert "MISCONF" in answer.out


def test_a_dead_redis_is_a_finding_and_the_rest_goes_on() -> None:
    make_node()
    with locks_on(NOBODY):
        answer = doctor()

    assert (answer.code, found(answer, "redis.answers")) == (6, [("problem", "distcron")])
    assert level(answer, "nodes.alive") == "ok"
    assert level(answer, "schedules.state") == "ok"


def test_a_hung_redis_costs_a_moment(good_redis: RedisServer) -> None:
    make_node()
    with redis_server() as server, locks_on(server.url):
        server.pause()
        answer = doctor()
        server.resume()

    assert (answer.code, found(answer, "redis.answers")) == (6, [("problem", "distcron")])


def test_an_alias_without_a_client() -> None:
    make_node()
    with override_settings(CACHES={}, DISTCRON={"LOCK_BACKEND": "redis"}):
        answer = doctor()

    assert answer.code == 1
    assert found(answer, "redis.alias") == [("problem", "distcron")]


def test_commands_that_are_refused_are_one_warning() -> None:
    make_node()
    hidden = [*("--rename-command", "CONFIG", ""), *("--rename-command", "INFO", "")]
    hidden += ["--rename-command", "ACL", ""]
    with redis_server(*hidden, appendonly=True) as server, locks_on(server.url):
        answer = doctor()

    assert answer.code == 0
    assert level(answer, "redis.readable") == "warning"
    assert level(answer, "redis.lock") == "ok"
    assert level(answer, "redis.access") == "ok"
    assert level(answer, "redis.persistence") is None


@pytest.mark.parametrize(
    ("doctors_own", "code", "readable"), [(True, 0, None), (False, 0, "warning")]
)
def test_the_documented_acl_is_enough(doctors_own: bool, code: int, readable: str | None) -> None:
    make_node()
    (line,) = [
        block
        for block in DOCTOR_PAGE.replace("\\\n", " ").split("\n")
        if block.startswith("ACL SETUSER")
    ]
    words = [word.replace("PASSWORD", "pw") for word in shlex.split(line.replace(">", "'>'"))]
    if not doctors_own:
        words = [word for word in words if word not in ("+info", "+config|get", "+acl|getuser")]
    with redis_server(appendonly=True) as server:
        with server.client() as client:
            client.execute_command(*words)
        with locks_on(f"redis://distcron:pw@127.0.0.1:{server.port}/0"):
            answer = doctor()

    assert (answer.code, level(answer, "redis.readable")) == (code, readable)
    assert level(answer, "redis.lock") == "ok"


def test_an_acl_without_the_scripts_is_a_problem() -> None:
    make_node()
    with redis_server(appendonly=True) as server:
        with server.client() as client:
            client.acl_setuser(
                "narrow", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-eval"]
            )
        with locks_on(f"redis://narrow:pw@127.0.0.1:{server.port}/0"):
            answer = doctor()

    assert (answer.code, level(answer, "redis.lock")) == (1, "problem")


def test_a_lock_that_never_ends(healthy: None) -> None:
    client = get_redis_connection("distcron")
    key = "{distcron:lock}:schedule:7"
    client.set(key, "planted")
    client.zadd("{distcron:lock}-index", {key: 10**15})

    answer = doctor()

    client.delete(key, "{distcron:lock}-index")
    assert (answer.code, found(answer, "redis.stuck")) == (0, [("warning", "distcron")])
    assert level(doctor(), "redis.stuck") == "ok"


def test_a_look_leaves_nothing_behind_in_redis(healthy: None) -> None:
    client = get_redis_connection("distcron")
    client.flushdb()

    doctor()

    assert client.keys("{distcron:lock}:*") == []
    assert client.zcard("{distcron:lock}-index") == 0


def test_a_longer_sample_takes_as_long_as_it_is_told(healthy: None) -> None:
    answer = doctor("--redis-latency", "0.3")

    (latency,) = [each for each in answer.data["findings"] if each["code"] == "redis.latency"]
    pings = int(latency["text"].rpartition(" ")[2].rstrip(")"))
    assert 1 <= pings <= 30


# --- a quorum ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def instances() -> Iterator[list[RedisServer]]:
    with redis_server() as a, redis_server() as b, redis_server() as c:
        yield [a, b, c]


def test_a_quorum_that_has_just_started(
    good_redis: RedisServer, instances: list[RedisServer]
) -> None:
    make_node()
    with locks_on(good_redis.url, *(each.url for each in instances), LOCK_TTL_SECONDS=3600.0):
        answer = doctor()

    assert level(answer, "quorum.instances") == "ok"
    assert level(answer, "quorum.independent") == "ok"
    assert level(answer, "quorum.restarted") == "warning"
    subjects = {subject for _level, subject in found(answer, "redis.version")}
    assert subjects == {"distcron", "quorum-1", "quorum-2", "quorum-3"}


@pytest.mark.parametrize(
    ("urls", "code", "expected"),
    [((0, 1, None), 1, "warning"), ((0, None, None), 6, "problem")],
)
def test_a_quorum_that_misses_instances(
    good_redis: RedisServer,
    instances: list[RedisServer],
    urls: tuple[int | None, ...],
    code: int,
    expected: str,
) -> None:
    make_node()
    given = [NOBODY if place is None else instances[place].url for place in urls]
    with locks_on(good_redis.url, *given):
        answer = doctor()

    assert (answer.code, level(answer, "quorum.instances")) == (code, expected)
    assert [each for each, _subject in found(answer, "redis.answers")] == [
        "problem" for place in urls if place is None
    ]


def test_two_instances_on_one_server(good_redis: RedisServer, instances: list[RedisServer]) -> None:
    make_node()
    a, b, _c = instances
    with locks_on(good_redis.url, a.url, b.url, b.url_of(1)):
        answer = doctor()

    assert (answer.code, level(answer, "quorum.independent")) == (1, "problem")


# --- the database -----------------------------------------------------------------------


def test_a_good_database(healthy: None) -> None:
    answer = doctor()

    for code in ("database.answers", "database.migrations", "database.durability"):
        assert level(answer, code) == "ok", code
    assert level(answer, "database.read_only") is None


# What spoils a session of each database: statements, the code and its level.
SPOILED: dict[str, list[tuple[str, str, str]]] = {
    "postgresql": [
        ("SET synchronous_commit = off", "database.durability", "warning"),
        (
            "SET default_transaction_isolation = 'repeatable read'",
            "database.isolation",
            "problem",
        ),
    ],
    "mysql": [
        (
            "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
            "database.isolation",
            "problem",
        ),
    ],
    "sqlite": [
        ("PRAGMA synchronous=NORMAL", "database.durability", "problem"),
        ("PRAGMA journal_mode=MEMORY", "database.journal", "warning"),
    ],
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("statement", "code", "expected"), SPOILED[connection.vendor])
def test_a_spoiled_session(healthy: None, statement: str, code: str, expected: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)
    try:
        answer = doctor()
    finally:
        connection.close()  # the next one is as the settings say

    assert (answer.code, level(answer, code)) == (int(expected == "problem"), expected)
    assert level(doctor(), code) in (None, "ok")


@pytest.mark.django_db(transaction=True)
def test_a_table_without_transactions(healthy: None) -> None:
    engine = "ENGINE=MyISAM" if connection.vendor == "mysql" else ""
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE TABLE distcron_planted (id int) {engine}")
    try:
        answer = doctor()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE distcron_planted")

    assert level(answer, "database.engine") == ("problem" if engine else None)
    assert level(doctor(), "database.engine") is None


def test_sqlite_alone_is_for_one_machine(healthy: None) -> None:
    make_node("web-2", host="app-2")

    answer = doctor()

    expected = [("problem", "SQLite")] if connection.vendor == "sqlite" else []
    assert (answer.code, found(answer, "nodes.one_machine")) == (len(expected), expected)


def test_pending_migrations(healthy: None) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "DELETE FROM django_migrations WHERE app = 'distcron' AND name LIKE '0002%%'"
        )
    answer = doctor()

    assert (answer.code, level(answer, "database.migrations")) == (1, "problem")


# --- what a process of its own shows ------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path, good_redis: RedisServer) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "DJANGO_SETTINGS_MODULE": "project.settings",
        "DATABASE_URL": f"sqlite://{tmp_path}/db.sqlite3",
        "REDIS_URL": good_redis.url,
        "DISTCRON_DATA_DIR": str(tmp_path),
        "PYTHONIOENCODING": "utf-8",
    }


def run_doctor(environment: dict[str, str], *words: str, **changes: str) -> Answer:
    done = subprocess.run(
        [sys.executable, "manage.py", "schedulerctl", "doctor", "--json", *words],
        env=environment | changes,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def on_terminal(environment: dict[str, str], *words: str, columns: int) -> str:
    """Run with all streams on one terminal; return what it showed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "manage.py", "schedulerctl", "doctor", "--no-color", *words],
        env=environment | {"TERM": "xterm", "COLUMNS": str(columns)},
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b"".join(iter(lambda: _read(ours), b""))
    os.close(ours)
    process.wait(60)
    return shown.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    select.select([terminal], [], [], 60)
    try:
        return os.read(terminal, 65_536)
    except OSError:  # the process has closed its end
        return b""


def migrate(environment: dict[str, str]) -> None:
    subprocess.run(
        [sys.executable, "manage.py", "migrate", "-v0"], env=environment, cwd=ROOT, check=True
    )


def test_a_dead_database_is_a_finding_and_redis_is_still_looked_at(
    environment: dict[str, str],
) -> None:
    answer = run_doctor(environment, DATABASE_URL="postgres://nobody@127.0.0.1:1/none")

    assert answer.code == 6
    assert found(answer, "database.answers") == [("problem", None)]
    assert level(answer, "redis.lock") == "ok"
    assert level(answer, "nodes.alive") is None
    assert level(answer, "host.open_files") is not None


def test_a_database_without_tables_names_the_migrations(environment: dict[str, str]) -> None:
    answer = run_doctor(environment)

    assert answer.code == 1
    assert level(answer, "database.migrations") == "problem"
    assert level(answer, "nodes.readable") == "warning"
    assert level(answer, "schedules.readable") == "warning"


def test_a_low_limit_on_open_files(environment: dict[str, str]) -> None:
    migrate(environment)
    command = shlex.join([sys.executable, "manage.py", "schedulerctl", "doctor", "--json"])
    done = subprocess.run(
        ["/bin/sh", "-c", f"ulimit -n 200; exec {command}"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )

    answer = Answer(done.returncode, done.stdout, done.stderr)
    assert level(answer, "host.open_files") == "warning"
    assert level(run_doctor(environment), "host.open_files") == "ok"


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_lines_are_broken_to_the_terminal(environment: dict[str, str], columns: int) -> None:
    migrate(environment)

    shown = on_terminal(environment, columns=columns)

    assert columns - 20 < max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown
    assert shown.splitlines()[-1].startswith("error: 1 problem, ")


def test_a_longer_sample_shows_its_progress_on_a_terminal(environment: dict[str, str]) -> None:
    migrate(environment)

    shown = on_terminal(environment, "--redis-latency", "0.5", columns=100)

    assert shown.count("\r\x1b[Kmeasuring distcron: ") >= 5
    assert "%\r\x1b[K✔ ok" in shown


def test_postgresql_that_does_not_sync(environment: dict[str, str]) -> None:
    with postgres_cluster("fsync = off", "full_page_writes = off") as cluster:
        changes = {"DATABASE_URL": cluster.url}
        migrate(environment | changes)
        answer = run_doctor(environment, **changes)

    assert answer.code == 1
    assert found(answer, "database.durability") == [("problem", None), ("problem", None)]


# --- rows -----------------------------------------------------------------------------


def test_a_node_whose_clock_is_off(healthy: None) -> None:
    make_node("web-2", clock_offset_ms=-1500)
    make_node("web-3", clock_offset_ms=90_000)

    answer = doctor()

    assert answer.code == 1
    assert found(answer, "clocks.host") == [
        ("ok", None),
        ("warning", "web-2"),
        ("problem", "web-3"),
    ]


def test_nodes_to_look_at(healthy: None) -> None:
    make_node("late", heartbeat_age_seconds=9)
    make_node("dead", heartbeat_age_seconds=60, alert="not alive, not shown")
    make_node("sick", alert="locks unavailable", zone_data="2020a")

    answer = doctor()

    assert answer.code == 0
    assert found(answer, "nodes.suspect") == [("warning", "late")]
    assert found(answer, "nodes.alert") == [("warning", "sick")]
    assert level(answer, "nodes.alive") == "ok"


def test_nodes_that_may_need_more_connections_than_there_are(healthy: None) -> None:
    has_limit = connection.vendor != "sqlite"

    assert level(doctor(), "database.connections") == ("ok" if has_limit else None)
    make_node("big", slots=100_000)
    assert level(doctor(), "database.connections") == ("warning" if has_limit else None)


def test_schedules_to_look_at(healthy: None) -> None:
    make_schedule("good")
    broken = make_schedule("broken")
    late = make_schedule("late")
    strict = make_schedule("strict")
    Schedule.objects.filter(pk=broken.pk).mark_invalid("Job 'gone': not registered.")
    hour_ago = database_now() - timedelta(hours=1)
    Schedule.objects.filter(pk=late.pk).update(next_run_at=hour_ago)
    Schedule.objects.filter(pk=strict.pk).update(lock_level="quorum")
    make_run(late, "lost")
    make_run(late, "lost", delivery="at_least_once")
    make_run(late, "lost", finished_at=database_now() - timedelta(hours=25))

    answer = doctor()

    assert answer.code == 1
    assert found(answer, "schedules.invalid") == [("problem", "broken")]
    assert found(answer, "schedules.overdue") == [("problem", "late")]
    assert found(answer, "schedules.level") == [("problem", "strict")]
    assert found(answer, "schedules.lost") == [("warning", None)]
    assert "runs lost in 24 h: 1 (late)" in answer.out
    assert level(answer, "schedules.state") is None


# --- this host ------------------------------------------------------------------------


def test_lock_files_need_room_and_no_redis(tmp_path: Path) -> None:
    make_node()
    folder = tmp_path / "locks"
    with override_settings(DISTCRON={"LOCK_BACKEND": "file", "LOCK_DIRECTORY": str(folder)}):
        answer = doctor()

    assert (answer.code, level(answer, "host.disk")) == (0, "ok")
    assert not folder.exists()
    assert found(answer, "redis.answers") == []


def test_a_lock_directory_that_cannot_be_used(tmp_path: Path) -> None:
    make_node()
    tmp_path.chmod(0o777)
    with override_settings(DISTCRON={"LOCK_BACKEND": "file", "LOCK_DIRECTORY": str(tmp_path)}):
        answer = doctor()

    assert (answer.code, level(answer, "distcron.E018")) == (1, "problem")


@pytest.mark.parametrize(
    ("seconds", "code", "expected"), [("45", 0, "ok"), ("20", 1, "problem"), (None, 1, "problem")]
)
def test_supervisor(
    healthy: None, tmp_path: Path, seconds: str | None, code: int, expected: str
) -> None:
    path = tmp_path / "node.conf"
    line = "" if seconds is None else f"stopwaitsecs={seconds}\n"
    path.write_text(f"[program:cron]\ncommand=python manage.py runscheduler\n{line}")

    for given in (path, tmp_path):
        answer = doctor("--supervisor-conf", str(given))
        assert answer.code == code
        assert (expected, "cron") in found(answer, "stopping.wait")


def test_a_supervisor_file_of_other_programs(healthy: None, tmp_path: Path) -> None:
    path = tmp_path / "web.conf"
    path.write_text("[program:web]\ncommand=gunicorn\n")

    answer = doctor("--supervisor-conf", str(path))

    assert (answer.code, level(answer, "stopping.wait")) == (0, "warning")


def test_a_supervisor_file_that_is_missing_is_wrong_usage(healthy: None, tmp_path: Path) -> None:
    answer = doctor("--supervisor-conf", str(tmp_path / "gone.conf"))

    assert (answer.code, answer.out) == (2, "")
    assert answer.error == "--supervisor-conf: cannot be read: No such file or directory"
