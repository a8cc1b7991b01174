"""What Megatron's shards are called in a checkpoint, and which box of which tensor each is.

A rank has one box of a tensor in a checkpoint, and may have several shards of one key in Megatron:
those of its layers, which lie along axes that are prepended, and the halves of a gated projection.
Of the first each index is a tensor of its own, ``KEY/at_3``. Of the others each n-th part of the
tensor is one, ``KEY/part_0_of_2_along_0``: the halves stay halves whatever the number of ranks.
Names do not depend on ranks, so that any other sharding finds its boxes. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.errors import InvalidRequestError
from holdfast.format.boxes import Box
from holdfast.format.names import RESERVED

Shape = tuple[int, ...]

_NAME = re.compile(
    r"(?P<key>[^/]+)(?:/at_(?P<at>\d+(?:\.\d+)*))?(?:/part_\d+_of_(?P<parts>\d+)_along_(?P<axis>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Placed:
    """``shard`` of Megatron is the region ``box`` of a tensor ``name`` of ``shape``.

    ``stack``: the lengths of axes that are prepended, ``at`` which index of them the tensor is.
    """

    shard: Any
    name: str
    shape: Shape
    box: Box
    stack: Shape = ()
    at: str = ""


def placed(shards: Iterable[Any]) -> list[Placed]:
    """Return where all ``ShardedTensor`` objects of one rank belong.

    Raises:
        InvalidRequestError: shards that do not fit into names; names the key.
    """
    found: dict[str, list[Placed]] = {}
    for shard in shards:
        one = _alone(shard)
        found.setdefault(one.name, []).append(one)
    return [one for name, held in found.items() for one in _told_apart(name, held)]


def _alone(shard: Any) -> Placed:
    key, prepended = check_key(shard.key), int(shard.prepend_axis_num)
    offsets, shape = tuple(map(int, shard.global_offset)), tuple(map(int, shard.global_shape))
    lengths = (1,) * prepended + tuple(map(int, shard.local_shape))
    edges = zip(offsets, lengths, shape, strict=True)
    if any(begin < 0 or begin + length > end for begin, length, end in edges):
        raise InvalidRequestError(
            f"shard {list(offsets)} + {list(lengths)} of {key!r} is not in {list(shape)}", key=key
        )
    at = ".".join(map(str, offsets[:prepended]))
    return Placed(
        shard,
        f"{key}/at_{at}" if prepended else key,
        shape[prepended:],
        Box(offsets[prepended:], lengths[prepended:]),
        shape[:prepended],
        at,
    )


def check_key(key: object) -> str:
    """Return the key of a shard or an object.

    Raises:
        InvalidRequestError: it cannot be used in names.
    """
    text = str(key)
    if "/" in text or text.partition(".")[0] in RESERVED:
        raise InvalidRequestError(
            f"key {text!r} cannot be used: slashes, and names that begin with "
            f"{' or '.join(sorted(RESERVED))}, are Holdfast's own",
            key=text,
        )
    return text


def check_object(found: Any) -> str:
    """Return the name of a ``ShardedObject``, which Megatron can read back.

    Raises:
        InvalidRequestError: it cannot; names the key.
    """
    key = check_key(found.key)
    if not found.global_shape:
        raise InvalidRequestError(f"object {key!r} has no shape: Megatron's is (1,)", key=key)
    return str(found.unique_key)


def _told_apart(name: str, held: Sequence[Placed]) -> list[Placed]:
    boxes = sorted({one.box for one in held}, key=lambda box: box.offsets)
    if len(boxes) == 1:
        return list(held)
    count, shape = len(boxes), held[0].shape
    for axis in range(len(shape)):
        length = shape[axis] // count
        if length * count == shape[axis] and all(
            number * length <= box.offsets[axis]
            and box.offsets[axis] + box.lengths[axis] <= (number + 1) * length
            for number, box in enumerate(boxes)
        ):
            parts = {box: number for number, box in enumerate(boxes)}
            return [_part(one, parts[one.box], count, axis) for one in held]
    raise InvalidRequestError(
        f"this rank has {count} shards of {name!r} {list(shape)}, of which the first does not lie "
        f"in the first {count}-th of the tensor, the next in the next, and so on: give them keys "
        f"of their own (Megatron's singleton_local_shards)",
        key=name,
    )


def _part(one: Placed, number: int, count: int, axis: int) -> Placed:
    shape, offsets = list(one.shape), list(one.box.offsets)
    shape[axis] //= count
    offsets[axis] -= number * shape[axis]
    return replace(
        one,
        name=f"{one.name}/part_{number}_of_{count}_along_{axis}",
        shape=tuple(shape),
        box=Box(tuple(offsets), one.box.lengths),
    )


def keys_of(shapes: Mapping[str, Shape]) -> dict[str, tuple[Shape, str]]:
    """Return the global shape of each of Megatron's keys and a tensor of it, from stored shapes.

    Of ``a/at_0/part_0_of_2_along_0`` and ``a/at_1/...``, each (4, 3), that is (2, 8, 3) for ``a``.
    """
    found: dict[str, tuple[Shape, str]] = {}
    counts: dict[str, Shape] = {}
    for name, stored in shapes.items():
        match = _NAME.fullmatch(name)
        if match is None or (match["axis"] and int(match["axis"]) >= len(stored)):
            continue
        shape, key = list(stored), match["key"]
        if match["parts"]:
            shape[int(match["axis"])] *= int(match["parts"])
        at = tuple(int(number) + 1 for number in match["at"].split(".")) if match["at"] else ()
        before = counts.get(key, at)
        counts[key] = tuple(max(pair) for pair in zip(before, at, strict=False))
        found.setdefault(key, (tuple(shape), name))
    return {key: ((*counts[key], *shape), name) for key, (shape, name) in found.items()}
