"""One request to several Redis instances at once, without a thread for each.

A request is written to every instance and then the replies are read as they come, so a
call costs the round trip of the slowest instance that is waited for. A thread runs only
while a connection is made, which may block on a name server, TLS or a hung instance.
"""

from __future__ import annotations

import collections
import enum
import os
import select
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any

import redis
from django_redis import get_redis_connection
from redis.exceptions import NoScriptError, ResponseError

from distcron_app.clock import Clock
from distcron_app.locks.scripts import Call

__all__ = ["Fanout", "Instance", "Patience", "Reply", "Request"]

# Idle connections kept for each instance: as many threads may ask at once without waiting.
_IDLE_LIMIT = 8
# Once enough instances have answered, the others have as long again, and at least this.
_GRACE_SECONDS = 0.001
# Replies that a connection may owe to calls that did not wait for them.
_OWED_LIMIT = 64

_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

# The answers to a request's calls in their order, or why there are none.
Reply = list[Any] | Exception


class Patience(enum.Enum):
    """How long to wait for the instances that have not replied yet."""

    TIMEOUT = enum.auto()
    # As long again as the others took.
    GRACE = enum.auto()
    NONE = enum.auto()


# Says so of the replies, None for those that are not there yet.
Judge = Callable[[list[Reply | None]], Patience]


class Request:
    """Calls that are sent together, packed once for all instances."""

    __slots__ = ("calls", "count", "packed")

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.count = len(calls)
        self.packed = b"".join([_packed(call, b"EVALSHA", call.script.sha) for call in calls])

    def spelled_out(self) -> bytes:
        """Return the request with the text of its scripts, for an instance without them."""
        return b"".join([_packed(call, b"EVAL", call.script.text) for call in self.calls])


def _packed(call: Call, verb: bytes, script: str) -> bytes:
    values = call.values
    parts = [b"*%d\r\n" % (len(values) + 3)]
    for value in (verb, script, str(call.key_count), *values):
        raw = value.encode() if isinstance(value, str) else value
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


class _Link:
    """A connection that may owe replies to earlier calls, which come before the next ones.

    Late replies are read and dropped, not waited for: what is sent behind them is still
    carried out in its order.
    """

    __slots__ = (
        "connection",
        "fileno",
        "owed",
        "owed_since",
        "pool",
        "replies",
        "unsent",
        "wanted",
    )

    def __init__(self, connection: Any, pool: Any) -> None:
        self.connection = connection
        self.pool = pool
        # redis-py offers no public way to wait for several connections.
        self.fileno: int = connection._sock.fileno()
        self.owed = 0
        self.owed_since = 0.0
        self.wanted = 0
        self.replies: list[Any] = []
        self.unsent = b""

    def send(self, packed: bytes, count: int) -> None:
        """Send without blocking; what did not fit goes with ``flush()``."""
        self.replies = []
        self.wanted = count
        self.unsent = packed
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as it fits."""
        socket = self.connection._sock
        socket.settimeout(0)
        try:
            sent = socket.send(self.unsent)
        except _BLOCKED:
            return
        self.unsent = self.unsent[sent:]

    def read(self) -> bool:
        """Read what is there; True when all replies are.

        Raise RedisError or OSError when the connection is broken.
        """
        while len(self.replies) < self.wanted:
            try:
                reply = self.connection.read_response(timeout=0, disconnect_on_error=False)
            except redis.TimeoutError:
                return False
            except ResponseError as error:
                reply = error
            if self.owed:
                self.owed -= 1
            else:
                self.replies.append(reply)
        return True

    def leave(self, sent_at: float) -> bool:
        """Owe the replies that are missing; False when the connection cannot go on."""
        missing = self.wanted - len(self.replies)
        if missing and not self.owed:
            self.owed_since = sent_at
        self.owed += missing
        return not self.unsent and self.owed <= _OWED_LIMIT

    def close(self) -> None:
        """Close the connection; its place in the pool is free again."""
        self.connection.disconnect()
        self.pool.release(self.connection)


class Instance:
    """A Redis instance under its cache alias, with idle connections for reuse.

    ``greet`` is called with each new connection before it is used; what it raises counts
    as a failure to connect.
    """

    def __init__(self, alias: str, greet: Callable[[Instance, Any], None]) -> None:
        self.alias = alias
        self._greet = greet
        self._idle: list[_Link] = []
        self._waiting: list[tuple[_Round, int]] = []
        self._is_connecting = False
        self._mutex = threading.Lock()

    def timeout(self) -> float:
        """Return the alias' socket timeout in seconds."""
        seconds: float = self._pool().connection_kwargs["socket_timeout"]
        return seconds

    def take(self, now: float, timeout: float) -> _Link | None:
        """Return an idle connection; None when a new one is needed."""
        while (link := self._pop()) is not None:
            if not link.owed or now - link.owed_since < timeout:
                return link
            link.close()
        return None

    def _pop(self) -> _Link | None:
        # One that owes replies first: a release must stay behind the acquire it ends.
        with self._mutex:
            if len(self._idle) < 2:
                return self._idle.pop() if self._idle else None
            owing = (place for place, link in enumerate(self._idle) if link.owed)
            return self._idle.pop(next(owing, -1))

    def put(self, link: _Link) -> None:
        """Keep a connection for the next call."""
        with self._mutex:
            is_kept = len(self._idle) < _IDLE_LIMIT
            if is_kept:
                self._idle.append(link)
        if not is_kept:
            link.close()

    def close(self) -> None:
        """Close the idle connections."""
        while (link := self._pop()) is not None:
            link.close()

    def connect(self, round_: _Round, position: int) -> None:
        """Make a connection in a thread and hand it to ``round_``; one at a time."""
        with self._mutex:
            self._waiting.append((round_, position))
            if self._is_connecting:
                return
            self._is_connecting = True
        threading.Thread(
            target=self._connect, name=f"distcron-connect-{self.alias}", daemon=True
        ).start()

    def forget(self, round_: _Round) -> None:
        """Hand nothing more to ``round_`` once this returns.

        A connection under way becomes an idle one.
        """
        with self._mutex:
            self._waiting = [each for each in self._waiting if each[0] is not round_]

    def _connect(self) -> None:
        is_wanted = True
        while is_wanted:
            opened = self._opened()
            with self._mutex:
                served = self._waiting if isinstance(opened, Exception) else self._waiting[:1]
                self._waiting = self._waiting[len(served) :]
                is_wanted = self._is_connecting = bool(self._waiting)
                for round_, position in served:
                    round_.hand(position, opened)
            if not served and isinstance(opened, _Link):
                self.put(opened)

    def _opened(self) -> _Link | Exception:
        try:
            pool = self._pool()
            link = _Link(pool.get_connection(), pool)
            try:
                self._greet(self, link.connection)
            except BaseException:
                link.close()
                raise
            return link
        except Exception as error:  # noqa: BLE001
            # The thread's edge: whatever the classes in CACHES raise is the caller's answer.
            return error

    def _pool(self) -> Any:
        return get_redis_connection(self.alias).connection_pool


