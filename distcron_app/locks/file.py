"""Locks between the processes of one machine, by ``flock`` on one file per name.

The kernel frees a lock when its holder's process ends, however it ends, so there is no
stale lock. Within the holder the TTL is honoured: an expired lease cannot be renewed,
and the holder's next call frees it. Until then the lock stays held: a paused process
keeps its locks for as long as it lives. That is stricter than Redis, and safe.

Needs a folder on a local disk, and one open file for each lock that is held. The folder
is private (mode 700, made when it is missing), or shared by the users of one group: made
beforehand with mode 2770, owned by root or a member. Whoever may write to it is trusted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import grp
import hashlib
import json
import os
import pwd
import secrets
import stat
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from django.utils.translation import gettext as _

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks.base import Lease, LockBackend, LockInfo, checked_ttl

__all__ = ["FileLockBackend", "directory_problem"]

_SUFFIX = ".lock"
# A file of a shared folder before it has its mode, its lock and its name.
_UNFINISHED_SUFFIX = ".new"
# Longest file name of Linux' file systems in bytes, less both suffixes and 16 random digits.
_STEM_LENGTH = 255 - 32
# Between the beginning of a name that is too long and its hash; quote() never writes it.
_HASHED = "%%"
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
# Each further try needs another process to release and delete the file in between.
_ATTEMPTS = 5
# flock on these is missing, emulated, or per machine.
_NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "glusterfs", "fuse.sshfs")


@dataclasses.dataclass(slots=True, kw_only=True)
class _Held:
    lease: Lease
    fd: int
    since: float
    granted_ms: int
    renewals: int = 0

    def record(self, note: str) -> None:
        """Write into the file what other processes may want to know."""
        content = json.dumps(
            {
                "name": self.lease.name,
                "owner": self.lease.owner_token,
                "note": note,
                "expires_at": self.lease.expires_at,
                "granted_ms": self.granted_ms,
                "since": self.since,
                "renewals": self.renewals,
            }
        ).encode()
        os.pwrite(self.fd, content, 0)
        os.ftruncate(self.fd, len(content))


class FileLockBackend(LockBackend):
    """Locks as files in ``directory``, which is made with mode 700 when it is missing."""

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
            group = _prepare_directory(self._directory)
            try:
                for name, token in wanted.items():
                    lease = Lease(name=name, owner_token=token, expires_at=expires_at)
                    if self._take(lease, ttl_ms, group=group):
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
                self._held[lease.name].renewals += 1
                self._extend(lease, ttl_ms)
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
            for file in files:
                if file.endswith(_UNFINISHED_SUFFIX):
                    _is_locked(os.path.join(self._directory, file))
            names = sorted(
                self._name(file.removesuffix(_SUFFIX)) for file in files if file.endswith(_SUFFIX)
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
        stem = quote(name, safe=":")
        if len(stem) > _STEM_LENGTH:
            digest = hashlib.sha256(name.encode()).hexdigest()
            stem = f"{stem[: _STEM_LENGTH - len(digest) - len(_HASHED)]}{_HASHED}{digest}"
        return os.path.join(self._directory, stem + _SUFFIX)

    def _name(self, stem: str) -> str:
        """Return the name of the lock whose file is called so."""
        if _HASHED not in stem:
            return unquote(stem)
        content = _read(os.path.join(self._directory, stem + _SUFFIX)) or {}
        return str(content.get("name", stem))

    def _take(self, lease: Lease, ttl_ms: int, *, group: int | None) -> bool:
        if lease.name in self._held:
            if not self._is_ours(lease):
                return False
            self._extend(lease, ttl_ms)
            return True
        fd = _open_locked(self._path(lease.name), group)
        if fd is None:
            return False
        since = self._clock.monotonic()
        self._held[lease.name] = _Held(lease=lease, fd=fd, since=since, granted_ms=ttl_ms)
        try:
            self._held[lease.name].record(self._note)
        except OSError:
            self._drop(lease.name)
            raise
        return True

    def _extend(self, lease: Lease, ttl_ms: int) -> None:
        held = self._held[lease.name]
        held.lease, held.granted_ms = lease, ttl_ms
        held.record(self._note)

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
        content = _read(path)
        if content is None:
            return None
        now = self._clock.monotonic()
        return LockInfo(
            name=name,
            owner_token=content.get("owner"),
            note=content.get("note", ""),
            ttl_ms=_milliseconds(content.get("expires_at"), now),
            granted_ms=content.get("granted_ms"),
            age_ms=_milliseconds(now, content.get("since")),
            renewals=content.get("renewals"),
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
    facts = {"path": path, "mode": f"{stat.S_IMODE(found.st_mode):o}", "kind": _filesystem(path)}
    if not stat.S_ISDIR(found.st_mode):
        return _("%(path)s is not a folder") % facts
    if found.st_mode & stat.S_IWOTH:
        return (
            _(
                "%(path)s can be written by everyone, mode %(mode)s: a stranger could plant or "
                "hold the file of a lock, and a sticky bit would keep the users from each "
                "other's files (fs.protected_regular); use 700 for one user, 2770 for the users "
                "of one group"
            )
            % facts
        )
    problem = _shared_problem(path, found) if _is_shared(found) else _private_problem(path, found)
    if problem:
        return problem
    if facts["kind"].startswith(_NETWORK_FILESYSTEMS):
        return _("%(path)s is on the network file system %(kind)s; use a local disk") % facts
    return None


def _is_shared(found: os.stat_result) -> bool:
    return bool(found.st_mode & stat.S_IWGRP)


def _private_problem(path: str, found: os.stat_result) -> str:
    if found.st_uid == os.geteuid():
        return ""
    return _(
        "%(path)s belongs to user id %(owner)d, this process is %(user)d; to share it give it a "
        "group of both and mode 2770"
    ) % {"path": path, "owner": found.st_uid, "user": os.geteuid()}


def _shared_problem(path: str, found: os.stat_result) -> str:
    facts = {
        "path": path,
        "mode": f"{stat.S_IMODE(found.st_mode):o}",
        "user": os.geteuid(),
        "owner": found.st_uid,
        "group": found.st_gid,
    }
    if stat.S_IMODE(found.st_mode) & (stat.S_ISGID | stat.S_ISVTX) != stat.S_ISGID:
        return (
            _(
                "%(path)s can be written by its group, mode %(mode)s: shared it needs the setgid "
                "bit, so that its files belong to the group, and no sticky bit; use 2770"
            )
            % facts
        )
    # Root can use the files of any group, and the ones that it makes get this group.
    if os.geteuid() != 0 and found.st_gid not in (os.getegid(), *os.getgroups()):
        return (
            _(
                "%(path)s is shared by group id %(group)d, and this process of user id %(user)d "
                "is no member of it; add the user to the group, and start the process anew"
            )
            % facts
        )
    if found.st_uid not in (0, os.geteuid()) and not _is_member(found.st_uid, found.st_gid):
        return (
            _(
                "%(path)s belongs to user id %(owner)d, who is no member of its group id "
                "%(group)d; give it to root"
            )
            % facts
        )
    return ""


@functools.lru_cache(maxsize=16)
def _is_member(user: int, group: int) -> bool:
    try:
        known = pwd.getpwuid(user)
        return known.pw_gid == group or known.pw_name in grp.getgrgid(group).gr_mem
    except KeyError:
        return False


def _prepare_directory(path: str) -> int | None:
    """Return the group that shares the folder, None for a private one, which is made."""
    with contextlib.suppress(FileExistsError):
        os.makedirs(path, mode=0o700)
    problem = directory_problem(path)
    if problem:
        raise LockUnavailable(FileLockBackend.name, problem)
    found = os.lstat(path)
    return found.st_gid if _is_shared(found) else None


def _filesystem(path: str) -> str:
    """Return the type of the file system under ``path``, empty where it cannot be told."""
    real = os.path.realpath(path)
    best = ("", "")
    with contextlib.suppress(FileNotFoundError), open("/proc/self/mounts") as mounts:
        for line in mounts:
            _device, point, kind, *_rest = line.split(" ")
            if os.path.commonpath([point, real]) == point and len(point) >= len(best[0]):
                best = (point, kind)
    return best[1]


def _open_locked(path: str, group: int | None) -> int | None:
    """Return an open file that this process has locked, or None when somebody else has.

    ``group`` is the group that shares the folder, None for a private one.
    """
    for _attempt in range(_ATTEMPTS):
        fd = _open_private(path) if group is None else _open_shared(path, group)
        if fd is None:
            continue
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


def _open_private(path: str) -> int:
    return os.open(path, _OPEN_FLAGS | os.O_CREAT, 0o600)


def _open_shared(path: str, group: int) -> int | None:
    """Return the open file, made where it is missing; None when another process interfered."""
    try:
        fd = os.open(path, _OPEN_FLAGS)
    except FileNotFoundError:
        return _make_shared(path)
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_gid == group:
        return fd
    os.close(fd)
    # A hard link to a file of another place would be overwritten with the lock's facts.
    raise PermissionError(errno.EPERM, _("not a lock file of the folder's group"), path)


def _make_shared(path: str) -> int | None:
    # The file gets its name last: with the mode that the umask took away, the others of the
    # group could not even look whether its maker is alive.
    unfinished = f"{path}.{secrets.token_hex(8)}{_UNFINISHED_SUFFIX}"
    fd = os.open(unfinished, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o660)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(fd, 0o660)
        os.link(unfinished, path)
    except (FileExistsError, FileNotFoundError, BlockingIOError):
        # Another process made it first, or took this one for a dead process' and deleted it.
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
    return fd


def _is_in_place(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _is_locked(path: str) -> bool:
    """Tell whether a living process holds the file; delete what a dead one left behind."""
    try:
        fd = os.open(path, _OPEN_FLAGS)
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


def _read(path: str) -> dict[str, Any] | None:
    """Return what the holder wrote, None where the file is gone."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            value = json.loads(file.read())
    except FileNotFoundError:
        return None
    except ValueError:
        # The holder may be writing at this moment.
        return {}
    return value if isinstance(value, dict) else {}


def _milliseconds(end: float | None, start: float | None) -> int | None:
    """Return the time between two monotonic seconds; 0 where it would be negative."""
    if end is None or start is None:
        return None
    return max(0, round((end - start) * 1000))


def _forget_inherited() -> None:
    for backend in list(_instances):
        backend.forget_inherited()


os.register_at_fork(after_in_child=_forget_inherited)
