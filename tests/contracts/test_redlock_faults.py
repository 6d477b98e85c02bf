"""Instances of a quorum that die, hang, lag, forget, refuse, or lose track of time."""

from __future__ import annotations

import signal
import time

import pytest

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks import get_level, new_owner_token
from distcron_app.locks.redlock import Member
from tests.contracts.lock_contract import LONG, spawn_node, take
from tests.quorum import LOCK_DATABASE, MARKER, quorum_caches
from tests.quorum_fuzz import Fuzz
from tests.services import ClockedValkey, wait_for

KEY = "{test:lock}:schedule:1"


@pytest.fixture
def backend(farm):
    backend = farm.backend()
    backend.ping()
    return backend


@pytest.fixture
def rival(farm):
    rival = farm.backend(retries=0)
    rival.ping()
    return rival


@pytest.fixture
def proxies(farm):
    """Proxies in front of the nodes made after it."""
    return farm.use_proxies()


def set_by_hand(server, value, name="schedule:1"):
    with server.client(LOCK_DATABASE) as client:
        client.set(f"{{test:lock}}:{name}", value)


def take_everywhere(farm, backend, name="schedule:1", **options):
    """Take a lock and wait for the votes that the winner did not wait for."""
    backend.members()
    won = take(backend, name, **options)
    wait_for(lambda: None not in farm.values(name), what="the last votes")
    return won


def script_count(server) -> int:
    with server.client() as client:
        return client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]


class TestMinority:
    @pytest.mark.parametrize("count", [3, 5])
    def test_killed_minority_changes_nothing(self, make_farm, count):
        farm = make_farm(count)
        backend = farm.backend()
        early = take_everywhere(farm, backend)
        for server in farm.servers[: count // 2]:
            server.kill9()
        started = time.monotonic()
        late = take(backend, "schedule:2")
        assert set(backend.renew([*early.values(), *late.values()], LONG)) == {
            "schedule:1",
            "schedule:2",
        }
        assert take(backend, "schedule:1") == {}
        assert [info.name for info in backend.held()] == ["schedule:1", "schedule:2"]
        assert backend.release([*early.values(), *late.values()]) == {"schedule:1", "schedule:2"}
        assert time.monotonic() - started < 1

    def test_stopped_instance_is_not_waited_for(self, farm, backend, rival):
        farm.servers[0].pause()
        started = time.monotonic()
        for _ in range(10):
            won = take(backend, "schedule:1")
            assert take(rival, "schedule:1") == {}
            assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}
            assert backend.release(won.values()) == {"schedule:1"}
        # Forty calls; the socket timeout is 0.5 s.
        assert time.monotonic() - started < 1.5

    def test_instance_stopped_before_the_first_call_is_not_waited_for(self, farm):
        farm.servers[0].pause()
        backend = farm.backend()
        started = time.monotonic()
        assert set(take(backend, "schedule:1")) == {"schedule:1"}
        assert time.monotonic() - started < 0.3

    def test_stopped_instance_keeps_nothing_of_a_lost_vote(self, farm, backend):
        set_by_hand(farm.servers[1], "a")
        set_by_hand(farm.servers[2], "a")
        with farm.servers[0].client() as client:
            client.config_resetstat()
        farm.servers[0].pause()
        assert take(backend, "schedule:1") == {}
        farm.servers[0].resume()
        wait_for(lambda: script_count(farm.servers[0]) == 2, what="the late vote and its end")
        assert farm.values("schedule:1") == [None, "a", "a"]

    def test_partition_of_a_minority_heals(self, farm, proxies):
        backend = farm.backend()
        backend.ping()
        proxies[0].partition()
        started = time.monotonic()
        won = take(backend, "schedule:1")
        assert backend.release(take(backend, "schedule:2").values()) == {"schedule:2"}
        assert time.monotonic() - started < 0.3
        proxies[0].heal()
        assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}
        backend.release(won.values())
        wait_for(lambda: self._settles(farm, backend), what="the keys of r1 to go")

    def _settles(self, farm, backend) -> bool:
        backend.ping()
        return farm.values("schedule:1") == farm.values("schedule:2") == [None, None, None]

    def test_refusing_minority_changes_nothing(self, farm, backend):
        farm.servers[0].refuse_writes()
        won = take(backend, "schedule:1")
        assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}
        assert backend.release(won.values()) == {"schedule:1"}

    def test_evicted_key_of_one_instance_frees_nothing(self, farm, backend, rival):
        won = take_everywhere(farm, backend)
        farm.servers[0].configure(maxmemory_policy="allkeys-lru", maxmemory=1)
        with farm.servers[0].client(LOCK_DATABASE) as client:
            wait_for(lambda: client.dbsize() == 0, what="the eviction")
        farm.servers[0].configure(maxmemory=0)
        assert take(rival, "schedule:1") == {}
        assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}

    def test_closed_connections_are_replaced_within_the_call(self, farm, proxies):
        backend = farm.backend()
        won = take(backend, "schedule:1")
        for proxy in proxies:
            proxy.cut()
        assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}

    def test_lost_reply_is_asked_for_once_more(self, farm, proxies):
        backend = farm.backend()
        backend.ping()
        for proxy in proxies:
            proxy.drop_next_reply(b"EVAL")
        assert set(take(backend, "schedule:1")) == {"schedule:1"}
        assert [proxy.dropped for proxy in proxies] == [1, 1, 1]

    def test_script_flush_changes_nothing(self, farm, backend):
        won = take(backend, *(f"schedule:{number}" for number in range(1001)))
        for server in farm.servers:
            with server.client() as client:
                client.script_flush()
        assert len(backend.renew(won.values(), LONG)) == 1001


