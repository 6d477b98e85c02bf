"""What the page of a run shows while the job runs, and of deliveries and recoveries."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from distcron_app.instants import database_now
from distcron_app.models import Attempt, RunOutput
from tests.integration.pages_rows import VIEWS, node, run, schedule, user
from tests.integration.test_pages_runs import page

pytestmark = pytest.mark.django_db

UNDONE = "What it had written to the scheduler&#x27;s database was undone."


def test_the_output_so_far_is_in_the_part_of_the_page_that_is_refreshed(
    admin_client: Client,
) -> None:
    own = run(schedule(), "running", node=node())
    assert "The job has printed nothing yet." in page(admin_client, own)
    first = admin_client.get(own.get_absolute_url(), {"fragment": "live"})
    RunOutput.objects.create(run=own, output="page 1 <b>\n")
    second = admin_client.get(own.get_absolute_url(), {"fragment": "live"})
    assert first["ETag"] != second["ETag"]
    assert "page 1 &lt;b&gt;" in second.text
    assert "So far, as of a few seconds ago." in second.text
    assert "data-dc-follow" in second.text


def test_the_output_so_far_needs_its_permission(client: Client) -> None:
    own = run(schedule(), "running", node=node())
    RunOutput.objects.create(run=own, output="page 1\n")
    client.force_login(user("siti", *VIEWS))
    assert "page 1" not in page(client, own)
    assert client.get(reverse("distcron:run_output", args=[own.pk])).status_code == 403


@pytest.mark.parametrize(
    ("state", "values", "caption"),
    [
        ("lost", {"reason": "node_died"}, "The last that its node reported."),
        ("queued", {"reason": "recovery", "attempt": 1}, "Of the attempt before"),
        ("succeeded", {}, ""),
    ],
)
def test_the_page_says_what_the_output_is(
    admin_client: Client, state: str, values: dict[str, Any], caption: str
) -> None:
    own = run(schedule(), state, **{"started_at": database_now(), **values})
    RunOutput.objects.create(run=own, output="page 1\n")
    html = page(admin_client, own)
    assert "page 1" in html
    assert caption in html
    assert "data-dc-follow" not in html


def test_a_checkpoint_and_how_far_an_attempt_had_come_are_shown(admin_client: Client) -> None:
    own = run(schedule(), "queued", reason="recovery", attempt=1, checkpoint={"page": "<3>"})
    Attempt.objects.create(
        run=own,
        number=1,
        fencing_token=1,
        ended_at=database_now(),
        reason="node_died",
        progress_percent=41.5,
        progress_message="Page <3>",
    )
    html = page(admin_client, own)
    assert "What the job stored last for its next attempt." in html
    assert "&quot;page&quot;: &quot;&lt;3&gt;&quot;" in html
    assert "It had come to 41.5 %." in html
    assert "Page &lt;3&gt;" in html


def test_a_run_without_a_checkpoint_shows_none(admin_client: Client) -> None:
    assert "Checkpoint" not in page(admin_client, run(schedule(), "failed"))


@pytest.mark.parametrize(
    ("state", "values", "sentence"),
    [
        (
            "lost",
            {"delivery": "at_least_once"},
            "Its schedule allows no other start after a crash.",
        ),
        (
            "lost",
            {"delivery": "at_least_once", "recoveries": 2},
            "It had been run again after a crash already, so it was not started again.",
        ),
        (
            "lost",
            {"delivery": "transactional", "recoveries": 1},
            "It is transactional: nothing that it wrote to the scheduler&#x27;s database was "
            "committed, and nothing of it will be.",
        ),
        (
            "queued",
            {"delivery": "transactional", "reason": "recovery", "attempt": 1},
            "It was cut off in the middle, and what it had written to the scheduler&#x27;s "
            "database was undone. It waits to run again.",
        ),
        (
            "failed",
            {"delivery": "transactional", "reason": "error"},
            f"It failed: the job raised an error. {UNDONE}",
        ),
        (
            "failed",
            {"delivery": "transactional", "reason": "stale"},
            "It failed: it no longer owned the run, so its writes were undone.",
        ),
    ],
)
def test_a_delivery_is_explained(
    admin_client: Client, state: str, values: dict[str, Any], sentence: str
) -> None:
    assert sentence in page(admin_client, run(schedule(), state, **values))


def test_nothing_is_undone_of_other_deliveries(admin_client: Client) -> None:
    assert "undone" not in page(admin_client, run(schedule(), "failed", reason="error"))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"delivery": "at_least_once", "max_recoveries": 1}, "after a crash at most 1 time<"),
        ({"delivery": "transactional", "max_recoveries": 3}, "after a crash at most 3 times<"),
        ({"delivery": "transactional", "max_recoveries": 0}, "after a crash at most 0 times<"),
    ],
)
def test_the_page_of_a_schedule_says_how_often_it_is_recovered(
    admin_client: Client, values: dict[str, Any], sentence: str
) -> None:
    assert sentence in admin_client.get(schedule(**values).get_absolute_url()).text


def test_the_form_offers_the_delivery_and_the_limit(admin_client: Client) -> None:
    html = admin_client.get(reverse("admin:distcron_schedule_add")).text
    assert '<option value="transactional">' in html
    assert 'name="max_recoveries"' in html


def test_no_list_reads_the_checkpoints(admin_client: Client) -> None:
    run(schedule(), "running", node=node(), checkpoint={"page": 3})
    for name in ("overview", "runs"):
        with CaptureQueriesContext(connection) as captured:
            admin_client.get(reverse(f"distcron:{name}"))
        assert [each for each in captured if "checkpoint" in each["sql"]] == []
