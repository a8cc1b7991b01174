"""The parts of a stager: the tensors of a state dict, memory for them, and the copy.

Sizes are bytes, times seconds.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.threads import limit_this_thread

BUFFERS_COUNT_MAX = 2
"""One that is being written to storage, while the other is filled."""
ALIGNMENT_BYTES = 64
CHUNK_BYTES_MAX = 64 << 20
CHUNK_TENSORS_MAX = 4096

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors to fill, each with the one whose values it gets."""


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
        used = [buffer for buffer in self._buffers if buffer.is_used()]
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

    def drop(self) -> None:
        """Let go of it; what is still read stays until that ends."""
        self._buffers.clear()


class _Buffer:
    """Memory for tensors of these ``kinds``, in one piece, so that one count tells who reads it."""

    def __init__(self, kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> None:
        self.kinds = kinds
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in kinds]
        steps = [size + -size % ALIGNMENT_BYTES for size in sizes]
        pinned = torch.cuda.is_available()
        self._bytes = torch.empty(sum(steps), dtype=torch.uint8, pin_memory=pinned)
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


class Copies:
    """Copies one state at a time, on a thread of its own that uses one core.

    ``busy`` is what a gate looks at: True while a copy has neither ended nor been given up.
    ``may_defer``: no tensor was ever seen written while it was copied.
    """

    def __init__(self) -> None:
        self.busy = False
        self.may_defer = True
        self._reason = ""
        self._idle = threading.Event()
        self._idle.set()
        self._pool = ThreadPoolExecutor(1, "holdfast-stage", initializer=limit_this_thread)

    def begin(self, now: Pairs, later: Pairs, staged: Any) -> Future[Any]:
        """Copy ``now`` at once, and ``later`` on the thread; the future then has ``staged``."""
        _copy(now)
        if not later:
            done: Future[Any] = Future()
            done.set_result(staged)
            return done
        self._reason = ""
        self._idle.clear()
        self.busy = True
        versions = [_version(source) for _, source in later]
        with ExitStack() as undo:
            undo.callback(self._end)
            future = self._pool.submit(self._run, later, versions, staged)
            undo.pop_all()
        return future

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being copied; False if it still is."""
        return self._idle.wait(timeout_s)

    def abandon(self, reason: str) -> None:
        """Give up the copy that goes on; it stops after its current chunk."""
        self._reason = reason
        self.busy = False

    def close(self, timeout_s: float) -> None:
        """Wait for the copy that goes on; end the thread."""
        if not self.wait(timeout_s):
            self.abandon("the stager was closed")
        self._pool.shutdown(wait=False)

    def _run(self, later: Pairs, versions: Sequence[int], staged: Any) -> Any:
        try:
            for chunk in _chunks(later):
                if self._reason:
                    raise PreconditionError(self._reason)
                _copy(chunk)
            now = [_version(source) for _, source in later]
            if now != list(versions):
                self.may_defer = False
                raise PreconditionError(
                    "a parameter was written outside an optimizer while it was copied: from now on "
                    "everything is copied before async_save returns"
                )
            return staged
        finally:
            self._end()

    def _end(self) -> None:
        self.busy = False
        self._idle.set()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def _copy(pairs: Pairs) -> None:
    if pairs:
        with torch.no_grad():
            targets, sources = zip(*pairs, strict=True)
            torch._foreach_copy_(list(targets), list(sources))


def _chunks(pairs: Pairs) -> Iterator[Pairs]:
    """Yield runs of ``pairs`` of bounded size; a tensor is never cut."""
    begin = size = 0
    for at, (target, _) in enumerate(pairs):
        if at > begin and (
            size + target.nbytes > CHUNK_BYTES_MAX or at - begin == CHUNK_TENSORS_MAX
        ):
            yield pairs[begin:at]
            begin, size = at, 0
        size += target.nbytes
    yield pairs[begin:]
