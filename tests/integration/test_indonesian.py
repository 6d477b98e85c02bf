"""No page and no command leaves a word in English to somebody who reads Indonesian."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from datetime import timedelta
from html.parser import HTMLParser
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.test import Client, override_settings
from django.urls import reverse
from django.utils.translation import override

from distcron_app.console import TextConsole
from distcron_app.instants import database_now
from distcron_app.models import Schedule
from tests.browser.seed import seed
from tests.integration import pages_rows
from tests.integration.lock_rows import NO_REDIS, hold, redis_locks, remove_ttl
from tests.integration.schedulerctl_builders import ctl

pytestmark = pytest.mark.django_db

# Words that no Indonesian text has, from the pages, the admin and the command line.
_WORDS = """
a about active add added after again ago all allowed already an and another any are arguments as
at attempt attempts back be because been before busy by cancel cancelled change changed claimed
click close command created day days delete deleted details did do does done download draining
due duration earlier edit empty ended error every expired expires failed finished fits for free
from go goes has have heartbeat held help history home hour hours if invalid is it its job jobs
key kind lag language last late left lists lock locks lost marked may message more must name
needs never new newer next no nobody nodes none not notes nothing object of often old older once
one only optional or other output over overdue overview owner page pages pause paused permission
pid planned previous process progress queued read reason reported reports required result resume
rule run running runs save schedule scheduler schedules search seconds select show sign since
skipped somebody started starts state stop succeeded that the their then there they this time
times timetable to too until updated user verb view waiting was what when where which who whole
why will with without yes yet you your zone
"""
ENGLISH = frozenset(_WORDS.split())
# What the rows of the tests say themselves, values of query strings, and what Django itself
# does not translate.
_ROWS = re.compile(
    r"- Select an option -"
    r"|Vendor outage until Monday|Job 'shop\.export': not registered\.|Page \d\d of 80"
    r"|\(state: [^)]*\)|(?<=Pilih salah satu dari: )[\w, ]+"
    r"|\w+Error: (?:451 )?The mail server [\w ,]+\."
    r"|Close invoices|Greet the team|Legacy sync|Mail digest|Nightly report|Old export|Sync orders"
)
# Names: dotted, with a slash or a hyphen, of flags, of locks, of settings and of commands.
_NAMES = re.compile(
    r"--[\w-]+|\w+(?:[./_-]\w+)+|\b(?:schedule|name):\w+|appendonly yes|READ COMMITTED"
    r"|schedulerctl (?:locks release|list|run)(?: KEY| NAME)?"
)
_SILENT_TAGS = {"code", "pre", "script", "style", "textarea"}
_SPOKEN_ATTRIBUTES = {
    *("alt", "aria-label", "placeholder", "title", "data-label"),
    *("data-live", "data-held", "data-held-title", "data-stale", "data-done"),
}
# The registered jobs with their docstrings, the recorded values of an audit entry, and a
# word that Django itself does not translate.
_DATA = {("id", "id_job"), ("class", "field-difference"), ("alt", "Search")}
_VOID_TAGS = {"br", "hr", "img", "input", "link", "meta"}


class _Visible(HTMLParser):
    """Collects what a person reads or hears; not code, nor what is marked as English."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._hidden: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        is_english = tag != "html" and given.get("lang") == "en"
        is_data = is_english or bool(_DATA & set(given.items()))
        if tag not in _VOID_TAGS and (self._hidden or tag in _SILENT_TAGS or is_data):
            self._hidden.append(tag)
            return
        spoken = [(name, value) for name, value in attrs if name in _SPOKEN_ATTRIBUTES]
        self.texts += [value or "" for name, value in spoken if (name, value) not in _DATA]
        if tag == "input" and given.get("type") == "submit":
            self.texts.append(given.get("value") or "")

    def handle_endtag(self, tag: str) -> None:
        if self._hidden and self._hidden[-1] == tag:
            self._hidden.pop()

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.texts.append(data)


def english_words(text: str) -> set[str]:
    """Return the English words of ``text``, without names and what the rows say."""
    prose = _NAMES.sub(" ", _ROWS.sub(" ", text))
    return {word for word in re.findall(r"\b[a-z]+\b", prose.lower()) if word in ENGLISH}


def english_on(page: Any) -> set[str]:
    visible = _Visible()
    visible.feed(page.text)
    return english_words("\n".join(visible.texts))


