"""Where checkpoints of DCP lie: what a ``checkpoint_id`` may be."""

from __future__ import annotations

import os
from typing import TypeAlias

from holdfast.errors import InvalidRequestError

Path: TypeAlias = str | os.PathLike[str]

_STORES = ("file", "memory", "s3")


def is_place(checkpoint_id: Path) -> bool:
    """Tell whether this names a folder or a store, as far as its form tells."""
    scheme, colon, _ = os.fspath(checkpoint_id).partition("://")
    return not colon or scheme in _STORES


def place_of(path: str | None) -> str:
    """Return where the checkpoint lies.

    Raises:
        InvalidRequestError: nobody has said it.
    """
    if path is None:
        raise InvalidRequestError("give the writer or reader a path, or the call a checkpoint_id")
    return path
