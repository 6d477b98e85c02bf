"""Rows as a busy week leaves them, for the pages to show."""

from __future__ import annotations

import random
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from distcron_app.models import Attempt, Node, Run, RunOutput, Schedule

TRACEBACK = """Traceback (most recent call last):
  File "/srv/shop/billing/jobs.py", line 41, in close_invoices
    send_summary(closed)
  File "/srv/shop/billing/mail.py", line 17, in send_summary
    connection.sendmail(sender, receivers, message)
  File "/srv/venv/lib/python3.12/site-packages/mailer/transport.py", line 212, in sendmail
    raise MailError(code, answer)
billing.mail.MailError: 451 The mail server is busy, try again later.
"""
SCHEDULES = [
    ("nightly-report", "Nightly report", "project.demo.slow_report", "30 2 * * *", "Asia/Jakarta"),
    ("invoice-close", "Close invoices", "project.demo.invoice_close", "0 * * * *", "Asia/Jakarta"),
    ("mail-digest", "Mail digest", "project.demo.flaky_mail", "*/10 * * * *", "Asia/Jakarta"),
    ("sync-orders", "Sync orders", "project.demo.heartbeat", "*/5 * * * *", "America/New_York"),
    ("greet-team", "Greet the team", "project.demo.greet", "0 9 * * mon-fri", "Europe/Riga"),
    ("legacy-sync", "Legacy sync", "project.demo.heartbeat", "15 * * * *", "America/Sao_Paulo"),
]


def seed(now: datetime | None = None) -> dict[str, Any]:
    """Write nodes, schedules and runs in every state; return the rows worth visiting."""
    now = (now or datetime.now(UTC)).replace(microsecond=0)
    nodes = _nodes(now)
    schedules = {key: _schedule(key, *rest) for key, *rest in SCHEDULES}
    Schedule.objects.filter(key="legacy-sync").update(
        state="paused",
        state_reason="Vendor outage until Monday",
        state_by="ratna",
        state_at=now - timedelta(days=2),
        next_run_at=None,
    )
    broken = _schedule("old-export", "Old export", "shop.export", "0 4 * * *", "Asia/Jakarta")
    Schedule.objects.filter(pk=broken.pk).mark_invalid("Job 'shop.export': not registered.")
    _history(schedules, nodes, now)
    return _notable(schedules, nodes, now)


def _nodes(now: datetime) -> list[Node]:
    rows = []
    for number, (state, age, running) in enumerate(
        [("active", 2, 3), ("active", 4, 1), ("draining", 1, 1), ("dead", 4000, 0)], start=1
    ):
        beat = now - timedelta(seconds=age)
        alive_for = 3600 if state != "dead" else 15
        rows.append(
            Node.objects.create(
                id=uuid.uuid4(),
                name=f"web-{number}",
                host=f"app-{number}.shop.internal",
                pid=4000 + number * 37,
                version="0.1.0",
                state=state,
                started_at=now - timedelta(hours=30),
                heartbeat_at=beat,
                expires_at=beat + timedelta(seconds=alive_for),
                slots=16,
                running=running,
                tick_lag_ms=number * 2,
                clock_offset_ms=number - 3,
            )
        )
    return rows


def _schedule(key: str, name: str, job: str, cron: str, zone: str) -> Schedule:
    arguments: dict[str, Any] = {"batch": 25} if job.endswith("invoice_close") else {}
    if job.endswith("greet"):
        arguments = {"name": "team", "language": "id"}
    return Schedule.objects.create(
        key=key, name=name, job=job, cron=cron, timezone=zone, arguments=arguments
    )


def _history(schedules: dict[str, Schedule], nodes: list[Node], now: datetime) -> None:
    draw = random.Random(7)
    names = ["sync-orders", "mail-digest", "invoice-close"]
    for step in range(90, 0, -1):
        at = (now - timedelta(minutes=10 * step)).replace(second=0, microsecond=500_000)
        key = names[step % 3]
        failed = key == "mail-digest" and step % 4 == 0
        run(
            schedules[key],
            at,
            "failed" if failed else "succeeded",
            node=nodes[step % 3],
            seconds=draw.uniform(0.2, 40),
            reason="error" if failed else "",
            error="ConnectionError: The mail server answered 451." if failed else "",
            result=None if failed else {"rows": step * 3},
        )


