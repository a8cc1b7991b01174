"""How much memory is free for arenas on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.core.cgroup import memory_room_bytes


def free_bytes(folder: Path) -> int:
    """Return the room of ``folder``'s file system, or of our control group if that is less."""
    facts = os.statvfs(folder)
    free = facts.f_bavail * facts.f_frsize
    room = memory_room_bytes(read_text)
    return free if room is None else min(free, room)


def read_text(path: str) -> str | None:
    """Return the text of a small file of the kernel, or None when it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return None
