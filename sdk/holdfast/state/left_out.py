"""What training changes and no save of a state would hold: a restore would not bring it back.

Such a state looks whole, saves and restores without an error, and goes on from other values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import InvalidRequestError
from holdfast.state.local_boxes import local, shape_of
from holdfast.state.optimizers import parameters
from holdfast.state.survey import Survey

_OF_OPTIMIZERS = {"state", "param_groups"}
_OF_SCHEDULERS = {"last_epoch", "_last_lr"}
_COPIES = (
    (_OF_OPTIMIZERS, Optimizer, "an optimizer"),
    (_OF_SCHEDULERS, LRScheduler, "a scheduler"),
)
"""Of each kind whose ``state_dict()`` is taken for it: keys of that, class, and what it is."""


def check_follows(state: Mapping[str, object]) -> None:
    """Refuse the ``state_dict()`` of an optimizer or a scheduler: it stays what it is now.

    Beside an object of the kind it is meant, as that of the best step is.

    Args:
        state: The user's; its dicts, lists and tuples are looked through.

    Raises:
        InvalidRequestError: names the first one.
    """
    for keys, kind, what in _COPIES:
        found = list(_looked_through("", state, kind))
        copies = (
            path for path, value in found if isinstance(value, Mapping) and keys <= value.keys()
        )
        copy = next(copies, None)
        if copy is not None and not any(isinstance(value, kind) for _, value in found):
            raise InvalidRequestError(
                f"state {copy!r} is the state_dict() of {what}, which training does not "
                f"change any more: put the object itself into the state",
                key=copy,
            )


def _looked_through(path: str, value: object, kind: type) -> Iterator[tuple[str, object]]:
    """Yield all mappings and objects of a kind, with their paths."""
    if isinstance(value, kind):
        yield path, value
    elif isinstance(value, Mapping):
        yield path, value
        for key, inner in value.items():
            yield from _looked_through(f"{path}.{key}" if path else str(key), inner, kind)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _looked_through(f"{path}.{index}", inner, kind)


def unsaved_parameters(
    survey: Survey, objects: Mapping[str, object], saved: Iterable[torch.Tensor]
) -> list[str]:
    """Return a sentence for each optimizer that trains parameters which nothing in the state holds.

    Args:
        survey: What is found of modules and optimizers.
        objects: All objects of the state by path.
        saved: Tensors of the rest of the state; a parameter may share its memory with one, as those
            of a ``state_dict()`` do.
    """
    unknown = {
        path: found
        for path, optimizer in objects.items()
        if isinstance(optimizer, Optimizer) and path in survey.static
        if (found := [p for p in parameters(optimizer) if _is_unknown(p, survey)])
    }
    if not unknown:
        return []
    # A module that saves itself may do so by copies.
    own = (value.parameters() for value in objects.values() if isinstance(value, nn.Module))
    everything = chain(saved, (captured.tensor for captured in survey.tensors), *own)
    held = {place for tensor in everything for place in _places(tensor)}
    sentences = []
    for path, found in unknown.items():
        lost = [p for p in found if held.isdisjoint(_places(p))]
        if lost:
            sentences.append(
                f"optimizer {path!r} has {len(lost)} parameters that are not in the state, the "
                f"first of shape {shape_of(lost[0])}: no restore brings their values back; put "
                f"their module into the state, or make the optimizer of the module that is there"
            )
    return sentences


def _is_unknown(parameter: torch.Tensor, survey: Survey) -> bool:
    if id(parameter) in survey.fqn_of or not parameter.requires_grad:
        return False
    return bool(local(parameter).numel())


def _places(tensor: torch.Tensor) -> Iterator[int]:
    """Yield where the memory of ``tensor`` begins, if it has some of its own."""
    here = local(tensor)
    if type(here).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not here.is_meta:
        yield here.untyped_storage().data_ptr()
