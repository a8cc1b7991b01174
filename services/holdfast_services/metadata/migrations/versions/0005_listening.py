"""Since when the catalogue has been there without a gap: who asks it earlier waits for agents."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Float

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the time; a catalogue that is upgraded has been there for ever."""
    op.add_column("pulse", Column("since_s", Float, nullable=False, server_default="0"))


def downgrade() -> None:
    """Drop it: decisions are made at once."""
    op.drop_column("pulse", "since_s")
