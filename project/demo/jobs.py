"""Jobs to try distcron with: quick, slow, flaky, and with arguments."""

from __future__ import annotations

import logging
from typing import Literal

from django.utils.translation import gettext_noop

from distcron_app import JobContext, cron, job

logger = logging.getLogger("demo.jobs")

# The first lines of the docstrings, for the translators: the form of schedules shows them.
SUMMARIES = (
    gettext_noop("Write one line, to see that schedules run."),
    gettext_noop("Work for a while, with progress, and stop when asked to."),
    gettext_noop("Fail for two runs of three, the same ones each time, to see retries and alerts."),
    gettext_noop("Close the open invoices in one batch."),
    gettext_noop("Greet somebody."),
    gettext_noop("Say which run of another schedule has failed."),
)
GREETINGS = {"en": "Hello", "id": "Halo"}


@job
def heartbeat() -> str:
    """Write one line, to see that schedules run."""
    print("alive")  # noqa: T201 - output is what this job shows
    return "alive"


@job
def slow_report(ctx: JobContext, seconds: int = 20) -> dict[str, int]:
    """Work for a while, with progress, and stop when asked to.

    Args:
        seconds: How long the report takes.
    """
    steps = max(1, seconds) * 4
    for step in range(steps):
        ctx.progress(100 * step / steps, f"Page {step + 1} of {steps}")
        ctx.wait(seconds / steps)
    ctx.progress(100, "Done")
    return {"pages": steps}


@job
def flaky_mail(ctx: JobContext, fail_rate: float = 0.67) -> str:
    """Fail for two runs of three, the same ones each time, to see retries and alerts.

    Args:
        fail_rate: Share of the runs that fail, 0 to 1.
    """
    draw = (ctx.run_id % 3 + 0.5) / 3
    if draw < fail_rate:
        logger.warning("mail server refused run %s", ctx.run_id)
        raise ConnectionError("The mail server answered 451, try again later.")
    return "sent"


@job
def invoice_close(batch: int = 100) -> dict[str, int]:
    """Close the open invoices in one batch.

    Args:
        batch: How many invoices to close.
    """
    for number in range(1, batch + 1):
        print(f"invoice {number} closed")  # noqa: T201 - output is what this job shows
    return {"closed": batch}


@job(
    schedule=cron(
        "0 8 * * mon-fri",
        key="morning-greeting",
        timezone="Asia/Jakarta",
        arguments={"name": "Jakarta", "language": "id"},
        notes="Defined in code, above the job: it can be paused here, and not edited.",
    )
)
def greet(name: str, language: Literal["en", "id"] = "en") -> str:
    """Greet somebody.

    Args:
        name: Whom to greet.
        language: Language of the greeting.
    """
    greeting = f"{GREETINGS[language]}, {name}!"
    print(greeting)  # noqa: T201 - output is what this job shows
    return greeting


@job
def tell_failure(ctx: JobContext) -> str:
    """Say which run of another schedule has failed."""
    parent = ctx.parent
    text = "Nothing has failed: started by hand."
    if parent is not None:
        text = f"Run {parent.run_id} of {parent.schedule_key}: {parent.state}, {parent.reason}"
    print(text)  # noqa: T201 - output is what this job shows
    return text
