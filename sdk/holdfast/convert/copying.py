"""Copies Holdfast checkpoints from one store to another, under the same or another job name.

Every part is verified on the way and hashed again as written. A shard that an earlier try has
finished is not sent twice; the manifest goes last. A new job name changes each segment's header,
so its digests are made anew, and makes it another run; step, generation and lineage stay.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.listing import places
from holdfast.bucket.publish import publish, put_sidecar
from holdfast.bucket.writing import SegmentStream
from holdfast.convert.reading import CheckpointReader
from holdfast.core.ids import job_name, run_id
from holdfast.core.shard import Shard
from holdfast.errors import (
    AlreadyExistsError,
    CorruptionError,
    NotFoundError,
    PreconditionError,
    UnsupportedFormatError,
)
from holdfast.format import keys, rollback
from holdfast.format.digest import part_digest, root_digest
from holdfast.format.header import parse_header
from holdfast.format.manifest import Manifest, decode
from holdfast.format.rollback import ROLLBACK_BYTES_MAX
from holdfast.format.segment import SegmentHeader, header_template
from holdfast.format.sidecar import Sidecar
from holdfast.objectstore import ObjectStore

DEPTH_MAX = 12

Advance = Callable[[int], None]


def checkpoints(store: ObjectStore, prefix: str = "", depth: int = 0) -> Iterator[CheckpointFolder]:
    """Yield every folder at or below ``prefix`` that has a manifest, whatever its name."""
    try:
        store.head(f"{prefix}{keys.MANIFEST}")
    except NotFoundError:
        if depth < DEPTH_MAX:
            for below in store.folders(prefix):
                yield from checkpoints(store, below, depth + 1)
    else:
        yield CheckpointFolder(store, prefix)


def copy_checkpoint(
    source: CheckpointFolder,
    store: ObjectStore,
    *,
    job: str | None = None,
    advance: Advance = lambda _bytes: None,
) -> tuple[Manifest, bool]:
    """Copy one checkpoint and return its manifest there, and whether it had to be copied.

    Args:
        source: Where it lies.
        store: Where it goes.
        job: Its job's name there; None keeps the name.
        advance: Called with the bytes of each part that has been read.

    Raises:
        AlreadyExistsError: another checkpoint has that place.
        PreconditionError: a job of that name has a run of its own there.
        CorruptionError: a part of the source is not what was sealed.
    """
    old = source.manifest()
    place = destination(old, job)
    name, checkpoint = place.job, place.checkpoint
    run = checkpoint.run
    _check_run(store, name, run)
    there = CheckpointFolder(store, keys.folder(name, checkpoint))
    known = _manifest_there(there)
    if known is not None:
        _check_same(known, old, there.prefix)
        advance(old.length_bytes)
        return known, False
    with CheckpointReader(source) as reader:
        wanted = [replace(s, id=replace(s.id, run=run), job=name) for s in old.shards]
        copied = [_copy(reader, at, there, shard, advance) for at, shard in enumerate(wanted)]
    shards, headers = zip(*copied, strict=True)
    new = replace(
        old,
        job=name,
        checkpoint=checkpoint,
        shards=shards,
        parent=replace(old.parent, run=run) if old.parent else None,
        write_id=old.write_id if name == old.job else secrets.token_hex(16),
    )
    return decode(publish(there, new, headers=lambda: headers)), True


def copy_rollbacks(source: CheckpointFolder, store: ObjectStore, *, job: str | None = None) -> None:
    """Copy the records of the rollbacks of the run that a checkpoint is of; a repeat is harmless.

    Before its checkpoints: whoever finds those must not take what was left for what stands.

    Raises:
        CorruptionError: a record of the source cannot be read.
        UnavailableError: a store.
    """
    old = source.manifest()
    place = destination(old, job)
    if not source.prefix:
        return  # only the checkpoint's own folder is shown
    above, slash, _ = source.prefix.rstrip("/").rpartition("/")
    for found in source.store.list(f"{above}{slash}{keys.ROLLBACK}"):
        if keys.parse_rollback(found.key) is None:
            continue
        record = rollback.decode(source.store.get(found.key, length_bytes_max=ROLLBACK_BYTES_MAX))
        if (record.job, record.to.run) != (old.job, old.checkpoint.run):
            continue
        run = place.checkpoint.run
        mine = replace(record, job=place.job, to=replace(record.to, run=run))
        key = keys.rollback_key(place.job, run, record.generation)
        with suppress(AlreadyExistsError):
            store.put(key, rollback.encode(mine), if_absent=True)


def destination(old: Manifest, job: str | None) -> keys.Place:
    """Return where a copy of ``old`` goes; under another job's name it is always the same run."""
    name = job_name(job or old.job)
    if name == old.job:
        return keys.Place(name, old.checkpoint)
    run = run_id(part_digest(f"{old.checkpoint.run} as {name}".encode()).hex()[:16])
    return keys.Place(name, replace(old.checkpoint, run=run))


