"""A checkpoint as DCP sees it: each tensor one chunk, since any box of it can be read."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as of_dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from holdfast.errors import InvalidRequestError
from holdfast.format import blob as blobs
from holdfast.format.boxes import Box
from holdfast.format.names import blob_rank, name_for
from holdfast.format.segment import TensorSpec
from holdfast.format.tree import decode, encode
from holdfast.reading.dtypes import TORCH
from holdfast.reading.reader import Want
from holdfast.state.values import make_numpy


class Contents:
    """What a checkpoint has for one rank.

    Args:
        specs: Every tensor of it, by the name under which it is stored.
        texts: Of ranks; of values that several have the last one counts.
        rank: Whose own state is taken.
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], texts: tuple[bytes, ...], rank: int
    ) -> None:
        self._specs = specs
        names = [name for name in specs if blob_rank(name) is None]
        pairs = [(name_for(stored, rank), stored) for stored in sorted(names, reverse=True)]
        self._stored = {name: stored for name, stored in pairs if name is not None}
        marks = {name: torch.empty(0, device="meta") for name in self._stored}
        tree = {
            key: decode(
                value, leaf=lambda name: marks.get(name, _ABSENT), numpy=make_numpy, size=torch.Size
            )
            for text in dict.fromkeys(texts)
            for key, value in blobs.decode(text).live.tree.items()
        }
        flat, self._paths = flatten_state_dict(tree)
        self._values = {fqn: value for fqn, value in flat.items() if _is_all_there(value)}

    def metadata(self, checkpoint_id: str | None) -> of_dcp.Metadata:
        """Return what planners plan a load from."""
        described: dict[str, Any] = {}
        for name, stored in self._stored.items():
            shape = torch.Size(self._specs[stored].shape)
            described[name] = of_dcp.TensorStorageMetadata(
                of_dcp.TensorProperties(dtype=TORCH[self._specs[stored].dtype]),
                shape,
                [of_dcp.ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)],
            )
        described |= {fqn: of_dcp.BytesStorageMetadata() for fqn in self._values}
        return of_dcp.Metadata(
            described,
            planner_data={fqn: self._paths.get(fqn, (fqn,)) for fqn in described},
            storage_meta=of_dcp.StorageMeta(checkpoint_id=checkpoint_id),
        )

    def load(
        self, plan: LoadPlan, planner: LoadPlanner, read: Callable[[Sequence[Want]], None]
    ) -> None:
        """Have all tensors of a plan read at once, then give the planner them and the values."""
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        wants = [self._want(item, planner.resolve_tensor(item).detach()) for item in tensors]
        read(wants)
        for item, want in zip(tensors, wants, strict=True):
            planner.commit_tensor(item, want.target)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, _as_planners_expect(self._values[item.storage_index.fqn]))

    def _want(self, item: ReadItem, target: torch.Tensor) -> Want:
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        return Want(target, self._stored[item.storage_index.fqn], box, converted=True)


_ABSENT = object()
"""Stands for an object that is no plain value, such as a module: its tensors are there by name."""


def _is_all_there(value: object) -> bool:
    """Tell whether a value is plain through and through, without tensors or objects inside."""
    try:
        encode(value, path="", leaf=lambda _value, _path: None)
    except InvalidRequestError:
        return False
    return True


def _as_planners_expect(value: object) -> io.BytesIO:
    """Return a value as planners of DCP read it; it is pickled here and comes from no store."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
