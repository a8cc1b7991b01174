"""What ranks print, with ``--tee``: each line to the terminal behind its rank, and to a file."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import BinaryIO


class Output:
    """One stream of one rank, read by a thread of its own until the rank and its children end.

    ``write_end`` is for the rank; whoever has given it away closes it here.
    """

    def __init__(self, terminal: BinaryIO, prefix: str) -> None:
        read_end, self.write_end = os.pipe()
        self._terminal = terminal
        self._prefix = prefix.encode()
        self._file: BinaryIO | None = None
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._copy, args=(read_end,), daemon=True)
        self._thread.start()

    def keep(self, path: Path) -> None:
        """Write what comes from now on to ``path`` too."""
        with self._guard:
            self._file = path.open("ab", buffering=0)

    def finish(self, wait_s: float) -> None:
        """Wait for what is still to be copied."""
        self._thread.join(wait_s)

    def _copy(self, read_end: int) -> None:
        with os.fdopen(read_end, "rb") as source:
            for line in source:
                self._terminal.write(self._prefix + line)
                self._terminal.flush()
                with self._guard:
                    if self._file:
                        self._file.write(line)
        with self._guard:
            if self._file:
                self._file.close()
