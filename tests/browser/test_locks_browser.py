"""The locks page in a real Chromium: a live holder, a stuck lock, and a forced release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from distcron_app import lifecycle
from distcron_app.instants import database_now
from distcron_app.models import AuditEntry, Run, Schedule
from tests.browser.test_pages_browser import FAINT_TEXT, browser, problems, rows, signed_in
from tests.integration.lock_rows import hold, is_held, redis_locks, remove_ttl

__all__ = ["browser", "problems", "rows"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
]

TOKEN = "a" * 32


@pytest.fixture
def locked(rows: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a busy week, with a lock of a live node, a dead one's and a stuck one."""
    report = rows["running"].schedule
    Schedule.objects.filter(pk=report.pk).update(fencing_token=4711)
    with redis_locks() as namespace:
        hold(f"schedule:{report.pk}", TOKEN, holder="web-1", namespace=namespace)
        hold(f"schedule:{rows['paused'].pk}", "b" * 32, holder="web-4", namespace=namespace)
        hold("name:monthly export 🦜", "c" * 32, holder="web-2", namespace=namespace)
        hold("name:orphan", "d" * 32, holder="", namespace=namespace)
        remove_ttl("name:orphan", namespace)
        yield rows


def row(page: Page, text: str) -> Any:
    return page.locator("tbody tr").filter(has_text=text)


def test_a_person_looks_at_the_locks_and_releases_two(
    browser: Browser, live_server: Any, locked: dict[str, Any], problems: list[str]
) -> None:
    running: Run = locked["running"]
    context = signed_in(browser, live_server, problems)
    page = context.new_page()
    page.goto("/cron/locks/")
    assert "healthy" in row(page, "Nightly report").inner_text()
    assert "web-1" in row(page, "Nightly report").inner_text()
    assert "expires by itself" in row(page, "Legacy sync").inner_text()
    assert "dead" in row(page, "Legacy sync").inner_text()
    assert "stuck" in row(page, "orphan").inner_text()

    row(page, "Nightly report").get_by_role("link", name="Force release…").click()
    page.get_by_text("Node web-1 is alive and will lose the lock").wait_for()
    page.get_by_label("Name of the lock").fill("mail-digest")
    page.get_by_label("Reason").fill("node hangs")
    page.get_by_role("button", name="Force release").click()
    page.get_by_text("“mail-digest” is not this lock.").wait_for()
    assert page.get_by_label("Reason").input_value() == "node hangs"
    assert is_held(f"schedule:{running.schedule_id}")

    page.get_by_label("Name of the lock").fill("nightly-report")
    page.get_by_label("Reason").fill("")
    # The browser itself asks for what is missing, and the page stays.
    page.get_by_role("button", name="Force release").click()
    assert page.get_by_label("Reason").evaluate("each => each.validity.valueMissing") is True
    assert is_held(f"schedule:{running.schedule_id}")

    page.get_by_label("Reason").fill("node hangs")
    page.get_by_role("button", name="Force release").dblclick()
    page.get_by_text("The fencing token is 4712.").wait_for()
    assert not is_held(f"schedule:{running.schedule_id}")
    assert Schedule.objects.get(pk=running.schedule_id).fencing_token == 4712
    assert AuditEntry.objects.filter(verb="release_lock").count() == 1

    report_late(running)
    page.goto(running.get_absolute_url())
    page.get_by_text("A person released its lock while the job was running").wait_for()
    page.get_by_text("The report was refused and changed nothing").wait_for()

    page.goto("/cron/locks/")
    row(page, "orphan").get_by_role("link", name="Force release…").click()
    page.get_by_label("Name of the lock").fill("orphan")
    page.get_by_label("Reason").fill("left by a foreign hand")
    page.get_by_role("button", name="Force release").click()
    page.get_by_text("“name:orphan”: The lock is released.").wait_for()
    assert row(page, "orphan").count() == 0
    context.close()
    # The refused form is an answer with status 400, which the console notes.
    assert [text for text in problems if "400 (Bad Request)" not in text] == []


def report_late(running: Run) -> None:
    """Report the end of the job as the node does that lost the lock."""
    lifecycle.finish(
        [
            lifecycle.Finished(
                run_id=running.pk,
                fencing_token=running.fencing_token,
                owner_token=running.owner_token,
                state="succeeded",
                finished_at=database_now(),
            )
        ]
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_locks_are_readable_and_fit(
    browser: Browser,
    live_server: Any,
    locked: dict[str, Any],
    problems: list[str],
    width: int,
    scheme: str,
) -> None:
    size = {"width": width, "height": 800}
    context = signed_in(browser, live_server, problems, viewport=size, color_scheme=scheme)
    page = context.new_page()
    name = f"schedule%3A{locked['running'].schedule_id}"
    for path in ("/cron/locks/", f"/cron/locks/release/?name={name}"):
        answer = page.goto(path)
        assert answer is not None
        assert answer.status == 200, path
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert page.evaluate(FAINT_TEXT) == [], path
    context.close()
    assert problems == []
