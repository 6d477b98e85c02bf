"""Captured output: apart for each run, bounded, storable."""

from __future__ import annotations

import contextvars
import functools
import logging
import os
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from distcron_app import capture
from distcron_app.capture import OutputBuffer, captured


def routed(test):
    """Install the routers for the body of a test; pytest swaps the streams around fixtures."""

    @functools.wraps(test)
    def with_routers(capsys):
        capture.install()
        try:
            test(capsys)
        finally:
            capture.uninstall()

    return with_routers


def test_short_output_is_kept_as_it_is():
    buffer = OutputBuffer(100)
    buffer.write("one\n")
    buffer.write("two 👍🏽\n")
    assert buffer.text() == "one\ntwo 👍🏽\n"


def test_output_of_exactly_the_limit_is_not_cut():
    buffer = OutputBuffer(9)
    buffer.write("123456789")
    assert buffer.text() == "123456789"


def test_cut_output_keeps_both_ends_and_counts_the_rest():
    """OP-76."""
    buffer = OutputBuffer(10)
    buffer.write("aaaaa" + "b" * 90 + "ccccc")
    assert buffer.text() == "aaaaa\n[... 90 bytes cut ...]\nccccc"


def test_cut_moves_to_the_end_of_a_line():
    buffer = OutputBuffer(20)
    for number in range(10, 30):
        buffer.write(f"line {number}\n")
    assert buffer.text() == "line 10\n[... 144 bytes cut ...]\nline 29\n"


def test_cut_never_splits_a_character():
    buffer = OutputBuffer(10)
    buffer.write("😀" * 10)
    assert buffer.text() == "😀\n[... 32 bytes cut ...]\n😀"


def test_limit_of_zero_keeps_only_the_count():
    buffer = OutputBuffer(0)
    buffer.write("secret")
    assert buffer.text() == "[... 6 bytes cut ...]\n"


def test_nul_and_lone_surrogates_are_replaced():
    buffer = OutputBuffer(100)
    buffer.write("a\x00b\ud800c")
    assert buffer.text() == "a\ufffdb\ufffdc"


@given(st.lists(st.text(st.characters()), max_size=20), st.integers(0, 60))
def test_text_is_always_storable_and_bounded(parts, limit):
    buffer = OutputBuffer(limit)
    for part in parts:
        buffer.write(part)
    encoded = buffer.text().encode()
    assert b"\x00" not in encoded
    assert len(encoded) <= limit + len("\n[... 9999 bytes cut ...]\n")


def test_fifty_megabytes_stay_within_memory():
    buffer = OutputBuffer(262_144)
    line = "x" * 1023 + "\n"
    tracemalloc.start()
    for _ in range(50 * 1024):
        buffer.write(line)
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000
    assert buffer.total_bytes == 52_428_800
    assert buffer.text().count("bytes cut") == 1


def test_one_write_of_fifty_megabytes_makes_no_large_copy():
    buffer = OutputBuffer(262_144)
    text = "y" * 52_428_800
    tracemalloc.start()
    buffer.write(text)
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000


def test_many_tiny_writes_stay_within_memory():
    buffer = OutputBuffer(262_144)
    tracemalloc.start()
    for _ in range(600_000):
        buffer.write("z")
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000


@routed
def test_text_is_readable_while_the_run_writes(capsys):
    with captured(1000) as buffer:
        print("first")
        assert buffer.text() == "first\n"
        print("second")
    assert buffer.text() == "first\nsecond\n"


@routed
def test_stdout_stderr_and_logging_reach_the_run(capsys):
    with captured(1000) as buffer:
        print("out")
        print("err", file=sys.stderr)
        logging.getLogger("shop").warning("stock %s", 3)
        sys.stdout.buffer.write(b"bytes \xff\n")
    assert buffer.text() == "out\nerr\nWARNING shop: stock 3\nbytes \ufffd\n"
    assert capsys.readouterr().out == ""


@routed
def test_output_outside_a_run_goes_to_the_original_streams(capsys):
    print("node starts")
    print("trouble", file=sys.stderr)
    assert capsys.readouterr() == ("node starts\n", "trouble\n")


@routed
def test_logged_exception_keeps_its_traceback(capsys):
    with captured(5000) as buffer:
        try:
            raise LookupError("gone")
        except LookupError:
            logging.getLogger("shop").exception("failed")
    assert buffer.text().startswith("ERROR shop: failed\nTraceback (most recent call last):")
    assert buffer.text().endswith("LookupError: gone\n")


