"""Measure the locks beside their peers in the same run: targets P5, P6 and P8.

    python -m benchmarks.locks [p5] [p6] [p8] [--rounds 9] [--samples 500] [--seconds 60]

Prints one JSON line for each target, and a table for people on stderr. It starts servers
of its own. P5 needs the packages of requirements-bench.txt.

- P5: a free lock of the level "quorum" over 3 and over 5 Redis instances, beside redlock-py
  and pottery, and a bare SET NX PX to all instances, which is what the machine allows.
- P6: a free lock of the level "standard", beside redis-py's Lock, django-redis' cache.lock
  and a bare SET NX PX; 1,000 names in one call, beside a pipeline of SET NX PX and one by one.
- P8: 10 nodes contend for one schedule that is due each second.

In a round the contenders take turns, and a ratio is taken within a round, so that a busy
machine slows both sides of it. Figures are medians over the rounds; "spread" is the
distance of the extremes in percent of the median. Each contender makes its own token and
its own lock object, as a caller of it would.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import django
import redis
from django.conf import settings

from benchmarks.figures import Claim, machine, percentile, ratios, summary, verdict
from benchmarks.servers import RedisServer, until

TTL_MS = 10_000
NAMES_IN_ONE_CALL = 1000
# Batches in one round; one by one is slow.
BATCHES = 5
# Locks that a contender takes before the next one has its turn, and those not counted
# before them: pottery's threads still work for a moment after it has won.
TURN = 20
WARM_UP = 2
# A Redis that has just started is kept out of a quorum for as long as a lock may live.
ADMITTED_SECONDS = 60.0

Rounds = dict[str, list[float]]


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """A lock: ``acquire`` returns what ``release`` takes, or something false."""

    name: str
    acquire: Callable[[], Any]
    release: Callable[[Any], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """A way to take many locks: ``acquire`` takes names and returns how many were won."""

    name: str
    acquire: Callable[[Sequence[str]], int]


def main() -> None:
    """Measure and print."""
    # So that a stopped run stops its servers.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    options = _options()
    for target in options.targets:
        with contextlib.ExitStack() as stack:
            found = TARGETS[target](options, stack)
        print(json.dumps({"benchmark": "locks", "id": target.upper(), **found}), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the locks beside their peers.")
    parser.add_argument("targets", nargs="*", metavar="p5|p6|p8", help="default: all three")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--samples", type=int, default=500, help="locks of each round")
    parser.add_argument("--seconds", type=int, default=60, help="how long the nodes contend")
    parser.add_argument("--nodes", type=int, default=10)
    options = parser.parse_args()
    options.targets = options.targets or sorted(TARGETS)
    unknown = set(options.targets) - set(TARGETS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(sorted(TARGETS))}.")
    return options


# --- P5 ---------------------------------------------------------------------------


def measure_quorum(options: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Return the figures of a free Redlock over 3 and 5 instances."""
    servers = [stack.enter_context(RedisServer()) for _ in range(5)]
    use_servers({f"quorum-{number}": server for number, server in enumerate(servers, 1)})
    facts = machine("redlock-py", "pottery", **served(servers))
    measured = {
        count: free_locks(quorum_contenders(servers[:count]), options, f"P5, {count} instances")
        for count in (3, 5)
    }
    acquired = {count: p50s(found) for count, found in measured.items()}
    return {
        **facts,
        **sizes(options),
        "ms": {str(count): figures(found) for count, found in measured.items()},
        "ratio_to_peer": {str(count): to_peers(found) for count, found in acquired.items()},
        **verdict(quorum_claims(acquired[3])),
    }


