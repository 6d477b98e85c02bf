"""The verbs of ``schedulerctl`` with their flags and help; nothing here runs them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence

from django.core.management.base import CommandParser, DjangoHelpFormatter
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from distcron_app.lifecycle import PRUNE_BATCH
from distcron_app.models import AuditEntry
from distcron_app.timetable.forecast import MAX_HOURS

__all__ = ["VERBS", "Verb", "add_verbs", "add_view_flags"]

LONGEST_ID = 18  # digits that every database can compare
MAX_COUNT = 1000  # occurrences that ``next`` lists
WATCH_SECONDS = 2.0
SCHEDULE_STATES = {
    "active": "active",
    "paused": "paused",
    "exhausted": "exhausted",
    "finished": "exhausted",  # what the table calls it
    "invalid": "invalid",
}


class _VerbHelp(DjangoHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the examples as they are."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One verb. ``command`` is the dotted path of the function that runs it."""

    name: str
    help: object
    command: str
    examples: tuple[str, str]
    add_flags: Callable[[CommandParser], None]


def add_verbs(parser: CommandParser) -> None:
    """Add a sub-parser for each verb; each takes the base and view flags after it, too."""
    parser.description = _("Look at schedules, runs, nodes and locks, and act on them.")
    parser.epilog = _exit_codes()
    parser.formatter_class = _VerbHelp
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title=_("verbs"))
    for verb in VERBS.values():
        sub_parser = verbs.add_parser(
            verb.name,
            help=str(verb.help),
            description=str(verb.help),
            epilog=_examples(verb),
            formatter_class=_VerbHelp,
        )
        verb.add_flags(sub_parser)
        add_view_flags(sub_parser, default=argparse.SUPPRESS)
        _add_base_flags(sub_parser)


def add_view_flags(parser: CommandParser, *, default: object = None) -> None:
    """Add how the data is shown. ``default`` is SUPPRESS where the parser before the verb has it.

    A sub-parser with defaults of its own would undo what was given before the verb.
    """
    shown = parser.add_argument_group(_("output"))
    flag = False if default is None else default
    shown.add_argument(
        "--json", action="store_true", dest="as_json", default=flag, help=_("One JSON object.")
    )
    shown.add_argument(
        "--no-header", action="store_true", default=flag, help=_("Leave out the column titles.")
    )
    shown.add_argument(
        "--wide", action="store_true", default=flag, help=_("All columns, nothing cut.")
    )
    zones = shown.add_mutually_exclusive_group()
    zones.add_argument("--utc", action="store_true", default=flag, help=_("Show times in UTC."))
    zones.add_argument(
        "--tz", metavar="ZONE", default=default, help=_("Show times in this zone: Asia/Jakarta.")
    )
    shown.add_argument(
        "--lang", metavar="LANGUAGE", default=default, help=_("Language of the text: en or id.")
    )
    shown.add_argument(
        "-q", "--quiet", action="store_true", default=flag, help=_("Only data and errors.")
    )


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from ``low`` to ``high``."""

    def read(text: str) -> int:
        if text.isascii() and text.isdigit() and low <= int(text[:9]) <= high:
            return int(text)
        message = _("got %(text)r, allowed %(low)d to %(high)d")
        raise argparse.ArgumentTypeError(message % {"text": text, "low": low, "high": high})

    return read


def run_number(text: str) -> int:
    """Return the number of a run, with or without the # that the pages put before it."""
    digits = text.removeprefix("#")
    if digits.isascii() and digits.isdigit() and len(digits) <= LONGEST_ID:
        return int(digits)
    message = _("got %(text)r. Write the number of a run, as in 88140")
    raise argparse.ArgumentTypeError(message % {"text": text})


