"""Lock files in a folder that the users of one group share.

As root the processes are two users who have nothing but the group in common. Without root
nobody can become another user; then both are this one, which is a member of its own group.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distcron_app.errors import LockUnavailable
from distcron_app.locks.file import FileLockBackend, directory_problem
from tests.contracts.lock_contract import spawn_node, take
from tests.services import wait_for

IS_ROOT = os.geteuid() == 0
GROUP = 61_234 if IS_ROOT else os.getgid()
USERS = ((65_534, GROUP), (61_235, GROUP)) if IS_ROOT else ((os.getuid(), GROUP),) * 2
STRANGER = (61_236, 61_236)
# Takes everything from the group and the others.
PRIVATE_UMASK = 0o077


@pytest.fixture
def folder() -> Iterator[Path]:
    """A shared folder that every user can reach, unlike the ones of pytest."""
    parent = Path(tempfile.mkdtemp(prefix="distcron-shared-"))
    parent.chmod(0o755)
    folder = parent / "locks"
    folder.mkdir()
    os.chown(folder, -1, GROUP)
    folder.chmod(0o2770)
    yield folder
    shutil.rmtree(parent)


@pytest.fixture
def spawn(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start processes of a user; those that are left are killed after the test."""
    nodes: list[subprocess.Popen[str]] = []

    def start(user: tuple[int, int], **given: object) -> subprocess.Popen[str]:
        locks = {"LOCK_BACKEND": "file", "LOCK_DIRECTORY": str(folder)}
        settings = {"USE_I18N": False, "DISTCRON": locks}
        nodes.append(spawn_node(settings=settings, user=user, umask=PRIVATE_UMASK, **given))
        return nodes[-1]

    yield start
    for node in nodes:
        node.kill()
        node.communicate()


def answer(node: subprocess.Popen[str]) -> str:
    assert node.stdout is not None
    return node.stdout.readline().strip()


def test_users_of_the_group_exclude_each_other(folder, spawn):
    first = spawn(USERS[0], hold="schedule:1")
    assert answer(first) == "held"
    assert answer(spawn(USERS[1], hold="schedule:1")) == "busy"
    first.communicate()
    assert answer(spawn(USERS[1], hold="schedule:1")) == "held"


def test_two_users_lose_no_increment(folder, spawn):
    counter = folder.parent / "counter"
    counter.write_text("0")
    counter.chmod(0o666)
    nodes = [spawn(user, counter=str(counter), times=150) for user in (*USERS, *USERS)]
    for node in nodes:
        node.communicate(timeout=60)
    assert [node.returncode for node in nodes] == [0, 0, 0, 0]
    assert counter.read_text() == "600"
    assert os.listdir(folder) == []


def test_file_belongs_to_the_group_whatever_the_umask(folder, spawn):
    assert answer(spawn(USERS[0], hold="schedule:1")) == "held"
    found = (folder / "schedule:1.lock").stat()
    assert (found.st_uid, found.st_gid) == (USERS[0][0], GROUP)
    assert stat.S_IMODE(found.st_mode) == 0o660
    assert os.listdir(folder) == ["schedule:1.lock"]


def test_lock_of_another_users_dead_process_is_free(folder, spawn):
    first = spawn(USERS[0], hold="schedule:1")
    assert answer(first) == "held"
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert os.listdir(folder) == ["schedule:1.lock"]
    second = spawn(USERS[1], hold="schedule:1")
    assert answer(second) == "held"
    second.communicate()
    wait_for(lambda: second.poll() == 0, what="the end of the second user's process")
    (folder / "schedule:1.lock").unlink()


def test_listing_deletes_what_dead_makers_left(folder):
    (folder / "schedule:1.lock.0123456789abcdef.new").touch()
    (folder / "schedule:2.lock").touch()
    assert FileLockBackend(str(folder)).held() == []
    assert os.listdir(folder) == []


def test_root_and_the_users_exclude_each_other(folder, spawn):
    # Without root this process is of the same user as the other one.
    backend = FileLockBackend(str(folder), note="node-a")
    won = take(backend, "schedule:1")
    assert answer(spawn(USERS[0], hold="schedule:1")) == "busy"
    backend.release(won.values())
    holder = spawn(USERS[0], hold="schedule:1")
    assert answer(holder) == "held"
    assert take(backend, "schedule:1") == {}


def test_process_outside_the_group_is_refused(folder, spawn):
    folder.chmod(0o2775)
    said = answer(spawn(STRANGER if IS_ROOT else USERS[0], hold="schedule:1"))
    if IS_ROOT:
        assert "and this process of user id 61236 is no member of it; add the user" in said
        assert os.listdir(folder) == []
    else:
        # The only user there is is a member.
        assert said == "held"


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        (0o777, "can be written by everyone, mode 777"),
        (0o1777, "can be written by everyone, mode 1777"),
        (0o2777, "can be written by everyone, mode 2777"),
        (0o770, "mode 770: shared it needs the setgid bit"),
        (0o3770, "no sticky bit; use 2770"),
    ],
)
def test_mode_that_is_not_safe_is_refused(folder, mode, problem):
    folder.chmod(mode)
    with pytest.raises(LockUnavailable, match=problem):
        take(FileLockBackend(str(folder)), "schedule:1")
    assert os.listdir(folder) == []


@pytest.mark.parametrize("mode", [0o2770, 0o2775])
def test_shared_folder_is_no_problem(folder, mode):
    folder.chmod(mode)
    assert directory_problem(str(folder)) is None


def test_folder_of_a_stranger_to_the_group_is_refused(folder, spawn):
    if IS_ROOT:
        os.chown(folder, STRANGER[0], GROUP)
    said = answer(spawn(USERS[0], hold="schedule:1"))
    if IS_ROOT:
        assert "belongs to user id 61236, who is no member of its group id 61234" in said
    else:
        # Nobody but root can give a folder away, so it is this user's.
        assert said == "held"


def test_planted_symbolic_link_is_refused(folder, tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    (folder / "schedule:1.lock").symlink_to(target)
    with pytest.raises(LockUnavailable, match="symbolic links"):
        take(FileLockBackend(str(folder)), "schedule:1")
    assert target.read_text() == "precious"


def test_planted_hard_link_to_a_file_of_another_group_is_refused(folder):
    target = folder.parent / "target"
    target.write_text("precious")
    if IS_ROOT:
        os.link(target, folder / "schedule:1.lock")
        with pytest.raises(LockUnavailable, match="not a lock file of the folder's group"):
            take(FileLockBackend(str(folder)), "schedule:1")
    else:
        (folder / "schedule:1.lock").mkdir()
        with pytest.raises(LockUnavailable, match="Is a directory"):
            take(FileLockBackend(str(folder)), "schedule:1")
    assert target.read_text() == "precious"
