"""How many GPUs this node offers, and of which type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from holdfast.core.executions import GPUS_PER_NODE_MAX
from holdfast.errors import InvalidRequestError
from holdfast.launcher.options import gpus_count

DRIVER = Path("/proc/driver/nvidia/gpus")
_MODEL = re.compile(r"^Model:\s*(.+)$", re.MULTILINE)


def offered(asked: str, environ: Mapping[str, str]) -> int:
    """Return how many GPUs to offer: ``auto``, or a number.

    Without GPUs a number stands for places of ranks on the CPU.

    Raises:
        InvalidRequestError: it is neither, or more than there are.
    """
    here = gpus_count(environ)
    if asked == "auto":
        if not here:
            raise InvalidRequestError("--gpus auto: no GPU is here; --gpus N offers N places")
        return here
    wanted = count(asked)
    if here and wanted > here:
        raise InvalidRequestError(f"--gpus {asked}: this node has {here}")
    return wanted


def count(asked: str) -> int:
    """Return the number of GPUs of a node that ``asked`` says.

    Raises:
        InvalidRequestError: it is no number, or no node has so many.
    """
    if not re.fullmatch("[0-9]{1,4}", asked) or not 1 <= int(asked) <= GPUS_PER_NODE_MAX:
        raise InvalidRequestError(
            f"--gpus {asked[:40]}: pass auto, or a number from 1 to {GPUS_PER_NODE_MAX}"
        )
    return int(asked)


def kind(folder: Path = DRIVER) -> str:
    """Return the type of the GPUs as their driver calls it; empty: it does not say."""
    for path in sorted(folder.glob("*/information")):
        try:
            found = _MODEL.search(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        if found:
            return re.sub(r"[^A-Za-z0-9._-]+", "-", found[1].strip()).strip("-")[:64]
    return "cpu" if not folder.is_dir() else ""
