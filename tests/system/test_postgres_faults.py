"""PostgreSQL that restarts or drops its connections under load."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tests.services import PostgresCluster, tcp_proxy, wait_for
from tests.system.cluster import PATIENCE_SECONDS, SECONDS, Cluster, Node

pytestmark = pytest.mark.system

SCHEDULES = 10


def under_load(cluster: Cluster) -> list[Node]:
    nodes = cluster.start_nodes(3)
    for number in range(SCHEDULES):
        delivery = "at_least_once" if number % 2 else "at_most_once"
        cluster.add(f"each-second-{number}", "touch", every=1, delivery=delivery)
    cluster.wait_for_run(state="succeeded")
    return nodes


def assert_nobody_was_taken_for_dead(cluster: Cluster, nodes: list[Node]) -> None:
    assert [len(node.ids()) for node in nodes] == [1] * len(nodes)
    assert {run["state"] for run in cluster.runs()} <= {"succeeded", "skipped"}


@pytest.mark.parametrize("immediate", [False, True], ids=["fast", "immediate"])
def test_claims_resume_soon_after_the_database_is_back(
    cluster: Cluster, postgres: PostgresCluster, immediate: bool
) -> None:
    nodes = under_load(cluster)
    resumed = "SELECT min(claimed_at) FROM distcron_run WHERE claimed_at > %s"
    for _ in range(2):
        cluster.pass_seconds(1.3)
        postgres.restart(immediate=immediate)
        back_at = datetime.now(UTC)
        wait_for(
            lambda back_at=back_at: cluster.database.value(resumed, [back_at]),  # type: ignore[misc]
            PATIENCE_SECONDS,
            "a claim",
        )
        first = cluster.database.value(resumed, [back_at])
        assert (first - back_at).total_seconds() < 5
    cluster.pass_seconds(3)

    assert cluster.finish_and_check() == []
    assert_nobody_was_taken_for_dead(cluster, nodes)


def test_terminated_backends_double_and_lose_nothing(
    cluster: Cluster, postgres: PostgresCluster
) -> None:
    nodes = under_load(cluster)
    terminated = 0
    for step in range(max(5, int(SECONDS / 3))):
        cluster.pass_seconds(0.37 + 0.11 * (step % 7))
        terminated += postgres.terminate_backends()
    assert terminated >= 3 * len(nodes)
    cluster.pass_seconds(2)

    assert cluster.finish_and_check() == []
    assert_nobody_was_taken_for_dead(cluster, nodes)


def test_commits_whose_answer_is_lost_are_read_back(
    cluster: Cluster, postgres: PostgresCluster
) -> None:
    """OP-52: no schedule is stuck after it."""
    with tcp_proxy(postgres.port) as proxy:
        behind = cluster.env["DATABASE_URL"].replace(f":{postgres.port}/", f":{proxy.port}/")
        nodes = cluster.start_nodes(2, DATABASE_URL=behind)
        for number in range(SCHEDULES):
            delivery = "at_least_once" if number % 2 else "at_most_once"
            cluster.add(f"each-second-{number}", "touch", every=1, delivery=delivery)
        cluster.wait_for_run(state="succeeded")
        for number in range(max(10, int(SECONDS / 2))):
            cluster.pass_seconds(0.13 + 0.11 * (number % 6))
            proxy.drop_next_reply(b"COMMIT")
            wait_for(
                lambda number=number: proxy.dropped > number,  # type: ignore[misc]
                PATIENCE_SECONDS,
                "a COMMIT",
            )

        assert cluster.finish_and_check() == []
        assert_nobody_was_taken_for_dead(cluster, nodes)
        delays = [run["started_at"] - run["due_at"] for run in cluster.runs(state="succeeded")]
        # Without reading back, a claim would wait for the sweep of strays, after 10 s.
        assert max(delays).total_seconds() < 8
