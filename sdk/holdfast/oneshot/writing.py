"""Writes one checkpoint: each rank its segment and sidecar, then rank 0 the manifest.

An older checkpoint goes when all bytes of the new one are there, and not before. Segments are made
and sent part by part, straight from the tensors: memory is bounded by ``THREADS_COUNT`` parts,
whatever the size of the state. Units: bytes.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from secrets import token_hex

import torch

import holdfast
from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.publish import publish, put_sidecar
from holdfast.bucket.writing import SegmentWriter
from holdfast.core.ids import CheckpointId, Generation, Rank, RunId, ShardId, Step
from holdfast.core.shard import Shard
from holdfast.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptionError,
    InvalidRequestError,
    ManifestError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from holdfast.format import manifest as manifests
from holdfast.format.digest import root_digest
from holdfast.format.keys import MANIFEST, SEGMENT_SUFFIX, SIDECAR_SUFFIX, parse_shard_stem
from holdfast.format.manifest import Manifest
from holdfast.format.sidecar import Sidecar
from holdfast.objectstore import ObjectStore, open_store
from holdfast.oneshot.world import Agreement, World
from holdfast.snapshot.plan import SavePlan, make_plan
from holdfast.state.capture import Capture

JOB = "one-shot"
THREADS_COUNT = 4

Fill = Callable[[int, memoryview], None]
"""Called as ``fill(begin, view)``: puts the bytes of the segment from ``begin`` on into view."""


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
    with ExitStack() as stack:
        with Agreement(world) as asked:
            check_state(state)
            store = stack.enter_context(closing(open_store(path, make=world.rank == 0)))
            if world.rank == 0:
                asked.value = {"run": token_hex(16)}
                _check_notes(notes)
                _sweep(store, overwrite=overwrite)
        run = RunId(str(asked.values[0]["run"]))
        folder = CheckpointFolder(store)
        undo = stack.enter_context(ExitStack())
        with Agreement(world) as sent:
            segment = _send(folder, state, world, run, undo)
            sent.value = {
                "length_bytes": segment.sidecar.shard.length_bytes,
                "root": segment.sidecar.shard.root_digest.hex(),
                "plan_hash": segment.sidecar.shard.plan_hash,
                "upload": segment.writer.upload_id,
            }
        with Agreement(world):
            if world.rank == 0:
                ours = {str(told["upload"]) for told in sent.values}
                _make_room(store, ours, overwrite=overwrite)
        with Agreement(world):
            segment.finish(folder)
            undo.pop_all()
        with Agreement(world):
            if world.rank == 0:
                shards = tuple(
                    _shard(run, rank, world.size, told) for rank, told in enumerate(sent.values)
                )
                _write_manifest(folder, shards, notes)
        _check_alone(folder, segment, world)


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


def _sweep(store: ObjectStore, *, overwrite: bool) -> None:
    """Remove what dead saves left, and nothing of a checkpoint.

    Raises:
        AlreadyExistsError: there is a checkpoint, and it is not to be replaced.
    """
    taken = _is_taken(store, overwrite=overwrite)
    _abort_others(store, frozenset())
    if not taken:
        _delete_shards(store)


def _make_room(store: ObjectStore, uploads: Collection[str], *, overwrite: bool) -> None:
    """Make sure that nothing of another checkpoint is left: readers believe the listing.

    Nor may another save that is under way put its files over ours later: all but ``uploads`` end.

    Raises:
        AlreadyExistsError: there is a checkpoint by now, and it is not to be replaced.
    """
    if _is_taken(store, overwrite=overwrite):
        # First of all the manifest: from here on nobody takes what is left for a checkpoint.
        store.delete([MANIFEST])
    _abort_others(store, uploads)
    _delete_shards(store)


def _abort_others(store: ObjectStore, keep: Collection[str]) -> None:
    for upload in list(store.open_uploads("shard-")):
        if _is_ours(upload.key) and upload.id not in keep:
            store.abort(upload)


def _is_taken(store: ObjectStore, *, overwrite: bool) -> bool:
    try:
        store.head(MANIFEST)
    except NotFoundError:
        return False
    if not overwrite:
        raise AlreadyExistsError(
            f"{store.url} holds a checkpoint already: choose another path, or overwrite=True"
        )
    return True


def _delete_shards(store: ObjectStore) -> None:
    store.delete([found.key for found in store.list("shard-") if _is_ours(found.key)])


def _is_ours(key: str) -> bool:
    anybody = CheckpointId(RunId("r"), Step(0), Generation(0))
    return any(
        key.endswith(suffix) and parse_shard_stem(key.removesuffix(suffix), anybody) is not None
        for suffix in (SEGMENT_SUFFIX, SIDECAR_SUFFIX)
    )


@dataclass(frozen=True, slots=True)
class _Segment:
    """This rank's segment: its bytes are in the store, and ``finish`` makes them appear."""

    sidecar: Sidecar
    writer: SegmentWriter

    def finish(self, folder: CheckpointFolder) -> None:
        """Make the segment appear, check it, then write its sidecar: only if there is none.

        Raises:
            AlreadyExistsError, ConflictError: another save has finished its own meanwhile.
            CorruptionError: what is there is not what was sent.
        """
        self.writer.finish()
        try:
            put_sidecar(folder, self.sidecar, if_absent=True)
        except OutcomeUnknownError:
            pass  # ``check_ours`` reads it back
        except CorruptionError:
            self.check_ours(folder, sidecar=False)
            raise

    def check_ours(self, folder: CheckpointFolder, *, sidecar: bool = True) -> None:
        """Do nothing if segment and sidecar there are this save's: the header names the save.

        Raises:
            ConflictError: another save is writing into the folder.
        """
        shard = self.sidecar.shard
        try:
            folder.check_length(shard)
            folder.header(shard)
            if sidecar:
                folder.sidecar(shard)
        except (NotFoundError, CorruptionError) as cause:
            raise ConflictError(
                f"another save is writing into {folder.store.url}: {cause.message}"
            ) from cause


