"""An object store in this process's memory: for tests and trials, with every promise kept.

Owns its objects; ``open_store("memory:")`` returns an empty one each time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import md5
from secrets import token_hex

from holdfast.errors import (
    AlreadyExistsError,
    CorruptionError,
    NotFoundError,
    PreconditionError,
    TruncatedShardError,
)
from holdfast.objectstore import ObjectInfo, OpenUpload, Upload, UploadedPart
from holdfast.objectstore.rules import (
    checked_key,
    checked_part,
    checked_parts,
    checked_plan,
    checked_prefix,
    fits,
    part_length_bytes,
)


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    info: ObjectInfo


@dataclass(slots=True)
class _Upload:
    listed: OpenUpload
    parts: dict[int, tuple[bytes, UploadedPart]] = field(default_factory=dict)


class MemoryStore:
    """An ``ObjectStore`` that ends with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._uploads: dict[str, _Upload] = {}

    @property
    def url(self) -> str:
        """``memory:``: another process finds nothing there."""
        return "memory:"

    @property
    def checks_parts(self) -> bool:
        """False: no checksum is sent along."""
        return False

    def check(self) -> None:
        """Do nothing: memory is always there."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        """See ``ObjectStore.put``."""
        made = _object(checked_key(key), bytes(data))
        with self._lock:
            if if_absent and key in self._objects:
                raise AlreadyExistsError(f"there is an object {key!r} already", key=key)
            self._objects[key] = made
        return made.info.etag

    def get(self, key: str, *, length_bytes_max: int) -> bytes:
        """See ``ObjectStore.get``."""
        data = self._object(key).data
        if len(data) > length_bytes_max:
            raise CorruptionError(
                f"object of {len(data)} bytes, {length_bytes_max} at most", key=key
            )
        return data

    def read_into(self, key: str, begin: int, view: memoryview) -> None:
        """See ``ObjectStore.read_into``."""
        data, target = self._object(key).data, view.cast("B")
        if begin + target.nbytes > len(data):
            raise TruncatedShardError(
                f"object of {len(data)} bytes, wanted {begin} to {begin + target.nbytes}", key=key
            )
        target[:] = data[begin : begin + target.nbytes]

    def head(self, key: str) -> ObjectInfo:
        """See ``ObjectStore.head``."""
        return self._object(key).info

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """See ``ObjectStore.list``; shows what was there when it was called."""
        checked_prefix(prefix)
        with self._lock:
            found = [
                made.info
                for key, made in self._objects.items()
                if key.startswith(prefix) and key > after
            ]
        return iter(sorted(found, key=lambda info: info.key))

    def folders(self, prefix: str = "") -> Iterator[str]:
        """See ``ObjectStore.folders``."""
        rests = (info.key[len(prefix) :] for info in self.list(prefix))
        return iter(sorted({f"{prefix}{r[: r.index('/') + 1]}" for r in rests if "/" in r}))

    def delete(self, keys: Iterable[str]) -> None:
        """See ``ObjectStore.delete``."""
        for key in keys:
            checked_key(key)
            with self._lock:
                self._objects.pop(key, None)

    def presign(self, key: str, valid_s: int) -> str:
        """Refuse, because no other process can read this memory."""
        raise PreconditionError("a store in memory has no links", key=key, valid_s=valid_s)

    def begin(self, key: str, length_bytes: int, part_bytes: int) -> Upload:
        """See ``ObjectStore.begin``."""
        checked_key(key)
        checked_plan(length_bytes, part_bytes)
        listed = OpenUpload(key=key, id=token_hex(16), started_s=time.time())
        with self._lock:
            self._uploads[listed.id] = _Upload(listed)
        return self.resume(listed, length_bytes, part_bytes)

    def open_uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        """See ``ObjectStore.open_uploads``."""
        checked_prefix(prefix)
        with self._lock:
            found = [upload.listed for upload in self._uploads.values()]
        return iter([listed for listed in found if listed.key.startswith(prefix)])

    def resume(self, upload: OpenUpload, length_bytes: int, part_bytes: int) -> Upload:
        """See ``ObjectStore.resume``."""
        checked_plan(length_bytes, part_bytes)
        return Upload(
            key=upload.key, id=upload.id, length_bytes=length_bytes, part_bytes=part_bytes
        )

    def parts(self, upload: Upload) -> Mapping[int, UploadedPart]:
        """See ``ObjectStore.parts``."""
        with self._lock:
            held = [part for _, part in self._upload(upload).parts.values()]
        return {part.number: part for part in held if fits(upload, part)}

    def put_part(self, upload: Upload, number: int, data: memoryview) -> UploadedPart:
        """See ``ObjectStore.put_part``."""
        content = bytes(checked_part(upload, number, data))
        part = UploadedPart(number=number, length_bytes=len(content), etag=_etag(content))
        with self._lock:
            self._upload(upload).parts[number] = (content, part)
        return part

    def copy_part(self, upload: Upload, number: int, source: str, begin: int) -> UploadedPart:
        """See ``ObjectStore.copy_part``."""
        data = self._object(source).data
        length_bytes = part_length_bytes(upload, number)
        if begin + length_bytes > len(data):
            raise PreconditionError(f"source has {len(data)} bytes, too few", key=source)
        return self.put_part(upload, number, memoryview(data)[begin : begin + length_bytes])

    def finish(self, upload: Upload, parts: Sequence[UploadedPart]) -> None:
        """See ``ObjectStore.finish``."""
        named = list(parts)
        with self._lock:
            if upload.id not in self._uploads and self._is_finished(upload):
                return
            held = self._upload(upload).parts
            checked_parts(upload, named)
            if [held[number][1] for number in sorted(held)] != named:
                raise PreconditionError("the parts are not those that were named", key=upload.key)
            data = b"".join(held[part.number][0] for part in named)
            self._objects[upload.key] = _object(upload.key, data)
            del self._uploads[upload.id]

    def abort(self, upload: OpenUpload | Upload) -> None:
        """See ``ObjectStore.abort``."""
        with self._lock:
            self._uploads.pop(upload.id, None)

    def close(self) -> None:
        """Do nothing: nothing is held open."""

    def _object(self, key: str) -> _Object:
        with self._lock:
            found = self._objects.get(checked_key(key))
        if found is None:
            raise NotFoundError(f"no object {key!r}", key=key)
        return found

    def _upload(self, upload: Upload) -> _Upload:
        found = self._uploads.get(upload.id)
        if found is None or found.listed.key != upload.key:
            raise NotFoundError("no such upload: it has ended", key=upload.key, upload=upload.id)
        return found

    def _is_finished(self, upload: Upload) -> bool:
        made = self._objects.get(upload.key)
        return made is not None and made.info.length_bytes == upload.length_bytes


def _object(key: str, data: bytes) -> _Object:
    info = ObjectInfo(key=key, length_bytes=len(data), etag=_etag(data), modified_s=time.time())
    return _Object(data, info)


def _etag(data: bytes) -> str:
    return md5(data, usedforsecurity=False).hexdigest()