def seconds(text: str) -> float:
    """Return a positive number of seconds."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if 0 < number <= 31_536_000:
        return number
    message = _("got %(text)r, allowed 1 to 31536000 seconds")
    raise argparse.ArgumentTypeError(message % {"text": text})


def schedule_state(text: str) -> str:
    """Return the state that ``text`` names, as the table or the database spells it."""
    if text in SCHEDULE_STATES:
        return SCHEDULE_STATES[text]
    message = _("got %(text)r, allowed: %(allowed)s")
    facts = {"text": text, "allowed": ", ".join(SCHEDULE_STATES)}
    raise argparse.ArgumentTypeError(message % facts)


def reason(text: str) -> str:
    """Return a reason that fits into the audit."""
    limit = AuditEntry._meta.get_field("reason").max_length or 0
    if len(text) <= limit:
        return text.strip()
    message = _("got %(length)d characters, allowed %(limit)d")
    raise argparse.ArgumentTypeError(message % {"length": len(text), "limit": limit})


def named_value(text: str) -> tuple[str, str]:
    """Return the two parts of ``name=value``."""
    name, separator, value = text.partition("=")
    if separator and name.strip():
        return name.strip(), value
    message = _("got %(text)r. Write name=value, as in batch=100")
    raise argparse.ArgumentTypeError(message % {"text": text})


def _exit_codes() -> str:
    codes = (
        (0, _("done, or the run succeeded")),
        (1, _("the run failed, or something is unhealthy")),
        (2, _("the command line is wrong")),
        (4, _("not found")),
        (5, _("refused: busy, no permission, or not confirmed")),
        (6, _("the database or the lock backend does not answer")),
        (7, _("waited too long")),
        (130, _("interrupted")),
    )
    return "\n".join((_("exit codes:"), *(f"  {code:<4} {text}" for code, text in codes)))


def _examples(verb: Verb) -> str:
    lines = (f"  %(prog)s {example}".rstrip() for example in verb.examples)
    return "\n".join((_("examples:"), *lines))


def _add_base_flags(parser: CommandParser) -> None:
    """Let Django's own flags stand after the verb as well as before it."""
    base = parser.add_argument_group(_("Django"))
    hidden = argparse.SUPPRESS
    base.add_argument(
        "-v", "--verbosity", type=int, choices=[0, 1, 2, 3], default=hidden, help=_("0 is quiet.")
    )
    base.add_argument("--settings", default=hidden, help=_("Module of the settings."))
    base.add_argument("--pythonpath", default=hidden, help=_("Folder to import from."))
    for name, text in (
        ("--traceback", _("Show where an error comes from.")),
        ("--no-color", _("Never use colours.")),
        ("--force-color", _("Use colours even when piped.")),
    ):
        base.add_argument(name, action="store_true", default=hidden, help=text)


def _list_flags(parser: CommandParser) -> None:
    parser.add_argument(
        "--state", type=schedule_state, help=_("active, paused, finished or invalid.")
    )
    parser.add_argument("--job", metavar="TEXT", help=_("Only jobs whose name contains this."))
    parser.add_argument(
        "--failing",
        action="store_true",
        help=_("Only schedules that are invalid or whose last outcome is failed or lost."),
    )


def _next_flags(parser: CommandParser) -> None:
    parser.add_argument(
        "rules",
        nargs="+",
        metavar="KEY_OR_RULE",
        help=_('A schedule, or a cron rule: "30 2 * * *". Several rules are one timetable.'),
    )
    parser.add_argument(
        "--gap",
        metavar="POLICY",
        help=_("For rules, where the clocks jump over a time: shift (to the end) or skip."),
    )
    parser.add_argument(
        "--fold",
        metavar="POLICY",
        help=_("For rules, where a time comes twice: first, second or both."),
    )
    parser.add_argument(
        "--from",
        dest="start",
        metavar="TIME",
        help=_("Start here, included: 2027-03-12 or 2027-03-12T06:00; local to the rule's zone."),
    )
    parser.add_argument(
        "-n",
        "--count",
        type=whole_number(1, MAX_COUNT),
        default=5,
        help=_("How many, 1 to 1000; 5 by default."),
    )


