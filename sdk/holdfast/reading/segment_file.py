"""One segment's file on this machine, open to be read into memory that is there, or to be mapped.

Reading takes two thirds of the time of a mapping that is copied from: no page of the file comes to
be in this process's tables, and none has to leave them. Sizes are bytes.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from holdfast.core.shard import Shard
from holdfast.errors import NotFoundError, TruncatedShardError, UnavailableError


class SegmentFile:
    """The file of ``shard`` at ``path``; ``inode`` is which file that is: device and number.

    Raises:
        NotFoundError: it is gone.
        TruncatedShardError: it is not as long as the shard.
        UnavailableError: it cannot be opened, as a link: nobody of ours makes one.
    """

    def __init__(self, path: Path, shard: Shard) -> None:
        self.path = path
        self._key = shard.id.key
        self._mapping: mmap.mmap | None = None
        self._data: torch.Tensor | None = None
        try:
            self._file = open(path, "rb", buffering=0, opener=_opened)  # noqa: SIM115 - see close()
        except FileNotFoundError as cause:
            raise NotFoundError(f"segment {self._key} is gone from {path}") from cause
        except OSError as cause:
            text = f"segment {self._key} cannot be opened at {path}: {cause.strerror}"
            raise UnavailableError(text) from cause
        found = os.fstat(self._file.fileno())
        self.inode = found.st_dev, found.st_ino
        if found.st_size != shard.length_bytes:
            self.close()
            raise TruncatedShardError(
                f"segment {self._key} has {found.st_size} bytes, not {shard.length_bytes}"
            )

    def read(self, begin: int, memory: memoryview) -> None:
        """Fill ``memory``, which is of bytes, with those from ``begin`` on; any thread may.

        Raises:
            TruncatedShardError: the file ends before.
            UnavailableError: it cannot be read.
        """
        while memory:
            try:
                count = os.preadv(self._file.fileno(), [memory], begin)
            except OSError as cause:
                text = f"segment {self._key} cannot be read from {self.path}: {cause}"
                raise UnavailableError(text) from cause
            if not count:
                raise TruncatedShardError(f"segment {self._key} ends at byte {begin} by now")
            memory, begin = memory[count:], begin + count

    def head(self, length_bytes: int) -> bytes:
        """Return so many first bytes, or all if the file has less."""
        return os.pread(self._file.fileno(), length_bytes, 0)

    def data(self) -> torch.Tensor:
        """Return all bytes, mapped privately: whoever writes there changes no file."""
        if self._data is None:
            # Not populated: the threads that copy take the faults, side by side.
            self._mapping = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._data = torch.from_numpy(np.frombuffer(self._mapping, dtype=np.uint8))
        return self._data

    def close(self) -> None:
        """Close and unmap it; idempotent."""
        self._file.close()
        self._data = None
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with suppress(BufferError):  # goes with the last tensor that still views it
                mapping.close()


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
