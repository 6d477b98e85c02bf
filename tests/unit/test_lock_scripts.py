from __future__ import annotations

import pytest

from distcron_app.locks import scripts


def info(value, ttl_ms=900, now_ms=10_500):
    return scripts.infos(["schedule:1"], [(value, ttl_ms, now_ms)])["schedule:1"]


def test_value_of_a_lock_is_read_whole():
    found = info(b"5eed|10000|1000|3|node-a|blue")
    assert (found.owner_token, found.note) == ("5eed", "node-a|blue")
    assert (found.ttl_ms, found.granted_ms, found.age_ms, found.renewals) == (900, 1000, 500, 3)


@pytest.mark.parametrize(
    ("value", "token", "note"),
    [
        ("5eed|node-a", "5eed", "node-a"),
        ("5eed|x|1000|3|node-a", "5eed", "x|1000|3|node-a"),
        ("5eed|²|1000|3|node-a", "5eed", "²|1000|3|node-a"),
        ("5eed|-1|1000|3|node-a", "5eed", "-1|1000|3|node-a"),
        (f"5eed|{'9' * 5000}|1000|3|n", "5eed", f"{'9' * 5000}|1000|3|n"),
        ("", None, ""),
        (None, None, ""),
    ],
)
def test_planted_value_has_no_facts(value, token, note):
    found = info(value)
    assert (found.owner_token, found.note) == (token, note)
    assert (found.granted_ms, found.age_ms, found.renewals) == (None, None, None)


def test_age_is_never_negative():
    assert info(b"5eed|99999|1000|0|node-a").age_ms == 0


def test_absent_key_is_left_out():
    assert scripts.infos(["schedule:1"], [(None, -2, 1)]) == {}


def test_key_without_ttl_never_expires():
    assert info(b"5eed", ttl_ms=-1).ttl_ms is None


@pytest.mark.parametrize(("answer", "holder"), [(1, None), (b"5eed", "5eed"), ("", "")])
def test_answer_of_acquire_names_the_holder(answer, holder):
    assert scripts.holder(answer) == holder


def test_batch_is_cut_into_calls_of_500_names():
    owners = [(f"schedule:{number}", f"t{number}") for number in range(501)]
    first, second = scripts.calls(scripts.ACQUIRE, "test", owners, "1000", b"node-a")
    assert (first.key_count, len(first.values)) == (501, 1003)
    assert second.values == [
        "{test:lock}-index",
        "{test:lock}:schedule:500",
        "1000",
        b"node-a",
        "t500",
    ]


def test_all_keys_of_a_namespace_carry_one_hash_tag():
    keys = [scripts.index_key("a"), scripts.probe_key("a"), scripts.lock_key("a", "{x}")]
    assert [key.partition("}")[0] for key in keys] == ["{a:lock"] * 3
