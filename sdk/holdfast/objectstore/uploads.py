"""Uploads in parts into a folder: one file of the full length, written into at each part's place.

``.uploads/<id>/`` holds, so that any process can go on and ``finish`` is a rename:

==========  ==========================================================================
``upload``  JSON: key, length and part size; written before anything else
``data``    the object to be
``journal`` a line each: ``- <number>`` begun, ``+ <number> <etag>`` written and on disk
==========  ==========================================================================

Whoever writes a part holds a shared lock on the journal, ``finish`` an exclusive one: no late
part is written into a finished object. Units: bytes, seconds.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from secrets import token_hex

from holdfast.errors import NotFoundError, PreconditionError, UnavailableError
from holdfast.objectstore import OpenUpload, Upload, UploadedPart
from holdfast.objectstore.direct import write_direct
from holdfast.objectstore.rules import (
    WORK_FOLDER,
    checked_key,
    checked_part,
    checked_parts,
    checked_plan,
    checked_prefix,
    part_length_bytes,
)
from holdfast.objectstore.tree import CREATE, READ, Tree, read_all, write_all

LOCK_S_MAX = 30.0
# What a killed ``put`` left behind is removed when it is older than this; a put takes seconds.
LEFT_BEHIND_S_MIN = 3600.0
PUT_SUFFIX = ".put"
DESCRIPTION_BYTES_MAX = 4096
JOURNAL_BYTES_MAX = 64 << 20

_POLL_S = 0.02
_ID = re.compile(r"[0-9a-f]{32}")
_CANNOT_COPY = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class _Opened:
    """Descriptors of one upload's folder, data and journal."""

    folder: int
    data: int
    journal: int


class DirectoryUploads:
    """The half of ``DirectoryStore`` that is about uploads in parts."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def begin(self, key: str, length_bytes: int, part_bytes: int) -> Upload:
        """See ``ObjectStore.begin``; takes the space, so that a full disk is known now."""
        checked_key(key)
        checked_plan(length_bytes, part_bytes)
        upload = Upload(key=key, id=token_hex(16), length_bytes=length_bytes, part_bytes=part_bytes)
        with self._tree.errors(key):
            try:
                self._make(upload)
            except OSError:
                self._remove(upload.id)
                raise
        return upload

    def _make(self, upload: Upload) -> None:
        said = {"key": upload.key, "length": upload.length_bytes, "part": upload.part_bytes}
        with self._tree.opened(_folder(upload.id), make=True) as at:
            for name in ("upload", "journal", "data"):
                fd = os.open(name, CREATE, 0o600, dir_fd=at)
                try:
                    if name == "data":
                        os.posix_fallocate(fd, 0, upload.length_bytes)
                    elif name == "upload":
                        write_all(fd, memoryview(json.dumps(said).encode()))
                    os.fsync(fd)
                finally:
                    os.close(fd)
            os.fsync(at)

    def open_uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        """See ``ObjectStore.open_uploads``; sweeps out what killed puts left behind."""
        checked_prefix(prefix)
        with self._tree.errors(""):
            names = self._tree.names(WORK_FOLDER)
        for name, is_folder in names:
            if not is_folder:
                self._sweep(name)
            elif _ID.fullmatch(name):
                try:
                    upload, started_s = self._described(name)
                except NotFoundError:  # ended meanwhile, or killed before it had begun
                    continue
                if upload.key.startswith(prefix):
                    yield OpenUpload(key=upload.key, id=name, started_s=started_s)

    def _sweep(self, name: str) -> None:
        with suppress(FileNotFoundError), self._tree.opened(WORK_FOLDER) as at:
            age_s = time.time() - os.stat(name, dir_fd=at, follow_symlinks=False).st_mtime
            if name.endswith(PUT_SUFFIX) and age_s > LEFT_BEHIND_S_MIN:
                os.unlink(name, dir_fd=at)

    def resume(self, upload: OpenUpload, length_bytes: int, part_bytes: int) -> Upload:
        """See ``ObjectStore.resume``."""
        begun, _ = self._described(upload.id)
        if (begun.length_bytes, begun.part_bytes) != (length_bytes, part_bytes):
            raise PreconditionError(
                f"begun with {begun.length_bytes} bytes in parts of {begun.part_bytes}, "
                f"not {length_bytes} in {part_bytes}",
                key=begun.key,
                upload=begun.id,
            )
        return begun

    def parts(self, upload: Upload) -> Mapping[int, UploadedPart]:
        """See ``ObjectStore.parts``."""
        with self._opened(upload) as files:
            return _journaled(files.journal, upload)

    def put_part(self, upload: Upload, number: int, data: memoryview) -> UploadedPart:
        """See ``ObjectStore.put_part``; it is on disk when this returns."""
        source = checked_part(upload, number, data)
        with self._written(upload, number) as (files, part):
            begin = number * upload.part_bytes
            done = write_direct(files.folder, "data", source, begin)
            write_all(files.data, source[done:], begin + done)
        return part

    def copy_part(self, upload: Upload, number: int, source: str, begin: int) -> UploadedPart:
        """See ``ObjectStore.copy_part``; shares the blocks where the file system can."""
        length_bytes = part_length_bytes(upload, number)
        with self._tree.file(checked_key(source)) as fd:
            if begin + length_bytes > os.fstat(fd).st_size:
                raise PreconditionError(f"{source!r} ends before {begin + length_bytes}")
            with self._written(upload, number) as (files, part):
                _copy(fd, begin, files.data, number * upload.part_bytes, length_bytes)
        return part

    @contextmanager
    def _written(self, upload: Upload, number: int) -> Iterator[tuple[_Opened, UploadedPart]]:
        """Note a part begun, let it be written, and note it written when it is on disk."""
        part = UploadedPart(
            number=number, length_bytes=part_length_bytes(upload, number), etag=token_hex(8)
        )
        with self._opened(upload) as files:
            _lock(files.journal, fcntl.LOCK_SH, upload)
            # Finished or aborted between opening and locking: the file may be an object by now.
            os.close(os.open("data", READ, dir_fd=files.folder))
            os.write(files.journal, f"- {number}\n".encode())
            yield files, part
            os.fdatasync(files.data)
            os.write(files.journal, f"+ {number} {part.etag}\n".encode())

    def finish(self, upload: Upload, parts: Sequence[UploadedPart]) -> None:
        """See ``ObjectStore.finish``."""
        try:
            with self._opened(upload) as files:
                _lock(files.journal, fcntl.LOCK_EX, upload)
                checked_parts(upload, list(parts))
                if list(_journaled(files.journal, upload).values()) != list(parts):
                    raise PreconditionError("other parts than those named", key=upload.key)
                os.fsync(files.data)
                self._tree.place(files.folder, "data", upload.key)
        except NotFoundError:
            self._expect_finished(upload)
        self._remove(upload.id)

    def _expect_finished(self, upload: Upload) -> None:
        with self._tree.file(upload.key) as fd:
            length_bytes = os.fstat(fd).st_size
        if length_bytes != upload.length_bytes:
            raise NotFoundError("no such upload: it has ended", key=upload.key, upload=upload.id)

    def abort(self, upload: OpenUpload | Upload) -> None:
        """See ``ObjectStore.abort``."""
        if _ID.fullmatch(upload.id):
            with self._tree.errors(upload.key):
                self._remove(upload.id)

    def _remove(self, upload_id: str) -> None:
        """Remove an upload's folder, its description last: until then it is listed."""
        try:
            with self._tree.opened(_folder(upload_id)) as at:
                for name in ("data", "journal", "upload"):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=at)
        except FileNotFoundError:
            return
        self._tree.prune(_folder(upload_id))

    def _described(self, upload_id: str) -> tuple[Upload, float]:
        """Return an upload as it was begun, and when."""
        try:
            with self._tree.file(f"{_folder(upload_id)}/upload") as fd:
                text = os.pread(fd, DESCRIPTION_BYTES_MAX, 0)
                started_s = os.fstat(fd).st_mtime
            said = json.loads(text)
            key, length_bytes, part_bytes = said["key"], int(said["length"]), int(said["part"])
            checked_key(key)
            checked_plan(length_bytes, part_bytes)
        except (ValueError, KeyError, TypeError) as error:
            raise NotFoundError(f"no such upload: {upload_id}", upload=upload_id) from error
        return (
            Upload(key=key, id=upload_id, length_bytes=length_bytes, part_bytes=part_bytes),
            started_s,
        )

    @contextmanager
    def _opened(self, upload: Upload) -> Iterator[_Opened]:
        """Yield the files of an upload.

        Raises:
            NotFoundError: it has ended, or was begun otherwise.
        """
        with self._tree.errors(upload.key), ExitStack() as stack:
            try:
                at = stack.enter_context(self._tree.opened(_folder(upload.id)))
                files = []
                for name, flags in (("data", 0), ("journal", os.O_APPEND)):
                    files.append(os.open(name, _WRITE | flags, dir_fd=at))
                    stack.callback(os.close, files[-1])
                yield _Opened(at, *files)
            except FileNotFoundError as error:
                raise NotFoundError(
                    "no such upload: it has ended", key=upload.key, upload=upload.id
                ) from error


