"""The database: what decides that an occurrence runs once, if it keeps what it committed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from django.db import DatabaseError, InterfaceError, NotSupportedError, connections, transaction
from django.db.migrations.executor import MigrationExecutor
from django.utils import formats
from django.utils.translation import gettext as _

from distcron_app.clock import Clock
from distcron_app.diagnosis.finding import OK, PROBLEM, WARNING, Finding

__all__ = [
    "DatabaseFacts",
    "judge_answer",
    "judge_connections",
    "judge_database",
    "judge_migrations",
    "look_at_database",
]

_QUESTIONS = 5
SLOW_MS = 10.0
_NEARLY_FULL = 0.9
# The loop and the keeper; jobs have one connection in each thread.
_CONNECTIONS_OF_A_NODE = 2

_POSTGRES = """
SELECT name, setting FROM pg_settings WHERE name IN (
  'fsync', 'full_page_writes', 'synchronous_commit', 'transaction_isolation',
  'synchronous_standby_names', 'max_connections', 'superuser_reserved_connections')
UNION ALL SELECT 'in_recovery', pg_is_in_recovery()::text
UNION ALL SELECT 'standbys', count(*)::text FROM pg_stat_replication
UNION ALL SELECT 'used_connections', count(*)::text FROM pg_stat_activity
  WHERE backend_type = 'client backend'
"""
_MARIADB = """
SHOW VARIABLES WHERE Variable_name IN (
  'innodb_flush_log_at_trx_commit', 'sync_binlog', 'log_bin', 'innodb_doublewrite',
  'tx_isolation', 'transaction_isolation', 'read_only', 'max_connections')
"""
_MARIADB_TABLES = """
SELECT table_name FROM information_schema.tables
WHERE table_schema = DATABASE() AND table_name LIKE 'distcron\\_%' AND engine <> 'InnoDB'
ORDER BY table_name
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseFacts:
    """What a database told: its settings by name, and what an answer takes."""

    vendor: str
    label: str = ""
    answer_ms: float = 0.0
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unsafe_tables: Sequence[str] = ()

    def number(self, name: str) -> int:
        """Return a setting as a number, 0 where it is missing."""
        return int(self.settings.get(name) or 0)


def look_at_database(
    alias: str = "default", *, clock: Clock | None = None
) -> tuple[DatabaseFacts | None, list[Finding]]:
    """Return the facts, None where it does not answer, and the findings."""
    try:
        facts = _read(alias, clock or Clock())
        pending = _pending_migrations(alias)
    except NotSupportedError as error:
        # Django refuses servers that are older than it supports.
        return None, [_too_old(str(error))]
    except (DatabaseError, InterfaceError) as error:
        return None, [_away(str(error))]
    return facts, [judge_answer(facts), judge_migrations(pending), *judge_database(facts)]


