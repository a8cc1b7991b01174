"""Puts one checkpoint in the place of another in a folder of its own: what is there goes late.

An older checkpoint goes when all bytes of the new one are there, and not before; the new one is
none until its manifest is written, last of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from secrets import token_hex

import holdfast
from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.publish import publish
from holdfast.core.ids import CheckpointId, Generation, RunId, Step
from holdfast.core.shard import Shard
from holdfast.errors import AlreadyExistsError, ManifestError, NotFoundError
from holdfast.format.keys import MANIFEST, SEGMENT_SUFFIX, SIDECAR_SUFFIX, parse_shard_stem
from holdfast.format.manifest import Manifest
from holdfast.objectstore import ObjectStore

JOB = "one-shot"


def sweep(store: ObjectStore, *, overwrite: bool) -> None:
    """Remove what dead saves left, and nothing of a checkpoint.

    Raises:
        AlreadyExistsError: there is a checkpoint, and it is not to be replaced.
    """
    taken = _is_taken(store, overwrite=overwrite)
    _abort_others(store, frozenset())
    if not taken:
        _delete_shards(store)


def make_room(store: ObjectStore, uploads: Collection[str], *, overwrite: bool) -> None:
    """Make sure that nothing of another checkpoint is left: readers believe the listing.

    Nor may another save that is under way put its files over ours later: all but ``uploads`` end.

    Raises:
        AlreadyExistsError: there is a checkpoint by now, and it is not to be replaced.
    """
    if _is_taken(store, overwrite=overwrite):
        # First of all the manifest: from here on nobody takes what is left for a checkpoint.
        store.delete([MANIFEST])
    _abort_others(store, uploads)
    _delete_shards(store)


def _abort_others(store: ObjectStore, keep: Collection[str]) -> None:
    for upload in list(store.open_uploads("shard-")):
        if _is_ours(upload.key) and upload.id not in keep:
            store.abort(upload)


def _is_taken(store: ObjectStore, *, overwrite: bool) -> bool:
    try:
        store.head(MANIFEST)
    except NotFoundError:
        return False
    if not overwrite:
        raise AlreadyExistsError(
            f"{store.url} holds a checkpoint already: choose another path, or overwrite=True"
        )
    return True


def _delete_shards(store: ObjectStore) -> None:
    store.delete([found.key for found in store.list("shard-") if _is_ours(found.key)])


def _is_ours(key: str) -> bool:
    anybody = CheckpointId(RunId("r"), Step(0), Generation(0))
    return any(
        key.endswith(suffix) and parse_shard_stem(key.removesuffix(suffix), anybody) is not None
        for suffix in (SEGMENT_SUFFIX, SIDECAR_SUFFIX)
    )


def write_manifest(
    folder: CheckpointFolder, shards: tuple[Shard, ...], notes: Mapping[str, object]
) -> None:
    """Write what makes it a checkpoint.

    Raises:
        AlreadyExistsError: somebody else's was there first.
        UnavailableError: the answer was lost, and it is not there.
    """
    manifest = Manifest(
        checkpoint=shards[0].id.checkpoint,
        job=JOB,
        world_size=shards[0].world_size,
        shards=shards,
        write_id=token_hex(16),
        created_at_s=time.time(),
        notes=notes,
        software=f"holdfast {holdfast.__version__}",
    )
    publish(folder, manifest)


def forget(folder: CheckpointFolder, run: RunId) -> None:
    """Delete the manifest if it is that of ``run``."""
    if _found(folder, lambda found: found.checkpoint.run) == run:
        folder.store.delete([MANIFEST])


def _found(folder: CheckpointFolder, what: Callable[[Manifest], str]) -> str | None:
    """Return ``what`` the manifest there says, None if there is none that can be read."""
    try:
        return what(folder.manifest())
    except (NotFoundError, ManifestError):
        return None