def _copy(
    reader: CheckpointReader, at: int, there: CheckpointFolder, wanted: Shard, advance: Advance
) -> tuple[Shard, SegmentHeader]:
    """Copy one segment and its sidecar; return what they are there."""
    old = reader.manifest.shards[at]
    head = _header(reader, at, wanted)
    data_begin = reader.headers[at].data_begin
    shard = replace(wanted, length_bytes=len(head) + old.length_bytes - data_begin)
    header = parse_header(head, shard.length_bytes)
    if shard == old and _is_there(there, shard):
        advance(old.length_bytes)
        return shard, header
    with SegmentStream(there.store, there.segment_key(shard), shard.length_bytes) as stream:
        stream.write(head)
        for part in reader.stream(at, data_begin):
            stream.write(part)
            advance(len(part))
        digests = stream.finish()
    shard = replace(shard, root_digest=root_digest(shard.length_bytes, digests))
    assert shard.id != old.id or shard == old, "the same bytes have the same digests"
    put_sidecar(there, Sidecar(shard=shard, digests=digests))
    return shard, header


def _is_there(there: CheckpointFolder, shard: Shard) -> bool:
    """Tell whether an earlier try has finished the shard: the sidecar is written last."""
    try:
        there.check_length(shard)
        there.sidecar(shard)
    except (NotFoundError, CorruptionError):
        return False
    return True


def _header(reader: CheckpointReader, at: int, wanted: Shard) -> bytes:
    """Return prefix and header of the segment in the copy."""
    header = reader.headers[at]
    identity = header.identity
    if (wanted.id, wanted.job) == (identity.id, identity.job):
        return reader.head(at)
    template = header_template(
        replace(identity, id=wanted.id, job=wanted.job), [entry.spec for entry in header.entries]
    )
    spans = zip(template.entries, header.entries, strict=True)
    shift = len(template.data) - header.data_begin
    if any(new.begin != old.begin + shift for new, old in spans):
        raise UnsupportedFormatError(
            f"segment {identity.id.key} orders its tensors in another way: keep the job's name"
        )
    return template.fill(
        step=identity.id.step, generation=identity.id.generation, parent=identity.parent
    )


def _check_run(store: ObjectStore, job: str, run: str) -> None:
    there = next(places(store, job), None)
    if there is not None and there.checkpoint.run != run:
        raise PreconditionError(
            f"another job {job} exists here (run {there.checkpoint.run}): import under another "
            f"--job"
        )


def _manifest_there(folder: CheckpointFolder) -> Manifest | None:
    try:
        return folder.manifest()
    except NotFoundError:
        return None


def _check_same(known: Manifest, old: Manifest, place: str) -> None:
    """Check that ``known`` is a copy of ``old``: with another job's name, by what else it says."""
    same = known.shards == old.shards
    if known.job != old.job:
        same = known.plan == old.plan and known.created_at_s == old.created_at_s
    if not same:
        raise AlreadyExistsError(f"another checkpoint is at {place}: import under another --job")
