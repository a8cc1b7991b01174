"""Pages of a mapping, put in place ahead of need, while other threads of the process go on.

``mmap.madvise`` and the making of a mapping with ``MAP_POPULATE`` hold the interpreter's lock all
the time, 0.1 to 0.5 s per GiB: a training thread, or an agent's loop, would stand still.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # MADV_..., Linux 5.14

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # lets the interpreter's lock go
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(memory: mmap.mmap) -> None:
    """Give every page of a writable mapping its memory.

    Raises:
        OSError: there is none left.
    """
    _populate(memory, _POPULATE_WRITE)


def populate_present(memory: mmap.mmap) -> None:
    """Map every page of a shared, writable mapping of a file whose pages have their memory.

    Half the price of ``populate`` there: neighbours come with one fault.

    Raises:
        OSError: the file is shorter than its mapping.
    """
    _populate(memory, _POPULATE_READ)


def _populate(memory: mmap.mmap, advice: int) -> None:
    first = ctypes.c_char.from_buffer(memory)  # meanwhile nobody can close the mapping
    if _madvise(ctypes.addressof(first), len(memory), advice) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise OSError(code, os.strerror(code))
    memoryview(memory)[:: mmap.PAGESIZE].tobytes()  # an older Linux
