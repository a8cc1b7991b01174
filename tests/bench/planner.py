"""What a rank plans before it loads on another mesh: which saved boxes fill its own.

No byte is read. Ours is what `restore` does: from heads of segments name the bytes that are needed
of each, then, of the segments that have them, choose what fills each target. The peer is DCP's own
planner against its own metadata, on boxes that are the same.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.bench.harness import Record, faster, in_turn
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from holdfast.core.ids import CheckpointId, Generation, Rank, RunId, ShardId, Step
from holdfast.core.needs import Head, Needs
from holdfast.format.boxes import Box
from holdfast.format.byte_ranges import needs
from holdfast.format.header import parse_header
from holdfast.format.index import Index, of_some
from holdfast.format.names import blob_name
from holdfast.format.segment import (
    SegmentHeader,
    SegmentIdentity,
    TensorEntry,
    TensorSpec,
    blob_spec,
    header_template,
)
from holdfast.garbage import no_collection
from holdfast.reading.pieces import Part, Pieces
from holdfast.state.boxes_here import LocalBoxes
from holdfast.state.survey import CapturedTensor, Home
from holdfast.training.restore_needs import of_boxes

NAMES = (
    "planner/load_plan_100k", "planner/one_tensor_10k", "planner/heads_128k", "planner/dcp",
    "planner/dcp_all_heads",
)  # fmt: skip
SAVED, NOW, RANK = 64, 128, 77
TENSORS_COUNT = 100_000
HEADS_TENSORS_COUNT = 2_000
READ_TENSORS_COUNT = 10_000
"""A tenth: what the peer's metadata says of 10^5 tensors takes it minutes to read here."""
BOXES_COUNT = 10_000
SHAPES = ((1024, 8), (256, 16), (128,), (8, 512), (384, 4, 4), (4, 128, 8))
"""Cut along the longest axis, as FSDP and tensor parallelism do; of each tensor the next one."""
PROPERTIES = TensorProperties(dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, the boxes of it that were saved, and those that are wanted now."""

    fqn: str
    shape: tuple[int, ...]
    saved: Sequence[Box]
    wanted: Sequence[Box]


class Target:
    """What DCP asks of an object of the state that is here in pieces."""

    def __init__(self, tensor: Tensor) -> None:
        self._size = torch.Size(tensor.shape)
        self._chunks = _chunks(tensor.wanted)

    def size(self) -> torch.Size:
        """Return the shape of the whole."""
        return self._size

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the times of a plan for many tensors, for one in many pieces, and of its heads."""
    part = 10 if quick else 1
    tensors = _model(TENSORS_COUNT // part)
    yield _plans(
        "planner/load_plan_100k",
        tensors,
        note=f"{len(tensors)} tensors saved by {SAVED} ranks, for one of {NOW}",
        times_min=2,
    )
    cut = _one_tensor(BOXES_COUNT // part)
    yield _plans(
        "planner/one_tensor_10k",
        [cut],
        note=f"one tensor, {len(cut.saved)} boxes saved, as many wanted, each in two of them",
        times_min=1,
    )
    yield _heads(_model(HEADS_TENSORS_COUNT // part))
    tensors = _model(READ_TENSORS_COUNT // part)
    yield _read_and_planned("planner/dcp", tensors, copies=1, times_min=2)
    few = _model(HEADS_TENSORS_COUNT // part)
    yield _read_and_planned("planner/dcp_all_heads", few, copies=2, times_min=0)


def _plans(name: str, tensors: Sequence[Tensor], *, note: str, times_min: float) -> Record:
    headers = _headers(tensors)
    index = of_some(headers)
    wanted = [(tensor.fqn, box) for tensor in tensors for box in tensor.wanted]
    metadata, state = _metadata(tensors), {tensor.fqn: Target(tensor) for tensor in tensors}
    assert _ours(headers, index, wanted) == _theirs(metadata, state)
    ours_s, peer_s = in_turn(
        lambda: _timed(lambda: _plan(headers, index, wanted)),
        lambda: _timed(lambda: create_default_local_load_plan(state, metadata)),
        runs=5,
        warm_up=1,
    )
    return faster(
        name, ours_s, peer_s, peer="DCP: create_default_local_load_plan", length_bytes=0,
        note=note, times_min=times_min,
    )  # fmt: skip


def _heads(tensors: Sequence[Tensor]) -> Record:
    """Return how long it takes to read what plans are made from; it grows with the boxes."""
    data = _head_texts(tensors)
    peer = pickle.dumps(_metadata(tensors))
    ours_s, peer_s = in_turn(
        lambda: _timed(lambda: of_some(parse_header(*head) for head in data)),
        lambda: _timed(lambda: pickle.loads(peer)),
        runs=5,
        warm_up=1,
    )
    return faster(
        "planner/heads_128k",
        ours_s,
        peer_s,
        peer="DCP: unpickling .metadata",
        length_bytes=sum(len(head) for head, _ in data),
        note=f"{len(data)} heads of {len(tensors)} tensors, {len(peer)} bytes of the peer",
        times_min=0,
    )


def _read_and_planned(
    name: str, tensors: Sequence[Tensor], copies: int, times_min: float
) -> Record:
    """Return how long a rank takes from the bytes of what was saved to its plan.

    ``copies``: how many ranks hold what this one does; of more than one anybody may have saved it.
    """
    heads, peer = _head_texts(tensors), pickle.dumps(_metadata(tensors))
    state = {tensor.fqn: Target(tensor) for tensor in tensors}
    boxes = _boxes_here(tensors, copies)
    asked: set[int] = set()

    def find(_: CheckpointId, ranks: Collection[int]) -> list[Head]:
        asked.update(ranks)
        return [Head(rank=rank, data=heads[rank][0], length_bytes=heads[rank][1]) for rank in ranks]

    @no_collection()  # as `Reader.read` has it
    def ours() -> tuple[Needs, list[list[Part]]]:
        needs, _ = of_boxes(
            Needs(checkpoint=_id(0).checkpoint), RANK % SAVED, boxes, None, find,
            saved=SAVED, world_size=NOW,
        )  # fmt: skip
        # The headers of what is named are read again, then from bytes that were verified.
        pieces = Pieces(parse_header(*heads[need.rank]) for need in needs.shards)
        return needs, [pieces.choose(held.fqn, held.box) for held in boxes.tensors.values()]

    needs, chosen = ours()
    read_from = {
        (part.entry.spec.fqn, needs.shards[part.number].rank, part.box.lengths)
        for parts in chosen
        for part in parts
    }
    assert read_from == _theirs(pickle.loads(peer), state)
    ours_s, peer_s = in_turn(
        lambda: _timed(ours),
        lambda: _timed(lambda: create_default_local_load_plan(state, pickle.loads(peer))),
        runs=5,
        warm_up=1,
    )
    return faster(
        name,
        ours_s,
        peer_s,
        peer="DCP: unpickling .metadata, create_default_local_load_plan",
        length_bytes=sum(len(heads[rank][0]) for rank in asked),
        note=f"{len(tensors)} tensors saved by {SAVED} ranks, for one of {NOW}: from the heads of "
        f"{len(asked)} segments, in memory, to the plan; the peer from {len(peer)} bytes",
        times_min=times_min,
    )


def _boxes_here(tensors: Sequence[Tensor], copies: int) -> LocalBoxes:
    """Return what a rank has of them, as FSDP2 tells it; it is not planned by its memory."""
    memory, holders = torch.empty(0), tuple(range(RANK, RANK + copies))
    return LocalBoxes(
        {
            tensor.fqn: CapturedTensor(
                tensor.fqn, memory, Home.HOLDERS, deferred=True, shape=tensor.shape,
                box=tensor.wanted[0], holders=holders, mesh=tuple(range(NOW)),
            )
            for tensor in tensors
        },
        aliases={},
    )  # fmt: skip


def _head_texts(tensors: Sequence[Tensor]) -> list[tuple[bytes, int]]:
    """Return the head of each rank's segment, and the segment's length."""
    templates = [
        header_template(header.identity, [*(entry.spec for entry in header.entries), _text(rank)])
        for rank, header in enumerate(_headers(tensors))
    ]
    return [(each.fill(step=1, generation=1, parent=None), each.length_bytes) for each in templates]


def _text(rank: int) -> TensorSpec:
    return blob_spec(blob_name(rank), 1 << 16)


@no_collection()  # as `Reader.read` has it
def _plan(
    headers: Sequence[SegmentHeader], index: Index, wanted: Sequence[tuple[str, Box]]
) -> Iterator[tuple[str, int, Box]]:
    """Return by tensor the rank and the box that it is read from; all of it is found at once."""
    named = needs(index, wanted)
    ranks = [need.rank for need in named]
    pieces = Pieces(headers[rank] for rank in ranks)
    chosen = [pieces.choose(fqn, box) for fqn, box in wanted]
    return (
        (part.entry.spec.fqn, ranks[part.number], part.box) for parts in chosen for part in parts
    )


def _ours(
    headers: Sequence[SegmentHeader], index: Index, wanted: Sequence[tuple[str, Box]]
) -> set[tuple[str, int, tuple[int, ...]]]:
    return {(fqn, rank, box.lengths) for fqn, rank, box in _plan(headers, index, wanted)}


def _theirs(metadata: Metadata, state: dict[str, Any]) -> set[tuple[str, int, tuple[int, ...]]]:
    items: list[ReadItem] = create_default_local_load_plan(state, metadata).items
    return {
        (item.storage_index.fqn, item.storage_index.index or 0, tuple(item.lengths))
        for item in items
    }


def _timed(work: Callable[[], object]) -> float:
    begin = time.process_time()
    kept = work()
    took_s = time.process_time() - begin
    del kept
    return took_s


def _model(count: int) -> list[Tensor]:
    cuts = [(shape, _cut(shape, SAVED), [_cut(shape, NOW)[RANK]]) for shape in SHAPES]
    return [
        Tensor(f"layers.{at // 10}.block.weight_{at % 10}", *cuts[at % len(cuts)])
        for at in range(count)
    ]


def _one_tensor(count: int) -> Tensor:
    """Return a tensor whose wanted boxes begin in the middle of the saved ones."""
    saved = [Box((2 * at,), (2,)) for at in range(count)]
    wanted = [Box((2 * at + 1,), (min(2, 2 * count - 2 * at - 1),)) for at in range(count)]
    return Tensor("w", (2 * count,), saved, wanted)


def _cut(shape: tuple[int, ...], count: int) -> list[Box]:
    axis = shape.index(max(shape))
    length = shape[axis] // count
    return [
        Box(
            tuple(at * length if dim == axis else 0 for dim in range(len(shape))),
            (*shape[:axis], length, *shape[axis + 1 :]),
        )
        for at in range(count)
    ]


def _headers(tensors: Sequence[Tensor]) -> list[SegmentHeader]:
    """Return what ``parse_header`` makes of the head of each rank, without making the text."""
    world_size = len(tensors[0].saved)
    return [_header(tensors, rank, world_size) for rank in range(world_size)]


def _header(tensors: Sequence[Tensor], rank: int, world_size: int) -> SegmentHeader:
    entries = []
    at = 64
    for tensor in tensors:
        spec = TensorSpec(fqn=tensor.fqn, dtype="F32", shape=tensor.shape, box=tensor.saved[rank])
        begin, at = at, at + spec.length_bytes
        entries.append(TensorEntry(spec=spec, begin=begin, end=at))
    identity = SegmentIdentity(
        id=_id(rank),
        job="job", world_size=world_size, plan_hash="p",
    )  # fmt: skip
    return SegmentHeader(identity=identity, entries=tuple(entries), data_begin=64, length_bytes=at)


def _id(rank: int) -> ShardId:
    return ShardId(RunId("r"), Step(1), Generation(1), Rank(rank))


def _metadata(tensors: Sequence[Tensor]) -> Metadata:
    return Metadata(
        {
            tensor.fqn: TensorStorageMetadata(
                PROPERTIES, torch.Size(tensor.shape), _chunks(tensor.saved)
            )
            for tensor in tensors
        }
    )


def _chunks(boxes: Sequence[Box]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.lengths)) for b in boxes]
