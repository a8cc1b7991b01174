"""Writes the file that says that a process is ready, and how others reach it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


def say_ready(path: Path | None, record: Mapping[str, object]) -> None:
    """Write ``record`` as JSON to ``path``, by rename, so that readers see a whole file.

    None: nobody asked for the file.
    """
    if path is None:
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(record, indent=1), encoding="utf-8")
    draft.replace(path)
