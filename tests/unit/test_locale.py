"""The Indonesian catalogues: complete, compiled, and the sentences they make."""

from __future__ import annotations

import ast
import dataclasses
import gettext
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
from django.utils.translation import override

from distcron_app import builtin_jobs, registry
from distcron_app.errors import ScheduleBusy, TimetableError, UnknownJob
from distcron_app.explanations import explain
from distcron_app.models import AuditEntry, Run, Schedule
from distcron_app.templatetags.distcron import duration, relative
from distcron_app.timetable import Cron, Interval, Once, build, canonical
from distcron_app.wording import describe
from project.demo import jobs

ROOT = Path(__file__).resolve().parent.parent.parent
CATALOGUES = ["distcron_app", "project"]
NOW = datetime(2026, 11, 30, 7, 0, tzinfo=UTC)
_PLACEHOLDER = re.compile(r"%(?:\(\w+\))?[+0]?\d*(?:\.\d+)?[sdrgf%]|\{\w*\}")


@dataclasses.dataclass(kw_only=True)
class Entry:
    """One message of a catalogue; ``texts`` by keyword: msgctxt, msgid, msgstr …"""

    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    is_fuzzy: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(self.texts.get(word, "") for word in ("msgctxt", "msgid", "msgid_plural"))

    @property
    def translation(self) -> str:
        return self.texts.get("msgstr", "") or self.texts.get("msgstr[0]", "")


def entries(catalogue: Path) -> list[Entry]:
    """Return the messages of a .po file without its header."""
    found = [_entry(block) for block in re.split(r"\n\s*\n", catalogue.read_text(encoding="utf-8"))]
    return [entry for entry in found if entry.texts.get("msgid")]


def _entry(block: str) -> Entry:
    entry, word = Entry(), ""
    for line in block.splitlines():
        if line.startswith("#"):
            entry.is_fuzzy = entry.is_fuzzy or (line.startswith("#,") and "fuzzy" in line)
            continue
        given, _space, quoted = line.partition(" ") if not line.startswith('"') else ("", "", line)
        word = given or word
        entry.texts[word] = entry.texts.get(word, "") + ast.literal_eval(quoted)
    return entry