@routed
def test_output_of_two_threads_is_never_mixed(capsys):
    together = threading.Barrier(2)
    texts: dict[str, str] = {}

    def work(letter: str) -> None:
        with captured(1_000_000) as buffer:
            together.wait(5)
            for _ in range(2000):
                print(letter * 20)
                logging.getLogger("shop").warning(letter)
        texts[letter] = buffer.text()

    threads = [threading.Thread(target=work, args=(letter,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert texts == {
        "a": ("a" * 20 + "\nWARNING shop: a\n") * 2000,
        "b": ("b" * 20 + "\nWARNING shop: b\n") * 2000,
    }


@routed
def test_nested_capture_returns_to_the_outer_one(capsys):
    with captured(100) as outer:
        with captured(100) as inner:
            print("in")
        print("out")
    assert (outer.text(), inner.text()) == ("out\n", "in\n")


@routed
def test_thread_that_outlives_its_run_writes_to_the_original_stream(capsys):
    with captured(100) as buffer:
        carried = contextvars.copy_context()
    carried.run(print, "late")
    assert buffer.text() == ""
    assert capsys.readouterr().out == "late\n"


@routed
def test_threads_that_a_job_starts_write_to_its_run(capsys):
    def say(word):
        print(word)
        logging.getLogger("shop").warning("%s!", word)

    with captured(1000) as buffer:
        thread = threading.Thread(target=say, args=("thread",))
        thread.start()
        thread.join()
        timer = threading.Timer(0, say, args=("timer",))
        timer.start()
        timer.join()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(say, "pool").result()
    assert buffer.text() == "".join(
        f"{word}\nWARNING shop: {word}!\n" for word in ("thread", "timer", "pool")
    )
    assert capsys.readouterr().out == ""


@routed
def test_a_thread_class_of_the_job_s_own_writes_to_its_run(capsys):
    class Own(threading.Thread):
        def run(self):
            print(self.name)

    with captured(1000) as buffer:
        own = Own(name="mine")
        own.start()
        own.join()
    assert buffer.text() == "mine\n"


@routed
def test_a_pool_that_several_runs_share_keeps_them_apart(capsys):
    with ThreadPoolExecutor(1) as pool:
        with captured(100) as first:
            pool.submit(print, "first").result()
        with captured(100) as second:
            pool.submit(print, "second").result()
        pool.submit(print, "nobody's").result()
    assert (first.text(), second.text()) == ("first\n", "second\n")
    assert capsys.readouterr().out == "nobody's\n"


@routed
def test_threads_outside_a_run_are_left_alone(capsys):
    thread = threading.Thread(target=print, args=("outside",))
    thread.start()
    thread.join()
    assert "run" not in vars(thread)
    assert capsys.readouterr().out == "outside\n"


@routed
def test_closing_stdout_in_a_run_leaves_it_open_for_the_others(capsys):
    with captured(100):
        sys.stdout.close()
    print("still here")
    assert capsys.readouterr().out == "still here\n"


@routed
def test_installing_twice_captures_once(capsys):
    capture.install()
    with captured(100) as buffer:
        logging.getLogger("shop").warning("once")
    assert buffer.text() == "WARNING shop: once\n"


def test_uninstall_restores_streams_and_handlers(capsys):
    def state():
        own = (threading.Thread.start, ThreadPoolExecutor.submit)
        return (sys.stdout, sys.stderr, list(logging.getLogger().handlers), *own)

    before = state()
    capture.install()
    assert all(now is not then for now, then in zip(state(), before, strict=True))
    capture.uninstall()
    assert state() == before


def test_write_needs_no_installed_routers(capsys):
    with captured(100) as buffer:
        capture.write("direct\n")
    capture.write("outside\n")
    assert buffer.text() == "direct\n"
    assert capsys.readouterr().out == "outside\n"


def test_warnings_without_any_logging_setup_still_reach_stderr():
    code = (
        "import logging; from distcron_app import capture; capture.install(); "
        "logging.getLogger('x').warning('seen'); logging.getLogger('x').info('unseen')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "seen\n"


def test_resident_memory_stays_flat_for_fifty_megabytes_of_print():
    """OP-76."""
    code = (
        "import resource; from distcron_app import capture; capture.install()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "with capture.captured(262144) as buffer:\n"
        "    for _ in range(51200): print('x' * 1023)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # ru_maxrss counts kilobytes on Linux and bytes elsewhere.
    unit = 1024 if os.uname().sysname == "Linux" else 1
    assert int(done.stdout) * unit < 5_000_000
