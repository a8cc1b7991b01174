"""The bytes of ranks: real segments, a few hundred bytes long, that say what they are of."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

from holdfast.core.ids import ShardId
from holdfast.core.needs import ByteRange
from holdfast.core.shard import Shard
from holdfast.format.boxes import whole
from holdfast.format.digest import part_digests, root_digest
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_template

JOB = "job"
_BODY = struct.Struct("<qqqq")
LENGTH = 544
PART_BYTES = 128
BODY = ByteRange(begin=LENGTH - _BODY.size, end=LENGTH)
"""What of a segment a rank loads; the header is before it."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a rank's bytes are of: after ``step`` of a line of training that began at step 0."""

    lineage: int
    step: int
    rank: int


@lru_cache(maxsize=4096)
def segment(key: ShardId, world_size: int, moment: Moment, parent: tuple[int, int] | None) -> bytes:
    """Return the segment of a rank."""
    specs = [TensorSpec(fqn="w", dtype="I64", shape=(4,), box=whole((4,)))]
    identity = SegmentIdentity(
        id=key, job=JOB, world_size=world_size, plan_hash=plan_hash(world_size), parent=parent
    )
    template = header_template(identity, specs)
    head = template.fill(step=key.step, generation=key.generation, parent=parent)
    return head + _BODY.pack(moment.lineage, moment.step, moment.rank, world_size)


def plan_hash(world_size: int) -> str:
    """Return the plan of a job of that many ranks."""
    return f"{world_size:032x}"


def moment_of(data: bytes) -> Moment:
    """Return what the bytes of a segment are of."""
    return Moment(*_BODY.unpack(data[-_BODY.size :])[:3])


@lru_cache(maxsize=8192)
def root(data: bytes) -> bytes:
    """Return the root digest of bytes."""
    return root_digest(len(data), part_digests(memoryview(data)))


def describe(key: ShardId, world_size: int, data: bytes) -> Shard:
    """Return what an agent says of a segment that it has hashed."""
    return Shard(
        id=key, job=JOB, world_size=world_size, plan_hash=plan_hash(world_size),
        length_bytes=len(data), root_digest=root(data),
    )  # fmt: skip


def flipped(data: bytes) -> bytes:
    """Return the bytes with one bit of the body turned."""
    return data[:-1] + bytes([data[-1] ^ 1])
