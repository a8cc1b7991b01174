"""What a plan hash says: of a segment, of what all ranks save together, and whether that is all.

``<hash>-<tally>.<hash>``: of the boxes of this segment; what the rank saves less what it answers
for, see ``format.tally``; of the tensors that all ranks share out among themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from holdfast.format.boxes import Box, whole
from holdfast.format.names import own_name
from holdfast.format.segment import TensorSpec
from holdfast.format.tally import tally
from holdfast.reading.dtypes import dtype_name
from holdfast.state.survey import CapturedTensor, Home

_PLAN_HASH_LENGTH = 32
_SHARED_HASH_LENGTH = 16
_quoted = json.JSONEncoder().encode


def hash_of(specs: Sequence[TensorSpec], rank: int, world_size: int) -> str:
    """Return the hash of a segment that holds ``specs``: equal for equal boxes."""
    rows = [f"[{_quoted(fqn)},{_cut(dtype, shape, box)}]" for fqn, dtype, shape, box in specs]
    text = f"[{rank},{world_size},[{','.join(rows)}]]"
    return hashlib.sha256(text.encode()).hexdigest()[:_PLAN_HASH_LENGTH]


@lru_cache(maxsize=4096)
def _cut(dtype: str, shape: tuple[int, ...], box: Box) -> str:
    """Return what the rows of all tensors that are cut alike have in common, as JSON."""
    return json.dumps([dtype, shape, box.offsets, box.lengths], separators=(",", ":"))[1:-1]


def shared_hash(tensors: Iterable[CapturedTensor], world_size: int) -> str:
    """Return the hash of the tensors of which every rank saves a part, as this rank knows them.

    Ranks that know others share them out in another way, and leave some to nobody.
    """
    shared = sorted(
        (t.fqn, _kind(t.shape, t.tensor.dtype))
        for t in tensors
        if t.home in (Home.SHARED, Home.FIRST)
        or (t.home is Home.HOLDERS and len(t.mesh) == world_size and t.known_to_all)
    )
    rows = [f"[{_quoted(fqn)},{kind}]" for fqn, kind in shared]
    text = f"[{','.join(rows)}]"
    return hashlib.sha256(text.encode()).hexdigest()[:_SHARED_HASH_LENGTH]


@lru_cache(maxsize=4096)
def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return shape and dtype as JSON, for the row of a tensor."""
    return json.dumps([shape, str(dtype)], separators=(",", ":"))[1:-1]


def tally_of(
    tensors: Iterable[CapturedTensor],
    saved: Iterable[tuple[CapturedTensor, TensorSpec]],
    rank: int,
    world_size: int,
) -> int:
    """Return the tally of what this rank saves, less that of what it answers for.

    The first rank of a mesh answers for its tensors, rank 0 for those of all; for a tensor that not
    all know, the first of those that have its first element. What is each rank's
    own does not count, nor a scalar of a mesh: all of its ranks save that.

    Args:
        tensors: All that the rank has.
        saved: Those of them, or of whose boxes, that it saves, with what its segment says of each.
        rank: This rank.
        world_size: How many there are.
    """
    total = 0
    for t, spec in saved:
        if _is_common(t):
            total += tally(*spec)
    for t in tensors:
        if _answers(t, rank) and _is_common(t):
            name = stored_name(t, rank, world_size)
            total -= tally(name, dtype_name(t.fqn, t.tensor), t.shape, whole(t.shape))
    return total


def stored_name(captured: CapturedTensor, rank: int, world_size: int) -> str:
    """Return what the tensor is called in a segment of this rank; see ADR 0034."""
    if captured.home is Home.HOLDERS and len(captured.mesh) < world_size:
        return own_name(captured.fqn, captured.mesh[0])
    return own_name(captured.fqn, rank) if captured.home is Home.RANK else captured.fqn


def _is_common(t: CapturedTensor) -> bool:
    return t.home is not Home.RANK and bool(t.shape or t.home is not Home.HOLDERS)


def _answers(t: CapturedTensor, rank: int) -> bool:
    if t.known_to_all:
        return rank == (t.mesh[0] if t.mesh else 0)
    begins = not any(t.box.offsets) and t.box.elements_count > 0
    return begins and rank == t.holders[0]
