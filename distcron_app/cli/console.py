"""Where a verb writes: tables or JSON to stdout, talk to stderr, each as the stream can show."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from django.core.management.base import OutputWrapper

from distcron_app.cli.width import cut, display_width, encodable, pad, printable

__all__ = ["JSON_VERSION", "Cell", "Column", "Console", "Stream", "View", "wants_colour"]

# Raised when a key of the JSON output changes its meaning or goes.
JSON_VERSION = 1

_COLOURS = {"green": "32", "red": "31", "yellow": "33", "cyan": "36", "grey": "90", "bold": "1"}
_GAP = "  "
_NARROWEST = 8  # cells that a flexible column keeps on a small terminal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How the person wants to see the data."""

    as_json: bool = False
    is_wide: bool = False
    has_header: bool = True
    zone: str = ""
    is_quiet: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table. ``flexible`` gives way on a small terminal."""

    title: object
    flexible: bool = False
    right: bool = False
    only_wide: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """Text with a colour; the text alone must say it all."""

    text: str
    colour: str = ""


class Stream:
    """A text stream that is written line by line, with colour where it is wanted."""

    def __init__(self, file: OutputWrapper, *, colour: bool) -> None:
        self._file = file
        self.colour = colour
        self.is_tty = file.isatty()
        self.encoding = getattr(file, "encoding", None) or "utf-8"

    def write(self, line: str, *, end: str = "\n") -> None:
        """Write one line; on a stream that cannot show a character, a stand-in."""
        # Without a style of its own: the wrapper would colour stderr whatever the flags say.
        self._file.write(encodable(line, self.encoding) + end, style_func=str, ending="")

    def flush(self) -> None:
        """Hand over what was written, so that a reader sees it now."""
        self._file.flush()

    def shown(self, text: str) -> str:
        """Return ``text`` as this stream will show it, on one line."""
        return encodable(printable(text), self.encoding)

    def painted(self, text: str, colour: str) -> str:
        """Return ``text`` in ``colour`` where this stream shows colours."""
        if not colour or not self.colour:
            return text
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"

    @property
    def columns(self) -> int:
        """Return the width of the terminal."""
        return shutil.get_terminal_size().columns


class Console:
    """The two streams of a command, and how its data is to be shown."""

    def __init__(self, out: Stream, err: Stream, view: View) -> None:
        self.out = out
        self.err = err
        self.view = view

    def say(self, text: str, colour: str = "") -> None:
        """Write talk to stderr, unless the person asked for quiet."""
        if not self.view.is_quiet:
            self.err.write(self.err.painted(self.err.shown(text), colour))

    def error(self, text: str, hint: str = "") -> None:
        """Write an error to stderr; ``hint`` only where a person reads it."""
        # The label is part of the interface, as the flags are: scripts look for it.
        self.err.write(f"{self.err.painted('error:', 'red')} {self.err.shown(text)}")
        if hint and self.err.is_tty:
            self.err.write(hint)

    def line(self, text: str, colour: str = "") -> None:
        """Write one line of data."""
        self.out.write(self.out.painted(self.out.shown(text), colour))

    def json(self, verb: str, **facts: Any) -> None:
        """Write the one object of ``--json``."""
        document = {"version": JSON_VERSION, "verb": verb, **facts}
        self.out.write(json.dumps(document, indent=2, ensure_ascii=False, default=str))

    def table(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[Cell | str]],
        *,
        has_header: bool = True,
    ) -> None:
        """Write rows in aligned columns, cut to the terminal unless piped or ``--wide``."""
        kept = [
            place
            for place, column in enumerate(columns)
            if self.view.is_wide or not column.only_wide
        ]
        shown = [columns[place] for place in kept]
        cells = [[self._cell(row[place]) for place in kept] for row in rows]
        if has_header and self.view.has_header:
            cells.insert(0, [self._cell(Cell(str(column.title), "bold")) for column in shown])
        widths = self._widths(shown, cells)
        for row in cells:
            self.out.write(self._row(shown, row, widths))

    def _cell(self, value: Cell | str) -> Cell:
        cell = value if isinstance(value, Cell) else Cell(value)
        return Cell(self.out.shown(cell.text), cell.colour)

    def _widths(self, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> list[int]:
        widths = [
            max((display_width(row[place].text) for row in rows), default=0)
            for place in range(len(columns))
        ]
        if not self.out.is_tty or self.view.is_wide:
            return widths
        excess = sum(widths) + len(_GAP) * (len(widths) - 1) - self.out.columns
        flexible = [place for place, column in enumerate(columns) if column.flexible]
        while excess > 0 and flexible:
            place = max(flexible, key=lambda candidate: widths[candidate])
            if widths[place] <= _NARROWEST:
                break
            widths[place] -= 1
            excess -= 1
        return widths

    def _row(self, columns: Sequence[Column], row: Sequence[Cell], widths: Sequence[int]) -> str:
        ellipsis = encodable("…", self.out.encoding)
        parts = []
        for column, cell, width in zip(columns, row, widths, strict=True):
            text = pad(cut(cell.text, width, ellipsis), width, right=column.right)
            parts.append((text, cell.colour))
        last_text, last_colour = parts[-1]
        parts[-1] = (last_text.rstrip(), last_colour)
        return _GAP.join(self.out.painted(text, colour) for text, colour in parts).rstrip()


def wants_colour(
    file: OutputWrapper, *, force: bool, never: bool, environ: Mapping[str, str] = os.environ
) -> bool:
    """Return whether to write colours: the flag decides, then NO_COLOR, then the terminal."""
    if force or never:
        return force
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb" or sys.platform == "win32":
        return False
    return file.isatty()
