"""Copies Holdfast checkpoints from one store to another, under the same or another job name.

Every part is verified on the way and hashed again as written. A shard that an earlier try has
finished is not sent twice; the manifest goes last. A new job name changes each segment's header,
so its digests are made anew; run, step, generation and lineage stay.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace

from holdfast.bucket.folder import CheckpointFolder
from holdfast.convert.importing import publish
from holdfast.convert.reading import CheckpointReader
from holdfast.convert.upload import SegmentUpload, is_there
from holdfast.core import keys
from holdfast.core.digest import root_digest
from holdfast.core.facts import Shard
from holdfast.core.ids import job_name
from holdfast.core.manifest import Manifest
from holdfast.core.segment import SegmentHeader, header_template, parse_header
from holdfast.core.sidecar import Sidecar, encode
from holdfast.errors import AlreadyExistsError, NotFoundError, UnsupportedFormatError
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
        CorruptionError: a part of the source is not what was sealed.
    """
    old = source.manifest()
    name = job_name(job or old.job)
    there = CheckpointFolder(store, keys.folder(name, old.checkpoint))
    known = _manifest_there(there)
    if known is not None:
        _check_same(known, old, there.prefix)
        advance(old.length_bytes)
        return known, False
    with CheckpointReader(source) as reader:
        copied = [_copy(reader, at, there, name, advance) for at in range(len(old.shards))]
    shards, headers = zip(*copied, strict=True)
    write_id = old.write_id if name == old.job else secrets.token_hex(16)
    new = replace(old, job=name, shards=shards, write_id=write_id)
    return publish(store, new, headers), True


def _copy(
    reader: CheckpointReader, at: int, there: CheckpointFolder, job: str, advance: Advance
) -> tuple[Shard, SegmentHeader]:
    """Copy one segment and its sidecar; return what they are there."""
    old = reader.manifest.shards[at]
    head = _header(reader, at, job)
    data_begin = reader.headers[at].data_begin
    shard = replace(old, job=job, length_bytes=len(head) + old.length_bytes - data_begin)
    header = parse_header(head, shard.length_bytes)
    key, sidecar_key = there.segment_key(shard), there.sidecar_key(shard)
    if job == old.job and is_there(there.store, key, sidecar_key, shard):
        advance(old.length_bytes)
        return shard, header
    with SegmentUpload(there.store, key, shard.length_bytes) as upload:
        upload.write(head)
        for part in reader.stream(at, data_begin):
            upload.write(part)
            advance(len(part))
        digests = upload.finish()
    shard = replace(shard, root_digest=root_digest(shard.length_bytes, digests))
    assert job != old.job or shard == old, "the same bytes have the same digests"
    there.store.put(sidecar_key, encode(Sidecar(shard=shard, digests=digests)))
    return shard, header


def _header(reader: CheckpointReader, at: int, job: str) -> bytes:
    """Return prefix and header of the segment in the copy."""
    header = reader.headers[at]
    identity = header.identity
    if job == identity.job:
        return reader.head(at)
    template = header_template(
        replace(identity, job=job_name(job)), [entry.spec for entry in header.entries]
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


def _manifest_there(folder: CheckpointFolder) -> Manifest | None:
    try:
        return folder.manifest()
    except NotFoundError:
        return None


def _check_same(known: Manifest, old: Manifest, place: str) -> None:
    """Check that ``known`` is a copy of ``old``: with another job's name, by what else it says."""
    same = known.shards == old.shards
    if known.job != old.job:
        plans = [(shard.id, shard.plan_hash) for shard in known.shards]
        same = plans == [(shard.id, shard.plan_hash) for shard in old.shards]
        same = same and known.created_at_s == old.created_at_s
    if not same:
        raise AlreadyExistsError(f"another checkpoint lies at {place}")
