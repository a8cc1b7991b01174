"""Where attempts ask to begin, and which of these starts were made."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Boolean, Column, Text, false

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns with the value that says "at the newest checkpoint"."""
    op.add_column("runs", Column("started", Text, nullable=False, server_default="[]"))
    op.add_column("attempts", Column("start", Text))
    op.add_column("attempts", Column("start_due", Boolean, nullable=False, server_default=false()))


def downgrade() -> None:
    """Drop them: every attempt begins at the newest checkpoint."""
    op.drop_column("attempts", "start_due")
    op.drop_column("attempts", "start")
    op.drop_column("runs", "started")
