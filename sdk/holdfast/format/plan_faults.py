"""What is wrong with the plans of all ranks, put together: which tensor, which box, whose. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.format.box_index import Overlaps
from holdfast.format.boxes import Box, whole, without
from holdfast.format.flat_ranges import boxes_of
from holdfast.format.names import blob_rank
from holdfast.format.segment import SegmentHeader, TensorSpec


def first_fault(headers: Iterable[SegmentHeader]) -> str:
    """Return what is wrong with the boxes that the segments of one checkpoint hold; empty: nothing.

    A tensor has one shape and one dtype, and its boxes leave no hole and do not overlap; a scalar
    may be there more than once. Boxes lie inside their tensors: a header with another is none.
    """
    held: dict[str, list[tuple[int, TensorSpec]]] = {}
    for header in headers:
        for entry in header.entries:
            if blob_rank(entry.spec.fqn) is None:
                rank = header.identity.id.rank
                held.setdefault(entry.spec.fqn, []).extend((rank, s) for s in _boxes(entry.spec))
    return next(filter(None, (_fault(fqn, some) for fqn, some in held.items())), "")


def _boxes(spec: TensorSpec) -> Iterator[TensorSpec]:
    """Yield what a range is made of, each as if it were held by itself; at least an empty box."""
    nothing = Box((0,) * len(spec.shape), (0,) * len(spec.shape))
    for box in boxes_of(spec.shape, spec.box) or [nothing]:
        yield spec._replace(box=box)


def _fault(fqn: str, held: list[tuple[int, TensorSpec]]) -> str:
    rank, spec = held[0]
    for other, one in held[1:]:
        if (one.shape, one.dtype) != (spec.shape, spec.dtype):
            return (
                f"tensor {fqn!r} is {spec.dtype} {list(spec.shape)} on rank {rank} and "
                f"{one.dtype} {list(one.shape)} on rank {other}"
            )
    if not spec.shape:
        return ""
    return _overlap(fqn, held) or _hole(fqn, held)


def _overlap(fqn: str, held: list[tuple[int, TensorSpec]]) -> str:
    found = Overlaps([spec.box for _, spec in held])
    for at, (rank, spec) in enumerate(held):
        for number, shared in found.of(spec.box):
            if number > at:
                return (
                    f"ranks {rank} and {held[number][0]} both save {_place(shared)} of tensor "
                    f"{fqn!r} {list(spec.shape)}"
                )
    return ""


def _hole(fqn: str, held: list[tuple[int, TensorSpec]]) -> str:
    shape = held[0][1].shape
    holes = [whole(shape)] if whole(shape).elements_count else []
    for _, spec in sorted(held, key=lambda one: one[1].box.offsets):
        holes = [rest for hole in holes for rest in without(hole, spec.box)]
    if not holes:
        return ""
    ranks = sorted({rank for rank, _ in held})
    return (
        f"no rank saves {_place(holes[0])} of tensor {fqn!r} {list(shape)}, of which ranks "
        f"{', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''} save parts"
    )


def _place(box: Box) -> str:
    return f"{list(box.offsets)} + {list(box.lengths)}"
