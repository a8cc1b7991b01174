"""What training changes and no save of a state would hold: a restore would not bring it back.

Such a state looks whole, saves and restores without an error, and goes on from other values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch.optim import Optimizer

from holdfast.errors import InvalidRequestError
from holdfast.state.local_boxes import local, shape_of
from holdfast.state.optimizers import parameters
from holdfast.state.survey import Survey

_OF_OPTIMIZERS = {"state", "param_groups"}
_OF_SCHEDULERS = {"last_epoch", "_last_lr"}


def check_follows(path: str, value: object) -> None:
    """Refuse the ``state_dict()`` of an optimizer or a scheduler: it stays what it is now.

    Args:
        path: The name of ``value`` in the state.
        value: A plain value; dicts, lists and tuples are looked through.

    Raises:
        InvalidRequestError: names the first one.
    """
    if isinstance(value, Mapping):
        for keys, what in ((_OF_OPTIMIZERS, "an optimizer"), (_OF_SCHEDULERS, "a scheduler")):
            if keys <= value.keys():
                raise InvalidRequestError(
                    f"state {path!r} is the state_dict() of {what}, which training does not "
                    f"change any more: put the object itself into the state",
                    key=path,
                )
        for key, inner in value.items():
            check_follows(f"{path}.{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            check_follows(f"{path}.{index}", inner)


def unsaved_parameters(
    survey: Survey, objects: Mapping[str, object], saved: Iterable[torch.Tensor]
) -> list[str]:
    """Return a sentence for each optimizer with parameters that nothing in the state holds.

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
    everything = chain(saved, (captured.tensor for captured in survey.tensors))
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
    return id(parameter) not in survey.fqn_of and bool(local(parameter).numel())


def _places(tensor: torch.Tensor) -> Iterator[int]:
    """Yield where the memory of ``tensor`` begins, if it has some of its own."""
    here = local(tensor)
    if type(here).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not here.is_meta:
        yield here.untyped_storage().data_ptr()
