"""How tensors lie in memory: dims in order, the one with the widest stride first.

A segment holds every tensor as C order has it. What reads raw memory afterwards, as fused
optimizers do, must find it as it lay: order, not strides, so that gaps are not brought back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.errors import ManifestError


def dims_in_memory(tensor: torch.Tensor) -> list[int]:
    """Return the dims of a dense copy of ``tensor``, as ``empty_like`` makes it, widest first.

    >>> dims_in_memory(torch.zeros(2, 3).t())
    [1, 0]
    """
    strides = torch.empty_like(tensor, device="meta").stride()
    return sorted(range(tensor.ndim), key=lambda dim: -strides[dim])


def empty_in_layout(shape: Sequence[int], dtype: torch.dtype, dims: object) -> torch.Tensor:
    """Return new memory with its dims in this order; C order if None.

    Raises:
        ManifestError: ``dims`` are not the dims of ``shape``.
    """
    if dims is None:
        return torch.empty(shape, dtype=dtype)
    count = len(shape)
    if not isinstance(dims, list) or len(dims) != count or set(dims) != set(range(count)):
        raise ManifestError(f"{dims!r} is no order of {count} dims")
    return torch.empty_permuted(shape, dims, dtype=dtype)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Tell whether elements share memory along a dim, so that the tensor cannot be filled."""
    return any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
