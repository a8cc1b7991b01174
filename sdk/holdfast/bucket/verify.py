"""Reads a checkpoint back and hashes it, loading nothing (G20).

Memory is bounded by one part, whatever the size of a shard. Only what is known of the bytes is a
verdict: a store that cannot be reached is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from holdfast.bucket.folder import CheckpointFolder, Throttle
from holdfast.core.shard import Shard
from holdfast.errors import (
    CorruptionError,
    DigestMismatchError,
    NotFoundError,
    UnsupportedFormatError,
)
from holdfast.format.digest import PART_BYTES, part_ranges
from holdfast.format.keys import SEGMENT_SUFFIX
from holdfast.format.manifest import Manifest
from holdfast.format.sidecar import Sidecar

BAD_PARTS_COUNT_MAX = 64

Progress = Callable[[int], None]
"""Called with the bytes that were read since the last call."""


class ShardState(Enum):
    """What reading a shard back has shown."""

    OK = "ok"
    MISSING = "missing"
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardVerdict:
    """What was found of one shard; ``bad_parts`` are the first that do not match."""

    shard: Shard
    state: ShardState
    detail: str = ""
    bad_parts: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every byte of the shard is what was sealed."""
        return self.state is ShardState.OK


def verify(
    folder: CheckpointFolder,
    manifest: Manifest,
    *,
    pace: Throttle | None = None,
    progress: Progress | None = None,
) -> Iterator[ShardVerdict]:
    """Yield a verdict on every shard of ``manifest``, in its order, as each is read.

    Raises:
        UnavailableError, AccessError: the store; the verdicts given so far stand.
    """
    buffer = memoryview(bytearray(min(PART_BYTES, max(s.length_bytes for s in manifest.shards))))
    for shard in manifest.shards:
        yield _verify_shard(folder, shard, buffer, pace, progress)


def strangers(folder: CheckpointFolder, manifest: Manifest) -> tuple[str, ...]:
    """Return segments in the folder that the manifest does not name, by key.

    A reader without Holdfast lists the folder and believes it: there should be none (P7).
    """
    known = {folder.segment_key(shard) for shard in manifest.shards}
    keys = (entry.key for entry in folder.store.list(folder.prefix))
    return tuple(key for key in keys if key.endswith(SEGMENT_SUFFIX) and key not in known)


def _verify_shard(
    folder: CheckpointFolder,
    shard: Shard,
    buffer: memoryview,
    pace: Throttle | None,
    progress: Progress | None,
) -> ShardVerdict:
    try:
        sidecar = folder.sidecar(shard)
        folder.check_length(shard)
        bad = _bad_parts(folder, sidecar, buffer, pace, progress)
        if bad:
            return ShardVerdict(
                shard=shard,
                state=ShardState.MISMATCH,
                detail=f"part {bad[0][0]}: {bad[0][1]}",
                bad_parts=tuple(index for index, _ in bad),
            )
        folder.header(shard)
    except NotFoundError as error:
        return ShardVerdict(shard=shard, state=ShardState.MISSING, detail=str(error))
    except (CorruptionError, UnsupportedFormatError) as error:
        return ShardVerdict(shard=shard, state=ShardState.MISMATCH, detail=str(error))
    return ShardVerdict(shard=shard, state=ShardState.OK)


def _bad_parts(
    folder: CheckpointFolder,
    sidecar: Sidecar,
    buffer: memoryview,
    pace: Throttle | None,
    progress: Progress | None,
) -> list[tuple[int, str]]:
    bad: list[tuple[int, str]] = []
    for index, (begin, end) in enumerate(part_ranges(sidecar.shard.length_bytes)):
        try:
            folder.fetch_part(sidecar, index, buffer[: end - begin], pace)
        except DigestMismatchError as error:
            bad.append((index, error.message))
        if progress is not None:
            progress(end - begin)
        if len(bad) == BAD_PARTS_COUNT_MAX:
            break
    return bad
