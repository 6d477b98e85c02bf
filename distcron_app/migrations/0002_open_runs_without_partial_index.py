"""Give MariaDB, MySQL and SQLite full indexes for the open runs.

The first two have no partial indexes; SQLite uses one only for literals, never for
parameters. Old code may run beside this.
"""

from django.db import migrations

INDEXES = {
    "distcron_run_open_states": "schedule_id, state",
    "distcron_run_open_due": "state, due_at",
}
VENDORS = ("mysql", "sqlite")


def create(apps, schema_editor):
    if schema_editor.connection.vendor in VENDORS:
        for name, columns in INDEXES.items():
            schema_editor.execute(f"CREATE INDEX {name} ON distcron_run ({columns})")


def drop(apps, schema_editor):
    if schema_editor.connection.vendor in VENDORS:
        on_table = " ON distcron_run" if schema_editor.connection.vendor == "mysql" else ""
        for name in INDEXES:
            schema_editor.execute(f"DROP INDEX {name}{on_table}")


class Migration(migrations.Migration):
    # MariaDB commits at each change of a table.
    atomic = False
    dependencies = [("distcron", "0001_initial")]

    operations = [migrations.RunPython(create, drop)]
