"""``lock()``: what it promises over each backend, and what happens when it is lost."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from distcron_app.clock import Clock
from distcron_app.errors import (
    ConfigurationError,
    LeaseLost,
    LockNotAcquired,
    LockUnavailable,
)
from distcron_app.locks import get_backend, lock, named_lock_name
from project.service_urls import cache_settings
from tests.contracts.conftest import LOCK_DATABASE
from tests.contracts.lock_contract import ROOT
from tests.contracts.named_holder import NAME, count_in_threads
from tests.services import tcp_proxy, wait_for

THREAD = "distcron-locks"


def renewers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def wait_until(seconds_from_now: float) -> None:
    end = Clock().monotonic() + seconds_from_now
    wait_for(lambda: Clock().monotonic() >= end, seconds_from_now + 5, "the time to pass")


def end_by_force(held: Any) -> None:
    """End the lock as an operator does."""
    assert held._backend.force_release(named_lock_name(held.name)) is True


def wait_until_lost(held: Any) -> None:
    wait_for(lambda: held.lost, what="the loss to be noticed")


def words(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage().split()[0]) for record in caplog.records]


def spawn(**given: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.contracts.named_holder", json.dumps(given)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class Reaction(logging.Handler):
    """Calls a function once, when a text is first logged: so a test acts in between."""

    def __init__(self, text: str, react: Any) -> None:
        super().__init__()
        self._text = text
        self._react = react
        self.happened = False

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage() and not self.happened:
            self.happened = True
            self._react()

    def __enter__(self) -> Reaction:
        logging.getLogger("distcron.locks").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("distcron.locks").removeHandler(self)


@pytest.fixture(autouse=True)
def program(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/srv/shop/manage.py", "export", "--token", "s3cret"])


@pytest.fixture(autouse=True)
def all_info(caplog):
    caplog.set_level(logging.INFO, "distcron.locks")
    yield
    wait_for(lambda: not renewers(), what="the end of the thread")


class NamedLockContract:
    def test_block_holds_the_lock_and_frees_it(self, locks):
        for _ in range(2):
            with lock(NAME, ttl=60) as held:
                assert (held.name, held.lost, held.cause) == (NAME, False, "")
                held.check()

    def test_taken_lock_names_its_holder_and_what_is_left(self, locks):
        with lock(NAME, ttl=60), pytest.raises(LockNotAcquired) as caught, lock(NAME):
            raise AssertionError("two inside")
        error = caught.value
        assert error.holder == f"node-a pid {os.getpid()} manage.py export"
        assert 50_000 < error.ttl_ms <= 60_000
        assert 0 <= error.age_ms < 5_000
        assert str(error).startswith(f"Lock 'export': held by {error.holder}, TTL left ")

    def test_program_is_what_people_see(self, locks):
        with (
            lock(NAME, program="pg_dump\n--all"),
            pytest.raises(LockNotAcquired) as caught,
            lock(NAME),
        ):
            raise AssertionError("two inside")
        assert caught.value.holder == f"node-a pid {os.getpid()} pg_dump --all"

    def test_other_names_are_free(self, locks):
        with lock(NAME), lock("import"), lock("EXPORT"), lock("export "):
            assert len(renewers()) == 1

    def test_object_is_used_again_and_by_one_block_at_a_time(self, locks):
        guard = lock(NAME)
        with guard:
            with pytest.raises(LockNotAcquired), guard:
                raise AssertionError("two inside")
            with pytest.raises(LockNotAcquired), lock(NAME):
                raise AssertionError("two inside")
        with guard:
            pass

    def test_waiting_ends_when_the_lock_is_free(self, locks):
        entered = threading.Event()

        def enter() -> None:
            with lock(NAME, wait=30):
                entered.set()

        with lock(NAME):
            thread = threading.Thread(target=enter)
            thread.start()
            assert not entered.wait(0.3)
        assert entered.wait(5)
        thread.join()

    def test_waiting_in_vain_ends_on_time(self, locks):
        with lock(NAME):
            started = Clock().monotonic()
            with pytest.raises(LockNotAcquired), lock(NAME, wait=0.4):
                raise AssertionError("two inside")
            assert 0.4 <= Clock().monotonic() - started < 2

    def test_error_of_the_block_passes_and_the_lock_is_free(self, locks):
        with pytest.raises(KeyError, match="body"), lock(NAME):
            raise KeyError("body")
        with lock(NAME):
            pass

    def test_block_may_end_in_another_thread(self, locks):
        guard = lock(NAME)
        guard.__enter__()
        thread = threading.Thread(target=guard.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        with lock(NAME):
            pass

    def test_lock_outlives_its_ttl_by_renewal(self, locks):
        with lock(NAME, ttl=1) as held:
            wait_until(1.6)
            held.check()
            with pytest.raises(LockNotAcquired), lock(NAME):
                raise AssertionError("two inside")

    def test_one_thread_renews_all(self, locks):
        with lock("one", ttl=1) as one, lock("two", ttl=1.5) as two, lock("three", ttl=60):
            wait_until(2)
            assert (one.lost, two.lost) == (False, False)
            assert len(renewers()) == 1

    def test_thread_ends_with_the_last_block(self, locks):
        with lock("one"):
            with lock("two"):
                pass
            assert len(renewers()) == 1
        wait_for(lambda: not renewers(), what="the end of the thread")

    def test_released_by_force_is_a_loss(self, locks, caplog):
        with lock(NAME, ttl=1) as held:
            end_by_force(held)
            wait_until_lost(held)
            with pytest.raises(LeaseLost, match="Lock 'export': lease lost, it ended in the"):
                held.check()
        assert words(caplog) == [
            (logging.WARNING, "lock_lost"),
            (logging.WARNING, "lock_left_after_loss"),
        ]

    def test_loss_hides_neither_result_nor_error(self, locks, caplog):
        @lock(NAME, ttl=1)
        def work(fails: bool) -> str:
            end_by_force(next(iter(_held())))
            if fails:
                raise KeyError("body")
            return "result"

        assert work(False) == "result"
        with pytest.raises(KeyError, match="body"):
            work(True)
        assert (
            words(caplog)
            == [
                (logging.WARNING, "lock_lost"),
                (logging.WARNING, "lock_left_after_loss"),
            ]
            * 2
        )

    def test_late_leaver_does_not_free_the_next_holder(self, locks):
        guard = lock(NAME, ttl=60)
        first = guard.__enter__()
        end_by_force(first)
        with lock(NAME, ttl=60) as second:
            assert first.lost
            guard.__exit__(None, None, None)
            with pytest.raises(LockNotAcquired), lock(NAME):
                raise AssertionError("two inside")
            second.check()

    def test_decorated_function_runs_under_the_lock(self, locks):
        @lock(NAME)
        def export(page: int, *, size: int = 10) -> tuple[int, int]:
            """Export one page."""
            with pytest.raises(LockNotAcquired), lock(NAME):
                raise AssertionError("two inside")
            return page, size

        assert (export(3, size=5), export(4)) == ((3, 5), (4, 10))
        assert (export.__name__, export.__doc__) == ("export", "Export one page.")

    def test_decorated_method_runs_under_the_lock(self, locks):
        class Exporter:
            @lock(NAME)
            def export(self) -> Exporter:
                return self

        exporter = Exporter()
        assert exporter.export() is exporter

    def test_decorated_call_raises_while_the_lock_is_taken(self, locks):
        export = lock(NAME)(lambda: "result")
        with lock(NAME), pytest.raises(LockNotAcquired):
            export()
        assert export() == "result"

    def test_decorated_call_is_skipped_where_it_is_asked_for(self, locks, caplog):
        export = lock(NAME, busy="skip")(lambda: "result")
        with lock(NAME):
            assert export() is None
        assert export() == "result"
        assert caplog.messages == [
            f"lock_busy name='export' holder='node-a pid {os.getpid()} manage.py export' skipped=1"
        ]

    def test_skipping_hides_no_other_busy_lock(self, locks):
        @lock(NAME, busy="skip")
        def export() -> None:
            with lock("inner"):
                raise AssertionError("two inside")

        with lock("inner"), pytest.raises(LockNotAcquired, match="'inner'"):
            export()

    def test_fifty_threads_lose_no_increment(self, locks, tmp_path):
        counter = tmp_path / "counter"
        counter.write_text("0")
        count_in_threads(counter, times=4, threads=50)
        assert counter.read_text() == "200"


def _held() -> list[Any]:
    from distcron_app.locks import named

    return list(named._renewer._guards)


class TestMemory(NamedLockContract):
    @pytest.fixture
    def locks(self, settings):
        settings.DISTCRON = {"LOCK_BACKEND": "memory", "NODE_NAME": "node-a"}


class SharedContract(NamedLockContract):
    """Of backends that other processes share."""

    @pytest.fixture
    def holder(self, node_settings):
        node = spawn(settings=node_settings, do="check", ttl=1)
        assert node.stdout.readline() == "held\n"
        yield node
        node.kill()
        node.communicate()

    def test_ten_processes_of_five_threads_lose_no_increment(self, locks, node_settings, tmp_path):
        counter = tmp_path / "counter"
        counter.write_text("0")
        given = {"do": "count", "counter": str(counter), "times": 3, "threads": 5}
        nodes = [spawn(settings=node_settings, **given) for _ in range(10)]
        for node in nodes:
            node.communicate(timeout=120)
        assert [node.returncode for node in nodes] == [0] * 10
        assert counter.read_text() == "150"

    def test_killed_process_frees_its_lock_by_the_ttl(self, locks, holder):
        with pytest.raises(LockNotAcquired, match=f"pid {holder.pid} named_holder.py"), lock(NAME):
            raise AssertionError("two inside")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with lock(NAME, wait=5):
            pass

    def test_process_paused_past_its_ttl_is_told(self, locks, holder):
        holder.send_signal(signal.SIGSTOP)
        wait_until(1.3)
        holder.send_signal(signal.SIGCONT)
        said, _ = holder.communicate("\n", timeout=10)
        assert said.startswith("Lock 'export': lease lost, not renewed for ")
        assert holder.returncode == 0

    def test_forked_child_holds_nothing_and_frees_nothing(self, locks, node_settings):
        node = spawn(settings=node_settings, do="fork", ttl=1)
        assert node.stdout.readline() == "held\n"
        wait_until(1.3)
        with pytest.raises(LockNotAcquired), lock(NAME):
            raise AssertionError("two inside")
        said, _ = node.communicate("\n", timeout=10)
        assert said.splitlines() == [
            "Lock 'export': lease lost, this process was forked inside the block. "
            "Stop as soon as it is safe.",
            "still held",
        ]
        with lock(NAME):
            pass


class TestFile(SharedContract):
    @pytest.fixture
    def node_settings(self, tmp_path):
        folder = str(tmp_path / "locks")
        return {
            "DISTCRON": {
                "LOCK_BACKEND": "file",
                "LOCK_DIRECTORY": folder,
                "NODE_NAME": "node-a",
            }
        }

    @pytest.fixture
    def locks(self, settings, node_settings):
        settings.DISTCRON = node_settings["DISTCRON"]


class TestRedis(SharedContract):
    @pytest.fixture
    def url(self, shared_redis):
        with shared_redis.client(LOCK_DATABASE) as client:
            client.flushdb()
        return shared_redis.url_of(LOCK_DATABASE)

    @pytest.fixture
    def node_settings(self, url):
        return {
            "CACHES": cache_settings(url),
            "DISTCRON": {"LOCK_BACKEND": "redis", "NODE_NAME": "node-a"},
        }

    @pytest.fixture
    def locks(self, use_redis, url):
        use_redis(url)

    def test_holder_is_shown_with_the_locks_of_schedules(self, locks):
        with lock(NAME, ttl=60):
            (info,) = get_backend().held()
        assert info.name == "name:export"
        assert info.note.startswith(f"node-a pid {os.getpid()} ")

    def test_next_holder_comes_in_while_the_first_is_paused(self, locks, holder):
        holder.send_signal(signal.SIGSTOP)
        with lock(NAME, ttl=60, wait=5) as held:
            holder.send_signal(signal.SIGCONT)
            said, _ = holder.communicate("\n", timeout=10)
            assert "lease lost" in said
            held.check()
            with pytest.raises(LockNotAcquired), lock(NAME):
                raise AssertionError("two inside")


class TestRedisFaults:
    @pytest.fixture
    def proxy(self, own_redis):
        with tcp_proxy(own_redis.port) as proxy:
            yield proxy

    @pytest.fixture(autouse=True)
    def locks(self, proxy, use_redis):
        use_redis(f"redis://127.0.0.1:{proxy.port}/{LOCK_DATABASE}")

    @pytest.fixture
    def key(self, own_redis):
        """Return what Redis has under the lock's key."""
        with own_redis.client(LOCK_DATABASE) as client:
            yield lambda: client.get("{distcron:lock}:name:export")

    def test_nobody_gets_in_while_redis_is_away(self, proxy):
        proxy.refuse()
        started = Clock().monotonic()
        with pytest.raises(LockUnavailable), lock(NAME, wait=30):
            raise AssertionError("inside without a lock")
        assert Clock().monotonic() - started < 2

    def test_fifty_threads_at_once_do_not_exhaust_the_connections(self, proxy):
        def enter(number: int) -> None:
            with lock(f"export {number}", ttl=60):
                done.append(number)

        done: list[int] = []
        proxy.delay_seconds = 0.1
        threads = [threading.Thread(target=enter, args=(number,)) for number in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(done) == list(range(50))

    def test_release_whose_reply_is_cut_releases(self, proxy, key):
        with lock(NAME, ttl=60):
            assert key()
            proxy.drop_next_reply(b"EVAL")
        assert proxy.dropped == 1
        assert key() is None

    def test_failed_release_is_asked_for_once_more(self, proxy, key, caplog):
        with Reaction("next='asked once more'", proxy.accept) as reaction:
            with lock(NAME, ttl=60):
                proxy.refuse()
            assert reaction.happened
        assert words(caplog) == [(logging.WARNING, "lock_release_failed")]
        assert key() is None

    def test_release_that_fails_twice_is_left_to_the_ttl(self, proxy, key, caplog):
        def work() -> str:
            with lock(NAME, ttl=60):
                proxy.refuse()
                return "result"

        assert work() == "result"
        releases = [text for text in caplog.messages if text.startswith("lock_release_failed")]
        assert len(releases) == 2
        assert "next='asked once more'" in releases[0]
        assert "next='free by its TTL in 5" in releases[1] or "in 60.0 s" in releases[1]
        assert key() is not None

    def test_failed_release_keeps_the_error_of_the_block(self, proxy):
        with pytest.raises(KeyError, match="body"), lock(NAME, ttl=60):
            proxy.refuse()
            raise KeyError("body")

    def test_renewal_that_failed_is_tried_again(self, proxy, key, caplog):
        reaction = Reaction("lock_renew_failed", proxy.accept)
        with reaction, lock(NAME, ttl=3) as held:
            proxy.refuse()
            end = held._lease.expires_at
            wait_for(lambda: reaction.happened, what="the renewal that fails")
            # Sooner than the next third of the TTL.
            wait_for(lambda: held._lease.expires_at > end, 0.8, "the renewal after it")
            wait_until(3)
            held.check()
            assert key()
        assert words(caplog) == [(logging.WARNING, "lock_renew_failed")]

    def test_lease_without_renewal_past_its_ttl_is_lost_and_the_result_stays(self, proxy, caplog):
        def work() -> str:
            with lock(NAME, ttl=1) as held:
                proxy.refuse()
                wait_until_lost(held)
                proxy.accept()
                with pytest.raises(LeaseLost, match=r"not renewed for 1\.\d s"):
                    held.check()
                return "result"

        assert work() == "result"
        assert words(caplog)[-1] == (logging.WARNING, "lock_left_after_loss")
        assert [word for _, word in words(caplog)].count("lock_lost") == 1

    def test_loss_is_noticed_without_being_asked_for(self, proxy):
        with Reaction("lock_lost", lambda: None) as reaction, lock(NAME, ttl=1):
            proxy.refuse()
            wait_for(lambda: reaction.happened, what="the loss to be logged")

    def test_failing_renewal_of_one_lock_does_not_stop_the_thread(self, proxy, settings, tmp_path):
        with lock(NAME, ttl=1) as lost:
            proxy.refuse()
            settings.DISTCRON = {"LOCK_BACKEND": "redis", "LOCK_LEVELS": {"local": ["memory"]}}
            with lock("local", ttl=1, level="local") as kept:
                wait_until_lost(lost)
                wait_until(1.5)
                kept.check()


class TestValues:
    @pytest.fixture(autouse=True)
    def locks(self, settings):
        settings.DISTCRON = {"LOCK_BACKEND": "memory", "LOCK_TTL_SECONDS": 7.0}

    @pytest.mark.parametrize("ttl", [0, 0.5, -1, 3601, float("nan"), float("inf")])
    def test_ttl_out_of_range_is_refused(self, ttl):
        with pytest.raises(ValueError, match=rf"Lock 'export': ttl is {ttl} s, allowed 1 to 3600"):
            lock(NAME, ttl=ttl)

    @pytest.mark.parametrize("wait", [-0.1, float("nan")])
    def test_wait_out_of_range_is_refused(self, wait):
        with pytest.raises(ValueError, match=f"wait is {wait} s, allowed 0 to inf"):
            lock(NAME, wait=wait)

    @pytest.mark.parametrize("value", ["60", True, None])
    def test_seconds_that_are_no_number_are_refused(self, value):
        with pytest.raises(TypeError, match="wait must be a number of seconds, got"):
            lock(NAME, wait=value)

    @pytest.mark.parametrize(
        ("name", "message"),
        [("", "got 0"), ("n" * 201, "got 201"), ("a\udcff", "is not valid Unicode")],
    )
    def test_name_that_cannot_be_used_is_refused(self, name, message):
        with pytest.raises(ValueError, match=message):
            lock(name)

    def test_name_that_is_no_text_is_refused(self):
        with pytest.raises(TypeError, match="Lock name: must be text, got 7"):
            lock(7)  # type: ignore[arg-type]

    def test_longest_name_is_accepted(self):
        with lock("ж" * 200):
            pass

    def test_ttl_is_that_of_the_settings_when_it_is_used(self, settings):
        export = lock(NAME)(lambda: next(iter(_held()))._ttl_ms)
        assert export() == 7000
        settings.DISTCRON = {"LOCK_BACKEND": "memory", "LOCK_TTL_SECONDS": 8.0}
        assert export() == 8000

    def test_unknown_level_is_refused_when_it_is_used(self):
        guard = lock(NAME, level="iron")
        with pytest.raises(ConfigurationError, match="Lock level 'iron': not known"), guard:
            raise AssertionError("inside")

    def test_backend_that_excludes_nobody_is_refused(self, settings):
        settings.DISTCRON = {"LOCK_BACKEND": "none"}
        with pytest.raises(ConfigurationError, match="'none' excludes nobody"), lock(NAME):
            raise AssertionError("inside")

    def test_unknown_choice_for_busy_is_refused(self):
        with pytest.raises(ValueError, match=r"busy is 'ignore'\. Use 'raise' or 'skip'"):
            lock(NAME, busy="ignore")  # type: ignore[arg-type]

    def test_block_cannot_be_skipped(self):
        with pytest.raises(TypeError, match="a block cannot be skipped"), lock(NAME, busy="skip"):
            raise AssertionError("inside")

    def test_function_whose_work_comes_later_is_refused(self):
        async def coroutine() -> None: ...

        def generator():
            yield

        async def async_generator():
            yield

        for function in (coroutine, generator, async_generator):
            with pytest.raises(TypeError, match=r"cannot decorate .*which is async or a generator"):
                lock(NAME)(function)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/srv/shop/manage.py", "export", "--token", "s3cret"], "manage.py export"),
        (["manage.py", "--settings=x", "export"], "manage.py"),
        (["/usr/bin/gunicorn", "shop.wsgi", "--bind"], "gunicorn"),
        (["/usr/lib/python3/site-packages/celery/__main__.py", "worker"], "celery"),
        (["-c"], "-c"),
        ([""], "python"),
        ([], "python"),
        (["/opt/" + "x" * 99], "x" * 60),
    ],
)
def test_program_is_named_without_its_arguments(monkeypatch, settings, argv, expected):
    settings.DISTCRON = {"LOCK_BACKEND": "memory", "NODE_NAME": "node-a"}
    monkeypatch.setattr(sys, "argv", argv)
    with lock(NAME), pytest.raises(LockNotAcquired) as caught, lock(NAME):
        raise AssertionError("two inside")
    assert caught.value.holder == f"node-a pid {os.getpid()} {expected}"
