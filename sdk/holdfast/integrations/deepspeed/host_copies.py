"""Host memory into which a state is copied at each save, the same memory each time.

What lies side by side in one storage is copied at once, however many tensors it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import torch

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Memory, and the tensor whose values it gets."""

GAP_BYTES_MAX = 4096
"""What lies closer together is copied in one piece, with what is between."""


class HostCopies:
    """Copies of tensors in memory that is used again by the next ``take``.

    Who has taken is done with the copies before the next ``take``. Not safe to use from several
    threads.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def take(
        self, tensors: Sequence[torch.Tensor], later: Collection[int] = ()
    ) -> tuple[list[torch.Tensor], list[Pair], list[Pair]]:
        """Return memory for a copy of each tensor, and what is to be copied now, and later.

        The copies are on the host and contiguous.

        Args:
            tensors: What is to be copied.
            later: Numbers of those that may be copied later.
        """
        copies: list[torch.Tensor | None] = [None] * len(tensors)
        flat = [t.detach() if t.is_contiguous() else t.detach().contiguous() for t in tensors]
        pairs: tuple[list[Pair], list[Pair]] = [], []
        # In the order of the tensors: addresses say nothing of the next save.
        for used, run in enumerate(sorted(_runs(flat), key=min)):
            first, last = flat[run[0]], flat[run[-1]]
            begin = first.storage_offset()
            span = first.as_strided((last.storage_offset() + last.numel() - begin,), (1,), begin)
            held = self._buffer(used, span)
            pairs[all(n in later and tensors[n].is_contiguous() for n in run)].append((held, span))
            for number in run:
                at = flat[number].storage_offset() - begin
                piece = held[at : at + flat[number].numel()]
                copies[number] = piece.view(flat[number].shape)
        del self._buffers[sum(map(len, pairs)) :]
        return [copy for copy in copies if copy is not None], *pairs

    def _buffer(self, number: int, span: torch.Tensor) -> torch.Tensor:
        if number < len(self._buffers):
            held = self._buffers[number]
            if held.shape == span.shape and held.dtype == span.dtype:
                return held
            self._buffers[number] = torch.empty(span.shape, dtype=span.dtype)
        else:
            self._buffers.append(torch.empty(span.shape, dtype=span.dtype))
        return self._buffers[number]


def _runs(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return numbers of contiguous tensors, those together that lie side by side."""
    keys = [
        (t.untyped_storage().data_ptr(), str(t.dtype), int(t.storage_offset())) for t in tensors
    ]
    runs: list[list[int]] = []
    end, of = 0, ("", "")
    for number in sorted(range(len(tensors)), key=lambda n: (keys[n], tensors[n].numel())):
        storage, dtype, begin = keys[number]
        tensor, here = tensors[number], (str(storage), dtype)
        near = here == of and begin * tensor.itemsize <= end * tensor.itemsize + GAP_BYTES_MAX
        if near and begin + tensor.numel() >= end:
            runs[-1].append(number)
        else:
            runs.append([number])
        end, of = begin + tensor.numel(), here
    return runs
