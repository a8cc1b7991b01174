"""Writes what DCP saves: each rank sends its segment, the coordinator lets all of them appear.

Nothing is visible in the folder until the coordinator has heard of all ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from secrets import token_hex
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as of_dcp
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.bucket.folder import CheckpointFolder
from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step, run_id
from holdfast.core.shard import Shard
from holdfast.errors import ConflictError, InvalidRequestError, ManifestError, NotFoundError
from holdfast.format import blob as blobs
from holdfast.format.manifest import check_notes
from holdfast.format.names import blob_name
from holdfast.format.segment import SegmentIdentity, TensorSpec, blob_spec, header_template
from holdfast.integrations.dcp.items import check_names, items_of, tree_of, values_of
from holdfast.integrations.dcp.places import Path, is_place, place_of
from holdfast.objectstore import ObjectStore, open_store
from holdfast.oneshot.exchange import JOB, forget, make_room, sweep, write_manifest
from holdfast.oneshot.sending import THREADS_COUNT, SentSegment, filler, send
from holdfast.oneshot.world import find_world
from holdfast.snapshot.plan_hash import hash_of

SAVE = "dcp-save.json"
"""The object by which the coordinator tells the ranks which save this is; gone when it ends."""
_SAVE_BYTES_MAX = 4096


class HoldfastWriter(StorageWriter):
    """Has ``dcp.save`` and ``dcp.async_save`` write Holdfast checkpoints.

    One object serves any number of saves, one after the other, and may be pickled between them.

    Args:
        path: A folder for one checkpoint, or ``s3://bucket/prefix``. All ranks must see the same.
            The ``checkpoint_id`` of a save takes its place.
        overwrite: Replace a checkpoint that is there; else it is refused.
        notes: The user's metadata: plain JSON, at most 16 KiB.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        overwrite: bool = True,
        notes: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        try:
            check_notes(notes or {})
        except ManifestError as cause:
            raise InvalidRequestError(cause.message) from cause
        self.checkpoint_id = None if path is None else os.fspath(path)
        self._overwrite = overwrite
        self._notes = dict(notes or {})
        self._rank = 0
        self._run = ""

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Have the next save go to ``checkpoint_id``; None: to where the last one went."""
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)
        self._run = ""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Tell whether this names a folder or a store."""
        return is_place(checkpoint_id)

    def storage_meta(self) -> of_dcp.StorageMeta:
        """Return where the checkpoint goes."""
        return of_dcp.StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save; torch gives rank and collectives only to what is called ``kwargs``.

        Raises:
            InvalidRequestError: there is no path, or ranks are to save without each other.
        """
        del args
        if not kwargs.get("use_collectives", True):
            raise InvalidRequestError("use_collectives=False would write a checkpoint of each rank")
        place_of(self.checkpoint_id)
        rank = kwargs.get("rank")
        self._rank = 0 if is_coordinator else find_world().rank if rank is None else int(rank)
        self._run = ""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is.

        Raises:
            InvalidRequestError: a name that Holdfast needs for itself.
        """
        check_names(plan)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are; tell the ranks which save this is.

        It cannot be told in a plan: planners keep plans from one save to the next.

        Raises:
            AlreadyExistsError: there is a checkpoint, and it is not to be replaced.
        """
        self._run = token_hex(16)
        with closing(open_store(place_of(self.checkpoint_id), make=True)) as store:
            sweep(store, overwrite=self._overwrite)
            store.put(SAVE, json.dumps({"run": self._run}).encode())
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Send this rank's segment; nobody sees it until ``finish``.

        Raises:
            InvalidRequestError: a value that only pickle could express, or a tensor that cannot be
                saved; names its key.
        """
        items = items_of(plan, planner)
        with ExitStack() as stack:
            store = stack.enter_context(closing(open_store(place_of(self.checkpoint_id))))
            undo = stack.enter_context(ExitStack())
            sent = _send(store, _told_run(store), self._rank, items.tensors, undo)
            undo.pop_all()
        results = [*items.results, WriteResult(of_dcp.MetadataIndex(SAVE), 0, sent)]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: of_dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: let all segments appear and write the manifest, last of all.

        Raises:
            ConflictError: another save is writing into the folder.
        """
        told = [result for of_rank in results for result in of_rank]
        sent = [r.storage_data for r in told if isinstance(r.storage_data, SentSegment)]
        with ExitStack() as stack:
            store = stack.enter_context(closing(open_store(place_of(self.checkpoint_id))))
            undo = stack.enter_context(ExitStack())
            for segment in sent:
                undo.callback(store.abort, segment.upload)
            self._check_same_save(sent)
            data = _text(metadata, values_of(told))
            spec = blob_spec(blob_name(0), len(data))
            text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            sent.append(_send(store, self._run, len(sent), [(spec, text)], undo))
            make_room(store, {segment.upload.id for segment in sent}, overwrite=self._overwrite)
            self._commit(CheckpointFolder(store), sent)
            undo.pop_all()

    def _check_same_save(self, sent: Sequence[SentSegment]) -> None:
        volumes = [segment.sidecar.shard.id.volume for segment in sent]
        runs = {segment.sidecar.shard.id.run for segment in sent}
        if sorted(volumes) != list(range(len(sent))) or runs != {self._run}:
            raise ConflictError(f"another save is writing into {self.checkpoint_id}")

    def _commit(self, folder: CheckpointFolder, sent: Sequence[SentSegment]) -> None:
        with ThreadPoolExecutor(THREADS_COUNT, "holdfast-save") as pool:
            list(pool.map(lambda segment: segment.finish(folder), sent))
            folder.store.delete([SAVE])
            shards = sorted((s.sidecar.shard for s in sent), key=lambda shard: shard.id)
            write_manifest(folder, tuple(shards), self._notes)
            try:
                list(pool.map(lambda segment: segment.check_ours(folder), sent))
            except ConflictError:
                forget(folder, RunId(self._run))
                raise


def _told_run(store: ObjectStore) -> str:
    """Return which save this is, as the coordinator has told."""
    try:
        told = json.loads(store.get(SAVE, length_bytes_max=_SAVE_BYTES_MAX))
        return run_id(told["run"])
    except (NotFoundError, ValueError, KeyError, TypeError) as cause:
        raise ConflictError(
            f"{store.url} does not tell which save this is: another one has ended there, or this "
            f"rank sees another folder than the coordinator"
        ) from cause


def _send(
    store: ObjectStore,
    run: str,
    volume: int,
    tensors: Sequence[tuple[TensorSpec, torch.Tensor]],
    undo: ExitStack,
) -> SentSegment:
    shard_id = ShardId(RunId(run), Step(0), Generation(0), Rank(0), volume)
    specs = [spec for spec, _ in tensors]
    by_name = {spec.fqn: tensor for spec, tensor in tensors}
    plan_hash = hash_of(specs, volume, 1)
    identity = SegmentIdentity(id=shard_id, job=JOB, world_size=1, plan_hash=plan_hash)
    template = header_template(identity, specs)
    header = template.fill(step=0, generation=0, parent=None)
    fill = filler([(0, header)], [(e.begin, by_name[e.spec.fqn]) for e in template.entries])
    shard = Shard(
        id=shard_id, job=JOB, world_size=1, plan_hash=plan_hash,
        length_bytes=template.length_bytes, root_digest=b"",
    )  # fmt: skip
    return send(CheckpointFolder(store), shard, fill, undo)


def _text(metadata: of_dcp.Metadata, values: Mapping[str, object]) -> bytes:
    """Return the text of the checkpoint.

    Raises:
        InvalidRequestError: longer than a text may be.
    """
    static = blobs.Static(objects={}, aliases={}, world_size=1).encode()
    text = blobs.join(static, blobs.Live(tree=tree_of(metadata, values)).encode())
    if len(text) > blobs.BLOB_BYTES_MAX:
        raise InvalidRequestError(
            f"values of {len(text)} bytes exceed {blobs.BLOB_BYTES_MAX}: keep big ones as tensors"
        )
    return text
