"""The object-store port: named bytes that outlive every node. ``open_store(url)`` chooses one.

Implementations: ``directory.DirectoryStore``, ``s3.S3Store``, ``memory.MemoryStore``. All pass
``tests/contract/test_object_store.py``. Blocking and safe to use from several threads; every
call has a deadline and retries what is safe to retry.

Keys are relative to the store's prefix: ``/``-separated parts, none empty, ``.`` or ``..``.
Units: bytes, seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from holdfast.errors import InvalidRequestError, UnavailableError

UPLOAD_PARTS_COUNT_MAX = 10_000
UPLOAD_PART_BYTES_MIN = 5 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object as a listing shows it; ``modified_s`` is the store's clock.

    ``head`` of some stores knows it in whole seconds only.
    """

    key: str
    length_bytes: int
    etag: str
    modified_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An upload in parts that was begun; it survives the process that began it.

    Every part but the last has ``part_bytes``; part numbers count from 0.
    """

    key: str
    id: str
    length_bytes: int
    part_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenUpload:
    """An upload that was begun and neither finished nor aborted, as a listing shows it."""

    key: str
    id: str
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedPart:
    """A part that the store has; ``etag`` is what ``finish`` must name."""

    number: int
    length_bytes: int
    etag: str


class ObjectStore(Protocol):
    """Named bytes. Every method says what a repeat does and what a failure leaves behind.

    Raises, from every method:
        UnavailableError: no answer, 5xx, throttled, or broken off, after bounded retries.
        AccessError: credentials are missing, wrong or expired, or do not allow it.
        NotFoundError: the bucket or the folder of the store itself is missing; names it.
        ExhaustedError: the store is full.
        InvalidRequestError: a key that is not one.
    """

    @property
    def url(self) -> str:
        """Where this is, without credentials: for people, and for ``open_store``."""
        ...

    @property
    def checks_parts(self) -> bool:
        """Whether the store refuses a part whose bytes do not match the checksum sent along.

        False: the writer reads samples back.
        """
        ...

    def check(self) -> None:
        """Do nothing if the store can be reached and its bucket is there, else raise."""
        ...

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        """Write a small object whole and return its etag; readers see all of it or none.

        Raises:
            AlreadyExistsError: ``if_absent`` and the key is taken; nothing has changed.
            OutcomeUnknownError: ``if_absent`` and the answer was lost: read back, never repeat.
        """
        ...

    def get(self, key: str, *, length_bytes_max: int) -> bytes:
        """Return a small object whole.

        Raises:
            NotFoundError: there is none.
            CorruptionError: it is longer than ``length_bytes_max``.
        """
        ...

    def read_into(self, key: str, begin: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``begin`` on.

        Raises:
            NotFoundError: there is no such object.
            TruncatedShardError: the object ends before the view is full.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Return what a listing would show of ``key``; NotFoundError if it is not there."""
        ...

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects whose key begins with ``prefix``, by key, those beyond ``after``.

        Read page by page: as many as there are, in bounded memory.
        """
        ...

    def folders(self, prefix: str = "") -> Iterator[str]:
        """Yield what comes next after ``prefix`` up to and with a ``/``: full prefixes, sorted."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is not there is no error."""
        ...

    def presign(self, key: str, valid_s: int) -> str:
        """Return a URL that anybody can read the object from for ``valid_s``.

        Raises:
            PreconditionError: this kind of store has no such links.
        """
        ...

    # -- uploads in parts: resumable by anybody who lists them ---------------------------------

    def begin(self, key: str, length_bytes: int, part_bytes: int) -> Upload:
        """Begin an upload; nothing is visible under ``key`` until ``finish``."""
        ...

    def open_uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        """Yield the uploads under ``prefix`` that were begun and not ended."""
        ...

    def resume(self, upload: OpenUpload, length_bytes: int, part_bytes: int) -> Upload:
        """Return an open upload to go on with; the caller knows length and part size.

        Raises:
            NotFoundError: it has ended; a store that does not keep count says so later.
            PreconditionError: it was begun otherwise; abort it and begin anew.
        """
        ...

    def parts(self, upload: Upload) -> Mapping[int, UploadedPart]:
        """Return the parts that the store has, by number; none of another length than the plan's.

        Raises:
            NotFoundError: the upload has ended, or was aborted.
        """
        ...

    def put_part(self, upload: Upload, number: int, data: memoryview) -> UploadedPart:
        """Write one part, straight from ``data``; a repeat replaces it.

        Raises:
            NotFoundError: the upload has ended, or was aborted.
        """
        ...

    def copy_part(self, upload: Upload, number: int, source: str, begin: int) -> UploadedPart:
        """Fill one part with bytes of another object from ``begin`` on, inside the store.

        Raises:
            NotFoundError: no such upload or source.
            PreconditionError: the store cannot; send the bytes instead.
        """
        ...

    def finish(self, upload: Upload, parts: Sequence[UploadedPart]) -> None:
        """Make the object appear, whole, made of ``parts`` in the order of their numbers.

        A repeat after success is success when the object has the upload's length.

        Raises:
            InvalidRequestError: ``parts`` are not all of them, in order.
            PreconditionError: the store has other parts than these.
            NotFoundError: the upload was aborted.
        """
        ...

    def abort(self, upload: OpenUpload | Upload) -> None:
        """Forget an upload and its parts; one that has ended is no error."""
        ...

    def close(self) -> None:
        """Give connections back."""
        ...


def open_store(url: str, *, make: bool = False) -> ObjectStore:
    """Return the store that ``url`` names.

    ``file:///absolute/folder`` or a path; ``s3://bucket[/prefix][?endpoint=...&region=...
    &addressing=path|virtual|auto&ca=/file.pem]``; ``memory:``. Credentials come from the usual
    chain (environment, profile, instance), never from the URL.

    Args:
        url: One of these.
        make: Make the folder of a ``file:`` store if it is missing; else every call on it raises
            ``NotFoundError``, so that a volume that is not mounted is seen. Never a bucket.

    Raises:
        InvalidRequestError: none of these; names the part that is wrong.
        UnavailableError: the client library is not installed; says which extra has it.
    """
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in ("file", "s3", "memory"):
        if "://" in url:
            raise InvalidRequestError(f"store {url!r}: file:, s3: or memory:, not {scheme}:")
        scheme, rest = "path", url
    match scheme:
        case "memory":
            return _memory(rest)
        case "s3":
            try:
                from holdfast.objectstore.s3 import S3Store  # noqa: PLC0415
            except ModuleNotFoundError as error:
                raise UnavailableError(
                    f"{error.name} is not installed: pip install holdfast[s3]"
                ) from error
            return S3Store.from_url(url)
        case _:
            from holdfast.objectstore.directory import DirectoryStore  # noqa: PLC0415

            return DirectoryStore(_folder(scheme, rest), make=make)


def _folder(scheme: str, rest: str) -> Path:
    if scheme == "path":
        return Path(rest).absolute()
    parts = urlsplit(f"file:{rest}")
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise InvalidRequestError(f"store file:{rest}: file:///absolute/folder and no more")
    if not path.startswith("/") or "\0" in path:
        raise InvalidRequestError(f"store file:{rest}: the folder must be absolute")
    return Path(path)


def _memory(rest: str) -> ObjectStore:
    from holdfast.objectstore.memory import MemoryStore  # noqa: PLC0415

    if rest:
        raise InvalidRequestError(f"store memory:{rest}: memory: has no name")
    return MemoryStore()
