"""Deletes the objects of an expired checkpoint: first the manifest, so no reader relies on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice

from holdfast.core.ids import CheckpointId
from holdfast.errors import InvalidRequestError, NotFoundError, StoppedError
from holdfast.format import keys
from holdfast.objectstore import ObjectStore

BATCH_COUNT = 1000


def collect(store: ObjectStore, job: str, checkpoint: CheckpointId, stop: threading.Event) -> int:
    """Delete a checkpoint's folder and its open uploads; return the bytes of what was there.

    A repeat after a death goes on where it was. The run's index objects go with its last folder.

    Raises:
        StoppedError: ``stop`` was set.
        CheckpointError: as the store refuses.
    """
    prefix = keys.folder(job, checkpoint)
    freed = _manifest(store, keys.manifest_key(job, checkpoint))
    for upload in list(store.open_uploads(prefix)):
        store.abort(upload)
    freed += delete_below(store, prefix, stop)
    # A writer that was paused may have made another one since the folder was listed.
    store.delete([keys.manifest_key(job, checkpoint)])
    run = keys.run_folder(job, checkpoint.run)
    if next(iter(store.folders(run)), None) is None:
        # Not what lies deeper: a drain may have begun since.
        store.delete([e.key for e in store.list(run) if "/" not in e.key.removeprefix(run)])
    return freed


def _manifest(store: ObjectStore, key: str) -> int:
    try:
        length_bytes = store.head(key).length_bytes
    except NotFoundError:
        return 0
    store.delete([key])
    return length_bytes


def delete_below(store: ObjectStore, prefix: str, stop: threading.Event) -> int:
    """Delete all objects below ``prefix``, batch by batch; return their bytes.

    Raises:
        InvalidRequestError: ``prefix`` is not a folder's: it would be somebody else's too.
        StoppedError: ``stop`` was set between two batches.
    """
    if not prefix.endswith("/"):
        raise InvalidRequestError(f"{prefix[:80]!r} is no folder")
    freed = 0
    listed = store.list(prefix)
    while batch := list(islice(listed, BATCH_COUNT)):
        if stop.is_set():
            raise StoppedError(f"deleting {prefix} was interrupted")
        store.delete([entry.key for entry in batch])
        freed += sum(entry.length_bytes for entry in batch)
    return freed


def folders_below(store: ObjectStore, above: str, depth: int) -> Iterator[tuple[str, keys.Place]]:
    """Yield every checkpoint's folder below ``above`` with its place, whole or not."""
    for prefix in store.folders(above):
        place = keys.parse_folder(prefix)
        if place is not None:
            yield prefix, place
        elif depth > 0:
            yield from folders_below(store, prefix, depth - 1)
