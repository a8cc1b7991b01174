"""What metadata tells a persistence worker to do; one value for each message of the wire. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.ids import CheckpointId
from holdfast.core.inventory import Peer
from holdfast.core.origin import Origin
from holdfast.core.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWork:
    """Bring one shard into the object store.

    ``sources`` are live nodes that hold it. ``earlier`` are durable checkpoints of the run, newest
    first, a bounded number: unchanged parts are copied from them. ``repair``: what is in the store
    is known to be bad, so it is written again.
    """

    shard: Shard
    sources: tuple[Peer, ...] = ()
    earlier: tuple[CheckpointId, ...] = ()
    repair: bool = False

    @property
    def job(self) -> str:
        """The job that the shard is of."""
        return self.shard.job

    @property
    def checkpoint(self) -> CheckpointId:
        """The checkpoint that the shard is part of."""
        return self.shard.id.checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWork:
    """Write a checkpoint's manifest, read it back, or delete it: the item says which.

    ``shards`` are all of it, never none. ``parent`` is what its attempt had restored, None: it
    began at step 0. ``notes`` are the user's, a JSON object or empty. ``created_at_s`` is when it
    was committed. ``repair``: what is in the store is known to be bad. ``origin`` is that of the
    attempt that saved it, None: nobody knows.
    """

    checkpoint: CheckpointId
    job: str
    shards: tuple[Shard, ...] = ()
    parent: CheckpointId | None = None
    notes: str = ""
    created_at_s: float = 0.0
    repair: bool = False
    origin: Origin | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepWork:
    """Delete from the whole bucket what changed before ``before_s`` and has no manifest.

    ``draining`` are on their way to the store and stay, however old.
    """

    draining: tuple[CheckpointId, ...] = ()
    before_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShards:
    """The shards of a durable checkpoint, as a row of the catalogue has them."""

    shards: tuple[Shard, ...] = ()


Work = ShardWork | CheckpointWork | SweepWork
