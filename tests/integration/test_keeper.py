"""The thread that keeps a node alive, against a real database."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection

from distcron_app import nodes
from distcron_app.clock import Clock, utc_now
from distcron_app.conf import Config
from distcron_app.errors import LockUnavailable
from distcron_app.instants import DatabaseNow, database_now
from distcron_app.keeper import Keeper
from distcron_app.leases import Grant, LeaseBook
from distcron_app.locks import Lease, Level, new_owner_token, schedule_lock_name
from distcron_app.locks.memory import MemoryLockBackend
from distcron_app.management.commands import runscheduler
from distcron_app.models import Node
from tests.services import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

CONFIG = Config(
    lock_backend="memory", node_lease_seconds=2, heartbeat_seconds=0.1, lock_ttl_seconds=1
)


class Away(MemoryLockBackend):
    """A backend that can be switched off."""

    is_away = False

    def acquire(self, wanted: Mapping[str, str], ttl_ms: int) -> dict[str, Lease]:
        self._check()
        return super().acquire(wanted, ttl_ms)

    def renew(self, leases: Collection[Lease], ttl_ms: int) -> dict[str, Lease]:
        self._check()
        return super().renew(leases, ttl_ms)

    def _check(self) -> None:
        if self.is_away:
            raise LockUnavailable("memory", "switched off by the test")


class Kept:
    """A keeper with its row, its leases and a loop that is pretended to turn."""

    def __init__(self, config: Config = CONFIG) -> None:
        self.backend = Away()
        self.leases = LeaseBook(int(config.lock_ttl_seconds * 1000))
        self.changes: list[str] = []
        self.keeper = Keeper(
            config=config,
            clock=Clock(),
            leases=self.leases,
            on_change=lambda: self.changes.append("woken"),
        )
        self.node_id = nodes.register(config)
        self.keeper.begin(self.node_id)

    def turning(self, condition: Callable[[], bool]) -> Callable[[], bool]:
        """Return ``condition``, with the loop alive at every look."""

        def look() -> bool:
            self.keeper.ticked()
            return condition()

        return look

    @property
    def row(self) -> Node:
        return Node.objects.get(pk=self.node_id)


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.keeper.end()


def test_the_lease_is_renewed_while_the_loop_turns(kept: Kept) -> None:
    first = kept.row.expires_at
    wait_for(kept.turning(lambda: kept.row.expires_at > first), timeout=10, what="a heartbeat")
    assert kept.keeper.may_claim


def test_a_heartbeat_tells_what_the_node_is_doing(kept: Kept) -> None:
    kept.keeper.running, kept.keeper.alert = 3, "locks unavailable"
    wait_for(kept.turning(lambda: kept.row.running == 3), timeout=10, what="the vitals")
    assert kept.row.alert == "locks unavailable"


def test_a_node_that_was_declared_dead_notices_and_claims_nothing_more(kept: Kept) -> None:
    Node.objects.filter(pk=kept.node_id).update(state="dead")
    wait_for(kept.turning(lambda: kept.keeper.fenced), timeout=10, what="the fence to be seen")
    assert not kept.keeper.may_claim
    assert kept.changes


def test_a_fresh_id_lifts_the_fence(kept: Kept) -> None:
    Node.objects.filter(pk=kept.node_id).update(state="dead")
    wait_for(kept.turning(lambda: kept.keeper.fenced), timeout=10, what="the fence to be seen")
    kept.node_id = nodes.register(CONFIG)
    kept.keeper.begin(kept.node_id)
    first = kept.row.expires_at
    wait_for(kept.turning(lambda: kept.row.expires_at > first), timeout=10, what="a heartbeat")
    assert kept.keeper.may_claim


def test_a_loop_that_hangs_lets_its_node_die(kept: Kept) -> None:
    def has_expired() -> bool:
        return Node.objects.expired().filter(pk=kept.node_id).exists()

    wait_for(has_expired, timeout=15, what="the lease to expire without a turning loop")
    assert not kept.keeper.may_claim


def test_without_acknowledged_heartbeats_nothing_is_claimed(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> bool:
        raise OperationalError("connection refused")

    monkeypatch.setattr(nodes, "heartbeat", refuse)
    wait_for(
        kept.turning(lambda: not kept.keeper.may_claim), timeout=10, what="the node to fence itself"
    )
    assert kept.keeper.database_up_seconds == 0.0
    monkeypatch.undo()
    wait_for(kept.turning(lambda: kept.keeper.may_claim), timeout=10, what="the heartbeat to heal")
    assert kept.keeper.database_up_seconds < 5


def granted(kept: Kept, lease: Lease) -> Grant:
    level = Level(name="standard", parts=("memory",), backend=kept.backend)
    return Grant(level=level, name=lease.name, owner_token=lease.owner_token, lease=lease)


def test_leases_are_renewed_past_their_ttl(kept: Kept) -> None:
    name, token = schedule_lock_name(1), new_owner_token()
    leases = kept.backend.acquire({name: token}, 1000)
    kept.leases.hold(7, schedule_id=1, grant=granted(kept, leases[name]), since=utc_now())
    end = Clock().monotonic() + 2.5
    wait_for(kept.turning(lambda: Clock().monotonic() > end), timeout=10, what="two TTLs to pass")
    assert kept.backend.inspect([name])[name].owner_token == token


def test_a_lease_taken_by_somebody_else_is_told_to_the_loop_once(kept: Kept) -> None:
    name, token = schedule_lock_name(1), new_owner_token()
    leases = kept.backend.acquire({name: token}, 1000)
    kept.leases.hold(7, schedule_id=1, grant=granted(kept, leases[name]), since=utc_now())
    kept.backend.force_release(name)
    kept.backend.acquire({name: new_owner_token()}, 3_600_000)
    lost: dict[int, str] = {}

    def told() -> bool:
        lost.update(kept.keeper.take_lost())
        return bool(lost)

    wait_for(kept.turning(told), timeout=10, what="the loss to be told")
    assert set(lost) == {7}
    assert name in lost[7]


def test_the_offset_to_the_database_clock_is_known(kept: Kept) -> None:
    assert abs((kept.keeper.database_time() - database_now()).total_seconds()) < 2
    assert abs(kept.keeper.clock_offset_ms) < 2000


def test_a_skewed_host_clock_is_measured_and_corrected() -> None:
    class Skewed(Clock):
        def now(self) -> Any:
            return super().now() - timedelta(minutes=5)

    keeper = Keeper(
        config=CONFIG,
        clock=Skewed(),
        leases=LeaseBook(1000),
        on_change=lambda: None,
    )
    keeper.begin(nodes.register(CONFIG))
    try:
        assert 298_000 < keeper.clock_offset_ms < 302_000
        assert abs((keeper.database_time() - database_now()).total_seconds()) < 2
    finally:
        keeper.end()
    assert Node.objects.filter(expires_at__gt=DatabaseNow()).exists()


@pytest.mark.databases("postgresql")
def test_the_sessions_of_a_node_wait_for_nothing_long_and_compile_no_statement() -> None:
    session = connection.copy()
    try:
        runscheduler._prepare_session(connection=session)
        with session.cursor() as cursor:
            for name, value in {
                "jit": "off",
                "statement_timeout": "10s",
                "lock_timeout": "5s",
            }.items():
                cursor.execute(f"SHOW {name}")
                assert cursor.fetchone() == (value,), name
    finally:
        session.close()
