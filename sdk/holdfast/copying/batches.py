"""Pairs of a target and a source, in batches of bounded size: what is copied by one call.

Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor to fill, and the one of equal shape whose values it gets."""
BATCH_BYTES_MAX = 64 << 20
BATCH_TENSORS_MAX = 4096


def batches(
    pairs: Iterable[Pair], *, bytes_max: int = BATCH_BYTES_MAX, count_max: int = BATCH_TENSORS_MAX
) -> Iterator[list[Pair]]:
    """Yield the pairs in order, in lists within both bounds; what is longer is cut."""
    batch: list[Pair] = []
    length_bytes = 0
    for whole in pairs:
        for pair in (whole,) if whole[0].nbytes <= bytes_max else cut(whole, bytes_max):
            size = pair[0].nbytes
            if batch and (length_bytes + size > bytes_max or len(batch) == count_max):
                yield batch
                batch, length_bytes = [], 0
            batch.append(pair)
            length_bytes += size
    if batch:
        yield batch


def cut(pair: Pair, bytes_max: int = BATCH_BYTES_MAX) -> Iterator[Pair]:
    """Yield views that make up the pair, each within ``bytes_max`` if its elements are.

    They are slices of the first dim that has any, so what lies in one piece still does.
    """
    target, source = pair
    if target.nbytes <= bytes_max or target.numel() < 2:
        yield pair
        return
    dim = next(number for number, length in enumerate(target.shape) if length > 1)
    row_bytes = target.nbytes // target.shape[dim]
    rows = max(1, bytes_max // row_bytes)
    for begin in range(0, target.shape[dim], rows):
        length = min(rows, target.shape[dim] - begin)
        part = (target.narrow(dim, begin, length), source.narrow(dim, begin, length))
        yield from cut(part, bytes_max)
