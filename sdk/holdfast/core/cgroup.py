"""How much memory this process's control groups still allow, version 1 and 2.

Pure: the caller hands in how to read a file. A process stands in one group per hierarchy and is
bound by every group above it too. Units: bytes.

Source: kernel documentation, cgroup-v2.rst (memory.max, memory.current) and
cgroup-v1/memory.rst (memory.limit_in_bytes, memory.usage_in_bytes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

UNLIMITED_BYTES_MIN = 1 << 60  # version 1 writes "no limit" as about 2^63

Read = Callable[[str], str | None]


def memory_limit_bytes(read: Read) -> int | None:
    """Return the smallest limit that binds this process; None when there is none.

    Args:
        read: Text of a file, or None when there is no such file.
    """
    return min((limit for limit, _ in _groups(read)), default=None)


def memory_room_bytes(read: Read) -> int | None:
    """Return what is left below the tightest limit, >= 0; None when there is no limit."""
    return min((max(limit - used, 0) for limit, used in _groups(read)), default=None)


def _groups(read: Read) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) of every limited group this process stands in."""
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = "/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup"
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("memory.max", "memory.current")
        )
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            group = "".join(f"/{part}" for part in parts[:depth])
            limit, used = (_number(read(f"{root}{group}/{name}")) for name in names)
            if limit is not None and limit < UNLIMITED_BYTES_MIN:
                yield limit, used or 0


def _number(text: str | None) -> int | None:
    digits = (text or "").strip()
    return int(digits) if digits.isdigit() else None
