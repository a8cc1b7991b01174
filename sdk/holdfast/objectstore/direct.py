"""Writes that go past the page cache: the memory of a training machine is not ours to fill.

A checkpoint in the page cache evicts what data loaders read, and first-touched pages cost several
times the copy. Where a file system cannot do it the caller writes as usual. Units: bytes.
"""

from __future__ import annotations

import errno
import os

BLOCK_BYTES = 4096

_FLAGS = os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC


def write_direct(folder: int, name: str, data: memoryview, begin: int) -> int:
    """Write whole blocks of ``data`` at ``begin`` of an existing file; return the bytes written.

    0 or fewer than all: the rest is not a whole block, the memory is not aligned, or the file
    system cannot. Needs ``fdatasync`` after it like any other write.

    Raises:
        OSError: as from writing.
    """
    length_bytes = data.nbytes // BLOCK_BYTES * BLOCK_BYTES
    if begin % BLOCK_BYTES or not length_bytes:
        return 0
    done = 0
    fd = -1
    try:
        fd = os.open(name, _FLAGS, dir_fd=folder)
        while done < length_bytes:
            count = os.pwrite(fd, data[done:length_bytes], begin + done)
            done += count
            if count % BLOCK_BYTES:
                break  # what follows would not be aligned
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        if fd >= 0:
            os.close(fd)
    return done
