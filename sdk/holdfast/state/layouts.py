"""How tensors lie in memory: dims in order, the one with the widest stride first.

A segment holds every tensor as C order has it. What reads raw memory afterwards, as fused
optimizers do, must find it as it lay: order, not strides, so that gaps are not brought back.
"""

from __future__ import annotations

import torch

from holdfast.errors import ManifestError


def dims_in_memory(tensor: torch.Tensor) -> list[int]:
    """Return the dims of a dense copy of ``tensor``, as ``empty_like`` makes it, widest first.

    >>> dims_in_memory(torch.zeros(2, 3).t())
    [1, 0]
    """
    strides = torch.empty_like(tensor, device="meta").stride()
    return sorted(range(tensor.ndim), key=lambda dim: -strides[dim])


def in_layout(tensor: torch.Tensor, dims: object) -> torch.Tensor:
    """Return a copy of ``tensor`` with its dims in this order in memory; C order if None.

    Raises:
        ManifestError: ``dims`` are not the dims of ``tensor``.
    """
    if dims is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    if not isinstance(dims, list) or set(dims) != set(range(tensor.ndim)):
        raise ManifestError(f"{dims!r} is no order of {tensor.ndim} dims")
    return torch.empty_permuted(tensor.shape, dims, dtype=tensor.dtype).copy_(tensor)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Tell whether elements share memory along a dim, so that the tensor cannot be filled."""
    return any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
