"""An attempt's row keeps its spec as a message, and its costs; why a step was announced.

So a new field of the spec needs no column. Inventories stay as they are: the numbers of the fields
that protocol 1 had in a rank's status are not used again, so its rows read as "nothing said yet".
"""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op
from sqlalchemy import BigInteger, Column, Float, Integer, LargeBinary, Text

from holdfast.v1 import common_pb2 as pb

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_NAMES = (
    "launcher",
    "holder",
    "world_size",
    "replicas",
    "replica_domain",
    "persist_steps",
    "persist_seconds",
    "start",
)
_ROWS = sa.table(
    "attempts",
    *(sa.column(name) for name in ("run", "generation", "job", "nonce", "spec")),
    *(sa.column(name) for name in _NAMES),
)


def upgrade() -> None:
    """Make each attempt's message of its columns, then drop them."""
    empty = sa.text("''::bytea" if op.get_bind().dialect.name == "postgresql" else "X''")
    op.add_column("attempts", Column("spec", LargeBinary, nullable=False, server_default=empty))
    op.add_column("attempts", Column("costs", LargeBinary, nullable=False, server_default=empty))
    op.add_column("attempts", Column("costs_at_s", Float, nullable=False, server_default="0"))
    op.add_column("runs", Column("announced_reason", Integer, nullable=False, server_default="0"))
    for row in op.get_bind().execute(sa.select(_ROWS)).mappings().all():
        start = json.loads(row["start"]) if row["start"] else None
        spec = pb.AttemptSpec(
            job=row["job"],
            nonce=row["nonce"],
            launcher=row["launcher"],
            holder=row["holder"],
            world_size=row["world_size"],
            replicas=row["replicas"],
            replica_domain=row["replica_domain"],
            persist=pb.PersistRule(steps=row["persist_steps"], seconds=row["persist_seconds"]),
            start=pb.Start(**start) if start else None,
        )
        _put(row, {"spec": spec.SerializeToString()})
    for name in _NAMES:
        op.drop_column("attempts", name)


def downgrade() -> None:
    """Take the columns back out of the messages."""
    columns = (
        Column("launcher", Text, nullable=False, server_default=""),
        Column("holder", Text, nullable=False, server_default=""),
        Column("world_size", Integer, nullable=False, server_default="0"),
        Column("replicas", Integer, nullable=False, server_default="0"),
        Column("replica_domain", Text, nullable=False, server_default=""),
        Column("persist_steps", BigInteger, nullable=False, server_default="0"),
        Column("persist_seconds", Float, nullable=False, server_default="0"),
        Column("start", Text),
    )
    for column in columns:
        op.add_column("attempts", column)
    for row in op.get_bind().execute(sa.select(_ROWS)).mappings().all():
        spec = pb.AttemptSpec.FromString(row["spec"])
        start = {"name": spec.start.name, "fresh": spec.start.fresh, "step": spec.start.step}
        values = {
            "launcher": spec.launcher,
            "holder": spec.holder,
            "world_size": spec.world_size,
            "replicas": spec.replicas,
            "replica_domain": spec.replica_domain,
            "persist_steps": spec.persist.steps,
            "persist_seconds": spec.persist.seconds,
            "start": json.dumps(start) if spec.HasField("start") else None,
        }
        _put(row, values)
    op.drop_column("runs", "announced_reason")
    for name in ("costs_at_s", "costs", "spec"):
        op.drop_column("attempts", name)


def _put(row: sa.RowMapping, values: dict[str, object]) -> None:
    key = (_ROWS.c.run == row["run"]) & (_ROWS.c.generation == row["generation"])
    op.get_bind().execute(sa.update(_ROWS).where(key).values(values))
