"""The benchmarks count and judge right; how fast anything is, no test says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.figures import Claim, Summary, percentile, ratios, summary, verdict
from benchmarks.locks import quorum_claims, standard_claims
from benchmarks.statements import Statement, losers_statements, read_statements, shape

# --- the arithmetic -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("percent", "expected"), [(50, 50), (99, 99), (100, 100), (0, 1), (99.5, 100)]
)
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    percent: float, expected: float
) -> None:
    assert percentile(range(100, 0, -1), percent) == expected


def test_the_percentile_of_one_value_is_that_value() -> None:
    assert percentile([7.0], 99) == 7.0


def test_rounds_are_summed_up_by_their_median_and_spread() -> None:
    assert summary([5.0, 4.0, 3.0]) == Summary(median=4.0, spread_percent=50.0)


def test_a_ratio_is_taken_within_each_round() -> None:
    # The ratio of the medians would be 2 / 6.
    assert ratios([1.0, 2.0, 9.0], [2.0, 8.0, 6.0]).median == 0.5


def test_a_verdict_is_reached_only_where_every_claim_holds() -> None:
    at_limit = Claim(what="most", value=2.0, limit=2.0)
    below = Claim(what="least", value=1.0, limit=2.0, at_least=True)
    assert verdict([at_limit]) == {
        "target": [{"what": "most", "value": 2.0, "at_most": 2.0, "reached": True}],
        "reached": True,
    }
    assert verdict([at_limit, below]) == {
        "target": [
            {"what": "most", "value": 2.0, "at_most": 2.0, "reached": True},
            {"what": "least", "value": 1.0, "at_least": 2.0, "reached": False},
        ],
        "reached": False,
    }


# --- the targets ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "redlock_py", "pottery", "expected"),
    [
        ([0.2, 0.2, 0.2], 0.7, 1.7, [True, True, True]),
        ([0.2, 0.2, 0.2], 0.5, 1.7, [False, True, True]),
        ([0.2, 0.2, 0.2], 0.7, 1.5, [True, False, True]),
        ([0.2, 0.2, 2.5], 0.7, 1.7, [True, True, False]),
    ],
)
def test_a_redlock_is_held_against_both_peers_and_2_4_ms(
    ours: list[float], redlock_py: float, pottery: float, expected: list[bool]
) -> None:
    acquired = {"distcron": ours, "redlock-py": [redlock_py] * 3, "pottery": [pottery] * 3}
    assert [claim.holds for claim in quorum_claims(acquired)] == expected


@pytest.mark.parametrize(
    ("ours", "rate", "expected"),
    [
        (0.10, 150_000.0, [True, True]),
        (0.11, 150_000.0, [False, True]),
        (0.10, 149_999.0, [True, False]),
    ],
)
def test_a_standard_lock_is_held_against_redis_py_and_150_000_names_per_second(
    ours: float, rate: float, expected: list[bool]
) -> None:
    claims = standard_claims({"distcron": [ours], "redis-py": [0.10]}, {"distcron": [rate]})
    assert [claim.holds for claim in claims] == expected


# --- the statements of losers -----------------------------------------------------------

DUE = "SELECT id FROM schedule WHERE next_run_at <= now() LIMIT 64"


def sent(*pairs: tuple[str, str], session: str = "1") -> list[Statement]:
    return [
        Statement(
            at="", session=session, line=line, transaction=transaction, node="node-1", sql=sql
        )
        for line, (transaction, sql) in enumerate(pairs)
    ]


def test_the_shape_of_a_statement_has_no_values() -> None:
    one = shape("SELECT  a1 FROM b\nWHERE c IN (1, 2.5, 3) AND d = 'it''s 7'::text")
    assert one == "SELECT a1 FROM b WHERE c IN (?) AND d = ?::text"


def test_all_that_a_winner_sends_from_the_claim_to_the_outcome_is_its_own() -> None:
    statements = sent(
        ("4/1", DUE),
        ("4/2", "BEGIN"),
        ("4/2", "SELECT 1 FROM schedule FOR UPDATE"),
        ("4/2", "INSERT INTO run VALUES ('token-a')"),
        ("4/2", "COMMIT"),
        ("4/3", "SELECT something_of_a_running_node"),
        ("4/4", "BEGIN"),
        ("4/4", "UPDATE run SET state = 'succeeded' WHERE owner_token = 'token-a'"),
        ("4/4", "UPDATE statistics"),
    )
    assert losers_statements(statements, {shape(DUE)}, [("node-1", "token-a")]) == []


def test_a_claim_that_inserted_no_run_is_a_losers() -> None:
    winner = sent(("4/1", DUE), ("4/2", "INSERT INTO run VALUES ('token-a')"), session="1")
    loser = sent(("5/1", DUE), ("5/2", "INSERT INTO run VALUES ('token-b')"), session="2")
    found = losers_statements([*winner, *loser], {shape(DUE)}, [("node-1", "token-a")])
    assert [statement.sql for statement in found] == ["INSERT INTO run VALUES ('token-b')"]


def test_a_mark_counts_only_for_the_node_of_its_run() -> None:
    statements = sent(("4/2", "INSERT INTO run VALUES ('2026-11-29 23:36:54+00:00')"))
    mark = "2026-11-29 23:36:54+00:00"
    assert losers_statements(statements, set(), [("node-1", mark)]) == []
    assert losers_statements(statements, set(), [("node-2", mark)]) == statements


def test_what_a_winner_sends_after_the_outcome_is_a_losers() -> None:
    statements = sent(
        ("4/2", "INSERT INTO run VALUES ('token-a')"),
        ("4/3", "UPDATE run SET owner_token = 'token-a'"),
        ("4/4", "SELECT who_won"),
    )
    found = losers_statements(statements, set(), [("node-1", "token-a")])
    assert [statement.sql for statement in found] == ["SELECT who_won"]


def test_the_log_of_the_server_is_read_for_the_nodes_alone(tmp_path: Path) -> None:
    def row(line: int, message: str, application: str) -> str:
        columns = ["2026-11-29 23:36:54.004 UTC", "postgres", "distcron", "14506", "here"]
        columns += ["6b0cb6fc.38aa", str(line), "idle", "2026-11-29 23:36:28 UTC", "3/240"]
        columns += ["0", "LOG", "00000", message, *[""] * 8, application, "client backend", "", "0"]
        return ",".join('"' + column.replace('"', '""') + '"' for column in columns)

    log = tmp_path / "one.csv"
    log.write_text(
        "\n".join(
            [
                row(7, 'statement: SELECT "a",\n  1', "node-1"),
                row(8, "execute <unnamed>: SELECT 2", "node-1"),
                row(9, "duration: 3 ms", "node-1"),
                row(1, "statement: SELECT 4", "psql"),
                '"2026-11-29 23:36:55.001 UTC","postgres","dist',
            ]
        )
    )
    assert [
        (one.line, one.session, one.transaction, one.sql)
        for one in read_statements(log, ["node-1"])
    ] == [
        (7, "6b0cb6fc.38aa", "3/240", 'SELECT "a",\n  1'),
        (8, "6b0cb6fc.38aa", "3/240", "SELECT 2"),
    ]
