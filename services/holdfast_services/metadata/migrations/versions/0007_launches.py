"""Launches with their rounds, and the leases of launchers."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Float, String, Text

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables; nothing was launched before."""
    op.create_table(
        "launches",
        Column("job", String(128), primary_key=True),
        Column("body", Text, nullable=False),
    )
    op.create_table(
        "launchers",
        Column("launcher", String(32), primary_key=True),
        Column("job", String(128), nullable=False),
        Column("lease_until_s", Float, nullable=False),
    )


def downgrade() -> None:
    """Drop them: those that train go on, and are started anew by the next round."""
    op.drop_table("launchers")
    op.drop_table("launches")
