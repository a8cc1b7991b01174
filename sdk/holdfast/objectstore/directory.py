"""A folder as an object store: objects are files, and appear whole or not at all.

Knows nothing of checkpoints; ``uploads`` has the half that is about uploads in parts.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from secrets import token_hex

from holdfast.errors import (
    CorruptionError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    TruncatedShardError,
)
from holdfast.objectstore import ObjectInfo
from holdfast.objectstore.rules import WORK_FOLDER, checked_key, checked_prefix
from holdfast.objectstore.tree import CREATE, Tree, again, read_all, write_all
from holdfast.objectstore.uploads import PUT_SUFFIX, DirectoryUploads

DELETE_KEYS_MAX = 1000
_NO_PLACE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EEXIST})


class DirectoryStore(DirectoryUploads):
    """An ``ObjectStore`` in a folder that several processes of one user may share.

    A key cannot be an object and a folder at once: ``PreconditionError``.
    """

    def __init__(self, root: Path, *, make: bool = False) -> None:
        """Take ``root``, an absolute path; with ``make`` it is made, 0700, if it is missing."""
        super().__init__(Tree(root))
        if make:
            with self._tree.errors(""):
                _make(root)

    @property
    def root(self) -> Path:
        """The folder, by name."""
        return self._tree.root

    @property
    def url(self) -> str:
        """The ``file:`` URL of the folder."""
        return self._tree.root.as_uri()

    @property
    def checks_parts(self) -> bool:
        """False: no checksum is sent along."""
        return False

    def hold(self) -> int:
        """Keep to the folder that has the name now, whatever takes its place, until ``close``.

        Returns its descriptor, which stays the store's.

        Raises:
            NotFoundError: there is no folder.
        """
        with self._tree.errors(""):
            return self._tree.hold()

    def check(self) -> None:
        """See ``ObjectStore.check``: the folder is there and can be written in."""
        with self._tree.errors(""), self._tree.opened() as at:
            if not os.access(f"/proc/self/fd/{at}", os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "cannot write")

    # -- whole objects -------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        """See ``ObjectStore.put``; it is on disk when this returns."""
        checked_key(key)
        with self._tree.errors(key):
            return again(lambda: self._put(key, data, if_absent=if_absent))

    def _put(self, key: str, data: bytes, *, if_absent: bool) -> str:
        temporary = f"{token_hex(16)}{PUT_SUFFIX}"
        with self._tree.opened(WORK_FOLDER, make=True) as work:
            fd = os.open(temporary, CREATE, 0o600, dir_fd=work)
            try:
                write_all(fd, memoryview(data))
                os.fsync(fd)
                self._tree.place(work, temporary, key, if_absent=if_absent)
                return _etag(os.fstat(fd))
            finally:
                os.close(fd)
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=work)

    def get(self, key: str, *, length_bytes_max: int) -> bytes:
        """See ``ObjectStore.get``."""
        with self._tree.file(checked_key(key)) as fd:
            length_bytes = os.fstat(fd).st_size
            if length_bytes > length_bytes_max:
                raise CorruptionError(
                    f"object of {length_bytes} bytes, {length_bytes_max} at most", key=key
                )
            data = bytearray(length_bytes)
            return bytes(data[: read_all(fd, memoryview(data), 0)])

    def read_into(self, key: str, begin: int, view: memoryview) -> None:
        """See ``ObjectStore.read_into``."""
        target = view.cast("B")
        with self._tree.file(checked_key(key)) as fd:
            count = read_all(fd, target, begin)
            if count < target.nbytes:
                raise TruncatedShardError(
                    f"object ends at {begin + count}, wanted {begin} to {begin + target.nbytes}",
                    key=key,
                )

    def head(self, key: str) -> ObjectInfo:
        """See ``ObjectStore.head``."""
        with self._tree.file(checked_key(key)) as fd:
            return _info(key, os.fstat(fd))

    # -- listings ------------------------------------------------------------------------------

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """See ``ObjectStore.list``; holds the names of one folder of each depth."""
        checked_prefix(prefix)
        return self._walk(prefix.rpartition("/")[0], prefix, after)

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        for key, is_folder in self._keys(folder, prefix):
            if is_folder:
                if f"{key}/" > after or after.startswith(f"{key}/"):
                    yield from self._walk(key, prefix, after)
            elif key > after:
                with suppress(NotFoundError):  # deleted meanwhile
                    yield self.head(key)

    def _keys(self, folder: str, prefix: str) -> Iterator[tuple[str, bool]]:
        above = f"{folder}/" if folder else ""
        with self._tree.errors(folder):
            names = self._tree.names(folder)
        for name, is_folder in names:
            key = f"{above}{name}"
            shown = f"{key}/" if is_folder else key
            if key != WORK_FOLDER and shown.startswith(prefix):
                yield key, is_folder

    def folders(self, prefix: str = "") -> Iterator[str]:
        """See ``ObjectStore.folders``; an empty folder is left out."""
        checked_prefix(prefix)
        for key, is_folder in self._keys(prefix.rpartition("/")[0], prefix):
            if is_folder and next(self._walk(key, "", ""), None):
                yield f"{key}/"

    def delete(self, keys: Iterable[str]) -> None:
        """See ``ObjectStore.delete``; folders that become empty go too."""
        rest = iter(keys)
        while some := [checked_key(key) for key in islice(rest, DELETE_KEYS_MAX)]:
            for folder in dict.fromkeys(key.rpartition("/")[0] for key in some):
                self._delete(folder, [key for key in some if key.rpartition("/")[0] == folder])

    def _delete(self, folder: str, keys: Sequence[str]) -> None:
        with self._tree.errors(folder):
            try:
                with self._tree.opened(folder) as at:
                    for key in keys:
                        with suppress(FileNotFoundError, IsADirectoryError):
                            os.unlink(key.rpartition("/")[2], dir_fd=at)
                    os.fsync(at)
            except (FileNotFoundError, NotADirectoryError):
                return
        self._tree.prune(folder)

    def presign(self, key: str, valid_s: int) -> str:
        """Refuse: a folder has no links that expire."""
        raise PreconditionError(
            f"a folder has no links, only a bucket has: read the files in {self._tree.root}",
            key=key,
            valid_s=valid_s,
        )

    def close(self) -> None:
        """Remove the folder for unfinished writes if it is empty."""
        self._tree.prune(WORK_FOLDER)
        self._tree.let_go()


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(
        key=key, length_bytes=found.st_size, etag=_etag(found), modified_s=found.st_mtime
    )


def _etag(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _make(root: Path) -> None:
    """Make the folder of a store.

    Raises:
        InvalidRequestError: there can be no folder at that path.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in _NO_PLACE:
            raise
        at = next((path for path in (root, *root.parents) if os.path.lexists(path)), root)
        kind = "" if at.is_dir() else f", and {at} is no folder"
        raise InvalidRequestError(
            f"the folder {root} cannot be made: {error.strerror}{kind}: choose another path"
        ) from error
