"""Alembic's entry: runs migrations on the connection that ``upgrade`` hands over."""

from alembic import context

from holdfast_services.metadata.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
