"""The sync at the end of ``migrate``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from django.db import connections, router
from django.db.migrations.loader import MigrationLoader
from django.utils.translation import gettext as _

from distcron_app.conf import get_config
from distcron_app.models import Schedule
from distcron_app.sync.rows import Author, sync

if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["sync_after_migrate"]

# Of the audit and of a pause, where nobody else is known.
_ACTOR = "migrate"


def sync_after_migrate(
    *, using: str, verbosity: int, stdout: TextIO | None = None, **_options: Any
) -> None:
    """Receive ``post_migrate``: sync when the tables are up to date; warn of what was left out.

    ``flush`` sends that signal as well, so an emptied database has its schedules again.
    """
    if not get_config().sync_on_migrate or router.db_for_write(Schedule) != using:
        return
    if not _is_up_to_date(using):
        return
    report = sync(Author(actor=_ACTOR))
    out = stdout or sys.stdout
    if verbosity >= 1 and report.has("created", "changed", "returned", "left"):
        message = _("Schedules in code: %s.") % report.in_words()
        out.write(f"  {message}\n")
    for problem in report.problems:
        sys.stderr.write(f"warning: {problem}\n")


def _is_up_to_date(using: str) -> bool:
    """Return False after a migration to an older state, which may lack columns or tables."""
    connection = connections[using]
    loader = MigrationLoader(connection)
    leaves = loader.graph.leaf_nodes(Schedule._meta.app_label)
    has_table = Schedule._meta.db_table in connection.introspection.table_names()
    return has_table and loader.applied_migrations.keys() >= set(leaves)