class Fanout:
    """The instances of ``aliases``, asked in parallel; every method may be called by any thread.

    Connections stay open between calls. One that turns out to be dead is replaced, and
    its request sent again once: every call must be one that may be repeated.
    """

    def __init__(
        self, aliases: Sequence[str], *, greet: Callable[[Instance, Any], None], clock: Clock
    ) -> None:
        self.instances = tuple(Instance(alias, greet) for alias in aliases)
        self._clock = clock
        self._timeout = 0.0

    def ask(
        self,
        requests: Sequence[Request | None],
        judge: Judge = lambda replies: Patience.TIMEOUT,
    ) -> list[Reply | None]:
        """Return for each instance the reply to its request; None where it was not asked.

        Blocks until all have replied, at most for the largest socket timeout of the
        aliases, or as ``judge`` says. An instance that was not waited for counts as a
        TimeoutError.
        """
        # Read at the first call: the alias may be missing, and then says so here.
        timeout = self._timeout or self._read_timeout()
        round_ = _Round(self.instances, requests, timeout, self._clock)
        try:
            round_.run(judge)
        finally:
            round_.end()
        return round_.replies

    def send(self, requests: Sequence[Request | None]) -> None:
        """Send what can be sent at once, and wait for no reply."""
        _Round(self.instances, requests, self._timeout, self._clock).end()

    def close(self) -> None:
        """Close the idle connections."""
        for instance in self.instances:
            instance.close()

    def _read_timeout(self) -> float:
        self._timeout = max(instance.timeout() for instance in self.instances)
        return self._timeout


