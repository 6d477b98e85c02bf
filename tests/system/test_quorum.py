"""The quorum under faults for minutes; the short ones are in tests/contracts."""

from __future__ import annotations

import pytest

from tests.contracts.lock_contract import take
from tests.quorum_fuzz import Fuzz
from tests.services import wait_for

pytestmark = pytest.mark.system


@pytest.mark.parametrize("count", [3, 5])
def test_a_minute_of_random_faults_and_50_ms_jitter_gives_no_second_holder(make_farm, count):
    fuzz = Fuzz(make_farm(count), jitter_seconds=0.05)
    fuzz.run(60)
    assert fuzz.overlaps == []
    assert len(fuzz.spans) > 60


def test_a_rolling_restart_of_all_instances_keeps_the_lock(farm):
    backend = farm.backend(rejoin_ms=2000)
    rival = farm.backend(rejoin_ms=2000, retries=0)
    won = take(backend, "schedule:1", ttl_ms=2000)
    token = won["schedule:1"].owner_token
    for place, server in enumerate(farm.servers):
        server.kill9()
        server.start()

        def is_held_here(place: int = place) -> bool:
            nonlocal won
            won = backend.renew(won.values(), 2000)
            assert set(won) == {"schedule:1"}
            assert take(rival, "schedule:1", ttl_ms=2000) == {}
            return farm.values("schedule:1")[place] == token

        wait_for(is_held_here, 10, "the lock to be on the restarted instance")