def quorum_contenders(servers: Sequence[RedisServer]) -> list[Contender]:
    """Return the Redlocks over these instances."""
    from pottery import Redlock as Pottery
    from redlock import Redlock

    from distcron_app.conf import get_config
    from distcron_app.locks import get_level

    aliases = tuple(f"quorum-{number}" for number in range(1, len(servers) + 1))
    config = dataclasses.replace(get_config(), quorum_aliases=aliases)
    manager = Redlock([redis.Redis.from_url(server.url) for server in servers], retry_count=1)
    masters = {redis.Redis.from_url(server.url) for server in servers}

    def pottery() -> Any:
        lock = Pottery(key="pottery", masters=masters, auto_release_time=TTL_MS / 1000)
        return lock if lock.acquire(blocking=False) else None

    return [
        leased(get_level("quorum", config=config).backend),
        Contender("redlock-py", lambda: manager.lock("redlock-py", TTL_MS), manager.unlock),
        Contender("pottery", pottery, lambda lock: lock.release()),
        bare_fanout(servers),
    ]


def bare_fanout(servers: Sequence[RedisServer]) -> Contender:
    """Return a SET NX PX that is sent to all instances before the first reply is read."""
    connections = [
        redis.Redis.from_url(server.url).connection_pool.get_connection() for server in servers
    ]

    def ask(*command: str | int) -> list[Any]:
        for connection in connections:
            connection.send_command(*command)
        return [connection.read_response() for connection in connections]

    def acquire() -> bool:
        return all(ask("SET", "bare", secrets.token_hex(16), "NX", "PX", TTL_MS))

    return Contender("SET NX PX to all", acquire, lambda _: ask("DEL", "bare"))


def quorum_claims(acquired: Mapping[str, Sequence[float]]) -> list[Claim]:
    """Return what P5 claims of the p50 of acquire, round by round, in ms."""
    ours = acquired["distcron"]
    peers = to_peers(acquired)
    return [
        Claim(what="3 instances, p50 to redlock-py's", value=peers["redlock-py"], limit=1 / 3),
        Claim(what="3 instances, p50 to pottery's", value=peers["pottery"], limit=1 / 8),
        Claim(what="3 instances, slowest p50 of a round, ms", value=max(ours), limit=2.4),
    ]


# --- P6 ---------------------------------------------------------------------------


