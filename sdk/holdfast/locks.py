"""Record locks of files: to take one without waiting, and to ask who holds one.

The kernel gives a lock back at once when its process ends, however it ends: that is how agents,
trainers and supervisors of one machine know of each other. A process does not see its own locks
here, and loses its lock on a file when it closes any descriptor of that file.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, len, pid


def take(descriptor: int, *, at: int | None = None) -> bool:
    """Lock the file, which is open for writing; False when another process holds the lock.

    With ``at`` only that byte of it, which need not exist: one lock of many.
    """
    place = () if at is None else (1, at)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, *place)
    except (BlockingIOError, PermissionError):  # POSIX leaves open which of the two it is
        return False
    return True


def release(descriptor: int) -> None:
    """Give the lock back."""
    fcntl.lockf(descriptor, fcntl.LOCK_UN)


def holder(descriptor: int) -> int | None:
    """Return the pid of the other process that holds the lock, 0 if it is not seen; else None.

    Only asks: trying to take the lock could make its rightful owner fail.
    """
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else int(pid)


def holder_of(path: Path) -> int | None:
    """Return the ``holder`` of a file's lock by the file's name; None without that file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return holder(descriptor)
    finally:
        os.close(descriptor)
