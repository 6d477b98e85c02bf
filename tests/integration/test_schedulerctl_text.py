"""How text is laid out: widths, times, and tables on a small terminal."""

from __future__ import annotations

import doctest
import io
from datetime import UTC, datetime, timedelta

import pytest
from django.core.management.base import OutputWrapper

from distcron_app.cli import times, width
from distcron_app.cli.console import Cell, Column, Console, Stream, View

NOW = datetime(2027, 3, 13, 12, 0, tzinfo=UTC)


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def table(rows: list[list[Cell | str]], *, file: io.StringIO, **view: bool) -> list[str]:
    stream = Stream(OutputWrapper(file), colour=False)
    columns = [Column(title="ONE", flexible=True), Column(title="TWO", right=True)]
    Console(stream, stream, View(**view)).table(columns, rows)  # type: ignore[arg-type]
    return file.getvalue().splitlines()


@pytest.mark.parametrize("module", [times, width])
def test_the_examples_of_the_docstrings_hold(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]

    assert (result.failed, result.attempted > 0) == (0, True)


@pytest.mark.parametrize(
    ("text", "cells"),
    [("", 0), ("abc", 3), ("日本語", 6), ("👍", 2), ("⚠", 1), ("⚠\ufe0f", 2), ("👩\u200d🚀", 2)],
)
def test_display_width(text: str, cells: int) -> None:
    assert width.display_width(text) == cells


def test_columns_line_up_beside_wide_characters() -> None:
    lines = table([["日本", "1"], ["e\u0301", "22"], ["abcdef", "333"]], file=io.StringIO())

    assert lines == ["ONE     TWO", "日本      1", "e\u0301        22", "abcdef  333"]


def test_a_wide_character_is_not_cut_in_half() -> None:
    assert width.cut("日本語", 4) == "日…"


def test_the_flexible_column_gives_way_on_a_small_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "14")

    lines = table([["a-long-schedule-key", "333"]], file=Terminal())

    assert lines == ["ONE        TWO", "a-long-s…  333"]


def test_wide_cuts_nothing_on_a_small_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "14")

    lines = table([["a-long-schedule-key", "333"]], file=Terminal(), is_wide=True)

    assert lines[1] == "a-long-schedule-key  333"


def test_no_header_leaves_out_the_titles() -> None:
    assert table([["a", "1"]], file=io.StringIO(), has_header=False) == ["a  1"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "in 0 s"),
        (59.9, "in 59 s"),
        (60, "in 1 m"),
        (-3_599, "59 m ago"),
        (7_200, "in 2 h"),
        (7_260, "in 2 h 1 m"),
        (122_400, "in 1 d 10 h"),
        (864_000, "in 10 d"),
        (8_640_000, "in 3 months"),
        (-94_672_800, "3 years ago"),
    ],
)
def test_distance_from_now(seconds: float, text: str) -> None:
    assert times.relative(NOW + timedelta(seconds=seconds), NOW) == text


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (datetime(2027, 3, 13, 16, 30, tzinfo=UTC), "23:30 WIB"),
        (datetime(2027, 3, 13, 17, 30, 5, tzinfo=UTC), "Sun 14 Mar 00:30:05 WIB"),
        (datetime(2028, 3, 13, 17, 30, tzinfo=UTC), "Tue 14 Mar 2028 00:30 WIB"),
    ],
)
def test_a_short_moment_says_no_more_than_needed(at: datetime, text: str) -> None:
    assert times.short_moment(at, "Asia/Jakarta", NOW) == text


def test_utc_beside_local_time_names_the_weekday_where_it_differs() -> None:
    at = datetime(2027, 3, 13, 17, 30, tzinfo=UTC)

    assert times.utc_time(at, "Asia/Jakarta") == "Sat 17:30 UTC"
    assert times.utc_time(at, "America/New_York") == "17:30 UTC"
    assert times.utc_time(at, "UTC") == ""
