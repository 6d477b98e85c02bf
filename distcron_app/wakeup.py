"""Tells all nodes to look again now, through Redis where the locks are there.

Only a shortcut: nodes look by themselves every ``POLL_SECONDS``, so a message that is
lost, or a Redis that is away, delays an edit or a manual run and loses nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import redis
from django_redis import get_redis_connection
from redis.exceptions import RedisClusterException

from distcron_app.conf import Config, get_config

__all__ = ["Listener", "announce"]

logger = logging.getLogger("distcron.wakeup")

# Shorter than any sensible socket timeout, which would end the wait with an error.
_WAIT_SECONDS = 0.2
_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 5.0
_AWAY = (redis.RedisError, RedisClusterException, OSError)


def announce() -> None:
    """Ask all nodes to look again now; never raise because Redis is away.

    Blocks for one socket timeout at most, while Redis hangs.
    """
    config = get_config()
    if config.effective_lock_backend != "redis":
        return
    try:
        get_redis_connection(config.redis_alias).publish(_channel(config), b"1")
    except _AWAY as error:
        logger.info("wakeup_not_sent cause=%r", str(error))


class Listener:
    """Calls ``on_wakeup`` in a thread of its own at each announcement.

    Also after each reconnect, since announcements may have passed meanwhile. ``ready`` is
    set while it is subscribed. Without Redis it does nothing.
    """

    def __init__(self, on_wakeup: Callable[[], None]) -> None:
        self.ready = threading.Event()
        self._on_wakeup = on_wakeup
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, where the locks are in Redis."""
        config = get_config()
        if config.effective_lock_backend != "redis":
            return
        self._thread = threading.Thread(
            target=self._run, args=(config,), name="distcron-wakeup", daemon=True
        )
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End the thread and wait for it, ``timeout`` seconds at most."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self, config: Config) -> None:
        backoff_seconds = 0.0
        while not self._stopping.wait(backoff_seconds):
            try:
                self._listen(config, is_first=backoff_seconds == 0.0)
            except _AWAY as error:
                # A link that had worked starts again with the shortest pause.
                was_ready = self.ready.is_set()
                backoff_seconds = _next_backoff(0.0 if was_ready else backoff_seconds)
                logger.info("wakeup_disconnected cause=%r", str(error))
            finally:
                self.ready.clear()

    def _listen(self, config: Config, *, is_first: bool) -> None:
        with get_redis_connection(config.redis_alias).pubsub() as subscription:
            subscription.subscribe(_channel(config))
            while not self._stopping.is_set():
                message = subscription.get_message(timeout=_WAIT_SECONDS)
                if message is not None:
                    self._handle(message, is_first=is_first)

    def _handle(self, message: dict[str, Any], *, is_first: bool) -> None:
        if message["type"] == "subscribe":
            self.ready.set()
            if is_first:
                return
        elif message["type"] != "message":
            return
        try:
            self._on_wakeup()
        except Exception:
            # The edge of this thread: a failing callback must not end later wake-ups.
            logger.exception("wakeup_failed")


def _channel(config: Config) -> str:
    # The hash tag of the locks: in a Cluster it is heard of wherever they work, and the
    # locks' own traffic finds the next server of the slot.
    return f"{{{config.namespace}:lock}}-wakeup"


def _next_backoff(seconds: float) -> float:
    return min(max(seconds * 2, _FIRST_BACKOFF_SECONDS), _LONGEST_BACKOFF_SECONDS)
