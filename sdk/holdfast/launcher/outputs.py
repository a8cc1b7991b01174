"""What ranks print, with ``--tee``: each line to the terminal behind its rank, and to a file.

A rank is never kept waiting by a terminal that has gone or a disk that is full: what cannot be
written is lost, which is said once. Memory is bounded, whatever is printed.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

CHUNK_BYTES = 1 << 16
LINE_BYTES_MAX = 1 << 16
"""A longer line is shown in pieces, each as a line of its own; in the file it stays as it is."""

_terminals = threading.Lock()
"""Lines of several ranks are not mixed up."""


class Output:
    """One stream of one rank, read by a thread of its own until the rank and its children end.

    ``write_end`` is for the rank; whoever has given it away closes it here.

    Args:
        terminal: The descriptor that lines are shown on.
        prefix: What stands before each line there.
        tell: Runs on the thread, with what people should know.
    """

    def __init__(self, terminal: int, prefix: str, tell: Callable[[str], None]) -> None:
        read_end, self.write_end = os.pipe()
        self._terminal = terminal
        self._prefix = prefix.encode()
        self._tell = tell
        self._file = -1
        self._begun = b""
        self._lost: set[int] = set()
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._copy, args=(read_end,), daemon=True)
        self._thread.start()

    def keep(self, path: Path) -> None:
        """Write what comes from now on to ``path`` too; if it cannot be opened, say so."""
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._tell(f"{path} cannot be written: {error.strerror}")
            return
        with self._guard:
            self._file = file

    def finish(self, wait_s: float) -> None:
        """Wait for what is still to be copied."""
        self._thread.join(wait_s)

    def _copy(self, read_end: int) -> None:
        while chunk := os.read(read_end, CHUNK_BYTES):
            with self._guard:
                if self._file >= 0:
                    self._write(self._file, chunk)
            self._show(chunk)
        if self._begun:
            self._show(b"\n")
        os.close(read_end)
        with self._guard:
            if self._file >= 0:
                os.close(self._file)

    def _show(self, chunk: bytes) -> None:
        *lines, self._begun = (self._begun + chunk).split(b"\n")
        if len(self._begun) >= LINE_BYTES_MAX:
            lines.append(self._begun)
            self._begun = b""
        if lines:
            with _terminals:
                shown = b"".join(self._prefix + line + b"\n" for line in lines)
                self._write(self._terminal, shown)

    def _write(self, descriptor: int, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[_written(descriptor, left) :]
        except OSError as error:
            if descriptor not in self._lost:
                self._lost.add(descriptor)
                self._tell(f"output of a rank is lost: {error.strerror}")


def _written(descriptor: int, data: memoryview) -> int:
    try:
        return os.write(descriptor, data)
    except BlockingIOError:  # who shares the terminal has made it so
        select.select([], [descriptor], [])
        return 0
