"""One checkpoint in an object store: its manifest, sidecars, headers and bytes, all checked.

``docs/reference/bucket-v1.md`` is normative. Reads only; knows nothing of catalogues, agents or
torch. Whatever is returned has been verified against the manifest, and no byte of a segment is
believed before its part was hashed (P3). Units: bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

from holdfast.core.shard import Shard
from holdfast.errors import (
    DigestMismatchError,
    InvalidRequestError,
    ManifestError,
    NotFoundError,
    TruncatedShardError,
    UnavailableError,
)
from holdfast.format.digest import PART_BYTES, part_digest
from holdfast.format.header import parse_header
from holdfast.format.keys import (
    MANIFEST,
    SEGMENT_SUFFIX,
    SIDECAR_SUFFIX,
    folder_place,
    shard_stem,
)
from holdfast.format.manifest import MANIFEST_BYTES_MAX, Manifest
from holdfast.format.manifest import decode as decode_manifest
from holdfast.format.segment import SegmentHeader, header_length
from holdfast.format.sidecar import SIDECAR_BYTES_MAX, Sidecar
from holdfast.format.sidecar import decode as decode_sidecar
from holdfast.objectstore import ObjectStore

HEADER_GUESS_BYTES = 64 << 10
READS_COUNT_MAX = 2
"""How often a part that does not match is read: what broke on the way is not corruption."""

Throttle = Callable[[int], None]
"""Called with the bytes about to be read; returns when they may be: a rate limit."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The objects under ``prefix`` (empty, or ends in ``/``), which are one checkpoint.

    The same class reads a folder in the bucket, a copy of it, and a one-shot checkpoint. Where
    the prefix says whose folder it is, the manifest must agree. Safe to use from several threads;
    the store stays the caller's.
    """

    store: ObjectStore
    prefix: str = ""

    def manifest(self) -> Manifest:
        """Return the manifest.

        Raises:
            NotFoundError: there is none: nothing here may be relied on.
            ManifestError: it breaks a rule of the format, or is of another folder.
            UnsupportedFormatError: a version that this code does not read.
        """
        key = self.prefix + MANIFEST
        try:
            data = self.store.get(key, length_bytes_max=MANIFEST_BYTES_MAX)
        except NotFoundError as error:
            if error.context.get("key") != key:
                raise  # not even its folder is there, and the error names that
            where = f"{self.prefix} of {self.store.url}" if self.prefix else self.store.url
            raise NotFoundError(
                f"no checkpoint folder is at {where}: it has no {MANIFEST}, so no save there has "
                f"ended; one ends in step-<n>.g<generation>, or is what holdfast.save, DCP or "
                f"DeepSpeed wrote",
                key=key,
            ) from error
        manifest = decode_manifest(data)
        place = folder_place(self.prefix)
        if place is not None and (place.job, place.checkpoint) != (
            manifest.job,
            manifest.checkpoint,
        ):
            found = manifest.checkpoint
            raise ManifestError(
                f"the manifest in {self.prefix} is of job {manifest.job}, run {found.run}, "
                f"step {found.step}, attempt {found.generation}"
            )
        return manifest

    def segment_key(self, shard: Shard) -> str:
        """Return the key of the shard's segment."""
        return f"{self.prefix}{shard_stem(shard.id, shard.world_size)}{SEGMENT_SUFFIX}"

    def sidecar_key(self, shard: Shard) -> str:
        """Return the key of the shard's sidecar."""
        return f"{self.prefix}{shard_stem(shard.id, shard.world_size)}{SIDECAR_SUFFIX}"

    def sidecar(self, shard: Shard) -> Sidecar:
        """Return the part digests of ``shard``, which give its root digest.

        Raises:
            NotFoundError: there is none.
            ManifestError: malformed, or of another shard than this.
        """
        key = self.sidecar_key(shard)
        sidecar = decode_sidecar(self.store.get(key, length_bytes_max=SIDECAR_BYTES_MAX))
        if sidecar.shard != shard:
            raise ManifestError(
                f"the sidecar {key} is not that of the shard in the manifest", shard=shard.id.key
            )
        return sidecar

    def header(self, shard: Shard) -> SegmentHeader:
        """Return the header of the shard's segment: its rules are checked, its digest is not.

        Raises:
            NotFoundError: there is no segment.
            TruncatedShardError: it ends before its header does.
            ManifestError: a rule of the format is broken, or it is another shard's segment.
        """
        header = parse_header(self.head(shard), shard.length_bytes)
        header.expect(shard)
        return header

    def head(self, shard: Shard) -> bytes:
        """Return the bytes of the shard's segment up to its first tensor; nothing is checked.

        Raises:
            NotFoundError: there is no segment.
            TruncatedShardError: it ends before its header does.
            ManifestError: its header would be longer than a header may be, or than the segment.
        """
        key = self.segment_key(shard)
        data = bytearray(min(HEADER_GUESS_BYTES, shard.length_bytes))
        self.store.read_into(key, 0, memoryview(data))
        wanted = header_length(bytes(data[:8]))
        if wanted > shard.length_bytes:
            raise ManifestError(f"header of {wanted} bytes in a segment of {shard.length_bytes}")
        if wanted > len(data):
            rest = bytearray(wanted - len(data))
            self.store.read_into(key, len(data), memoryview(rest))
            data += rest
        return bytes(data[:wanted])

    def fetch(
        self,
        shard: Shard,
        sidecar: Sidecar,
        view: memoryview,
        *,
        done: set[int],
        threads: int,
        stop: threading.Event,
        pace: Throttle | None = None,
    ) -> None:
        """Fill ``view`` with the segment: all its parts but those ``done``, each verified.

        Parts are read side by side, straight into place. ``done`` grows with each part that is
        there; after an error another source can give the rest.

        Raises:
            DigestMismatchError: a part does not match; names it.
            TruncatedShardError: the object ends too early.
            NotFoundError: there is no segment.
            UnavailableError: the store, after its own retries; or ``stop`` was set.
        """
        if len(view) != shard.length_bytes or sidecar.shard != shard:
            raise InvalidRequestError(f"{len(view)} bytes are not for the shard {shard.id.key}")

        def work(index: int) -> None:
            if stop.is_set():
                raise UnavailableError(f"reading {self.segment_key(shard)} was stopped")
            begin = index * PART_BYTES
            self.fetch_part(sidecar, index, view[begin : begin + PART_BYTES], pace)
            done.add(index)

        pending = [index for index in range(len(sidecar.digests)) if index not in done]
        if not pending:
            return
        with ThreadPoolExecutor(min(threads, len(pending)), "holdfast-bucket") as pool:
            try:
                futures = [pool.submit(work, index) for index in pending]
                ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                pool.shutdown(cancel_futures=True)
        for future in ended:
            future.result()

    def fetch_part(
        self, sidecar: Sidecar, index: int, view: memoryview, pace: Throttle | None = None
    ) -> None:
        """Fill ``view``, as long as the part, with part ``index`` of a segment, verified.

        Raises:
            See ``fetch``; after an error ``view`` holds anything.
        """
        shard = sidecar.shard
        key = self.segment_key(shard)
        found = b""
        for _ in range(READS_COUNT_MAX):
            if pace is not None:
                pace(len(view))
            self.store.read_into(key, index * PART_BYTES, view)
            found = part_digest(view)
            if found == sidecar.digests[index]:
                return
        raise DigestMismatchError(
            f"part {index} of {key} does not match (expected {sidecar.digests[index].hex()}, "
            f"got {found.hex()})",
            shard=shard.id.key,
            part=index,
        )

    def check_length(self, shard: Shard) -> None:
        """Do nothing if the segment is as long as the shard.

        Raises:
            NotFoundError: there is no segment.
            TruncatedShardError: it is shorter, or longer.
        """
        key = self.segment_key(shard)
        length_bytes = self.store.head(key).length_bytes
        if length_bytes != shard.length_bytes:
            raise TruncatedShardError(
                f"{key} has {length_bytes} bytes, not {shard.length_bytes}", shard=shard.id.key
            )
