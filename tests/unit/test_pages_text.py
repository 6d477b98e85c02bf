"""How the pages print instants, durations and text of jobs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.template import Context, Template

from distcron_app.explanations import app_frames, inert
from distcron_app.templatetags.distcron import duration, offset, relative, runs_url

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def printed(expression: str, **given: object) -> str:
    return Template("{% load distcron %}" + expression).render(Context({"now": NOW, **given}))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "just now"),
        (-9.9, "just now"),
        (9.9, "in a moment"),
        (-10, "10 s ago"),
        (-59, "50 s ago"),
        (60, "in 1 min"),
        (-3599, "59 min ago"),
        (-3600, "1 h ago"),
        (2 * 3600 + 359, "in 2 h 5 min"),
        (-86_399, "23 h 59 min ago"),
        (86_400, "in 1 day"),
        (-3 * 86_400, "3 days ago"),
    ],
)
def test_distance_from_now_is_said_in_coarse_steps(seconds: float, text: str) -> None:
    assert relative(NOW + timedelta(seconds=seconds), NOW) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0, "0 ms"),
        (0.0614, "61 ms"),
        (12.44, "12.4 s"),
        (64, "1 min 4 s"),
        (600, "10 min"),
        (7200, "2 h"),
        (7500, "2 h 5 min"),
        (-0.5, "−500 ms"),
    ],
)
def test_duration_has_the_unit_that_fits(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_offset_has_a_sign() -> None:
    assert offset(NOW + timedelta(milliseconds=61), NOW) == "+61 ms"
    assert offset(NOW - timedelta(seconds=2), NOW) == "−2.0 s"
    assert offset(None, NOW) == ""


def test_instant_prints_the_zone_first_then_utc_then_the_distance() -> None:
    html = printed('{% instant at "Asia/Jakarta" full=True %}', at=NOW - timedelta(minutes=5))
    assert html == (
        '<time class="dc-time" datetime="2026-11-29T11:55:00.000Z" '
        'title="2026-11-29 11:55:00 UTC">29 Nov 18:55:00 WIB</time> '
        '<span class="dc-utc">11:55:00 UTC</span> '
        '<span class="dc-relative">5 min ago</span>'
    )


def test_instant_on_another_day_in_utc_says_so() -> None:
    at = datetime(2026, 11, 29, 20, 30, tzinfo=UTC)
    html = printed('{% instant at "Asia/Jakarta" full=True %}', at=at)
    assert "30 Nov 03:30:00 WIB" in html
    assert "29 Nov 20:30:00 UTC" in html


def test_brief_instant_keeps_zone_and_utc_as_its_tooltip() -> None:
    html = printed('{% instant at "Asia/Jakarta" brief=True %}', at=NOW)
    assert 'title="29 Nov 19:00:00 WIB · 2026-11-29 12:00:00 UTC">just now</time>' in html


@pytest.mark.parametrize(
    ("zone", "text"),
    [
        ("America/New_York", "29 Nov 07:00:00 EST"),
        ("America/Sao_Paulo", "29 Nov 09:00:00 UTC-03"),
        ("Asia/Kolkata", "29 Nov 17:30:00 IST"),
        ("Australia/Lord_Howe", "29 Nov 23:00:00 UTC+11"),
        ("Mars/Base", "29 Nov 12:00:00 UTC"),
    ],
)
def test_instant_always_names_its_zone(zone: str, text: str) -> None:
    assert f">{text}<" in printed("{% instant at zone %}", at=NOW, zone=zone)


def test_instant_of_another_year_prints_the_year() -> None:
    at = datetime(2027, 2, 28, 6, 0, tzinfo=UTC)
    assert "28 Feb 2027 13:00:00 WIB" in printed('{% instant at "Asia/Jakarta" %}', at=at)


def test_both_passes_of_a_repeated_hour_differ() -> None:
    first, second = (datetime(2026, 11, 1, hour, 30, tzinfo=UTC) for hour in (5, 6))
    html = printed("{% instant a z %}{% instant b z %}", a=first, b=second, z="America/New_York")
    assert "1 Nov 01:30:00 EDT" in html
    assert "1 Nov 01:30:00 EST" in html


def test_missing_instant_is_a_dash() -> None:
    assert printed("{% instant at %}", at=None) == '<span class="dc-none">–</span>'


def test_state_is_an_icon_and_a_word() -> None:
    html = printed('{% state "lost" "lost" %}')
    assert 'class="dc-state dc-state--lost"' in html
    assert 'aria-hidden="true"' in html
    assert html.endswith("</svg>lost</span>")


def test_unknown_state_is_escaped() -> None:
    html = printed("{% state value value %}", value='"><script>')
    assert "<script>" not in html
    assert "dc-state--unknown" in html


def test_address_of_a_list_carries_its_filters() -> None:
    assert runs_url() == "/cron/runs/"
    assert (
        runs_url(state="failed lost", schedule=3)
        == "/cron/runs/?state=failed&state=lost&schedule=3"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07done", "done"),
        ("bell\x07", "bell\\x07"),
        ("\u202egnp.exe", "\\x202egnp.exe"),
        ("line\r\nline", "line\nline"),
        ("50 %\r100 %", "50 %\\x0d100 %"),
    ],
)
def test_text_of_a_job_is_made_inert(text: str, shown: str) -> None:
    assert inert(text) == shown


def test_frames_of_libraries_are_left_out() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/srv/shop/jobs.py", line 4, in close\n    send()\n    ~~~~^^\n'
        '  File "/usr/lib/python3.12/smtplib.py", line 9, in send\n    raise Error\n'
        '  File "<frozen importlib._bootstrap>", line 1, in load\n'
        "Error: busy"
    )
    assert app_frames(text) == (
        "Traceback (most recent call last):\n"
        '  File "/srv/shop/jobs.py", line 4, in close\n    send()\n    ~~~~^^\n'
        "Error: busy"
    )


def test_traceback_of_libraries_alone_is_kept_whole() -> None:
    text = 'Traceback:\n  File "/x/site-packages/a.py", line 1, in b\n    c()\nError: d'
    assert app_frames(text) == text
