"""``manage.py schedulerctl <verb>``: look at the scheduler, and act on it, from a shell."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    OutputWrapper,
)
from django.utils import translation
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _

import distcron_app
from distcron_app.cli.arguments import VERBS, add_verbs, add_view_flags
from distcron_app.cli.console import Console, Stream, View, wants_colour
from distcron_app.cli.exits import INTERRUPTED, USAGE, Exit, errors_as_exits
from distcron_app.timetable import check_timezone

__all__ = ["Command"]


class Command(BaseCommand):
    """Parses the verb, sets the language and the streams, and turns errors into exit codes."""

    help = "Look at schedules, runs, nodes and locks, and act on them."
    # Looking must work while something is wrong, and "next" without the URLs of the project.
    requires_system_checks: tuple[str, ...] = ()

    def add_arguments(self, parser: CommandParser) -> None:
        add_view_flags(parser)
        add_verbs(parser)

    def get_version(self) -> str:
        return distcron_app.__version__

    def run_from_argv(self, argv: list[str]) -> None:
        # The help and the errors of the parser are texts, too.
        with translation.override(_language(_given_language(argv))):
            _refuse_unknown_verb(argv)
            super().run_from_argv(argv)

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the verb; from a shell, end the process with the exit code of its error."""
        if not getattr(self, "_called_from_command_line", False):
            return super().execute(*args, **options)
        try:
            return self._execute_and_flush(*args, **options)
        except CommandError as error:
            if options["traceback"]:
                raise
            _console(self.stdout, self.stderr, options).error(
                str(error), getattr(error, "hint", "")
            )
            sys.exit(error.returncode)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            # The reader, such as head, has seen enough; the interpreter's last flush must
            # not complain either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)

    def _execute_and_flush(self, *args: Any, **options: Any) -> str | None:
        # Data comes before talk about it, and a closed pipe shows here and not at exit.
        try:
            return super().execute(*args, **options)
        finally:
            self.stdout.flush()

    def handle(self, *args: Any, **options: Any) -> None:
        verb = VERBS.get(options["verb"] or "")
        if verb is None:
            raise Exit(USAGE, _("a verb is missing. Choose one of: %s") % ", ".join(VERBS))
        with translation.override(_language(options["lang"])), errors_as_exits():
            console = _console(self.stdout, self.stderr, options)
            _check_language(options["lang"])
            if options["tz"]:
                check_timezone(options["tz"])
            import_string(verb.command)(console, options)


def _console(out: OutputWrapper, err: OutputWrapper, options: dict[str, Any]) -> Console:
    never, force = options["no_color"], options["force_color"]
    return Console(
        Stream(out, colour=wants_colour(out, force=force, never=never)),
        Stream(err, colour=wants_colour(err, force=force, never=never)),
        View(
            as_json=options["as_json"],
            is_wide=options["wide"],
            has_header=not options["no_header"],
            zone="UTC" if options["utc"] else options["tz"] or "",
            is_quiet=options["quiet"] or options["verbosity"] == 0,
        ),
    )


def _given_language(argv: list[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--lang", default=None)
    try:
        known, _others = parser.parse_known_args(argv[2:])
    except argparse.ArgumentError:
        return None  # the full parser says what is wrong
    return str(known.lang) if known.lang else None


def _language(given: str | None) -> str:
    """Return the language to speak: ``--lang``, the environment's LANGUAGE, or the settings'."""
    wanted = (given or "", *os.environ.get("LANGUAGE", "").split(":"))
    return next(filter(None, map(_supported, wanted)), settings.LANGUAGE_CODE)


def _supported(language: str) -> str:
    """Return the code of the project's language that fits, or nothing."""
    code = language.partition(".")[0].replace("_", "-").lower()
    try:
        return translation.get_supported_language_variant(code)
    except LookupError:
        return ""


def _check_language(given: str | None) -> None:
    if given is None or _supported(given):
        return
    allowed = ", ".join(code for code, _name in settings.LANGUAGES)
    message = _("--lang %(given)r: not a language of this project. Allowed: %(allowed)s.")
    raise Exit(USAGE, message % {"given": given, "allowed": allowed})


def _refuse_unknown_verb(argv: list[str]) -> None:
    """End with the nearest verb where the first word is none."""
    word = argv[2] if len(argv) > 2 else ""
    if not word or word.startswith("-") or word in VERBS:
        return
    facts = {"verb": word, "verbs": ", ".join(VERBS)}
    nearest = difflib.get_close_matches(word, VERBS, n=1, cutoff=0.5)
    message = _("verb %(verb)r: not known. Verbs: %(verbs)s")
    if nearest:
        facts["nearest"] = nearest[0]
        message = _("verb %(verb)r: not known. Did you mean %(nearest)s? Verbs: %(verbs)s")
    sys.stderr.write(f"error: {message % facts}\n")
    sys.exit(USAGE)
