"""The manifest: the immutable list of a checkpoint's shards, written last of all.

``docs/reference/bucket-v1.md`` is normative; this module is that page as code. A manifest names
no places: its folder is its place, and a copy of the folder is the same checkpoint. Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from holdfast.core.ids import (
    GENERATION_MAX,
    STEP_MAX,
    WORLD_SIZE_MAX,
    CheckpointId,
    Generation,
    Rank,
    RunId,
    ShardId,
    Step,
    job_name,
    run_id,
)
from holdfast.core.origin import Origin, Tree, kept
from holdfast.core.shard import Shard
from holdfast.errors import InvalidRequestError, ManifestError, UnsupportedFormatError
from holdfast.format.canonical import (
    canonical,
    check_digest,
    hex_of,
    number_of,
    strict_object,
    text_of,
    with_digest,
)
from holdfast.format.digest import ALGORITHM, DIGEST_BYTES, part_digest
from holdfast.format.notes import NOTES_BYTES_MAX
from holdfast.format.segment import checked_plan_hash

FORMAT = "holdfast-checkpoint"
VERSION = 1
MANIFEST_BYTES_MAX = 256 << 20
SHARDS_COUNT_MAX = 1_000_000
VOLUME_MAX = 10**6 - 1
LENGTH_BYTES_MAX = 1 << 44
TIME_S_MAX = 1e12
MESH_AXES_COUNT_MAX = 64
NAME_LENGTH_MAX = 128
SOFTWARE_LENGTH_MAX = 200

_WRITE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One whole checkpoint.

    Invariants:
        * ``shards`` are sorted by id, all of ``checkpoint`` and ``world_size``, one or more
          volumes (0, 1, ...) of every rank.
        * ``parent`` is what the attempt that wrote it had restored, None when it began at step 0.

    ``mesh`` maps axis names to sizes; plain data parallelism is ``{"dp": world_size}``.
    ``write_id`` is drawn by the writer: whoever lost the answer to the conditional create reads
    back and finds its own id, or another's. ``notes`` are the user's; ``origin`` is what the
    attempt was started with, None: nobody has said it.
    """

    checkpoint: CheckpointId
    job: str
    world_size: int
    shards: tuple[Shard, ...]
    write_id: str
    created_at_s: float
    parent: CheckpointId | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, object] = field(default_factory=dict)
    software: str = ""
    origin: Origin | None = None

    @property
    def plan(self) -> str:
        """Name of the index object that holds all boxes; see ``checkpoint_plan``."""
        return checkpoint_plan(self.shards)

    @property
    def length_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(shard.length_bytes for shard in self.shards)


def checkpoint_plan(shards: Sequence[Shard]) -> str:
    """Return 32 hex digits that are equal for checkpoints with the same boxes in the same files.

    xxh3-128 over the lines ``rank.volume.plan_hash``, sorted by the numbers.
    """
    return segments_plan((s.id.rank, s.id.volume, s.plan_hash) for s in shards)


def segments_plan(segments: Iterable[tuple[int, int, str]]) -> str:
    """Return what ``checkpoint_plan`` does, from (rank, volume, plan hash)."""
    lines = (f"{rank}.{volume}.{plan_hash}\n" for rank, volume, plan_hash in sorted(segments))
    return part_digest("".join(lines).encode()).hex()


def encode(manifest: Manifest) -> bytes:
    """Return the canonical text of ``manifest``: equal values, equal bytes.

    Raises:
        ManifestError: it breaks a rule of the format; it would not be read back.
    """
    _check(manifest)
    parent = manifest.parent
    data = with_digest(
        {
            "format": FORMAT,
            "version": VERSION,
            "job": manifest.job,
            "run": manifest.checkpoint.run,
            "step": manifest.checkpoint.step,
            "generation": manifest.checkpoint.generation,
            "world_size": manifest.world_size,
            "plan": manifest.plan,
            "algorithm": ALGORITHM,
            "length_bytes": manifest.length_bytes,
            "parent": [parent.step, parent.generation] if parent else None,
            "mesh": dict(manifest.mesh),
            "notes": dict(manifest.notes),
            "created_at_s": float(manifest.created_at_s),
            "software": manifest.software,
            "write_id": manifest.write_id,
            "shards": [
                [s.id.rank, s.id.volume, s.length_bytes, s.root_digest.hex(), s.plan_hash]
                for s in manifest.shards
            ],
            **_origin_said(manifest.origin),
        }
    )
    assert len(data) <= MANIFEST_BYTES_MAX, "the limits of a manifest's parts bound the whole"
    return data


def decode(data: bytes) -> Manifest:
    """Return the manifest in ``data``; every rule is checked before anything is believed.

    Raises:
        ManifestError: a rule of the format is broken; the message names it.
        UnsupportedFormatError: a version this code does not read.
    """
    raw = strict_object(data, what="manifest", bytes_max=MANIFEST_BYTES_MAX)
    check_format(raw, what="manifest", name=FORMAT, version=VERSION)
    check_digest(data, what="manifest")
    try:
        manifest = _manifest(raw)
    except InvalidRequestError as cause:
        raise ManifestError(f"manifest is malformed: {cause}") from cause
    _check(manifest)
    if raw.get("plan") != manifest.plan:
        raise ManifestError("the manifest's plan is not that of its shards")
    if raw.get("length_bytes") != manifest.length_bytes:
        raise ManifestError("the manifest's length is not the sum of its shards")
    return manifest


