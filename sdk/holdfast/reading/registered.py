"""Ranges of a file as a device's driver knows them, while copies read from there.

The mapping is shared and cannot be written: to pin pages of a private one makes the kernel copy
them. Sizes are bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

from holdfast.copying.port import Device
from holdfast.errors import UnavailableError
from holdfast.logs import steady_logger

GAP_BYTES_MAX = 1 << 20
"""Between ranges that are registered as one; a file may have holes that cost nothing yet."""
LENGTH_BYTES_MIN = 4 << 20
"""A copy of less is sooner done than registered."""
_LOG = steady_logger(__name__)

_stalled: list[ExitStack] = []
"""What stays mapped and registered until the process ends."""

Range = tuple[int, int]


@contextmanager
def registered(
    device: Device, path: Path, inode: tuple[int, int], ranges: Iterable[Range]
) -> Iterator[torch.Tensor | None]:
    """Yield the bytes of a file, of which ``ranges`` were registered; None: they could not be.

    Nothing may write there, and no tensor of it may be kept. If copies from there stall, all
    stays as it is.

    Args:
        device: Whose driver.
        path: Of the file.
        inode: Device and number that it must have, or it is another file by now.
        ranges: (begin, end) of all that will be copied; short ones are left out.
    """
    long = [(begin, end) for begin, end in joined(ranges) if end - begin >= LENGTH_BYTES_MIN]
    if not long:
        yield None
        return
    with ExitStack() as undo:
        try:
            data = _shared(path, inode, undo)
            for begin, end in long:
                _register(device, data[begin:end], undo)
        except (OSError, RuntimeError) as error:
            _LOG.warning(
                "%s is not registered with %s, so it is loaded more slowly: %s",
                path.name, device.name, error,
            )  # fmt: skip
            undo.close()
            yield None
            return
        try:
            yield data
        except UnavailableError:
            _stalled.append(undo.pop_all())  # copies from there are under way
            raise


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Return ``ranges`` in order, whole pages, joined where little is between them.

    >>> joined([(9000, 9001), (0, 10), (4096 << 10, 4096 << 11)])
    [(0, 12288), (4194304, 8388608)]
    """
    page = mmap.PAGESIZE
    found: list[Range] = []
    for first, last in sorted(ranges):
        begin, end = first - first % page, last + -last % page
        if found and begin - found[-1][1] <= GAP_BYTES_MAX:
            begin, before = found.pop()
            end = max(end, before)
        found.append((begin, end))
    return found


def _shared(path: Path, inode: tuple[int, int], undo: ExitStack) -> torch.Tensor:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != inode:
            raise FileNotFoundError(f"{path} is another file by now")
        mapping = mmap.mmap(fd, found.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    holder = np.frombuffer(mapping, dtype=np.uint8)  # the mapping lives as long
    undo.callback(lambda: holder.size)
    place = (ctypes.c_uint8 * found.st_size).from_address(holder.ctypes.data)
    return torch.from_numpy(np.ctypeslib.as_array(place))


def _register(device: Device, memory: torch.Tensor, undo: ExitStack) -> None:
    device.register(memory, writable=False)

    def unregister() -> None:
        try:
            device.unregister(memory)
        except RuntimeError as error:
            _LOG.warning("memory stays registered with %s: %s", device.name, error)

    undo.callback(unregister)
