"""What a script does with files: what it loads, and that it writes no junk while it catches up."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from holdfast.patches import Patches

SAMPLE_BYTES = 1 << 16
"""Of a file that is loaded, at its begin and at its end: there is the directory, with digests."""


class Files:
    """Replaces ``torch.load`` and ``torch.save``, and what moves files that were not written.

    ``counts`` tells whether what is loaded now counts, ``is_muted`` whether nothing is to be
    written now; ``tell`` is called when something is not.
    """

    def __init__(
        self,
        patches: Patches,
        *,
        counts: Callable[[], bool],
        is_muted: Callable[[], bool],
        tell: Callable[[], None],
    ) -> None:
        self.loads = 0
        self._counts = counts
        self._is_muted = is_muted
        self._tell = tell
        self._digest = hashlib.sha256()
        self._unwritten: set[Path] = set()
        patches.replace(torch, "load", self._loading)
        patches.replace(torch, "save", self._saving)
        for owner, name in (
            (os, "replace"), (os, "rename"),
            (shutil, "copy"), (shutil, "copy2"), (shutil, "copyfile"), (shutil, "move"),
        ):  # fmt: skip
            patches.replace(owner, name, self._moving)

    @property
    def loaded(self) -> str:
        """What the files that were loaded hold, as a digest of samples."""
        return self._digest.hexdigest() if self.loads else ""

    def _loading(self, original: Any) -> Any:
        def load(*args: Any, **kwargs: Any) -> Any:
            if self._counts():
                self.loads += 1
                self._digest.update(_sample(args[0] if args else kwargs.get("f")))
            return original(*args, **kwargs)

        return load

    def _saving(self, original: Any) -> Any:
        def save(*args: Any, **kwargs: Any) -> Any:
            target = args[1] if len(args) > 1 else kwargs.get("f")
            if not self._is_muted() or isinstance(target, io.BytesIO):
                return original(*args, **kwargs)
            self._tell()
            path = target if isinstance(target, os.PathLike) else getattr(target, "name", target)
            if isinstance(path, str | os.PathLike):
                self._unwritten.add(_absolute(path))
            return None

        return save

    def _moving(self, original: Any) -> Any:
        def move(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            is_path = self._is_muted() and isinstance(source, str | os.PathLike)
            if is_path and _absolute(source) in self._unwritten:
                self._unwritten.add(_absolute(target))
                return target
            return original(source, target, *args, **kwargs)

        return move


def _absolute(path: Any) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - follows no links, as a move does


def _sample(target: object) -> bytes:
    """Return the size and some bytes of a file, so that one with other weights differs."""
    with suppress(OSError, TypeError, ValueError):
        with open(target, "rb") as file:  # type: ignore[call-overload]  # noqa: PTH123
            size = file.seek(0, io.SEEK_END)
            pieces = []
            for place in (0, max(0, size - SAMPLE_BYTES)):
                file.seek(place)
                pieces.append(file.read(SAMPLE_BYTES))
        return b"".join([size.to_bytes(8, "little"), *pieces])
    return b""
