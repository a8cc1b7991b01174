"""FSDP1: which parameters a ``FullyShardedDataParallel`` has flattened, and what of each is here.

It lays the parameters of a module one behind the other and gives each rank an equal run of the row.
Each parameter stays the object that the optimizer has; its memory is a part of this rank's run.
Between forward and backward, modules' tables hold other tensors, views of whole parameters. So
parameters are taken from FSDP's own list, which no forward changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast.errors import InvalidRequestError
from holdfast.format.boxes import Box, whole
from holdfast.state.local_boxes import Piece, know_piece

_WRAPPER = "FullyShardedDataParallel"


def managed_parameters(path: str, root: nn.Module) -> Mapping[int, Mapping[str, nn.Parameter]]:
    """Return the parameters below ``root``, called ``path``, that FSDP1 has flattened.

    By the ``id`` of the module that has them, then by their names in it. From now on ``local_box``
    tells what of them is here.

    Raises:
        InvalidRequestError: what is here of a parameter cannot be told; names it, and the cure.
    """
    found: dict[int, dict[str, nn.Parameter]] = {}
    for wrapper, handle in _handles(root):
        if not handle._use_orig_params:  # noqa: SLF001
            raise InvalidRequestError(
                f"not supported yet: {path} has a {_WRAPPER} with use_orig_params=False, whose "
                f"parameters have no names: make it with use_orig_params=True",
                key=path,
            )
        flat = handle.flat_param
        _know_pieces(path, wrapper, handle)
        for parameter, info in zip(flat._params, flat._param_infos, strict=True):  # noqa: SLF001
            found.setdefault(id(info.module), {})[info.param_name] = parameter
        shared = zip(flat._shared_params, flat._shared_param_infos, strict=True)  # noqa: SLF001
        for parameter, info in shared:
            first = found[id(info.prim_module)][info.prim_param_name]
            assert parameter is first, "FSDP1 keeps a tied parameter as one object"
            found.setdefault(id(info.module), {})[info.param_name] = parameter
    return found


def parameter_lists(root: nn.Module) -> list[list[nn.Parameter]]:
    """Return FSDP's own lists of the parameters that it has flattened; they stay its own."""
    return [handle.flat_param._params for _, handle in _handles(root)]  # noqa: SLF001


def is_flat(tensor: torch.Tensor) -> bool:
    """Tell whether this is the row itself, which stands in a table now and then."""
    return getattr(tensor, "_is_flat_param", False) is True


def drop_whole_parameters(root: nn.Module) -> None:
    """Have the next forward gather parameters anew: those here are about to change.

    After a forward without a backward, FSDP1 keeps whole parameters and would use them again.
    """
    from torch.distributed.fsdp._runtime_utils import _reshard  # noqa: PLC0415 - takes a while

    for wrapper, handle in _handles(root):
        if hasattr(handle.flat_param, "_local_shard"):  # there was a forward
            _reshard(wrapper, handle, handle.uses_sharded_strategy)


def _handles(root: nn.Module) -> Iterator[tuple[Any, Any]]:
    for module in root.modules():
        if any(cls.__name__ == _WRAPPER for cls in type(module).__mro__):
            handle = module._handle  # noqa: SLF001 - torch has no other way to ask
            if handle is not None:
                yield module, handle


def _know_pieces(path: str, wrapper: Any, handle: Any) -> None:
    flat = handle.flat_param
    holders, mesh = _ranks(path, wrapper, handle)
    for at, parameter in enumerate(flat._params):  # noqa: SLF001
        name, shape, info = flat._fqns[at], tuple(flat._shapes[at]), flat._shard_param_infos[at]  # noqa: SLF001
        if flat._param_extensions[at] is not None:  # noqa: SLF001
            raise InvalidRequestError(
                f"not supported yet: parameter {name!r} of {path} is a DTensor inside of a "
                f"{_WRAPPER}: shard the model with fully_shard (FSDP2)",
                key=path,
            )
        box = whole(shape)
        if handle.uses_sharded_strategy:
            _check_order(path, name, shape, flat._strides[at])  # noqa: SLF001
            begin = info.intra_param_start_idx if info.in_shard else 0
            box = Box((begin,), (info.numel_in_shard if info.in_shard else 0,))
        know_piece(parameter, Piece(shape, box, holders, mesh))


def _check_order(path: str, name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Refuse a parameter whose elements FSDP1 has not laid out row by row."""
    if not torch.empty_strided(shape, strides, device="meta").is_contiguous():
        raise InvalidRequestError(
            f"parameter {name!r} of {path} was not contiguous when FSDP1 flattened it: make it "
            f"contiguous() before the module is wrapped",
            key=path,
        )


def _ranks(path: str, wrapper: Any, handle: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that have the same pieces as this one, and those that have any."""
    together = dist.get_process_group_ranks(wrapper.process_group)
    if not handle.uses_sharded_strategy:
        return tuple(sorted(together)), tuple(sorted(together))
    between = getattr(wrapper, "_inter_node_pg", None)
    if between is None:
        return (dist.get_rank(),), tuple(sorted(together))
    alike = dist.get_process_group_ranks(between)
    if len(alike) * len(together) != dist.get_world_size():
        raise InvalidRequestError(
            f"not supported yet: {path} is sharded over ranks {together} and copied to ranks "
            f"{alike}, which are not all: shard the model with fully_shard (FSDP2)",
            key=path,
        )
    return tuple(sorted(alike)), tuple(range(dist.get_world_size()))