@pytest.fixture
def rows() -> dict[str, Any]:
    # At a second at which no two of its rows have the same instant.
    return seed((database_now() - timedelta(minutes=1)).replace(second=30))


@pytest.fixture
def reader(client: Client) -> Client:
    """Return a client of a superuser who reads Indonesian."""
    client.force_login(User.objects.create_superuser("ratna"))
    client.cookies["django_language"] = "id"
    return client


DASHBOARD = ["overview", "schedules", "runs", "nodes", "locks"]


@pytest.mark.parametrize("name", DASHBOARD)
def test_page_of_the_dashboard_is_indonesian(
    name: str, reader: Client, rows: dict[str, Any]
) -> None:
    assert english_on(reader.get(reverse(f"distcron:{name}"))) == set()


@pytest.mark.parametrize("name", DASHBOARD)
def test_page_without_rows_is_indonesian(name: str, reader: Client) -> None:
    assert english_on(reader.get(reverse(f"distcron:{name}"))) == set()


@pytest.mark.parametrize(
    "name",
    ["failed", "lost", "recovered", "late", "running", "skipped", "coalesced", "queued"],
)
def test_page_of_a_run_is_indonesian(name: str, reader: Client, rows: dict[str, Any]) -> None:
    assert english_on(reader.get(rows[name].get_absolute_url())) == set()


def test_page_of_every_schedule_is_indonesian(reader: Client, rows: dict[str, Any]) -> None:
    pages = [reader.get(schedule.get_absolute_url()) for schedule in Schedule.objects.all()]
    assert [english_on(page) for page in pages] == [set()] * 7


@pytest.mark.parametrize(
    ("verb", "row"), [("run_now", "schedule"), ("pause", "schedule"), ("resume", "paused")]
)
def test_confirmation_is_indonesian(
    verb: str, row: str, reader: Client, rows: dict[str, Any]
) -> None:
    address = reverse(f"distcron:{verb}", args=[rows[row].pk])
    assert english_on(reader.get(address)) == set()
    assert english_on(reader.post(address, {"reason": "", "idempotency_key": "x"})) == set()


def test_done_actions_are_told_in_indonesian(reader: Client, rows: dict[str, Any]) -> None:
    address = reverse("distcron:pause", args=[rows["schedule"].pk])
    sent = {"reason": "Libur", "idempotency_key": "k" * 32}
    page = reader.post(address, sent, follow=True)
    assert "“Close invoices” dijeda." in page.text
    assert english_on(page) == set()


def test_refused_run_is_told_in_indonesian(reader: Client, rows: dict[str, Any]) -> None:
    address = reverse("distcron:run_now", args=[rows["schedule"].pk])
    page = reader.post(address, {"reason": "", "idempotency_key": "k" * 32})
    assert page.status_code == 409
    assert "Jadwal sedang sibuk, sehingga tidak ada yang masuk antrean." in page.text
    assert english_on(page) == set()


