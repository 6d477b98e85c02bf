"""Filters, paging, polling and the number of queries of the pages."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client
from django.test.utils import CaptureQueriesContext

from distcron_app import history
from distcron_app.models import Run, RunOutput, Schedule
from tests.integration.pages_rows import VIEWS, node, run, schedule, user

pytestmark = [
    pytest.mark.django_db,
]


def many_runs(of: Schedule, count: int) -> list[int]:
    template = run(of)
    template.delete()
    rows = []
    for _number in range(count):
        template.pk = None
        rows.append(Run(**{f.attname: getattr(template, f.attname) for f in Run._meta.fields}))
    return sorted(row.pk for row in Run.objects.bulk_create(rows))


def ids_of(html: str) -> list[int]:
    return [
        int(found) for found in re.findall(r'<th scope="row"><a href="/cron/runs/(\d+)/"', html)
    ]


def link(html: str, rel: str) -> str | None:
    found = re.search(rf'rel="{rel}" href="(\?[^"]+)"', html)
    return found[1].replace("&amp;", "&") if found else None


def test_pages_of_runs_show_each_run_once_in_both_directions(admin_client: Client) -> None:
    ids = many_runs(schedule(), 120)
    path: str | None = ""
    pages = []
    while path is not None:
        html = admin_client.get(f"/cron/runs/{path}").text
        pages.append(ids_of(html))
        path, back = link(html, "next"), link(html, "prev")
    assert [len(page) for page in pages] == [50, 50, 20]
    assert [each for page in pages for each in page] == ids[::-1]
    html = admin_client.get(f"/cron/runs/{back}").text
    assert ids_of(html) == pages[1]
    back = link(html, "prev")
    html = admin_client.get(f"/cron/runs/{back}").text
    assert ids_of(html) == pages[0]
    assert link(html, "prev") is None


def test_new_runs_do_not_move_the_pages(admin_client: Client) -> None:
    own = schedule()
    many_runs(own, 60)
    html = admin_client.get("/cron/runs/").text
    older = link(html, "next")
    expected = ids_of(admin_client.get(f"/cron/runs/{older}").text)
    many_runs(own, 10)
    assert ids_of(admin_client.get(f"/cron/runs/{older}").text) == expected


def test_paging_keeps_the_filters(admin_client: Client) -> None:
    many_runs(schedule(), 60)
    html = admin_client.get("/cron/runs/?state=succeeded&job=project.demo.heartbeat").text
    older = link(html, "next")
    assert older is not None
    assert "state=succeeded&job=project.demo.heartbeat&before=" in older


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("state=failed", ["failed"]),
        ("state=failed&state=lost", ["lost", "failed"]),
        ("schedule=beta", ["lost"]),
        ("node=web-2", ["failed"]),
        ("trigger=manual", ["lost"]),
        ("job=project.demo.greet", ["lost"]),
        ("", ["lost", "failed", "succeeded"]),
    ],
)
def test_filters_narrow_the_list(admin_client: Client, query: str, expected: list[str]) -> None:
    alpha = schedule("alpha")
    beta = schedule("beta", job="project.demo.greet", arguments={"name": "you"})
    run(alpha, "succeeded", node=node("web-1"))
    run(alpha, "failed", node=node("web-2"))
    run(beta, "lost", trigger="manual")
    html = admin_client.get(f"/cron/runs/?{query}").text
    rows = html.split("<tbody>")[1].split("</tbody>")[0]
    assert re.findall(r'class="dc-state dc-state--(\w+)"', rows) == expected


def test_filter_takes_the_id_of_a_schedule_and_of_a_node(admin_client: Client) -> None:
    own, holder = schedule("alpha"), node()
    wanted = run(own, node=holder)
    run(schedule("beta"))
    for query in (f"schedule={own.pk}", f"node={holder.pk}"):
        assert ids_of(admin_client.get(f"/cron/runs/?{query}").text) == [wanted.pk]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("state=bogus", "“bogus” is not known. Choose one of: queued, claimed, running,"),
        ("trigger=cron", "“cron” is not known. Choose one of: timetable, manual, chain."),
        ("schedule=nope", "No schedule has the key “nope”."),
        ("node=nope", "No node is called “nope”."),
        ("before=abc", "Before: Enter a whole number."),
        ("after=-5", "After: Ensure this value is greater than or equal to 0."),
        (f"before={10**30}", "Before: Ensure this value is less than or equal to"),
        ("job=" + "x" * 500, "Job: Ensure this value has at most 100 characters"),
        ("node=%00", "Node: Null characters are not allowed."),
    ],
)
def test_unusable_filter_says_what_is_allowed(
    admin_client: Client, query: str, message: str
) -> None:
    answer = admin_client.get(f"/cron/runs/?{query}")
    assert answer.status_code == 400
    assert "The filter cannot be used." in answer.text
    assert message in answer.text


def test_unusable_filter_of_schedules_says_what_is_allowed(admin_client: Client) -> None:
    answer = admin_client.get("/cron/schedules/?state=late")
    assert answer.status_code == 400
    assert "Choose one of: active, paused, exhausted, invalid, overdue." in answer.text


def test_filter_that_fits_nothing_offers_a_way_out(admin_client: Client) -> None:
    run(schedule())
    assert "No run fits these filters." in admin_client.get("/cron/runs/?state=lost").text
    assert "No schedule fits these filters." in admin_client.get("/cron/schedules/?q=zzz").text


def test_schedules_are_found_by_name_and_paged(admin_client: Client) -> None:
    Schedule.objects.bulk_create(
        Schedule(key=f"row-{number:03}", name=f"Row {number:03}", job="x", cron="0 2 * * *")
        for number in range(130)
    )
    first = admin_client.get("/cron/schedules/").text
    assert "Row 099" in first
    assert "Row 100" not in first
    second = admin_client.get(f"/cron/schedules/{link(first, 'next')}").text
    assert "Row 100" in second
    assert "Row 129" in admin_client.get("/cron/schedules/?q=row 129").text


PATHS = ["/cron/", "/cron/schedules/", "/cron/runs/", "/cron/nodes/", "/cron/locks/"]
# All queries of a superuser's request: session and user are two of them.
BUDGETS = {
    "/cron/": 8,
    "/cron/schedules/": 6,
    "/cron/runs/": 4,
    "/cron/nodes/": 4,
    "/cron/locks/": 4,
}


@pytest.mark.parametrize("path", PATHS)
def test_queries_do_not_grow_with_the_rows(
    admin_client: Client, path: str, django_assert_max_num_queries: Any
) -> None:
    from django.db import connection

    def grow(name: str) -> None:
        holder = node(name)
        for number in range(3):
            own = schedule(f"{name}-{number}")
            for state in Run.State.values:
                run(own, state, node=holder)

    grow("web-1")
    with CaptureQueriesContext(connection) as few:
        admin_client.get(path)
    grow("web-2")
    grow("web-3")
    with django_assert_max_num_queries(BUDGETS[path]) as many:
        admin_client.get(path)
    assert len(many) == len(few)


def test_pages_of_one_row_stay_within_their_budget(
    client: Client, django_assert_max_num_queries: Any
) -> None:
    own = schedule()
    target = run(own, "failed", node=node())
    RunOutput.objects.create(run=target, output="x")
    client.force_login(user("siti", *VIEWS, "view_output"))
    with django_assert_max_num_queries(9):
        client.get(target.get_absolute_url())
    with django_assert_max_num_queries(9):
        client.get(own.get_absolute_url())


def test_runs_are_never_counted(admin_client: Client) -> None:
    from django.db import connection

    own = schedule()
    many_runs(own, 60)
    with CaptureQueriesContext(connection) as queries:
        for path in [*PATHS, own.get_absolute_url(), "/cron/runs/?state=failed"]:
            admin_client.get(path)
    of_runs = [query["sql"] for query in queries if "distcron_run" in query["sql"]]
    assert of_runs
    assert not [sql for sql in of_runs if "COUNT(" in sql.upper() and 'FROM "distcron_run"' in sql]


@pytest.mark.parametrize("path", PATHS)
def test_region_alone_is_part_of_the_page(admin_client: Client, path: str) -> None:
    node()
    run(schedule())
    region = admin_client.get(path, {"fragment": "live"})
    page = admin_client.get(path).text
    # How quickly the locks answer differs from one look to the next.
    took = re.compile(r"[0-9]+ ms")
    assert took.sub("", region.text) in took.sub("", page)
    assert "<html" not in region.text
    if not took.search(region.text):
        assert f'data-dc-etag="{region["ETag"].replace(chr(34), "&quot;")}"' in page


@pytest.mark.parametrize("path", PATHS)
def test_region_has_no_form_control(admin_client: Client, path: str) -> None:
    region = admin_client.get(path, {"fragment": "live"}).text
    assert not re.search(r"<(input|button|select|textarea|form)\b", region)


def test_unchanged_region_is_answered_by_304(admin_client: Client) -> None:
    own = run(schedule())
    path = own.get_absolute_url()
    etag = admin_client.get(path, {"fragment": "live"})["ETag"]
    again = admin_client.get(path, {"fragment": "live"}, headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")
    assert again["Content-Security-Policy"].startswith("default-src 'none'")
    Run.objects.filter(pk=own.pk).update(result={"closed": 7})
    changed = admin_client.get(path, {"fragment": "live"}, headers={"If-None-Match": etag})
    assert changed.status_code == 200
    assert changed["ETag"] != etag
    assert "closed" in changed.text


@pytest.mark.parametrize(
    ("state", "seconds"), [("running", "2"), ("queued", "2"), ("succeeded", "0"), ("lost", "15")]
)
def test_run_page_is_polled_until_the_run_is_final(
    admin_client: Client, state: str, seconds: str
) -> None:
    own = run(schedule(), state, node=node())
    answer = admin_client.get(own.get_absolute_url(), {"fragment": "live"})
    assert answer["X-Distcron-Poll"] == seconds


def test_new_runs_are_announced_and_not_inserted(admin_client: Client) -> None:
    own = schedule()
    first = run(own)
    page = admin_client.get("/cron/runs/?state=succeeded").text
    found = re.search(r'data-dc-poll="([^"]+)"', page)
    assert found
    poll = found[1].replace("&amp;", "&")
    assert "new run" not in admin_client.get(poll).text
    for _number in range(2):
        run(own)
    run(own, "failed")
    region = admin_client.get(poll).text
    assert ids_of(region) == [first.pk]
    assert '<a href="?state=succeeded">2 new runs, show</a>' in region


def test_more_new_runs_than_a_page_are_not_counted_to_the_end(admin_client: Client) -> None:
    own = schedule()
    first = run(own)
    many_runs(own, history.PAGE_SIZE + 5)
    region = admin_client.get("/cron/runs/", {"fragment": "live", "top": first.pk}).text
    assert "More than 50 new runs, show" in region
