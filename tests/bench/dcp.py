"""How long ``dcp.async_save`` keeps training waiting: with our writer and stager, and torch's."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.harness import Record, faster, in_turn
from tests.bench.subject import PATIENCE_S, StallClock, Subject, agent
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from holdfast.integrations.dcp import HoldfastJob, HoldfastStager

NAMES = ("dcp_writer/stall",)
STEP_S = 0.6
RUNS = 10
WARM_UP = 4


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the record; the peer writes to tmpfs."""
    subject = Subject(tensors_count=201, length_bytes=(1 << 30) // (16 if quick else 1))
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    try:
        with agent():
            ours_s, peer_s = _in_turn(subject, folder)
    finally:
        shutil.rmtree(folder)
    yield faster(
        "dcp_writer/stall",
        ours_s,
        peer_s,
        peer="its own stager and FileSystemWriter: the call alone",
        length_bytes=subject.length_bytes,
        note="200 tensors, step longer than the copy; the call and the gate",
        times_min=10,
    )


def _in_turn(subject: Subject, folder: Path) -> tuple[list[float], list[float]]:
    clock = StallClock()
    job, stager = HoldfastJob("dcp", replicas=0), HoldfastStager()
    clock.surround()
    products_count = subject.products_in(STEP_S)

    def train() -> None:
        subject.compute(products_count)
        subject.optimizer.step()

    def ours() -> float:
        state = subject.state_dict()
        started_s = time.perf_counter()
        saving = async_save(state, storage_writer=job.writer, async_stager=stager)
        call_s = time.perf_counter() - started_s
        train()
        assert isinstance(saving, AsyncSaveResponse)
        saving.staging_completion.result(PATIENCE_S)
        saving.upload_completion.result(PATIENCE_S)
        return call_s + clock.gate_s

    def theirs() -> float:
        state = subject.state_dict()
        started_s = time.perf_counter()
        saving = async_save(state, storage_writer=FileSystemWriter(folder / "peer"))
        call_s = time.perf_counter() - started_s
        train()
        assert not isinstance(saving, AsyncSaveResponse)
        saving.result(PATIENCE_S)
        return call_s

    times = in_turn(ours, theirs, runs=RUNS, warm_up=WARM_UP)
    stager.close()
    job.close()
    return times