def check_format(raw: Mapping[str, object], *, what: str, name: str, version: int) -> None:
    """Do nothing if ``raw`` is of this format, version and digest algorithm.

    Raises:
        ManifestError: another format.
        UnsupportedFormatError: another version or algorithm of it.
    """
    if raw.get("format") != name:
        raise ManifestError(f"{what} has format {str(raw.get('format'))[:40]!r}, not {name!r}")
    found, algorithm = raw.get("version"), raw.get("algorithm")
    if type(found) is not int or found != version or algorithm != ALGORITHM:
        raise UnsupportedFormatError(
            f"{what} has version {str(found)[:20]!r}, algorithm {str(algorithm)[:20]!r}; "
            f"this reads {version}, {ALGORITHM}"
        )


def check_complete(places: Sequence[tuple[int, int]], world_size: int) -> None:
    """Check that (rank, volume) are sorted, every rank once for each volume from 0 on.

    Raises:
        ManifestError: names the rule.
    """
    if any(here >= there for here, there in pairwise(places)):
        raise ManifestError("shards are not sorted, or one stands twice")
    volumes: dict[int, int] = {}
    for rank, volume in places:
        if volume != volumes.get(rank, -1) + 1:
            raise ManifestError(f"rank {rank} has volume {volume} without the one before")
        volumes[rank] = volume
    if len(volumes) != world_size or (volumes and max(volumes) != world_size - 1):
        raise ManifestError(f"{len(volumes)} ranks of {world_size} have a shard")


def check_shard(shard: Shard) -> None:
    """Do nothing if ``shard`` can stand in a manifest.

    Raises:
        ManifestError: a number, digest or hash of it is out of range.
    """
    number = shard.id
    if not (0 <= number.rank < shard.world_size and 0 <= number.volume <= VOLUME_MAX):
        raise ManifestError(f"shard {number.key} of {shard.world_size} ranks is out of range")
    if not 0 < shard.length_bytes <= LENGTH_BYTES_MAX:
        raise ManifestError(
            f"shard {number.key} has {shard.length_bytes} bytes, must be 1 to {LENGTH_BYTES_MAX}"
        )
    if len(shard.root_digest) != DIGEST_BYTES:
        raise ManifestError(f"root digest of {number.key} is not {DIGEST_BYTES} bytes")
    try:
        checked_plan_hash(shard.plan_hash)
    except InvalidRequestError as cause:
        raise ManifestError(f"shard {number.key}: {cause}") from cause