class TestMajority:
    def test_killed_majority_is_unavailable_and_keeps_nothing(self, farm, backend):
        for server in farm.servers[1:]:
            server.kill9()
        started = time.monotonic()
        with pytest.raises(LockUnavailable) as caught:
            take(backend, "schedule:1")
        assert time.monotonic() - started < 0.5
        assert "1 of 3 instances answered, 2 are needed; r2: Connection" in caught.value.cause
        assert "; r3: Connection" in caught.value.cause
        with farm.servers[0].client(LOCK_DATABASE) as client:
            assert client.keys("*schedule*") == []

    @pytest.mark.parametrize(
        "call",
        [
            lambda backend, leases: backend.renew(leases, LONG),
            lambda backend, leases: backend.release(leases),
            lambda backend, leases: backend.inspect(["schedule:1"]),
            lambda backend, leases: backend.held(),
            lambda backend, leases: backend.force_release("schedule:1"),
            lambda backend, leases: backend.ping(),
        ],
    )
    def test_every_call_reports_a_killed_majority(self, farm, backend, call):
        won = take(backend, "schedule:1")
        for server in farm.servers[1:]:
            server.kill9()
        with pytest.raises(LockUnavailable, match="1 of 3 instances answered"):
            call(backend, won.values())

    def test_partition_of_the_majority_heals(self, farm, proxies):
        backend = farm.backend()
        backend.ping()
        for proxy in proxies[1:]:
            proxy.partition()
        started = time.monotonic()
        with pytest.raises(LockUnavailable, match="r2: TimeoutError"):
            take(backend, "schedule:1")
        assert time.monotonic() - started < 1.2
        wait_for(lambda: not any(farm.values("schedule:1")), what="the release")
        for proxy in proxies[1:]:
            proxy.heal()
        assert set(take(backend, "schedule:1")) == {"schedule:1"}

    def test_same_token_may_be_asked_for_again(self, farm, proxies):
        backend = farm.backend()
        backend.ping()
        for proxy in proxies:
            proxy.partition()
        wanted = {"schedule:1": new_owner_token()}
        with pytest.raises(LockUnavailable):
            backend.acquire(wanted, LONG)
        for proxy in proxies:
            proxy.heal()
        assert set(backend.acquire(wanted, LONG)) == {"schedule:1"}

    def test_refusal_is_no_loss(self, farm, backend, rival):
        """OP-41."""
        take(rival, "schedule:1")
        assert take(backend, "schedule:1") == {}
        for server in farm.servers[1:]:
            server.refuse_writes()
        with pytest.raises(LockUnavailable, match="r2: ResponseError: MISCONF"):
            take(backend, "schedule:2")
        wait_for(lambda: not any(farm.values("schedule:2")), what="the release")

    def test_refusing_majority_still_releases(self, farm, backend):
        won = take(backend, "schedule:1")
        for server in farm.servers[1:]:
            server.configure(maxmemory=1)
        assert backend.release(won.values()) == {"schedule:1"}
        wait_for(lambda: not any(farm.values("schedule:1")), what="the release")


