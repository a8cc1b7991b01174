"""Brings the scheduler's tables to the newest schema; safe to run from many processes at once."""

from __future__ import annotations

from pathlib import Path

from alembic.config import Config
from sqlalchemy import Engine, text

from holdfast_services.kit.db import is_sqlite, migrate, write_transaction

VERSION_TABLE = "scheduler_version"
"""Not alembic's usual one, which is the catalogue's where both share a database."""

# Any number that no other program of this database locks; it means "schema of the scheduler".
_SCHEMA_LOCK = 7_300_002


def upgrade(engine: Engine) -> None:
    """Run the migrations that are missing, in one transaction, one process at a time."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "os")
    with write_transaction(engine) as connection:
        if not is_sqlite(connection):
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _SCHEMA_LOCK})
        config.attributes["connection"] = connection
        migrate(config)
