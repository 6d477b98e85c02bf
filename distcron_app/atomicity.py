"""Whether the database can commit what a job writes together with the job's outcome."""

from __future__ import annotations

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, connections, router
from django.utils.translation import gettext as _

__all__ = ["atomicity_problem", "setting_problem"]


def setting_problem() -> str:
    """Return why the settings forbid the delivery ``transactional``, in words; empty when not.

    It reads the settings alone. The nodes work on the database ``default``: the job's writes
    and the outcome must both be there.
    """
    alias = router.db_for_write(apps.get_model("distcron", "Run"))
    if alias != DEFAULT_DB_ALIAS:
        return _(
            "DATABASE_ROUTERS sends the tables of distcron to %(alias)r, and the nodes write "
            "outcomes to %(default)r"
        ) % {"alias": alias, "default": DEFAULT_DB_ALIAS}
    if not connections.settings[DEFAULT_DB_ALIAS].get("AUTOCOMMIT", True):
        return _("AUTOCOMMIT of the database %r is off, so that nothing is committed by itself") % (
            DEFAULT_DB_ALIAS
        )
    return ""


def atomicity_problem() -> str:
    """Return why a transactional run cannot work here, in words; empty when it can.

    MariaDB and MySQL are asked once for each connection whether their tables know
    transactions. Raise DatabaseError where they do not answer.
    """
    problem = setting_problem()
    if problem:
        return problem
    connection = connections[DEFAULT_DB_ALIAS]
    if connection.vendor == "mysql" and not connection.features.supports_transactions:
        return _("the default storage engine of the database is MyISAM, which undoes nothing")
    return ""