def committed(catalogue: str, suffix: str = "po") -> Path:
    return ROOT / catalogue / "locale" / "id" / "LC_MESSAGES" / f"django.{suffix}"


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the code whose catalogues hold what makemessages finds in it."""
    copy = tmp_path_factory.mktemp("extracted")
    ignored = shutil.ignore_patterns("__pycache__", "LC_MESSAGES")
    for folder in ("distcron_app", "project", "templates"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    shutil.copy(ROOT / "manage.py", copy)
    subprocess.run(
        [sys.executable, "manage.py", "makemessages", "-l", "id", "--no-location"],
        cwd=copy,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "project.settings"},
        check=True,
        capture_output=True,
    )
    return copy


@pytest.mark.parametrize("catalogue", CATALOGUES)
def test_catalogue_has_the_messages_of_the_code_and_no_other(
    catalogue: str, extracted: Path
) -> None:
    fresh = extracted / committed(catalogue).relative_to(ROOT)
    wanted = {entry.key for entry in entries(fresh)}
    assert wanted
    assert {entry.key for entry in entries(committed(catalogue))} == wanted


@pytest.mark.parametrize("catalogue", CATALOGUES)
def test_message_in_an_f_string_is_in_the_catalogue(catalogue: str) -> None:
    """makemessages looks into no f-string, so a message that is only there is never translated."""
    known = {entry.texts["msgid"] for entry in entries(committed(catalogue))}
    hidden = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in (ROOT / catalogue).rglob("*.py")
        for text in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(text, ast.JoinedStr)
        for call in ast.walk(text)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        if call.func.id == "_" or call.func.id.endswith("gettext")
        if any(isinstance(given, ast.Constant) and given.value not in known for given in call.args)
    ]
    assert hidden == []


@pytest.mark.parametrize("catalogue", CATALOGUES)
def test_every_message_is_translated_for_certain(catalogue: str) -> None:
    text = committed(catalogue).read_text(encoding="utf-8")
    found = entries(committed(catalogue))
    assert "#~" not in text
    assert [entry.key for entry in found if entry.is_fuzzy or not entry.translation.strip()] == []


@pytest.mark.parametrize("catalogue", CATALOGUES)
def test_catalogue_names_no_place_in_the_code_or_on_a_machine(catalogue: str) -> None:
    text = committed(catalogue).read_text(encoding="utf-8")
    assert re.findall(r"^#: .*|POT-Creation-Date.*|Last-Translator.*", text, re.MULTILINE) == []
    assert '"Plural-Forms: nplurals=1; plural=0;\\n"' in text


@pytest.mark.parametrize("catalogue", CATALOGUES)
def test_compiled_catalogue_is_the_committed_text(catalogue: str, tmp_path: Path) -> None:
    compiled = tmp_path / "django.mo"
    command = ["msgfmt", "--check-format", "-o", str(compiled), str(committed(catalogue))]
    subprocess.run(command, check=True, capture_output=True)
    assert _messages(committed(catalogue, "mo")) == _messages(compiled)


def _messages(compiled: Path) -> dict[object, str]:
    with compiled.open("rb") as file:
        return dict(vars(gettext.GNUTranslations(file))["_catalog"])


@pytest.mark.parametrize("catalogue", CATALOGUES)
def test_translations_keep_every_placeholder(catalogue: str) -> None:
    changed = [
        entry.translation
        for entry in entries(committed(catalogue))
        if _placeholders(entry.key[2] or entry.key[1]) != _placeholders(entry.translation)
    ]
    assert changed == []


def _placeholders(text: str) -> Counter[str]:
    return Counter(_PLACEHOLDER.findall(text))


def test_first_lines_of_the_jobs_can_be_translated() -> None:
    summaries = {*builtin_jobs.SUMMARIES, *jobs.SUMMARIES}
    shipped = {
        job.summary
        for job in registry.all_jobs()
        if job.name.startswith(("distcron.", "project.demo."))
    }
    assert shipped == summaries


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("0 9 * * 1-5", "Pukul 09.00, Senin s.d. Jumat"),
        ("0 0 13 * 5", "Pukul 00.00 pada tanggal 13 atau setiap Jumat"),
        ("*/7 * * * *", "Pada menit 0, 7, 14, 21, 28, dan 4 lainnya setiap jam"),
        ("0 0 1 */3 *", "Pukul 00.00 tanggal 1 Januari, April, Juli, dan Oktober"),
        ("15,45 6 * * *", "Pukul 06.15 dan 06.45 setiap hari"),
        ("23 0-20/2 * * *", "Setiap 2 jam dari pukul 00.23 s.d. 20.23"),
        ("*/5 * * * *", "Setiap 5 menit"),
        ("0 9 * * 1#2", "Pukul 09.00 pada Senin kedua setiap bulan"),
        ("0 2 L * *", "Pukul 02.00 tanggal terakhir setiap bulan"),
    ],
)
def test_cron_rule_is_said_in_indonesian(rule: str, expected: str) -> None:
    with override("id"):
        assert describe(Cron(expression=canonical(rule), timezone="Asia/Jakarta")) == expected


def test_interval_and_single_instant_are_said_in_indonesian() -> None:
    interval = Interval(seconds=120, anchor=NOW)
    once = Once(at=datetime(2026, 11, 30, 2, 30, tzinfo=UTC))
    with override("id"):
        assert describe(interval, timezone="Asia/Jakarta") == "Setiap 2 menit"
        assert (
            describe(once, timezone="Asia/Jakarta")
            == "Sekali, pukul 09.30 tanggal 30 November 2026 (Asia/Jakarta)"
        )


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("0 25 * * *", "Jam '25': harus dari 0 s.d. 23, paling banyak dua digit."),
        (
            "* * * *",
            "Aturan cron: perlu lima bidang, ada 4. Apakah hari dalam minggu belum ditulis? "
            "Tulis menit jam tanggal bulan hari, "
            "dan * untuk semua.",
        ),
        (
            "0 0 30 2 *",
            "Aturan cron '0 0 30 2 *': tidak pernah berjalan, tidak ada bulannya yang memiliki "
            "tanggal 30. Pilih tanggal lain, atau L untuk hari terakhir bulan.",
        ),
    ],
)
def test_refused_rule_is_explained_in_indonesian(rule: str, expected: str) -> None:
    with override("id"), pytest.raises(TimetableError) as refused:
        build(kind="cron", cron=rule, timezone="Asia/Jakarta")
    with override("id"):
        assert str(refused.value) == expected


def test_lost_run_is_explained_in_indonesian() -> None:
    run = Run(
        state=Run.State.LOST,
        reason=Run.Reason.NODE_DIED,
        delivery=Schedule.Delivery.AT_MOST_ONCE,
    )
    with override("id"):
        assert explain(run, NOW).why == (
            "Node tidak diketahui berhenti melapor saat pekerjaan sedang berjalan. "
            "Pekerjaan sudah dimulai, sehingga tidak diketahui apakah tugasnya tuntas. "
            "Jaminannya “paling banyak sekali”, sehingga tidak ada node yang memulainya lagi."
        )


def test_states_of_runs_have_the_words_of_the_glossary() -> None:
    with override("id"):
        assert [str(label) for label in Run.State.labels] == [
            *("antre", "diklaim", "berjalan", "berhasil", "gagal", "dibatalkan", "hilang"),
            "dilewati",
        ]


def test_verbs_of_the_audit_are_indonesian() -> None:
    with override("id"):
        labels = [str(label) for label in AuditEntry.Verb.labels]
    assert labels == [
        *("tambah", "ubah", "hapus", "jalankan sekarang", "jeda", "lanjutkan"),
        *("lepas kunci", "batalkan", "jalankan lagi"),
        *("isi ulang", "batalkan isi ulang", "bersihkan"),
        *("mulai pemeliharaan", "akhiri pemeliharaan"),
    ]


def test_errors_that_people_see_are_indonesian() -> None:
    with override("id"):
        unknown, busy = UnknownJob("shop.exprt", ("shop.export",)), ScheduleBusy("close", 12)
    assert str(unknown) == "Pekerjaan 'shop.exprt': tidak terdaftar. Maksud Anda 'shop.export'?"
    assert str(busy) == "Jadwal 'close': sibuk, terhalang oleh eksekusi 12."


def test_lengths_of_time_use_the_decimal_comma() -> None:
    ago = datetime(2026, 11, 30, 4, 55, tzinfo=UTC)
    with override("id"):
        assert duration(12.44) == "12,4 dtk"
        assert duration(3725.0) == "1 jam 2 mnt"
        assert relative(ago, NOW) == "2 jam 5 mnt yang lalu"
