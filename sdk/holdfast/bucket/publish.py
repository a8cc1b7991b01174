"""Makes what was written a checkpoint: sidecars, the index, and the one commit of a manifest.

``docs/reference/bucket-v1.md`` is normative. Whoever writes a checkpoint (a worker, a one-shot
save, an import, a copy) makes it one by ``publish``, which alone knows what a lost answer means.
Knows nothing of catalogues, agents or torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from holdfast.bucket.folder import CheckpointFolder
from holdfast.errors import (
    AlreadyExistsError,
    CheckpointError,
    CorruptionError,
    ExhaustedError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from holdfast.format import index, keys, manifest, sidecar
from holdfast.format.digest import PART_BYTES
from holdfast.format.manifest import MANIFEST_BYTES_MAX, Manifest
from holdfast.format.segment import SegmentHeader
from holdfast.format.sidecar import Sidecar
from holdfast.objectstore import ObjectStore

log = logging.getLogger(__name__)


def put_sidecar(folder: CheckpointFolder, made: Sidecar, *, if_absent: bool = False) -> None:
    """Check the segment that has just appeared, then write its sidecar.

    Where the store checks no parts, the first and the last are read back.

    Raises:
        CorruptionError: what is there is not what was sent.
        AlreadyExistsError: ``if_absent``, and there is a sidecar.
        OutcomeUnknownError: ``if_absent``, and the answer was lost: read it back.
    """
    folder.check_length(made.shard)
    if not folder.store.checks_parts:
        last = len(made.digests) - 1
        for number in {0, last}:
            length_bytes = min(PART_BYTES, made.shard.length_bytes - number * PART_BYTES)
            folder.fetch_part(made, number, memoryview(bytearray(length_bytes)))
    key = folder.sidecar_key(made.shard)
    folder.store.put(key, sidecar.encode(made), if_absent=if_absent)


def publish(
    folder: CheckpointFolder,
    mine: Manifest,
    *,
    headers: Callable[[], Iterable[SegmentHeader]] | None = None,
    repair: bool = False,
) -> bytes:
    """Make the shards in ``folder`` a checkpoint and return the bytes of its manifest.

    First the index, then the manifest: one conditional create that carries an id drawn for it. A
    lost answer is read back and never repeated. A manifest that is there already is success if
    ``says_the_same``: so is our own after a lost answer, and that of another writer who was
    quicker.

    Args:
        folder: Where all shards lie, proven.
        mine: What is to be said of them.
        headers: Called for the headers of all shards if their plan has no index yet; None:
            readers do with the headers themselves.
        repair: A manifest that cannot be read is written over.

    Raises:
        AlreadyExistsError: another checkpoint's manifest is there; it stays.
        CorruptionError: what is there cannot be read, and is not to be repaired.
        UnavailableError: nobody knows whether it was written; try again.
        CheckpointError: what ``headers`` raises, or the store.
    """
    if headers is not None:
        _put_index(folder.store, mine, headers)
    key = folder.prefix + keys.MANIFEST
    data = manifest.encode(mine)
    try:
        folder.store.put(key, data, if_absent=True)
    except (AlreadyExistsError, OutcomeUnknownError) as cause:
        return _read_back(folder.store, key, mine, data, cause, repair=repair)
    return data


def says_the_same(found: Manifest, mine: Manifest) -> bool:
    """Tell whether the manifest in the store has the same contents as ``mine``.

    It has our own write id: our answer was lost. Or it lists the same shards: another writer was
    quicker, or an earlier life of this one.
    """
    return found.write_id == mine.write_id or (
        (found.job, found.checkpoint, found.world_size, found.shards)
        == (mine.job, mine.checkpoint, mine.world_size, mine.shards)
    )


def _read_back(
    store: ObjectStore,
    key: str,
    mine: Manifest,
    data: bytes,
    cause: CheckpointError,
    *,
    repair: bool,
) -> bytes:
    try:
        there = store.get(key, length_bytes_max=MANIFEST_BYTES_MAX)
    except NotFoundError:
        raise UnavailableError(
            f"the store did not tell whether {key} was written: try again"
        ) from cause
    try:
        found = manifest.decode(there)
    except CorruptionError:
        if not repair:
            raise
        log.warning("%s cannot be read by anybody and is written again", key)
        store.put(key, data)
        return data
    if not says_the_same(found, mine):
        raise AlreadyExistsError(f"{key} lists the shards of another checkpoint") from cause
    return there


def _put_index(
    store: ObjectStore, mine: Manifest, headers: Callable[[], Iterable[SegmentHeader]]
) -> None:
    """Write the plan's index unless it is there; it is a convenience, never a condition."""
    key = keys.index_key(mine.job, mine.checkpoint.run, mine.plan)
    try:
        store.head(key)
    except NotFoundError:
        pass
    else:
        return
    found = headers()
    try:
        store.put(key, index.encode(index.build(found)), if_absent=True)
    except (AlreadyExistsError, OutcomeUnknownError):
        log.debug("%s was written meanwhile", key)
    except ExhaustedError as error:
        log.warning("%s: %s", key, error)
