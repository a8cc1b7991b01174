"""Small checkpoints made without torch: segments, sidecars and manifest under one prefix."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from holdfast.bucket.folder import CheckpointFolder
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.shard import Shard
from holdfast.format import manifest as manifests
from holdfast.format import sidecar as sidecars
from holdfast.format.boxes import Box
from holdfast.format.digest import part_digests, root_digest
from holdfast.format.keys import folder
from holdfast.format.manifest import Manifest
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_template
from holdfast.format.sidecar import Sidecar

JOB = "team/gpt"
CHECKPOINT = CheckpointId("r7", 1200, 3)


def specs(rank: int, world_size: int, rows: int) -> list[TensorSpec]:
    """A tensor cut by rows over the ranks, and one of each rank's own."""
    return [
        TensorSpec(
            fqn="w", dtype="F32", shape=(rows * world_size, 4), box=Box((rows * rank, 0), (rows, 4))
        ),
        TensorSpec(fqn=f"own.{rank}", dtype="U8", shape=(6,), box=Box((0,), (6,))),
    ]


def segment(identity: SegmentIdentity, layout: list[TensorSpec]) -> bytes:
    template = header_template(identity, layout)
    data = template.fill(
        step=identity.id.step, generation=identity.id.generation, parent=identity.parent
    )
    body = template.length_bytes - len(data)
    pattern = bytes((identity.id.rank * 7 + i * 13) % 251 for i in range(251))
    return data + (pattern * (body // 251 + 1))[:body]


@dataclass
class Made:
    """What lies under ``prefix`` of ``store``; ``write`` puts it there."""

    store: object
    prefix: str
    manifest: Manifest
    segments: dict[Shard, bytes] = field(default_factory=dict)

    @property
    def folder(self) -> CheckpointFolder:
        return CheckpointFolder(self.store, self.prefix)

    def sidecar(self, shard: Shard) -> Sidecar:
        return Sidecar(shard=shard, digests=tuple(part_digests(memoryview(self.segments[shard]))))

    def write(self) -> Made:
        for shard, data in self.segments.items():
            self.store.put(self.folder.segment_key(shard), data)
            self.store.put(self.folder.sidecar_key(shard), sidecars.encode(self.sidecar(shard)))
        self.store.put(f"{self.prefix}manifest.json", manifests.encode(self.manifest))
        return self

    def damage(self, shard: Shard, at: int) -> None:
        """Flip one byte of the segment as it lies there."""
        data = bytearray(self.segments[shard])
        data[at] ^= 1
        self.store.put(self.folder.segment_key(shard), bytes(data))


def make(
    store: object,
    checkpoint: CheckpointId = CHECKPOINT,
    *,
    job: str = JOB,
    world_size: int = 2,
    rows: int = 2,
    parent: CheckpointId | None = None,
    prefix: str | None = None,
) -> Made:
    """Return a checkpoint that is not written yet."""
    segments: dict[Shard, bytes] = {}
    for rank in range(world_size):
        number = ShardId(checkpoint.run, checkpoint.step, checkpoint.generation, rank)
        identity = SegmentIdentity(
            id=number, job=job, world_size=world_size, plan_hash=f"{rank:032x}"
        )
        data = segment(identity, specs(rank, world_size, rows))
        shard = Shard(
            id=number,
            job=job,
            world_size=world_size,
            plan_hash=identity.plan_hash,
            length_bytes=len(data),
            root_digest=root_digest(len(data), part_digests(memoryview(data))),
        )
        segments[shard] = data
    manifest = Manifest(
        checkpoint=checkpoint,
        job=job,
        world_size=world_size,
        shards=tuple(segments),
        write_id="0123456789abcdef" * 2,
        created_at_s=1_700_000_000.5,
        parent=parent,
        mesh={"dp": world_size},
        notes={"loss": 0.25},
        software="holdfast 0.1.0",
    )
    prefix = folder(job, checkpoint) if prefix is None else prefix
    return Made(store, prefix, manifest, segments)


def later(made: Made, **changes: object) -> Manifest:
    """Return the manifest with other fields, whatever they are."""
    return replace(made.manifest, **changes)
