"""Which box of a tensor lies in this process, and which ranks hold the same one.

A DTensor answers for the whole: its shape, its ``numel()`` and ``nbytes`` are global and its
``data_ptr()`` is 0. A parameter that was flattened answers for its piece, and does not say of what.
Who copies, counts or compares bytes asks here for what is local. One region per tensor and rank, a
box or a range of its elements, is all that FSDP, HSDP, tensor parallelism and their combinations
need.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from holdfast.errors import InvalidRequestError
from holdfast.format.boxes import Box, whole


class LocalBox(NamedTuple):
    """The region ``box`` of a tensor of this ``shape``, in the memory of ``tensor``.

    A box of one dim of a tensor of others is a range of its elements; see ``format.flat_ranges``.
    ``holders`` are the ranks that hold the same, in order, this one among them; None: a plain
    tensor, which does not tell. ``mesh`` are all ranks that hold any of it.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    holders: tuple[int, ...] | None = None
    mesh: tuple[int, ...] = ()


class Piece(NamedTuple):
    """What lies here of a plain parameter that does not tell; see ``LocalBox``."""

    shape: tuple[int, ...]
    box: Box
    holders: tuple[int, ...]
    mesh: tuple[int, ...]


_pieces: MutableMapping[torch.Tensor, Piece] = WeakTensorKeyDictionary()


def know_piece(parameter: torch.Tensor, piece: Piece) -> None:
    """Have ``local_box`` tell this of ``parameter`` as long as it lives."""
    _pieces[parameter] = piece


def is_sharded(tensor: torch.Tensor) -> bool:
    """Tell whether this is one rank's view of a tensor that several ranks hold: a DTensor."""
    return _class(type(tensor)).is_dtensor


def is_sharded_tensor(tensor: torch.Tensor) -> bool:
    """Tell whether this is a ``ShardedTensor``, of which only the shards have memory."""
    return _class(type(tensor)).is_sharded_tensor


def is_part(tensor: torch.Tensor) -> bool:
    """Tell whether several ranks hold a parameter together: a DTensor, flattened, a shard."""
    return is_sharded(tensor) or is_piece(tensor)


def is_piece(parameter: torch.Tensor) -> bool:
    """Tell whether this is a piece of a parameter and does not say so: flattened, or a shard."""
    piece = _piece(parameter, None)
    return _is_unknown(parameter) if piece is None else piece.holders != piece.mesh


def is_parameter(tensor: torch.Tensor) -> bool:
    """Tell whether an optimizer may step this: a parameter, or what is here of one."""
    return isinstance(tensor, nn.Parameter) or is_piece(tensor)


def is_nothing(parameter: torch.Tensor) -> bool:
    """Tell whether this is such a piece without elements: its optimizer never steps it here."""
    return is_piece(parameter) and not parameter.numel()


def shape_of(tensor: torch.Tensor, of: torch.Tensor | None = None) -> tuple[int, ...]:
    """Return the shape of all of a tensor; see ``local_box`` for ``of``."""
    piece = _piece(tensor, of)
    return tuple(tensor.shape) if piece is None else piece.shape


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of ``tensor`` in this process, as a plain tensor; an object that lasts."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]  # noqa: SLF001


def local_box(fqn: str, tensor: torch.Tensor, of: torch.Tensor | None = None) -> LocalBox:
    """Return what of ``tensor``, called ``fqn``, lies here.

    ``of`` is the parameter of which it is a state: what an optimizer keeps of a flattened one, in
    the shape of what is here of that, is the same piece of a tensor of the parameter's shape.

    Raises:
        InvalidRequestError: its values are not here (summands of a Partial, an uninitialized
            parameter), or are no box (nested, rows that lie apart); names tensor and mesh.
    """
    check_kind(fqn, tensor)
    piece = _piece(tensor, of)
    if piece is not None:
        if tensor.numel() != piece.box.elements_count:
            raise InvalidRequestError(
                f"parameter {fqn!r} is {tuple(tensor.shape)} and should be a piece of "
                f"{piece.box.elements_count} elements: do not save or restore inside of "
                f"summon_full_params()",
                key=fqn,
            )
        return LocalBox(tensor, *piece)
    if not is_sharded(tensor):
        return LocalBox(tensor, tuple(tensor.shape), whole(tensor.shape))
    return _of_mesh(fqn, tensor)


