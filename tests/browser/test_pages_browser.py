"""The pages in a real Chromium: nothing is refused by the policy, and regions stay live."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Route,
    sync_playwright,
)

from distcron_app.models import Run, RunOutput, Schedule
from tests.browser.seed import pages_written, seed

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
]

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
MINUTE_MS = 60_000
# Text whose contrast with what is behind it is below 4.5, as "ratio text".
FAINT_TEXT = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = rgb(getComputedStyle(at).backgroundColor);
      if (color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || !element.getClientRects().length) continue;
    const [a, b] = [light(rgb(getComputedStyle(element).color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faint.push(`${ratio.toFixed(2)} ${node.data.trim().slice(0, 40)}`);
  }
  return faint;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Playwright keeps an event loop in this thread, where Django then refuses its ORM.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield started
        started.close()
    del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]


@pytest.fixture
def rows() -> dict[str, Any]:
    return seed()


@pytest.fixture
def problems() -> list[str]:
    """Collect what the console says; the policy reports its violations there."""
    return []


def signed_in(
    browser: Browser, live_server: Any, problems: list[str], **options: Any
) -> BrowserContext:
    user = User.objects.create_superuser("ratna")
    client = Client()
    client.force_login(user)
    context = browser.new_context(base_url=live_server.url, **options)
    cookie = client.cookies["sessionid"]
    context.add_cookies([{"name": "sessionid", "value": cookie.value, "url": live_server.url}])

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            problems.append(message.text)

    context.on("console", note)
    context.on("weberror", lambda error: problems.append(str(error.error)))
    return context


@pytest.fixture
def page(
    browser: Browser, live_server: Any, rows: dict[str, Any], problems: list[str]
) -> Iterator[Page]:
    """Return a page whose clock the test moves."""
    context = signed_in(browser, live_server, problems)
    opened = context.new_page()
    opened.clock.install()
    yield opened
    context.close()


def addresses(rows: dict[str, Any]) -> list[str]:
    names = ["overview", "schedules", "runs", "nodes", "locks"]
    found = [reverse(f"distcron:{name}") for name in names]
    wanted = [
        "running",
        "failed",
        "lost",
        "recovered",
        "skipped",
        "coalesced",
        "schedule",
        "paused",
    ]
    found += [rows[name].get_absolute_url() for name in wanted]
    return [*found, reverse("distcron:pause", args=[rows["schedule"].pk])]


def polls(page: Page) -> list[str]:
    asked: list[str] = []
    page.on("request", lambda request: "fragment=live" in request.url and asked.append(request.url))
    return asked


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_pages_are_clean_readable_and_fit(
    browser: Browser,
    live_server: Any,
    rows: dict[str, Any],
    problems: list[str],
    width: int,
    scheme: str,
) -> None:
    size = {"width": width, "height": 800}
    context = signed_in(browser, live_server, problems, viewport=size, color_scheme=scheme)
    page = context.new_page()
    for path in addresses(rows):
        answer = page.goto(path)
        assert answer is not None
        assert answer.status == 200, path
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert page.evaluate(FAINT_TEXT) == [], path
    context.close()
    assert problems == []


@pytest.mark.parametrize("locale", ["en", "id"])
def test_no_column_of_names_is_squeezed_to_a_few_letters(
    browser: Browser, live_server: Any, rows: dict[str, Any], problems: list[str], locale: str
) -> None:
    options = {"viewport": {"width": 1280, "height": 800}, "locale": locale}
    context = signed_in(browser, live_server, problems, **options)
    page = context.new_page()
    for name in ("nodes", "runs", "schedules"):
        page.goto(reverse(f"distcron:{name}"))
        names = page.locator(".dc-table tbody th")
        assert names.count()
        assert all(box["width"] >= 110 for box in (each.bounding_box() for each in names.all()))
    context.close()


def test_overview_follows_a_run_without_a_reload(
    page: Page, rows: dict[str, Any], problems: list[str]
) -> None:
    page.goto("/cron/")
    page.evaluate("window.isSamePage = true")
    Run.objects.filter(pk=rows["running"].pk).update(progress_message="Page 79 of 80")
    page.clock.run_for(6_000)
    page.get_by_text("Page 79 of 80").wait_for()
    assert page.evaluate("window.isSamePage") is True
    assert page.locator("#dc-live").inner_text() == "Live"
    assert problems == []


def test_run_page_ends_its_polling_with_the_run(page: Page, rows: dict[str, Any]) -> None:
    page.goto(rows["running"].get_absolute_url())
    Run.objects.filter(pk=rows["running"].pk).update(state="succeeded", finished_at=rows["now"])
    page.clock.run_for(3_000)
    page.get_by_text("The job ended without an error.").wait_for()
    page.clock.run_for(1_000)
    asked = polls(page)
    page.clock.run_for(MINUTE_MS)
    assert asked == []
    assert page.locator("#dc-live").inner_text() == "Final"


def test_run_page_follows_the_output_unless_the_reader_has_scrolled_up(
    page: Page, rows: dict[str, Any], problems: list[str]
) -> None:
    output = page.locator("#dc-output")
    place = """element => [
      element.scrollTop,
      element.scrollHeight - element.clientHeight - element.scrollTop,
    ]"""

    def write(count: int) -> None:
        RunOutput.objects.filter(pk=rows["running"].pk).update(output=pages_written(count))
        page.clock.run_for(3_000)
        page.get_by_text(f"page {count} of 80 written", exact=False).wait_for(state="attached")

    page.set_viewport_size({"width": 1280, "height": 500})
    page.goto(rows["running"].get_absolute_url())
    assert output.evaluate(place)[1] < 2
    write(60)
    assert output.evaluate(place)[0] > 0
    assert output.evaluate(place)[1] < 2
    output.evaluate("element => { element.scrollTop = 40; }")
    write(80)
    assert output.evaluate(place)[0] == 40
    Run.objects.filter(pk=rows["running"].pk).update(state="succeeded", finished_at=rows["now"])
    page.clock.run_for(3_000)
    page.get_by_text("The job ended without an error.").wait_for()
    assert output.evaluate(place)[0] == 40
    assert problems == []


def test_hidden_tab_asks_for_nothing(page: Page) -> None:
    page.goto("/cron/")
    asked = polls(page)
    page.evaluate("""() => {
      Object.defineProperty(document, "hidden", { configurable: true, get: () => true });
      document.dispatchEvent(new Event("visibilitychange"));
    }""")
    page.clock.run_for(MINUTE_MS)
    assert asked == []
    with page.expect_request(lambda request: "fragment=live" in request.url):
        page.evaluate("""() => {
          delete document.hidden;
          document.dispatchEvent(new Event("visibilitychange"));
        }""")


def test_region_is_held_while_details_are_open(page: Page, rows: dict[str, Any]) -> None:
    Run.objects.filter(pk=rows["failed"].pk).update(state="lost")
    page.goto(rows["failed"].get_absolute_url())
    page.locator("summary").click()
    page.locator("h1").click()
    asked = polls(page)
    page.clock.run_for(MINUTE_MS)
    assert asked == []
    assert page.locator("#dc-live").inner_text() == "Held"
    page.locator("summary").click()
    page.evaluate("document.activeElement.blur()")
    with page.expect_request(lambda request: "fragment=live" in request.url):
        page.clock.run_for(16_000)


def test_region_is_held_while_a_link_in_it_has_focus(page: Page) -> None:
    page.goto("/cron/")
    page.locator(".dc-numbers a").first.focus()
    asked = polls(page)
    page.clock.run_for(MINUTE_MS)
    assert asked == []
    assert page.locator("#dc-live").inner_text() == "Held"


def test_region_says_how_old_it_is_while_the_server_fails(page: Page) -> None:
    def refuse(route: Route) -> None:
        route.fulfill(status=503, body="")

    page.goto("/cron/")
    page.route("**/*fragment=live*", refuse)
    with page.expect_response(lambda response: response.status == 503):
        page.clock.run_for(5_500)
    page.clock.run_for(7_000)
    label = page.locator(".dc-live--stale")
    label.wait_for()
    assert label.inner_text().startswith("Stale 1")
    page.unroute("**/*fragment=live*", refuse)
    page.clock.run_for(MINUTE_MS)
    page.locator(".dc-live--live").wait_for()


def test_everything_can_be_done_without_scripts(
    browser: Browser, live_server: Any, rows: dict[str, Any], problems: list[str]
) -> None:
    context = signed_in(browser, live_server, problems, java_script_enabled=False)
    page = context.new_page()
    page.goto("/cron/schedules/")
    page.get_by_role("link", name="Sync orders").click()
    page.get_by_role("link", name="Pause…").click()
    page.get_by_label("Reason").fill("vendor outage")
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("“Sync orders” is paused.").wait_for()
    assert page.locator("#dc-live").is_hidden()
    context.close()
    paused = Schedule.objects.get(key="sync-orders")
    assert (paused.state, paused.state_reason) == ("paused", "vendor outage")
