"""Where a run has gone on from, and the rollbacks that users asked for."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Boolean, Column, Float, String, Text

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; of runs that were there the moves follow from their rules."""
    op.add_column("runs", Column("moves", Text, nullable=False, server_default="[]"))
    op.create_table(
        "rollbacks",
        Column("run", String(32), primary_key=True),
        Column("generation", BigInteger, primary_key=True),
        Column("step", BigInteger, nullable=False),
        Column("of_generation", BigInteger, nullable=False),
        Column("at_s", Float, nullable=False),
        Column("holder", Text, nullable=False),
        Column("reason", Text, nullable=False),
        Column("recorded", Boolean, nullable=False),
    )


def downgrade() -> None:
    """Drop them: what was left behind stays so, as the rules say."""
    op.drop_table("rollbacks")
    with op.batch_alter_table("runs") as runs:
        runs.drop_column("moves")