def check_kind(fqn: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor of which no rank can have a box, as ``local_box`` does; makes nothing.

    Raises:
        InvalidRequestError: it is of such a kind; names it.
    """
    kind = _class(type(tensor))
    if kind.is_sharded_tensor:  # it answers hardly any question
        raise InvalidRequestError(
            f"not supported yet: {fqn} is a ShardedTensor of its own; a module's can be saved, so "
            f"put the module that has it into the state",
            key=fqn,
        )
    if kind.is_lazy:
        raise InvalidRequestError(
            f"parameter {fqn!r} is not initialized yet: run one forward pass first", key=fqn
        )
    if tensor.is_nested:  # a strided one answers no question about its size
        raise InvalidRequestError(
            f"tensor {fqn!r} is nested and cannot be saved: put its parts (unbind()) into the "
            f"state",
            key=fqn,
        )
    if tensor.layout is not torch.strided:  # of a compressed one nothing else can be asked
        raise InvalidRequestError(
            f"tensor {fqn!r} is {tensor.layout}; only dense tensors can be saved: put its indices "
            f"and values, or to_dense() of it, into the state",
            key=fqn,
        )
    if _is_unknown(tensor):
        raise InvalidRequestError(
            f"parameter {fqn!r} was flattened by FullyShardedDataParallel, and what of it is here "
            f"only its module tells: put the whole wrapped module into the state, too",
            key=fqn,
        )
    _check_parts(fqn, local(tensor))


def _piece(tensor: torch.Tensor, of: torch.Tensor | None) -> Piece | None:
    if not _pieces:
        return None
    if of is None:
        return _pieces.get(tensor)
    return _pieces.get(of) if tensor.shape == of.shape and not is_sharded(tensor) else None


def _is_unknown(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "_fsdp_flattened", False) is True and tensor not in _pieces


def _check_parts(fqn: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that stands for others, such as quantized values and their scales.

    What is read of it are values of its dtype, and what is written into it is not what was read.
    """
    kind = type(tensor)
    if not hasattr(kind, "__tensor_flatten__"):
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = [getattr(tensor, name) for name in names]
    if [(part.shape, part.dtype) for part in inner] != [(tensor.shape, tensor.dtype)]:
        raise InvalidRequestError(
            f"tensor {fqn!r} is a {kind.__name__}, made of {', '.join(names)}: it cannot be saved "
            f"as one tensor. Put {fqn}.{names[0]} and the others into the state, or save the "
            f"weights as they were before they were converted",
            key=fqn,
        )


def _of_mesh(fqn: str, tensor: Any) -> LocalBox:
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    place = _place(shape, mesh, mesh.get_rank(), tensor.placements)
    if isinstance(place, str):
        raise InvalidRequestError(f"tensor {fqn!r} {place}", key=fqn)
    box, holders, ranks = place
    memory = tensor._local_tensor  # noqa: SLF001 - to_local() is a new object each time
    if memory.shape != box.lengths:
        raise InvalidRequestError(
            f"tensor {fqn!r} is {tuple(memory.shape)} on this rank and should be {box.lengths} of "
            f"{shape}{_named(mesh)}: give DTensor.from_local() the whole shape",
            key=fqn,
        )
    return LocalBox(memory, shape, box, holders, ranks)


@lru_cache(maxsize=4096)
def _place(
    shape: tuple[int, ...], mesh: Any, rank: int, placements: tuple[Any, ...]
) -> tuple[Box, tuple[int, ...], tuple[int, ...]] | str:
    """Return box, holders and mesh of every tensor that is cut so; or why it has no box here.

    To torch, meshes are equal that are not: each row of a grid to the others, and those of which
    this process once was another rank. So the rank belongs to what it is looked up by.
    """
    del rank
    # Not at the top: it takes a second, and whoever has a DTensor has imported it.
    from torch.distributed.tensor._utils import (  # noqa: PLC0415
        compute_local_shape_and_global_offset,
    )

    here = mesh.get_coordinate()
    if here is None:
        return f"lies on other ranks{_named(mesh)}: leave it out of the state of this one"
    for axis in range(mesh.ndim):
        fault = _fault(shape, mesh, placements, axis)
        if fault:
            return fault
    lengths, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    same = [
        slice(None) if placement.is_replicate() else place
        for place, placement in zip(here, placements, strict=True)
    ]
    return (
        Box(tuple(offsets) if all(lengths) else (0,) * len(shape), tuple(lengths)),
        tuple(sorted(mesh.mesh[tuple(same)].flatten().tolist())),
        tuple(sorted(mesh.mesh.flatten().tolist())),
    )


def _fault(shape: Sequence[int], mesh: Any, placements: Sequence[Any], axis: int) -> str:
    """Return why a tensor that is cut so along this axis has no box here; empty: it has."""
    placement, here = placements[axis], mesh.get_coordinate()
    # torch deals rows out in the order of the group, which is that of the ranks, and tells
    # where they are in that of the mesh.
    row = mesh.mesh[(*here[:axis], slice(None), *here[axis + 1 :])].tolist()
    if not placement.is_replicate() and row != sorted(row):
        return (
            f"lies on ranks {row}{_named(mesh)}, and torch does not say which rows each has: make "
            f"the mesh of ranks in ascending order"
        )
    if placement.is_partial():
        return (
            f"is a {placement!r}{_named(mesh)}: each rank has a summand, not a piece of it; "
            f"redistribute() it to Shard or Replicate first"
        )
    if not _is_one_run(shape, mesh, placements, axis):
        return (
            f"has rows on this rank that lie apart in the whole ({placement!r}{_named(mesh)}): "
            f"redistribute() it to Shard or Replicate first, or save it as it lies on the mesh "
            f"with the axis that cuts it, too"
        )
    return ""


def _is_one_run(shape: Sequence[int], mesh: Any, placements: Sequence[Any], axis: int) -> bool:
    """Tell whether each rank has one run of the rows that an axis deals out.

    Rows that were dealt out to one axis before another one cut them are a run only together with
    that other cut, or if there are so few that one rank has them all; see torch's _StridedShard.
    """
    factor = getattr(placements[axis], "split_factor", 1)
    if factor == 1 or mesh.shape[axis] == 1:
        return True
    dim: int = placements[axis].dim
    of_dim = (getattr(placement, "dim", None) == dim for placement in placements)
    cuts = [size if cut else 1 for size, cut in zip(mesh.shape, of_dim, strict=True)]
    few = math.prod(cuts) == cuts[axis] and shape[dim] <= factor
    return few or math.prod(cuts[axis + 1 :]) == factor


class _Class(NamedTuple):
    """What a class of tensors says of each of them."""

    is_dtensor: bool
    is_sharded_tensor: bool
    is_lazy: bool


@lru_cache(maxsize=256)
def _class(kind: type) -> _Class:
    """Return it by names: importing the classes takes a second."""
    names = {cls.__name__ for cls in kind.__mro__}
    return _Class("DTensor" in names, "ShardedTensor" in names, "UninitializedTensorMixin" in names)


def _named(mesh: Any) -> str:
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    sizes = (f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    return f" over mesh ({', '.join(sizes)})"
