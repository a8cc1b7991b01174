"""Which shards, and which bytes of them, hold the boxes that a rank wants. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from holdfast.core.needs import ByteRange, ShardNeed
from holdfast.errors import NotReadyError
from holdfast.format.boxes import Box
from holdfast.format.digest import PART_BYTES
from holdfast.format.flat_ranges import boxes_of
from holdfast.format.index import Index, IndexedBox, IndexedTensor
from holdfast.format.segment import ITEM_BYTES
from holdfast.garbage import no_collection


@no_collection()
def needs(index: Index, wanted: Iterable[tuple[str, Box]]) -> tuple[ShardNeed, ...]:
    """Return what a rank must have of a checkpoint to read these regions, by rank and volume.

    Of each shard named the header is among the ranges: whoever reads a tensor looks it up there,
    also one of which it wants nothing.
    Of a box that is wanted in part, the bytes from its first wanted element to its last are: for
    a tensor cut along its first dim nothing else lies between. Of several shards that hold it the
    first is read that has all of it, or else each that has something which none before has.

    Args:
        index: The index of the checkpoint's plan.
        wanted: Tensors by name and the region of each; see ``flat_ranges``.

    Raises:
        NotReadyError: no shard holds some of it; names the tensor and the first missing box.
    """
    tensors = {tensor.fqn: tensor for tensor in index.tensors}
    spans: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    empty: list[IndexedTensor] = []
    for fqn, region in wanted:
        tensor = tensors.get(fqn)
        for item_bytes, held, (first, last) in _sources(tensor, fqn, region):
            spans[held.rank, held.volume].append(
                (held.begin + first * item_bytes, held.begin + last * item_bytes)
            )
        if tensor and not region.elements_count:
            empty.append(tensor)
    for tensor in empty:
        places = [(held.rank, held.volume) for held in tensor.boxes]
        if spans.keys().isdisjoint(places):
            spans[min(places)] = []
    heads = {(s.rank, s.volume): (0, s.data_begin) for s in index.segments}
    return tuple(
        ShardNeed(rank=rank, volume=volume, ranges=_joined([heads[rank, volume], *found]))
        for (rank, volume), found in sorted(spans.items())
    )


def _sources(
    tensor: IndexedTensor | None, fqn: str, region: Box
) -> Iterator[tuple[int, IndexedBox, tuple[int, int]]]:
    """Yield the bytes of an element, a box that the region is read from, which elements of it."""
    if not region.elements_count:
        return
    hole: Box | None = region
    if tensor is not None:
        for box in boxes_of(tensor.shape, region):
            found, hole = tensor.overlaps.fill(box)
            if hole is not None:
                break
            for shared in found:
                yield ITEM_BYTES[tensor.dtype], tensor.pieces[shared.number], shared.span
    if hole is not None:
        raise NotReadyError(f"no shard holds {hole} of tensor {fqn!r}", fqn=fqn)


def _joined(spans: Sequence[tuple[int, int]]) -> tuple[ByteRange, ...]:
    """Return ranges that lie in the same parts, sorted; one for what begins where another ends.

    Bytes are fetched in parts, so what lies between two ranges of one part comes anyway.
    """
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin // PART_BYTES <= joined[-1][1] // PART_BYTES:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return tuple(ByteRange(begin=begin, end=end) for begin, end in joined)
