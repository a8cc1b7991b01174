"""Reads a checkpoint back from the store, at its own rate, and says which shards are bad (G20)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.publish import publish, says_the_same
from holdfast.bucket.verify import verify
from holdfast.core.ids import ShardId
from holdfast.core.persistence_work import CheckpointWork
from holdfast.errors import CorruptionError, NotFoundError
from holdfast.format import keys
from holdfast.format.manifest import Manifest
from holdfast.objectstore import ObjectStore
from holdfast_services.kit.pace import Pace
from holdfast_services.persistence.manifest import planned

log = logging.getLogger(__name__)


def scrub(
    store: ObjectStore,
    plan: CheckpointWork,
    pace: Pace,
    stop: threading.Event,
    *,
    check_kept: Callable[[], object],
) -> tuple[ShardId, ...]:
    """Return the shards that are not what the catalogue says; all, when the manifest is another's.

    A manifest that is gone or cannot be read is written again as the catalogue has it, after the
    shards were read: nobody believes the folder meanwhile. Memory is one part, whatever the size
    of a shard. ``check_kept`` raises if the checkpoint has expired since: reading takes long, and
    a manifest must not come back after its folder was collected.

    Raises:
        NotFoundError: by ``check_kept``.
        StoppedError: ``stop`` was set.
        UnavailableError, AccessError, NotFoundError: the store itself: nothing is known.
    """
    folder = CheckpointFolder(store, keys.folder(plan.job, plan.checkpoint))
    mine = planned(plan)
    there = _manifest(folder)
    if there is not None and not says_the_same(there, mine):
        return tuple(shard.id for shard in mine.shards)
    verdicts = verify(folder, mine, pace=lambda length: pace.take(length, stop))
    bad = tuple(verdict.shard.id for verdict in verdicts if not verdict.ok)
    if bad:
        store.check()  # a bucket that is gone says nothing of its shards
    if there is None:
        check_kept()
        log.warning("the manifest of %s is written again", folder.prefix)
        publish(folder, mine, repair=True)
    return bad


def _manifest(folder: CheckpointFolder) -> Manifest | None:
    try:
        return folder.manifest()
    except (NotFoundError, CorruptionError) as error:
        folder.store.check()
        log.warning("%s has no manifest that can be read: %s", folder.prefix, error)
        return None
