"""The switch that keeps all nodes from claiming: audited, with an end, seen by each sweep."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from distcron_app import operations
from distcron_app.clock import Clock
from distcron_app.conf import get_config
from distcron_app.instants import database_now
from distcron_app.maintenance import Sweeper
from distcron_app.models import AuditEntry, Maintenance
from tests.factories import make_user
from tests.integration.schedulerctl_builders import ctl

pytestmark = pytest.mark.django_db

WHO: dict[str, Any] = {"actor": "siti", "via": "cli"}


def seen() -> bool:
    """Return whether a sweep of a node finds the switch on."""
    sweeper = Sweeper(config=get_config(), clock=Clock())
    return sweeper.sweep(uuid.uuid4(), (), 0.0).maintenance is not None


def test_it_is_off_at_first() -> None:
    assert not seen()


def test_each_sweep_sees_it_from_on_to_off() -> None:
    operations.begin_maintenance(reason="database move", **WHO)
    assert seen()
    assert operations.end_maintenance(**WHO) is not None
    assert not seen()


def test_it_is_over_when_its_end_has_come() -> None:
    operations.begin_maintenance(reason="move", until=database_now() + timedelta(hours=1), **WHO)
    assert seen()
    Maintenance.objects.update(until=database_now() - timedelta(seconds=1))
    assert not seen()
    assert operations.end_maintenance(**WHO) is None


def test_both_ways_are_in_the_audit() -> None:
    operations.begin_maintenance(reason="move", **WHO)
    operations.end_maintenance(reason="done", **WHO)
    entries = AuditEntry.objects.order_by("id").values_list(
        "verb", "actor", "reason", "object_type", "after"
    )
    assert list(entries) == [
        ("maintenance_on", "siti", "move", "maintenance", {"is_on": True, "until": None}),
        ("maintenance_off", "siti", "done", "maintenance", {"is_on": False, "until": None}),
    ]


def test_on_while_it_is_on_replaces_reason_and_end() -> None:
    operations.begin_maintenance(reason="move", until=database_now() + timedelta(hours=1), **WHO)
    operations.begin_maintenance(reason="it takes longer", **WHO)
    row = Maintenance.objects.get()
    assert (row.reason, row.until, row.by) == ("it takes longer", None, "siti")


def test_off_while_it_is_off_changes_nothing() -> None:
    assert operations.end_maintenance(**WHO) is None
    assert not AuditEntry.objects.exists()


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"reason": " "}, "Reason: missing"),
        ({"reason": "x" * 501}, "501 characters, allowed 500"),
    ],
)
def test_a_reason_that_is_none_is_refused(values: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        operations.begin_maintenance(**values, **WHO)
    assert not seen()


def test_every_page_shows_it_with_who_why_and_until(admin_client: Client) -> None:
    assert "Maintenance" not in admin_client.get("/cron/").text
    until = database_now() + timedelta(hours=1)
    operations.begin_maintenance(reason="database move", until=until, **WHO)
    for path in ("/cron/", "/cron/schedules/", "/cron/nodes/"):
        html = admin_client.get(path).text
        assert "Maintenance: nothing is claimed." in html
        assert "database move" in html
        assert "siti" in html
        assert "until" in html


class TestCommand:
    def test_on_and_off(self) -> None:
        answer = ctl("maintenance", "on", "--reason", "move", "--until", "+30m")
        assert answer.code == 0, answer.error
        assert "Maintenance is on until" in answer.error
        assert seen()
        assert ctl("status", "--json").data["maintenance"] is True
        assert "nothing is claimed: move" in ctl("status").out
        answer = ctl("maintenance", "off")
        assert answer.error == "Maintenance is off: the nodes claim again.\n"
        assert ctl("maintenance", "off").error == "Maintenance was off.\n"

    def test_json_has_these_keys(self) -> None:
        facts = ctl("maintenance", "on", "--reason", "move", "--json").data
        assert facts == {
            "version": 1,
            "verb": "maintenance",
            "on": True,
            "changed": True,
            "reason": "move",
            "by": facts["by"],
            "until": None,
        }
        off = ctl("maintenance", "off", "--json").data
        assert (off["on"], off["changed"]) == (False, True)

    @pytest.mark.parametrize(
        ("words", "code", "problem"),
        [
            (("on",), 2, "--reason: missing."),
            (("on", "--reason", "x", "--until", "2020-01-01"), 2, "is over"),
            (("off", "--until", "+1h"), 2, "--until: is for maintenance on."),
        ],
    )
    def test_what_is_wrong_is_named(self, words: tuple[str, ...], code: int, problem: str) -> None:
        answer = ctl("maintenance", *words)
        assert answer.code == code
        assert problem in answer.error
        assert not seen()

    def test_a_user_needs_the_permission(self) -> None:
        make_user("distcron.pause_schedule", username="budi")
        answer = ctl("maintenance", "on", "--reason", "x", "--user", "budi")
        assert answer.code == 5
        assert "distcron.change_maintenance" in answer.error
        make_user("distcron.change_maintenance", username="siti")
        assert ctl("maintenance", "on", "--reason", "x", "--user", "siti").code == 0
        assert Maintenance.objects.get().by == "siti"
