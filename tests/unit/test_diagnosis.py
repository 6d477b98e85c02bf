"""The judgements of ``schedulerctl doctor``, on literal facts."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from django.core import checks

from distcron_app.conf import Config
from distcron_app.diagnosis import OK, PROBLEM, WARNING, Finding
from distcron_app.diagnosis.configuration import judge_messages
from distcron_app.diagnosis.database import (
    DatabaseFacts,
    judge_answer,
    judge_connections,
    judge_database,
    judge_migrations,
)
from distcron_app.diagnosis.instances import (
    INSTANCE_JUDGEMENTS,
    Instance,
    judge_clock,
    judge_latency,
    judge_quorum,
    judge_stuck,
)
from distcron_app.diagnosis.nodes import (
    judge_clocks,
    judge_disk,
    judge_nodes,
    judge_one_machine,
    judge_open_files,
    needed_files,
)
from distcron_app.diagnosis.schedules import (
    judge_invalid,
    judge_levels,
    judge_lost,
    judge_overdue,
)
from distcron_app.diagnosis.stopping import judge_service, supervisor_services, systemd_service
from distcron_app.diagnosis.timing import judge_timing
from distcron_app.models import Node

ROOT = Path(__file__).resolve().parents[2]
INFO = {
    "redis_version": "7.0.15",
    "role": "master",
    "maxmemory": 0,
    "maxmemory_policy": "noeviction",
    "used_memory": 1_000_000,
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
    "aof_last_bgrewrite_status": "ok",
    "rdb_last_bgsave_status": "ok",
    "connected_slaves": 0,
    "connected_clients": 5,
    "maxclients": 10_000,
    "run_id": "a" * 40,
    "uptime_in_seconds": 86_400,
}
CONFIG = {
    "save": "",
    "stop-writes-on-bgsave-error": "yes",
    "min-replicas-to-write": "0",
    "protected-mode": "yes",
    "bind": "127.0.0.1 -::1",
    "requirepass": "",
}
REPLICA = {"ip": "10.0.0.6", "port": 6379, "state": "online", "lag": 0}


def levels(findings: Iterable[Finding]) -> dict[str, str]:
    """Return the level of each code, where each code comes once."""
    found = list(findings)
    by_code = {finding.code: finding.level for finding in found}
    assert len(by_code) == len(found)
    return by_code


def bad(findings: Iterable[Finding]) -> dict[str, str]:
    return {code: level for code, level in levels(findings).items() if level != OK}


def instance(
    info: dict[str, Any] | None = None, config: dict[str, str] | None = None, **facts: Any
) -> Instance:
    values = {
        "subject": "distcron",
        "address": "127.0.0.1:6379",
        "has_password": False,
        "info": INFO | (info or {}),
        "config": CONFIG | (config or {}),
    }
    return Instance(**(values | facts))


def judged(seen: Instance) -> list[Finding]:
    return [finding for judge in INSTANCE_JUDGEMENTS for finding in judge(seen)]


def test_a_good_redis_on_this_machine_has_nothing_to_mend() -> None:
    assert levels(judged(instance())) == {
        "redis.version": OK,
        "redis.role": OK,
        "redis.eviction": OK,
        "redis.persistence": OK,
        "redis.access": OK,
    }


@pytest.mark.parametrize(
    ("seen", "code", "level"),
    [
        (instance({"redis_version": "5.0.14"}), "redis.version", PROBLEM),
        (instance({"redis_version": "6.0.16"}), "redis.version", WARNING),
        (instance({"role": "slave", "master_host": "10.0.0.5"}), "redis.role", PROBLEM),
        (
            instance({"maxmemory": 9_000_000, "maxmemory_policy": "allkeys-lru"}),
            "redis.eviction",
            PROBLEM,
        ),
        (instance({"maxmemory": 1_100_000}), "redis.memory", WARNING),
        (instance({"aof_enabled": 0}), "redis.persistence", WARNING),
        (instance({"aof_enabled": 0}, {"save": "3600 1"}), "redis.persistence", WARNING),
        (instance({"rdb_last_bgsave_status": "err"}), "redis.saving", PROBLEM),
        (
            instance({"rdb_last_bgsave_status": "err"}, {"stop-writes-on-bgsave-error": "no"}),
            "redis.saving",
            WARNING,
        ),
        (instance({"aof_last_write_status": "err"}), "redis.saving", PROBLEM),
        (instance({"connected_slaves": 1, "slave0": REPLICA}), "redis.replicas", WARNING),
        (
            instance(
                {"connected_slaves": 1, "slave0": REPLICA | {"lag": 40}},
                {"min-replicas-to-write": "1"},
            ),
            "redis.replicas",
            WARNING,
        ),
        (
            instance(config={"protected-mode": "no", "bind": "* -::*"}),
            "redis.access",
            PROBLEM,
        ),
        (instance({"connected_clients": 9_001}), "redis.clients", WARNING),
    ],
)
def test_a_bad_setting_of_redis_is_found_alone(seen: Instance, code: str, level: str) -> None:
    assert bad(judged(seen)) == {code: level}


def test_a_redis_over_the_network_without_password_and_encryption() -> None:
    seen = instance(address="10.0.0.5:6379", is_local=False)

    assert bad(judged(seen)) == {"redis.access": PROBLEM, "redis.encryption": WARNING}


def test_a_redis_over_the_network_with_password_and_encryption() -> None:
    seen = instance(
        address="10.0.0.5:6379",
        is_local=False,
        is_encrypted=True,
        has_password=True,
        config={"bind": "10.0.0.5", "protected-mode": "no"},
    )

    assert bad(judged(seen)) == {}
    assert levels(judged(seen))["redis.encryption"] == OK


@pytest.mark.parametrize(
    ("config", "level"),
    [
        ({"protected-mode": "yes", "bind": "* -::*"}, OK),
        ({"protected-mode": "no", "bind": "127.0.0.1 -::1"}, OK),
        ({"protected-mode": "no", "bind": "127.0.0.1 10.0.0.5"}, PROBLEM),
    ],
)
def test_a_redis_without_password_is_fine_where_nobody_else_reaches_it(
    config: dict[str, str], level: str
) -> None:
    assert levels(judged(instance(config=config)))["redis.access"] == level


def test_replicas_that_must_have_a_write_are_fine() -> None:
    seen = instance({"connected_slaves": 1, "slave0": REPLICA}, {"min-replicas-to-write": "1"})

    assert levels(judged(seen))["redis.replicas"] == OK


def test_memory_that_is_not_nearly_full_is_fine() -> None:
    assert levels(judged(instance({"maxmemory": 4_000_000})))["redis.memory"] == OK


def test_valkey_tells_its_own_version() -> None:
    seen = instance({"redis_version": "7.2.4", "valkey_version": "9.1.2"})

    (finding, *_others) = judged(seen)

    assert finding.text == "Valkey 9.1.2 at 127.0.0.1:6379"


def test_a_server_that_refuses_to_tell_is_one_warning() -> None:
    seen = instance(info=None, config=None, has_password=None)
    seen = Instance(subject=seen.subject, address=seen.address)

    (finding,) = judged(seen)

    assert (finding.code, finding.level) == ("redis.readable", WARNING)
    assert finding.text.startswith("INFO / CONFIG GET is refused")


def test_without_config_the_rest_of_info_is_still_judged() -> None:
    seen = instance({"aof_enabled": 0, "maxmemory": 9_000_000, "maxmemory_policy": "allkeys-lru"})
    seen = Instance(subject="distcron", info=seen.info, has_password=False)

    assert bad(judged(seen)) == {
        "redis.readable": WARNING,
        "redis.eviction": PROBLEM,
        "redis.persistence": WARNING,
    }


@pytest.mark.parametrize(
    ("measured", "level", "text"),
    [
        ([0.2] * 199 + [50.0], OK, "answers in 0.20 ms, 99 % within 0.20 ms (pings: 200)"),
        (
            [0.2] * 197 + [2.5] * 3,
            WARNING,
            "answers in 0.20 ms, 99 % within 2.50 ms (pings: 200)",
        ),
        ([3.0], WARNING, "answers in 3.00 ms, 99 % within 3.00 ms (pings: 1)"),
    ],
)
def test_latency_is_judged_by_the_slowest_of_a_hundred(
    measured: list[float], level: str, text: str
) -> None:
    finding = judge_latency("distcron", measured)

    assert (finding.level, finding.text) == (level, text)


@pytest.mark.parametrize(("offset", "level"), [(0.9, OK), (-1.1, WARNING), (1.1, WARNING)])
def test_clock_of_redis(offset: float, level: str) -> None:
    assert judge_clock("distcron", offset).level == level


def test_locks_that_never_end() -> None:
    assert judge_stuck("distcron", []).level == OK
    finding = judge_stuck("distcron", ["a", "b", "c", "d"])
    assert (finding.level, finding.text) == (WARNING, "locks without a TTL: 4 (a, b, c)")


def quorum(**instances: Instance | None) -> list[Finding]:
    return judge_quorum(instances, 15.0)


def named(run_id: str, **info: Any) -> Instance:
    return instance({"run_id": run_id, **info})


def test_a_good_quorum() -> None:
    assert levels(quorum(a=named("1"), b=named("2"), c=named("3"))) == {
        "quorum.instances": OK,
        "quorum.independent": OK,
    }


def test_a_quorum_that_misses_one() -> None:
    found = quorum(a=named("1"), b=named("2"), c=None)

    assert bad(found) == {"quorum.instances": WARNING}
    assert found[0].text == "2 of 3 instances answer"
    assert found[0].consequence == "Locks work. How many more may fail: 0."
    assert not found[0].is_outage


def test_a_quorum_without_a_majority_is_an_outage() -> None:
    (finding, *_others) = quorum(a=named("1"), b=None, c=None)

    assert (finding.code, finding.level, finding.is_outage) == ("quorum.instances", PROBLEM, True)


def test_half_of_an_even_number_is_no_majority() -> None:
    found = quorum(a=named("1"), b=named("2"), c=None, d=None)

    assert found[0].level == PROBLEM


def test_two_aliases_on_one_server() -> None:
    found = quorum(a=named("1"), b=named("1"), c=named("3"))

    assert bad(found) == {"quorum.independent": PROBLEM}
    assert found[1].text == "aliases on one and the same server: a, b"


def test_an_instance_that_has_just_started() -> None:
    found = quorum(a=named("1"), b=named("2", uptime_in_seconds=15), c=named("3"))

    assert bad(found) == {"quorum.restarted": WARNING}


# --- database -------------------------------------------------------------------------

POSTGRES = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "transaction_isolation": "read committed",
    "synchronous_standby_names": "",
    "max_connections": "100",
    "superuser_reserved_connections": "3",
    "in_recovery": "false",
    "standbys": "0",
    "used_connections": "10",
}
MARIADB = {
    "innodb_flush_log_at_trx_commit": "1",
    "sync_binlog": "0",
    "log_bin": "OFF",
    "innodb_doublewrite": "ON",
    "tx_isolation": "READ-COMMITTED",
    "read_only": "OFF",
    "max_connections": "151",
    "used_connections": "10",
}
SQLITE = {"journal_mode": "wal", "synchronous": "2"}


def database(vendor: str, settings: dict[str, str], **changes: str) -> DatabaseFacts:
    names = {name.replace("__", "_"): value for name, value in changes.items()}
    return DatabaseFacts(vendor=vendor, label=vendor, settings=settings | names)


@pytest.mark.parametrize(
    ("facts", "codes"),
    [
        (database("postgresql", POSTGRES), {"database.durability", "database.isolation"}),
        (database("mysql", MARIADB), {"database.durability", "database.isolation"}),
        (database("sqlite", SQLITE), {"database.durability"}),
    ],
    ids=["postgresql", "mariadb", "sqlite"],
)
def test_a_good_database_has_nothing_to_mend(facts: DatabaseFacts, codes: set[str]) -> None:
    assert levels(judge_database(facts)) == dict.fromkeys(codes, OK)


@pytest.mark.parametrize(
    ("facts", "code", "level"),
    [
        (database("postgresql", POSTGRES, fsync="off"), "database.durability", PROBLEM),
        (database("postgresql", POSTGRES, full_page_writes="off"), "database.durability", PROBLEM),
        (
            database("postgresql", POSTGRES, synchronous_commit="off"),
            "database.durability",
            WARNING,
        ),
        (
            database("postgresql", POSTGRES, transaction_isolation="repeatable read"),
            "database.isolation",
            PROBLEM,
        ),
        (database("postgresql", POSTGRES, in_recovery="true"), "database.read_only", PROBLEM),
        (database("postgresql", POSTGRES, standbys="2"), "database.replication", WARNING),
        (
            database("mysql", MARIADB, innodb_flush_log_at_trx_commit="2"),
            "database.durability",
            PROBLEM,
        ),
        (database("mysql", MARIADB, log_bin="ON"), "database.durability", PROBLEM),
        (database("mysql", MARIADB, innodb_doublewrite="OFF"), "database.durability", PROBLEM),
        (database("mysql", MARIADB, tx_isolation="REPEATABLE-READ"), "database.isolation", PROBLEM),
        (database("mysql", MARIADB, read_only="ON"), "database.read_only", PROBLEM),
        (database("sqlite", SQLITE, synchronous="1"), "database.durability", PROBLEM),
        (database("sqlite", SQLITE, journal_mode="delete"), "database.journal", WARNING),
    ],
)
def test_a_bad_setting_of_a_database_is_found_alone(
    facts: DatabaseFacts, code: str, level: str
) -> None:
    assert bad(judge_database(facts)) == {code: level}


def test_a_binary_log_that_is_synced_is_fine() -> None:
    facts = database("mysql", MARIADB, log_bin="ON", sync_binlog="1")

    assert bad(judge_database(facts)) == {}


def test_a_synchronous_standby_is_fine() -> None:
    facts = database("postgresql", POSTGRES, standbys="1", synchronous_standby_names="FIRST 1 (b)")

    assert bad(judge_database(facts)) == {}


def test_tables_without_transactions() -> None:
    facts = DatabaseFacts(vendor="mysql", settings=MARIADB, unsafe_tables=["distcron_run"])

    assert bad(judge_database(facts)) == {"database.engine": PROBLEM}


@pytest.mark.parametrize(("ms", "level"), [(10.0, OK), (10.1, WARNING)])
def test_a_slow_database(ms: float, level: str) -> None:
    finding = judge_answer(DatabaseFacts(vendor="postgresql", label="P", answer_ms=ms))

    assert finding.level == level


def test_migrations() -> None:
    assert judge_migrations([]).level == OK
    finding = judge_migrations(["0001_initial", "0002_more"])
    assert finding.level == PROBLEM
    assert finding.text == "migrations are not applied: 0001_initial, 0002_more"


@pytest.mark.parametrize(
    ("used", "slots", "level", "text"),
    [
        ("10", [16, 16], OK, "10 of 97 connections are used, nodes need up to 36"),
        ("10", [16] * 6, WARNING, "10 of 97 connections are used, nodes need up to 108"),
        ("88", [16], WARNING, "88 of 97 connections are used, nodes need up to 18"),
    ],
)
def test_connections(used: str, slots: list[int], level: str, text: str) -> None:
    facts = database("postgresql", POSTGRES, used_connections=used)

    (finding,) = judge_connections(facts, slots)

    assert (finding.level, finding.text) == (level, text)


def test_a_database_without_connections_has_no_limit_of_them() -> None:
    assert judge_connections(database("sqlite", SQLITE), [16]) == []


# --- nodes and their hosts --------------------------------------------------------------


def node(name: str = "web-1", **fields: Any) -> Node:
    return Node(name=name, **({"host": "app-1", "version": "0.1.0", "zone_data": "2026a"} | fields))


def test_nodes_that_are_alike() -> None:
    assert levels(judge_nodes([node(), node("web-2")])) == {"nodes.alive": OK}


def test_no_node() -> None:
    assert levels(judge_nodes([])) == {"nodes.alive": PROBLEM}


@pytest.mark.parametrize(
    ("other", "suspect", "code"),
    [
        ({"version": "0.2.0"}, [], "nodes.versions"),
        ({"zone_data": "2026b"}, [], "nodes.zone_data"),
        ({"alert": "locks unavailable"}, [], "nodes.alert"),
        ({}, ["web-2"], "nodes.suspect"),
    ],
)
def test_a_node_to_look_at(other: dict[str, str], suspect: list[str], code: str) -> None:
    found = judge_nodes([node(), node("web-2", **other)], suspect=suspect)

    assert bad(found) == {code: WARNING}


def test_clocks_of_hosts_within_a_second_are_one_finding() -> None:
    (finding,) = judge_clocks([("this host", 3), ("web-1", -1000)])

    assert finding.level == OK
    assert finding.text == "2 clocks are within 1000 ms of the database's"


def test_clocks_of_hosts_that_are_off() -> None:
    found = judge_clocks([("this host", 0), ("web-1", 1001), ("web-2", -2001)])

    assert [(each.subject, each.level, each.text) for each in found[1:]] == [
        ("web-1", WARNING, "its clock is -1001 ms from the database's"),
        ("web-2", PROBLEM, "its clock is +2001 ms from the database's"),
    ]


@pytest.mark.parametrize(
    ("hosts", "vendor", "lock_backend", "expected"),
    [
        ({"a"}, "sqlite", "file", []),
        ({"a", "b"}, "postgresql", "redis", []),
        ({"a", "b"}, "sqlite", "redis", [("SQLite", PROBLEM)]),
        ({"a", "b"}, "postgresql", "file", [("file", WARNING)]),
        ({"a", "b"}, "postgresql", "memory", [("memory", WARNING)]),
    ],
)
def test_what_is_for_one_machine(
    hosts: set[str], vendor: str, lock_backend: str, expected: list[tuple[str, str]]
) -> None:
    found = judge_one_machine(hosts, vendor=vendor, lock_backend=lock_backend)

    assert [(finding.subject, finding.level) for finding in found] == expected


@pytest.mark.parametrize(("limit", "level"), [(1024, OK), (256, OK), (255, WARNING), (-1, OK)])
def test_open_files(limit: int, level: str) -> None:
    assert judge_open_files(limit, 256).level == level


def test_lock_files_count_as_open_files() -> None:
    assert needed_files(Config(lock_backend="redis", processes=2, threads=8)) == 256
    assert needed_files(Config(lock_backend="file", processes=2, threads=8)) == 1256


@pytest.mark.parametrize(
    ("free_bytes", "free_files", "level"),
    [
        (104_857_600, 10, OK),
        (104_857_600, None, OK),
        (104_857_599, 10, WARNING),
        (10**12, 0, WARNING),
    ],
)
def test_room_for_lock_files(free_bytes: int, free_files: int | None, level: str) -> None:
    assert judge_disk("/var/lock", free_bytes, free_files).level == level


# --- schedules ------------------------------------------------------------------------


def test_schedules_without_trouble_have_no_finding() -> None:
    assert [*judge_invalid([]), *judge_overdue([], 30), *judge_levels([]), *judge_lost([])] == []


def test_an_invalid_schedule_has_its_key_and_reason() -> None:
    (finding,) = judge_invalid([("geo-import", "Job 'geo.load': not registered.")])

    assert (finding.level, finding.subject) == (PROBLEM, "geo-import")
    assert finding.text == "Job 'geo.load': not registered."


@pytest.mark.parametrize(
    "judge",
    [
        lambda keys: judge_invalid([(key, "why") for key in keys]),
        lambda keys: judge_overdue(keys, 30),
    ],
)
def test_many_schedules_are_five_and_a_count(judge: Callable[[list[str]], list[Finding]]) -> None:
    found = judge([f"s{number}" for number in range(8)])

    assert [finding.subject for finding in found] == ["s0", "s1", "s2", "s3", "s4", ""]
    assert found[-1].text == "3 more"
    assert {finding.level for finding in found} == {PROBLEM}


def test_an_overdue_schedule() -> None:
    (finding,) = judge_overdue(["late"], 30.0)

    assert finding.level == PROBLEM
    assert finding.text == "due for more than 30 s, and nobody has claimed it"


def test_schedules_of_a_level_that_cannot_work() -> None:
    (finding,) = judge_levels([(["a", "b", "c", "d"], "Lock level 'critical': no.")])

    assert (finding.level, finding.subject) == (PROBLEM, "a, b, c, …")


def test_lost_runs_are_counted_and_named_once() -> None:
    (finding,) = judge_lost(["Mail", "Close", "Mail"])

    assert (finding.level, finding.text) == (WARNING, "runs lost in 24 h: 3 (Close, Mail)")


# --- timing and stopping ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "level"),
    [
        (Config(), OK),
        (Config(lock_ttl_seconds=27), OK),
        (Config(lock_ttl_seconds=28), WARNING),
        (Config(node_lease_seconds=60), WARNING),
        (Config(lock_ttl_seconds=60, misfire_grace_seconds=120), OK),
    ],
)
def test_a_takeover_must_come_before_the_misfire(config: Config, level: str) -> None:
    assert judge_timing(config).level == level


SUPERVISOR = """
[supervisord]
nodaemon=true

