"""Writes one checkpoint: each rank its segment and sidecar, then rank 0 the manifest.

An older checkpoint goes when all bytes of the new one are there, and not before: see ``exchange``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from secrets import token_hex

from holdfast.bucket.folder import CheckpointFolder
from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.shard import Shard, unlike_ranks
from holdfast.errors import (
    ConflictError,
    InvalidRequestError,
    ManifestError,
    UnavailableError,
)
from holdfast.format import manifest as manifests
from holdfast.format.header import parse_header
from holdfast.format.plan_faults import first_fault
from holdfast.objectstore import open_store
from holdfast.oneshot.exchange import JOB, forget, make_room, sweep, write_manifest
from holdfast.oneshot.sending import Fill, SentSegment, filler, send
from holdfast.oneshot.world import Agreement, World
from holdfast.snapshot.plan import SavePlan, Source, make_plan
from holdfast.state.capture import Capture


def write(
    path: str,
    state: MutableMapping[str, object],
    world: World,
    *,
    overwrite: bool,
    notes: Mapping[str, object],
) -> None:
    """Write the checkpoint; collective. See ``holdfast.save``.

    Whatever is refused, by a state, a rank or a full disk, is refused before anything of an older
    checkpoint goes: by then all bytes of the new one are in the store, where no reader sees them.
    """
    write_source(
        path, _captured(state, world), world,
        check=lambda: check_state(state), overwrite=overwrite, notes=notes,
    )  # fmt: skip


def write_source(
    path: str,
    source: AbstractContextManager[Source],
    world: World,
    *,
    overwrite: bool,
    notes: Mapping[str, object],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write what ``source`` gives, as ``write`` does; collective.

    Args:
        path: Where to.
        source: Entered once, when the bytes are to be sent.
        world: The ranks.
        overwrite: See ``holdfast.save``.
        notes: See ``holdfast.save``.
        check: Raises what is to be refused before a folder is made.
    """
    with ExitStack() as stack:
        with Agreement(world) as asked:
            check()
            store = stack.enter_context(closing(open_store(path, make=world.rank == 0)))
            if world.rank == 0:
                asked.value = {"run": token_hex(16)}
                _check_notes(notes)
                sweep(store, overwrite=overwrite)
        run = RunId(str(asked.values[0]["run"]))
        folder = CheckpointFolder(store)
        undo = stack.enter_context(ExitStack())
        with Agreement(world) as sent:
            segment, header = _send(folder, source, world, run, undo)
            sent.value = {
                "length_bytes": segment.sidecar.shard.length_bytes,
                "root": segment.sidecar.shard.root_digest.hex(),
                "plan_hash": segment.sidecar.shard.plan_hash,
                "upload": segment.upload.id,
            }
        shards = tuple(_shard(run, rank, world.size, told) for rank, told in enumerate(sent.values))
        if unlike := unlike_ranks(shards):  # all come to the same, and tell each other their boxes
            raise InvalidRequestError(_told_in_full(unlike, world, header, shards))
        with Agreement(world):
            if world.rank == 0:
                ours = {str(told["upload"]) for told in sent.values}
                make_room(store, ours, overwrite=overwrite)
        with Agreement(world):
            segment.finish(folder)
            undo.pop_all()
        with Agreement(world):
            if world.rank == 0:
                write_manifest(folder, shards, notes)
        _check_alone(folder, segment, world)


@contextmanager
def _captured(state: MutableMapping[str, object], world: World) -> Iterator[Capture]:
    capture = Capture(state, rank=world.rank, world_size=world.size)
    try:
        yield capture
    finally:
        capture.release()


def check_state(state: object) -> None:
    """Refuse what is no mapping that can be saved, or loaded into."""
    if not isinstance(state, MutableMapping):
        raise InvalidRequestError(
            f'state is a {type(state).__name__}: pass a dict, such as {{"model": model}}'
        )


def _check_notes(notes: Mapping[str, object]) -> None:
    """Refuse notes before anything is written, not by the manifest at the end."""
    try:
        manifests.check_notes(notes)
    except ManifestError as cause:
        raise InvalidRequestError(cause.message) from cause


def _check_alone(folder: CheckpointFolder, segment: SentSegment, world: World) -> None:
    """Check after writing the manifest that it does not list segments of another save.

    Raises:
        ConflictError: they are another save's; the manifest is gone again.
    """
    try:
        # A store that is away now says nothing against what was written.
        with Agreement(world), suppress(UnavailableError):
            segment.check_ours(folder)
    except ConflictError:
        run = segment.sidecar.shard.id.run
        if world.rank == 0:
            forget(folder, run)
        raise


def _send(
    folder: CheckpointFolder,
    source: AbstractContextManager[Source],
    world: World,
    run: RunId,
    undo: ExitStack,
) -> tuple[SentSegment, bytes]:
    """Send the bytes of this rank's segment; ``undo`` forgets them. Beside it its header."""
    with source as capture:
        plan = make_plan(
            capture, job=JOB, run=run, generation=0, rank=world.rank, world_size=world.size
        )
        fill = _filler(plan)
    told = {"length_bytes": plan.length_bytes, "root": "", "plan_hash": plan.plan_hash}
    sent = send(folder, _shard(run, world.rank, world.size, told), fill, undo)
    return sent, plan.template.fill(step=0, generation=0, parent=None)


def _told_in_full(reason: str, world: World, header: bytes, shards: Sequence[Shard]) -> str:
    """Return why the save is refused, with the first tensor of which it is seen; collective."""
    heads = zip(world.gather(header), shards, strict=True)
    fault = first_fault(parse_header(head, shard.length_bytes) for head, shard in heads)
    return f"{reason} ({fault})" if fault else reason


def _filler(plan: SavePlan) -> Fill:
    """Return what gives the bytes of the segment as the state is now."""
    blob, live = plan.take_live()
    header = plan.template.fill(step=0, generation=0, parent=None)
    tensors = [(piece.entry.begin, piece.tensor) for piece in plan.pieces]
    tensors += [(entry.begin, live[name]) for name, entry in plan.live_entries.items()]
    return filler([(0, header), (plan.blob_entry.begin, blob)], tensors)


def _shard(run: RunId, rank: int, world_size: int, told: Mapping[str, object]) -> Shard:
    return Shard(
        id=ShardId(run, Step(0), Generation(0), Rank(rank)),
        job=JOB,
        world_size=world_size,
        plan_hash=str(told["plan_hash"]),
        length_bytes=int(str(told["length_bytes"])),
        root_digest=bytes.fromhex(str(told["root"])),
    )
