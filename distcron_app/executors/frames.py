"""Messages between a node and its workers: JSON with a length in front."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

__all__ = ["FrameReader", "encode"]

_LENGTH = struct.Struct(">I")


def encode(message: Any) -> bytes:
    """Return ``message`` as one frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Collects bytes and gives back whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add ``data``; yield each message that is complete now."""
        self._buffer += data
        offset = 0
        while len(self._buffer) - offset >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, offset)
            end = offset + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            yield json.loads(self._buffer[offset + _LENGTH.size : end])
            offset = end
        del self._buffer[:offset]
