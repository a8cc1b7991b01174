"""How the ranks of a save come to one checkpoint, in the background and without a collective call.

They leave each other a word on a board. Rank 0 chooses the folder and says that the save has begun.
Each rank sends its segment, which nobody sees yet, and says what it has sent. Rank 0 lets all
segments appear, writes the manifest, then DeepSpeed's own files, puts the folder in its place,
``latest`` last of all, and says that the save is over. Whoever fails says so in place of that.

Killed anywhere, ``latest`` names a checkpoint that is whole: this one, or the one before, also
where both have the same tag.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.holding import remove
from holdfast.bucket.writing import upload_part_bytes
from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.shard import Shard
from holdfast.errors import (
    CheckpointError,
    ConflictError,
    InvalidRequestError,
    OutcomeUnknownError,
    UnavailableError,
)
from holdfast.format import blob as blobs
from holdfast.format import sidecar as sidecars
from holdfast.format.names import blob_name
from holdfast.format.segment import SegmentIdentity, TensorSpec, blob_spec, header_template
from holdfast.integrations.deepspeed import placing
from holdfast.integrations.deepspeed.board import Board
from holdfast.objectstore import open_store
from holdfast.oneshot.exchange import JOB, forget, make_room, sweep, write_manifest
from holdfast.oneshot.sending import SentSegment, filler, send
from holdfast.oneshot.world import World
from holdfast.snapshot.plan_hash import hash_of

COMMIT_S_MAX = 1800.0
"""How long ranks wait for each other: until the slowest has sent all its bytes."""
_POLL_S = 0.02
_POLL_S_MAX = 0.5
"""How often a rank asks when it has waited for long: all ask the same store."""
_BEGUN, _OVER = "begun", "over"
_TEXT_LENGTH_MAX = 300
_RUN_LENGTH, LAUNCH_LENGTH = 32, 24
"""How many characters a run has, and how many of them all saves of one engine have in common."""


def run_of(launch: str, number: int) -> RunId:
    """Return the run of an engine's save; its saves count from 1."""
    return RunId(f"{launch[:LAUNCH_LENGTH]}{number:0{_RUN_LENGTH - LAUNCH_LENGTH}x}")


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
    def folder(self) -> Path:
        """Where the checkpoint lies."""
        return placing.folder_of(self.save_dir, self.tag)

    @property
    def ended(self) -> RunId:
        """The save before the last one: to begin this one, all ranks were done with the last."""
        launch, number = self.run[:LAUNCH_LENGTH], int(self.run[LAUNCH_LENGTH:], 16)
        return run_of(launch, max(number - 2, 0))


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank saves: its tensors, and the trees of its text.

    ``alike`` has a digest of each value that rank 0 saves for all, by what it is called.
    """

    specs: Sequence[TensorSpec]
    tensors: Sequence[torch.Tensor]
    tree: blobs.Trees
    alike: Mapping[str, str] = field(default_factory=dict)


def commit(save: Save, world: World, words: Any, part: Callable[[], Part]) -> None:
    """Make this rank's part and bring it into the checkpoint; return when that is there whole.

    Args:
        save: Which save it is.
        world: This rank, and how many there are.
        words: The ``Store`` in which ranks leave each other a word; None if there is one rank.
        part: Gives what the rank saves; what it raises is told to the others.

    Raises:
        OutcomeUnknownError: other ranks were not heard of for ``COMMIT_S_MAX``, or the process
            that has ``words`` has ended.
        UnavailableError: another rank has failed; names it and says why.
        CheckpointError: see ``holdfast.save``.
    """
    board, own = Board(words, save.run), str(world.rank)
    Board(words, save.ended).forget([own] if world.rank else [_BEGUN, _OVER])
    if world.rank:
        _follow(save, world, board, part)
        return
    try:
        _lead(save, world, board, part)
    except Exception as cause:
        with suppress(CheckpointError):  # what has failed first is what counts
            board.tell(_OVER, _failure(cause))
        raise
    with suppress(CheckpointError):  # without an answer they look into the folder
        board.tell(_OVER, {})


def _lead(save: Save, world: World, board: Board, part: Callable[[], Part]) -> None:
    placing.check_apart(save.save_dir, save.folder)
    place = placing.prepare(save.folder, save.run)
    is_beside = place != save.folder
    with closing(open_store(str(place), make=True)) as store, _undone_by_errors() as undo:
        if is_beside:
            undo.callback(remove, place)
        sweep(store, overwrite=True)
        board.tell(_BEGUN, {"beside": is_beside})
        folder, made = CheckpointFolder(store), part()
        sent = [_send(folder, save, world, made, undo)]
        for rank in range(1, world.size):
            told = _heard(board, str(rank), f"rank {rank}", save)
            sent.append(_sent_by(folder, save, rank, world.size, told))
            _check_alike(made.alike, told.get("alike"), rank)
        _finish(folder, save.run, sent)
    for name in save.markers:
        (place / name).write_bytes(b"")  # nor is there a pickle that was saved before
    old = placing.replace(place, save.folder) if is_beside else None
    if save.latest:
        placing.write_latest(save.save_dir, save.tag)
    if old is not None:
        placing.discard(old, save.folder)


def _follow(save: Save, world: World, board: Board, part: Callable[[], Part]) -> None:
    is_beside = bool(_heard(board, _BEGUN, "rank 0 to begin", save).get("beside"))
    place = placing.beside(save.folder, save.run) if is_beside else save.folder
    with ExitStack() as opened:
        try:
            store = opened.enter_context(closing(open_store(str(place), make=not is_beside)))
            undo = opened.enter_context(_undone_by_errors())
            made = part()
            sent = _send(CheckpointFolder(store), save, world, made, undo)
        except Exception as cause:
            board.tell(str(world.rank), _failure(cause))
            raise
        told = {"upload": sent.upload.id, "sidecar": sidecars.fields(sent.sidecar)}
        board.tell(str(world.rank), {**told, "alike": dict(made.alike)})
        try:
            _heard(board, _OVER, "rank 0 to commit", save)
        except OutcomeUnknownError:
            if not _is_committed(save):
                raise


@contextmanager
def _undone_by_errors() -> Iterator[ExitStack]:
    """Yield a stack that is unwound if the block raises; what that itself raises is passed over."""
    undo = ExitStack()
    try:
        yield undo
    except BaseException:
        with suppress(CheckpointError):
            undo.close()
        raise


def _send(
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


def _finish(folder: CheckpointFolder, run: RunId, sent: Sequence[SentSegment]) -> None:
    make_room(folder.store, {segment.upload.id for segment in sent}, overwrite=True)
    for segment in sent:
        segment.finish(folder)
    write_manifest(folder, tuple(segment.sidecar.shard for segment in sent), {})
    try:
        for segment in sent:
            segment.check_ours(folder)
    except ConflictError:
        forget(folder, run)
        raise


def _check_alike(own: Mapping[str, str], told: object, rank: int) -> None:
    """Refuse values of which rank 0 would save its own for all, and another rank has others.

    Raises:
        InvalidRequestError: names them.
    """
    theirs = told if isinstance(told, dict) else {}
    unlike = sorted(key for key in own.keys() | theirs.keys() if own.get(key) != theirs.get(key))
    if unlike:
        raise InvalidRequestError(
            f"ranks 0 and {rank} differ in {', '.join(map(repr, unlike[:5]))}, of which one is "
            f"saved for all: have the optimizer keep the same on all ranks",
            key=unlike[0],
        )


def _sent_by(
    folder: CheckpointFolder, save: Save, rank: int, size: int, told: Mapping[str, object]
) -> SentSegment:
    """Return what another rank has sent, as far as the store bears it out.

    Raises:
        ConflictError: it told of another save, or of what the store does not have.
    """
    raw = told.get("sidecar")
    sidecar = sidecars.from_fields(raw if isinstance(raw, dict) else {})
    shard = sidecar.shard
    expected = ShardId(save.run, Step(0), Generation(0), Rank(rank))
    if shard.id != expected or shard.world_size != size or shard.job != JOB:
        raise ConflictError(f"rank {rank} tells of another save: {shard.id.key}")
    key = folder.segment_key(shard)
    for upload in folder.store.open_uploads(key):
        if upload.id == told.get("upload"):
            resumed = folder.store.resume(
                upload, shard.length_bytes, upload_part_bytes(shard.length_bytes)
            )
            parts = folder.store.parts(resumed)
            return SentSegment(sidecar, resumed, [parts[n] for n in sorted(parts)])
    raise ConflictError(f"what rank {rank} has sent is not in {folder.store.url}")


def _heard(board: Board, name: str, what: str, save: Save) -> Mapping[str, object]:
    """Return what is said under a name, once it is.

    Raises:
        UnavailableError: who was to say it has failed, or rank 0 has; and why.
        OutcomeUnknownError: nothing was said for ``COMMIT_S_MAX``, or the board is gone.
    """
    deadline, pause_s = time.monotonic() + COMMIT_S_MAX, _POLL_S
    while time.monotonic() < deadline:
        for word in dict.fromkeys((name, _OVER)):
            said = board.told(word)
            if said is not None and "error" in said:
                rank = int(word) if word.isdigit() else 0
                raise UnavailableError(f"rank {rank} failed: {said['error']}", rank=rank)
            if said is not None and word == name:
                return said
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _POLL_S_MAX)
    raise OutcomeUnknownError(
        f"waited {COMMIT_S_MAX:.0f} s for {what}: save {save.tag} in {save.save_dir}"
    )


def _failure(cause: Exception) -> dict[str, object]:
    return {"error": f"{type(cause).__name__}: {cause}"[:_TEXT_LENGTH_MAX]}


def _is_committed(save: Save) -> bool:
    """Tell whether the folder has the checkpoint of this save."""
    try:
        with closing(open_store(str(save.folder))) as store:
            return CheckpointFolder(store).manifest().checkpoint.run == save.run
    except CheckpointError:
        return False
