"""Alembic's entry: runs migrations on the connection that ``upgrade`` hands over."""

from alembic import context

from holdfast_services.scheduler.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table="scheduler_version",
)
context.run_migrations()