[program:web]
command=gunicorn project.wsgi

[program:scheduler]
command=/srv/venv/bin/python manage.py runscheduler --log json ; the node
stopwaitsecs=45 ; longer than the drain
"""


def supervisor(**changes: str) -> str:
    lines = "".join(f"{name}={value}\n" for name, value in changes.items())
    return f"[program:scheduler]\ncommand=python manage.py runscheduler\n{lines}"


def test_the_program_of_a_node_is_found() -> None:
    (service,) = supervisor_services(SUPERVISOR)

    assert (service.name, service.stop_seconds, service.stop_signal) == ("scheduler", 45.0, "TERM")
    assert judge_service(service, 25.0).level == OK


def test_the_supervisor_file_that_is_shipped_waits_long_enough() -> None:
    text = (ROOT / "deploy" / "supervisor" / "distcron.conf").read_text()

    (service,) = supervisor_services(text)

    finding = judge_service(service, Config().drain_seconds)
    assert (finding.level, finding.subject) == (OK, "distcron-scheduler")


@pytest.mark.parametrize(
    ("changes", "code", "level"),
    [
        ({}, "stopping.wait", PROBLEM),
        ({"stopwaitsecs": "25"}, "stopping.wait", PROBLEM),
        ({"stopwaitsecs": "27"}, "stopping.wait", PROBLEM),
        ({"stopwaitsecs": "28"}, "stopping.wait", OK),
        ({"stopwaitsecs": "%(ENV_WAIT)s"}, "stopping.wait", WARNING),
        ({"stopwaitsecs": "45", "stopsignal": "INT"}, "stopping.wait", OK),
        ({"stopwaitsecs": "45", "stopsignal": "SIGKILL"}, "stopping.signal", PROBLEM),
    ],
)
def test_supervisor_must_wait_for_the_drain(changes: dict[str, str], code: str, level: str) -> None:
    (service,) = supervisor_services(supervisor(**changes))

    finding = judge_service(service, 25.0)

    assert (finding.code, finding.level) == (code, level)


def test_the_drain_of_the_command_counts() -> None:
    text = "[program:s]\ncommand=manage.py runscheduler --drain-seconds 60\nstopwaitsecs=45\n"

    (service,) = supervisor_services(text)

    finding = judge_service(service, 25.0)
    assert finding.level == PROBLEM
    assert finding.text == "stopwaitsecs is 45 s, a node drains for up to 60 s"


UNIT = """
[Service]
# ExecStart=/bin/true
ExecStart=/srv/venv/bin/python \\
  manage.py runscheduler
