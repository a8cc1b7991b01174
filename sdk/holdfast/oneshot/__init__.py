"""One-shot checkpoints: a path in, a folder of safetensors out, no service anywhere.

The folder has the layout of ``docs/reference/bucket-v1.md`` and is read by whatever reads that.
``save`` is collective, ``load`` is each rank's own affair. Knows nothing of agents, catalogues
or runs.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass

from holdfast.bucket.holding import opened
from holdfast.oneshot.world import find_world
from holdfast.oneshot.writing import check_state, write
from holdfast.reading.folder import open_folder
from holdfast.state.capture import Capture

__all__ = ["Loaded", "load", "save"]

Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The result of ``load``.

    ``missing`` are names in the state that the checkpoint lacks, ``unexpected`` names in the
    checkpoint that the state lacks; both are empty when strict. ``notes`` are those given to
    ``save``; ``world_size`` is the number of ranks that saved.
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
    """Write ``state`` as a checkpoint into the folder ``path``; it is durable on return.

    The call is collective over the default process group: every rank writes its own shard;
    tensors that all ranks share are written once, and the ranks share that work. If one rank
    fails, all raise. The manifest is written last; without it, readers see no checkpoint.

    Args:
        path: A folder for this checkpoint alone (made if missing), or ``s3://bucket/prefix``; see
            ``objectstore.open_store``. All ranks must see the same folder.
        state: As for ``Checkpointer``; random streams are saved too.
        overwrite: Replace the checkpoint in the folder. It is deleted when all bytes of the new
            one are in the store, so there must be room for both.
        notes: The user's metadata: plain JSON, at most 16 KiB.

    Raises:
        AlreadyExistsError: the folder holds a checkpoint, which is unchanged.
        ConflictError: another save wrote into the folder at the same time.
        InvalidRequestError: the path or a value cannot be saved; the message names it.
        PreconditionError: there are several ranks and no process group.
        UnavailableError, AccessError, ExhaustedError, NotFoundError: the store failed.
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
    """Load the checkpoint in the folder ``path`` into ``state``, in place.

    Every part is verified before its bytes are used, and memory beside the state is bounded by
    ``reading.folder.open_folder``. The call is not collective: each rank reads for itself, with
    any number of ranks. The structure is compared before the first byte is written; after a later
    error (corruption, the store) tensors may be loaded by half.

    Args:
        path: The folder; a copy of it, or a folder of a job in the bucket, works too.
        state: Filled as ``Checkpointer.restore`` does: numbers and texts are replaced in it.
        strict: Refuse names that exist only in the state or only in the checkpoint; False loads
            what matches.
        only: Names of ``state`` to load, such as ``{"model"}``; the others keep their values.
        rng: Also set the random streams.

    Raises:
        NotFoundError: the folder has no checkpoint, or one of its objects is missing.
        DigestMismatchError: bytes differ from those that were saved; names shard and part.
        ManifestError: a file breaks a rule of the format.
        NotReadyError: the checkpoint lacks a tensor (strict).
        ConflictError: another save has replaced the folder meanwhile, where files have no locks.
        InvalidRequestError: the state has another structure than the saved one.
    """
    check_state(state)
    world = find_world(alone=True)
    with opened(os.fspath(path)) as folder:
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
