"""Who sent which statement to PostgreSQL, read from a log of all of them.

A statement belongs to the winner of a run when the session sent it between the first
transaction that bears the run's mark, such as its owner token, and the last one. It is
upkeep when a node sends the like while nothing is due: heartbeats, sweeps, the read of
due schedules and of queued runs. Whatever is neither was sent by a node that had lost.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

__all__ = ["Statement", "losers_statements", "read_statements", "shape"]

# Columns of PostgreSQL's CSV log.
_TIME, _SESSION, _LINE, _TRANSACTION, _MESSAGE, _APPLICATION = 0, 5, 6, 9, 13, 22
_STATEMENT = re.compile(r"(?:statement|execute [^:]*): (.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One statement. ``transaction`` tells the transactions of all sessions apart."""

    at: str
    session: str
    line: int
    transaction: str
    node: str
    sql: str


def read_statements(log: Path, nodes: Collection[str]) -> list[Statement]:
    """Return the statements of these applications, in the order of the log."""
    with open(log, newline="") as file:
        # The server may be writing the last row.
        rows = [row for row in csv.reader(file) if len(row) > _APPLICATION]
    found = [(row, _STATEMENT.match(row[_MESSAGE])) for row in rows]
    return [
        Statement(
            at=row[_TIME],
            session=row[_SESSION],
            line=int(row[_LINE]),
            transaction=row[_TRANSACTION],
            node=row[_APPLICATION],
            sql=match[1],
        )
        for row, match in found
        if match and row[_APPLICATION] in nodes
    ]


def losers_statements(
    statements: Iterable[Statement], upkeep: Collection[str], marks: Collection[tuple[str, str]]
) -> list[Statement]:
    """Return what is neither upkeep, given as shapes, nor part of a run.

    ``marks`` are the node of each run and a text that only its statements contain.
    """
    sessions = collections.defaultdict(list)
    for statement in statements:
        sessions[statement.session].append(statement)
    return [
        statement
        for session in sessions.values()
        for statement in _not_of_a_run(sorted(session, key=lambda one: one.line), marks)
        if shape(statement.sql) not in upkeep
    ]


def shape(sql: str) -> str:
    """Return the statement without its values.

    >>> shape("SELECT a FROM b1 WHERE id IN (1,  23) AND c = 'it''s'")
    'SELECT a FROM b1 WHERE id IN (?) AND c = ?'
    """
    bare = re.sub(r"'(?:[^']|'')*'|\b\d+(?:\.\d+)?\b", "?", sql)
    return re.sub(r"\?(?:, \?)+", "?", re.sub(r"\s+", " ", bare)).strip()


def _not_of_a_run(
    session: Sequence[Statement], marks: Collection[tuple[str, str]]
) -> list[Statement]:
    """Return the statements outside the stretches from a run's claim to its outcome."""
    own = [text for node, text in marks if node == session[0].node]
    stretches: dict[str, list[int]] = {}
    for index, statement in enumerate(session):
        for text in own:
            if text in statement.sql:
                stretches.setdefault(text, []).append(index)
    covered: set[int] = set()
    for indexes in stretches.values():
        first, last = (session[index].transaction for index in (indexes[0], indexes[-1]))
        inside = [i for i, one in enumerate(session) if one.transaction in (first, last)]
        covered.update(range(min(inside), max(inside) + 1))
    return [statement for index, statement in enumerate(session) if index not in covered]
