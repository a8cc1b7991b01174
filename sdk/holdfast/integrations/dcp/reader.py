"""Reads what DCP loads, from any checkpoint: any box of a tensor, which is one chunk to DCP."""

from __future__ import annotations

import io
import os
from contextlib import ExitStack, closing
from typing import Any, Self

import torch
from torch.distributed.checkpoint import metadata as of_dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.bucket.folder import CheckpointFolder
from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.format import blob as blobs
from holdfast.format.boxes import Box
from holdfast.format.names import blob_rank, name_for
from holdfast.format.tree import decode, encode
from holdfast.integrations.dcp.places import Path, is_place, place_of
from holdfast.objectstore import open_store
from holdfast.oneshot.world import find_world
from holdfast.reading.dtypes import TORCH
from holdfast.reading.folder import open_folder
from holdfast.reading.reader import Reader, Want
from holdfast.state.values import make_numpy


class HoldfastReader(StorageReader):
    """Has ``dcp.load`` read Holdfast checkpoints, on any mesh: those of DCP and all others.

    Every part is verified before its bytes are used. Of a tensor each rank reads the boxes that it
    holds, and its dtype is converted if the state has another one. Values of ranks are loaded by
    the rank of the same number, modulo the number that saved.

    Args:
        path: Where the checkpoint is; the ``checkpoint_id`` of a load takes its place.
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self.checkpoint_id = None if path is None else os.fspath(path)
        self._opened = ExitStack()
        self._reader: Reader | None = None
        self._stored: dict[str, str] = {}
        self._values: dict[str, object] = {}

    def __getstate__(self) -> dict[str, object]:
        return {"checkpoint_id": self.checkpoint_id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["checkpoint_id"])  # type: ignore[misc]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what a load that failed before it read has left open; idempotent."""
        self._reader = None
        self._opened.close()

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Have the next load read ``checkpoint_id``; None: what the last one read."""
        self.close()
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Tell whether this names a folder or a store."""
        return is_place(checkpoint_id)

    def read_metadata(self, *args: Any, **named: Any) -> of_dcp.Metadata:
        """Return what is in the checkpoint: each tensor as one chunk, since any box can be read.

        Not called ``kwargs``: torch would try again, without the other ranks, after an error.

        Raises:
            NotFoundError: there is no checkpoint.
            CorruptionError: what is there breaks a rule of the format.
        """
        del args, named
        self.close()
        with ExitStack() as stack:
            store = stack.enter_context(closing(open_store(place_of(self.checkpoint_id))))
            folder = CheckpointFolder(store)
            manifest = folder.manifest()
            reader = stack.enter_context(open_folder(folder, manifest))
            rank = find_world(alone=True).rank % manifest.world_size
            names = [name for name in reader.specs() if blob_rank(name) is None]
            pairs = [(name_for(stored, rank), stored) for stored in sorted(names, reverse=True)]
            self._stored = {name: stored for name, stored in pairs if name is not None}
            found = self._described(reader, rank)
            self._reader = reader
            self._opened = stack.pop_all()
        return found

    def _described(self, reader: Reader, rank: int) -> of_dcp.Metadata:
        specs = reader.specs()
        described: dict[str, Any] = {}
        for name, stored in self._stored.items():
            spec = specs[stored]
            described[name] = of_dcp.TensorStorageMetadata(
                of_dcp.TensorProperties(dtype=TORCH[spec.dtype]),
                torch.Size(spec.shape),
                [of_dcp.ChunkStorageMetadata(torch.Size(spec.box.offsets), torch.Size(spec.shape))],
            )
        marks = {name: torch.empty(0, device="meta") for name in self._stored}
        tree = {
            key: decode(
                value, leaf=lambda name: marks.get(name, _ABSENT), numpy=make_numpy, size=torch.Size
            )
            for key, value in blobs.decode(reader.blob(rank)).live.tree.items()
        }
        flat, paths = flatten_state_dict(tree)
        self._values = {
            fqn: value
            for fqn, value in flat.items()
            if not isinstance(value, torch.Tensor) and _is_all_there(value)
        }
        described |= {fqn: of_dcp.BytesStorageMetadata() for fqn in self._values}
        return of_dcp.Metadata(
            described,
            planner_data={fqn: paths.get(fqn, (fqn,)) for fqn in described},
            storage_meta=of_dcp.StorageMeta(checkpoint_id=self.checkpoint_id),
        )

    def set_up_storage_reader(
        self, metadata: of_dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: ``read_metadata`` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all that the plan asks for, then close the checkpoint.

        Raises:
            NotReadyError: pieces of a tensor are missing.
            DigestMismatchError: bytes differ from those that were saved.
        """
        reader = self._reader
        if reader is None:
            raise NotFoundError("read_metadata opens the checkpoint: call it first")
        wants, after = [], []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                continue
            stored = self._stored[item.storage_index.fqn]
            target = planner.resolve_tensor(item).detach()
            dtype = TORCH[reader.specs()[stored].dtype]
            read = target if target.dtype == dtype else torch.empty(item.lengths, dtype=dtype)
            wants.append(Want(read, stored, Box(tuple(item.storage_offsets), tuple(item.lengths))))
            after.append((item, target, read))
        try:
            reader.read(wants)
        finally:
            self.close()
        for item, target, read in after:
            if read is not target:
                target.copy_(read)
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, _as_planners_expect(self._values[item.storage_index.fqn]))
        done: Future[None] = Future()
        done.set_result(None)
        return done


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
