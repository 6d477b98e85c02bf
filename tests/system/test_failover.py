"""A Redis primary behind Sentinel that dies or hangs under load."""

from __future__ import annotations

import json
from contextlib import ExitStack
from datetime import UTC, datetime

import pytest

from tests.contracts.conftest import LOCK_DATABASE, sentinel_caches
from tests.services import RedisServer, sentinel_trio, wait_for
from tests.system.cluster import LEASE_SECONDS, PATIENCE_SECONDS
from tests.system.conftest import MakeCluster
from tests.system.test_redis_faults import under_load

pytestmark = pytest.mark.system


@pytest.mark.parametrize("fault", ["kill9", "pause"])
def test_a_failover_under_load_doubles_and_loses_nothing(
    make_cluster: MakeCluster, stack: ExitStack, fault: str
) -> None:
    """F17: the locks go on at the next primary, and an old one that wakes changes nothing."""
    trio = stack.enter_context(sentinel_trio())
    caches = json.dumps(sentinel_caches(trio))
    cluster = make_cluster(redis=False, env={"DISTCRON_SYSTEM_CACHES": caches})
    nodes = under_load(cluster, 3)
    old = trio.primary
    wait_for(lambda: old.is_running and locks_of(old), PATIENCE_SECONDS, "a lock in Redis")

    getattr(old, fault)()
    new = trio.wait_for_new_primary(old)
    wait_for(lambda: locks_of(new), PATIENCE_SECONDS, "a lock at the next primary")
    if fault == "pause":
        old.resume()
    resumed_at = datetime.now(UTC)
    cluster.pass_seconds(2 * LEASE_SECONDS)

    ids = [str(run["node_id"]) for run in cluster.runs() if run["claimed_at"] > resumed_at]
    assert set(ids) == {node.ids()[0] for node in nodes}
    assert cluster.finish_and_check() == []


def locks_of(server: RedisServer) -> list[bytes]:
    with server.client(LOCK_DATABASE) as client:
        return list(client.keys("{distcron:lock}:*"))
