"""Servers and migrated databases for the system tests, made once and copied for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.quorum import farm, five_valkeys, make_farm
from tests.services import PostgresCluster, postgres_cluster
from tests.system.cluster import Cluster, environment, manage
from tests.system.database import Database

__all__ = ["farm", "five_valkeys", "make_farm"]

MakeCluster = Callable[..., Cluster]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresCluster]:
    """A PostgreSQL of the tests' own, whose database ``distcron`` is migrated and watched."""
    with postgres_cluster("max_connections = 200") as server:
        manage(environment(server.url), "migrate", "--verbosity", "0")
        database = Database(server.url)
        database.watch()
        database.close()
        yield server


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated and watched SQLite file."""
    path = tmp_path_factory.mktemp("template") / "db.sqlite3"
    url = f"sqlite://{path}"
    manage(environment(url), "migrate", "--verbosity", "0")
    Database(url).watch()
    return path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Whatever a test started, ended in reverse order."""
    with ExitStack() as entered:
        yield entered


@pytest.fixture
def make_cluster(postgres: PostgresCluster, stack: ExitStack) -> MakeCluster:
    """Makes clusters on PostgreSQL, with the options of ``Cluster``."""

    def make(**options: object) -> Cluster:
        return stack.enter_context(Cluster(postgres, template="distcron", **options))  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_sqlite_cluster(sqlite_template: Path, stack: ExitStack) -> MakeCluster:
    """Makes clusters on SQLite with file locks."""

    def make(**options: object) -> Cluster:
        cluster = Cluster(None, template=str(sqlite_template), redis=False, **options)  # type: ignore[arg-type]
        return stack.enter_context(cluster)

    return make


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Cluster:
    """A cluster on PostgreSQL and Redis without nodes."""
    return make_cluster()
