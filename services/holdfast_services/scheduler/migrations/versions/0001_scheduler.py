"""Lease, jobs, executors, nodes set aside, hints, plans."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Boolean, Column, Float, String, Text

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "scheduler_lease",
        Column("name", String(16), primary_key=True),
        Column("holder", String(128), nullable=False),
        Column("fence", BigInteger, nullable=False),
        Column("until_s", Float, nullable=False),
        Column("number", BigInteger, nullable=False),
        Column("metadata_out_since_s", Float, nullable=False),
    )
    op.create_table(
        "scheduler_jobs",
        Column("name", String(128), primary_key=True),
        Column("version", BigInteger, nullable=False),
        Column("settled", Boolean, nullable=False),
        Column("submitted_at_s", Float, nullable=False),
        Column("body", Text, nullable=False),
    )
    op.create_index("scheduler_jobs_settled", "scheduler_jobs", ["settled", "submitted_at_s"])
    op.create_table(
        "scheduler_executors",
        Column("node", String(128), primary_key=True),
        Column("executor", String(32), nullable=False),
        Column("sequence", BigInteger, nullable=False),
        Column("lease_until_s", Float, nullable=False),
        Column("body", Text, nullable=False),
    )
    op.create_table(
        "scheduler_asides",
        Column("node", String(128), primary_key=True),
        Column("body", Text, nullable=False),
    )
    op.create_table(
        "scheduler_hints",
        Column("job", String(128), primary_key=True),
        Column("id", String(32), nullable=False),
        Column("body", Text, nullable=False),
    )
    op.create_table(
        "scheduler_plans",
        Column("number", BigInteger, primary_key=True),
        Column("fence", BigInteger, nullable=False),
        Column("made_at_s", Float, nullable=False),
        Column("body", Text, nullable=False),
    )


def downgrade() -> None:
    """Drop them: what trains goes on, and nobody plans."""
    for name in ("plans", "hints", "asides", "executors", "jobs", "lease"):
        op.drop_table(f"scheduler_{name}")
