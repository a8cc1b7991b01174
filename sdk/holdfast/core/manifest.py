"""The manifest: the immutable list of a checkpoint's shards, written last of all.

``docs/reference/bucket-v1.md`` is normative; this module is that page as code. A manifest names
no places: its folder is its place, and a copy of the folder is the same checkpoint. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.canonical import canonical, strict_object
from holdfast.core.digest import ALGORITHM, DIGEST_BYTES, part_digest
from holdfast.core.facts import Shard
from holdfast.core.ids import (
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
from holdfast.core.segment import PLAN_HASH_LENGTH_MAX
from holdfast.errors import InvalidRequestError, ManifestError, UnsupportedFormatError

FORMAT = "holdfast-checkpoint"
VERSION = 1
MANIFEST_BYTES_MAX = 512 << 20
SHARDS_COUNT_MAX = 1_000_000
NOTES_BYTES_MAX = 16 << 10
GENERATION_MAX = 10**10 - 1
LENGTH_BYTES_MAX = 1 << 62

_WRITE_ID = re.compile(r"[0-9a-f]{32}")
_HEX = re.compile(r"(?:[0-9a-f]{2})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One whole checkpoint.

    Invariants:
        * ``shards`` are sorted by id, all of ``checkpoint`` and ``world_size``, one or more
          volumes (0, 1, ...) of every rank.
        * ``parent`` is what the attempt that wrote it had restored, None when it began at step 0.

    ``mesh`` maps axis names to sizes; plain data parallelism is ``{"dp": world_size}``.
    ``write_id`` is drawn by the writer: whoever lost the answer to the conditional create reads
    back and finds its own id, or another's. ``notes`` are the user's.
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

    xxh3-128 over ``rank.volume.plan_hash`` lines in the order of the shards.
    """
    ordered = sorted(shards, key=lambda shard: (shard.id.rank, shard.id.volume))
    lines = (f"{s.id.rank}.{s.id.volume}.{s.plan_hash}\n" for s in ordered)
    return part_digest("".join(lines).encode()).hex()


def encode(manifest: Manifest) -> bytes:
    """Return the canonical text of ``manifest``: equal values, equal bytes.

    Raises:
        ManifestError: it breaks a rule of the format; it would not be read back.
    """
    _check(manifest)
    parent = manifest.parent
    return canonical(
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
            "created_at_s": manifest.created_at_s,
            "software": manifest.software,
            "write_id": manifest.write_id,
            "shards": [
                [s.id.rank, s.id.volume, s.length_bytes, s.root_digest.hex(), s.plan_hash]
                for s in manifest.shards
            ],
        }
    )


def decode(data: bytes) -> Manifest:
    """Return the manifest in ``data``; every rule is checked before anything is believed.

    Raises:
        ManifestError: a rule of the format is broken; the message names it.
        UnsupportedFormatError: a version this code does not read.
    """
    raw = strict_object(data, what="manifest", bytes_max=MANIFEST_BYTES_MAX)
    if raw.get("format") != FORMAT:
        raise ManifestError(f"manifest has format {str(raw.get('format'))[:40]!r}, not {FORMAT!r}")
    if raw.get("version") != VERSION or raw.get("algorithm") != ALGORITHM:
        raise UnsupportedFormatError(
            f"manifest has version {str(raw.get('version'))[:20]}, "
            f"algorithm {str(raw.get('algorithm'))[:20]}; this reads {VERSION}, {ALGORITHM}"
        )
    try:
        manifest = _manifest(raw)
    except (KeyError, InvalidRequestError) as cause:
        raise ManifestError(f"manifest is malformed: {cause}") from cause
    _check(manifest)
    if raw.get("plan") != manifest.plan:
        raise ManifestError("the manifest's plan is not that of its shards")
    if raw.get("length_bytes") != manifest.length_bytes:
        raise ManifestError("the manifest's length is not the sum of its shards")
    return manifest


def _manifest(raw: Mapping[str, Any]) -> Manifest:
    run = run_id(_text(raw, "run"))
    step, generation = _number(raw, "step", STEP_MAX), _number(raw, "generation", GENERATION_MAX)
    checkpoint = CheckpointId(run, Step(step), Generation(generation))
    job, world_size = job_name(_text(raw, "job")), _number(raw, "world_size", WORLD_SIZE_MAX)
    listed = raw.get("shards")
    if not isinstance(listed, list) or len(listed) > SHARDS_COUNT_MAX:
        raise ManifestError(f"manifest has no list of at most {SHARDS_COUNT_MAX} shards")
    created = raw.get("created_at_s")
    if not isinstance(created, int | float) or isinstance(created, bool) or created < 0:
        raise ManifestError("created_at_s is not a time")
    return Manifest(
        checkpoint=checkpoint,
        job=job,
        world_size=world_size,
        shards=tuple(_shard(row, checkpoint, job, world_size) for row in listed),
        write_id=_text(raw, "write_id"),
        created_at_s=float(created),
        parent=_parent(raw.get("parent"), run),
        mesh=_mesh(raw.get("mesh")),
        notes=_object(raw, "notes"),
        software=_text(raw, "software")[:200],
    )


