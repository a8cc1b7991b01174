"""Copies what DCP saves while training goes on, into memory that the next saves use again.

Only what an optimizer's step alone writes may be copied later: parameters of the optimizers that
have stepped since the last save, and what these keep for them. They are known by their memory,
since a state dict has other objects than an optimizer. All else is copied before ``stage`` returns.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from itertools import compress
from typing import Any, Self

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.errors import PreconditionError
from holdfast.integrations.dcp.staging import Memory, rebuilt, tensors_in
from holdfast.snapshot.later_copies import Copies
from holdfast.snapshot.optimizer_gate import GATE_S_MAX, Gate
from holdfast.untraced import untraced


class HoldfastStager(AsyncStager):
    """The ``async_stager`` of ``dcp.async_save`` for scripts whose training should not wait.

    ``async_save`` returns an ``AsyncSaveResponse`` at once. The next ``optimizer.step()`` waits
    until the copy is complete, and nothing else does; of tensors on a GPU the GPU waits, and not
    the script. Give the same object to each save, make it
    before training begins, and close it after the last one.

    It goes with any ``storage_writer``. It keeps the memory of a copy of this rank's state, of two
    if a save begins before the last one is written. Tensors are plain ones or DTensors.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._copies = Copies()
        self._gate = Gate(self._copies)
        self._memory = Memory()
        self._stepped: dict[int, weakref.ref[Optimizer]] = {}
        self._hook: Any = register_optimizer_step_pre_hook(self._note_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stage(self, state_dict: dict[str, Any], **_options: Any) -> Future[dict[str, Any]]:
        """Return the copy of ``state_dict`` as it is now; it is complete once the future is done.

        The future fails if a tensor was written while it was copied and not by an optimizer: that
        save is lost, and later ones copy everything before they return.

        Raises:
            InvalidRequestError: a tensor of a kind that is not supported; names it.
            PreconditionError: this is closed, two earlier saves are still being written, or the
                copy of the last one has not ended.
        """
        if self._hook is None:
            raise PreconditionError("this stager is closed: make another one")
        if not self._copies.wait(GATE_S_MAX):
            raise PreconditionError("the copy of an earlier save has not ended")
        found = list(tensors_in(state_dict))
        stepped = set(self._movable())
        movable = stepped if self._copies.may_defer and not self._gate.blind else set()
        views = self._memory.views([tensor for _, tensor in found])
        staged = rebuilt(state_dict, iter(views))
        pairs = [(view, tensor) for view, (_, tensor) in zip(views, found, strict=True)]
        deferred = [self._copies.may_be_late(t) and t.data_ptr() in movable for _, t in pairs]
        later = list(compress(pairs, deferred))
        now = list(compress(pairs, map(operator.not_, deferred)))
        return self._copies.begin(now, later, staged)

    def synchronize_staging(self) -> None:
        """Wait until the last copy has ended; what went wrong is told by its future."""
        self._copies.wait(GATE_S_MAX)

    def close(self) -> None:
        """Wait for the copy that goes on, then let go of hooks and memory; idempotent."""
        self._copies.close(GATE_S_MAX)
        self._gate.uninstall()
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()
        self._memory.drop()

    @untraced
    def _note_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        self._stepped[id(optimizer)] = weakref.ref(optimizer)

    def _movable(self) -> Iterator[int]:
        """Yield where the tensors lie that only steps write, of optimizers seen to announce these.

        An optimizer that has not stepped since the last save may be one whose steps nobody sees.
        """
        optimizers = [ref() for ref in self._stepped.values()]
        self._stepped.clear()
        for optimizer in filter(None, optimizers):
            for group in optimizer.param_groups:
                yield from (_place(p) for p in group["params"] if p.requires_grad)
            for state in optimizer.state.values():
                if isinstance(state, Mapping):
                    yield from (_place(t) for t in state.values() if isinstance(t, torch.Tensor))


def _place(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.data_ptr()