def _read(alias: str, clock: Clock) -> DatabaseFacts:
    connection = connections[alias]
    # In a transaction, since that is where its isolation shows.
    with transaction.atomic(using=alias), connection.cursor() as cursor:
        took = [_question_ms(cursor, clock) for _number in range(_QUESTIONS)]
        return DatabaseFacts(
            vendor=connection.vendor,
            label=f"{connection.display_name} {_version(connection)}",
            answer_ms=sorted(took)[_QUESTIONS // 2],
            settings=_SETTINGS[connection.vendor](cursor),
            unsafe_tables=_unsafe_tables(cursor) if connection.vendor == "mysql" else (),
        )


def _question_ms(cursor: Any, clock: Clock) -> float:
    sent_at = clock.monotonic()
    cursor.execute("SELECT 1")
    cursor.fetchall()
    return (clock.monotonic() - sent_at) * 1000


def _version(connection: Any) -> str:
    return ".".join(map(str, connection.get_database_version()))


def _postgres_settings(cursor: Any) -> dict[str, str]:
    cursor.execute(_POSTGRES)
    return dict(cursor.fetchall())


def _mariadb_settings(cursor: Any) -> dict[str, str]:
    cursor.execute(_MARIADB)
    found = {name: str(value) for name, value in cursor.fetchall()}
    cursor.execute("SHOW STATUS LIKE 'Threads_connected'")
    found["used_connections"] = str(cursor.fetchone()[1])
    return found


def _sqlite_settings(cursor: Any) -> dict[str, str]:
    found = {}
    for name in ("journal_mode", "synchronous"):
        cursor.execute(f"PRAGMA {name}")
        found[name] = str(cursor.fetchone()[0])
    return found


def _unsafe_tables(cursor: Any) -> list[str]:
    cursor.execute(_MARIADB_TABLES)
    return [name for (name,) in cursor.fetchall()]


_SETTINGS: dict[str, Callable[[Any], dict[str, str]]] = {
    "postgresql": _postgres_settings,
    "mysql": _mariadb_settings,
    "sqlite": _sqlite_settings,
}


def _pending_migrations(alias: str) -> list[str]:
    executor = MigrationExecutor(connections[alias])
    targets = [node for node in executor.loader.graph.leaf_nodes() if node[0] == "distcron"]
    plan = executor.migration_plan(targets)
    return [f"{migration.app_label}.{migration.name}" for migration, _backwards in plan]


# --- judgements: no input or output ---------------------------------------------------


def judge_answer(facts: DatabaseFacts) -> Finding:
    """Say which database it is, and warn where its answers take long."""
    said = {"name": facts.label, "ms": formats.number_format(facts.answer_ms, 2)}
    text = _("%(name)s, answers in %(ms)s ms") % said
    if facts.answer_ms <= SLOW_MS:
        return Finding(code="database.answers", level=OK, text=text)
    return Finding(
        code="database.answers",
        level=WARNING,
        text=text,
        consequence=_("A claim takes several answers, so runs start late and nodes take turns."),
        fix=_("Move the nodes near the database, or look for what keeps it busy."),
    )


def judge_migrations(pending: Sequence[str]) -> Finding:
    """Refuse tables that are older than this code."""
    if not pending:
        text = _("the migrations are applied")
        return Finding(code="database.migrations", level=OK, text=text)
    return Finding(
        code="database.migrations",
        level=PROBLEM,
        text=_("migrations are not applied: %s") % ", ".join(pending),
        consequence=_("runscheduler refuses to start."),
        fix=_("Run: manage.py migrate"),
    )


def judge_database(facts: DatabaseFacts) -> list[Finding]:
    """Judge whether what was committed stays, and what a transaction sees."""
    found = list(_DURABILITY[facts.vendor](facts))
    if not found:
        text = _("a commit is on the disk before it is acknowledged")
        found = [Finding(code="database.durability", level=OK, text=text)]
    return [*found, *_isolation(facts), *_read_only(facts), *_replication(facts)]


def judge_connections(facts: DatabaseFacts, slots: Sequence[int]) -> list[Finding]:
    """Warn where the nodes, each given as its slots, may need more connections than there are."""
    limit = facts.number("max_connections") - facts.number("superuser_reserved_connections")
    if limit <= 0:
        return []
    wanted = sum(slots) + _CONNECTIONS_OF_A_NODE * len(slots)
    used = facts.number("used_connections")
    said = {"limit": limit, "used": used, "wanted": wanted}
    text = _("%(used)d of %(limit)d connections are used, nodes need up to %(wanted)d") % said
    if wanted <= limit and used < limit * _NEARLY_FULL:
        return [Finding(code="database.connections", level=OK, text=text)]
    return [
        Finding(
            code="database.connections",
            level=WARNING,
            text=text,
            consequence=_("A node or job that gets no connection fails or waits."),
            fix=_("Raise max_connections, or lower PROCESSES and THREADS of the nodes."),
        )
    ]


def _postgres(facts: DatabaseFacts) -> Iterator[Finding]:
    for name in ("fsync", "full_page_writes"):
        if facts.settings.get(name) == "off":
            yield _forgets(
                "database.durability",
                _("%s is off") % name,
                _("Set %s = on and reload the server.") % name,
            )
    if facts.settings.get("synchronous_commit") == "off":
        yield Finding(
            code="database.durability",
            level=WARNING,
            text=_("synchronous_commit is off"),
            consequence=_(
                "A crash may forget what a page or a command has just saved. Nodes turn it on "
                "for themselves."
            ),
            fix=_("Set synchronous_commit = on for this database or role."),
        )


def _mariadb(facts: DatabaseFacts) -> Iterator[Finding]:
    wanted = {"innodb_flush_log_at_trx_commit": "1"}
    if facts.settings.get("log_bin") == "ON":
        wanted["sync_binlog"] = "1"
    for name, value in wanted.items():
        if facts.settings.get(name, value) != value:
            said = {"name": name, "value": value, "given": facts.settings[name]}
            yield _forgets(
                "database.durability",
                _("%(name)s is %(given)s") % said,
                _("Set %(name)s = %(value)s.") % said,
            )
    if facts.settings.get("innodb_doublewrite", "ON").upper() in ("OFF", "0"):
        yield _forgets(
            "database.durability",
            _("innodb_doublewrite is off"),
            _("Turn it on, unless the file system writes pages whole."),
        )
    if facts.unsafe_tables:
        yield Finding(
            code="database.engine",
            level=PROBLEM,
            text=_("tables without transactions: %s") % ", ".join(facts.unsafe_tables),
            consequence=_("Two nodes may run the same occurrence."),
            fix=_("ALTER TABLE … ENGINE=InnoDB for each of them."),
        )


def _sqlite(facts: DatabaseFacts) -> Iterator[Finding]:
    # 2 is FULL, 3 is EXTRA.
    if facts.number("synchronous") < 2:
        yield _forgets(
            "database.durability",
            _("synchronous is %s, less than FULL") % facts.settings.get("synchronous"),
            _('Add "PRAGMA synchronous=FULL;" to init_command in OPTIONS.'),
        )
    mode = facts.settings.get("journal_mode", "")
    if mode.lower() != "wal":
        yield Finding(
            code="database.journal",
            level=WARNING,
            text=_("journal_mode is %s") % mode,
            consequence=_("Readers block writers, so nodes are locked out and late."),
            fix=_('Add "PRAGMA journal_mode=WAL;" to init_command in OPTIONS.'),
        )


_DURABILITY: dict[str, Callable[[DatabaseFacts], Iterator[Finding]]] = {
    "postgresql": _postgres,
    "mysql": _mariadb,
    "sqlite": _sqlite,
}


def _isolation(facts: DatabaseFacts) -> list[Finding]:
    name = facts.settings.get("transaction_isolation") or facts.settings.get("tx_isolation")
    if not name:
        return []
    level = name.upper().replace("-", " ")
    text = _("transactions are %s") % level
    if level == "READ COMMITTED":
        return [Finding(code="database.isolation", level=OK, text=text)]
    return [
        Finding(
            code="database.isolation",
            level=PROBLEM,
            text=text,
            consequence=_("Claims collide and fail.")
            if facts.vendor == "postgresql"
            else _(
                "A claim does not see a run that another node has just started, so two runs "
                "of one schedule may overlap."
            ),
            fix=_("Remove isolation_level from OPTIONS, or set it to READ COMMITTED."),
        )
    ]


def _read_only(facts: DatabaseFacts) -> list[Finding]:
    values = (facts.settings.get("in_recovery", ""), facts.settings.get("read_only", ""))
    if not {value.lower() for value in values} & {"true", "on", "1"}:
        return []
    return [
        Finding(
            code="database.read_only",
            level=PROBLEM,
            text=_("it takes no writes: a standby, or read_only"),
            consequence=_("Nothing is claimed and nothing runs."),
            fix=_("Let DATABASES name the primary."),
        )
    ]


def _replication(facts: DatabaseFacts) -> list[Finding]:
    if not facts.number("standbys") or facts.settings.get("synchronous_standby_names"):
        return []
    return [
        Finding(
            code="database.replication",
            level=WARNING,
            text=_("standbys: %d, none of them synchronous") % facts.number("standbys"),
            consequence=_(
                "A failover may forget the newest claims, and those occurrences run again."
            ),
            fix=_("Name a standby in synchronous_standby_names, if failover is automatic."),
        )
    ]


def _forgets(code: str, text: str, fix: str) -> Finding:
    return Finding(
        code=code,
        level=PROBLEM,
        text=text,
        consequence=_("A power cut may forget a claim, and that occurrence runs twice."),
        fix=fix,
    )


def _too_old(text: str) -> Finding:
    return Finding(
        code="database.version",
        level=PROBLEM,
        text=text,
        consequence=_("Nothing runs."),
        fix=_("Update the database server."),
    )


def _away(text: str) -> Finding:
    return Finding(
        code="database.answers",
        level=PROBLEM,
        text=_("does not answer: %s") % text.strip().partition("\n")[0],
        consequence=_("Nothing is claimed. Nodes, schedules and clocks were not looked at."),
        fix=_("Start it, or correct DATABASES."),
        is_outage=True,
    )