def _shard(row: object, checkpoint: CheckpointId, job: str, world_size: int) -> Shard:
    if not isinstance(row, list) or len(row) != 5:
        raise ManifestError("a shard is not [rank, volume, length, root, plan hash]")
    rank, volume, length, root, plan = row
    numbers = ((rank, WORLD_SIZE_MAX), (volume, WORLD_SIZE_MAX), (length, LENGTH_BYTES_MAX))
    if not all(type(n) is int and 0 <= n <= most for n, most in numbers):
        raise ManifestError(f"shard {str(row)[:80]} has a number out of range")
    if not (isinstance(root, str) and len(root) == 2 * DIGEST_BYTES and _HEX.fullmatch(root)):
        raise ManifestError(f"root digest of rank {rank} is not {2 * DIGEST_BYTES} hex digits")
    if not (isinstance(plan, str) and 0 < len(plan) <= PLAN_HASH_LENGTH_MAX and plan.isascii()):
        raise ManifestError(f"plan hash of rank {rank} is not usable")
    return Shard(
        id=ShardId(checkpoint.run, checkpoint.step, checkpoint.generation, Rank(rank), volume),
        job=job,
        world_size=world_size,
        plan_hash=plan,
        length_bytes=length,
        root_digest=bytes.fromhex(root),
    )


def _parent(raw: object, run: RunId) -> CheckpointId | None:
    if raw is None:
        return None
    if not (isinstance(raw, list) and len(raw) == 2 and all(type(n) is int for n in raw)):
        raise ManifestError("parent is not [step, generation]")
    step, generation = raw
    if not (0 <= step <= STEP_MAX and 0 <= generation <= GENERATION_MAX):
        raise ManifestError("parent is out of range")
    return CheckpointId(run, Step(step), Generation(generation))


def _mesh(raw: object) -> Mapping[str, int]:
    if not isinstance(raw, dict) or not all(type(n) is int and n > 0 for n in raw.values()):
        raise ManifestError("mesh is not a map of axis sizes")
    return raw


def _object(raw: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = raw.get(key)
    if not isinstance(value, dict):
        raise ManifestError(f"{key} is not an object")
    return value


def _text(raw: Mapping[str, object], key: str) -> str:
    value = raw.get(key)
    if not isinstance(value, str):
        raise ManifestError(f"{key} is not a text")
    return value


def _number(raw: Mapping[str, object], key: str, most: int) -> int:
    value = raw.get(key)
    if type(value) is not int or not 0 <= value <= most:
        raise ManifestError(f"{key} is not a number in 0..{most}")
    return value


def _check(manifest: Manifest) -> None:
    """Check what makes the shards one whole checkpoint.

    Raises:
        ManifestError: names the rule.
    """
    if not _WRITE_ID.fullmatch(manifest.write_id):
        raise ManifestError("write_id is not 32 hex digits")
    try:
        notes_bytes = len(canonical(dict(manifest.notes)))
    except (TypeError, ValueError) as cause:
        raise ManifestError(f"notes are not JSON: {cause}") from cause
    if notes_bytes > NOTES_BYTES_MAX:
        raise ManifestError(f"notes of {notes_bytes} bytes exceed {NOTES_BYTES_MAX}")
    if not 0 < len(manifest.shards) <= SHARDS_COUNT_MAX:
        raise ManifestError(f"{len(manifest.shards)} shards, must be 1 to {SHARDS_COUNT_MAX}")
    places = [(shard.id.rank, shard.id.volume) for shard in manifest.shards]
    if places != sorted(set(places)):
        raise ManifestError("shards are not sorted, or one stands twice")
    for shard in manifest.shards:
        named = (shard.id.checkpoint, shard.job, shard.world_size)
        if named != (manifest.checkpoint, manifest.job, manifest.world_size):
            raise ManifestError(f"shard {shard.id.key} is of another checkpoint")
    _check_complete(places, manifest.world_size)


def _check_complete(places: Sequence[tuple[int, int]], world_size: int) -> None:
    """Check that every rank is there, with its volumes counted from 0."""
    volumes: dict[int, int] = {}
    for rank, volume in places:
        if volume != volumes.get(rank, -1) + 1:
            raise ManifestError(f"rank {rank} has volume {volume} without the one before")
        volumes[rank] = volume
    if sorted(volumes) != list(range(world_size)):
        raise ManifestError(f"{len(volumes)} ranks of {world_size} have a shard")
