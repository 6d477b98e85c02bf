"""Numbers from texts: the same in every process, on every node, in every version."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["stable_fraction", "stable_number"]

_BITS = 53  # as many as a float holds exactly


def stable_number(key: str, below: int) -> int:
    """Return a number from 0 to ``below`` - 1."""
    return int(stable_fraction("number", key) * below)


def stable_fraction(*texts: str) -> float:
    """Return a number from 0 to below 1. The lengths of the texts keep them apart."""
    joined = "".join(f"{len(text)}:{text}" for text in texts)
    digest = blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest) >> (64 - _BITS)) / (1 << _BITS)