class TestVotes:
    def test_lost_vote_leaves_no_key_and_the_next_try_wins(self, farm, backend):
        """OP-39."""
        for server in farm.servers[1:]:
            set_by_hand(server, "a")
        assert take(backend, "schedule:1") == {}
        wait_for(lambda: farm.values("schedule:1") == [None, "a", "a"], what="the release")
        for server in farm.servers[1:]:
            with server.client(LOCK_DATABASE) as client:
                client.delete(KEY)
        assert set(take(backend, "schedule:1")) == {"schedule:1"}

    def test_loss_to_a_quorum_is_not_tried_again(self, farm, rival):
        clock = NotingClock()
        take(rival, "schedule:1")
        assert take(farm.backend(clock=clock), "schedule:1") == {}
        assert clock.waits == []

    def test_split_vote_is_tried_again_after_a_pause(self, farm):
        clock = NotingClock()
        for server, token in zip(farm.servers, "ab", strict=False):
            set_by_hand(server, token)
        backend = farm.backend(clock=clock, retries=3, retry_delay_ms=200)
        assert take(backend, "schedule:1") == {}
        assert len(clock.waits) == 3
        assert all(0.1 <= seconds <= 0.3 for seconds in clock.waits)
        wait_for(lambda: farm.values("schedule:1") == ["a", "b", None], what="the release")

    def test_split_vote_that_ends_is_won(self, farm):
        class FreeingClock(NotingClock):
            def wait(self, event, seconds):
                with farm.servers[0].client(LOCK_DATABASE) as client:
                    client.delete(KEY)
                return super().wait(event, seconds)

        clock = FreeingClock()
        for server, token in zip(farm.servers, "ab", strict=False):
            set_by_hand(server, token)
        backend = farm.backend(clock=clock)
        assert list(take(backend, "schedule:1", "schedule:2")) == ["schedule:1", "schedule:2"]
        assert len(clock.waits) == 1

    def test_votes_that_come_after_the_ttl_win_nothing(self, farm, proxies):
        backend = farm.backend(retries=0)
        backend.ping()
        for proxy in proxies:
            proxy.delay_seconds = 0.3
        assert take(backend, "schedule:1", ttl_ms=250) == {}
        wait_for(lambda: not any(farm.values("schedule:1")), what="the release")

    @pytest.mark.parametrize(("ttl_ms", "won"), [(204, set()), (205, {"schedule:1"})])
    def test_validity_is_the_ttl_less_200_ms_and_the_drift(self, farm, ttl_ms, won):
        class LateClock(Clock):
            """Stands still, 200 ms after the first reading."""

            seconds = 0.0

            def monotonic(self):
                self.seconds, before = 1000.2, self.seconds
                return before or 1000.0

        # The drift is 4.04 and 4.05 ms.
        backend = farm.backend(clock=LateClock())
        assert set(take(backend, "schedule:1", ttl_ms=ttl_ms)) == won

    def test_time_that_the_votes_took_is_off_the_lease(self, farm, proxies):
        backend = farm.backend()
        backend.ping()
        for proxy in proxies:
            proxy.delay_seconds = 0.3
        lease = take(backend, "schedule:1", ttl_ms=10_000)["schedule:1"]
        assert lease.expires_at - Clock().monotonic() < 9.6

    def test_jitter_of_50_ms_costs_time_alone(self, farm, proxies):
        backend, rival = farm.backend(), farm.backend(retries=0)
        for proxy in proxies:
            proxy.jitter_seconds = 0.05
        started = time.monotonic()
        for number in range(10):
            name = f"schedule:{number}"
            won = take(backend, name)
            assert set(won) == {name}
            assert take(rival, name) == {}
            assert set(backend.renew(won.values(), LONG)) == {name}
            assert backend.release(won.values()) == {name}
        assert time.monotonic() - started < 8

    def test_stopped_holder_loses_its_lock(self, farm, rival):
        settings = {
            "CACHES": quorum_caches(farm.ports),
            "DISTCRON": {
                "NAMESPACE": "test",
                "QUORUM_ALIASES": farm.aliases,
                "LOCK_TTL_SECONDS": 60,
            },
        }
        node = spawn_node(settings=settings, level="quorum", hold="schedule:1", ttl_ms=500)
        assert node.stdout.readline() == "held\n"
        node.send_signal(signal.SIGSTOP)
        won = wait_for(lambda: take(rival, "schedule:1"), what="the lock of the stopped holder")
        node.send_signal(signal.SIGCONT)
        output, _ = node.communicate("renew\n")
        assert output == "lost\n"
        token = won["schedule:1"].owner_token
        assert rival.inspect(["schedule:1"])["schedule:1"].owner_token == token


