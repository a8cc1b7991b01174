"""Bytes on their way to and from the server, straight from and into memory that others own."""

from __future__ import annotations

import time
from typing import IO, TYPE_CHECKING, cast

from botocore.exceptions import IncompleteReadError, ReadTimeoutError

if TYPE_CHECKING:
    from botocore.response import StreamingBody

# One system call sends so much; the deadline of a write is for one of them.
BLOCK_BYTES = 1 << 20


class Body:
    """A file to read from that hands out slices of ``data`` instead of copies."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def __len__(self) -> int:
        return self._data.nbytes

    def read(self, count: int = -1) -> memoryview:
        """Return the next block, whatever ``count`` is: the caller sends what it gets."""
        del count
        block = self._data[self._at : self._at + BLOCK_BYTES]
        self._at += block.nbytes
        return block

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to ``offset`` from the beginning, from here, or from the end."""
        self._at = (0, self._at, self._data.nbytes)[whence] + offset
        return self._at

    def tell(self) -> int:
        """Return where the next block begins."""
        return self._at


def body(data: memoryview) -> IO[bytes]:
    """Return ``data`` as the library's type for something to send."""
    return cast("IO[bytes]", Body(data))


class Sink:
    """A view that is filled by as many answers as it takes; ``done`` bytes of it are there."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.done = 0

    def fill(self, stream: StreamingBody, *, body_s_max: float) -> None:
        """Read until the view is full.

        Raises:
            botocore.exceptions.BotoCoreError: broken off, or slower than ``body_s_max``; what
                came is counted in ``done``.
        """
        deadline_s = time.monotonic() + body_s_max
        while self.done < self._view.nbytes:
            got = stream.readinto(cast("IO[bytes]", self._view[self.done :]))
            if not got:
                raise IncompleteReadError(actual_bytes=self.done, expected_bytes=self._view.nbytes)
            self.done += got
            if time.monotonic() > deadline_s:
                raise ReadTimeoutError(endpoint_url="", error=f"more than {body_s_max} s")
