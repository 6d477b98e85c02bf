"""Any text at all: accepted or refused with our error, and quickly.

DISTCRON_FUZZ_INPUTS sets how many texts are tried.
"""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distcron_app import timetable
from distcron_app.errors import TimetableError

INPUTS = int(os.environ.get("DISTCRON_FUZZ_INPUTS", "1500"))
TOKENS = st.sampled_from(
    [
        *["*", "*/", "0", "59", "7", "31", "1-5", "22-2", "/", "-", ",", "#", "?", "h", "r", "w"],
        *["L", "L5", "5#3", "jan", "mon", "monday", "@daily", "@every 5m", "h(1-9)/2", "(", ")"],
        *[" ", " ", " ", " ", "\t", "\n", "\u0660", "\u00e9", "\x00", "9" * 50, "+", ".", "_"],
    ]
)
NEARLY = st.lists(
    st.lists(TOKENS, min_size=1, max_size=3).map("".join), min_size=4, max_size=6
).map(" ".join)
TEXTS = st.one_of(NEARLY, st.lists(TOKENS, max_size=14).map("".join), st.text(max_size=250))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer; collecting the garbage of the test is not its cost."""
    gc.disable()
    began = time.thread_time()
    try:
        yield
        spent = time.thread_time() - began
    finally:
        gc.enable()
    assert spent < seconds


@settings(
    max_examples=INPUTS,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(TEXTS)
def test_any_text_is_a_timetable_or_refused_within_50_ms(text: str) -> None:
    with within(0.05):
        try:
            built = timetable.build(kind="cron", cron=text)
        except TimetableError as error:
            assert error.field == "cron"
            assert 10 < len(str(error)) < 400
            return
    assert isinstance(built, timetable.Cron)
    assert timetable.canonical(built.expression) == built.expression
