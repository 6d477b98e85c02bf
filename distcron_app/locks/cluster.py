"""Makes a cache alias of django-redis speak to a Redis Cluster, which its settings cannot."""

from __future__ import annotations

import os
import threading
from typing import Any

from django_redis.pool import ConnectionFactory
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry

__all__ = ["ClusterConnectionFactory"]

_clusters: dict[str, RedisCluster] = {}
_mutex = threading.Lock()


class ClusterConnectionFactory(ConnectionFactory):  # type: ignore[misc]
    """The ``CONNECTION_FACTORY`` of an alias whose ``LOCATION`` is a node of a Cluster.

    ``OPTIONS["CLUSTER_NODES"]`` may list further nodes as (host, port), asked when the
    first is away. The connection limits are the alias' own; nothing is retried, since
    locks retry by token, and shards that do not hold our keys may be down.
    """

    @property
    def timeouts(self) -> tuple[float | None, float | None]:
        """Return (socket timeout, connect timeout) in seconds, None where not set."""
        given = {**self.make_connection_params(""), **self.pool_cls_kwargs}
        return given.get("socket_timeout"), given.get("socket_connect_timeout")

    def connect(self, url: str) -> RedisCluster:
        """Return this process' client for ``url``, shared by its threads.

        The first call asks the nodes for their slots, so it blocks for one connect
        timeout per node at most. Raise RedisClusterException when none answers.
        """
        with _mutex:
            if url not in _clusters:
                _clusters[url] = self._cluster(url)
            return _clusters[url]

    def disconnect(self, connection: RedisCluster) -> None:
        """Close the connections to all nodes."""
        connection.disconnect_connection_pools()  # type: ignore[no-untyped-call]

    def _cluster(self, url: str) -> RedisCluster:
        given: dict[str, Any] = {**self.make_connection_params(url), **self.pool_cls_kwargs}
        # Neither is known to a Cluster.
        del given["parser_class"]
        given.pop("retry", None)
        return RedisCluster(
            startup_nodes=[_node(*at) for at in self.options.get("CLUSTER_NODES", ())],
            require_full_coverage=False,
            retry=Retry(NoBackoff(), 0),
            **given,
        )


def _node(host: str, port: int) -> ClusterNode:
    return ClusterNode(host, port)  # type: ignore[no-untyped-call]


def _start_afresh() -> None:
    # A forked child must not share its parent's sockets, nor a mutex that a thread
    # which it does not have may hold.
    global _mutex
    _mutex = threading.Lock()
    _clusters.clear()


os.register_at_fork(after_in_child=_start_afresh)
