"""How often the attempts of a run have failed."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Text

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the record; of attempts that were before nothing is known."""
    op.add_column("runs", Column("failures", Text, nullable=False, server_default="{}"))


def downgrade() -> None:
    """Drop it."""
    with op.batch_alter_table("runs") as runs:
        runs.drop_column("failures")
