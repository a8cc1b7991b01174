"""Writes what a guard has refused into a folder, to be looked at; no restore ever reads it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from holdfast.errors import CheckpointError
from holdfast.logs import steady_logger
from holdfast.snapshot.engine import Snapshot

KEPT_COUNT_MAX = 4
"""Files that one process writes: a training that goes on with NaN must not fill the disk."""

log = steady_logger(__name__)


class RefusedParts:
    """One rank's part of the first of refused steps that follow each other, as a file each time.

    Files are ``<folder>/step-<step>-attempt-<generation>-rank-<rank>.safetensors``, the segment as
    it lay in its slot: any safetensors reader opens them. They appear whole, and replace nothing.
    """

    def __init__(self, folder: Path, *, rank: int, who: str) -> None:
        self._folder = folder
        self._rank = rank
        self._who = who
        self._count = 0
        self._in_a_row = False

    def take(self, snapshot: Snapshot, *, refused: bool) -> None:
        """Write a copied snapshot if it is the first that is refused; never raises.

        Its slot is still being written by this process. It takes as long as the disk does.
        """
        first, self._in_a_row = refused and not self._in_a_row, refused
        if not first or self._count >= KEPT_COUNT_MAX:
            return
        self._count += 1
        stem = f"step-{snapshot.step}-attempt-{snapshot.generation}-rank-{self._rank}"
        path = self._folder / f"{stem}.safetensors"
        begun = path.with_suffix(".part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with begun.open("xb") as file:
                data = snapshot.buffer.between(0, snapshot.plan.length_bytes)
                file.write(data.numpy().data)
            if path.exists():
                raise FileExistsError(f"{path} is there already")
            begun.rename(path)
        except (OSError, ValueError, CheckpointError) as error:  # ValueError: no path at all
            with contextlib.suppress(OSError, ValueError):
                begun.unlink(missing_ok=True)
            log.warning("%s: step %d, refused, is not kept: %s", self._who, snapshot.step, error)
        else:
            log.warning("%s: step %d, refused, is kept in %s", self._who, snapshot.step, path)
