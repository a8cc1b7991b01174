"""One log file for the whole stack: every line says whose it is, and the file stays small."""

from __future__ import annotations

import logging
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

LOG_BYTES_MAX = 16 << 20
LOG_FILES_KEPT = 1

_CHILD = "child."


class _Format(logging.Formatter):
    """``<service> | <line>``: a child's line as it came, ours with time and level."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name.startswith(_CHILD):
            return f"{record.name.removeprefix(_CHILD)} | {record.getMessage()}"
        return f"supervisor | {super().format(record)}"


def configure(file: Path, *, level: str, to_terminal: bool) -> None:
    """Send all logging of this process to ``file``, and to standard error if so asked."""
    handlers: list[logging.Handler] = [
        RotatingFileHandler(file, maxBytes=LOG_BYTES_MAX, backupCount=LOG_FILES_KEPT)
    ]
    if to_terminal:
        handlers.append(logging.StreamHandler(sys.stderr))
    form = _Format("%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%S")
    for handler in handlers:
        handler.setFormatter(form)
        logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(level)
    logging.getLogger("child").setLevel(logging.INFO)
