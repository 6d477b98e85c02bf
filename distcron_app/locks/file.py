"""Locks between the processes of one machine, by ``flock`` on one file per name.

The kernel frees a lock when its holder's process ends, however it ends, so there is no
stale lock. Within the holder the TTL is honoured: an expired lease cannot be renewed,
and the holder's next call frees it. Until then the lock stays held: a paused process
keeps its locks for as long as it lives. That is stricter than Redis, and safe.

Needs a folder on a local disk that nobody else can write to, and one open file for
each lock that is held.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import stat
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks.base import Lease, LockBackend, LockInfo, checked_ttl

__all__ = ["FileLockBackend", "directory_problem"]

_SUFFIX = ".lock"
# Each further try needs another process to release and delete the file in between.
_ATTEMPTS = 5
# flock on these is missing, emulated, or per machine.
_NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "glusterfs", "fuse.sshfs")


@dataclasses.dataclass(slots=True)
class _Held:
    lease: Lease
    fd: int


class FileLockBackend(LockBackend):
    """Locks as files in ``directory``, which is made with mode 0700 when it is missing."""

    name = "file"

    def __init__(self, directory: str, *, note: str = "", clock: Clock | None = None) -> None:
        self._directory = directory
        self._note = note
        self._clock = clock or Clock()
        self._held: dict[str, _Held] = {}
        self._mutex = threading.Lock()
        _instances.add(self)

    def acquire(self, wanted: Mapping[str, str], ttl_ms: int) -> dict[str, Lease]:
        """Take the free locks, as ``LockBackend.acquire`` promises."""
        expires_at = self._clock.monotonic() + checked_ttl(ttl_ms) / 1000
        won: dict[str, Lease] = {}
        with self._answering():
            _prepare_directory(self._directory)
            try:
                for name, token in wanted.items():
                    lease = Lease(name=name, owner_token=token, expires_at=expires_at)
                    if self._take(lease):
                        won[name] = lease
            except OSError:
                self._release(won.values())
                raise
        return won

    def renew(self, leases: Collection[Lease], ttl_ms: int) -> dict[str, Lease]:
        """Extend the leases that have not expired and whose file is still in its place."""
        expires_at = self._clock.monotonic() + checked_ttl(ttl_ms) / 1000
        with self._answering():
            renewed = [
                dataclasses.replace(lease, expires_at=expires_at)
                for lease in leases
                if self._is_ours(lease)
            ]
            for lease in renewed:
                self._record(lease, self._held[lease.name].fd)
        return {lease.name: lease for lease in renewed}

    def release(self, leases: Collection[Lease]) -> set[str]:
        """Delete the files of the leases that are still ours."""
        with self._answering():
            return self._release(leases)

    def inspect(self, names: Collection[str]) -> dict[str, LockInfo]:
        """Return the holders of those names that are held; delete files of dead holders."""
        with self._answering():
            found = ((name, self._look(name)) for name in names)
            return {name: info for name, info in found if info is not None}

    def held(self) -> list[LockInfo]:
        """Return all held locks of the folder."""
        with self._answering():
            try:
                files = os.listdir(self._directory)
            except FileNotFoundError:
                files = []
        names = sorted(
            unquote(file.removesuffix(_SUFFIX)) for file in files if file.endswith(_SUFFIX)
        )
        return list(self.inspect(names).values())

    def force_release(self, name: str) -> bool:
        """Delete the file of ``name``; its holder notices when it renews."""
        with self._answering():
            if self._look(name) is None:
                return False
            if name in self._held:
                self._drop(name)
            else:
                os.unlink(self._path(name))
            return True

    def ping(self) -> float:
        """Return the seconds of one check of the folder."""
        started = self._clock.monotonic()
        with self._answering():
            _prepare_directory(self._directory)
        return self._clock.monotonic() - started

    def close(self) -> None:
        """Release everything that this object holds."""
        with self._answering():
            for name in list(self._held):
                self._drop(name)

    def forget_inherited(self) -> None:
        """Close a forked child's copies of the files; the parent keeps its locks."""
        self._mutex = threading.Lock()
        for held in self._held.values():
            os.close(held.fd)
        self._held.clear()

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, quote(name, safe=":") + _SUFFIX)

    def _take(self, lease: Lease) -> bool:
        if lease.name in self._held:
            if not self._is_ours(lease):
                return False
            self._record(lease, self._held[lease.name].fd)
            return True
        fd = _open_locked(self._path(lease.name))
        if fd is None:
            return False
        self._held[lease.name] = _Held(lease, fd)
        try:
            self._record(lease, fd)
        except OSError:
            self._drop(lease.name)
            raise
        return True

    def _record(self, lease: Lease, fd: int) -> None:
        content = json.dumps(
            {"owner": lease.owner_token, "note": self._note, "expires_at": lease.expires_at}
        ).encode()
        os.pwrite(fd, content, 0)
        os.ftruncate(fd, len(content))
        self._held[lease.name].lease = lease

    def _is_ours(self, lease: Lease) -> bool:
        held = self._held.get(lease.name)
        if held is None or held.lease.owner_token != lease.owner_token:
            return False
        if _is_in_place(held.fd, self._path(lease.name)):
            return True
        # Force-released: the name may already belong to the holder of a new file.
        self._drop(lease.name)
        return False

    def _release(self, leases: Collection[Lease]) -> set[str]:
        ours = {lease.name for lease in leases if self._is_ours(lease)}
        for name in ours:
            self._drop(name)
        return ours

    def _drop(self, name: str) -> None:
        held = self._held.pop(name)
        try:
            # Deleted before it is unlocked: afterwards it may be another holder's file.
            if _is_in_place(held.fd, self._path(name)):
                os.unlink(self._path(name))
        finally:
            os.close(held.fd)

    def _look(self, name: str) -> LockInfo | None:
        path = self._path(name)
        if name not in self._held and not _is_locked(path):
            return None
        try:
            with open(path, "rb") as file:
                content = _parsed(file.read())
        except FileNotFoundError:
            return None
        expires_at = content.get("expires_at")
        left = None if expires_at is None else expires_at - self._clock.monotonic()
        return LockInfo(
            name=name,
            owner_token=content.get("owner"),
            note=content.get("note", ""),
            ttl_ms=None if left is None else max(0, round(left * 1000)),
        )

    def _sweep(self) -> None:
        now = self._clock.monotonic()
        for name in [name for name, held in self._held.items() if held.lease.expires_at <= now]:
            self._drop(name)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            with self._mutex:
                self._sweep()
                yield
        except OSError as error:
            raise LockUnavailable(self.name, str(error)) from error


