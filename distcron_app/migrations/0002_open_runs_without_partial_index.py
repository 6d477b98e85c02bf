"""Give MariaDB, MySQL and SQLite full indexes for the open runs.

The first two have no partial indexes: those of the models are full ones there. SQLite
uses one only for literals, never for parameters. Old code may run beside this.
"""

from django.db import migrations

DUE = ("distcron_run_open_due", "state, due_at")
INDEXES = {"mysql": (DUE,), "sqlite": (DUE,)}


def create(apps, schema_editor):
    for name, columns in INDEXES.get(schema_editor.connection.vendor, ()):
        schema_editor.execute(f"CREATE INDEX {name} ON distcron_run ({columns})")


def drop(apps, schema_editor):
    vendor = schema_editor.connection.vendor
    for name, _ in INDEXES.get(vendor, ()):
        on_table = " ON distcron_run" if vendor == "mysql" else ""
        schema_editor.execute(f"DROP INDEX {name}{on_table}")


class Migration(migrations.Migration):
    # MariaDB commits at each change of a table.
    atomic = False
    dependencies = [("distcron", "0001_initial")]

    operations = [migrations.RunPython(create, drop)]
