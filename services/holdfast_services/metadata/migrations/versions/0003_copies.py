"""Which checkpoints have all the copies that could be made: only those let older slots go."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Float

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; rows that were replicated had all copies that could be made."""
    op.add_column("checkpoints", Column("copied_at_s", Float))
    op.execute("UPDATE checkpoints SET copied_at_s = replicated_at_s")
    op.execute("ALTER TABLE attempts RENAME COLUMN replicas_cut TO replicas_allowed")


def downgrade() -> None:
    """Take it back."""
    op.execute("ALTER TABLE attempts RENAME COLUMN replicas_allowed TO replicas_cut")
    op.drop_column("checkpoints", "copied_at_s")
