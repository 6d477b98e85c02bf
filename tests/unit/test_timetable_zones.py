"""Zone names, zone data, and the table of clock changes."""

import time
from datetime import UTC, datetime

import pytest

from distcron_app import timetable
from distcron_app.errors import TimetableError
from distcron_app.timetable import zones


def second(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


@pytest.mark.parametrize(
    "name", ["UTC", "Asia/Jakarta", "America/Argentina/Buenos_Aires", "Etc/GMT+7", "US/Pacific"]
)
def test_iana_name_is_accepted_as_it_is(name: str) -> None:
    assert timetable.check_timezone(name) == name


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("europe/berlin", "Europe/Berlin"),
        ("Europe/Budapesst", "Europe/Budapest"),
        ("Jakarta", "Asia/Jakarta"),
        ("new york", "America/New_York"),
        ("WIB", "Asia/Jakarta"),
        ("wita", "Asia/Makassar"),
        ("WIT", "Asia/Jayapura"),
        (" UTC", "UTC"),
    ],
)
def test_similar_name_is_suggested(name: str, nearest: str) -> None:
    with pytest.raises(TimetableError) as caught:
        timetable.check_timezone(name)
    assert str(caught.value) == f"Time zone {name!r}: not known. Did you mean {nearest}?"


@pytest.mark.parametrize("name", ["localtime", "/etc/localtime", "posixrules", "SYSTEM", "local"])
def test_zone_of_the_host_is_refused_for_what_it_is(name: str) -> None:
    with pytest.raises(TimetableError) as caught:
        timetable.check_timezone(name)
    assert str(caught.value) == (
        f"Time zone {name!r}: differs from host to host. "
        "Write an IANA name such as Asia/Jakarta or UTC."
    )


@pytest.mark.parametrize(
    "name",
    [
        "localtime",
        "posixrules",
        "Factory",
        "leapseconds",
        "tzdata.zi",
        "zone.tab",
        "Asia",
        "../UTC",
        "/etc/localtime",
        "Asia/../UTC",
        "+05:30",
        "\x00",
        "",
        "x" * 1_000_000,
        "Asia/Jakarta\n",
    ],
)
def test_name_that_is_no_place_is_refused_quickly(name: str) -> None:
    began = time.thread_time()
    with pytest.raises(TimetableError) as caught:
        timetable.check_timezone(name)
    assert time.thread_time() - began < 0.05
    assert caught.value.field == "timezone"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [None, 7, ["UTC"]])
def test_value_that_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(TimetableError):
        timetable.check_timezone(value)  # type: ignore[arg-type]


def test_zone_data_comes_from_the_package_and_not_from_the_system() -> None:
    # 2026f moved Morocco to UTC+0 for good; the data of 2025 says UTC+1.
    casablanca = timetable.zone("Africa/Casablanca")
    offset = datetime(2026, 12, 1, tzinfo=UTC).astimezone(casablanca).utcoffset()
    assert offset is not None
    assert offset.total_seconds() == 0
    assert casablanca.key == "Africa/Casablanca"


def test_zone_is_loaded_once() -> None:
    assert timetable.zone("Asia/Jakarta") is timetable.zone("Asia/Jakarta")


def test_version_of_the_zone_data_is_reported() -> None:
    assert timetable.tzdata_version() >= "2026a"
    assert timetable.tzdata_version()[:4].isdigit()


def test_changes_are_found_to_the_second() -> None:
    known = zones.changes_around(
        "America/New_York", second("2026-01-01T00:00"), second("2026-12-31T00:00")
    )
    assert second("2026-03-08T07:00") in known.at
    assert second("2026-11-01T06:00") in known.at
    spring = known.at.index(second("2026-03-08T07:00"))
    assert known.ends[spring] == second("2026-03-08T02:00")
    assert known.starts[spring] == second("2026-03-08T03:00")


def test_zone_without_changes_has_an_empty_table() -> None:
    known = zones.changes_around("Asia/Jakarta", second("2026-01-01T00:00"), 2_000_000_000)
    assert known.at == ()
    assert known.offsets == (25_200,)


def test_probing_misses_no_change_of_any_zone_since_1970() -> None:
    for name in ["Africa/Casablanca", "America/Argentina/San_Luis", "Asia/Gaza", "Africa/Cairo"]:
        coarse = zones.changes(name, 0, 6)
        place = timetable.zone(name)
        for at in range(0, coarse.until, 6 * 3600):
            offset = datetime.fromtimestamp(at, place).utcoffset()
            assert offset is not None
            index = sum(1 for change in coarse.at if change <= at)
            assert coarse.offsets[index] == offset.total_seconds(), (name, at)
