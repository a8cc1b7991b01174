"""What a rank writes of a plan of DCP, and the tree that all values of a save make up.

Values that are no tensors stay typed JSON; what only pickle could express is refused by its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint import metadata as of_dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from holdfast.errors import InvalidRequestError
from holdfast.format.boxes import Box
from holdfast.format.names import RESERVED
from holdfast.format.segment import TensorSpec
from holdfast.format.tree import Json, encode
from holdfast.reading.dtypes import dtype_name

if TYPE_CHECKING:
    import io


@dataclass(frozen=True, slots=True)
class Value:
    """What a rank tells the coordinator of an item that is no tensor."""

    value: object


@dataclass(frozen=True, slots=True)
class Items:
    """What one rank writes: its tensors, and ``results`` for the coordinator, values among them."""

    tensors: Sequence[tuple[TensorSpec, torch.Tensor]]
    results: list[WriteResult]


def check_names(plan: SavePlan) -> None:
    """Raise InvalidRequestError if an item has a name that Holdfast needs for itself."""
    for item in plan.items:
        if item.index.fqn.partition(".")[0] in RESERVED:
            raise InvalidRequestError(
                f"key {item.index.fqn!r} cannot be used: names that begin with "
                f"{' or '.join(sorted(RESERVED))} are Holdfast's own",
                key=item.index.fqn,
            )


def items_of(plan: SavePlan, planner: SavePlanner) -> Items:
    """Return what the plan has a rank write.

    Raises:
        InvalidRequestError: a value that only pickle could express, or a tensor that cannot be
            saved; names its key.
    """
    values = [item for item in plan.items if item.type is WriteItemType.BYTE_IO]
    results = [WriteResult(item.index, 0, Value(_plain_value(planner, item))) for item in values]
    tensors = []
    for item in plan.items:
        if item.type is not WriteItemType.BYTE_IO:
            tensor = cast("torch.Tensor", planner.resolve_data(item)).detach()
            spec = _spec(item, tensor)
            tensors.append((spec, tensor))
            results.append(WriteResult(item.index, spec.length_bytes, None))
    return Items(tensors, results)


def values_of(results: Iterable[WriteResult]) -> dict[str, object]:
    """Return the values that ranks have told of, by name."""
    told = ((r.index.fqn, r.storage_data) for r in results)
    return {fqn: data.value for fqn, data in told if isinstance(data, Value)}


def tree_of(metadata: of_dcp.Metadata, values: Mapping[str, object]) -> dict[str, Json]:
    """Return the state as one tree with references to its tensors, as it was taken apart."""
    nested: dict[str, Any] = {}
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    for fqn in metadata.state_dict_metadata:
        value = values[fqn] if fqn in values else _Named(fqn)
        set_element(nested, paths.get(fqn, (fqn,)), value)
    return {key: encode(value, path=key, leaf=_name_of) for key, value in nested.items()}


def _plain_value(planner: SavePlanner, item: WriteItem) -> object:
    """Return the value of an item that is no tensor.

    Raises:
        InvalidRequestError: it is no plain data; names its key.
    """
    fqn = item.index.fqn
    if isinstance(planner, DefaultSavePlanner):
        value = planner.lookup_object(item.index)
    else:
        data = cast("io.BytesIO", planner.resolve_data(item))
        data.seek(0)
        value = torch.load(data, weights_only=True)
    encode(value, path=fqn, leaf=_no_tensor)
    if isinstance(value, Mapping):
        raise InvalidRequestError(
            f"value {fqn!r} is a dict: save with a planner that flattens the state", key=fqn
        )
    return value


def _no_tensor(value: object, path: str) -> str | None:
    if isinstance(value, torch.Tensor):
        raise InvalidRequestError(
            f"state {path!r} is a tensor in a value that DCP does not take apart: keep tensors in "
            f"dicts and lists",
            key=path,
        )
    return None


def _spec(item: WriteItem, tensor: torch.Tensor) -> TensorSpec:
    fqn, data = item.index.fqn, item.tensor_data
    assert data is not None, "an item that is a tensor says where it belongs"
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if tuple(tensor.shape) != box.lengths:
        raise InvalidRequestError(
            f"tensor {fqn!r} is {tuple(tensor.shape)} and was planned as {box.lengths}", key=fqn
        )
    return TensorSpec(fqn=fqn, dtype=dtype_name(fqn, tensor), shape=tuple(data.size), box=box)


@dataclass(frozen=True, slots=True)
class _Named:
    """Stands for a tensor in the tree."""

    fqn: str


def _name_of(value: object, path: str) -> str | None:
    del path
    return value.fqn if isinstance(value, _Named) else None
