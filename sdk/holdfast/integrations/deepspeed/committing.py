"""How the ranks of a save come to one checkpoint, in the background and without a collective call.

They see the same folder, and that is where they tell each other. Rank 0 lays down that the save
has begun. Each rank sends its segment, which nobody sees yet, and lays down what it has sent. Rank
0 lets all segments appear, writes the manifest, then DeepSpeed's own files, ``latest`` last of all,
and takes away what was laid down, by which the others know that the save is over.

Killed anywhere before the manifest, nothing is a checkpoint; after it, it is whole, and ``latest``
names it or the one before.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.writing import upload_part_bytes
from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.shard import Shard
from holdfast.errors import (
    CheckpointError,
    ConflictError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from holdfast.format import blob as blobs
from holdfast.format import sidecar as sidecars
from holdfast.format.names import blob_name
from holdfast.format.segment import SegmentIdentity, TensorSpec, blob_spec, header_template
from holdfast.objectstore import ObjectStore, open_store
from holdfast.oneshot.exchange import JOB, forget, make_room, sweep, write_manifest
from holdfast.oneshot.sending import SentSegment, filler, send
from holdfast.oneshot.world import World
from holdfast.snapshot.plan_hash import hash_of

COMMIT_S_MAX = 1800.0
"""How long ranks wait for each other: until the slowest has sent all its bytes."""
_POLL_S = 0.02
_TOLD = "deepspeed-save-"
_GIVEN_UP = f"{_TOLD}given-up-"
LAUNCH_LENGTH = 24
"""How many characters of a run all saves of one engine have in common."""


@dataclass(frozen=True, slots=True)
class Save:
    """One save, the same on all ranks: ``run`` names it, and ``save_dir/tag`` is its folder.

    ``markers`` are files that DeepSpeed looks for; ``latest``: whether it becomes the latest one.
    """

    run: RunId
    save_dir: str
    tag: str
    latest: bool
    markers: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Where the checkpoint lies."""
        return os.path.join(self.save_dir, self.tag)  # noqa: PTH118 - as DeepSpeed joins them


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank saves: its tensors, and the trees of its text."""

    specs: Sequence[TensorSpec]
    tensors: Sequence[torch.Tensor]
    tree: blobs.Trees


def commit(save: Save, world: World, part: Callable[[], Part]) -> None:
    """Make this rank's part and bring it into the checkpoint; return when that is there whole.

    Args:
        save: Which save it is.
        world: This rank, and how many there are.
        part: Gives what the rank saves; what it raises is told to the others.

    Raises:
        OutcomeUnknownError: other ranks were not heard of for ``COMMIT_S_MAX``.
        UnavailableError: another rank has failed; names it.
        CheckpointError: see ``holdfast.save``.
    """
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_store(save.folder, make=True)))
        folder = CheckpointFolder(store)
        if world.rank == 0:
            stack.enter_context(_begun(store, save))
        else:
            _wait(lambda: _is_begun(store, save), "rank 0 to begin", save)
        undo = stack.enter_context(ExitStack())
        sent = _send(folder, save, world, part, undo)
        if world.rank == 0:
            _finish(folder, save, sent, world.size)
            undo.pop_all()
        else:
            undo.pop_all()  # from here on the segment is rank 0's
            _wait(lambda: not _is_there(store, _begin_key(save)), "rank 0 to commit", save)
            _check(folder, save)


@contextmanager
def _begun(store: ObjectStore, save: Save) -> Iterator[None]:
    """Tell the other ranks that the save has begun, and at the end that it is over."""
    # A rank may be so late that it still asks for a save of this launch that was given up.
    ours = f"{_GIVEN_UP}{save.run[:LAUNCH_LENGTH]}"
    try:
        sweep(store, overwrite=True)
        store.delete([f.key for f in store.list(_TOLD) if not f.key.startswith(ours)])
        store.put(_begin_key(save), b"{}")
        yield
    except Exception:
        with suppress(CheckpointError, OSError):  # what has failed first is what counts
            store.put(_given_up_key(save), b"{}")
        raise
    finally:
        told = [_begin_key(save), *(f.key for f in store.list(f"{_TOLD}{save.run}"))]
        store.delete(told)


def _send(
    folder: CheckpointFolder, save: Save, world: World, part: Callable[[], Part], undo: ExitStack
) -> SentSegment:
    try:
        sent = _send_segment(folder, save, world, part(), undo)
    except Exception as cause:
        if world.rank:
            told: dict[str, object] = {"error": f"{type(cause).__name__}: {cause}"[:300]}
            folder.store.put(_told_key(save, world.rank), json.dumps(told).encode())
        raise
    if world.rank:
        told = {"upload": sent.upload.id, "sidecar": sidecars.fields(sent.sidecar)}
        folder.store.put(_told_key(save, world.rank), json.dumps(told).encode())
    return sent


def _send_segment(
    folder: CheckpointFolder, save: Save, world: World, part: Part, undo: ExitStack
) -> SentSegment:
    static = blobs.Static(objects={}, aliases={}, world_size=world.size).encode()
    text = blobs.join(static, blobs.Live(tree=part.tree).encode())
    specs = [*part.specs, blob_spec(blob_name(world.rank), len(text))]
    shard_id = ShardId(save.run, Step(0), Generation(0), Rank(world.rank))
    plan_hash = hash_of(specs, world.rank, world.size)
    identity = SegmentIdentity(id=shard_id, job=JOB, world_size=world.size, plan_hash=plan_hash)
    template = header_template(identity, specs)
    begins = {entry.spec.fqn: entry.begin for entry in template.entries}
    header = template.fill(step=0, generation=0, parent=None)
    tensors = [(begins[s.fqn], t) for s, t in zip(part.specs, part.tensors, strict=True)]
    fill = filler([(0, header), (begins[blob_name(world.rank)], text)], tensors)
    shard = Shard(
        id=shard_id, job=JOB, world_size=world.size, plan_hash=plan_hash,
        length_bytes=template.length_bytes, root_digest=b"",
    )  # fmt: skip
    return send(folder, shard, fill, undo)


def _finish(folder: CheckpointFolder, save: Save, own: SentSegment, size: int) -> None:
    store = folder.store
    keys = [_told_key(save, rank) for rank in range(1, size)]
    with ExitStack() as undo:
        sent = [own]
        for rank, key in enumerate(keys, start=1):
            _wait(lambda key=key: _is_there(store, key), f"rank {rank}", save)  # type: ignore[misc]
            sent.append(_sent_by(folder, save, rank, size))
            undo.callback(store.abort, sent[-1].upload)
        make_room(store, {segment.upload.id for segment in sent}, overwrite=True)
        for segment in sent:
            segment.finish(folder)
        undo.pop_all()
    write_manifest(folder, tuple(segment.sidecar.shard for segment in sent), {})
    try:
        for segment in sent:
            segment.check_ours(folder)
    except ConflictError:
        forget(folder, save.run)
        raise
    for name in save.markers:
        Path(save.folder, name).write_bytes(b"")  # nor is there a pickle that was saved before
    if save.latest:
        write_latest(save.save_dir, save.tag)


def _sent_by(folder: CheckpointFolder, save: Save, rank: int, size: int) -> SentSegment:
    """Return what another rank has sent, as far as the store bears it out.

    Raises:
        UnavailableError: that rank has failed; says how.
        ConflictError: it told of another save, or of what the store does not have.
    """
    told = _read(folder.store, _told_key(save, rank))
    if "error" in told:
        raise UnavailableError(f"rank {rank} failed: {told['error']}", rank=rank)
    raw = told.get("sidecar")
    sidecar = sidecars.from_fields(raw if isinstance(raw, dict) else {})
    shard = sidecar.shard
    expected = ShardId(save.run, Step(0), Generation(0), Rank(rank))
    if shard.id != expected or shard.world_size != size or shard.job != JOB:
        raise ConflictError(f"rank {rank} tells of another save: {shard.id.key}")
    key = folder.segment_key(shard)
    for upload in folder.store.open_uploads(key):
        if upload.key == key and upload.id == told.get("upload"):
            resumed = folder.store.resume(
                upload, shard.length_bytes, upload_part_bytes(shard.length_bytes)
            )
            parts = folder.store.parts(resumed)
            return SentSegment(sidecar, resumed, [parts[n] for n in sorted(parts)])
    raise ConflictError(f"what rank {rank} has sent is not in {folder.store.url}")


def _check(folder: CheckpointFolder, save: Save) -> None:
    """Do nothing if the checkpoint is that of this save.

    Raises:
        UnavailableError: rank 0 has given the save up, or could not have ``latest`` name it.
    """
    _check_not_given_up(folder.store, save)
    try:
        if folder.manifest().checkpoint.run == save.run:
            return
    except NotFoundError:
        pass
    raise UnavailableError("rank 0 has given the save up: its log says why", rank=0)


def mark(path: Path) -> None:
    """Have an empty file at ``path``, unless there is a file."""
    path.touch(exist_ok=True)


def write_latest(save_dir: str, tag: str) -> None:
    """Have DeepSpeed's ``latest`` name ``tag``: at no time is it a part of a name."""
    path = Path(save_dir, "latest")
    made = replace_name(path)
    with made.open("w", encoding="utf-8") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    made.replace(path)


