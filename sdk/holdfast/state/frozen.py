"""Modules whose tensors do not change, as their user has declared."""

from __future__ import annotations

from itertools import chain
from weakref import WeakSet

import torch
from torch import nn

from holdfast.errors import InvalidRequestError

_declared: WeakSet[nn.Module] = WeakSet()
_counted = [0]


def frozen(module: nn.Module) -> None:
    """Declare that the parameters of ``module`` without gradient, and its buffers, do not change.

    A save then copies them only into a slot that does not have them yet. What requires a gradient
    is not frozen, so ``requires_grad_()`` takes it back; nor are the statistics of a batch norm,
    which it writes unseen. What has changed all the same is copied from then on, and named in a
    warning. If torch did not tell of it (``.data``, fused optimizers, collectives, kernels) the
    save that finds it fails; of what is written unseen in part only, that may be some saves later.

    Args:
        module: Any part of the state, or a module around it. It stays the caller's.

    Raises:
        InvalidRequestError: it is no module.
    """
    if not isinstance(module, nn.Module):
        raise InvalidRequestError(
            f"holdfast.frozen() takes a module, not a {type(module).__name__}; a tensor is frozen "
            f"with the module that has it"
        )
    _declared.add(module)
    _counted[0] += 1


def declared_count() -> int:
    """Return how often something was declared frozen: what was found before may have changed."""
    return _counted[0]


def declared_tensors() -> set[int]:
    """Return the ``id`` of each tensor that is declared frozen and requires no gradient."""
    parts = {id(part): part for module in list(_declared) for part in module.modules()}
    return {
        id(tensor)
        for part in parts.values()
        for tensor in chain(part.parameters(recurse=False), _buffers(part))
        if not tensor.requires_grad
    }


def _buffers(part: nn.Module) -> list[torch.Tensor]:
    if isinstance(part, nn.modules.batchnorm._NormBase):  # noqa: SLF001 - of all that keep statistics
        return []
    return list(part.buffers(recurse=False))
