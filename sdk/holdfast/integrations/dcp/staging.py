"""The parts of a stager: the tensors of a state dict, and memory for them.

Sizes are bytes.
"""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.logs import steady_logger

BUFFERS_COUNT_MAX = 2
"""One that is being written to storage, while the other is filled."""
ALIGNMENT_BYTES = 64
_LOG = steady_logger(__name__)


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the memory of each tensor in a state dict, in order, with its path.

    Raises:
        InvalidRequestError: a tensor that is neither a plain one nor a DTensor of such.
    """
    if isinstance(value, torch.Tensor):
        local = value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001
        if type(local) not in (torch.Tensor, nn.Parameter) or local.layout is not torch.strided:
            raise InvalidRequestError(
                f"tensor {path!r} is a {type(local).__name__} ({local.layout}), which is not "
                f"staged: leave out async_stager",
                key=path,
            )
        yield path, local.detach()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from tensors_in(item, f"{path}.{number}")


def rebuilt(value: Any, memory: Iterator[torch.Tensor]) -> Any:
    """Return a state dict whose tensors are in ``memory``, in order; all else is a copy."""
    if isinstance(value, DTensor):
        made: Any = DTensor
        return made(next(memory), value._spec, requires_grad=False)  # noqa: SLF001
    if isinstance(value, torch.Tensor):
        return next(memory)
    if isinstance(value, Mapping):
        table = {key: rebuilt(item, memory) for key, item in value.items()}
        return OrderedDict(table) if isinstance(value, OrderedDict) else table
    if isinstance(value, (list, tuple)):
        items = [rebuilt(item, memory) for item in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    return copy.deepcopy(value)


class Memory:
    """Host memory for copies, used again once nobody holds a tensor of the copy before."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    def views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a tensor for each one, of its shape and dtype, in memory that is not in use.

        Raises:
            PreconditionError: ``BUFFERS_COUNT_MAX`` copies are still being read.
        """
        kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        used = self._used()
        if len(used) >= BUFFERS_COUNT_MAX:
            gc.collect()  # the error of a save that failed keeps its state until somebody sweeps
            used = self._used()
        free = [buffer for buffer in self._buffers if buffer not in used]
        buffer = next((buffer for buffer in free if buffer.kinds == kinds), None)
        if buffer is None:
            if len(used) >= BUFFERS_COUNT_MAX:
                raise PreconditionError(
                    f"{len(used)} earlier saves are still being written: wait for their futures"
                )
            free.clear()  # before more is taken: the state has another structure now
            self._buffers = used
            buffer = _Buffer(kinds)
            self._buffers.append(buffer)
        return [view.detach() for view in buffer.views]

    def _used(self) -> list[_Buffer]:
        return [buffer for buffer in self._buffers if buffer.is_used()]

    def drop(self) -> None:
        """Let go of it; what is still read stays until that ends."""
        self._buffers.clear()


class _Buffer:
    """Memory for tensors of these ``kinds``, in one piece, so that one count tells who reads it."""

    def __init__(self, kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> None:
        self.kinds = kinds
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in kinds]
        steps = [size + -size % ALIGNMENT_BYTES for size in sizes]
        self._bytes = _host_memory(sum(steps))
        self.views = []
        begin = 0
        for (shape, dtype), size, step in zip(kinds, sizes, steps, strict=True):
            self.views.append(self._bytes[begin : begin + size].view(dtype).view(shape))
            begin += step
        self._storage = self._bytes.untyped_storage()
        self._own_count = self._count()

    def is_used(self) -> bool:
        """Tell whether anybody has a tensor of this memory: in C++ as well, and made of another."""
        return self._count() > self._own_count

    def _count(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage._cdata))  # noqa: SLF001


def _host_memory(length_bytes: int) -> torch.Tensor:
    """Return memory that a GPU copies into by itself, where there is one and its driver lets it."""
    if torch.cuda.is_available():
        try:
            return torch.empty(length_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            _LOG.warning("memory of a stager is not pinned, so steps wait for copies: %s", error)
    return torch.empty(length_bytes, dtype=torch.uint8)
