"""How long it takes to get the state back from this node's memory, beside torch.load."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tests.bench.harness import Record, faster, in_turn
from tests.bench.subject import Saving, Subject, agent

import holdfast

NAMES = ("restore/torch_load",)
RUNS = 5
JOB = "restore"


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield one record; the peer reads from the page cache."""
    Path("build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="build"))
    try:
        with agent():
            yield _measure(folder / "state.pt", (1 << 30) // (16 if quick else 1))
    finally:
        shutil.rmtree(folder)


def _measure(path: Path, length_bytes: int) -> Record:
    subject = Subject(tensors_count=201, length_bytes=length_bytes)
    saving = Saving(subject, job=JOB)
    saving.train_and_save(1)
    saving.settle()
    saving.ck.close()
    torch.save(subject.state_dict(), path)
    loads_s = []

    def ours() -> float:
        ck = holdfast.Checkpointer(JOB, subject.state, save=holdfast.Never(), replicas=0, rng=False)
        started_s = time.perf_counter()
        restored = ck.restore()
        took_s = time.perf_counter() - started_s
        assert restored is not None, "nothing was restored"
        loads_s.append(restored.seconds["load"])
        ck.close()
        return took_s

    def theirs() -> float:
        started_s = time.perf_counter()
        subject.load_state_dict(torch.load(path))
        return time.perf_counter() - started_s

    ours_s, peer_s = in_turn(ours, theirs, runs=RUNS)
    return faster(
        "restore/torch_load",
        ours_s,
        peer_s,
        peer="torch.load, load_state_dict; file in the page cache",
        length_bytes=subject.length_bytes,
        note=f"all of restore(), of it loading {min(loads_s) * 1e3:.0f} ms; "
        f"every byte verified; target: not slower",
    )
