"""A farm of independent Redis instances for the tests of the quorum, and its fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from distcron_app.locks.redlock import RedlockBackend
from project.service_urls import cache_settings
from tests.services import ClockedValkey, TcpProxy, tcp_proxy

LOCK_DATABASE = 9
REJOIN_MS = 60_000
MARKER = "{test:lock}-born"


def quorum_caches(ports: Sequence[int]) -> dict[str, Any]:
    """Return ``CACHES`` with the aliases r1, r2, ... of one instance each."""
    urls = [f"redis://127.0.0.1:{port}/{LOCK_DATABASE}" for port in ports]
    caches = {f"r{number}": cache_settings(url)["distcron"] for number, url in enumerate(urls, 1)}
    return cache_settings("") | caches


class Farm:
    """Independent instances, r1 and up, each behind a proxy of its own, and their nodes.

    ``backend()`` makes one more node; with ``direct`` it goes past the proxies.
    """

    def __init__(self, servers: Sequence[ClockedValkey], settings: Any, stack: ExitStack) -> None:
        self.servers = servers
        self.proxies: list[TcpProxy] = []
        self._settings = settings
        self._stack = stack
        self.use(self.ports)

    @property
    def ports(self) -> list[int]:
        """Return the ports of the servers."""
        return [server.port for server in self.servers]

    @property
    def aliases(self) -> list[str]:
        """Return the cache aliases."""
        return [f"r{number}" for number in range(1, len(self.servers) + 1)]

    def use(self, ports: Sequence[int]) -> None:
        """Point the aliases at these ports."""
        self._settings.CACHES = quorum_caches(ports)
        self._settings.DISTCRON = {
            "NAMESPACE": "test",
            "NODE_NAME": "node-a",
            "QUORUM_ALIASES": self.aliases,
            "LOCK_TTL_SECONDS": REJOIN_MS / 1000,
        }

    def use_proxies(self) -> list[TcpProxy]:
        """Put a proxy in front of each server."""
        self.proxies = [self._stack.enter_context(tcp_proxy(port)) for port in self.ports]
        self.use([proxy.port for proxy in self.proxies])
        return self.proxies

    def backend(self, **options: Any) -> RedlockBackend:
        """Return one more node."""
        given = {"rejoin_ms": REJOIN_MS, "note": "node-a", "retry_delay_ms": 20, **options}
        backend = RedlockBackend(self.aliases, "test", **given)
        self._stack.callback(backend.close)
        return backend

    def values(self, name: str) -> list[str | None]:
        """Return the owner token that each instance holds for a lock, None where it is free."""
        found = []
        for server in self.servers:
            with server.client(LOCK_DATABASE) as client:
                value = client.get(f"{{test:lock}}:{name}")
            found.append(value.decode().partition("|")[0] if value is not None else None)
        return found


@pytest.fixture(scope="session")
def five_valkeys() -> Iterator[list[ClockedValkey]]:
    """Five servers that a ``Farm`` makes good again before each test."""
    with ExitStack() as stack:
        yield [stack.enter_context(ClockedValkey()) for _ in range(5)]


@pytest.fixture
def make_farm(five_valkeys: list[ClockedValkey], settings: Any) -> Iterator[Callable[[int], Farm]]:
    """Makes a farm of that many empty instances, which have been up for an hour."""

    with ExitStack() as stack:

        def make(count: int) -> Farm:
            for server in five_valkeys[:count]:
                server.make_good()
                with server.client(LOCK_DATABASE) as client:
                    client.flushall()
                    client.set(MARKER, 1)
            return Farm(five_valkeys[:count], settings, stack)

        yield make


@pytest.fixture
def farm(make_farm: Callable[[int], Farm]) -> Farm:
    """Three instances."""
    return make_farm(3)
