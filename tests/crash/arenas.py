"""What must be true of an arena after any crash: every sealed slot is whole, none is lost."""

from __future__ import annotations

import time
from pathlib import Path

from holdfast.format.digest import part_digests
from holdfast.format.header import parse_header
from holdfast.format.segment import header_length
from holdfast_services.agent import sidecar

LEAVES_S_MAX = 20.0


def torn(arena: Path) -> list[str]:
    """Return why sealed slots cannot be believed: the header, or digests unlike the sidecar's."""
    found = []
    for path in sorted(arena.glob("*.seg")):
        try:
            data = path.read_bytes()
            text = path.with_suffix(".sum").read_bytes()
        except FileNotFoundError:
            if not _leaves(path):
                found.append(f"{path.name} has no sidecar")
            continue
        if not path.exists():
            continue
        header = parse_header(data[: header_length(data[:8])], len(data))
        content = sidecar.decode(text, len(data))
        if header.identity.id != content.shard.id:
            found.append(f"{path.name} is another shard than its sidecar")
        if b"".join(part_digests(memoryview(data))) != content.digests:
            found.append(f"{path.name} has other bytes than its sidecar")
    return found


def _leaves(path: Path) -> bool:
    """Tell whether a sealed slot without a sidecar is being freed, or sealed anew.

    It loses its sidecar first, and an agent that lives may be anywhere between the two.
    """
    ends_s = time.monotonic() + LEAVES_S_MAX
    while path.exists() and not path.with_suffix(".sum").exists():
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.02)
    return True


def leftovers(arena: Path) -> list[str]:
    """Return drafts that nobody will finish."""
    return sorted(path.name for path in arena.glob("*.tmp"))


def used_bytes(arena: Path) -> int:
    """Return what slots take."""
    names = [path for path in arena.glob("s*.*.*") if path.suffix not in (".sum", ".tmp")]
    return sum(path.stat().st_size for path in names if path.exists())
