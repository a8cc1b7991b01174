"""The strategies that Megatron calls, and where what they are given goes: a folder.

Megatron writes ``common.pt`` before it calls and ``metadata.json`` after; so a save that was killed
is no checkpoint to it. The digest of ``common.pt`` is in the checkpoint: one of another save, as
where a save over an older one failed, is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import (
    LoadShardedStrategy,
    SaveShardedStrategy,
)

from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.holding import opened
from holdfast.errors import ConflictError, NotFoundError, UnsupportedFormatError
from holdfast.format.digest import part_digest
from holdfast.format.names import blob_rank
from holdfast.format.segment import TensorSpec
from holdfast.format.tree import Json
from holdfast.integrations.megatron.contents import Load, Saved, told_to_rank_0
from holdfast.integrations.megatron.naming import keys_of
from holdfast.integrations.megatron.wholeness import OBJECT, STREAM
from holdfast.oneshot.world import Agreement, World, find_world
from holdfast.oneshot.writing import write_source
from holdfast.reading.dtypes import TORCH
from holdfast.reading.folder import open_folder
from holdfast.reading.reader import Want
from holdfast.state.given import Given

BACKEND, VERSION = "holdfast", 1
COMMON = "common.pt"
"""Megatron's file of what is not sharded."""


class Opened(Protocol):
    """A checkpoint that is read."""

    def specs(self) -> Mapping[str, TensorSpec]:
        """Return every tensor."""
        ...

    def text(self) -> bytes:
        """Return the text of rank 0."""
        ...

    def read(self, wants: Sequence[Want]) -> None:
        """Fill every target."""
        ...


class Storage(Protocol):
    """Where the sharded part of checkpoints goes."""

    def save(self, folder: str, world: World, saved: Saved, tree: Mapping[str, Json]) -> None:
        """Return once all that the ranks save is a checkpoint; collective.

        Args:
            folder: Megatron's.
            world: The ranks.
            saved: What this rank saves.
            tree: Its tree: that of all ranks on rank 0, empty on the others.
        """
        ...

    def opened(self, folder: str) -> Any:
        """Return a context of an ``Opened``: the checkpoint that goes with Megatron's folder."""
        ...


class Folder:
    """Storage in Megatron's folder itself."""

    def save(self, folder: str, world: World, saved: Saved, tree: Mapping[str, Json]) -> None:
        """See ``Storage.save``; what is there already is replaced once all bytes are there."""
        write_source(folder, _given(world, saved, tree), world, overwrite=True, notes={})

    @contextmanager
    def opened(self, folder: str) -> Iterator[Opened]:
        """See ``Storage.opened``."""
        with ExitStack() as stack:
            checkpoint: CheckpointFolder = stack.enter_context(opened(folder))
            reader = stack.enter_context(open_folder(checkpoint, checkpoint.manifest()))
            yield _InFolder(reader)


class _InFolder:
    def __init__(self, reader: Any) -> None:
        self.specs = reader.specs
        self.read = reader.read
        self._reader = reader

    def text(self) -> bytes:
        return bytes(self._reader.blob(0))


@contextmanager
def _given(world: World, saved: Saved, tree: Mapping[str, Json]) -> Iterator[Given]:
    given = Given(rank=world.rank, world_size=world.size)
    given.give([*saved.tensors.values()], tree)
    yield given


class HoldfastSaveStrategy(SaveShardedStrategy):  # type: ignore[misc]
    """The ``sharded_strategy`` of ``dist_checkpointing.save``; all ranks save together.

    Args:
        storage: Where to; None: into the folder that ``save`` names.
    """

    def __init__(self, storage: Storage | None = None) -> None:
        super().__init__(BACKEND, VERSION)
        self._storage = storage or Folder()

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Tell that ``ShardedObject``s are saved beside tensors."""
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Return once it is committed; collective. If a rank fails, all hear of it.

        Raises:
            InvalidRequestError: what cannot be saved; names its key.
            CheckpointError: it is not saved.
        """
        folder, world = os.fspath(checkpoint_dir), find_world()
        saved, tree = told_to_rank_0(sharded_state_dict, world)
        with Agreement(world):
            if world.rank == 0:
                tree[COMMON] = _digest_of_common(folder)
        self._storage.save(folder, world, saved, tree)


class HoldfastLoadStrategy(LoadShardedStrategy):  # type: ignore[misc]
    """The ``sharded_strategy`` of ``dist_checkpointing.load``; each rank reads its boxes alone.

    Args:
        storage: Where from; None: from the folder that ``load`` names.
    """

    def __init__(self, storage: Storage | None = None) -> None:
        super().__init__()
        self._storage = storage or Folder()

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Tell that ``ShardedObject``s are loaded beside tensors."""
        return True

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> Any:
        """Return the state with tensors and values in the place of shards; collective.

        Tensors are filled where they are; a shard without data gets memory on the CPU.

        Raises:
            NotFoundError: there is no checkpoint, or it lacks a key; names it.
            InvalidRequestError: a tensor has another shape.
            ConflictError: ``common.pt`` is of another save.
            CheckpointError: bytes are not what was saved.
        """
        with Agreement(find_world()), self._open(checkpoint_dir) as (checkpoint, load):
            return load.load(sharded_state_dict, checkpoint.read)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Return each key with a ``ShardedTensor`` that has its dtype and global shape."""
        with self._open(checkpoint_dir) as (checkpoint, _):
            return _tensors(checkpoint.specs())

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Return tensors and objects without their data, by key."""
        with self._open(checkpoint_dir) as (checkpoint, load):
            keys = [key.removesuffix(STREAM) for key in load.tree if OBJECT in key]
            objects = {key: ShardedObject.empty_from_unique_key(key) for key in keys}
            return {**objects, **_tensors(checkpoint.specs())}

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise UnsupportedFormatError unless Holdfast wrote the checkpoint."""
        if loaded_backend != BACKEND:
            raise UnsupportedFormatError(
                f"the checkpoint is of the backend {loaded_backend!r}, not {BACKEND!r}: load it "
                f"without this strategy, and save it with it"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise UnsupportedFormatError if a later release wrote the checkpoint."""
        if loaded_version != VERSION:
            raise UnsupportedFormatError(
                f"the checkpoint has version {loaded_version}, and this release reads {VERSION}"
            )

    @contextmanager
    def _open(self, checkpoint_dir: str | Path) -> Iterator[tuple[Opened, Load]]:
        folder = os.fspath(checkpoint_dir)
        with self._storage.opened(folder) as checkpoint:
            load = Load(checkpoint.specs(), checkpoint.text())
            if load.tree.get(COMMON) != _digest_of_common(folder):
                raise ConflictError(
                    f"{Path(folder, COMMON)} is not the one that was saved with the tensors: "
                    f"another save has begun in this folder, or it was changed"
                )
            yield checkpoint, load


def _tensors(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    shapes = {name: spec.shape for name, spec in specs.items() if blob_rank(name) is None}
    return {
        key: ShardedTensor.from_rank_offsets(
            key, torch.empty(shape, dtype=TORCH[specs[name].dtype], device="meta")
        ).without_data()
        for key, (shape, name) in keys_of(shapes).items()
    }


def _digest_of_common(folder: str) -> str:
    try:
        return part_digest(Path(folder, COMMON).read_bytes()).hex()
    except OSError as cause:
        raise NotFoundError(f"{Path(folder, COMMON)}: {cause.strerror}") from cause
