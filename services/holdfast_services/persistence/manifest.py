"""Makes a checkpoint durable: every shard is looked for, then it is published."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping

import holdfast
from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.publish import publish
from holdfast.core.ids import ShardId
from holdfast.core.persistence_work import CheckpointWork
from holdfast.core.shard import Shard
from holdfast.errors import (
    CorruptionError,
    NotFoundError,
    NotReadyError,
    StoppedError,
    UnsupportedFormatError,
)
from holdfast.format import keys
from holdfast.format.canonical import strict_object
from holdfast.format.digest import part_digest
from holdfast.format.manifest import MANIFEST_BYTES_MAX, Manifest
from holdfast.format.notes import NOTES_BYTES_MAX
from holdfast.format.segment import SegmentHeader
from holdfast.objectstore import ObjectStore
from holdfast_services.persistence.pool import PartPool

MISSING_NAMED_MAX = 8

_NO_USE = (NotFoundError, CorruptionError, UnsupportedFormatError)

log = logging.getLogger(__name__)


class MissingShardsError(NotReadyError):
    """Shards that were reported are not in the store after all; ``shards`` are to go again."""

    def __init__(self, message: str, shards: tuple[ShardId, ...]) -> None:
        super().__init__(message)
        self.shards = shards


def write_manifest(
    store: ObjectStore, pool: PartPool, plan: CheckpointWork, stop: threading.Event
) -> bytes:
    """Write the manifest of the planned checkpoint; return the stored manifest's digest.

    Raises:
        MissingShardsError: some are not in the store, or not what they should be; names the first.
        AlreadyExistsError: another manifest, of other shards, is there.
        UnavailableError: the store, or nobody knows whether it was written; try again.
    """
    mine = planned(plan)
    folder = CheckpointFolder(store, keys.folder(plan.job, plan.checkpoint))
    _check_shards(folder, mine.shards, pool, stop)
    # One that nobody can read is nobody's: the shards that lie beside it are ours, proven.
    return part_digest(
        publish(folder, mine, repair=True, headers=lambda: _headers(folder, mine.shards, pool))
    )


def take_back(
    store: ObjectStore, pool: PartPool, plan: CheckpointWork, digest: bytes, stop: threading.Event
) -> None:
    """Delete the manifest with ``digest``, which metadata refused, if the shards are gone.

    Whoever was paused between looking for them and creating it may be so late that the checkpoint
    was collected meanwhile, and nobody else would ever look there. If they lie there it stays,
    since a catalogue that was lost refuses good ones too.

    Raises:
        UnavailableError, AccessError, NotFoundError: the store.
    """
    folder = CheckpointFolder(store, keys.folder(plan.job, plan.checkpoint))
    key = keys.manifest_key(plan.job, plan.checkpoint)
    try:
        _check_shards(folder, plan.shards, pool, stop)
    except MissingShardsError as error:
        if part_digest(store.get(key, length_bytes_max=MANIFEST_BYTES_MAX)) == digest:
            log.warning("%s came too late and is taken back: %s", key, error)
            store.delete([key])


def planned(plan: CheckpointWork) -> Manifest:
    """Return the manifest of the planned checkpoint, with a write id of its own."""
    shards = tuple(sorted(plan.shards, key=lambda shard: shard.id))
    return Manifest(
        checkpoint=plan.checkpoint,
        job=plan.job,
        world_size=shards[0].world_size,
        shards=shards,
        write_id=secrets.token_hex(16),
        created_at_s=plan.created_at_s,
        parent=plan.parent,
        mesh={"dp": shards[0].world_size},
        notes=_notes(plan.notes),
        software=f"holdfast {holdfast.__version__}",
        origin=plan.origin,
    )


def _notes(text: str) -> dict[str, object]:
    if not text:
        return {}
    return strict_object(text.encode(), what="notes", bytes_max=NOTES_BYTES_MAX)


def _check_shards(
    folder: CheckpointFolder, shards: tuple[Shard, ...], pool: PartPool, stop: threading.Event
) -> None:
    def problem(shard: Shard) -> tuple[Shard, str]:
        if stop.is_set():
            raise StoppedError("checking shards was interrupted")
        try:
            folder.check_length(shard)
            folder.sidecar(shard)
        except _NO_USE as error:
            return shard, error.message
        return shard, ""

    missing = {shard: text for shard, text in pool.each(problem, shards) if text}
    if missing:
        # A bucket that is gone has no shards either: let that be the error, if it is so.
        folder.store.check()
        raise _missing(missing, shards)


def _missing(missing: Mapping[Shard, str], shards: tuple[Shard, ...]) -> MissingShardsError:
    named = sorted(f"{shard.id.key}: {text}" for shard, text in missing.items())
    return MissingShardsError(
        f"{len(missing)} of {len(shards)} shards are not in the store: "
        + "; ".join(named[:MISSING_NAMED_MAX]),
        tuple(sorted(shard.id for shard in missing)),
    )


def _headers(
    folder: CheckpointFolder, shards: tuple[Shard, ...], pool: PartPool
) -> list[SegmentHeader]:
    """Return the header of each shard.

    Raises:
        MissingShardsError: some have none that is theirs. Their sidecars are gone: without one
            an object is read back whole, and written again if it does not match.
    """

    def header(shard: Shard) -> tuple[Shard, SegmentHeader | str]:
        try:
            return shard, folder.header(shard)
        except _NO_USE as error:
            return shard, error.message

    found = pool.each(header, shards)
    bad = {shard: one for shard, one in found if isinstance(one, str)}
    if bad:
        folder.store.check()
        folder.store.delete([folder.sidecar_key(shard) for shard in bad])
        raise _missing(bad, shards)
    return [one for _, one in found if not isinstance(one, str)]
