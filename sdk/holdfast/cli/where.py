"""What ``JOB[@STEP]|FOLDER_OR_URL`` names, and the object store that it lies in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.bucket.folder import CheckpointFolder
from holdfast.cli.catalogue import Target, find_checkpoint, parse_target
from holdfast.cli.lease import ReadLease
from holdfast.cli.rest import Record, Rest
from holdfast.core.ids import CheckpointId, Generation, Step, run_id
from holdfast.embedded import home_folder, running_stack
from holdfast.errors import NotFoundError, PreconditionError
from holdfast.format.keys import MANIFEST, folder
from holdfast.objectstore import ObjectStore, open_store


@dataclass(frozen=True, slots=True)
class Reading:
    """A checkpoint folder that may be read; call ``check`` often: it raises when it may not."""

    folder: CheckpointFolder
    check: Callable[[], None]


def parse_place(text: str) -> Target | str:
    """Return a target of the catalogue, or the URL or path of a checkpoint folder.

    A path is what begins with ``/``, ``.`` or ``~``, or is a folder with a manifest.

    Raises:
        InvalidRequestError: neither.
    """
    if "://" in text:
        return text
    if text.startswith(("/", ".", "~")) or (Path(text) / MANIFEST).is_file():
        return str(Path(text).expanduser().absolute())
    return parse_target(text)


@contextmanager
def reading(place: Target | str, environ: Mapping[str, str]) -> Iterator[Reading]:
    """Yield the checkpoint that ``place`` names, kept from deletion if a catalogue knows it.

    Raises:
        NotFoundError: no such checkpoint.
        PreconditionError: it is not in the object store, or is bad or expired.
    """
    if isinstance(place, str):
        store = open_store(place)
        try:
            store.check()
            folder = CheckpointFolder(store)
            folder.manifest()  # raises, in a sentence of its own, if there is none
            yield Reading(folder, lambda: None)
        finally:
            store.close()
        return
    rest = Rest.find(environ)
    checkpoint = find_checkpoint(rest, place, durable=True)
    store = find_store(environ, rest)
    try:
        with ReadLease(rest, checkpoint) as lease:
            yield Reading(CheckpointFolder(store, _prefix(checkpoint)), lease.check)
    finally:
        store.close()


def find_store(environ: Mapping[str, str], rest: Rest | None = None) -> ObjectStore:
    """Return ``HOLDFAST_STORE``, else the store of the stack that runs here or of the service.

    Raises:
        NotFoundError: none of them names one.
        PreconditionError: the service has no object tier.
    """
    if named := environ.get("HOLDFAST_STORE"):
        return open_store(named)
    stack = running_stack(home_folder(environ))
    if stack is not None and stack.store:
        return open_store(stack.store)
    try:
        url = (rest or Rest.find(environ)).store()["url"]
    except NotFoundError as cause:
        raise NotFoundError(
            "no object store is known: set HOLDFAST_STORE, or start the stack (holdfast up)"
        ) from cause
    if not url:
        raise PreconditionError("the metadata service has no object store: set HOLDFAST_STORE")
    return open_store(str(url))


def find_rest(environ: Mapping[str, str]) -> Rest | None:
    """Return the metadata service, None when none is named and none runs here."""
    try:
        return Rest.find(environ)
    except NotFoundError:
        return None


def _prefix(checkpoint: Record) -> str:
    id_ = CheckpointId(
        run_id(str(checkpoint["run"])),
        Step(int(checkpoint["step"])),
        Generation(int(checkpoint["generation"])),
    )
    return folder(str(checkpoint["job"]), id_)
