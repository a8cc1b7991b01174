"""The object tier: drains, what lies in the object store, pins and reads of users."""

from __future__ import annotations

from alembic import op
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Integer,
    LargeBinary,
    String,
    Text,
    false,
    text,
)

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_BIG = BigInteger()


def upgrade() -> None:
    """Add columns with the value that says "no object tier", and the new tables."""
    op.add_column("runs", Column("retention", Text))
    op.add_column("runs", Column("persisted_step", _BIG, nullable=False, server_default="0"))
    op.add_column("runs", Column("persisted_at_s", Float, nullable=False, server_default="0"))
    op.add_column("runs", Column("persist_owed", Boolean, nullable=False, server_default=false()))
    op.add_column("attempts", Column("persist_steps", _BIG, nullable=False, server_default="0"))
    op.add_column("attempts", Column("persist_seconds", Float, nullable=False, server_default="0"))
    op.add_column("checkpoints", Column("drain_at_s", Float))
    op.add_column("checkpoints", Column("notes", Text, nullable=False, server_default=""))
    op.add_column("checkpoints", Column("parent_step", _BIG))
    op.add_column("checkpoints", Column("parent_generation", _BIG))
    memory = text("durable_at_s IS NULL")
    op.create_index(
        "checkpoints_in_memory",
        "checkpoints",
        ["run"],
        sqlite_where=memory,
        postgresql_where=memory,
    )
    op.create_table(
        "drains",
        *_checkpoint_key(),
        Column("rank", Integer, primary_key=True),
        Column("volume", Integer, primary_key=True),
        Column("length_bytes", _BIG, nullable=False),
        Column("root_digest", LargeBinary(16), nullable=False),
        Column("plan_hash", Text, nullable=False),
        Column("done_at_s", Float),
    )
    op.create_table(
        "objects",
        *_checkpoint_key(),
        Column("manifest_digest", LargeBinary(16), nullable=False),
        Column("scrubbed_at_s", Float),
        Column("scrub_asked", Boolean, nullable=False),
        Column("bad", Text, nullable=False),
        Column("expired_at_s", Float),
        Column("body", LargeBinary, nullable=False),
    )
    op.create_table(
        "user_pins",
        *_checkpoint_key(),
        Column("note", Text, nullable=False),
        Column("at_s", Float, nullable=False),
    )
    op.create_table(
        "reads",
        Column("id", String(32), primary_key=True),
        Column("run", String(32), nullable=False),
        Column("step", _BIG, nullable=False),
        Column("generation", _BIG, nullable=False),
        Column("holder", Text, nullable=False),
        Column("until_s", Float, nullable=False),
    )


def _checkpoint_key() -> tuple[Column[object], ...]:
    return (
        Column("run", String(32), primary_key=True),
        Column("step", _BIG, primary_key=True),
        Column("generation", _BIG, primary_key=True),
    )


def downgrade() -> None:
    """Drop them, with all that they hold."""
    for name in ("reads", "user_pins", "objects", "drains"):
        op.drop_table(name)
    op.drop_index("checkpoints_in_memory", "checkpoints")
    for table, columns in (
        ("checkpoints", ("parent_generation", "parent_step", "notes", "drain_at_s")),
        ("attempts", ("persist_seconds", "persist_steps")),
        ("runs", ("persist_owed", "persisted_at_s", "persisted_step", "retention")),
    ):
        for column in columns:
            op.drop_column(table, column)