"""


@pytest.mark.parametrize(
    ("texts", "level"),
    [
        ([UNIT], OK),  # 90 s is the default of systemd
        ([UNIT + "TimeoutStopSec=20\n"], PROBLEM),
        ([UNIT + "TimeoutStopSec=1min 30s\n"], OK),
        ([UNIT + "TimeoutStopSec=infinity\n"], OK),
        ([UNIT + "TimeoutStopSec=0\n"], OK),
        ([UNIT + "TimeoutSec=5\n"], PROBLEM),
        ([UNIT + "TimeoutStopSec=soon\n"], WARNING),
        ([UNIT + "TimeoutStopSec=20\n", "[Service]\nTimeoutStopSec=45\n"], OK),
        ([UNIT + "KillSignal=SIGQUIT\n"], PROBLEM),
    ],
)
def test_systemd_must_wait_for_the_drain(texts: list[str], level: str) -> None:
    service = systemd_service("distcron.service", texts)

    assert service is not None
    assert judge_service(service, 25.0).level == level


def test_a_unit_of_something_else_is_none() -> None:
    assert systemd_service("web.service", ["[Service]\nExecStart=/usr/bin/gunicorn\n"]) is None


# --- system checks ----------------------------------------------------------------------


def test_system_checks_become_findings() -> None:
    messages = [
        checks.Error("E. It fails.", hint="Do this.", id="distcron.E010"),
        checks.Warning("W.", id="distcron.W012"),
        checks.Info("I.", id="distcron.I001"),
    ]

    found = list(judge_messages(messages))

    assert levels(found) == {"distcron.E010": PROBLEM, "distcron.W012": WARNING}
    assert (found[0].area, found[0].text, found[0].fix) == ("settings", "E. It fails.", "Do this.")


def test_system_checks_that_pass_are_one_finding() -> None:
    assert levels(judge_messages([])) == {"settings.checks": OK}


def test_a_silenced_system_check_is_not_shown(settings: Any) -> None:
    settings.SILENCED_SYSTEM_CHECKS = ["distcron.W012"]

    found = judge_messages([checks.Warning("W.", id="distcron.W012")])

    assert levels(found) == {"settings.checks": OK}


# --- documents ------------------------------------------------------------------------


def _codes() -> set[str]:
    """Return every code that the package gives a finding."""
    found = set()
    for path in (ROOT / "distcron_app" / "diagnosis").glob("*.py"):
        for word in ast.walk(ast.parse(path.read_text())):
            if isinstance(word, ast.Constant) and isinstance(word.value, str):
                found.update(re.findall(r"^(?:[a-z]+)\.[a-z_]+$", word.value))
    return found


def test_the_page_of_the_doctor_has_every_code_and_no_other() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    shown = set(re.findall(r"^\| `([a-z]+\.[a-z_]+)`", page, re.MULTILINE))

    assert len(_codes()) > 30
    assert shown == _codes() | {"nodes.readable", "schedules.readable"}
