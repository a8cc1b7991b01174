"""The tables of the scheduler, as the newest migration leaves them.

They may lie in the catalogue's database: their names begin with ``scheduler_``. Times are seconds
since the epoch by the database's clock. Bodies are JSON of the dataclass that is named.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, MetaData, String, Table, Text

metadata = MetaData()

_BIG = BigInteger()

# The one row whose holder plans. fence: higher for each new holder. number: the last that a plan,
# a grant or a start has. metadata_out_since_s: since when it hears nothing of that; 0: it does.
lease = Table(
    "scheduler_lease",
    metadata,
    Column("name", String(16), primary_key=True),
    Column("holder", String(128), nullable=False),
    Column("fence", _BIG, nullable=False),
    Column("until_s", Float, nullable=False),
    Column("number", _BIG, nullable=False),
    Column("metadata_out_since_s", Float, nullable=False),
)

# One row for each name that was ever submitted, of its last submission. body: domain.job.Job;
# version: higher with each change. settled: nothing is left to be done about it.
jobs = Table(
    "scheduler_jobs",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("version", _BIG, nullable=False),
    Column("settled", Boolean, nullable=False),
    Column("submitted_at_s", Float, nullable=False),
    Column("body", Text, nullable=False),
    Index("scheduler_jobs_settled", "settled", "submitted_at_s"),
)

# One row for each executor's node. body: core.executions.ExecutorReport.
executors = Table(
    "scheduler_executors",
    metadata,
    Column("node", String(128), primary_key=True),
    Column("executor", String(32), nullable=False),
    Column("sequence", _BIG, nullable=False),
    Column("lease_until_s", Float, nullable=False),
    Column("body", Text, nullable=False),
)

# Nodes on which starts have failed lately. body: domain.cluster.Aside.
asides = Table(
    "scheduler_asides",
    metadata,
    Column("node", String(128), primary_key=True),
    Column("body", Text, nullable=False),
)

# What jobs last said of how they scale; of queued ones too, whose ranks say nothing now. id: of the
# submission. body: domain.planned.Knowledge.
hints = Table(
    "scheduler_hints",
    metadata,
    Column("job", String(128), primary_key=True),
    Column("id", String(32), nullable=False),
    Column("body", Text, nullable=False),
)

# The newest plans. body: domain.wishes.Wishes.
plans = Table(
    "scheduler_plans",
    metadata,
    Column("number", _BIG, primary_key=True),
    Column("fence", _BIG, nullable=False),
    Column("made_at_s", Float, nullable=False),
    Column("body", Text, nullable=False),
)