class NotingClock(Clock):
    """Real time, but a pause is noted and not made."""

    def __init__(self):
        self.waits = []

    def wait(self, event, seconds):
        self.waits.append(seconds)
        return False


class TestMemory:
    """A held lock that one instance forgets: the attack is to win it with that one's vote."""

    @pytest.fixture
    def held_by_two(self, farm):
        """A lock on r1 and r2; r3 was unreachable for its holder."""
        direct = farm.ports
        proxies = farm.use_proxies()
        holder = farm.backend()
        proxies[2].refuse()
        won = take(holder, "schedule:1")
        assert farm.values("schedule:1")[2] is None
        farm.use(direct)
        return holder, won

    def test_flushed_instance_gives_no_second_holder(self, farm, held_by_two, rival):
        _holder, won = held_by_two
        with farm.servers[1].client() as client:
            client.flushall()
        assert take(rival, "schedule:1") == {}
        token = won["schedule:1"].owner_token
        wait_for(lambda: farm.values("schedule:1") == [token, None, None], what="the release")
        assert rival.members()[1] == Member(
            alias="r2",
            state="kept out",
            cause="new or emptied 0 s ago, votes again in 60 s",
        )

    def test_instance_restarted_empty_gives_no_second_holder(self, farm, held_by_two, rival):
        farm.servers[1].kill9()
        farm.servers[1].start()
        assert take(rival, "schedule:1") == {}
        assert rival.members()[1].state == "kept out"
        assert rival.members()[1].cause.startswith("restarted ")

    def test_instance_restarted_with_all_but_its_last_second_gives_no_second_holder(
        self, make_farm, settings
    ):
        farm = make_farm(3)
        with ClockedValkey(appendonly=True) as forgetful:
            farm.servers = [farm.servers[0], forgetful, farm.servers[2]]
            with forgetful.client(LOCK_DATABASE) as client:
                client.set(MARKER, 1)
            farm.use(farm.ports)
            rival = farm.backend(retries=0)
            rival.ping()
            log = max((forgetful.folder / "appendonlydir").glob("*.incr.aof"))
            size = log.stat().st_size
            farm.use_proxies()[2].refuse()
            won = take(farm.backend(), "schedule:1")
            assert farm.values("schedule:1")[2] is None
            farm.use(farm.ports)
            forgetful.kill9()
            with open(log, "r+b") as file:
                file.truncate(size)
            forgetful.start()
            with forgetful.client(LOCK_DATABASE) as client:
                assert client.keys("*schedule*") == []
                assert client.exists(MARKER)
            assert take(rival, "schedule:1") == {}
            expected = [won["schedule:1"].owner_token, None, None]
            wait_for(lambda: farm.values("schedule:1") == expected, what="the release")

    def test_kept_out_instance_votes_again_after_a_ttl(self, farm):
        with farm.servers[0].client() as client:
            client.flushall()
        farm.servers[1].kill9()
        backend = farm.backend(rejoin_ms=800, retries=0)
        with pytest.raises(LockUnavailable, match="r1: new or emptied"):
            take(backend, "schedule:1", ttl_ms=800)
        wait_for(lambda: _wins(backend, 800), what="r1 to vote again")

    def test_restarted_instance_gets_the_lock_again(self, farm):
        backend = farm.backend(rejoin_ms=800)
        won = take_everywhere(farm, backend, ttl_ms=800)
        farm.servers[0].kill9()
        farm.servers[0].start()

        def is_whole() -> bool:
            nonlocal won
            won = backend.renew(won.values(), 800)
            assert set(won) == {"schedule:1"}
            return None not in farm.values("schedule:1")

        wait_for(is_whole, what="the lock to be on r1 again")
        token = won["schedule:1"].owner_token
        assert farm.values("schedule:1") == [token, token, token]

    def test_flush_of_the_majority_loses_the_lease(self, farm, backend):
        won = take_everywhere(farm, backend)
        for server in farm.servers[1:]:
            with server.client() as client:
                client.flushall()
        assert backend.renew(won.values(), LONG) == {}
        wait_for(lambda: not any(farm.values("schedule:1")), what="the release")


