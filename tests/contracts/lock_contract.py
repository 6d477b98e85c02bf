"""What every lock backend must do. A subclass gives the fixtures ``backend`` and ``other``.

``other`` is a second node on the same store (the same object where there is but one
process). ``node_settings`` are the Django settings of further processes, or None.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from distcron_app.clock import Clock
from distcron_app.locks import LockBackend, new_owner_token
from tests.contracts.counting import count
from tests.services import wait_for

ROOT = Path(__file__).resolve().parents[2]
LONG = 60_000
SHORT = 150


def take(backend: LockBackend, *names: str, ttl_ms: int = LONG) -> dict[str, Any]:
    return backend.acquire({name: new_owner_token() for name in names}, ttl_ms)


def spawn_node(**given: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.contracts.counting", json.dumps(given)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class LockContract:
    batch_size = 1201
    # How often each of eight threads or three processes takes the lock.
    rounds = 100
    # Which level of ``node_settings`` the further processes use.
    level = "standard"
    # How much earlier than its TTL a lease of 10 s ends, to allow for clocks of different rate.
    drift_seconds = 0.0

    @pytest.fixture
    def node_settings(self) -> dict[str, Any] | None:
        return None

    def seen_by(self, holder: LockBackend, observer: LockBackend) -> LockBackend:
        """Return who knows all about a lock of ``holder``; some stores tell others but little."""
        return observer

    def seen(self, holder: LockBackend, observer: LockBackend) -> Any:
        return self.seen_by(holder, observer).inspect(["schedule:1"])["schedule:1"]

    def wait_until_expired(self, lease: Any, holder: LockBackend) -> None:
        # A backend may round the TTL up; 50 ms is more than any of them does.
        clock = Clock()
        wait_for(lambda: clock.monotonic() > lease.expires_at + 0.05, what="the lease's end")

    def test_free_lock_is_won(self, backend):
        assert set(take(backend, "schedule:1")) == {"schedule:1"}

    def test_held_lock_is_not_won_by_another(self, backend, other):
        take(backend, "schedule:1")
        assert take(other, "schedule:1") == {}

    def test_only_the_free_names_of_a_batch_are_won(self, backend, other):
        take(backend, "schedule:2")
        won = take(other, "schedule:1", "schedule:2", "schedule:3")
        assert set(won) == {"schedule:1", "schedule:3"}

    def test_same_token_wins_again(self, backend):
        wanted = {"schedule:1": new_owner_token()}
        backend.acquire(wanted, LONG)
        assert set(backend.acquire(wanted, LONG)) == {"schedule:1"}

    def test_lease_carries_name_and_token(self, backend):
        lease = backend.acquire({"schedule:1": "5eed"}, LONG)["schedule:1"]
        assert (lease.name, lease.owner_token) == ("schedule:1", "5eed")

    def test_lease_is_counted_from_before_the_request(self, backend):
        before = Clock().monotonic()
        lease = take(backend, "schedule:1", ttl_ms=10_000)["schedule:1"]
        end = lease.expires_at + self.drift_seconds
        assert before + 10 <= end <= Clock().monotonic() + 10
        assert backend.inspect(["schedule:1"])["schedule:1"].ttl_ms <= 10_000

    def test_empty_batch_wins_nothing(self, backend):
        assert backend.acquire({}, LONG) == {}
        assert backend.renew([], LONG) == {}
        assert backend.release([]) == set()
        assert backend.inspect([]) == {}

    @pytest.mark.parametrize("ttl_ms", [0, -1])
    def test_ttl_below_one_is_refused(self, backend, ttl_ms):
        with pytest.raises(ValueError, match=f"Lock TTL: got {ttl_ms} ms"):
            take(backend, "schedule:1", ttl_ms=ttl_ms)

    def test_large_batch_is_won_renewed_and_released(self, backend, other):
        names = [f"schedule:{number}" for number in range(self.batch_size)]
        won = take(backend, *names)
        assert list(won) == names
        assert take(other, *names) == {}
        assert list(backend.renew(won.values(), LONG)) == names
        assert backend.release(won.values()) == set(names)
        assert backend.held() == []

    @pytest.mark.parametrize("name", ["🦜 nightly/../etc", "a b|c", "%2F", "{x}", "ключ"])
    def test_any_name_is_one_lock(self, backend, other, name):
        take(backend, name)
        assert take(other, name) == {}
        assert [info.name for info in other.held()] == [name]

    @pytest.mark.parametrize("name", ["n" * 205, "ключ" * 51, "🦜" * 205])
    def test_long_name_is_one_lock(self, backend, other, name):
        won = take(backend, name, name[:-1])
        assert set(won) == {name, name[:-1]}
        assert take(other, name) == {}
        seen = self.seen_by(backend, other).held()
        assert {info.name for info in seen} == {name, name[:-1]}
        assert backend.release(won.values()) == {name, name[:-1]}

    def test_release_frees_the_lock(self, backend, other):
        won = take(backend, "schedule:1")
        assert backend.release(won.values()) == {"schedule:1"}
        assert set(take(other, "schedule:1")) == {"schedule:1"}

    def test_second_release_is_harmless(self, backend):
        won = take(backend, "schedule:1")
        backend.release(won.values())
        assert backend.release(won.values()) == set()

    def test_release_with_a_foreign_token_is_refused(self, backend, other):
        take(backend, "schedule:1")
        foreign = take(other, "schedule:2")["schedule:2"]
        forged = type(foreign)(
            name="schedule:1", owner_token=foreign.owner_token, expires_at=foreign.expires_at
        )
        assert other.release([forged]) == set()
        assert take(other, "schedule:1") == {}

    def test_late_release_leaves_the_next_holder_alone(self, backend, other):
        late = take(backend, "schedule:1", ttl_ms=SHORT)["schedule:1"]
        self.wait_until_expired(late, backend)
        take(other, "schedule:1")
        assert backend.release([late]) == set()
        assert take(backend, "schedule:1") == {}

    def test_renew_moves_the_end(self, backend):
        lease = take(backend, "schedule:1", ttl_ms=10_000)["schedule:1"]
        renewed = backend.renew([lease], LONG)["schedule:1"]
        assert renewed.owner_token == lease.owner_token
        assert renewed.expires_at > lease.expires_at + 40
        assert backend.inspect(["schedule:1"])["schedule:1"].ttl_ms > 50_000

    def test_renewed_lock_outlives_its_first_ttl(self, backend, other):
        lease = take(backend, "schedule:1", ttl_ms=1000)["schedule:1"]
        backend.renew([lease], LONG)
        self.wait_until_expired(lease, backend)
        assert take(other, "schedule:1") == {}

    def test_renew_with_a_foreign_token_is_lost(self, backend, other):
        lease = take(backend, "schedule:1")["schedule:1"]
        forged = type(lease)(name="schedule:1", owner_token="f00d", expires_at=lease.expires_at)
        assert other.renew([forged], LONG) == {}
        assert set(backend.renew([lease], LONG)) == {"schedule:1"}

    def test_renew_of_a_released_lease_is_lost(self, backend):
        won = take(backend, "schedule:1")
        backend.release(won.values())
        assert backend.renew(won.values(), LONG) == {}

    def test_renew_after_expiry_is_lost(self, backend):
        lease = take(backend, "schedule:1", ttl_ms=SHORT)["schedule:1"]
        self.wait_until_expired(lease, backend)
        assert backend.renew([lease], LONG) == {}

    def test_renew_returns_only_what_is_still_ours(self, backend):
        won = take(backend, "schedule:1", "schedule:2")
        backend.force_release("schedule:1")
        assert set(backend.renew(won.values(), LONG)) == {"schedule:2"}

    def test_expired_lock_can_be_won(self, backend, other):
        lease = take(backend, "schedule:1", ttl_ms=SHORT)["schedule:1"]
        self.wait_until_expired(lease, backend)
        assert set(take(other, "schedule:1")) == {"schedule:1"}

    def test_inspect_shows_holder_note_and_ttl(self, backend, other):
        lease = take(backend, "schedule:1")["schedule:1"]
        info = other.inspect(["schedule:1", "schedule:2"])["schedule:1"]
        assert (info.name, info.owner_token) == ("schedule:1", lease.owner_token)
        assert info.note == "node-a"
        assert 50_000 < info.ttl_ms <= 60_000

    def test_inspect_omits_free_names(self, backend):
        take(backend, "schedule:1")
        assert set(backend.inspect(["schedule:1", "schedule:2"])) == {"schedule:1"}

    def test_age_counts_from_the_first_grant(self, backend, other):
        lease = take(backend, "schedule:1")["schedule:1"]
        first = self.seen(backend, other).age_ms
        assert 0 <= first < 5000
        backend.renew([lease], LONG)
        wait_for(
            lambda: self.seen(backend, other).age_ms >= first + 50,
            what="the lock to get older",
        )

    def test_renewals_are_counted(self, backend, other):
        lease = take(backend, "schedule:1")["schedule:1"]
        assert self.seen(backend, other).renewals == 0
        backend.renew([lease], LONG)
        backend.renew([lease], LONG)
        assert self.seen(backend, other).renewals == 2

    def test_granted_ttl_is_that_of_the_last_grant(self, backend, other):
        lease = take(backend, "schedule:1", ttl_ms=10_000)["schedule:1"]
        assert self.seen(backend, other).granted_ms == 10_000
        backend.renew([lease], LONG)
        assert self.seen(backend, other).granted_ms == 60_000

    def test_next_holder_starts_to_count_anew(self, backend, other):
        first = take(backend, "schedule:1", ttl_ms=10_000)
        backend.renew(first.values(), LONG)
        wait_for(lambda: backend.held()[0].age_ms >= 100, what="the lock to get older")
        backend.release(first.values())
        before = Clock().monotonic()
        take(other, "schedule:1", ttl_ms=20_000)
        (info,) = self.seen_by(other, backend).held()
        assert (info.granted_ms, info.renewals) == (20_000, 0)
        assert info.age_ms < (Clock().monotonic() - before) * 1000 + 50

    def test_held_lists_the_locks_of_all_nodes_by_name(self, backend, other):
        take(other, "schedule:2")
        take(backend, "schedule:1")
        assert [info.name for info in other.held()] == ["schedule:1", "schedule:2"]

    def test_held_omits_released_and_expired_locks(self, backend, other):
        short = take(backend, "schedule:1", ttl_ms=SHORT)["schedule:1"]
        backend.release(take(backend, "schedule:2").values())
        self.wait_until_expired(short, backend)
        assert other.held() == []

    def test_force_release_frees_a_lock_of_another(self, backend, other):
        take(backend, "schedule:1")
        assert other.force_release("schedule:1") is True
        assert set(take(other, "schedule:1")) == {"schedule:1"}

    def test_force_release_of_a_free_lock_is_false(self, backend):
        assert backend.force_release("schedule:1") is False

    def test_holder_loses_a_force_released_lease(self, backend, other):
        won = take(backend, "schedule:1")
        other.force_release("schedule:1")
        taken = take(other, "schedule:1")
        assert backend.renew(won.values(), LONG) == {}
        assert backend.release(won.values()) == set()
        assert set(other.renew(taken.values(), LONG)) == {"schedule:1"}

    def test_ping_answers_quickly(self, backend):
        assert 0 <= backend.ping() < 1

    def test_close_twice_is_harmless(self, backend):
        backend.close()
        backend.close()

    def test_eight_threads_lose_no_increment(self, backend, other, tmp_path):
        counter = tmp_path / "counter"
        counter.write_text("0")
        threads = [
            threading.Thread(
                target=count, args=((backend, other)[number % 2], counter, self.rounds)
            )
            for number in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert int(counter.read_text()) == 8 * self.rounds

    def test_three_processes_lose_no_increment(self, backend, node_settings, tmp_path):
        if node_settings is None:
            # One process is all that such a backend serves; its threads are tested above.
            return
        counter = tmp_path / "counter"
        counter.write_text("0")
        nodes = [
            spawn_node(
                settings=node_settings, level=self.level, counter=str(counter), times=self.rounds
            )
            for _ in range(3)
        ]
        for node in nodes:
            node.communicate(timeout=60)
        assert [node.returncode for node in nodes] == [0, 0, 0]
        assert int(counter.read_text()) == 3 * self.rounds
