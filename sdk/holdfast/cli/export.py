"""``export`` and ``convert``: a checkpoint or files of a tool as files of another tool (F89)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.bringing import in_store
from holdfast.cli.output import Json, Report, Table, byte_progress, counted
from holdfast.cli.stopping import stoppable
from holdfast.cli.where import reading
from holdfast.core.byte_sizes import format_bytes
from holdfast.errors import InvalidRequestError, UnavailableError
from holdfast.format.keys import MANIFEST

if TYPE_CHECKING:
    from holdfast.convert.source import TensorSource

FORMATS = ("safetensors", "hf", "dcp", "torch")


def export(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Write the checkpoint and print the paths that were written.

    Raises:
        InvalidRequestError: the destination is not a local path; or groups of ranks have saved
            different tensors under one name, and none was chosen.
        AlreadyExistsError: something is there.
        PreconditionError: the read lease was lost, or it can no more go to the object store.
        UnavailableError: torch is not installed.
        StoppedError: a signal came; nothing was written.
    """
    dest = _destination(args, "export")
    from holdfast.convert.plain_names import (  # noqa: PLC0415 - torch is slow
        OneProcess,
        PlainNames,
        is_of_one_process,
        of_groups,
    )
    from holdfast.convert.reading import CheckpointReader  # noqa: PLC0415

    with (
        stoppable(f"{dest} was not written"),
        in_store(args.place, environ) as place,
        reading(place, environ) as found,
        CheckpointReader(found.folder, found.check) as reader,
    ):
        made = reader.manifest.checkpoint
        source: TensorSource = reader
        if args.rank is not None or args.only or args.strip:
            source = PlainNames(reader, args.rank)
        elif is_of_one_process(reader):
            source = OneProcess(reader)
        what = args.place if isinstance(args.place, str) else f"step {made.step}"
        data, text = _write(args, source, dest, what)
        named = of_groups(spec.fqn for spec in source.specs())
    if named:
        text.append(
            f"groups of ranks have saved {counted(len(named), 'tensor')} under names of their own, "
            f"such as {named[0]}: with --only, --strip or --rank tensors have their plain names"
        )
    data |= {"job": reader.manifest.job, "step": made.step, "attempt": made.generation}
    data["of_groups"] = named
    return Report(data=data, text=text)


def convert(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Write what the files of another tool hold in another format; no service is asked.

    Raises:
        InvalidRequestError: the destination is not a local path.
        CheckpointError: what the reader of the source refuses, or the destination.
        StoppedError: a signal came; nothing was written.
    """
    del environ
    dest = _destination(args, "convert")
    from holdfast.convert.importing import open_source  # noqa: PLC0415 - torch is slow

    path = Path(args.source).expanduser()
    if (path / MANIFEST).is_file():
        raise InvalidRequestError(f"{path} is a checkpoint of Holdfast: use `holdfast export`")
    with stoppable(f"{dest} was not written"):
        source = open_source(path)
        if source.values() and not (args.only or args.strip or args.add):
            raise InvalidRequestError(
                f"{args.source} holds values that are no tensors, such as "
                f"{next(iter(source.values()))!r}, for which other formats have no place: choose "
                f"the tensors with --only"
            )
        data, text = _write(args, source, dest, str(args.source))
    return Report(data=data, text=text)


def _destination(args: argparse.Namespace, command: str) -> Path:
    if "://" in args.dest:
        raise InvalidRequestError(f"{args.dest} is not a local path: {command} here, then upload")
    if args.file_bytes_max is not None and args.format != "hf":
        raise InvalidRequestError(f"--max-shard-size is for --format hf: {args.format} is one file")
    require_torch(command)
    return Path(args.dest).expanduser()


def _write(
    args: argparse.Namespace, source: TensorSource, dest: Path, what: str
) -> tuple[dict[str, Json], list[str | Table]]:
    """Write what is selected of ``source``; return what there is now, as a report has it."""
    from holdfast.convert.exporting import export as write  # noqa: PLC0415 - torch is slow
    from holdfast.convert.source import Chosen, Selection  # noqa: PLC0415

    add = getattr(args, "add", "")
    chosen = Chosen(source, Selection(only=tuple(args.only), strip=args.strip, add=add))
    specs = chosen.specs()
    total_bytes = sum(spec.length_bytes for spec in specs)
    with byte_progress("exporting", total_bytes) as advance:
        paths = write(
            chosen, dest, args.format, force=args.force,
            file_bytes_max=args.file_bytes_max, advance=advance,
        )  # fmt: skip
    data: dict[str, Json] = {
        "format": args.format,
        "paths": [str(path) for path in paths],
        "tensors": len(specs),
        "length_bytes": total_bytes,
    }
    where = " and ".join(map(str, paths))
    return data, [f"{what}: {len(specs)} tensors, {format_bytes(total_bytes)} in {where}"]


def require_torch(command: str) -> None:
    """Do nothing if torch can be imported.

    Raises:
        UnavailableError: it cannot; says what to install.
    """
    from importlib.util import find_spec  # noqa: PLC0415 - not needed by other commands

    if find_spec("torch") is None:
        raise UnavailableError(f"`holdfast {command}` needs torch: pip install holdfast[torch]")
