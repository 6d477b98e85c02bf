"""The schedule form in a real Chromium: the preview follows what is typed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.urls import reverse
from playwright.sync_api import Browser, Page, expect

from distcron_app.models import Schedule
from tests.browser.test_pages_browser import browser, problems, signed_in

__all__ = ["browser", "problems"]  # fixtures

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
]

ADD = "admin:distcron_schedule_add"


@pytest.fixture
def page(browser: Browser, live_server: Any, problems: list[str]) -> Iterator[Page]:
    context = signed_in(browser, live_server, problems, locale="en-GB")
    # The admin has no icon of its own.
    context.route("**/favicon.ico", lambda route: route.fulfill(status=204))
    yield context.new_page()
    context.close()


@pytest.fixture
def asked(page: Page) -> list[str]:
    """Collect what was sent for each preview."""
    sent: list[str] = []
    page.on(
        "request",
        lambda request: "/preview/" in request.url and sent.append(request.post_data or ""),
    )
    return sent


def test_the_preview_follows_a_rule_typed_letter_by_letter(
    page: Page, problems: list[str], asked: list[str]
) -> None:
    page.goto(reverse(ADD))
    region = page.locator("[data-distcron-preview]")
    expect(region).to_contain_text("Fill in a rule")
    page.fill("#id_timezone", "America/New_York")
    page.locator("#id_cron").press_sequentially("30 2 * *", delay=20)
    expect(region.locator(".errorlist")).to_contain_text("Cron expression")
    page.locator("#id_cron").press_sequentially(" *", delay=20)
    expect(region).to_contain_text("At 02:30 every day")
    expect(region.locator("tbody tr")).to_have_count(10)
    page.fill("#id_starts_at", "2027-03-13T12:00")
    expect(region.locator("tbody tr").first).to_contain_text("02:30 does not exist")
    # Ten letters and two fields: without the delay each would have asked.
    assert len(asked) <= 6
    assert problems == []
    assert Schedule.objects.count() == 0


def test_the_last_preview_stays_while_the_network_is_away(page: Page, asked: list[str]) -> None:
    page.goto(reverse(ADD))
    region = page.locator("[data-distcron-preview]")
    page.fill("#id_cron", "0 4 * * *")
    expect(region).to_contain_text("At 04:00 every day")
    page.context.set_offline(True)
    with page.expect_event("requestfailed"):
        page.fill("#id_cron", "0 5 * * *")
    expect(region).not_to_have_attribute("aria-busy", "true")
    expect(region).to_contain_text("At 04:00 every day")
    page.context.set_offline(False)
    page.fill("#id_cron", "0 6 * * *")
    expect(region).to_contain_text("At 06:00 every day")


def test_the_button_works_without_javascript(browser: Browser, live_server: Any) -> None:
    context = signed_in(browser, live_server, [], java_script_enabled=False, locale="en-GB")
    opened = context.new_page()
    opened.goto(reverse(ADD))
    opened.fill("#id_name", "Report")
    opened.fill("#id_cron", "0 4 * * *")
    opened.click("[name=_preview]")
    assert opened.url.endswith("#distcron-preview")
    assert "At 04:00 every day" in opened.inner_text("#distcron-preview")
    assert opened.input_value("#id_name") == "Report"
    assert opened.input_value("#id_cron") == "0 4 * * *"
    context.close()
    assert Schedule.objects.count() == 0
