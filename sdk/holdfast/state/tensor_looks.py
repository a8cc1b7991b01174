"""How tensors are kept in memory: what of a tensor may change and leave it the same object.

A save asks this of every tensor, on the training thread. So whatever is asked of all is asked in
a loop that runs in C, without letting go of the interpreter's lock: where other threads want it,
getting it back takes the training thread 5 ms.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch

LOOKED_AT_ONCE = 256
"""Tensors that are looked at together: they are in the processor's cache at the next question."""

_KIND = operator.attrgetter("shape", "dtype", "device")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # it belongs to `torch.compile`, which may do without it one day
    TensorGuards = None  # type: ignore[assignment, misc]


class Looks:
    """How a few tensors looked when this was made; ``hold`` tells whether they still do.

    That is where they begin, and their dtype, device, sizes, strides, whether they are to be
    conjugated or negated when they are read, and whether they require a gradient.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        self._are_alike = _guards(self._tensors) or _Compared(self._tensors).check

    def hold(self) -> bool:
        """Tell whether all of it is as it was; a mode of the thread may make the answer False.

        Such as autocast, where it was off: then ask ``kinds``, and make another one.
        """
        addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        return addresses == self._addresses and self._are_alike(*self._tensors)


def kinds(tensors: Sequence[torch.Tensor]) -> list[object]:
    """Return shape, dtype and device of each."""
    return list(map(_KIND, tensors))


def _guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return torch's own check of compiled code, which is one loop in C; None: it is not there."""
    if TensorGuards is None:
        return None
    try:
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (RuntimeError, TypeError):  # for tensors without strides, or a torch that asks otherwise
        return None
    return guards.check if guards.check(*tensors) else None


class _Compared:
    """The same by torch's public names, in more loops."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._seen = self._look(tensors)

    def check(self, *tensors: torch.Tensor) -> bool:
        return self._look(tensors) == self._seen

    @staticmethod
    def _look(tensors: Sequence[torch.Tensor]) -> list[list[object]]:
        looks = torch.Tensor.stride, torch.Tensor.is_conj, torch.Tensor.is_neg
        strided = [t for t in tensors if t.layout is torch.strided]
        gradients = list(map(_REQUIRES_GRAD, tensors))
        return [kinds(tensors), gradients, *(list(map(look, strided)) for look in looks)]
