"""Locks of database sessions: the contract, and what ends a session."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import psycopg
import pytest
from django.db import connections

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks.database import pooling_problem
from project.service_urls import database_settings
from tests.contracts.lock_contract import LONG, SHORT, LockContract, spawn_node, take
from tests.services import (
    maria_server,
    pgbouncer,
    postgres_cluster,
    tcp_proxy,
    wait_for,
)

_namespaces = (f"test{number}" for number in itertools.count())


def through(proxy, server):
    return server.url.replace(f":{server.port}/", f":{proxy.port}/")


class SessionContract(LockContract):
    """What the locks of both databases do beyond the contract, and what they cannot know."""

    @pytest.fixture
    def url(self):
        raise NotImplementedError

    @pytest.fixture
    def namespace(self):
        return next(_namespaces)

    @pytest.fixture
    def backend(self, url, use_database, start, namespace):
        return start(use_database(url), namespace)

    @pytest.fixture
    def other(self, backend, start, namespace):
        return start("locks", namespace, note="node-b")

    @pytest.fixture
    def node_settings(self, url, namespace):
        return {
            "DATABASES": {"default": database_settings(url, Path())},
            "DISTCRON": {"NAMESPACE": namespace, "LOCK_LEVELS": {"alone": ["database"]}},
        }

    @pytest.fixture
    def spawn(self, node_settings):
        nodes = []

        def spawn(**given):
            node = spawn_node(settings=node_settings, level="alone", hold="schedule:1", **given)
            nodes.append(node)
            assert node.stdout.readline() == "held\n"
            return node

        yield spawn
        for node in nodes:
            node.kill()
            node.communicate()

    def seen_by(self, holder, observer):
        # The servers show other sessions a label at most.
        return holder

    def wait_until_expired(self, lease, holder):
        super().wait_until_expired(lease, holder)
        # Any call of the holder frees what has expired.
        holder.ping()

    def test_inspect_shows_holder_note_and_ttl(self, backend):
        lease = take(backend, "schedule:1")["schedule:1"]
        backend.renew([lease], LONG)
        info = backend.inspect(["schedule:1", "schedule:2"])["schedule:1"]
        assert (info.owner_token, info.note) == (lease.owner_token, "node-a")
        assert 50_000 < info.ttl_ms <= info.granted_ms == 60_000
        assert 0 <= info.age_ms < 10_000
        assert info.renewals == 1

    def test_three_processes_lose_no_increment(self, backend, node_settings, tmp_path):
        counter = tmp_path / "counter"
        counter.write_text("0")
        nodes = [
            spawn_node(settings=node_settings, level="alone", counter=str(counter), times=100)
            for _ in range(3)
        ]
        for node in nodes:
            node.communicate(timeout=60)
        assert [node.returncode for node in nodes] == [0, 0, 0]
        assert counter.read_text() == "300"

    def test_kill9_of_the_holder_frees_its_lock(self, spawn, other):
        node = spawn()
        assert take(other, "schedule:1") == {}
        node.send_signal(signal.SIGKILL)
        node.wait()
        assert wait_for(lambda: take(other, "schedule:1"), what="the lock of a dead process")

    def test_holder_paused_past_its_ttl_keeps_its_lock_until_it_is_killed(self, spawn, other):
        node = spawn(ttl_ms=SHORT)
        node.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 5 * SHORT / 1000
        while time.monotonic() < deadline:
            assert take(other, "schedule:1") == {}
        node.send_signal(signal.SIGKILL)
        node.wait()
        assert wait_for(lambda: take(other, "schedule:1"), what="the lock of a dead process")

    def test_forked_child_does_not_keep_the_lock(self, spawn, other):
        node = spawn(fork=True)
        assert take(other, "schedule:1") == {}
        os.kill(node.pid, signal.SIGKILL)
        node.wait()
        assert wait_for(lambda: take(other, "schedule:1"), what="the lock of a dead parent")
        # Ends the child, which waits for the end of its input.
        node.communicate()

    def test_end_of_a_forked_child_leaves_the_lock_to_its_parent(self, backend, other):
        won = take(backend, "schedule:1")
        child = os.fork()
        if child == 0:
            # Closes and deletes what the child has inherited, as its end would.
            backend.close()
            own = take(backend, "schedule:2")
            os._exit(0 if own and take(backend, "schedule:1") == {} else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}
        assert take(other, "schedule:1") == {}

    def test_holder_keeps_an_expired_lock_until_its_next_call(self, backend, other):
        lease = take(backend, "schedule:1", ttl_ms=SHORT)["schedule:1"]
        LockContract.wait_until_expired(self, lease, backend)
        assert take(other, "schedule:1") == {}
        backend.ping()
        assert set(take(other, "schedule:1")) == {"schedule:1"}

    def test_ended_session_loses_all_its_leases(self, backend, other, end_session):
        won = take(backend, "schedule:1", "name:export")
        end_session(backend)
        assert set(take(other, "schedule:1")) == {"schedule:1"}
        assert backend.renew(won.values(), LONG) == {}
        assert backend.renew(won.values(), LONG) == {}

    def test_lost_lease_is_not_taken_again_by_a_new_session(self, backend, other, end_session):
        won = take(backend, "schedule:1", "schedule:2")
        end_session(backend)
        with pytest.raises(LockUnavailable):
            take(backend, "schedule:3")
        assert set(take(backend, "schedule:3")) == {"schedule:3"}
        assert backend.renew(won.values(), LONG) == {}
        assert set(take(other, "schedule:1")) == {"schedule:1"}

    def test_same_token_does_not_win_in_a_session_that_ended(self, backend, end_session):
        wanted = {"schedule:1": "5eed"}
        backend.acquire(wanted, LONG)
        end_session(backend)
        with pytest.raises(LockUnavailable):
            backend.acquire(wanted, LONG)

    def test_release_in_a_session_that_ended_is_unavailable(self, backend, end_session):
        won = take(backend, "schedule:1")
        end_session(backend)
        with pytest.raises(LockUnavailable):
            backend.release(won.values())
        assert backend.release(won.values()) == set()

    def test_namespaces_do_not_exclude_each_other(self, backend, start):
        take(backend, "schedule:1", "name:export")
        stranger = start("locks", "elsewhere")
        assert set(take(stranger, "schedule:1", "name:export")) == {"schedule:1", "name:export"}
        assert [info.name for info in stranger.held()] == ["name:export", "schedule:1"]

    def test_names_that_differ_in_case_are_two_locks(self, backend, other):
        take(backend, "name:Export")
        assert set(take(other, "name:export")) == {"name:export"}

    def test_long_names_that_end_differently_are_two_locks(self, backend, other):
        take(backend, "name:" + "x" * 100 + "1")
        assert take(other, "name:" + "x" * 100 + "1") == {}
        assert len(take(other, "name:" + "x" * 100 + "2")) == 1

    @pytest.mark.parametrize(
        "name", ["schedule:2147483648", "schedule:007", "schedule:" + "9" * 5000]
    )
    def test_number_that_is_no_id_of_a_schedule_is_a_name(self, backend, other, name):
        take(backend, name)
        assert take(other, name) == {}
        assert set(take(other, "schedule:7")) == {"schedule:7"}

    def test_largest_id_of_a_schedule_is_one_lock(self, backend, other):
        take(backend, "schedule:2147483647")
        assert take(other, "schedule:2147483647") == {}
        assert len(backend.release(take(backend, "schedule:0").values())) == 1

    def test_close_releases(self, backend, other):
        take(backend, "schedule:1")
        backend.close()
        assert set(take(other, "schedule:1")) == {"schedule:1"}

    def test_force_release_ends_every_lock_of_that_node(self, backend, other):
        won = take(backend, "schedule:1", "schedule:2")
        assert other.force_release("schedule:1") is True
        assert set(take(other, "schedule:2")) == {"schedule:2"}
        assert backend.renew(won.values(), LONG) == {}

    def test_force_release_of_an_own_lock_leaves_the_others(self, backend):
        won = take(backend, "schedule:1", "schedule:2")
        assert backend.force_release("schedule:1") is True
        assert set(backend.renew(won.values(), LONG)) == {"schedule:2"}

    def test_direct_connection_is_accepted(self, backend):
        assert pooling_problem("locks") == ""

    def test_loop_and_keeper_share_one_session(self, backend, count_sessions):
        stop, failures = threading.Event(), []

        def keep():
            lease = take(backend, "schedule:0")["schedule:0"]
            while not stop.is_set():
                if set(backend.renew([lease], LONG)) != {"schedule:0"}:
                    failures.append("lost")

        keeper = threading.Thread(target=keep)
        keeper.start()
        for number in range(1, 200):
            won = take(backend, f"schedule:{number}")
            if len(backend.release(won.values())) != 1:
                failures.append(number)
        stop.set()
        keeper.join()
        assert failures == []
        assert count_sessions() == 1


class TestPostgresLocks(SessionContract):
    @pytest.fixture
    def url(self, shared_postgres):
        return shared_postgres.url

    @pytest.fixture
    def ask(self, shared_postgres):
        def ask(sql, *values):
            with shared_postgres.connect() as link:
                return link.execute(sql, values).fetchall()

        return ask

    @pytest.fixture
    def end_session(self, ask):
        def end_session(backend):
            ((ended,),) = ask("SELECT pg_terminate_backend(%s, 5000)", backend._session.id)
            assert ended

        return end_session

    @pytest.fixture
    def count_sessions(self, ask):
        def count_sessions():
            ((count,),) = ask(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s",
                "distcron-lock node%",
            )
            return count

        return count_sessions

    def test_other_nodes_see_the_label_of_the_holder(self, backend, other):
        take(backend, "schedule:1", "name:export")
        found = other.inspect(["schedule:1", "name:export", "schedule:2"])
        assert {name: info.note for name, info in found.items()} == {
            "schedule:1": "node-a",
            "name:export": "node-a",
        }
        info = found["schedule:1"]
        assert (info.owner_token, info.ttl_ms, info.age_ms) == (None, None, None)

    def test_name_that_this_process_never_asked_for_is_a_number(self, backend, start, namespace):
        take(backend, "name:export", "schedule:1")
        stranger = start("locks", namespace, note="node-b")
        names = [info.name for info in stranger.held()]
        assert names[1:] == ["schedule:1"]
        assert len(names[0]) == 17
        assert stranger.force_release(names[0]) is True
        assert set(take(stranger, "name:export")) == {"name:export"}

    def test_locks_of_other_applications_are_not_listed(self, backend, shared_postgres):
        take(backend, "schedule:1")
        with shared_postgres.connect() as link:
            link.execute("SELECT pg_advisory_lock(7), pg_advisory_lock(7, 7)")
            assert [info.name for info in backend.held()] == ["schedule:1"]

    def test_foreign_holder_of_a_key_is_named(self, backend, shared_postgres):
        number = backend._locks.key("name:export")[1]
        with shared_postgres.connect() as link:
            link.execute("SET application_name = 'psql'")
            link.execute("SELECT pg_advisory_lock(%s::bigint)", [number])
            assert take(backend, "name:export") == {}
            note = backend.inspect(["name:export"])["name:export"].note
            assert note == f"psql, user postgres, pid {link.info.backend_pid}, 127.0.0.1"

    def test_lock_that_an_operator_took_from_the_session_is_lost(self, backend, ask):
        won = take(backend, "schedule:1", "schedule:2")
        # As if the server had freed it: only the session itself can.
        backend._session.ask("SELECT pg_advisory_unlock(%s::int, 1)", [backend._locks._class])
        assert set(backend.renew(won.values(), LONG)) == {"schedule:2"}

    def test_label_that_is_no_ascii_is_shown_readably(self, backend, other, start, namespace):
        strange = start("locks", namespace, note="a\udcff|b\x00ü")
        take(strange, "schedule:1")
        assert other.inspect(["schedule:1"])["schedule:1"].note == "a?|b??"

    def test_session_outlives_the_time_limits_of_the_server(
        self, own_postgres, use_database, start
    ):
        with own_postgres.connect() as link:
            link.execute("ALTER ROLE postgres SET idle_session_timeout = '50ms'")
        backend = start(use_database(own_postgres.url))
        lease = take(backend, "schedule:1")["schedule:1"]
        with own_postgres.connect() as link, pytest.raises(Exception, match="idle-session"):
            time.sleep(0.2)
            link.execute("SELECT 1")
        assert set(backend.renew([lease], LONG)) == {"schedule:1"}

    def test_vanished_client_is_noticed_within_half_a_minute(self, backend):
        backend.ping()
        ((idle, interval, count, unanswered),) = backend._session.ask(
            "SELECT current_setting('tcp_keepalives_idle')::int,"
            " current_setting('tcp_keepalives_interval')::int,"
            " current_setting('tcp_keepalives_count')::int,"
            " current_setting('tcp_user_timeout')::int"
        )
        assert idle + interval * count == 20
        assert unanswered == 20_000

    def test_pool_of_the_orm_is_left_alone(
        self, shared_postgres, use_database, start, django_db_blocker
    ):
        alias = use_database(shared_postgres.url, pool={"min_size": 1, "max_size": 1})
        connections.settings[alias]["CONN_MAX_AGE"] = 0
        backend, other = start(alias), start(alias)
        lease = take(backend, "schedule:1")["schedule:1"]
        for _ in range(3):
            with django_db_blocker.unblock(), connections[alias].cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid(), pg_try_advisory_lock(1)")
                assert cursor.fetchone()[0] != backend._session.id
            connections[alias].close()
        assert take(other, "schedule:1") == {}
        assert set(backend.renew([lease], LONG)) == {"schedule:1"}
        connections[alias].close_pool()


class TestMariaLocks(SessionContract):
    @pytest.fixture
    def url(self, shared_maria):
        return shared_maria.url

    @pytest.fixture
    def end_session(self, shared_maria):
        def end_session(backend):
            number = backend._session.id
            with shared_maria.cursor() as cursor:
                cursor.execute("KILL CONNECTION %s", [number])
                gone = "SELECT 1 FROM information_schema.processlist WHERE id = %s"
                wait_for(lambda: cursor.execute(gone, [number]) == 0, what="the session's end")

        return end_session

    @pytest.fixture
    def count_sessions(self, backend, shared_maria):
        def count_sessions():
            with shared_maria.cursor() as cursor:
                return cursor.execute(
                    "SELECT id FROM information_schema.processlist WHERE db = 'distcron'"
                )

        return count_sessions

    # The server cannot list names, so each object lists its own.

    def test_held_lists_the_locks_of_all_nodes_by_name(self, backend, other):
        take(other, "schedule:3")
        take(backend, "schedule:2", "schedule:1")
        assert [info.name for info in backend.held()] == ["schedule:1", "schedule:2"]

    @pytest.mark.parametrize("name", ["🦜 nightly/../etc", "a b|c", "%2F", "{x}", "ключ"])
    def test_any_name_is_one_lock(self, backend, other, name):
        take(backend, name)
        assert take(other, name) == {}
        assert [info.name for info in backend.held()] == [name]

    def test_other_nodes_see_user_and_connection_of_the_holder(self, backend, other):
        take(backend, "schedule:1")
        info = other.inspect(["schedule:1", "schedule:2"])["schedule:1"]
        assert info.note.startswith(f"user root, connection {backend._session.id}, ")
        assert (info.owner_token, info.ttl_ms) == (None, None)

    def test_databases_of_one_server_do_not_exclude_each_other(
        self, backend, shared_maria, use_database, start, namespace
    ):
        take(backend, "schedule:1")
        with shared_maria.cursor() as cursor:
            cursor.execute("CREATE DATABASE IF NOT EXISTS second")
        stranger = start(use_database(shared_maria.url.replace("/distcron", "/second")), namespace)
        assert set(take(stranger, "schedule:1")) == {"schedule:1"}

    def test_names_differ_also_where_the_server_ignores_case(self, backend):
        key, other = backend._locks.key("name:Export"), backend._locks.key("name:export")
        assert key.lower() != other.lower()
        assert len(key) <= 64

    def test_idle_session_is_kept_for_as_long_as_the_server_can(self, backend):
        backend.ping()
        assert backend._session.ask("SELECT @@SESSION.wait_timeout") == [(31_536_000,)]


def test_restart_of_postgresql_is_survived_and_loses_the_leases(own_postgres, use_database, start):
    backend = start(use_database(own_postgres.url))
    won = take(backend, "schedule:1")
    own_postgres.restart()
    with pytest.raises(LockUnavailable):
        take(backend, "schedule:2")
    assert backend.renew(won.values(), LONG) == {}
    assert set(take(backend, "schedule:1")) == {"schedule:1"}


def test_restart_of_mariadb_is_survived_and_loses_the_leases(use_database, start):
    with maria_server() as server:
        backend = start(use_database(server.url))
        won = take(backend, "schedule:1")
        server.stop()
        server.start()
        with pytest.raises(LockUnavailable):
            take(backend, "schedule:2")
        assert backend.renew(won.values(), LONG) == {}
        assert set(take(backend, "schedule:1")) == {"schedule:1"}


def test_database_that_is_away_is_unavailable_and_asked_once_a_second(
    own_postgres, use_database, start
):
    class HandClock(Clock):
        seconds = 100.0

        def monotonic(self) -> float:
            return self.seconds

    clock = HandClock()
    backend = start(use_database(own_postgres.url), clock=clock)
    own_postgres.stop()
    with pytest.raises(LockUnavailable, match="Lock backend 'database': unavailable, Operational"):
        take(backend, "schedule:1")
    own_postgres.start()
    clock.seconds = 100.9
    assert backend.state == "open"
    with pytest.raises(LockUnavailable, match="refused"):
        take(backend, "schedule:1")
    clock.seconds = 101.0
    assert backend.state == "closed"
    assert set(take(backend, "schedule:1")) == {"schedule:1"}


@pytest.mark.parametrize("call", ["acquire", "renew", "ping"])
def test_postgresql_that_does_not_answer_is_left_within_six_seconds(
    own_postgres, use_database, start, call
):
    with tcp_proxy(own_postgres.port) as proxy:
        backend = start(
            use_database(own_postgres.url.replace(str(own_postgres.port), str(proxy.port)))
        )
        won = take(backend, "schedule:1")
        proxy.drop_next_reply(hang=True)
        started = time.monotonic()
        if call == "renew":
            assert backend.renew(won.values(), LONG) == {}
        else:
            with pytest.raises(LockUnavailable):
                backend.ping() if call == "ping" else take(backend, "schedule:2")
        assert 4.5 < time.monotonic() - started < 6
        assert backend.renew(won.values(), LONG) == {}


def test_mariadb_that_does_not_answer_is_left_within_six_seconds(shared_maria, use_database, start):
    with tcp_proxy(shared_maria.port) as proxy:
        backend = start(use_database(through(proxy, shared_maria)))
        won = take(backend, "schedule:1")
        proxy.drop_next_reply(hang=True)
        started = time.monotonic()
        assert backend.renew(won.values(), LONG) == {}
        assert 4.5 < time.monotonic() - started < 6


def test_one_batch_of_a_thousand_is_one_round_trip(shared_postgres, use_database, start):
    with tcp_proxy(shared_postgres.port) as proxy:
        backend = start(use_database(through(proxy, shared_postgres)))
        backend.ping()
        names = [f"schedule:{number}" for number in range(1000)]
        proxy.delay_seconds = 0.2
        started = time.monotonic()
        won = take(backend, *names)
        assert len(won) == 1000
        assert len(backend.renew(won.values(), LONG)) == 1000
        assert len(backend.release(won.values())) == 1000
        assert 0.6 <= time.monotonic() - started < 1.1


def test_batch_that_the_lock_table_cannot_hold_takes_nothing(use_database, start):
    with postgres_cluster("max_locks_per_transaction = 10", "max_connections = 20") as server:
        alias = use_database(server.url)
        backend, other = start(alias), start(alias)
        kept = take(backend, "schedule:0")
        with pytest.raises(LockUnavailable, match="out of shared memory"):
            take(backend, *(f"schedule:{number}" for number in range(1, 20_000)))
        assert set(backend.renew(kept.values(), LONG)) == {"schedule:0"}
        assert len(take(other, *(f"schedule:{number}" for number in range(200)))) == 199


def test_refused_question_keeps_the_leases(own_postgres, use_database, start):
    alias = use_database(own_postgres.url)
    backend, other = start(alias), start(alias)
    won = take(backend, "schedule:1")
    with own_postgres.connect() as link:
        link.execute("REVOKE SELECT ON pg_locks FROM PUBLIC")
        link.execute("CREATE ROLE plain LOGIN")
    # A superuser may read everything; the session goes on as somebody who may not.
    backend._session.ask("SET ROLE plain")
    with pytest.raises(LockUnavailable, match="permission denied"):
        backend.renew(won.values(), LONG)
    assert take(other, "schedule:1") == {}
    backend._session.ask("RESET ROLE")
    assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}


def test_operator_without_the_right_to_end_a_session_is_told(own_postgres, use_database, start):
    with own_postgres.connect() as link:
        link.execute("CREATE ROLE plain LOGIN")
    backend = start(use_database(own_postgres.url))
    won = take(backend, "schedule:1")
    plain = start(use_database(own_postgres.url.replace("postgres@", "plain@")))
    with pytest.raises(LockUnavailable, match="must be"):
        plain.force_release("schedule:1")
    assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}


def test_standby_is_refused(own_postgres, use_database, start):
    own_postgres.stop()
    signal_file = own_postgres.folder / "data" / "standby.signal"
    signal_file.touch(mode=0o644)
    own_postgres.start()
    with pytest.raises(LockUnavailable, match="connected to a standby"):
        take(start(use_database(own_postgres.url)), "schedule:1")


def test_names_with_one_key_exclude_each_other_in_one_session(shared_postgres, use_database, start):
    alias = use_database(shared_postgres.url)
    backend, other = start(alias, "keys"), start(alias, "keys")
    paired, number = backend._locks.key("name:export")
    same = f"#{number % 2**64:016x}"
    assert backend._locks.key(same) == (paired, number) == (False, number)
    assert set(take(backend, "name:export", same)) == {"name:export"}
    assert take(backend, same) == {}
    backend.force_release("name:export")
    assert set(take(other, same)) == {same}


class TestPgBouncer:
    @pytest.fixture
    def behind(self, shared_postgres, use_database):
        """Start a PgBouncer and point the alias at it; return the alias."""
        with contextlib.ExitStack() as running:

            def behind(pool_mode, *lines):
                server = pgbouncer(shared_postgres.port, *lines, pool_mode=pool_mode)
                return use_database(running.enter_context(server).url)

            yield behind

    def connect(self, alias):
        where = connections.settings[alias]
        return psycopg.connect(
            host=where["HOST"], port=where["PORT"], user=where["USER"], dbname=where["NAME"]
        )

    def test_pool_whose_sessions_take_turns_is_refused(self, behind):
        alias = behind("transaction", "server_round_robin = 1")
        with contextlib.ExitStack() as links:
            for _ in range(3):
                links.enter_context(self.connect(alias)).execute("SELECT 1")
        assert "PgBouncer in transaction mode" in pooling_problem(alias)

    def test_transaction_pooling_is_refused(self, behind):
        problem = pooling_problem(behind("transaction"))
        assert problem.startswith("database 'locks' is reached through a proxy")
        assert "PgBouncer in transaction mode" in problem
        assert "Two nodes would both hold one lock." in problem
        assert "DISTCRON['LOCK_DATABASE']" in problem

    def test_no_lock_is_taken_behind_transaction_pooling(self, behind, start):
        with pytest.raises(LockUnavailable, match="PgBouncer in transaction mode"):
            take(start(behind("transaction")), "schedule:1")

    def test_settings_of_pooled_sessions_are_left_alone(self, behind, start):
        alias = behind("transaction")
        with pytest.raises(LockUnavailable):
            take(start(alias), "schedule:1")
        with self.connect(alias) as link:
            assert link.execute("SHOW statement_timeout").fetchone() == ("0",)

    def test_session_pooling_is_accepted(self, behind, start):
        alias = behind("session")
        assert pooling_problem(alias) == ""
        backend, other = start(alias, "pooled"), start(alias, "pooled")
        won = take(backend, "schedule:1")
        assert take(other, "schedule:1") == {}
        assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}
        backend.close()
        assert set(take(other, "schedule:1")) == {"schedule:1"}