def replace_name(path: Path) -> Path:
    """Return the name under which a file is written that is to replace ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def _wait(is_so: Callable[[], bool], what: str, save: Save) -> None:
    deadline = time.monotonic() + COMMIT_S_MAX
    while not is_so():
        if time.monotonic() > deadline:
            raise OutcomeUnknownError(
                f"waited {COMMIT_S_MAX:.0f} s for {what}: save {save.tag} in {save.save_dir}"
            )
        time.sleep(_POLL_S)


def _is_there(store: ObjectStore, key: str) -> bool:
    try:
        store.head(key)
    except NotFoundError:
        return False
    return True


def _read(store: ObjectStore, key: str) -> Mapping[str, object]:
    try:
        told = json.loads(store.get(key, length_bytes_max=sidecars.SIDECAR_BYTES_MAX))
    except ValueError as cause:
        raise ConflictError(f"{key} in {store.url} is not JSON") from cause
    return told if isinstance(told, dict) else {}


def _is_begun(store: ObjectStore, save: Save) -> bool:
    """Tell whether rank 0 has begun the save.

    Raises:
        UnavailableError: it has given the save up already.
    """
    _check_not_given_up(store, save)
    return _is_there(store, _begin_key(save))


def _check_not_given_up(store: ObjectStore, save: Save) -> None:
    if _is_there(store, _given_up_key(save)):
        raise UnavailableError("rank 0 has given the save up: its log says why", rank=0)


def _given_up_key(save: Save) -> str:
    return f"{_GIVEN_UP}{save.run}.json"


def _begin_key(save: Save) -> str:
    return f"{_TOLD}{save.run}.json"


def _told_key(save: Save, rank: int) -> str:
    return f"{_TOLD}{save.run}-{rank}.json"