def _explain_flags(parser: CommandParser) -> None:
    parser.add_argument("key", metavar="KEY", help=_("The schedule."))
    parser.add_argument(
        "--at",
        required=True,
        metavar="TIME",
        help=_("The instant: 2027-03-12T02:00, local to the schedule's zone, or with an offset."),
    )


def _forecast_flags(parser: CommandParser) -> None:
    parser.add_argument(
        "--hours",
        type=whole_number(1, MAX_HOURS),
        default=24,
        help=_("How far, 1 to 744; 24 by default."),
    )


def _run_flags(parser: CommandParser) -> None:
    parser.add_argument("key", metavar="KEY", help=_("The schedule to run."))
    parser.add_argument(
        "--arg",
        action="append",
        type=named_value,
        default=[],
        metavar="NAME=VALUE",
        help=_("One argument for this run; the others stay as the schedule has them."),
    )
    parser.add_argument(
        "--arguments", metavar="JSON", help=_("All arguments for this run, as a JSON object.")
    )
    parser.add_argument(
        "--wait", action="store_true", help=_("Wait for the end; exit 0 only if it succeeded.")
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help=_("With --wait: stop waiting after this, exit 7. The run goes on."),
    )
    parser.add_argument(
        "--behind",
        action="store_true",
        help=_("On a busy schedule: queue it behind the active run instead of refusing."),
    )
    _add_reason(parser, required=False)
    _add_user(parser)


def _cancel_flags(parser: CommandParser) -> None:
    parser.add_argument("run", type=run_number, metavar="RUN", help=_("The run to cancel."))
    _add_reason(parser, required=True)
    _add_user(parser)


def _again_flags(parser: CommandParser) -> None:
    parser.add_argument("run", type=run_number, metavar="RUN", help=_("The run to queue again."))
    _add_reason(parser, required=False)
    _add_user(parser)


def _pause_flags(parser: CommandParser) -> None:
    _add_reason(parser, required=True)
    _add_until(parser)
    _add_selection(parser)


def _resume_flags(parser: CommandParser) -> None:
    _add_reason(parser, required=False)
    _add_selection(parser)


def _maintenance_flags(parser: CommandParser) -> None:
    parser.add_argument("switch", choices=["on", "off"], help=_("on needs --reason."))
    _add_reason(parser, required=False)
    _add_until(parser)
    _add_user(parser)


def _add_selection(parser: CommandParser) -> None:
    parser.add_argument("keys", nargs="*", metavar="KEY", help=_("Schedules, one or more."))
    parser.add_argument("--all", action="store_true", help=_("All schedules, instead of keys."))
    parser.add_argument(
        "--state", type=schedule_state, help=_("With --all: only those in this state.")
    )
    parser.add_argument(
        "--job", metavar="TEXT", help=_("With --all: only jobs whose name contains this.")
    )
    parser.add_argument("--yes", action="store_true", help=_("Do not ask."))
    parser.add_argument("--dry-run", action="store_true", help=_("Show it, change nothing."))
    _add_user(parser)


def _add_reason(parser: CommandParser, *, required: bool) -> None:
    parser.add_argument(
        "--reason",
        type=reason,
        default="",
        required=required,
        metavar="TEXT",
        help=_("Why, for the audit."),
    )


def _add_until(parser: CommandParser) -> None:
    parser.add_argument(
        "--until",
        metavar="TIME",
        help=_("It ends by itself then: +2h, 18:00, 2027-03-12T06:00; without it, by a person."),
    )


def _add_user(parser: CommandParser) -> None:
    parser.add_argument(
        "--user",
        metavar="USERNAME",
        help=_("Act as this user: needs the user's permissions, and is shown in the audit."),
    )


def _nodes_flags(parser: CommandParser) -> None:
    parser.add_argument("--all", action="store_true", help=_("Also nodes that left or died."))


