"""What every benchmark shares: a record, ours and the peer's turn by turn, the machine."""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import holdfast

RUNS_MIN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of ``build/bench.json``.

    ``ratio``: how many times better than the peer, or the fraction of the limit that was reached.
    ``target`` says in words what ``met`` answers; no target: empty, and met.
    """

    name: str
    value: float
    unit: str
    peer: str
    peer_value: float | None
    ratio: float
    bytes: int
    note: str
    target: str
    met: bool

    def as_json(self) -> dict[str, Any]:
        """Return the record as JSON has it."""
        return asdict(self)


def in_turn(
    ours: Callable[[], float], peer: Callable[[], float], *, runs: int, warm_up: int = 2
) -> tuple[list[float], list[float]]:
    """Return what ``runs`` calls of each gave, one after the other, after ``warm_up`` of each."""
    pairs = [(ours(), peer()) for _ in range(warm_up + max(runs, RUNS_MIN))][warm_up:]
    return [mine for mine, _ in pairs], [theirs for _, theirs in pairs]


def faster(
    name: str,
    ours_s: list[float],
    peer_s: list[float],
    *,
    peer: str,
    length_bytes: int,
    note: str,
    times_min: float,
    value_ms_max: float = math.inf,
) -> Record:
    """Return a record in ms whose ratio says how many times less time we took than ``peer``.

    The target is at least ``times_min`` times less, and at most ``value_ms_max``.
    """
    value, peer_value = statistics.median(ours_s), statistics.median(peer_s)
    ours, theirs = (
        f"{min(times_s) * 1e3:.3g}..{max(times_s) * 1e3:.3g} ms" for times_s in (ours_s, peer_s)
    )
    spread = f"ours {ours}, peer {theirs}, n={len(ours_s)}"
    return Record(
        name=name,
        value=value * 1e3,
        unit="ms",
        peer=peer,
        peer_value=peer_value * 1e3,
        ratio=peer_value / value,
        bytes=length_bytes,
        note=f"{note}; {spread}",
        target=(f">= {times_min:g}x less" if times_min else "")
        + (f", <= {value_ms_max:g} ms" if value_ms_max < math.inf else ""),
        met=peer_value / value >= times_min and value * 1e3 <= value_ms_max,
    )


def share(
    name: str, ours_s: list[float], peer_s: list[float], *, peer: str, length_bytes: int,
    note: str, share_min: float,
) -> Record:  # fmt: skip
    """Return a record in GB/s whose ratio is our part of the peer's speed over the same bytes."""
    speed, peer_speed = (
        length_bytes / statistics.median(times_s) / 1e9 for times_s in (ours_s, peer_s)
    )
    return Record(
        name=name,
        value=speed,
        unit="GB/s",
        peer=peer,
        peer_value=peer_speed,
        ratio=speed / peer_speed,
        bytes=length_bytes,
        note=f"{note}; n={len(ours_s)}",
        target=f">= {share_min:g} of the peer" if share_min else "",
        met=speed / peer_speed >= share_min,
    )


def machine() -> dict[str, Any]:
    """Return a record that says where, and with what, the others were measured."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
    )
    cores = len(os.sched_getaffinity(0))
    record = Record(
        name="machine",
        value=cores,
        unit="cores",
        peer="",
        peer_value=None,
        ratio=1.0,
        bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        note=f"{cpu}, load {os.getloadavg()[0]:.1f} at the start",
        target="",
        met=True,
    )
    return {
        **record.as_json(),
        "cpu": cpu,
        "load_1min": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "holdfast": holdfast.__version__,
        "commit": commit.stdout.strip(),
    }
