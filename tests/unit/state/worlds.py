"""Ranks of a pretended world: captures in one process, segments in a folder, no agent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.publish import publish as publish_manifest
from holdfast.bucket.publish import put_sidecar
from holdfast.bucket.writing import SegmentStream
from holdfast.copying.cuda import CUDA
from holdfast.copying.port import Devices
from holdfast.core.session import SlotLease
from holdfast.core.shard import Shard
from holdfast.format import keys
from holdfast.format.digest import root_digest
from holdfast.format.header import parse_header
from holdfast.format.manifest import Manifest
from holdfast.format.segment import header_length
from holdfast.format.sidecar import Sidecar
from holdfast.objectstore import ObjectStore
from holdfast.reading.files import open_files
from holdfast.reading.reader import Reader
from holdfast.snapshot.buffer import SlotBuffer
from holdfast.snapshot.engine import CopyEngine, Snapshot
from holdfast.snapshot.plan import SavePlan, make_plan
from holdfast.state.capture import Capture

WAIT_S = 30.0


@contextmanager
def becoming() -> Iterator[Callable[..., None]]:
    """Yield what makes this process one rank of several; nobody else is there."""

    def become(rank: int, world_size: int = 4) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    try:
        yield become
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def make_slot(folder: Path, slot: str, length_bytes: int, incarnation: int = 1) -> SlotLease:
    (folder / f"{slot}.{incarnation}.open").write_bytes(b"\xaa" * length_bytes)
    return SlotLease(slot=slot, incarnation=incarnation, length_bytes=length_bytes, plan_hash="")


def plan_of(capture: Capture, devices: Devices = CUDA) -> SavePlan:
    return make_plan(
        capture,
        job="job",
        run="r1",
        generation=1,
        rank=capture.rank,
        world_size=capture.world_size,
        devices=devices,
    )


class Saver:
    """One rank's engine; ``ended`` is set when a snapshot was handed back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended = threading.Event()
        self.engine = CopyEngine(self._done)

    def _done(self, snapshot: Snapshot) -> None:
        if snapshot.copied:
            snapshot.buffer.close_slot()
        self.ended.set()

    def save(self, capture: Capture, *, step: int = 1, defer: bool = True) -> tuple[Path, Shard]:
        plan = plan_of(capture)
        assert plan.is_current()
        slot = f"s{capture.rank}"
        for old in self.folder.glob(f"{slot}.*"):
            old.unlink()
        buffer = SlotBuffer.open(self.folder, make_slot(self.folder, slot, plan.length_bytes))
        self.ended.clear()
        snapshot = self.engine.begin(plan, buffer, step=step, generation=1, defer=defer)
        assert self.ended.wait(WAIT_S)
        assert snapshot.copied, snapshot.reason
        path = self.folder / f"{slot}.1.closed"
        buffer.drop()
        return path, shard_of(path)


def shard_of(path: Path) -> Shard:
    data = path.read_bytes()
    header = parse_header(data[: header_length(data)], len(data))
    return Shard(
        id=header.identity.id,
        job=header.identity.job,
        world_size=header.identity.world_size,
        plan_hash=header.identity.plan_hash,
        length_bytes=len(data),
        root_digest=b"",
    )


def save_all(folder: Path, captures: list[Capture], *, step: int = 1) -> Reader:
    saver = Saver(folder)
    files = [saver.save(capture, step=step) for capture in captures]
    assert saver.engine.close(WAIT_S)
    return open_files(files)


def publish(store: ObjectStore, located: Sequence[tuple[Path, Shard]]) -> CheckpointFolder:
    """Return the folder of a checkpoint whose segments are these files."""
    first = located[0][1]
    checkpoint = first.id.checkpoint
    folder = CheckpointFolder(store, keys.folder(first.job, checkpoint))
    shards = []
    for path, shard in located:
        with SegmentStream(store, folder.segment_key(shard), shard.length_bytes) as stream:
            stream.write(path.read_bytes())
            digests = stream.finish()
        proven = replace(shard, root_digest=root_digest(shard.length_bytes, digests))
        put_sidecar(folder, Sidecar(shard=proven, digests=digests))
        shards.append(proven)
    made = Manifest(
        checkpoint=checkpoint,
        job=first.job,
        world_size=first.world_size,
        shards=tuple(shards),
        write_id="ab" * 16,
        created_at_s=1.5,
    )
    publish_manifest(folder, made, headers=None)
    return folder


def there_and_back(folder: Path, saved: dict, target: dict) -> None:
    """Save one mapping as a world of one, load it into another."""
    with save_all(folder, [Capture(saved, rank=0, world_size=1)]) as segments:
        Capture(target, rank=0, world_size=1).load(segments, step=1)
