"""What alembic runs to bring a database up to date, in the transaction of the connection that it was given."""

from __future__ import annotations

from alembic import context

from midstream.server.storage.migrations import VERSION_TABLE
from midstream.server.storage.tables import Base


def migrate() -> None:
    """Run the steps that the database has not had."""
    connection = context.config.attributes["connection"]
    context.configure(connection=connection, target_metadata=Base.metadata, version_table=VERSION_TABLE)
    context.run_migrations()


if __name__ == "env_py":  # the name under which alembic runs this file
    migrate()