def _doctor_flags(parser: CommandParser) -> None:
    parser.add_argument("--strict", action="store_true", help=_("Exit 1 on warnings, too."))
    parser.add_argument(
        "--redis-latency",
        type=seconds,
        metavar="SECONDS",
        help=_("Measure each Redis for this long; by default 200 answers."),
    )
    parser.add_argument(
        "--supervisor-conf",
        default="",
        metavar="PATH",
        help=_("A file of Supervisor, or a folder of them, besides those in /etc."),
    )


def _locks_flags(parser: CommandParser) -> None:
    parser.add_argument(
        "--watch",
        nargs="?",
        type=seconds,
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=_("Show them again and again, every 2 seconds by default, until Ctrl-C."),
    )
    _add_level(parser, default=None)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title=_("for one lock"))
    for name, text in (
        ("ttl", _("Show one lock: its holder, its node, what is left of its TTL.")),
        ("release", _("End a lock whoever holds it; its run is taken from its node.")),
    ):
        action = actions.add_parser(name, help=text, description=text, formatter_class=_VerbHelp)
        action.add_argument(
            "name",
            metavar="NAME",
            help=_("A schedule's key, a lock's name as the list has it, or a public lock's text."),
        )
        if name == "release":
            _add_reason(action, required=True)
            action.add_argument("--yes", action="store_true", help=_("Do not ask."))
            _add_user(action)
        _add_level(action, default=argparse.SUPPRESS)
        add_view_flags(action, default=argparse.SUPPRESS)
        _add_base_flags(action)


def _add_level(parser: CommandParser, *, default: object) -> None:
    parser.add_argument(
        "--level", default=default, metavar="LEVEL", help=_("Only locks at this lock level.")
    )


def _prune_flags(parser: CommandParser) -> None:
    parser.add_argument(
        "--keep-days",
        type=whole_number(0, 36_500),
        metavar="N",
        help=_(
            "Delete what ended longer ago, instead of the stored days; 0: no limit. "
            "Failed and lost runs stay at least KEEP_FAILED_DAYS."
        ),
    )
    parser.add_argument(
        "--keep-failed",
        type=whole_number(0, 10_000_000),
        metavar="N",
        help=_("Of each schedule keep so many failed and lost runs at most; 0: no limit."),
    )
    parser.add_argument("--schedule", metavar="KEY", help=_("Only runs of this schedule."))
    parser.add_argument(
        "--batch",
        type=whole_number(1, 10_000),
        default=PRUNE_BATCH,
        metavar="N",
        help=_("Runs in one transaction, 1 to 10000; 1000 by default."),
    )
    parser.add_argument("--yes", action="store_true", help=_("Do not ask."))
    parser.add_argument("--dry-run", action="store_true", help=_("Count only, delete nothing."))
    _add_reason(parser, required=False)
    _add_user(parser)


def _sync_flags(parser: CommandParser) -> None:
    parser.add_argument(
        "--adopt",
        action="append",
        default=[],
        metavar="KEY",
        help=_("Take this schedule over from people who made it; may be repeated."),
    )
    parser.add_argument("--dry-run", action="store_true", help=_("Show it, change nothing."))
    _add_user(parser)


def _no_flags(parser: CommandParser) -> None:
    """Add nothing: the verb has only the flags of every verb."""


def _by_name(verbs: Sequence[Verb]) -> dict[str, Verb]:
    return {verb.name: verb for verb in verbs}


