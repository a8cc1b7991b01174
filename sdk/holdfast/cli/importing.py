"""``import``: files of other tools, or checkpoints of another Holdfast, into the object tier."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from holdfast.bucket.folder import CheckpointFolder
from holdfast.cli.export import require_torch
from holdfast.cli.output import Json, Report, Table, byte_progress, waiting
from holdfast.cli.rest import Rest
from holdfast.cli.where import find_rest, find_store
from holdfast.core.byte_sizes import format_bytes
from holdfast.errors import InvalidRequestError, NotFoundError, PreconditionError
from holdfast.format.keys import MANIFEST
from holdfast.format.manifest import Manifest
from holdfast.objectstore import ObjectStore, open_store


def import_(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Write what ``args.source`` holds into the store; a service, if there is one, adopts it.

    Raises:
        InvalidRequestError: options that do not fit the kind of source.
        AlreadyExistsError: the store has another checkpoint in that place.
        CheckpointError: source or store; what was not finished is no checkpoint.
    """
    require_torch("import")
    rest = find_rest(environ)
    store = find_store(environ, rest)
    try:
        if _is_foreign(args.source):
            imported = [(_import_files(args, store, rest), True)]
        else:
            imported = _copy_all(args, store, rest)
        jobs = sorted({made.job for made, _ in imported})
        adopted = []
        if rest is not None:
            with waiting("telling the catalogue"):
                adopted = [rest.rebuild(job) for job in jobs]
    finally:
        store.close()
    return _report(imported, adopted if rest is not None else None)


def _is_foreign(source: str) -> bool:
    """Tell files of other tools from Holdfast checkpoints, which have a manifest somewhere."""
    if "://" in source:
        return False
    path = Path(source).expanduser()
    if not path.exists():
        raise NotFoundError(f"no file or folder is at {path}")
    return path.is_file() or not any(path.glob(f"**/{MANIFEST}"))


def _import_files(args: argparse.Namespace, store: ObjectStore, rest: Rest | None) -> Manifest:
    from holdfast.convert import importing  # noqa: PLC0415 - torch is slow
    from holdfast.convert.source import Chosen, Selection  # noqa: PLC0415

    if args.job is None:
        raise InvalidRequestError("give the checkpoint a job: --job NAME")
    store.check()
    source = importing.open_source(Path(args.source).expanduser())
    selection = Selection(only=tuple(args.only), strip=args.strip, add=args.add)
    chosen = Chosen(source, selection)
    checkpoint = importing.place_for(store, args.job, args.step or 0)
    _refuse_taken(rest, {(args.job, checkpoint.run)})
    total_bytes = sum(spec.length_bytes for spec in chosen.specs())
    with byte_progress("importing", total_bytes) as advance:
        return importing.write_checkpoint(
            store, chosen, job=args.job, checkpoint=checkpoint, advance=advance
        )


def _copy_all(
    args: argparse.Namespace, store: ObjectStore, rest: Rest | None
) -> list[tuple[Manifest, bool]]:
    from holdfast.convert.copying import (  # noqa: PLC0415 - torch is slow
        checkpoints,
        copy_checkpoint,
        copy_rollbacks,
        destination,
    )

    if args.only or args.strip or args.add:
        raise InvalidRequestError("--only, --strip and --as are for files of other tools")
    source = open_store(str(Path(args.source).expanduser()) if _is_path(args) else args.source)
    try:
        with waiting("looking for checkpoints"):
            found = [(folder, folder.manifest()) for folder in checkpoints(source)]
        wanted = _wanted(found, args)
        places = [destination(made, args.job) for _, made in wanted]
        _refuse_taken(rest, {(place.job, place.checkpoint.run) for place in places})
        total_bytes = sum(made.length_bytes for _, made in wanted)
        runs = {(made.job, made.checkpoint.run): folder for folder, made in wanted}
        for folder in runs.values() if args.step is None else ():
            copy_rollbacks(folder, store, job=args.job)
        with byte_progress("importing", total_bytes) as advance:
            return [
                copy_checkpoint(folder, store, job=args.job, advance=advance)
                for folder, _ in wanted
            ]
    finally:
        source.close()


def _refuse_taken(rest: Rest | None, wanted: set[tuple[str, str]]) -> None:
    """Refuse a job that the catalogue knows with another run: it would not take the copies in."""
    known = {str(job["job"]): str(job["run"]) for job in rest.jobs()} if rest else {}
    for job, run in sorted(wanted):
        if known.get(job, run) != run:
            raise PreconditionError(
                f"another job {job} exists here (run {known[job]}): import under another --job"
            )


def _is_path(args: argparse.Namespace) -> bool:
    return "://" not in args.source


def _wanted(
    found: list[tuple[CheckpointFolder, Manifest]], args: argparse.Namespace
) -> list[tuple[CheckpointFolder, Manifest]]:
    """Return the checkpoints to copy, oldest first: what is newest there stays newest."""
    chosen = [
        (folder, made)
        for folder, made in found
        if args.step is None or made.checkpoint.step == args.step
    ]
    if not chosen:
        raise NotFoundError(f"no checkpoint with a manifest is at or below {args.source}")
    jobs = sorted({made.job for _, made in chosen})
    if args.job is not None and len(jobs) > 1:
        raise InvalidRequestError(
            f"{args.source} has {len(jobs)} jobs, such as {jobs[0]} and {jobs[1]}: name one of "
            f"them in the source, or leave out --job"
        )
    return sorted(chosen, key=lambda item: (item[1].job, item[1].checkpoint))


def _report(imported: list[tuple[Manifest, bool]], adopted: list[dict[str, Json]] | None) -> Report:
    rows = tuple(
        (
            made.job,
            str(made.checkpoint.step),
            str(made.checkpoint.generation),
            str(len(made.shards)),
            format_bytes(made.length_bytes),
            "imported" if new else "was there",
        )
        for made, new in imported
    )
    text: list[str | Table] = [Table(("job", "step", "attempt", "shards", "size", ""), rows)]
    skipped = [item for answer in adopted or () for item in _list(answer.get("skipped"))]
    text += [f"not adopted: {item['key']}: {item['reason']}" for item in skipped]
    if adopted is None:
        text.append("no service runs here: one that uses this store finds it by the job's name")
    data = {
        "checkpoints": [
            {
                "job": made.job,
                "run": made.checkpoint.run,
                "step": made.checkpoint.step,
                "attempt": made.checkpoint.generation,
                "length_bytes": made.length_bytes,
                "new": new,
            }
            for made, new in imported
        ],
        "adopted": adopted is not None,
        "skipped": skipped,
    }
    return Report(data=data, text=text, failed=bool(skipped))


def _list(value: Json) -> list[dict[str, str]]:
    return value if isinstance(value, list) else []