def measure_standard(options: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Return the figures of a free lock in one Redis, and of many in one call."""
    server = stack.enter_context(RedisServer())
    use_servers({"distcron": server, "default": server})
    facts = machine("django-redis", **served([server]))
    measured = free_locks(standard_contenders(server), options, "P6, one lock")
    batches = many_locks(server, options)
    return {
        **facts,
        **sizes(options),
        "ms": figures(measured),
        "ratio_to_peer": to_peers(p50s(measured)),
        "names_per_second": {name: round(summary(each).median) for name, each in batches.items()},
        "names_spread": {name: whole(summary(each)) for name, each in batches.items()},
        "names_ratio_to_peer": to_peers(batches),
        **verdict(standard_claims(p50s(measured), batches)),
    }


def standard_contenders(server: RedisServer) -> list[Contender]:
    """Return the locks in one Redis."""
    from django.core.cache import cache

    from distcron_app.locks import get_level

    client = redis.Redis.from_url(server.url)
    # Compare and delete, as each of the others releases.
    delete = client.register_script(
        "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end"
    )

    def tried(lock: Any) -> Any:
        return lock if lock.acquire(blocking=False) else None

    def bare() -> str | None:
        token = secrets.token_hex(16)
        return token if client.set("bare", token, nx=True, px=TTL_MS) else None

    seconds = TTL_MS / 1000
    return [
        leased(get_level().backend),
        Contender(
            "redis-py",
            lambda: tried(client.lock("redis-py", timeout=seconds)),
            lambda lock: lock.release(),
        ),
        Contender(
            "django-redis",
            lambda: tried(cache.lock("django-redis", timeout=seconds)),
            lambda lock: lock.release(),
        ),
        Contender("SET NX PX", bare, lambda token: delete(keys=["bare"], args=[token])),
    ]


def many_locks(server: RedisServer, options: argparse.Namespace) -> Rounds:
    """Return the names per second of each way to take 1,000 names, round by round."""
    client = redis.Redis.from_url(server.url)
    ways = batch_ways(client)
    rates: Rounds = {way.name: [] for way in ways}
    names = [f"schedule:{number}" for number in range(NAMES_IN_ONE_CALL)]
    for done in range(options.rounds):
        progress(f"P6, {NAMES_IN_ONE_CALL} names, round {done + 1} of {options.rounds}")
        took: Rounds = {way.name: [] for way in ways}
        for way in turned(ways, done) * BATCHES:
            took[way.name].append(batch_seconds(client, way, names))
        for name, seconds in took.items():
            rates[name].append(NAMES_IN_ONE_CALL / percentile(seconds, 50))
    show("names/s", {name: {"median": summary(each).median} for name, each in rates.items()})
    return rates


def batch_ways(client: redis.Redis) -> list[Batch]:
    """Return the ways to take many names: ours, and the two that redis-py offers."""
    from distcron_app.locks import get_level, new_owner_token

    backend = get_level().backend

    def pipeline(names: Sequence[str]) -> int:
        with client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.set(name, secrets.token_hex(16), nx=True, px=TTL_MS)
            return sum(map(bool, pipe.execute()))

    def one_by_one(names: Sequence[str]) -> int:
        won = [client.set(name, secrets.token_hex(16), nx=True, px=TTL_MS) for name in names]
        return sum(map(bool, won))

    return [
        Batch(
            "distcron",
            lambda names: len(backend.acquire({name: new_owner_token() for name in names}, TTL_MS)),
        ),
        Batch("pipeline", pipeline),
        Batch("one by one", one_by_one),
    ]


def batch_seconds(client: redis.Redis, way: Batch, names: Sequence[str]) -> float:
    """Return how long it takes to win all names in an empty Redis."""
    client.flushdb()
    began = time.perf_counter()
    won = way.acquire(names)
    took = time.perf_counter() - began
    if won != len(names):
        raise SystemExit(f"{way.name} won {won} of {len(names)} free names.")
    return took


def standard_claims(
    acquired: Mapping[str, Sequence[float]], batches: Mapping[str, Sequence[float]]
) -> list[Claim]:
    """Return what P6 claims of the p50 of acquire in ms and of names per second."""
    rate = summary(batches["distcron"]).median
    return [
        Claim(what="p50 to redis-py's Lock", value=to_peers(acquired)["redis-py"], limit=1.0),
        Claim(what="names per second in one call", value=rate, limit=150_000, at_least=True),
    ]


# --- P8 ---------------------------------------------------------------------------


def measure_contention(options: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Return what nodes that contend for one schedule did."""
    from benchmarks.contention import contend

    return contend(
        stack, nodes=options.nodes, seconds=options.seconds, progress=progress, show=show
    )


TARGETS = {"p5": measure_quorum, "p6": measure_standard, "p8": measure_contention}


# --- measuring --------------------------------------------------------------------


def use_servers(servers: Mapping[str, RedisServer]) -> None:
    """Make the servers the caches of these aliases, with the timeouts of the project."""
    from django.test.utils import override_settings

    from project.service_urls import cache_settings

    caches = {alias: cache_settings(server.url)["distcron"] for alias, server in servers.items()}
    if not settings.configured:
        settings.configure(CACHES={}, DISTCRON={})
        django.setup()
    override_settings(CACHES=caches).enable()


def leased(backend: Any) -> Contender:
    """Return one of our backends as a contender."""
    from distcron_app.locks import new_owner_token

    return Contender(
        "distcron",
        lambda: backend.acquire({"name:bench": new_owner_token()}, TTL_MS),
        lambda leases: backend.release(leases.values()),
    )


def free_locks(
    contenders: Sequence[Contender], options: argparse.Namespace, what: str
) -> dict[str, Rounds]:
    """Return the p50 and p99 of acquire and release in ms of each contender, round by round."""
    found: dict[str, Rounds] = {contender.name: {} for contender in contenders}
    progress(f"{what}: waiting until all servers are trusted")
    for contender in contenders:
        until(functools.partial(admitted, contender), ADMITTED_SECONDS, f"a win: {contender.name}")
    for done in range(options.rounds):
        progress(f"{what}, round {done + 1} of {options.rounds}")
        for name, values in one_round(turned(contenders, done), options.samples).items():
            for key, value in values.items():
                found[name].setdefault(key, []).append(value)
    show(what, figures(found))
    return found


def admitted(contender: Contender) -> bool:
    """Return whether the servers of the contender let it win."""
    from distcron_app.errors import LockUnavailable

    try:
        return won_once(contender)
    except LockUnavailable:
        return False


def won_once(contender: Contender) -> bool:
    """Return whether the lock could be had, and release it."""
    held = contender.acquire()
    if held:
        contender.release(held)
    return bool(held)


def one_round(contenders: Sequence[Contender], samples: int) -> dict[str, dict[str, float]]:
    """Return the figures of so many acquires and releases by each contender, in ms.

    They take turns after a few locks each, so that a busy moment meets them all.
    """
    acquired: Rounds = {contender.name: [] for contender in contenders}
    released: Rounds = {contender.name: [] for contender in contenders}
    gc.collect()
    for begin in range(0, samples, TURN):
        for contender in contenders:
            for _ in range(WARM_UP):
                won_once(contender)
            for _ in range(min(TURN, samples - begin)):
                took, gave = timed(contender)
                acquired[contender.name].append(took)
                released[contender.name].append(gave)
    return {
        name: {
            "acquire_p50": percentile(acquired[name], 50),
            "acquire_p99": percentile(acquired[name], 99),
            "release_p50": percentile(released[name], 50),
            "release_p99": percentile(released[name], 99),
        }
        for name in acquired
    }


def timed(contender: Contender) -> tuple[float, float]:
    """Return how long one acquire of a free lock and its release took, in ms."""
    began = time.perf_counter()
    held = contender.acquire()
    middle = time.perf_counter()
    if not held:
        raise SystemExit(f"{contender.name} did not win a free lock.")
    contender.release(held)
    return (middle - began) * 1000, (time.perf_counter() - middle) * 1000


def turned(contenders: Sequence[Any], by: int) -> list[Any]:
    """Return the contenders, beginning with another one each round."""
    by %= len(contenders)
    return [*contenders[by:], *contenders[:by]]


def p50s(measured: Mapping[str, Rounds]) -> dict[str, list[float]]:
    """Return the p50 of acquire, round by round."""
    return {name: rounds["acquire_p50"] for name, rounds in measured.items()}


def to_peers(measured: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return our figure over that of each peer."""
    return {
        name: round(ratios(measured["distcron"], each).median, 3)
        for name, each in measured.items()
        if name != "distcron"
    }


# --- printing ---------------------------------------------------------------------


def figures(measured: Mapping[str, Rounds]) -> dict[str, dict[str, float]]:
    """Return the medians over the rounds in ms, and the spread of the p50 of acquire."""
    return {
        name: {
            **{key: round(summary(values).median, 4) for key, values in rounds.items()},
            "spread": whole(summary(rounds["acquire_p50"])),
        }
        for name, rounds in measured.items()
    }


def whole(found: Any) -> int:
    """Return the spread in whole percent."""
    return round(found.spread_percent)


def sizes(options: argparse.Namespace) -> dict[str, int]:
    """Return how much was measured."""
    return {"rounds": options.rounds, "samples": options.samples}


def served(servers: Iterable[RedisServer]) -> dict[str, str]:
    """Return the version of the Redis that was used."""
    with redis.Redis.from_url(next(iter(servers)).url) as client:
        return {"redis-server": str(client.info("server")["redis_version"])}


def progress(words: str) -> None:
    """Say on a terminal what is being measured."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{words}", end="", file=sys.stderr, flush=True)


def show(title: str, table: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table for people."""
    progress("")
    columns = list(next(iter(table.values())))
    print(f"{title:<24}" + "".join(f"{column:>19}" for column in columns), file=sys.stderr)
    for name, row in table.items():
        cells = "".join(f"{_short(row[column]):>19}" for column in columns)
        print(f"  {name:<22}{cells}", file=sys.stderr)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3f}"


if __name__ == "__main__":
    main()