_instances: weakref.WeakSet[FileLockBackend] = weakref.WeakSet()


def directory_problem(path: str) -> str | None:
    """Return why the folder ``path`` cannot carry locks, or None; missing is no problem."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is not a folder"
    if found.st_uid != os.geteuid():
        return f"{path} belongs to user id {found.st_uid}, this process is {os.geteuid()}"
    if found.st_mode & 0o022:
        return f"{path} can be written by others, mode {found.st_mode & 0o777:o}; use 700"
    kind = _filesystem(path)
    if kind.startswith(_NETWORK_FILESYSTEMS):
        return f"{path} is on the network file system {kind}; use a local disk"
    return None


def _prepare_directory(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.makedirs(path, mode=0o700)
    problem = directory_problem(path)
    if problem:
        raise LockUnavailable(FileLockBackend.name, problem)


def _filesystem(path: str) -> str:
    """Return the type of the file system under ``path``, empty where it cannot be told."""
    real = os.path.realpath(path)
    best = ("", "")
    with contextlib.suppress(FileNotFoundError), open("/proc/self/mounts") as mounts:
        for line in mounts:
            _, point, kind, *_ = line.split(" ")
            if os.path.commonpath([point, real]) == point and len(point) >= len(best[0]):
                best = (point, kind)
    return best[1]


def _open_locked(path: str) -> int | None:
    """Return an open file that this process has locked, or None when somebody else has."""
    for _ in range(_ATTEMPTS):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its holder may have deleted the file between open and flock.
            if _is_in_place(fd, path):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    return None


def _is_in_place(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _is_locked(path: str) -> bool:
    """Tell whether a living process holds the file; delete what a dead one left behind."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_in_place(fd, path):
            os.unlink(path)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _parsed(content: bytes) -> dict[str, Any]:
    # The holder may be writing at this moment.
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _forget_inherited() -> None:
    for backend in list(_instances):
        backend.forget_inherited()


os.register_at_fork(after_in_child=_forget_inherited)
