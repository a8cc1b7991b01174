"""A checkpoint in a folder is read as it was when it was opened, whatever takes its place.

Who saves over a tag of DeepSpeed exchanges its folder for a new one and removes the old one. Who
reads keeps to the folder that had the name, and has a shared lock on its manifest; who removes
passes over a folder that is read. A lock ends with its process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from holdfast.bucket.folder import CheckpointFolder
from holdfast.errors import ConflictError, CorruptionError, NotFoundError
from holdfast.format.keys import MANIFEST
from holdfast.objectstore import open_store
from holdfast.objectstore.directory import DirectoryStore

TRIES_MAX = 10
"""How often a folder is opened; each time but the first, another save has just taken its place."""


@contextmanager
def opened(url: str) -> Iterator[CheckpointFolder]:
    """Yield the checkpoint that is at ``url`` now; the folder of a file system stays what it is.

    Where files cannot be locked (some NFS) it may be removed meanwhile, which is said by name.

    Args:
        url: See ``objectstore.open_store``.

    Raises:
        ConflictError: another checkpoint has taken its place, and its files are gone.
    """
    with ExitStack() as kept:
        store = kept.enter_context(closing(open_store(url)))
        if not isinstance(store, DirectoryStore):
            yield CheckpointFolder(store)
            return
        for _ in range(TRIES_MAX):
            folder = store.hold()
            if _lock_to_read(folder, kept) or not _is_replaced(store, folder):
                break
            store.close()
        try:
            yield CheckpointFolder(store)
        except (NotFoundError, CorruptionError) as cause:
            if not _is_replaced(store, folder):
                raise
            raise ConflictError(
                f"{store.root} was replaced by another save while it was read, and files of the "
                f"one before are gone: load again"
            ) from cause


def remove(folder: Path) -> None:
    """Remove the folder of a checkpoint, unless somebody reads it; what cannot go stays.

    The manifest goes first: what a kill leaves is no checkpoint.
    """
    with ExitStack() as kept, suppress(OSError):
        with suppress(FileNotFoundError):
            manifest = os.open(folder / MANIFEST, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            kept.callback(os.close, manifest)
            if not _lock(manifest, fcntl.LOCK_EX):
                return
            (folder / MANIFEST).unlink()
        shutil.rmtree(folder, ignore_errors=True)


def _lock_to_read(folder: int, kept: ExitStack) -> bool:
    """Lock the manifest until ``kept`` ends; False if there is none, or it is being removed."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        manifest = os.open(MANIFEST, flags, dir_fd=folder)
    except OSError:  # who reads it will say what is wrong
        return False
    kept.callback(os.close, manifest)
    return _lock(manifest, fcntl.LOCK_SH) and os.fstat(manifest).st_nlink > 0


def _lock(manifest: int, kind: int) -> bool:
    """Return False if another has locked it so that this cannot; without locks, True."""
    try:
        fcntl.flock(manifest, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_replaced(store: DirectoryStore, folder: int) -> bool:
    """Tell whether the folder's name has been given to another one, or to none."""
    try:
        return not os.path.samestat(store.root.stat(), os.fstat(folder))
    except OSError:
        return True
