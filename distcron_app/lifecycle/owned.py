"""What a node may write about runs that are its own, under the tokens of its claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from django.db import connection
from django.db.models import Q, QuerySet

from distcron_app.models import Run, RunOutput

__all__ = ["lock_owned", "store_text"]


def lock_owned(tokens: Mapping[int, tuple[int, str]], states: list[str]) -> list[int]:
    """Lock the runs that are in one of ``states`` under exactly these tokens; return their ids."""
    rows: QuerySet[Run] = (
        Run.objects.select_for_update()
        .filter(Q(pk__in=list(tokens)), state__in=states)
        .order_by("pk")
    )
    found = rows.values_list("pk", "fencing_token", "owner_token")
    return [pk for pk, fencing, owner in found if tokens[pk] == (fencing, owner)]


def store_text(rows: Sequence[RunOutput]) -> None:
    """Replace the output and traceback of runs; one without either keeps what it has."""
    kept = [row for row in rows if row.output or row.traceback]
    if kept:
        unique = None if connection.vendor == "mysql" else ["run"]
        RunOutput.objects.bulk_create(
            kept,
            update_conflicts=True,
            update_fields=["output", "traceback"],
            unique_fields=unique,
            batch_size=200,
        )
