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

from holdfast.errors import InvalidRequestError, ManifestError, NotFoundError
from holdfast.format import blob as blobs
from holdfast.format.boxes import Box, intersect, whole
from holdfast.format.digest import part_digest
from holdfast.format.segment import TensorSpec, is_usable
from holdfast.format.tally import tally
from holdfast.format.tree import Json, decode, encode
from holdfast.integrations.megatron.naming import Placed, check_object, placed
from holdfast.integrations.megatron.wholeness import STREAM, whole_tree
from holdfast.oneshot.world import Agreement, World
from holdfast.reading.dtypes import TORCH, dtype_name
from holdfast.reading.reader import Want
from holdfast.state.values import make_numpy

_NAMES_SHOWN_MAX = 5


@dataclass(slots=True)
class Saved:
    """What this rank saves; ``held_bytes`` is what it has of the state, replicas too.

    ``tree`` has the objects, ``objects`` the keys of those that it has as a replica, ``held`` the
    dtype and shape of each tensor of which it has a part, and ``stacks`` of each key with prepended
    axes their lengths, and the indices that it has.
    """

    tensors: dict[str, tuple[TensorSpec, torch.Tensor]] = field(default_factory=dict)
    tree: dict[str, Json] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    held: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    stacks: dict[str, tuple[tuple[int, ...], list[str]]] = field(default_factory=dict)
    held_bytes: int = 0

    def add(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], box: Box) -> None:
        """Save a region of a tensor, once for all that hold the same."""
        spec = TensorSpec(fqn=name, dtype=dtype_name(name, tensor), shape=shape, box=box)
        self.tensors.setdefault(name, (spec, tensor))
        self.held_bytes += tensor.nbytes

    def saves(self) -> bytes:
        """Return what rank 0 hears of what this rank saves."""
        tallies = {name: tally(*spec) for name, (spec, _) in self.tensors.items()}
        told = {"tree": self.tree, "objects": self.objects, "tallies": tallies}
        return json.dumps(told).encode()

    def holds(self) -> bytes:
        """Return what rank 0 hears of what there is to save, from one of all ranks with the same.

        Data parallel ranks have; a thousand of them are not to tell it at each save.
        """
        return json.dumps({"held": self.held, "stacks": self.stacks}).encode()


def taken(state: object) -> Saved:
    """Return what this rank saves of a sharded state dict, as Megatron gives it to strategies.

    Raises:
        InvalidRequestError: what cannot be saved; names its key.
    """
    saved = Saved()
    leaves = list(_leaves(state))
    for one in placed(leaf for leaf in leaves if isinstance(leaf, ShardedTensor)):
        data = _memory(one)
        if not is_usable(one.name):
            raise InvalidRequestError(f"tensor name {one.name[:80]!r} is not usable")
        saved.held[one.name] = dtype_name(one.name, data), one.shape
        if is_main_replica(one.shard.replica_id):
            saved.add(one.name, data, one.shape, one.box)
        else:
            saved.held_bytes += data.nbytes
        if one.stack:
            saved.stacks.setdefault(one.shard.key, (one.stack, []))[1].append(one.at)
    for leaf in leaves:
        if isinstance(leaf, ShardedObject):
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
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return None
        while path in saved.tensors:  # as of a dict with the keys 1 and "1"
            path += "'"
        tensor = cast("torch.Tensor", value).detach()
        saved.add(path, tensor, tuple(tensor.shape), whole(tuple(tensor.shape)))
        return path

    key, value = check_object(found), found.data
    if not is_main_replica(found.replica_id):
        saved.objects.append(key)
        return
    text_key = key + STREAM if type(value) is io.BytesIO else key
    if text_key in saved.tree:
        raise InvalidRequestError(f"this rank has two objects {key!r}", key=key)
    if type(value) is io.BytesIO:
        value = value.getvalue()
    saved.tree[text_key] = encode(value, path=key, leaf=leaf)


def told_to_rank_0(state: object, world: World) -> tuple[Saved, dict[str, Json]]:
    """Return what this rank saves, and on rank 0 the tree of all, else nothing; collective.

    Raises:
        InvalidRequestError: what cannot be saved; main replicas leave a hole in a tensor, or
            overlap; an object has none, or several; ranks do not mean the same by a key. It is
            named.
    """
    with Agreement(world) as agreed:
        saved = taken(state)
        saves, holds = saved.saves(), saved.holds()
        agreed.value = {"holds": part_digest(holds).hex()}
    digests = [of_rank["holds"] for of_rank in agreed.values]
    is_first = digests.index(digests[world.rank]) == world.rank
    texts = world.gather(b"[%b,%b]" % (saves, holds if is_first else b"{}"))
    tree: dict[str, Json] = {}
    with Agreement(world):
        if world.rank == 0:
            heard = [json.loads(text) for text in texts]
            tree = whole_tree([{**one, **other} for one, other in heard])
    return saved, tree


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
            data = self._decoded(key + STREAM)
            if type(data) is not bytes:
                raise ManifestError(f"state of {key!r} is not bytes")
            return io.BytesIO(data)
        if key in self.tree:
            return self._decoded(key)
        self._missing.append(key)
        return None

    def _decoded(self, key: str) -> object:
        return decode(self.tree[key], leaf=self._new, numpy=make_numpy, size=torch.Size)

    def _new(self, name: str) -> torch.Tensor:
        spec = self._specs.get(name)
        if spec is None:
            raise ManifestError(f"state refers to the tensor {name[:80]!r}, which is not there")
        target = torch.empty(spec.shape, dtype=TORCH[spec.dtype])
        self._wants.append(Want(target, name, spec.box))
        return target


def _leaves(state: object) -> Iterator[object]:
    if isinstance(state, (dict, list)):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _leaves(value)
    else:
        yield state
