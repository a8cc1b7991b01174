"""What a plan is made of: tensors with their places in the segment, and runs of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from holdfast.copying.port import Device
from holdfast.format.segment import TensorEntry


class Piece(NamedTuple):
    """One tensor to copy and where it goes; ``kind`` is its shape and dtype, as planned."""

    tensor: torch.Tensor
    entry: TensorEntry
    kind: tuple[torch.Size, torch.dtype]


class Run(NamedTuple):
    """Pieces ``[begin, end)`` of a list, all on ``device``; None: copied by the host."""

    device: Device | None
    begin: int
    end: int
