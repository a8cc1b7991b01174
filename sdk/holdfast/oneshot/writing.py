"""Writes one checkpoint: each rank its segment and sidecar, then rank 0 the manifest.

Segments are made and sent part by part, straight from the tensors: memory is bounded by
``THREADS_COUNT`` parts, whatever the size of the state. Units: bytes.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from secrets import token_hex

import torch

import holdfast
from holdfast.bucket.folder import CheckpointFolder
from holdfast.core import manifest as manifests
from holdfast.core import sidecar as sidecars
from holdfast.core.digest import PART_BYTES, part_digests, parts_count, root_digest
from holdfast.core.facts import Shard
from holdfast.core.ids import CheckpointId, Generation, Rank, RunId, ShardId, Step
from holdfast.core.keys import MANIFEST, SEGMENT_SUFFIX, SIDECAR_SUFFIX, parse_shard_stem
from holdfast.core.manifest import Manifest
from holdfast.core.sidecar import Sidecar
from holdfast.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    ManifestError,
    NotFoundError,
    OutcomeUnknownError,
)
from holdfast.objectstore import UPLOAD_PARTS_COUNT_MAX, ObjectStore, UploadedPart, open_store
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
    """Write the checkpoint; collective. See ``holdfast.save``."""
    with ExitStack() as stack:
        with Agreement(world) as asked:
            store = stack.enter_context(closing(open_store(path, make=world.rank == 0)))
            if world.rank == 0:
                asked.value = {"run": token_hex(16)}
                _check_notes(notes)
                _make_room(store, overwrite=overwrite)
        run = RunId(str(asked.values[0]["run"]))
        folder = CheckpointFolder(store)
        with Agreement(world) as written:
            shard = _write_shard(folder, state, world, run)
            written.value = {
                "length_bytes": shard.length_bytes,
                "root": shard.root_digest.hex(),
                "plan_hash": shard.plan_hash,
            }
        with Agreement(world):
            if world.rank == 0:
                shards = tuple(
                    _shard(run, rank, world.size, told) for rank, told in enumerate(written.values)
                )
                _write_manifest(folder, shards, notes)


def _check_notes(notes: Mapping[str, object]) -> None:
    """Refuse notes before anything is written, not by the manifest at the end."""
    try:
        manifests.check_notes(notes)
    except ManifestError as cause:
        raise InvalidRequestError(cause.message) from cause


def _make_room(store: ObjectStore, *, overwrite: bool) -> None:
    """Make sure that nothing of another checkpoint is left: readers believe the listing.

    Raises:
        AlreadyExistsError: there is a checkpoint, and it is not to be replaced.
    """
    with suppress(NotFoundError):
        store.head(MANIFEST)
        if not overwrite:
            raise AlreadyExistsError(
                f"there is a checkpoint in {store.url} already; overwrite=True replaces it"
            )
        # First of all the manifest: from here on nobody takes what is left for a checkpoint.
        store.delete([MANIFEST])
    for upload in list(store.open_uploads("shard-")):
        if _is_ours(upload.key):
            store.abort(upload)
    store.delete([found.key for found in store.list("shard-") if _is_ours(found.key)])


def _is_ours(key: str) -> bool:
    anybody = CheckpointId(RunId("r"), Step(0), Generation(0))
    return any(
        key.endswith(suffix) and parse_shard_stem(key.removesuffix(suffix), anybody) is not None
        for suffix in (SEGMENT_SUFFIX, SIDECAR_SUFFIX)
    )


def _write_shard(
    folder: CheckpointFolder, state: MutableMapping[str, object], world: World, run: RunId
) -> Shard:
    """Write this rank's segment, check it, then write its sidecar."""
    capture = Capture(state, rank=world.rank, world_size=world.size)
    try:
        plan = make_plan(
            capture, job=JOB, run=run, generation=0, rank=world.rank, world_size=world.size
        )
        fill = _filler(plan)
    finally:
        capture.release()
    number = ShardId(run, Step(0), Generation(0), Rank(world.rank))
    shard = Shard(
        id=number,
        job=JOB,
        world_size=world.size,
        plan_hash=plan.plan_hash,
        length_bytes=plan.length_bytes,
        root_digest=b"",
    )
    digests = _upload(folder.store, folder.segment_key(shard), plan.length_bytes, fill)
    shard = _shard(
        run,
        world.rank,
        world.size,
        {
            "length_bytes": plan.length_bytes,
            "root": root_digest(plan.length_bytes, digests).hex(),
            "plan_hash": plan.plan_hash,
        },
    )
    sidecar = Sidecar(shard=shard, digests=tuple(digests))
    _check_written(folder, sidecar)
    folder.store.put(folder.sidecar_key(shard), sidecars.encode(sidecar))
    return shard


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
    flat = source.resolve_conj().resolve_neg().reshape(-1)
    piece = flat[begin // flat.itemsize : end // flat.itemsize]
    target.view(flat.dtype).copy_(piece)


def _upload(store: ObjectStore, key: str, length_bytes: int, fill: Fill) -> list[bytes]:
    """Upload a segment part by part; return its part digests. What fails leaves nothing open."""
    count = parts_count(length_bytes)
    upload_bytes = PART_BYTES * -(-count // UPLOAD_PARTS_COUNT_MAX)
    numbers = range(-(-length_bytes // upload_bytes))
    upload = store.begin(key, length_bytes, upload_bytes)

    def send(number: int) -> tuple[UploadedPart, list[bytes]]:
        begin = number * upload_bytes
        data = memoryview(bytearray(min(upload_bytes, length_bytes - begin)))
        fill(begin, data)
        return store.put_part(upload, number, data), part_digests(data)

    with ExitStack() as undo:
        undo.callback(store.abort, upload)
        with ThreadPoolExecutor(THREADS_COUNT, "holdfast-save") as pool:
            try:
                sent = list(pool.map(send, numbers))
            finally:
                pool.shutdown(cancel_futures=True)
        store.finish(upload, [part for part, _ in sent])
        undo.pop_all()
    return [digest for _, digests in sent for digest in digests]


def _check_written(folder: CheckpointFolder, sidecar: Sidecar) -> None:
    """Check the length; where the store checks no parts, read the first and the last back.

    Raises:
        CorruptionError: what lies there is not what was sent.
    """
    folder.check_length(sidecar.shard)
    if folder.store.checks_parts:
        return
    last = len(sidecar.digests) - 1
    for index in {0, last}:
        length_bytes = min(PART_BYTES, sidecar.shard.length_bytes - index * PART_BYTES)
        folder.fetch_part(sidecar, index, memoryview(bytearray(length_bytes)))


def _write_manifest(
    folder: CheckpointFolder, shards: tuple[Shard, ...], notes: Mapping[str, object]
) -> None:
    """Write what makes it a checkpoint, after a last look at every segment.

    Raises:
        AlreadyExistsError: somebody else's was there first.
        OutcomeUnknownError: the answer was lost, and it is not there.
    """
    for shard in shards:
        folder.check_length(shard)
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
    try:
        folder.store.put(MANIFEST, manifests.encode(manifest), if_absent=True)
    except (AlreadyExistsError, OutcomeUnknownError) as cause:
        if _found_write_id(folder) != manifest.write_id:
            raise cause from None


def _found_write_id(folder: CheckpointFolder) -> str | None:
    try:
        return folder.manifest().write_id
    except (NotFoundError, ManifestError):
        return None