VERBS = _by_name(
    (
        Verb(
            name="list",
            help=gettext_lazy("Show the schedules: state, rule, last outcome, next run."),
            command="distcron_app.cli.listing.show_schedules",
            examples=("--failing", "--job demo --json"),
            add_flags=_list_flags,
        ),
        Verb(
            name="next",
            help=gettext_lazy("Show when a schedule or a cron rule comes next."),
            command="distcron_app.cli.upcoming.show_occurrences",
            examples=(
                "invoice-close -n 3",
                '"30 2 * * *" --tz America/New_York --from 2027-03-12 -n 4',
            ),
            add_flags=_next_flags,
        ),
        Verb(
            name="explain",
            help=gettext_lazy("Say why a schedule ran or did not run at an instant."),
            command="distcron_app.cli.explaining.show_explanation",
            examples=(
                'invoice-close --at "2026-11-28 02:00"',
                "invoice-close --at 2026-11-27T19:00Z --json",
            ),
            add_flags=_explain_flags,
        ),
        Verb(
            name="forecast",
            help=gettext_lazy("Show how many runs start in each coming hour, and the busiest."),
            command="distcron_app.cli.forecasting.show_forecast",
            examples=("", "--hours 48 --tz Asia/Jakarta --json"),
            add_flags=_forecast_flags,
        ),
        Verb(
            name="run",
            help=gettext_lazy("Run a schedule once, now, outside its timetable."),
            command="distcron_app.cli.running.run_schedule",
            examples=(
                'invoice-close --arg batch=100 --reason "month end"',
                "mail-digest --wait --timeout 600",
            ),
            add_flags=_run_flags,
        ),
        Verb(
            name="cancel",
            help=gettext_lazy("Cancel a run: at once before it starts, else its job is asked."),
            command="distcron_app.cli.steering.cancel_run",
            examples=(
                '88140 --reason "wrong month"',
                '88141 --reason "month end first" --json',
            ),
            add_flags=_cancel_flags,
        ),
        Verb(
            name="again",
            help=gettext_lazy("Run a failed, cancelled or lost run again: one more attempt."),
            command="distcron_app.cli.steering.run_again",
            examples=("88123", '88124 --reason "disk was full" --json'),
            add_flags=_again_flags,
        ),
        Verb(
            name="pause",
            help=gettext_lazy("Stop the timetable of schedules; active runs go on."),
            command="distcron_app.cli.pausing.pause_schedules",
            examples=(
                'invoice-close --reason "books are closed"',
                '--all --state active --reason "database move" --dry-run',
            ),
            add_flags=_pause_flags,
        ),
        Verb(
            name="resume",
            help=gettext_lazy("Let paused schedules go on, by default from now."),
            command="distcron_app.cli.pausing.resume_schedules",
            examples=("invoice-close", '--all --reason "move is done" --yes'),
            add_flags=_resume_flags,
        ),
        Verb(
            name="maintenance",
            help=gettext_lazy("Keep all nodes from claiming, or let them claim again."),
            command="distcron_app.cli.switching.switch_maintenance",
            examples=('on --until +30m --reason "database move"', "off"),
            add_flags=_maintenance_flags,
        ),
        Verb(
            name="sync",
            help=gettext_lazy("Make rows of the schedules in code, as migrate does."),
            command="distcron_app.cli.syncing.sync_schedules",
            examples=("--dry-run", "--json"),
            add_flags=_sync_flags,
        ),
        Verb(
            name="nodes",
            help=gettext_lazy("Show the runscheduler processes; exit 1 when none is alive."),
            command="distcron_app.cli.membership.show_nodes",
            examples=("", "--all --json"),
            add_flags=_nodes_flags,
        ),
        Verb(
            name="locks",
            help=gettext_lazy("Show the locks that are held, by whom and for which run; end one."),
            command="distcron_app.cli.holding.show_locks",
            examples=("--wide", "--level standard --json"),
            add_flags=_locks_flags,
        ),
        Verb(
            name="prune",
            help=gettext_lazy("Delete runs that are older or more than what shall be kept."),
            command="distcron_app.cli.pruning.prune_runs",
            examples=("--dry-run", "--keep-days 30 --keep-failed 1000 --yes"),
            add_flags=_prune_flags,
        ),
        Verb(
            name="status",
            help=gettext_lazy("Show on one screen whether all is well; exit 1 when it is not."),
            command="distcron_app.cli.health.show_status",
            examples=("", "--json"),
            add_flags=_no_flags,
        ),
        Verb(
            name="doctor",
            help=gettext_lazy("Look for what can break the promises; exit 1 on a problem."),
            command="distcron_app.cli.doctor.show_diagnosis",
            examples=("", "--redis-latency 1 --json"),
            add_flags=_doctor_flags,
        ),
    )
)