def pages_written(count: int) -> str:
    """Return what the report has printed after so many pages."""
    return "".join(f"page {number} of 80 written\n" for number in range(1, count + 1))


def run(schedule: Schedule, at: datetime, state: str, **given: Any) -> Run:
    """Insert one run as the scheduler would have left it."""
    seconds = given.pop("seconds", None)
    started = (
        None if state in ("queued", "claimed", "skipped") else at + timedelta(milliseconds=104)
    )
    values = {
        "schedule_name": schedule.name,
        "job": schedule.job,
        "arguments": schedule.arguments,
        "delivery": schedule.delivery,
        "scheduled_at": at,
        "due_at": at,
        "state": state,
        "attempt": int(started is not None),
        "fencing_token": 4711,
        "owner_token": "a" * 32,
        "claimed_at": at + timedelta(milliseconds=61),
        "started_at": started,
        "finished_at": started + timedelta(seconds=seconds) if started and seconds else None,
    }
    if state == "skipped":
        values |= {"claimed_at": None, "finished_at": at, "owner_token": ""}
    return Run.objects.create(schedule=schedule, **(values | given))


def _notable(schedules: dict[str, Schedule], nodes: list[Node], now: datetime) -> dict[str, Any]:
    invoices, digest = schedules["invoice-close"], schedules["mail-digest"]
    report = schedules["nightly-report"]
    failed = run(
        invoices,
        now - timedelta(minutes=31),
        "failed",
        node=nodes[1],
        seconds=12.4,
        reason="error",
        error="MailError: 451 The mail server is busy, try again later.",
        arguments={"batch": 25, "api_token": "hidden-value-1"},
    )
    RunOutput.objects.create(
        run=failed,
        traceback=TRACEBACK,
        output="".join(f"invoice {number} closed\n" for number in range(1, 26)),
    )
    lost = run(
        report, now - timedelta(hours=3), "lost", node=nodes[3], seconds=41, reason="node_died"
    )
    recovered = run(
        report,
        now - timedelta(hours=2),
        "succeeded",
        node=nodes[0],
        seconds=61,
        attempt=2,
        delivery="at_least_once",
        recoveries=1,
        fencing_token=4713,
        result={"pages": 80},
    )
    Attempt.objects.create(
        run=recovered,
        number=1,
        node=nodes[3],
        fencing_token=4712,
        reason="node_died",
        started_at=now - timedelta(hours=2),
        ended_at=now - timedelta(hours=2, seconds=-16),
        late_state="succeeded",
        late_at=now - timedelta(hours=2, seconds=-50),
        progress_percent=42.0,
        progress_message="Page 34 of 80",
    )
    late = run(
        digest,
        now - timedelta(hours=5, seconds=1),
        "succeeded",
        node=nodes[2],
        seconds=90,
        late=True,
    )
    running = run(
        report,
        now - timedelta(seconds=41),
        "running",
        node=nodes[0],
        progress_percent=58.0,
        progress_message="Page 46 of 80",
        checkpoint={"page": 45, "file": "report-2026-11.pdf"},
    )
    RunOutput.objects.create(run=running, output=pages_written(46))
    run(digest, now - timedelta(seconds=8), "running", node=nodes[1])
    skipped = run(
        report,
        now - timedelta(seconds=20),
        "skipped",
        reason="overlap",
        details={"blocked_by": running.pk},
        attempt=0,
    )
    first = now - timedelta(hours=9, minutes=4)
    coalesced = run(
        schedules["sync-orders"],
        first,
        "skipped",
        reason="coalesced",
        attempt=0,
        details={
            "first_at": first.isoformat(),
            "count": 12,
            "last_at": (first + timedelta(minutes=55)).isoformat(),
        },
    )
    queued = run(
        invoices,
        now,
        "queued",
        scheduled_at=None,
        trigger="manual",
        triggered_by="ratna",
        claimed_at=None,
        owner_token="",
        fencing_token=0,
        attempt=0,
    )
    return {
        "now": now,
        "failed": failed,
        "lost": lost,
        "recovered": recovered,
        "late": late,
        "running": running,
        "skipped": skipped,
        "coalesced": coalesced,
        "queued": queued,
        "schedule": invoices,
        "paused": schedules["legacy-sync"],
        "nodes": nodes,
    }
