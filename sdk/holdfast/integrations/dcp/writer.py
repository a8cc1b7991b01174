"""Writes what DCP saves: each rank sends its segment, the coordinator lets all of them appear.

Nothing is visible in the folder until the coordinator has heard of all ranks.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as of_dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.bucket.folder import CheckpointFolder
from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step, run_id
from holdfast.core.shard import Shard
from holdfast.errors import ConflictError, InvalidRequestError, ManifestError, NotFoundError
from holdfast.format import blob as blobs
from holdfast.format.boxes import Box
from holdfast.format.manifest import check_notes
from holdfast.format.names import RESERVED, blob_name
from holdfast.format.segment import SegmentIdentity, TensorSpec, blob_spec, header_template
from holdfast.format.tree import Json, encode
from holdfast.integrations.dcp.places import Path, is_place, place_of
from holdfast.objectstore import ObjectStore, open_store
from holdfast.oneshot.exchange import JOB, forget, make_room, sweep, write_manifest
from holdfast.oneshot.sending import THREADS_COUNT, SentSegment, filler, send
from holdfast.oneshot.world import find_world
from holdfast.reading.dtypes import dtype_name
from holdfast.snapshot.plan import hash_of

SAVE = "dcp-save.json"
"""The object by which the coordinator tells the ranks which save this is; gone when it ends."""
_SAVE_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class _Value:
    """What a rank tells of an item that is no tensor."""

    value: object


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
        for item in plan.items:
            if item.index.fqn.partition(".")[0] in RESERVED:
                raise InvalidRequestError(
                    f"key {item.index.fqn!r} cannot be used: names that begin with "
                    f"{' or '.join(sorted(RESERVED))} are Holdfast's own",
                    key=item.index.fqn,
                )
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
        values = [i for i in plan.items if i.type is WriteItemType.BYTE_IO]
        results = [
            WriteResult(item.index, 0, _Value(_plain_value(planner, item))) for item in values
        ]
        items = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        tensors = [cast("torch.Tensor", planner.resolve_data(item)).detach() for item in items]
        specs = [_spec(item, tensor) for item, tensor in zip(items, tensors, strict=True)]
        by_name = {spec.fqn: tensor for spec, tensor in zip(specs, tensors, strict=True)}
        with ExitStack() as stack:
            store = stack.enter_context(closing(open_store(place_of(self.checkpoint_id))))
            undo = stack.enter_context(ExitStack())
            sent = _send(store, _told_run(store), self._rank, specs, by_name, undo)
            undo.pop_all()
        results += [
            WriteResult(item.index, spec.length_bytes, None)
            for item, spec in zip(items, specs, strict=True)
        ]
        results.append(WriteResult(of_dcp.MetadataIndex(SAVE), 0, sent))
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
        values = {
            r.index.fqn: r.storage_data.value for r in told if isinstance(r.storage_data, _Value)
        }
        with ExitStack() as stack:
            store = stack.enter_context(closing(open_store(place_of(self.checkpoint_id))))
            undo = stack.enter_context(ExitStack())
            for segment in sent:
                undo.callback(store.abort, segment.upload)
            self._check_same_save(sent)
            data = _text(metadata, values)
            spec = blob_spec(blob_name(0), len(data))
            text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            sent.append(_send(store, self._run, len(sent), [spec], {spec.fqn: text}, undo))
            make_room(store, {segment.upload.id for segment in sent}, overwrite=self._overwrite)
            undo.pop_all()
            self._commit(CheckpointFolder(store), sent)

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


def _send(
    store: ObjectStore,
    run: str,
    volume: int,
    specs: Sequence[TensorSpec],
    tensors: Mapping[str, torch.Tensor],
    undo: ExitStack,
) -> SentSegment:
    shard_id = ShardId(RunId(run), Step(0), Generation(0), Rank(0), volume)
    plan_hash = hash_of(specs, volume, 1)
    identity = SegmentIdentity(id=shard_id, job=JOB, world_size=1, plan_hash=plan_hash)
    template = header_template(identity, specs)
    header = template.fill(step=0, generation=0, parent=None)
    fill = filler([(0, header)], [(e.begin, tensors[e.spec.fqn]) for e in template.entries])
    shard = Shard(
        id=shard_id, job=JOB, world_size=1, plan_hash=plan_hash,
        length_bytes=template.length_bytes, root_digest=b"",
    )  # fmt: skip
    return send(CheckpointFolder(store), shard, fill, undo)


def _text(metadata: of_dcp.Metadata, values: Mapping[str, object]) -> bytes:
    """Return the state as one tree, with references to its tensors, as the planner took it apart.

    Raises:
        InvalidRequestError: longer than a text may be.
    """
    nested: dict[str, Any] = {}
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    for fqn in metadata.state_dict_metadata:
        value = values[fqn] if fqn in values else _Named(fqn)
        set_element(nested, paths.get(fqn, (fqn,)), value)
    tree: dict[str, Json] = {
        key: encode(value, path=key, leaf=_name_of) for key, value in nested.items()
    }
    static = blobs.Static(objects={}, aliases={}, world_size=1).encode()
    text = blobs.join(static, blobs.Live(tree=tree).encode())
    if len(text) > blobs.BLOB_BYTES_MAX:
        raise InvalidRequestError(
            f"values of {len(text)} bytes exceed {blobs.BLOB_BYTES_MAX}: keep big ones as tensors"
        )
    return text


@dataclass(frozen=True, slots=True)
class _Named:
    """Stands for a tensor in the tree."""

    fqn: str


def _name_of(value: object, path: str) -> str | None:
    del path
    return value.fqn if isinstance(value, _Named) else None
