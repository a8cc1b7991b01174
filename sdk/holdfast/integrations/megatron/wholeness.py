"""Whether what all ranks of Megatron save is all of its state; and the text of it. Pure.

Megatron's own check leaves out irregular grids and can be turned off. A save that lacks something
would be a checkpoint that no rank can load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.core.shard import PRIME
from holdfast.errors import InvalidRequestError
from holdfast.format.boxes import whole
from holdfast.format.tally import tally
from holdfast.format.tree import Json

STREAM = "/BytesIO"
"""Behind the key of an object that is an ``io.BytesIO``, as Transformer Engine has them."""

OBJECT = "/shard_"
"""In the name of an object and of its tensors, as Megatron has it, and in no shard's."""

Told = Mapping[str, Any]
"""What a rank has told: ``Saved.saves``, and ``Saved.holds`` unless one before it has the same."""


def whole_tree(heard: Sequence[Told]) -> dict[str, Json]:
    """Return the tree of all ranks: their objects, and the name of each tensor.

    Raises:
        InvalidRequestError: something is missing, there twice or of two kinds; names it.
    """
    tree: dict[str, Json] = {}
    for rank, told in enumerate(heard):
        for key, value in told["tree"].items():
            if key in tree:
                raise InvalidRequestError(
                    f"object {key!r} is saved by rank {rank} as well: give it one main replica"
                )
            tree[key] = value
    for key in (key for told in heard for key in told["objects"]):
        if key not in tree and key + STREAM not in tree:
            raise InvalidRequestError(
                f"object {key!r} has no main replica, so that it is not saved"
            )
    _check_stacks(heard)
    return {**{name: {"$ref": name} for name in _names(heard)}, **tree}


def _names(heard: Sequence[Told]) -> Iterable[str]:
    """Return the names of all tensors, each of which is saved once."""
    kinds: dict[str, tuple[int, str, list[int]]] = {}
    tallies: dict[str, list[int]] = {}
    for rank, told in enumerate(heard):
        for name, (dtype, shape) in told.get("held", {}).items():
            first, *kind = kinds.setdefault(name, (rank, dtype, shape))
            if kind != [dtype, shape]:
                raise InvalidRequestError(
                    f"tensor {name!r} is {kind[0]} {kind[1]} on rank {first} and {dtype} {shape} "
                    f"on rank {rank}",
                    key=name,
                )
        for name, saved in told["tallies"].items():
            tallies.setdefault(name, []).append(saved)
    for name, (_, dtype, shape) in kinds.items():
        if name not in tallies:
            raise InvalidRequestError(
                f"tensor {name!r} has no main replica, so that it is not saved", key=name
            )
        if sum(tallies[name]) % PRIME != tally(name, dtype, shape, whole(shape)):
            raise InvalidRequestError(
                f"main replicas leave a hole in tensor {name!r} {shape}, or overlap: give each "
                f"shard one main replica",
                key=name,
            )
    return kinds


def _check_stacks(heard: Sequence[Told]) -> None:
    """Refuse a key of which a layer is nowhere: its tensor has no name, so that none is missed."""
    lengths: dict[str, list[int]] = {}
    indices: dict[str, set[str]] = {}
    for told in heard:
        for key, (of_rank, found) in told.get("stacks", {}).items():
            if lengths.setdefault(key, of_rank) != of_rank:
                raise InvalidRequestError(
                    f"the axes that are prepended to {key!r} are {lengths[key]} long on one rank "
                    f"and {of_rank} on another",
                    key=key,
                )
            indices.setdefault(key, set()).update(found)
    for key, found in indices.items():
        if len(found) != math.prod(lengths[key]):
            raise InvalidRequestError(
                f"ranks have {len(found)} of the {math.prod(lengths[key])} indices of the axes "
                f"that are prepended to {key!r}",
                key=key,
            )