def check_notes(notes: Mapping[str, object]) -> None:
    """Do nothing if ``notes`` can stand in a manifest.

    Raises:
        ManifestError: no plain JSON, or longer than ``NOTES_BYTES_MAX``.
    """
    try:
        text = canonical(dict(notes))
        # What cannot be printed must not wait for the one who prints it.
        json.dumps(dict(notes), ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as cause:
        raise ManifestError(f"notes are not JSON: {cause}") from cause
    if len(text) > NOTES_BYTES_MAX:
        raise ManifestError(f"notes of {len(text)} bytes exceed {NOTES_BYTES_MAX}")
    # Inside the manifest they lie one level deeper.
    inside = strict_object(b'{"notes":' + text + b"}", what="notes", bytes_max=2 * NOTES_BYTES_MAX)
    if inside["notes"] != dict(notes):
        raise ManifestError("notes are not plain JSON: texts as keys, lists, no tuples")


def _manifest(raw: Mapping[str, object]) -> Manifest:
    run = run_id(text_of(raw, "run"))
    step, generation = (
        number_of(raw, "step", STEP_MAX),
        number_of(raw, "generation", GENERATION_MAX),
    )
    checkpoint = CheckpointId(run, Step(step), Generation(generation))
    job, world_size = job_name(text_of(raw, "job")), number_of(raw, "world_size", WORLD_SIZE_MAX)
    listed, created, mesh, notes = (
        raw.get(key) for key in ("shards", "created_at_s", "mesh", "notes")
    )
    if not isinstance(listed, list) or len(listed) > SHARDS_COUNT_MAX:
        raise ManifestError(f"manifest has no list of at most {SHARDS_COUNT_MAX} shards")
    if type(created) not in (int, float) or not 0 <= created <= TIME_S_MAX:  # type: ignore[operator]
        raise ManifestError("created_at_s is not a time")
    if not isinstance(mesh, dict) or not isinstance(notes, dict):
        raise ManifestError("mesh or notes is not an object")
    return Manifest(
        checkpoint=checkpoint,
        job=job,
        world_size=world_size,
        shards=tuple(_shard(row, checkpoint, job, world_size) for row in listed),
        write_id=text_of(raw, "write_id"),
        created_at_s=float(created),  # type: ignore[arg-type]
        parent=_parent(raw.get("parent"), run),
        mesh=mesh,
        notes=notes,
        software=text_of(raw, "software"),
        origin=_origin(raw.get("origin")),
    )


def _origin_said(origin: Origin | None) -> dict[str, object]:
    if origin is None:
        return {}
    said = {
        "commit": origin.commit,
        "dirty": {Tree.UNKNOWN: None, Tree.CLEAN: False, Tree.DIRTY: True}[origin.tree],
        "command": origin.command,
        "user": origin.user,
    }
    return {"origin": said}


def _origin(raw: object) -> Origin | None:
    """Return what a manifest says of its attempt's start; what is odd there counts as not said.

    It decides nothing, so that it costs no checkpoint.
    """
    if not isinstance(raw, dict):
        return None
    texts = {name: raw.get(name) for name in ("commit", "command", "user")}
    plain = {name: text for name, text in texts.items() if isinstance(text, str)}
    dirty = raw.get("dirty")
    known = Tree.DIRTY if dirty is True else Tree.CLEAN
    tree = known if isinstance(dirty, bool) else Tree.UNKNOWN
    return kept(Origin(tree=tree, **plain))


def _shard(row: object, checkpoint: CheckpointId, job: str, world_size: int) -> Shard:
    if not isinstance(row, list) or len(row) != 5:
        raise ManifestError("a shard is not [rank, volume, length, root, plan hash]")
    rank, volume, length, root, plan = row
    if any(type(number) is not int for number in (rank, volume, length)):
        raise ManifestError(f"shard {str(row)[:80]!r} has a number that is none")
    if not isinstance(plan, str):
        raise ManifestError(f"plan hash {str(plan)[:40]!r} is not a text")
    return Shard(
        id=ShardId(checkpoint.run, checkpoint.step, checkpoint.generation, Rank(rank), volume),
        job=job,
        world_size=world_size,
        plan_hash=plan,
        length_bytes=length,
        root_digest=hex_of(root, f"root digest {str(root)[:40]!r}"),
    )


def _parent(raw: object, run: RunId) -> CheckpointId | None:
    if raw is None:
        return None
    if not (isinstance(raw, list) and len(raw) == 2 and all(type(n) is int for n in raw)):
        raise ManifestError("parent is not [step, generation]")
    return CheckpointId(run, Step(raw[0]), Generation(raw[1]))


def _check(manifest: Manifest) -> None:
    """Check every rule of the format that is not about JSON.

    Raises:
        ManifestError: names the rule.
    """
    try:
        run_id(manifest.checkpoint.run)
        job_name(manifest.job)
    except InvalidRequestError as cause:
        raise ManifestError(f"manifest is malformed: {cause}") from cause
    _check_numbers(manifest)
    _check_texts(manifest)
    if not 0 < len(manifest.shards) <= SHARDS_COUNT_MAX:
        raise ManifestError(f"{len(manifest.shards)} shards, must be 1 to {SHARDS_COUNT_MAX}")
    for shard in manifest.shards:
        check_shard(shard)
        named = (shard.id.checkpoint, shard.job, shard.world_size)
        if named != (manifest.checkpoint, manifest.job, manifest.world_size):
            raise ManifestError(f"shard {shard.id.key} is of another checkpoint")
    check_complete([(s.id.rank, s.id.volume) for s in manifest.shards], manifest.world_size)


def _check_numbers(manifest: Manifest) -> None:
    own, parent = manifest.checkpoint, manifest.parent
    for checkpoint in (own,) if parent is None else (own, parent):
        if not (0 <= checkpoint.step <= STEP_MAX and 0 <= checkpoint.generation <= GENERATION_MAX):
            raise ManifestError("step or generation is out of range")
    if parent is not None and (parent.run != own.run or parent.generation > own.generation):
        raise ManifestError("parent is of another run, or of a newer generation")
    if not 0 < manifest.world_size <= WORLD_SIZE_MAX:
        raise ManifestError(f"world_size {manifest.world_size} is out of range")
    # Written so that NaN is refused too.
    if not (math.isfinite(manifest.created_at_s) and 0 <= manifest.created_at_s <= TIME_S_MAX):
        raise ManifestError("created_at_s is not a time")


def _check_texts(manifest: Manifest) -> None:
    if not _WRITE_ID.fullmatch(manifest.write_id):
        raise ManifestError("write_id is not 32 hex digits")
    if len(manifest.software) > SOFTWARE_LENGTH_MAX or not manifest.software.isprintable():
        raise ManifestError("software is too long, or not printable")
    mesh = manifest.mesh
    if len(mesh) > MESH_AXES_COUNT_MAX:
        raise ManifestError(f"mesh of {len(mesh)} axes, at most {MESH_AXES_COUNT_MAX}")
    for axis, size in mesh.items():
        if not (type(axis) is str and 0 < len(axis) <= NAME_LENGTH_MAX and axis.isprintable()):
            raise ManifestError(f"mesh axis {str(axis)[:40]!r} is not usable")
        if type(size) is not int or not 0 < size <= WORLD_SIZE_MAX:
            raise ManifestError(f"mesh axis {axis!r} has the size {str(size)[:40]!r}")
    check_notes(manifest.notes)
