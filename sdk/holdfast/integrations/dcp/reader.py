"""Reads what DCP loads, from any checkpoint: any box of a tensor, which is one chunk to DCP."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from typing import Any, Self

from torch.distributed.checkpoint import metadata as of_dcp
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.bucket.folder import CheckpointFolder
from holdfast.errors import NotFoundError
from holdfast.integrations.dcp.contents import Contents
from holdfast.integrations.dcp.places import Path, is_place, place_of
from holdfast.objectstore import open_store
from holdfast.oneshot.world import find_world
from holdfast.reading.folder import open_folder
from holdfast.reading.reader import Reader


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
        self._contents: Contents | None = None

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
            self._contents = Contents(reader.specs(), (reader.blob(0), reader.blob(rank)), rank)
            self._reader = reader
            self._opened = stack.pop_all()
        return self._contents.metadata(self.checkpoint_id)

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
        reader, contents = self._reader, self._contents
        if reader is None or contents is None:
            raise NotFoundError("read_metadata opens the checkpoint: call it first")
        try:
            contents.load(plan, planner, reader.read)
        finally:
            self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done
