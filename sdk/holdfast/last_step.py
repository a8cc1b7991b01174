"""The last step of a rank, in memory that it shares with its launcher: known however it ends.

``os._exit``, a C library's ``exit`` and a signal leave no time to say it. The memory has no name
and is no file: a store into it waits for no disk.
"""

from __future__ import annotations

import os
import struct
from functools import cache
from mmap import mmap
from pathlib import Path

VARIABLE = "HOLDFAST_LAST_STEP"
"""Variable of a rank: the number of its descriptor of that memory."""

NONE = -1
_MEMORY = "holdfast-last-step"
_STEP = struct.Struct("=q")


class LastStep:
    """What a rank has kept, as its launcher sees it; the rank inherits ``descriptor``.

    Raises:
        OSError: the kernel has no descriptor or no memory for it.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(_MEMORY)
        os.write(self.descriptor, _STEP.pack(NONE))

    def read(self) -> int:
        """Return the last step so far, ``NONE`` if there was none."""
        told = os.pread(self.descriptor, _STEP.size, 0)
        return max(_STEP.unpack(told)[0], NONE) if len(told) == _STEP.size else NONE

    def close(self) -> int:
        """Return the last step, ``NONE`` if there was none, and free the memory."""
        step = self.read()
        os.close(self.descriptor)
        return step


def keep(step: int) -> None:
    """Note that this process, if it is a rank of a launcher's, has completed ``step``."""
    if (page := _page()) is not None:
        _STEP.pack_into(page, 0, step)


@cache
def _page() -> mmap | None:
    """Return the memory; None: there is none, or another file has its number by now."""
    try:
        descriptor = int(os.environ.get(VARIABLE, ""))
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not str(file).startswith(f"/memfd:{_MEMORY}"):
            return None
        return mmap(descriptor, _STEP.size)
    except (OSError, ValueError):
        return None
