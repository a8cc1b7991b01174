"""The tables of the catalogue, as the newest migration leaves them.

Times are seconds since the epoch by the database's clock. Inventories and decisions are kept as
their protocol messages: one row per node, one per decision, whatever the number of shards.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData()

_BIG = BigInteger()
# SQLite numbers rows by itself only in a column of exactly this type.
_SERIAL = BigInteger().with_variant(Integer(), "sqlite")


def _table(name: str, *columns: Column[object] | UniqueConstraint | Index) -> Table:
    return Table(name, metadata, *columns)


# The row that is locked for every change of the job's run.
jobs = _table(
    "jobs",
    Column("name", String(128), primary_key=True),
    Column("run", String(32), nullable=False, unique=True),
    Column("created_at_s", Float, nullable=False),
)

# rules: JSON [[after_step, below_generation, from_generation]]; they follow from moves: JSON
# [[generation, step, generation that had made it]]. abandoned: JSON [[step, generation, reason]].
# retention: JSON of the policy, NULL: everything is kept. persisted_*: the last checkpoint that
# became due, when; persist_owed: one was due and could not go, so the next one does.
# failures: JSON of the record of the attempts before, and how the newest one has ended.
# started: JSON [name of a start that was made]. announced_*: step 0: nothing is announced.
runs = _table(
    "runs",
    Column("run", String(32), primary_key=True),
    Column("job", String(128), nullable=False),
    Column("generation", _BIG, nullable=False),
    Column("announced_step", _BIG, nullable=False),
    Column("announced_reason", Integer, nullable=False),
    Column("announced_at_s", Float, nullable=False),
    Column("rules", Text, nullable=False),
    Column("moves", Text, nullable=False),
    Column("abandoned", Text, nullable=False),
    Column("retention", Text),
    Column("persisted_step", _BIG, nullable=False),
    Column("persisted_at_s", Float, nullable=False),
    Column("persist_owed", Boolean, nullable=False),
    Column("started", Text, nullable=False),
    Column("failures", Text, nullable=False),
)

# spec: holdfast.v1.AttemptSpec of the rank that began it; nonce is that of the spec, for its index.
# start_due: nobody has begun yet where it asks to. costs: holdfast.v1.RankCosts, of all its ranks.
attempts = _table(
    "attempts",
    Column("run", String(32), primary_key=True),
    Column("generation", _BIG, primary_key=True),
    Column("job", String(128), nullable=False),
    Column("nonce", LargeBinary(64), nullable=False),
    Column("replicas_allowed", Integer, nullable=False),
    Column("started_at_s", Float, nullable=False),
    Column("lease_until_s", Float, nullable=False),
    Column("start_due", Boolean, nullable=False),
    Column("spec", LargeBinary, nullable=False),
    Column("costs", LargeBinary, nullable=False),
    Column("costs_at_s", Float, nullable=False),
    UniqueConstraint("job", "nonce"),
)

attempt_ranks = _table(
    "attempt_ranks",
    Column("run", String(32), primary_key=True),
    Column("generation", _BIG, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("node", String(128), nullable=False),
    Column("registered_at_s", Float, nullable=False),
    Column("live", Boolean, nullable=False),
    Column("ready_decision", _BIG, nullable=False),
    Column("loaded", Boolean, nullable=False),
)

# inventory: holdfast.v1.Inventory, the node's last one, replaced in place.
nodes = _table(
    "nodes",
    Column("name", String(128), primary_key=True),
    Column("incarnation", _BIG, nullable=False),
    Column("sequence", _BIG, nullable=False),
    Column("reported_at_s", Float, nullable=False),
    Column("lease_until_s", Float, nullable=False),
    Column("lost", Boolean, nullable=False),
    Column("inventory", LargeBinary, nullable=False),
)

# drain_at_s: since when it is on its way to the object store, NULL once it is there or given up.
# notes: the user's metadata, a JSON object or empty. parent_*: what its attempt had restored,
# NULL when it began at step 0, its own step and generation when that is not known.
checkpoints = _table(
    "checkpoints",
    Column("run", String(32), primary_key=True),
    Column("step", _BIG, primary_key=True),
    Column("generation", _BIG, primary_key=True),
    Column("world_size", Integer, nullable=False),
    Column("plan_hash", Text, nullable=False),
    Column("length_bytes", _BIG, nullable=False),
    Column("local_at_s", Float, nullable=False),
    Column("replicated_at_s", Float),
    Column("copied_at_s", Float),
    Column("durable_at_s", Float),
    Column("drain_at_s", Float),
    Column("notes", Text, nullable=False),
    Column("parent_step", _BIG),
    Column("parent_generation", _BIG),
)

# What every change of a run reads, however many durable rows lie beside it.
Index(
    "checkpoints_in_memory",
    checkpoints.c.run,
    sqlite_where=checkpoints.c.durable_at_s.is_(None),
    postgresql_where=checkpoints.c.durable_at_s.is_(None),
)

# One row per shard of a draining checkpoint, gone with the drain; done_at_s: it lies there.
drains = _table(
    "drains",
    Column("run", String(32), primary_key=True),
    Column("step", _BIG, primary_key=True),
    Column("generation", _BIG, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("volume", Integer, primary_key=True),
    Column("length_bytes", _BIG, nullable=False),
    Column("root_digest", LargeBinary(16), nullable=False),
    Column("plan_hash", Text, nullable=False),
    Column("done_at_s", Float),
)

# What lies in the object store for a durable row of ``checkpoints``: one to one with those.
# bad: JSON [[rank, volume]] of shards that were read back wrong. expired_at_s: to be collected.
# scrub_asked: read it back now. body, last for quick scans: holdfast.v1.StoredShards.
objects = _table(
    "objects",
    Column("run", String(32), primary_key=True),
    Column("step", _BIG, primary_key=True),
    Column("generation", _BIG, primary_key=True),
    Column("manifest_digest", LargeBinary(16), nullable=False),
    Column("scrubbed_at_s", Float),
    Column("scrub_asked", Boolean, nullable=False),
    Column("bad", Text, nullable=False),
    Column("expired_at_s", Float),
    Column("body", LargeBinary, nullable=False),
)

# body: holdfast.v1.Decision; rejected: JSON [[step, generation]] tried in vain before this one.
decisions = _table(
    "decisions",
    Column("run", String(32), primary_key=True),
    Column("number", _BIG, primary_key=True),
    Column("state", Integer, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("rejected", Text, nullable=False),
)

pins = _table(
    "pins",
    Column("run", String(32), primary_key=True),
    Column("step", _BIG, primary_key=True),
    Column("generation", _BIG, primary_key=True),
)

# What users keep, whatever the retention says.
user_pins = _table(
    "user_pins",
    Column("run", String(32), primary_key=True),
    Column("step", _BIG, primary_key=True),
    Column("generation", _BIG, primary_key=True),
    Column("note", Text, nullable=False),
    Column("at_s", Float, nullable=False),
)

# Leases of whoever reads a checkpoint out of the object store now: not expired before until_s.
reads = _table(
    "reads",
    Column("id", String(32), primary_key=True),
    Column("run", String(32), nullable=False),
    Column("step", _BIG, nullable=False),
    Column("generation", _BIG, nullable=False),
    Column("holder", Text, nullable=False),
    Column("until_s", Float, nullable=False),
)

# What users rolled back to, under which generation; recorded: the object store has it too.
rollbacks = _table(
    "rollbacks",
    Column("run", String(32), primary_key=True),
    Column("generation", _BIG, primary_key=True),
    Column("step", _BIG, nullable=False),
    Column("of_generation", _BIG, nullable=False),
    Column("at_s", Float, nullable=False),
    Column("holder", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("recorded", Boolean, nullable=False),
)

# How each attempt began. parent_*: what it had restored, NULL: step 0, once that is confirmed.
# body: holdfast.v1.Origin. at_s: NULL where only the bucket knows of it.
origins = _table(
    "origins",
    Column("run", String(32), primary_key=True),
    Column("generation", _BIG, primary_key=True),
    Column("at_s", Float),
    Column("holder", Text, nullable=False),
    Column("world_size", Integer, nullable=False),
    Column("confirmed", Boolean, nullable=False),
    Column("parent_step", _BIG),
    Column("parent_generation", _BIG),
    Column("body", LargeBinary, nullable=False),
)

events = _table(
    "events",
    Column("id", _SERIAL, primary_key=True, autoincrement=True),
    Column("at_s", Float, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("severity", String(16), nullable=False),
    Column("message", Text, nullable=False),
    Column("job", String(128), nullable=False),
    Column("node", String(128), nullable=False),
    Column("context", Text, nullable=False),
)

# body: JSON of domain.launch.Launch, replaced in place; gone with its last launcher.
launches = _table(
    "launches",
    Column("job", String(128), primary_key=True),
    Column("body", Text, nullable=False),
)

# Leases of launchers, apart from what is decided about them: each sign of life writes one.
launchers = _table(
    "launchers",
    Column("launcher", String(32), primary_key=True),
    Column("job", String(128), nullable=False),
    Column("lease_until_s", Float, nullable=False),
)

# One row: when a metadata process last could write, and since when without a gap: in one no lease
# could be renewed, and after it nobody knows what agents have to say.
pulse = _table(
    "pulse",
    Column("id", Integer, primary_key=True),
    Column("at_s", Float, nullable=False),
    Column("since_s", Float, nullable=False),
)
