"""Whether what all ranks of Megatron save is all of its state; and the text of it. Pure.

Megatron's own check leaves out irregular grids and can be turned off. A save that lacks something
would be a checkpoint that no rank can load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
"""What a rank has told: see ``Saved.told``."""


def whole_tree(heard: Sequence[Told]) -> dict[str, Json]:
    """Return the tree of all ranks: their objects, and the name of each tensor.

    Raises:
        InvalidRequestError: something is missing, there twice or of two kinds; names it.
    """
    tree: dict[str, Json] = {}
    for rank, told in enumerate(heard):
        for key, value in told["tree"].items():
            if tree.setdefault(key, value) != value:
                raise InvalidRequestError(
                    f"object {key!r} is another one on rank {rank}: give each one main replica"
                )
    for key in (key for told in heard for key in told["objects"]):
        if key not in tree and key + STREAM not in tree:
            raise InvalidRequestError(
                f"object {key!r} has no main replica, so that it is not saved"
            )
    _check_stacks(heard)
    _check_tensors(heard)
    names = {name: None for told in heard for name in told["tensors"] if OBJECT not in name}
    return {**{name: {"$ref": name} for name in names}, **tree}


def _check_tensors(heard: Sequence[Told]) -> None:
    kinds: dict[str, tuple[int, str, list[int]]] = {}
    tallies: dict[str, list[int]] = {}
    for rank, told in enumerate(heard):
        for name, (dtype, shape, saved) in told["tensors"].items():
            first, *kind = kinds.setdefault(name, (rank, dtype, shape))
            if kind != [dtype, shape]:
                raise InvalidRequestError(
                    f"tensor {name!r} is {kind[0]} {kind[1]} on rank {first} and {dtype} {shape} "
                    f"on rank {rank}",
                    key=name,
                )
            tallies.setdefault(name, []).extend([] if saved is None else [saved])
    for name, saved in tallies.items():
        _, dtype, shape = kinds[name]
        if not saved:
            raise InvalidRequestError(
                f"tensor {name!r} has no main replica, so that it is not saved", key=name
            )
        if sum(saved) % PRIME != tally(name, dtype, shape, whole(shape)):
            raise InvalidRequestError(
                f"main replicas leave a hole in tensor {name!r} {shape}, or overlap: give each "
                f"shard one main replica",
                key=name,
            )


def _check_stacks(heard: Sequence[Told]) -> None:
    """Refuse a key of which a layer is nowhere: its tensor has no name, so that none is missed."""
    lengths: dict[str, list[int]] = {}
    indices: dict[str, set[str]] = {}
    for told in heard:
        for key, (of_rank, found) in told["stacks"].items():
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
