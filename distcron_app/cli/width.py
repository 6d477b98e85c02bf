"""How many terminal cells a text takes, and text that is safe to print.

Rows hold text that people typed: an escape sequence in a name must not reach the
terminal, and a wide character must not push the columns apart.
"""

from __future__ import annotations

import unicodedata

__all__ = ["cut", "display_width", "encodable", "pad", "printable", "wrapped"]

_EMOJI_STYLE = "\ufe0f"
_JOINER = "\u200d"
# Typographic characters of the messages, for a stream that cannot show them.
_ASCII = str.maketrans(
    {
        "…": "...",
        "·": "-",
        "→": "->",
        "−": "-",
        "–": "-",
        "—": "-",
        "“": '"',
        "”": '"',
        "‘": "'",
        "’": "'",
        "•": "*",
        "✔": "+",
        "✖": "x",
        "▶": ">",
        "●": "*",
        "○": "o",
        "■": "#",
        "⚠": "!",
        "⏸": "=",
        "⤼": "~",
        "▓": "#",
        "░": ".",
    }
)


def display_width(text: str) -> int:
    """Return the number of terminal cells of printable ``text``.

    >>> display_width("naïve"), display_width("日本"), display_width("e\\u0301")
    (5, 4, 1)
    """
    cells = 0
    previous = ""
    for character in text:
        if character == _EMOJI_STYLE:
            cells += 2 - _cells(previous) if previous else 0
        elif previous != _JOINER:
            cells += _cells(character)
        previous = character
    return cells


def cut(text: str, width: int, ellipsis: str = "…") -> str:
    """Return ``text`` in at most ``width`` cells, with the ellipsis where something is gone.

    >>> cut("sync-orders", 6)
    'sync-…'
    """
    if display_width(text) <= width:
        return text
    room = max(0, width - display_width(ellipsis))
    kept = text[:room]
    while display_width(kept) > room:
        kept = kept[:-1]
    return (kept + ellipsis)[: max(width, 0)]


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Return ``text`` filled with blanks to ``width`` cells; ``right`` aligns to the right."""
    blanks = " " * (width - display_width(text))
    return blanks + text if right else text + blanks


def wrapped(text: str, width: int) -> list[str]:
    """Return ``text`` in lines of at most ``width`` cells, broken between words where it can be.

    >>> wrapped("no node is alive", 10)
    ['no node is', 'alive']
    """
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if display_width(joined) <= width:
            lines[-1] = joined
            continue
        lines.append(word)
        while display_width(lines[-1]) > width and len(lines[-1]) > 1:
            head = cut(lines[-1], width, "") or lines[-1][0]
            lines[-1:] = [head, lines[-1][len(head) :]]
    return [line for line in lines if line] or [""]


def printable(text: str) -> str:
    """Return one line without control or direction characters; those are shown as escapes.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return "".join(_shown(character) for character in text)


def encodable(text: str, encoding: str) -> str:
    """Return ``text`` as a stream of ``encoding`` can show it, with ASCII stand-ins.

    >>> encodable("✔ naïve 日", "latin-1")
    '+ naïve \\\\u65e5'
    """
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        plain = text.translate(_ASCII)
        return plain.encode(encoding, "backslashreplace").decode(encoding)
    return text


def _cells(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def _shown(character: str) -> str:
    if character in "\t\n\r":
        return " "
    category = unicodedata.category(character)
    is_unsafe = category in ("Cc", "Cs") or unicodedata.bidirectional(character) in _DIRECTIONS
    return character.encode("unicode_escape").decode() if is_unsafe else character


# Marks that reorder what follows them on the screen.
_DIRECTIONS = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
