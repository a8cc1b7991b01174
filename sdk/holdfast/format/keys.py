"""Names of the objects of a checkpoint: ``docs/reference/bucket-v1.md`` as code.

::

    <job>/<run>/step-<n>.g<generation>/shard-<rank>-of-<world>[.v<volume>].safetensors
                                      /shard-<rank>-of-<world>[.v<volume>].sum
                                      /manifest.json                  last of all
    <job>/<run>/index-<plan>.json                                     one per plan of all shards
    <job>/<run>/rollback.g<generation>.json                           one per rollback of the run

Keys are relative to the store's prefix. What comes from a listing is parsed here, and never
becomes a path or a name unchecked (P9). Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.core.ids import (
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
from holdfast.errors import InvalidRequestError

MANIFEST = "manifest.json"
SEGMENT_SUFFIX = ".safetensors"
SIDECAR_SUFFIX = ".sum"
ROLLBACK = "rollback."

_FOLDER = re.compile(r"step-(0|[1-9][0-9]{0,14})\.g(0|[1-9][0-9]{0,9})")
_SHARD = re.compile(r"shard-([0-9]{5,7})-of-([0-9]{5,7})(?:\.v([1-9][0-9]{0,5}))?")
_PLAN = re.compile(r"[0-9a-f]{32}")
_ROLLBACK = re.compile(r"rollback\.g(0|[1-9][0-9]{0,9})\.json")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint lies: the job's name and the checkpoint's id."""

    job: str
    checkpoint: CheckpointId


def run_folder(job: str, run: str) -> str:
    """Return the prefix of all objects of a run; ends in ``/``.

    Raises:
        InvalidRequestError: a name that must not become a key.
    """
    return f"{job_name(job)}/{run_id(run)}/"


def folder(job: str, checkpoint: CheckpointId) -> str:
    """Return the prefix of all objects of one checkpoint; ends in ``/``.

    Raises:
        InvalidRequestError: a name or a number that would not be read back.
    """
    name = f"step-{checkpoint.step}.g{checkpoint.generation}"
    if not _FOLDER.fullmatch(name):
        raise InvalidRequestError(f"{name[:80]!r} is out of range")
    return f"{run_folder(job, checkpoint.run)}{name}/"


def shard_stem(shard: ShardId, world_size: int) -> str:
    """Return the file name of a shard, without what tells the segment from the sidecar.

    Raises:
        InvalidRequestError: a number that would not be read back.
    """
    volume = f".v{shard.volume}" if shard.volume else ""
    stem = f"shard-{shard.rank:05}-of-{world_size:05}{volume}"
    if not _SHARD.fullmatch(stem) or not shard.rank < world_size <= WORLD_SIZE_MAX:
        raise InvalidRequestError(f"{stem[:80]!r} is out of range")
    return stem


def segment_key(job: str, shard: ShardId, world_size: int) -> str:
    """Return the key of a shard's segment."""
    return f"{folder(job, shard.checkpoint)}{shard_stem(shard, world_size)}{SEGMENT_SUFFIX}"


def sidecar_key(job: str, shard: ShardId, world_size: int) -> str:
    """Return the key of a shard's sidecar."""
    return f"{folder(job, shard.checkpoint)}{shard_stem(shard, world_size)}{SIDECAR_SUFFIX}"


def manifest_key(job: str, checkpoint: CheckpointId) -> str:
    """Return the key of the object whose being there makes the checkpoint durable."""
    return f"{folder(job, checkpoint)}{MANIFEST}"


def index_key(job: str, run: str, plan: str) -> str:
    """Return the key of the index of all boxes of a plan; see ``manifest.checkpoint_plan``.

    Raises:
        InvalidRequestError: a name that must not become a key.
    """
    if not _PLAN.fullmatch(plan):
        raise InvalidRequestError(f"plan {plan[:40]!r} is not 32 hex digits")
    return f"{run_folder(job, run)}index-{plan}.json"


def rollback_key(job: str, run: str, generation: int) -> str:
    """Return the key of the record of the rollback that has this generation.

    Raises:
        InvalidRequestError: a name or a number that would not be read back.
    """
    name = f"{ROLLBACK}g{generation}.json"
    if not _ROLLBACK.fullmatch(name):
        raise InvalidRequestError(f"{name[:80]!r} is out of range")
    return f"{run_folder(job, run)}{name}"


def parse_rollback(key: str) -> int | None:
    """Return the generation of the rollback whose record has this key, or None."""
    match = _ROLLBACK.fullmatch(key.rpartition("/")[2])
    return int(match[1]) if match else None


def parse_folder(key: str) -> Place | None:
    """Return whose folder ``key``, or the object in it, is; None when it is something else."""
    parts = key.rstrip("/").split("/")
    for at in range(len(parts) - 1, 1, -1):
        match = _FOLDER.fullmatch(parts[at])
        if match is None:
            continue
        try:
            job, run = job_name("/".join(parts[: at - 1])), run_id(parts[at - 1])
        except InvalidRequestError:
            return None
        step, generation = map(int, match.groups())
        return Place(job, CheckpointId(RunId(run), Step(step), Generation(generation)))
    return None


def folder_place(prefix: str) -> Place | None:
    """Return the place whose ``folder`` is exactly ``prefix``, or None."""
    place = parse_folder(prefix)
    exact = place is not None and folder(place.job, place.checkpoint) == prefix
    return place if exact else None


def parse_shard_stem(stem: str, checkpoint: CheckpointId) -> tuple[ShardId, int] | None:
    """Return the shard and the world size that a file name without suffix says, or None."""
    match = _SHARD.fullmatch(stem)
    if match is None:
        return None
    rank, world_size, volume = int(match[1]), int(match[2]), int(match[3] or 0)
    shard = ShardId(checkpoint.run, checkpoint.step, checkpoint.generation, Rank(rank), volume)
    try:
        # One spelling per shard: what would be written otherwise is not ours.
        return (shard, world_size) if shard_stem(shard, world_size) == stem else None
    except InvalidRequestError:
        return None
