"""torch's ``ShardedTensor``: the shard that is here stands for it.

It is an object that speaks for the whole and answers few questions; what an optimizer steps, and
what is saved, is the memory of its shard. Modules have one as a parameter (``shard_parameter``), or
as an attribute that torch's hook puts into their ``state_dict()``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from holdfast.errors import InvalidRequestError
from holdfast.format.boxes import Box
from holdfast.state.local_boxes import Piece, is_sharded_tensor, know_piece

_TORCH = "torch.distributed._shard.sharded_tensor"
_empty: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()


def shards_below(path: str, root: nn.Module) -> Mapping[int, Mapping[str, torch.Tensor]]:
    """Return what is here of each ``ShardedTensor`` below ``root``, called ``path``.

    By the ``id`` of the module that has it, then by its name there. From now on ``local_box`` tells
    what of it that is.

    Raises:
        InvalidRequestError: this rank has several shards of one; names it, and the cure.
    """
    found: dict[int, dict[str, torch.Tensor]] = {}
    for prefix, module, name, tensor in _sharded(root):
        fqn = ".".join(filter(None, (path, prefix, name)))
        found.setdefault(id(module), {})[name] = _shard_here(fqn, tensor)
    return found


def watched(root: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where there is a ``ShardedTensor`` below ``root``; see ``seen_at``."""
    return [(module, name) for _, module, name, _ in _sharded(root)]


def seen_at(places: Iterable[tuple[nn.Module, str]]) -> Iterator[object]:
    """Yield the objects that are now at these places, and the memory of their shards."""
    for module, name in places:
        tensor = getattr(module, name, None)
        yield tensor
        for shard in getattr(tensor, "_local_shards", ()):
            yield shard.tensor


def _sharded(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    if _TORCH not in sys.modules:  # nobody has made one
        return
    hooked: set[nn.Module] = set()
    for prefix, module in root.named_modules():
        if any(hook.__module__ == _TORCH for hook in module._state_dict_hooks.values()):  # noqa: SLF001
            hooked.update(module.modules())
        tables = [module._parameters, vars(module) if module in hooked else {}]  # noqa: SLF001
        for table in tables:
            for name, tensor in table.items():
                if isinstance(tensor, torch.Tensor) and is_sharded_tensor(tensor):
                    yield prefix, module, name, tensor


def _shard_here(fqn: str, tensor: Any) -> torch.Tensor:
    shards, shape = tensor.local_shards(), tuple(tensor.metadata().size)
    if len(shards) > 1:
        raise InvalidRequestError(
            f"tensor {fqn!r} is a ShardedTensor of which this rank has {len(shards)} shards, and a "
            f"checkpoint has one box of a tensor from each rank: give each rank one shard, or make "
            f"it a DTensor",
            key=fqn,
        )
    memory: torch.Tensor
    if shards:
        memory, place = shards[0].tensor, shards[0].metadata
        box = Box(tuple(place.shard_offsets), tuple(place.shard_sizes))
    else:
        box = Box((0,) * len(shape), (0,) * len(shape))
        dtype = tensor.metadata().tensor_properties.dtype
        memory = _empty.setdefault(tensor, torch.empty(box.lengths, dtype=dtype))
    mesh = tuple(sorted(dist.get_process_group_ranks(tensor._process_group)))  # noqa: SLF001
    know_piece(memory, Piece(shape, box, (dist.get_rank(),), mesh))
    return memory
