"""What a rank saves of a sharded state dict of Megatron, and what it fills of one.

Of replicas the main one saves. Rank 0's text names all tensors and has all ``ShardedObject``s, as
typed JSON with their tensors beside them: nothing is pickled (P9).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica

from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.format import blob as blobs
from holdfast.format.boxes import Box, intersect, whole
from holdfast.format.segment import TensorSpec
from holdfast.format.tree import Json, decode, encode
from holdfast.integrations.megatron.naming import Placed, placed
from holdfast.oneshot.world import Agreement, World
from holdfast.reading.dtypes import TORCH, dtype_name
from holdfast.reading.reader import Want
from holdfast.state.values import make_numpy

STREAM = "/BytesIO"
"""Behind the key of an object that is an ``io.BytesIO``, as Transformer Engine has them."""

_NAMES_SHOWN_MAX = 5


@dataclass(slots=True)
class Saved:
    """What this rank saves; ``held_bytes`` is what it has of the state, replicas too.

    ``tree`` has the objects, and the names of tensors of which this rank has the first element.
    ``elements``: how many of each tensor it saves.
    """

    tensors: list[tuple[TensorSpec, torch.Tensor]] = field(default_factory=list)
    tree: dict[str, Json] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    held_bytes: int = 0

    def add(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], box: Box) -> None:
        """Take a region of a tensor."""
        if name in self.elements:  # the same box twice, as of tied weights
            return
        dtype = dtype_name(name, tensor)
        self.tensors.append((TensorSpec(fqn=name, dtype=dtype, shape=shape, box=box), tensor))
        self.elements[name] = box.elements_count
        if not any(box.offsets):
            self.shapes[name] = shape


def taken(state: object) -> Saved:
    """Return what this rank saves of a sharded state dict, as Megatron gives it to strategies.

    Raises:
        InvalidRequestError: what cannot be saved; names its key.
    """
    saved = Saved()
    leaves = list(_leaves(state))
    for one in placed(leaf for leaf in leaves if isinstance(leaf, ShardedTensor)):
        data = _memory(one)
        saved.held_bytes += data.nbytes
        if is_main_replica(one.shard.replica_id):
            saved.add(one.name, data, one.shape, one.box)
    for name in saved.shapes:
        saved.tree[name] = {"$ref": name}
    for leaf in leaves:
        if isinstance(leaf, ShardedObject) and is_main_replica(leaf.replica_id):
            _add_object(saved, leaf)
    return saved


def _memory(one: Placed) -> torch.Tensor:
    data, key = one.shard.data, one.shard.key
    if type(data) not in (torch.Tensor, torch.nn.Parameter):
        raise InvalidRequestError(
            f"the data of {key!r} are a {type(data).__name__} on this rank, not a plain tensor: "
            f"such shards are not saved",
            key=key,
        )
    return cast("torch.Tensor", data.detach())


def _add_object(saved: Saved, found: Any) -> None:
    def leaf(value: object, path: str) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        tensor = value.detach()
        saved.add(path, tensor, tuple(tensor.shape), whole(tuple(tensor.shape)))
        saved.held_bytes += tensor.nbytes
        return path

    key, value = found.unique_key, found.data
    if isinstance(value, io.BytesIO):
        key, value = key + STREAM, value.getvalue()
    saved.tree[key] = encode(value, path=key, leaf=leaf)


def told_to_rank_0(saved: Saved, world: World) -> dict[str, Json]:
    """Return on rank 0 the tree of all ranks, on the others nothing; collective.

    Raises:
        InvalidRequestError: main replicas leave a hole in a tensor, or overlap; names it.
    """
    said = {"tree": saved.tree, "elements": saved.elements, "shapes": saved.shapes}
    texts = world.gather(json.dumps(said).encode())
    tree: dict[str, Json] = {}
    with Agreement(world):
        if world.rank == 0:
            heard = [json.loads(text) for text in texts]
            _check_covered(heard)
            for of_rank in heard:
                tree.update(of_rank["tree"])
    return tree


def _check_covered(heard: Sequence[Mapping[str, Any]]) -> None:
    counts: dict[str, int] = {}
    shapes: dict[str, Sequence[int]] = {}
    for of_rank in heard:
        shapes.update(of_rank["shapes"])
        for name, count in of_rank["elements"].items():
            counts[name] = counts.get(name, 0) + count
    for name, count in counts.items():
        if name not in shapes or whole(tuple(shapes[name])).elements_count != count:
            has = shapes.get(name, "of which no rank has the first")
            raise InvalidRequestError(
                f"main replicas save {count} elements of {name!r} {has}: give each shard one main "
                f"replica",
                key=name,
            )


class Load:
    """Fills a sharded state dict from a checkpoint.

    Args:
        specs: Every tensor of it.
        text: Of rank 0.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], text: bytes) -> None:
        self._specs = specs
        self.tree = blobs.decode(text).live.tree
        self._missing: list[str] = []
        self._wants: list[Want] = []
        self._targets: dict[int, torch.Tensor] = {}

    def load(self, state: object, read: Callable[[Sequence[Want]], None]) -> Any:
        """Return ``state`` with tensors and values in the place of shards; shards are filled.

        Raises:
            NotFoundError: the checkpoint lacks some of it; names them.
            InvalidRequestError: a tensor has another shape.
            CheckpointError: bytes are not what was saved, or do not come.
        """
        for one in placed(leaf for leaf in _leaves(state) if isinstance(leaf, ShardedTensor)):
            self._targets[id(one.shard)] = self._want(one)
        filled = self._filled(state)
        if self._missing:
            shown = ", ".join(map(repr, self._missing[:_NAMES_SHOWN_MAX]))
            raise NotFoundError(
                f"the checkpoint has no {shown}{' …' * (len(self._missing) > _NAMES_SHOWN_MAX)}"
            )
        read(self._wants)
        return filled

    def _want(self, one: Placed) -> torch.Tensor:
        shard, spec = one.shard, self._specs.get(one.name)
        if shard.data is None:
            shard.init_data("cpu", torch.empty)
        target = _memory(one)
        if spec is None:
            self._missing.append(one.name)
            return target
        box = one.box
        if spec.shape != one.shape:
            if not shard.allow_shape_mismatch or len(spec.shape) != len(one.shape):
                raise InvalidRequestError(
                    f"tensor {one.name!r} is {list(spec.shape)} in the checkpoint and "
                    f"{list(one.shape)} here",
                    key=shard.key,
                )
            target.zero_()
            shared = intersect(box, whole(spec.shape))
            if shared is None:
                return target
            place = tuple(
                slice(begin - own, begin - own + length)
                for begin, own, length in zip(
                    shared.offsets, box.offsets, shared.lengths, strict=True
                )
            )
            self._wants.append(Want(target[place], one.name, shared, converted=True))
            return target
        self._wants.append(Want(target, one.name, box, converted=True))
        return target

    def _filled(self, state: Any) -> Any:
        if isinstance(state, dict):
            return {key: self._filled(value) for key, value in state.items()}
        if isinstance(state, list):
            return [self._filled(value) for value in state]
        if isinstance(state, ShardedTensor):
            return self._targets[id(state)]
        return self._object(state) if isinstance(state, ShardedObject) else state

    def _object(self, asked: Any) -> object:
        key = asked.unique_key
        if key + STREAM in self.tree:
            return io.BytesIO(cast("bytes", self._decoded(key + STREAM)))
        if key in self.tree:
            return self._decoded(key)
        self._missing.append(key)
        return None

    def _decoded(self, key: str) -> object:
        return decode(self.tree[key], leaf=self._new, numpy=make_numpy, size=torch.Size)

    def _new(self, name: str) -> torch.Tensor:
        spec = self._specs[name]
        target = torch.empty(spec.shape, dtype=TORCH[spec.dtype])
        self._wants.append(Want(target, name, spec.box))
        return target


def _leaves(state: object) -> Iterator[object]:
    if isinstance(state, (dict, list)):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _leaves(value)
    else:
        yield state