@pytest.fixture
def locked(rows: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows, with a lock of a live node, one of a dead node, and one without a TTL."""
    with redis_locks() as namespace:
        running, paused = rows["running"].schedule_id, rows["paused"].pk
        hold(f"schedule:{running}", "a" * 32, holder="web-1", namespace=namespace)
        hold(f"schedule:{paused}", "b" * 32, holder="web-4", namespace=namespace)
        hold("name:orphan", "d" * 32, holder="", namespace=namespace)
        remove_ttl("name:orphan", namespace)
        yield rows


def test_held_locks_are_told_in_indonesian(reader: Client, locked: dict[str, Any]) -> None:
    page = reader.get(reverse("distcron:locks"))
    assert "Eksekusinya aktif; detak node web-1 terlambat." in page.text
    assert english_on(page) == set()
    assert english_on(reader.get(locked["paused"].get_absolute_url())) == set()


def test_locks_that_do_not_answer_are_told_in_indonesian(reader: Client, settings: Any) -> None:
    settings.DISTCRON = {"LOCK_BACKEND": "redis"}
    with override_settings(CACHES=NO_REDIS):
        page = reader.get(reverse("distcron:locks"))
    assert "Kunci: tidak diketahui." in page.text
    # The cause is what the operating system and Redis' own client say.
    assert english_on(page) <= {"to", "error"}


@pytest.mark.parametrize("name", ["running", "orphan"])
def test_release_of_a_lock_is_asked_and_refused_in_indonesian(
    name: str, reader: Client, locked: dict[str, Any]
) -> None:
    lock = f"schedule:{locked['running'].schedule_id}" if name == "running" else f"name:{name}"
    address = f"{reverse('distcron:release_lock')}?name={lock}&level=standard"
    asked = reader.get(address)
    refused = reader.post(address, {"lock": "nope", "reason": "", "idempotency_key": "k" * 32})
    assert "Lepas paksa" in asked.text
    assert "“nope” bukan kunci ini." in refused.text
    assert [english_on(page) for page in (asked, refused)] == [set(), set()]


def test_released_lock_is_told_in_indonesian(reader: Client, locked: dict[str, Any]) -> None:
    lock = f"schedule:{locked['running'].schedule_id}"
    address = f"{reverse('distcron:release_lock')}?name={lock}&level=standard"
    sent = {"lock": "nightly-report", "reason": "Libur", "idempotency_key": "k" * 32}
    page = reader.post(address, sent, follow=True)
    assert "Kunci dilepas." in page.text
    assert english_on(page) == set()
    lost = reader.get(locked["running"].get_absolute_url())
    assert "Seseorang melepas kuncinya" in lost.text
    assert english_on(lost) == set()


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("/cron/runs/?state=bogus&node=web-99&schedule=nope", 400),
        ("/cron/runs/?job=nope", 200),
        ("/cron/schedules/?state=bogus", 400),
        ("/cron/schedules/?q=nope", 200),
        ("/cron/runs/123456789/", 404),
        ("/cron/schedules/123456789/", 404),
        ("/no/such/page", 404),
    ],
)
def test_page_that_finds_nothing_is_indonesian(
    address: str, status: int, reader: Client, rows: dict[str, Any]
) -> None:
    page = reader.get(address)
    assert page.status_code == status
    assert english_on(page) == set()


def test_refusal_and_sign_in_are_indonesian(client: Client) -> None:
    client.cookies["django_language"] = "id"
    assert english_on(client.get(reverse("login"))) == set()
    client.force_login(pages_rows.user("budi", "view_node"))
    refused = client.get(reverse("distcron:runs"))
    assert refused.status_code == 403
    assert english_on(refused) == set()


def test_silent_node_and_alert_are_indonesian(reader: Client) -> None:
    pages_rows.node("web-1", lease_seconds=-5)
    with override("id"):
        assert "tidak memberi kabar" in reader.get(reverse("distcron:nodes")).text
    assert english_on(reader.get(reverse("distcron:nodes"))) == set()


@pytest.mark.parametrize("model", ["schedule", "run", "node", "auditentry"])
def test_admin_list_and_detail_are_indonesian(
    model: str, reader: Client, rows: dict[str, Any]
) -> None:
    _leave_audit_entries(reader, rows)
    page = reader.get(reverse(f"admin:distcron_{model}_changelist"))
    assert english_on(page) == set()
    details = _details(reader, model)
    assert [english_on(page) for page in details] == [set()] * len(details)


def _leave_audit_entries(reader: Client, rows: dict[str, Any]) -> None:
    for number, (verb, row) in enumerate([("pause", "schedule"), ("resume", "paused")]):
        address = reverse(f"distcron:{verb}", args=[rows[row].pk])
        reader.post(address, {"reason": "Libur", "idempotency_key": f"{number}" * 32})


def _details(reader: Client, model: str) -> list[Any]:
    keys = apps.get_model("distcron", model).objects.values_list("pk", flat=True)[:12]
    return [reader.get(reverse(f"admin:distcron_{model}_change", args=[key])) for key in keys]


def test_admin_form_is_indonesian_and_refuses_so(reader: Client, rows: dict[str, Any]) -> None:
    address = reverse("admin:distcron_schedule_add")
    assert english_on(reader.get(address)) == set()
    sent = {"kind": "cron", "cron": "0 9 * * *", "arguments": "[1]", "timezone": "Asia/Jakart"}
    refused = reader.post(address, sent)
    assert "Maksud Anda Asia/Jakarta?" in refused.text
    assert english_on(refused) == set()


@pytest.mark.parametrize("name", ["index", "distcron_schedule_history", "distcron_schedule_delete"])
def test_other_pages_of_the_admin_are_indonesian(
    name: str, reader: Client, rows: dict[str, Any]
) -> None:
    _leave_audit_entries(reader, rows)
    row = [] if name == "index" else [rows["schedule"].pk]
    assert english_on(reader.get(reverse(f"admin:{name}", args=row))) == set()


@pytest.mark.parametrize(("verb", "done"), [("run", "masuk antrean"), ("pause", "1 jadwal dijeda")])
def test_verb_of_the_admin_asks_and_reports_in_indonesian(
    verb: str, done: str, reader: Client
) -> None:
    schedule = pages_rows.schedule("sync-orders", name="Sync orders")
    address = reverse("admin:distcron_schedule_act", args=[verb])
    assert english_on(reader.get(address, {"ids": schedule.pk})) == set()
    sent = {"ids": schedule.pk, "idempotency_key": "k" * 32, "reason": "Libur", "confirm": "yes"}
    page = reader.post(address, sent, follow=True)
    assert done in page.text
    assert english_on(page) == set()


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["next", "30 2 * * *", "--from", "2027-03-12", "-n", "4"],
        ["next", "30 2 * * *", "--from", "2027-03-12", "--tz", "America/New_York"],
        ["status"],
        ["nodes", "--all", "--wide"],
        ["locks"],
        ["pause", "invoice-close", "--reason", "Libur", "--dry-run"],
        ["resume", "--all"],
        ["run", "nope"],
    ],
    ids=lambda words: words[0],
)
def test_command_speaks_indonesian(words: list[str], rows: dict[str, Any]) -> None:
    answer = ctl(*words, "--lang", "id")
    assert english_words(f"{answer.out}\n{answer.error}") == set()


@pytest.mark.parametrize(
    "words",
    [
        ["locks", "--wide"],
        ["locks", "ttl", "nightly-report"],
        ["locks", "ttl", "orphan"],
        ["locks", "ttl", "nope"],
        ["locks", "release", "nightly-report", "--reason", "Libur"],
        ["locks", "release", "nightly-report", "--reason", "Libur", "--yes"],
        ["locks", "release", "orphan", "--reason", "", "--yes"],
    ],
    ids=" ".join,
)
def test_command_of_the_locks_speaks_indonesian(words: list[str], locked: dict[str, Any]) -> None:
    answer = ctl(*words, "--lang", "id")
    assert answer.out + answer.error
    assert english_words(f"{answer.out}\n{answer.error}") == set()


def test_doctor_speaks_indonesian(locked: dict[str, Any]) -> None:
    answer = ctl("doctor", "--lang", "id")
    assert "kunci tanpa TTL: 1 (name:orphan)" in answer.out
    assert english_words(f"{answer.out}\n{answer.error}") == set()


def test_list_of_the_command_has_indonesian_titles(rows: dict[str, Any]) -> None:
    titles = ctl("list", "--lang", "id").lines[0].split()
    assert titles == ["STATUS", "KODE", "KAPAN", "TERAKHIR", "BERIKUTNYA"]


def test_json_of_the_command_stays_as_it_is(rows: dict[str, Any]) -> None:
    schedule = ctl("list", "--json", "--lang", "id").data["schedules"][0]
    assert (schedule["key"], schedule["state"]) == ("greet-team", "active")
    assert schedule["words"] == "Pukul 09.00, Senin s.d. Jumat"


def test_node_tells_its_events_in_indonesian() -> None:
    stream = io.StringIO()
    console = TextConsole(stream, time_zone="Asia/Jakarta", colour=False)
    with override("id"):
        console("node_dead", node="0b1c2d3e4f")
        console("draining", running=2, seconds=30.0)
        console("recovered", requeued=[4], lost=[5, 6])
        console("locks_away", level="quorum", waits=True, cause="ECONNREFUSED")
        console("locks_back", level="quorum")
    texts = [line.split(" ", 2)[2] for line in stream.getvalue().splitlines()]
    assert texts == [
        "node 0b1c2d3e mati: sewanya berakhir",
        "mengosongkan: tersisa 2 eksekusi, paling lama 30 detik; sinyal kedua langsung "
        "menghentikan",
        "eksekusi dipulihkan; antre kembali: eksekusi 4; hilang: eksekusi 5, 6",
        "tingkat kunci quorum tidak tersedia, jadwalnya menunggu: ECONNREFUSED",
        "kunci pulih (tingkat quorum)",
    ]


def test_english_page_is_recognised_as_such(client: Client, rows: dict[str, Any]) -> None:
    client.force_login(User.objects.create_superuser("ratna"))
    found = english_on(client.get(reverse("distcron:overview")))
    assert {"schedules", "of", "busy", "running", "ago", "next", "state"} <= found
