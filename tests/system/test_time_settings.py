"""Time settings under which other schedulers looped, repeated runs or went backwards."""

from __future__ import annotations

import itertools
import signal
import time
from datetime import UTC, datetime, timedelta

import pytest

from tests.services import wait_for
from tests.system.cluster import Cluster
from tests.system.conftest import MakeCluster

pytestmark = pytest.mark.system

WEST_OF_GREENWICH = {
    "DISTCRON_SYSTEM_USE_TZ": "0",
    "DJANGO_TIME_ZONE": "America/New_York",
    # The host's own zone is another one.
    "TZ": "Asia/Jakarta",
}
MINUTE = timedelta(minutes=1)
IDLE_SECONDS = 4.0


def add_rules(cluster: Cluster) -> None:
    """Add rules that the node itself has to plan, and wait until it has."""
    for key, rule in (("each", "* * * * *"), ("fifth", "*/5 * * * *")):
        cluster.add(key, "touch", cron=rule, timezone="America/New_York", planned=False)
    wait_for(
        lambda: (
            cluster.schedule("each")["next_run_at"] and cluster.schedule("fifth")["next_run_at"]
        ),
        60,
        "the first plan",
    )


@pytest.fixture(params=["postgresql", "sqlite"])
def western(
    request: pytest.FixtureRequest,
    make_cluster: MakeCluster,
    make_sqlite_cluster: MakeCluster,
) -> Cluster:
    """A cluster whose project has USE_TZ = False in New York."""
    make = make_cluster if request.param == "postgresql" else make_sqlite_cluster
    return make(env=WEST_OF_GREENWICH)


def test_a_node_west_of_greenwich_plans_the_near_future_and_idles(western: Cluster) -> None:
    """OP-62."""
    node = western.start_node()
    add_rules(western)
    now = datetime.now(UTC)
    next_at = western.schedule("fifth")["next_run_at"]

    assert timedelta(seconds=-1) < next_at - now <= timedelta(seconds=300)
    assert (next_at.minute % 5, next_at.second, next_at.microsecond) == (0, 0, 0)
    used = node.cpu_seconds()
    until = time.monotonic() + IDLE_SECONDS
    wait_for(lambda: time.monotonic() > until, 60, "time to pass")
    assert node.cpu_seconds() - used < IDLE_SECONDS / 4
    assert len(western.runs()) <= 2


def test_each_minute_runs_once_at_its_own_instant_however_late_it_starts(
    make_cluster: MakeCluster, make_sqlite_cluster: MakeCluster
) -> None:
    """OP-64, OP-66: what comes next is counted from the instant, and only grows."""
    clusters = [
        make_cluster(),
        make_cluster(env=WEST_OF_GREENWICH),
        make_sqlite_cluster(env=WEST_OF_GREENWICH),
    ]
    nodes = [cluster.start_node() for cluster in clusters]
    for cluster in clusters:
        add_rules(cluster)
    minute = a_minute_ahead(clusters)
    planned = look_until(minute - timedelta(seconds=0.3), clusters)
    for node in nodes:
        node.send_group(signal.SIGSTOP)
    planned += look_until(minute + timedelta(seconds=0.4), clusters)
    for node in nodes:
        node.send_group(signal.SIGCONT)
    planned += look_until(minute + timedelta(seconds=3), clusters)

    for index, cluster in enumerate(clusters):
        (run,) = [run for run in cluster.runs("each") if run["scheduled_at"] >= minute]
        assert (run["scheduled_at"], run["state"]) == (minute, "succeeded")
        assert run["started_at"] - minute >= timedelta(seconds=0.4)
        each, fifth = zip(*(moment[index] for moment in planned), strict=True)
        assert each[-1] == minute + MINUTE
        assert_it_only_grows(each)
        assert_it_only_grows(fifth)


def a_minute_ahead(clusters: list[Cluster]) -> datetime:
    """Return the next full minute, as all clusters have planned it and not too near."""

    def agreed() -> datetime | None:
        instants = {cluster.schedule("each")["next_run_at"] for cluster in clusters}
        (first, *more) = instants
        is_ahead = first - datetime.now(UTC) > timedelta(seconds=1)
        return first if is_ahead and not more else None

    found = wait_for(agreed, 90, "a minute ahead of all nodes")
    assert found is not None
    assert (found.second, found.microsecond) == (0, 0)
    return found


def look_until(instant: datetime, clusters: list[Cluster]) -> list[list[tuple[datetime, datetime]]]:
    """Return where both rules of each cluster stood, again and again until ``instant``."""
    seen: list[list[tuple[datetime, datetime]]] = []

    def passed() -> bool:
        seen.append([stands_at(cluster) for cluster in clusters])
        return datetime.now(UTC) >= instant

    wait_for(passed, 90, f"{instant}")
    return seen


def stands_at(cluster: Cluster) -> tuple[datetime, datetime]:
    return cluster.schedule("each")["next_run_at"], cluster.schedule("fifth")["next_run_at"]


def assert_it_only_grows(instants: tuple[datetime, ...]) -> None:
    assert [pair for pair in itertools.pairwise(instants) if pair[1] < pair[0]] == []
