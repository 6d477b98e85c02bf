"""The two steps of a backfill in a real Chromium, and its progress without a reload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.urls import reverse
from playwright.sync_api import Browser, Page

from distcron_app.models import Backfill, Run
from tests.browser.seed import seed
from tests.browser.test_pages_browser import FAINT_TEXT, browser, signed_in

__all__ = ["browser"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
]
NARROW = 390


@pytest.fixture
def rows() -> dict[str, Any]:
    return seed()


@pytest.fixture
def problems() -> list[str]:
    """Collect what the console says; the policy reports its violations there."""
    return []


@pytest.fixture
def page(
    browser: Browser,
    live_server: Any,
    rows: dict[str, Any],
    problems: list[str],
) -> Iterator[Page]:
    size = {"width": NARROW, "height": 844}
    context = signed_in(browser, live_server, problems, viewport=size)
    opened = context.new_page()
    opened.clock.install()
    yield opened
    context.close()


def assert_readable(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW
    assert page.evaluate(FAINT_TEXT) == []


def test_a_backfill_is_counted_changed_queued_and_followed(
    page: Page, rows: dict[str, Any], problems: list[str]
) -> None:
    schedule = rows["schedule"]
    page.goto(reverse("distcron:backfills", args=[schedule.pk]))
    assert_readable(page)
    page.get_by_role("link", name="Backfill…").first.click()
    page.get_by_label("From").fill("2026-06-01")
    page.get_by_label("To", exact=True).fill("2026-06-02")
    assert_readable(page)
    page.get_by_role("button", name="Count").click()
    page.get_by_text("Step 2 of 2").wait_for()
    assert_readable(page)
    counted = page.get_by_role("button", name="Queue").inner_text()
    page.get_by_role("button", name="Change").click()
    assert page.get_by_label("From").input_value() == "2026-06-01"
    assert not Run.objects.filter(trigger="backfill").exists()

    page.get_by_role("button", name="Count").click()
    page.get_by_role("button", name="Queue").dblclick()
    page.get_by_text("runs have ended.").wait_for()
    assert_readable(page)
    found = Backfill.objects.get()
    assert counted == f"Queue {found.planned} runs"

    first = found.runs.order_by("due_at").first()
    Run.objects.filter(pk=first.pk).update(state="succeeded")
    page.clock.run_for(4_000)
    page.get_by_text(f"1 of {found.planned} runs have ended.").wait_for()
    page.get_by_role("link", name="Cancel…").click()
    page.get_by_label("Reason").fill("wrong range")
    page.get_by_role("button", name="Cancel the backfill").click()
    page.get_by_text("is cancelled.").wait_for()
    assert_readable(page)
    assert problems == []
