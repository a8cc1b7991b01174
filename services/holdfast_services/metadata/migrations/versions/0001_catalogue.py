"""The first catalogue."""

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
    UniqueConstraint,
)

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_BIG = BigInteger()
_SERIAL = BigInteger().with_variant(Integer(), "sqlite")


def upgrade() -> None:
    """Create the tables of the catalogue."""
    op.create_table(
        "jobs",
        Column("name", String(128), primary_key=True),
        Column("run", String(32), nullable=False, unique=True),
        Column("created_at_s", Float, nullable=False),
    )
    op.create_table(
        "runs",
        Column("run", String(32), primary_key=True),
        Column("job", String(128), nullable=False),
        Column("generation", _BIG, nullable=False),
        Column("announced_step", _BIG, nullable=False),
        Column("announced_at_s", Float, nullable=False),
        Column("rules", Text, nullable=False),
        Column("abandoned", Text, nullable=False),
    )
    op.create_table(
        "attempts",
        Column("run", String(32), primary_key=True),
        Column("generation", _BIG, primary_key=True),
        Column("job", String(128), nullable=False),
        Column("nonce", LargeBinary(64), nullable=False),
        Column("launcher", Text, nullable=False),
        Column("holder", Text, nullable=False),
        Column("world_size", Integer, nullable=False),
        Column("replicas", Integer, nullable=False),
        Column("replicas_cut", Integer, nullable=False),
        Column("replica_domain", Text, nullable=False),
        Column("started_at_s", Float, nullable=False),
        Column("lease_until_s", Float, nullable=False),
        UniqueConstraint("job", "nonce"),
    )
    op.create_table(
        "attempt_ranks",
        Column("run", String(32), primary_key=True),
        Column("generation", _BIG, primary_key=True),
        Column("rank", Integer, primary_key=True),
        Column("node", String(128), nullable=False),
        Column("registered_at_s", Float, nullable=False),
        Column("live", Boolean, nullable=False),
        Column("ready_decision", _BIG, nullable=False),
        Column("loaded", Boolean, nullable=False),
    )
    op.create_table(
        "nodes",
        Column("name", String(128), primary_key=True),
        Column("incarnation", _BIG, nullable=False),
        Column("sequence", _BIG, nullable=False),
        Column("reported_at_s", Float, nullable=False),
        Column("lease_until_s", Float, nullable=False),
        Column("lost", Boolean, nullable=False),
        Column("inventory", LargeBinary, nullable=False),
    )
    op.create_table(
        "checkpoints",
        Column("run", String(32), primary_key=True),
        Column("step", _BIG, primary_key=True),
        Column("generation", _BIG, primary_key=True),
        Column("world_size", Integer, nullable=False),
        Column("plan_hash", Text, nullable=False),
        Column("length_bytes", _BIG, nullable=False),
        Column("local_at_s", Float, nullable=False),
        Column("replicated_at_s", Float),
        Column("durable_at_s", Float),
    )
    op.create_table(
        "decisions",
        Column("run", String(32), primary_key=True),
        Column("number", _BIG, primary_key=True),
        Column("state", Integer, nullable=False),
        Column("body", LargeBinary, nullable=False),
        Column("rejected", Text, nullable=False),
    )
    op.create_table(
        "pins",
        Column("run", String(32), primary_key=True),
        Column("step", _BIG, primary_key=True),
        Column("generation", _BIG, primary_key=True),
    )
    op.create_table(
        "events",
        Column("id", _SERIAL, primary_key=True, autoincrement=True),
        Column("at_s", Float, nullable=False),
        Column("kind", String(64), nullable=False),
        Column("severity", String(16), nullable=False),
        Column("message", Text, nullable=False),
        Column("job", String(128), nullable=False),
        Column("node", String(128), nullable=False),
        Column("context", Text, nullable=False),
    )
    op.create_table(
        "pulse",
        Column("id", Integer, primary_key=True),
        Column("at_s", Float, nullable=False),
    )
    op.execute("INSERT INTO pulse (id, at_s) VALUES (1, 0)")


def downgrade() -> None:
    """Drop them, with all that they hold."""
    for name in (
        "pulse",
        "events",
        "pins",
        "decisions",
        "checkpoints",
        "nodes",
        "attempt_ranks",
        "attempts",
        "runs",
        "jobs",
    ):
        op.drop_table(name)
