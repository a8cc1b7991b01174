"""Real segments of several ranks in a store, without a service: what the worker would leave."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from holdfast.bucket.folder import CheckpointFolder
from holdfast.core.ids import CheckpointId, Generation, Rank, RunId, ShardId, Step
from holdfast.core.shard import Shard
from holdfast.format import keys, manifest, sidecar
from holdfast.format.boxes import Box, whole
from holdfast.format.digest import part_digests, root_digest
from holdfast.format.segment import SegmentIdentity, TensorSpec, blob_spec, header_template
from holdfast.reading.dtypes import TORCH

NAMES = {dtype: name for name, dtype in TORCH.items()}
PARENT = (3, 1)

Held = list[tuple[str, torch.Tensor, Box | None]]


def everything() -> dict[str, torch.Tensor]:
    """One tensor of every dtype, and shapes that are easily forgotten."""
    torch.manual_seed(7)
    found = {}
    for name, dtype in TORCH.items():
        data = torch.randint(0, 2 if name == "BOOL" else 100, (6 * 16,), dtype=torch.uint8)
        found[f"model.{name}"] = data[: 6 * dtype.itemsize].view(dtype).reshape(2, 3).clone()
    found["model.scalar"] = torch.tensor(2.5)
    found["model.empty"] = torch.empty(0, 4)
    found["optimizer.state.w.exp_avg"] = torch.randn(40, 10)
    return found


def put(
    store,
    ranks: Sequence[Mapping[int, Held]],
    *,
    job="team/gpt",
    step=12,
    generation=2,
    run="r1",
    parent=PARENT,
) -> CheckpointFolder:
    """Put one checkpoint; ``ranks[r][v]`` is what volume v of rank r holds."""
    checkpoint = CheckpointId(RunId(run), Step(step), Generation(generation))
    shards = []
    for rank, volumes in enumerate(ranks):
        for volume, held in volumes.items():
            shard_id = ShardId(run, step, generation, Rank(rank), volume)
            shards.append(_segment(store, job, shard_id, len(ranks), held, parent))
    made = manifest.Manifest(
        checkpoint=checkpoint,
        job=job,
        world_size=len(ranks),
        shards=tuple(shards),
        write_id="ab" * 16,
        created_at_s=1.5,
        parent=CheckpointId(RunId(run), Step(parent[0]), Generation(parent[1])),
        mesh={"dp": len(ranks)},
        notes={"loss": 0.25},
    )
    store.put(keys.manifest_key(job, checkpoint), manifest.encode(made))
    return CheckpointFolder(store, keys.folder(job, checkpoint))


def _segment(store, job, shard_id, world_size, held: Held, parent) -> Shard:
    specs = [
        TensorSpec(
            fqn=name,
            dtype=NAMES[tensor.dtype],
            shape=tuple(tensor.shape),
            box=box or whole(tensor.shape),
        )
        for name, tensor, box in held
    ]
    text = json.dumps({"static": {}, "live": {"rank": shard_id.rank}}).encode().ljust(4096)
    blobs = {}
    if shard_id.volume == 0:
        blob = blob_spec(f"holdfast.rank.{shard_id.rank}", len(text))
        specs.append(blob)
        blobs[blob.fqn] = text
    identity = SegmentIdentity(id=shard_id, job=job, world_size=world_size, plan_hash="p" * 32)
    template = header_template(identity, specs)
    data = bytearray(
        template.fill(step=shard_id.step, generation=shard_id.generation, parent=parent)
    )
    tensors = {name: (tensor, box or whole(tensor.shape)) for name, tensor, box in held}
    for entry in template.entries:
        name = entry.spec.fqn
        if name in blobs:
            data += blobs[name]
            continue
        tensor, box = tensors[name]
        piece = tensor[box.within(whole(tensor.shape))] if tensor.ndim else tensor
        data += piece.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    digests = tuple(part_digests(memoryview(data)))
    shard = Shard(
        id=shard_id,
        job=job,
        world_size=world_size,
        plan_hash=identity.plan_hash,
        length_bytes=len(data),
        root_digest=root_digest(len(data), digests),
    )
    key = keys.segment_key(job, shard_id, world_size)
    upload = store.begin(key, len(data), max(len(data), 5 << 20))
    store.finish(upload, [store.put_part(upload, 0, memoryview(data))])
    described = sidecar.encode(sidecar.Sidecar(shard=shard, digests=digests))
    store.put(keys.sidecar_key(job, shard_id, world_size), described)
    return shard


def two_ranks(tensors: Mapping[str, torch.Tensor]) -> list[dict[int, Held]]:
    """Spread tensors over two ranks as DDP does, and cut one of them into three boxes.

    The last tensor lies in a column on rank 0 and in two rows' worth of volumes on rank 1.
    """
    names = list(tensors)
    ranks: list[dict[int, Held]] = [{0: []}, {0: [], 1: []}]
    for at, name in enumerate(names[:-1]):
        ranks[at % 2][0].append((name, tensors[name], None))
    rows, columns = tensors[names[-1]].shape
    cut = columns // 3
    boxes = [
        (0, 0, Box((0, 0), (rows, cut))),
        (1, 0, Box((0, cut), (rows // 2, columns - cut))),
        (1, 1, Box((rows // 2, cut), (rows - rows // 2, columns - cut))),
    ]
    for rank, volume, box in boxes:
        ranks[rank][volume].append((names[-1], tensors[names[-1]], box))
    return ranks
