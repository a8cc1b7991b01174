"""One-shot checkpoints: a path in, a folder of safetensors out, no service anywhere.

The folder has the layout of ``docs/reference/bucket-v1.md`` and is read by whatever reads that.
``save`` is collective, ``load`` is each rank's own affair. Knows nothing of agents, catalogues
or runs.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import closing
from dataclasses import dataclass

from holdfast.bucket.folder import CheckpointFolder
from holdfast.objectstore import open_store
from holdfast.oneshot.world import find_world
from holdfast.oneshot.writing import check_state, write
from holdfast.reading.folder import open_folder
from holdfast.state.capture import Capture

__all__ = ["Loaded", "load", "save"]

Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What ``load`` found.

    ``missing``: names in the state that the checkpoint lacks; ``unexpected``: names in the
    checkpoint that the state lacks; both empty when strict. ``notes`` are those given to ``save``.
    """

    notes: Mapping[str, object]
    world_size: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def save(
    path: Path,
    state: MutableMapping[str, object],
    *,
    overwrite: bool = False,
    notes: Mapping[str, object] | None = None,
) -> None:
    """Write ``state`` as a checkpoint into the folder ``path``; when this returns it is durable.

    Collective over the default process group: every rank calls it and writes its own shard;
    replicated tensors are written once, spread by bytes. If one rank fails, all raise. Until the
    manifest, which comes last, there is no checkpoint for a reader of Holdfast.

    Args:
        path: A folder of its own (made if missing), or ``s3://bucket/prefix``; see
            ``objectstore.open_store``. All ranks must see the same one.
        state: As for ``Checkpointer``; random streams go along.
        overwrite: Replace a checkpoint that is there. It goes once all bytes of the new one are
            in the store; there must be room for both.
        notes: The user's metadata: plain JSON, at most 16 KiB.

    Raises:
        AlreadyExistsError: a checkpoint is there; it stays, as after every refusal.
        ConflictError: another save wrote into the folder at the same time.
        InvalidRequestError: a path or value that cannot be saved, named.
        PreconditionError: several ranks and no process group.
        UnavailableError, AccessError, ExhaustedError, NotFoundError: the store.
    """
    write(os.fspath(path), state, find_world(), overwrite=overwrite, notes=notes or {})


def load(
    path: Path,
    state: MutableMapping[str, object],
    *,
    strict: bool = True,
    only: Collection[str] | None = None,
    rng: bool = False,
) -> Loaded:
    """Put the checkpoint in the folder ``path`` into ``state``, in place, whatever wrote it.

    Every part is verified before its bytes are used, and memory beside the state is bounded by
    ``reading.folder.open_folder``. Not collective: each rank reads for itself, of any world size.
    Structure is compared before the first byte is written; after an error beyond that
    (corruption, the store) tensors may hold anything.

    Args:
        path: The folder; a copy, and one of a job in the bucket, will do too.
        state: Filled as ``Checkpointer.restore`` does: scalars are set in it.
        strict: Refuse what is only here or only there; else load what matches.
        only: Names of ``state`` to load, such as ``{"model"}``; the others are left alone.
        rng: Set the random streams too.

    Raises:
        NotFoundError: no checkpoint there, or one of its objects is missing.
        DigestMismatchError: bytes are not those that were saved; names shard and part.
        ManifestError: a rule of the format is broken.
        NotReadyError: a tensor is missing (strict).
        InvalidRequestError: another structure than the saved one.
    """
    check_state(state)
    world = find_world(alone=True)
    with closing(open_store(os.fspath(path))) as store:
        folder = CheckpointFolder(store)
        manifest = folder.manifest()
        with open_folder(folder, manifest) as segments:
            capture = Capture(state, rank=world.rank, world_size=world.size, rng=rng)
            try:
                found = capture.load(
                    segments, step=manifest.checkpoint.step, strict=strict, only=only
                )
            finally:
                capture.release()
    return Loaded(
        notes=manifest.notes,
        world_size=manifest.world_size,
        missing=found.missing,
        unexpected=found.unexpected,
    )
