"""A second look at what a slot keeps: a strip of each frozen tensor is copied there once more.

Torch does not tell of all writes: not of those through ``.data``, by fused optimizers, collectives,
kernels. Who writes so writes whole tensors, as a rule, so that a strip of each shows it. Other
strips are looked at each time, until all of it was.
"""

from __future__ import annotations

from itertools import groupby

import torch

from holdfast.copying.copiers import Copiers
from holdfast.reading.dtypes import is_freed
from holdfast.snapshot.buffer import SlotBuffer
from holdfast.snapshot.pieces import Piece
from holdfast.snapshot.plan import SavePlan

STRIP_BYTES_MAX = 64 << 10
STRIPS_MAX = 1024


def changed_unseen(plan: SavePlan, buffer: SlotBuffer, copiers: Copiers) -> list[str]:
    """Return frozen tensors whose strip differs from what the slot has: names in the segment.

    Afterwards the slot has the strips as they are now. Blocks until they are there.

    Raises:
        RuntimeError: a device fails, or has no memory left.
    """
    turn = plan.frozen.take_turn()
    groups = -(-len(plan.frozen.pieces) // STRIPS_MAX) or 1
    pieces = [
        piece for piece in plan.frozen.pieces[turn % groups :: groups] if _is_as_planned(piece)
    ]
    targets = [_strip(buffer.place(piece.entry), turn // groups) for piece in pieces]
    before = [_bytes(target).clone() for target in targets]
    sources = [_strip(piece.tensor.detach(), turn // groups) for piece in pieces]
    for device, group in groupby(range(len(pieces)), lambda at: plan.devices.of(sources[at])):
        now = list(group)
        copiers.of(device).later([targets[at] for at in now], [sources[at] for at in now])
    copiers.land()
    each = zip(pieces, before, targets, strict=True)
    return [
        piece.entry.spec.fqn for piece, old, target in each if not torch.equal(old, _bytes(target))
    ]


def strip_of(tensor: torch.Tensor, turn: int, bytes_max: int) -> torch.Tensor:
    """Return a view of ``tensor`` of at most ``bytes_max``, or of one element.

    It is another one at each turn, until all were; of a contiguous tensor it is contiguous.
    """
    for dim, length in enumerate(tensor.shape):
        if tensor.nbytes <= bytes_max:
            break
        rows = max(1, bytes_max // (tensor.nbytes // length))
        strips = -(-length // rows)
        begin = turn % strips * rows
        tensor = tensor.narrow(dim, begin, min(rows, length - begin))
        turn //= strips
    return tensor


def _strip(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    return strip_of(tensor, turn, STRIP_BYTES_MAX)


def _bytes(strip: torch.Tensor) -> torch.Tensor:
    return strip.view(-1).view(torch.uint8)


def _is_as_planned(piece: Piece) -> bool:
    """Tell whether its memory may be read: what has moved since the save began is seen later."""
    tensor = piece.tensor
    return (tensor.shape, tensor.dtype) == piece.kind and not is_freed(tensor)
