from __future__ import annotations

import pytest

from distcron_app.locks.fanout import Request
from distcron_app.locks.redlock import drift_ms, lease_end, quorum_of
from distcron_app.locks.scripts import Call, Script


@pytest.mark.parametrize(("count", "quorum"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (7, 4)])
def test_quorum_is_more_than_half(count, quorum):
    assert quorum_of(count) == quorum


@pytest.mark.parametrize(
    ("ttl_ms", "drift"), [(1, 2.01), (1000, 12.0), (15_000, 152.0), (3_600_000, 36_002.0)]
)
def test_drift_is_one_percent_and_two_milliseconds(ttl_ms, drift):
    assert drift_ms(ttl_ms) == pytest.approx(drift)


@pytest.mark.parametrize(("ttl_ms", "end"), [(15_000, 114.848), (1000, 100.988), (2, 99.99998)])
def test_lease_ends_a_ttl_less_the_drift_after_it_was_asked_for(ttl_ms, end):
    assert lease_end(100.0, ttl_ms) == pytest.approx(end)


def test_request_is_packed_by_the_names_of_its_scripts():
    script = Script("return 1")
    request = Request([Call(script, 1, ["k", b"\xff", "ключ"])])
    assert request.packed == (
        b"*6\r\n$7\r\nEVALSHA\r\n$40\r\ne0e1f9fabfc9d4800c877a703b823ac0578ff8db\r\n$1\r\n1\r\n"
        b"$1\r\nk\r\n$1\r\n\xff\r\n$8\r\n\xd0\xba\xd0\xbb\xd1\x8e\xd1\x87\r\n"
    )
    assert request.spelled_out().startswith(b"*6\r\n$4\r\nEVAL\r\n$8\r\nreturn 1\r\n$1\r\n1\r\n")