def _wins(backend, ttl_ms) -> bool:
    try:
        return bool(take(backend, "schedule:1", ttl_ms=ttl_ms))
    except LockUnavailable:
        return False


class TestClocks:
    @pytest.mark.parametrize("seconds", [600, -600])
    def test_one_stepped_clock_gives_no_second_holder(self, farm, backend, rival, seconds):
        won = take_everywhere(farm, backend)
        farm.servers[0].set_clock(seconds)
        assert take(rival, "schedule:1") == {}
        assert set(backend.renew(won.values(), LONG)) == {"schedule:1"}
        assert take(rival, "schedule:1") == {}
        backend.release(won.values())
        assert set(take(rival, "schedule:1")) == {"schedule:1"}

    def test_clock_set_forward_is_no_age(self, farm, backend, rival):
        """A restart is not hidden by the clock that comes up with it, minutes ahead."""
        with farm.servers[0].client() as client:
            client.flushall()
        farm.servers[0].set_clock(-30)
        assert rival.members()[0].state == "kept out"

    def test_majority_that_leaps_together_is_beyond_the_promise(self, farm, backend, rival):
        """What the docstring calls a known limit; the database decides then."""
        won = take_everywhere(farm, backend)
        for server in farm.servers[1:]:
            server.set_clock(600)
        assert set(take(rival, "schedule:1")) == {"schedule:1"}
        assert won["schedule:1"].expires_at > Clock().monotonic()
        assert backend.renew(won.values(), LONG) == {}


class TestMembers:
    def test_state_of_each_instance(self, farm):
        farm.servers[1].kill9()
        with farm.servers[2].client() as client:
            client.flushall()
        first, second, third = get_level("quorum").backend.guarded.members()
        assert first == Member(alias="r1", state="up")
        assert (second.alias, second.state) == ("r2", "down")
        assert second.cause.startswith("ConnectionError: Error 111")
        assert (third.alias, third.state) == ("r3", "kept out")

    def test_level_is_made_of_the_settings(self, farm):
        level = get_level("quorum")
        won = take(level.backend, "schedule:1")
        assert level.backend.name == "redlock"
        assert level.is_strict
        assert farm.values("schedule:1").count(won["schedule:1"].owner_token) >= 2
        level.backend.close()


class TestFuzz:
    def test_random_faults_give_no_second_holder(self, farm):
        fuzz = Fuzz(farm, jitter_seconds=0.005)
        fuzz.run(8)
        assert fuzz.overlaps == []
        assert len(fuzz.spans) > 30

    def test_quorum_of_one_would_be_found_out(self, farm):
        fuzz = Fuzz(farm, jitter_seconds=0.005, quorum=1)
        fuzz.run(60, until_it_overlaps=True)
        assert fuzz.overlaps != []
