"""How attempts began: with which code, from which checkpoint."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Boolean, Column, Float, Integer, LargeBinary, String, Text

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table; of attempts that were before nobody has said it."""
    op.create_table(
        "origins",
        Column("run", String(32), primary_key=True),
        Column("generation", BigInteger, primary_key=True),
        Column("at_s", Float),
        Column("holder", Text, nullable=False),
        Column("world_size", Integer, nullable=False),
        Column("confirmed", Boolean, nullable=False),
        Column("parent_step", BigInteger),
        Column("parent_generation", BigInteger),
        Column("body", LargeBinary, nullable=False),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("origins")