def _check_alone(folder: CheckpointFolder, segment: _Segment, world: World) -> None:
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
        if world.rank == 0 and _found(folder, lambda found: found.checkpoint.run) == run:
            folder.store.delete([MANIFEST])
        raise


def _send(
    folder: CheckpointFolder,
    state: MutableMapping[str, object],
    world: World,
    run: RunId,
    undo: ExitStack,
) -> _Segment:
    """Send the bytes of this rank's segment; ``undo`` forgets them."""
    capture = Capture(state, rank=world.rank, world_size=world.size)
    try:
        plan = make_plan(
            capture, job=JOB, run=run, generation=0, rank=world.rank, world_size=world.size
        )
        fill = _filler(plan)
    finally:
        capture.release()
    told = {"length_bytes": plan.length_bytes, "root": "", "plan_hash": plan.plan_hash}
    key = folder.segment_key(_shard(run, world.rank, world.size, told))
    writer = SegmentWriter(folder.store, key, plan.length_bytes)
    undo.callback(writer.abort)
    _send_parts(writer, fill)
    digests = writer.digests()
    told["root"] = root_digest(plan.length_bytes, digests).hex()
    sidecar = Sidecar(shard=_shard(run, world.rank, world.size, told), digests=digests)
    return _Segment(sidecar, writer)


def _shard(run: RunId, rank: int, world_size: int, told: Mapping[str, object]) -> Shard:
    return Shard(
        id=ShardId(run, Step(0), Generation(0), Rank(rank)),
        job=JOB,
        world_size=world_size,
        plan_hash=str(told["plan_hash"]),
        length_bytes=int(str(told["length_bytes"])),
        root_digest=bytes.fromhex(str(told["root"])),
    )


def _filler(plan: SavePlan) -> Fill:
    """Return what gives the bytes of the segment, any range, as the state is now.

    Parts begin at multiples of every item size, so no element is ever cut.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # the threads that copy do not share the caller's streams
    blob, live = plan.take_live()
    header = plan.template.fill(step=0, generation=0, parent=None)
    texts = [(0, header), (plan.blob_entry.begin, blob)]
    tensors = [(piece.entry.begin, piece.tensor) for piece in (*plan.deferred, *plan.eager)]
    tensors += [(entry.begin, live[name]) for name, entry in plan.live_entries.items()]
    pieces = sorted(
        [(begin, len(text), torch.frombuffer(bytearray(text), dtype=torch.uint8))
         for begin, text in texts if text]
        + [(begin, tensor.nbytes, tensor.detach()) for begin, tensor in tensors if tensor.nbytes],
        key=lambda piece: piece[0],
    )  # fmt: skip
    begins = [begin for begin, _, _ in pieces]

    def fill(begin: int, view: memoryview) -> None:
        target, end = torch.frombuffer(view, dtype=torch.uint8), begin + len(view)
        at = max(bisect_right(begins, begin) - 1, 0)
        while at < len(pieces) and pieces[at][0] < end:
            start, length_bytes, source = pieces[at]
            first, last = max(begin, start), min(end, start + length_bytes)
            if first < last:
                _copy(target[first - begin : last - begin], source, first - start, last - start)
            at += 1

    return fill


def _copy(target: torch.Tensor, source: torch.Tensor, begin: int, end: int) -> None:
    """Copy bytes ``[begin, end)`` of ``source``, from whatever device and in row-major order."""
    piece = _elements(source, begin // source.itemsize, end // source.itemsize)
    target.view(piece.dtype).copy_(piece.resolve_conj().resolve_neg())


def _elements(source: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return elements ``[first, last)`` in row-major order.

    Of a tensor that does not lie so no more is copied than the rows that hold them, at the depth
    where there are several: one of many parts must not cost a whole copy.
    """
    while not source.is_contiguous():
        row = source[0].numel()
        top, bottom = first // row, -(-last // row)
        source, first, last = source[top:bottom], first - top * row, last - top * row
        if bottom - top > 1:
            break
        source = source[0]
    return source.reshape(-1)[first:last]


def _send_parts(writer: SegmentWriter, fill: Fill) -> None:
    """Make and send the segment part by part, several side by side."""

    def send(number: int) -> None:
        begin, end = writer.range(number)
        data = memoryview(bytearray(end - begin))
        fill(begin, data)
        writer.put(number, data)

    with ThreadPoolExecutor(THREADS_COUNT, "holdfast-save") as pool:
        try:
            for _ in pool.map(send, range(writer.count)):
                pass
        finally:
            pool.shutdown(cancel_futures=True)


def _write_manifest(
    folder: CheckpointFolder, shards: tuple[Shard, ...], notes: Mapping[str, object]
) -> None:
    """Write what makes it a checkpoint.

    Raises:
        AlreadyExistsError: somebody else's was there first.
        UnavailableError: the answer was lost, and it is not there.
    """
    manifest = Manifest(
        checkpoint=shards[0].id.checkpoint,
        job=JOB,
        world_size=len(shards),
        shards=shards,
        write_id=token_hex(16),
        created_at_s=time.time(),
        notes=notes,
        software=f"holdfast {holdfast.__version__}",
    )
    publish(folder, manifest)


def _found(folder: CheckpointFolder, what: Callable[[Manifest], str]) -> str | None:
    """Return ``what`` the manifest there says, None if there is none that can be read."""
    try:
        return what(folder.manifest())
    except (NotFoundError, ManifestError):
        return None
