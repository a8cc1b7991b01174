"""``export``: a checkpoint of the object tier as files of other tools (F89)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from holdfast.cli.output import Report, byte_progress
from holdfast.cli.where import reading
from holdfast.core.byte_sizes import format_bytes
from holdfast.errors import InvalidRequestError, UnavailableError

FORMATS = ("safetensors", "hf", "dcp", "torch")


def export(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Write the checkpoint and print the paths that were written.

    Raises:
        InvalidRequestError: the destination is not a local path.
        AlreadyExistsError: something is there.
        PreconditionError: the read lease was lost.
        UnavailableError: torch is not installed.
    """
    if "://" in args.dest:
        raise InvalidRequestError(f"{args.dest} is not a local path: export here, then upload")
    require_torch("export")
    from holdfast.convert.exporting import export as write  # noqa: PLC0415 - torch is slow
    from holdfast.convert.reading import CheckpointReader  # noqa: PLC0415
    from holdfast.convert.source import Chosen, Selection  # noqa: PLC0415

    dest = Path(args.dest).expanduser()
    with (
        reading(args.place, environ) as found,
        CheckpointReader(found.folder, found.check) as reader,
    ):
        made = reader.manifest
        chosen = Chosen(reader, Selection(only=args.only, strip=args.strip))
        total_bytes = sum(spec.length_bytes for spec in chosen.specs())
        with byte_progress("exporting", total_bytes) as advance:
            paths = write(chosen, dest, args.format, force=args.force, advance=advance)
    count = len(chosen.specs())
    data = {
        "job": made.job,
        "step": made.checkpoint.step,
        "attempt": made.checkpoint.generation,
        "format": args.format,
        "paths": [str(path) for path in paths],
        "tensors": count,
        "length_bytes": total_bytes,
    }
    where = " and ".join(map(str, paths))
    text = f"step {made.checkpoint.step}: {count} tensors, {format_bytes(total_bytes)} in {where}"
    return Report(data=data, text=[text])


def require_torch(command: str) -> None:
    """Do nothing if torch can be imported.

    Raises:
        UnavailableError: it cannot; says what to install.
    """
    from importlib.util import find_spec  # noqa: PLC0415 - not needed by other commands

    if find_spec("torch") is None:
        raise UnavailableError(f"`holdfast {command}` needs torch: pip install holdfast[torch]")
