"""Reads a checkpoint back from the store, at its own rate, and says which shards are bad (G20)."""

from __future__ import annotations

import threading

from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.verify import verify
from holdfast.core import keys
from holdfast.core.facts import PersistPlan
from holdfast.core.ids import ShardId
from holdfast.errors import CorruptionError, NotFoundError
from holdfast.objectstore import ObjectStore
from holdfast_services.persistence.pace import Pace


def scrub(
    store: ObjectStore, plan: PersistPlan, pace: Pace, stop: threading.Event
) -> tuple[ShardId, ...]:
    """Return the shards that are not what the catalogue says; all, when the manifest is not.

    Memory is one part, whatever the size of a shard.

    Raises:
        InterruptedFetchError: ``stop`` was set.
        UnavailableError, AccessError, NotFoundError: the store itself: nothing is known.
    """
    folder = CheckpointFolder(store, keys.folder(plan.job, plan.checkpoint))
    everything = tuple(sorted(shard.id for shard in plan.shards))
    try:
        manifest = folder.manifest()
    except (NotFoundError, CorruptionError):
        store.check()  # a bucket that is gone says nothing of its shards
        return everything
    known = {shard.id: shard for shard in plan.shards}
    if {shard.id: shard for shard in manifest.shards} != known:
        return everything
    verdicts = verify(folder, manifest, pace=lambda length: pace.take(length, stop))
    bad = tuple(verdict.shard.id for verdict in verdicts if not verdict.ok)
    if bad:
        store.check()
    return bad