def _folder(upload_id: str) -> str:
    if not _ID.fullmatch(upload_id):
        raise NotFoundError(f"no such upload: {upload_id[:40]!r}")
    return f"{WORK_FOLDER}/{upload_id}"


def _lock(journal: int, kind: int, upload: Upload) -> None:
    """Lock until the descriptor is closed; the kernel unlocks when a process is killed."""
    deadline_s = time.monotonic() + LOCK_S_MAX
    while True:
        with suppress(BlockingIOError):
            return fcntl.flock(journal, kind | fcntl.LOCK_NB)
        if time.monotonic() > deadline_s:
            raise UnavailableError(
                "another process is writing this upload; try again",
                key=upload.key,
                upload=upload.id,
            )
        time.sleep(_POLL_S)


def _journaled(journal: int, upload: Upload) -> dict[int, UploadedPart]:
    """Return the parts that are written, by number; what a kill tore off is not."""
    text = bytearray(min(os.fstat(journal).st_size, JOURNAL_BYTES_MAX))
    del text[read_all(journal, memoryview(text), 0) :]
    found: dict[int, UploadedPart] = {}
    for line in text.decode("ascii", "replace").split("\n")[:-1]:
        match line.split(" "):
            case ["-", number]:
                found.pop(int(number), None)
            case ["+", number, etag]:
                found[int(number)] = UploadedPart(
                    number=int(number),
                    length_bytes=part_length_bytes(upload, int(number)),
                    etag=etag,
                )
    return dict(sorted(found.items()))


def _copy(source: int, begin: int, target: int, at: int, length_bytes: int) -> None:
    """Copy inside the system.

    Raises:
        PreconditionError: it cannot, between these two.
    """
    done = 0
    while done < length_bytes:
        try:
            count = os.copy_file_range(source, target, length_bytes - done, begin + done, at + done)
        except OSError as error:
            if error.errno in _CANNOT_COPY:
                raise PreconditionError(f"the file system cannot copy: {error}") from error
            raise
        if count == 0:
            raise PreconditionError("the source has become shorter")
        done += count
