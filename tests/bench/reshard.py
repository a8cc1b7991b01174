"""How long until ranks of another number go on with what was just trained, beside DCP.

Four ranks save in turn, by us into the memory of their node and by the peer into a tmpfs; then
fresh processes, two and six of them, load it. Each rank's part is in ``reshard_rank.py``.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench.harness import RUNS_MIN, Record, faster
from tests.bench.subject import agent
from tests.e2e.stack import Stack

NAMES = ("reshard/dcp",)
SAVED = 4
LOADED = (2, 6)
LENGTH_BYTES = 2 << 30
RANK = Path(__file__).with_name("reshard_rank.py")
TMPFS = "/dev/shm"
LAUNCH_S_MAX = 400.0
NOTE = (
    "Ours: save() to wait('local'), then Checkpointer() and restore(), every byte verified. Peer: "
    "one file and one thread a rank, no sync, cached plans; state dicts made before, loaded in "
    "place. Processes and groups are there before, and what the script calls of both is imported"
)
Times = list[tuple[float, float]]
"""Of each run ours and the peer's, in seconds."""


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield one record: a save and the two loads, each the median of its runs, added up."""
    length_bytes = LENGTH_BYTES // (32 if quick else 1)
    folder = Path(tempfile.mkdtemp(prefix="hf-bench-", dir=TMPFS))
    try:
        with agent() as stack:
            phases = _phases(stack, folder, length_bytes)
    finally:
        shutil.rmtree(folder)
    medians = {
        name: tuple(statistics.median(each) for each in zip(*times, strict=True))
        for name, times in phases.items()
    }
    said = "; ".join(f"{name}: {a:.3g} s, peer {b:.3g} s" for name, (a, b) in medians.items())
    yield faster(
        "reshard/dcp",
        *([sum(each)] for each in zip(*medians.values(), strict=True)),
        peer="dcp.save + dcp.load, tmpfs",
        length_bytes=length_bytes,
        note=f"FSDP2 and AdamW, {SAVED} ranks to 2 and 6; medians of {RUNS_MIN}: {said}. {NOTE}",
        times_min=3,
    )


def _phases(stack: Stack, folder: Path, length_bytes: int) -> dict[str, Times]:
    """Return the times of each phase; of the loads one more is made first, which counts not."""
    saves = _launch(stack, SAVED, "save", str(folder), str(RUNS_MIN), str(length_bytes))
    loads: dict[str, Times] = {}
    for count in LOADED:
        times = [
            _launch(stack, count, "load", str(folder), str(turn), str(length_bytes))[0]
            for turn in range(RUNS_MIN + 1)
        ]
        loads[f"load on {count}"] = times[1:]
    return {"save": saves, **loads}


def _launch(stack: Stack, world_size: int, *arguments: str) -> Times:
    ranks = stack.ranks(*arguments, world_size=world_size, script=RANK)
    lines = ranks.succeed(LAUNCH_S_MAX)[0].splitlines()
    words = [line.split() for line in lines if line.startswith("took ")]
    return [(float(ours), float(peer)) for _, ours, peer in words]
