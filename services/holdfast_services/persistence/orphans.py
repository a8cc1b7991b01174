"""Deletes orphans from the store: folders without a manifest, uploads that never ended.

What is deleted is older than a time of the database's clock, is named like ours, and is not on
its way to the store now. A folder that has a manifest is never touched.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from holdfast.core.ids import CheckpointId
from holdfast.errors import NotFoundError, StoppedError
from holdfast.format import keys
from holdfast.objectstore import ObjectStore
from holdfast_services.persistence.collect import delete_below, folders_below

FOLDER_DEPTH_MAX = 68
"""Deeper than any name: a job's has at most 64 parts, then the run, then the checkpoint."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What was found and taken away."""

    folders: int = 0
    uploads: int = 0
    freed_bytes: int = 0


def sweep(
    store: ObjectStore,
    before_s: float,
    draining: Collection[CheckpointId],
    stop: threading.Event,
    *,
    durable: Callable[[CheckpointId], bool],
) -> Swept:
    """Delete orphans whose youngest object is older than ``before_s``; return what they were.

    Args:
        store: All of it is looked at.
        before_s: What changed later is left alone.
        draining: Checkpoints that are being written now: left alone, however old.
        stop: Ends it between two folders.
        durable: Tells whether the catalogue relies on a checkpoint whose manifest is not there:
            its bytes stay, they can still be restored from.

    Raises:
        StoppedError: ``stop`` was set; what was deleted stays deleted.
    """
    uploads = 0
    for upload in list(store.open_uploads()):
        place = keys.parse_folder(upload.key)
        if place is None or place.checkpoint in draining or upload.started_s >= before_s:
            continue
        store.abort(upload)
        uploads += 1
    folders, freed = 0, 0
    for prefix, place in folders_below(store, "", FOLDER_DEPTH_MAX):
        if stop.is_set():
            raise StoppedError("looking for orphans was interrupted")
        if place.checkpoint in draining or not _is_orphan(store, prefix, before_s):
            continue
        if durable(place.checkpoint):
            log.warning("%s has no manifest, but the catalogue relies on it", prefix)
        else:
            freed += delete_below(store, prefix, stop)
            folders += 1
            log.info("deleted %s, which has no manifest", prefix)
    return Swept(folders=folders, uploads=uploads, freed_bytes=freed)


def _is_orphan(store: ObjectStore, prefix: str, before_s: float) -> bool:
    if _has_manifest(store, prefix):
        return False
    if any(entry.modified_s >= before_s for entry in store.list(prefix)):
        return False
    return not _has_manifest(store, prefix)  # the listing took its time


def _has_manifest(store: ObjectStore, prefix: str) -> bool:
    try:
        store.head(prefix + keys.MANIFEST)
    except NotFoundError:
        return False
    return True