class _Round:
    """One request to each instance, from sending to the last reply that is waited for."""

    __slots__ = (
        "_arrivals",
        "_clock",
        "_connecting",
        "_instances",
        "_links",
        "_missing",
        "_poll",
        "_requests",
        "_sent_at",
        "_tries",
        "_until",
        "_waker",
        "replies",
    )

    def __init__(
        self,
        instances: Sequence[Instance],
        requests: Sequence[Request | None],
        timeout: float,
        clock: Clock,
    ) -> None:
        self.replies: list[Reply | None] = [None] * len(instances)
        self._instances = instances
        self._requests = requests
        self._clock = clock
        self._sent_at = clock.monotonic()
        self._until = self._sent_at + timeout
        self._poll = select.poll()
        # By file descriptor: the instance's position and the connection.
        self._links: dict[int, tuple[int, _Link]] = {}
        self._tries = [0] * len(instances)
        self._missing = 0
        self._connecting: set[int] = set()
        self._arrivals: collections.deque[tuple[int, _Link | Exception]] = collections.deque()
        self._waker = -1
        for position, request in enumerate(requests):
            if request is not None:
                self._missing += 1
                link = instances[position].take(self._sent_at, timeout)
                if link is None:
                    self._start_connecting(position)
                else:
                    self._send(position, link)

    def run(self, judge: Judge) -> None:
        """Read the replies until all are there, or as many as ``judge`` waits for."""
        until = self._until
        patience = Patience.TIMEOUT
        while self._missing:
            now = self._clock.monotonic()
            if now >= until:
                return
            for fileno, events in self._poll.poll((until - now) * 1000):
                self._advance(fileno, events)
            if patience is Patience.TIMEOUT and self._missing:
                patience = judge(self.replies)
                # What has no connection yet was not even asked.
                if patience is Patience.NONE and not self._connecting:
                    return
                if patience is not Patience.TIMEOUT:
                    now = self._clock.monotonic()
                    until = min(until, now + max(_GRACE_SECONDS, now - self._sent_at))

    def end(self) -> None:
        """Give back the connections; instances that are missing get a TimeoutError."""
        for fileno in list(self._links):
            position, link = self._links.pop(fileno)
            self.replies[position] = redis.TimeoutError("no answer in time")
            self._keep(position, link)
        for position in self._connecting:
            self.replies[position] = redis.TimeoutError("no connection in time")
        if self._waker >= 0:
            # Of all instances: a thread may be inside hand(), about to write to the waker.
            for instance in self._instances:
                instance.forget(self)
            # What was handed over too late to be used.
            for position, opened in self._arrivals:
                if isinstance(opened, _Link):
                    self._instances[position].put(opened)
            os.close(self._waker)

    def hand(self, position: int, opened: _Link | Exception) -> None:
        """Take a new connection, or why there is none; called by the connecting thread."""
        self._arrivals.append((position, opened))
        os.eventfd_write(self._waker, 1)

    def _start_connecting(self, position: int) -> None:
        if self._waker < 0:
            self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._poll.register(self._waker, select.POLLIN)
        self._connecting.add(position)
        self._instances[position].connect(self, position)

    def _send(self, position: int, link: _Link, *, spelled_out: bool = False) -> None:
        request = self._requests[position]
        assert request is not None  # noqa: S101
        self._tries[position] += 1
        try:
            link.send(request.spelled_out() if spelled_out else request.packed, request.count)
        except OSError as error:
            self._fail(position, link, error)
            return
        self._links[link.fileno] = (position, link)
        self._poll.register(link.fileno, _events(link))

    def _advance(self, fileno: int, events: int) -> None:
        if fileno == self._waker:
            self._use_arrivals()
            return
        position, link = self._links[fileno]
        try:
            if link.unsent and events & select.POLLOUT:
                link.flush()
                self._poll.modify(fileno, _events(link))
            if not events & ~select.POLLOUT or not link.read():
                return
        except (redis.RedisError, OSError) as error:
            self._drop(fileno)
            self._fail(position, link, error)
            return
        self._drop(fileno)
        self._finish(position, link)

    def _finish(self, position: int, link: _Link) -> None:
        failures = [reply for reply in link.replies if isinstance(reply, Exception)]
        if failures and self._tries[position] < 3 and _is_unknown(failures):
            self._send(position, link, spelled_out=True)
            return
        self._answer(position, failures[0] if failures else link.replies)
        self._keep(position, link)

    def _fail(self, position: int, link: _Link, error: Exception) -> None:
        instance = self._instances[position]
        link.close()
        # The server restarted or closed idle connections, so the others are dead as well.
        instance.close()
        if self._tries[position] < 2:
            self._start_connecting(position)
        else:
            self._answer(position, error)

    def _use_arrivals(self) -> None:
        os.eventfd_read(self._waker)
        while self._arrivals:
            position, opened = self._arrivals.popleft()
            self._connecting.discard(position)
            if isinstance(opened, _Link):
                self._send(position, opened)
            else:
                self._answer(position, opened)

    def _answer(self, position: int, reply: Reply) -> None:
        self.replies[position] = reply
        self._missing -= 1

    def _keep(self, position: int, link: _Link) -> None:
        if link.leave(self._sent_at):
            self._instances[position].put(link)
        else:
            link.close()

    def _drop(self, fileno: int) -> None:
        self._poll.unregister(fileno)
        del self._links[fileno]


def _is_unknown(failures: Sequence[Exception]) -> bool:
    return any(isinstance(failure, NoScriptError) for failure in failures)


def _events(link: _Link) -> int:
    return select.POLLIN | select.POLLOUT if link.unsent else select.POLLIN
