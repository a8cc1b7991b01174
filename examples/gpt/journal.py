"""What a rank writes down for the demo to read: JSON lines, with the wall clock on each."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

PR_SET_PDEATHSIG = 1
NOTHING: Mapping[str, object] = MappingProxyType({})


class Journal:
    """``<folder>/rank-<rank>.jsonl``, appended one whole line at a time, so a kill tears none."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(folder / f"rank-{rank}.jsonl", flags, 0o644)

    def write(
        self, event: str, facts: Mapping[str, object] = NOTHING, *, at: float | None = None
    ) -> None:
        """Append one line; ``at`` is seconds since the epoch, now unless given."""
        line = {"event": event, "at": time.time() if at is None else at, **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def process_started() -> float:
    """Return when the kernel started this process, before any import; seconds since the epoch."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22, since the machine's start
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


def who() -> dict[str, object]:
    """Return which process this is, and the agent of its node."""
    return {"pid": os.getpid(), "agent": os.environ.get("HOLDFAST_AGENT", "")}


def die_with_parent() -> None:
    """Have the kernel kill this process when its launcher dies: no orphan goes on training."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() == 1:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def fingerprints(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of every tensor in a nested state dict, by dotted name."""
    return {
        name: hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in _tensors("", state)
    }


def _tensors(prefix: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(f"{prefix}.{key}" if prefix else str(key), inner)
