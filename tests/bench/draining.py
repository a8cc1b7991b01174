"""What is left of the training speed while a checkpoint is drained, and what the worker needs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.harness import Record, in_turn
from tests.bench.subject import PATIENCE_S, Subject, agent
from tests.e2e.stack import Stack

import holdfast

NAMES = ("train/while_draining", "persist/worker_memory")
PRODUCTS_S = 0.02
RUNS = 7
KEPT_MIN = 0.97
WORKER_BYTES_MAX = 512 << 20


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield two records: throughput kept, and the worker's peak memory after large shards."""
    length_bytes = (1 << 30) // (8 if quick else 1)
    with agent(HOLDFAST_BUDGET=f"{6 * length_bytes}") as stack:
        subject = Subject(tensors_count=201, length_bytes=length_bytes)
        ck = holdfast.Checkpointer(
            "drain",
            subject.state,
            save=holdfast.Never(),
            persist=holdfast.EverySteps(1),
            keep=holdfast.Retention(last=1),
            replicas=0,
            rng=False,
        )
        ck.restore()
        products_count = subject.products_in(PRODUCTS_S)
        counts: list[int] = []

        def draining() -> float:
            """Return seconds per step while a checkpoint is on its way to the folder."""
            subject.optimizer.step()  # every byte changes: nothing is copied inside the store
            subject.steps_done += 1
            handle = ck.save(subject.steps_done)
            handle.wait("local", timeout_s=PATIENCE_S)
            counts.append(0)
            started_s = time.perf_counter()
            while handle.level != "durable":
                subject.compute(products_count)
                counts[-1] += 1
            return (time.perf_counter() - started_s) / counts[-1]

        def alone() -> float:
            started_s = time.perf_counter()
            for _ in range(counts[-1]):
                subject.compute(products_count)
            return (time.perf_counter() - started_s) / counts[-1]

        ours_s, peer_s = in_turn(draining, alone, runs=RUNS, warm_up=1)
        ck.close()
        peak_bytes = _peak_bytes(stack)
    kept = statistics.median(p / o for o, p in zip(ours_s, peer_s, strict=True))
    yield Record(
        name="train/while_draining",
        value=kept,
        unit="fraction of throughput kept",
        peer="the same loop with nothing to drain",
        peer_value=1.0,
        ratio=kept,
        bytes=subject.length_bytes,
        note=f"one training thread of two cores, a folder as store, paced at the embedded stack's "
        f"256 MiB/s, {counts[-1]} steps per drain",
        target=f">= {KEPT_MIN} kept",
        met=kept >= KEPT_MIN,
    )
    yield Record(
        name="persist/worker_memory",
        value=peak_bytes / 2**20,
        unit="MiB",
        peer="",
        peer_value=None,
        ratio=peak_bytes / subject.length_bytes,
        bytes=subject.length_bytes,
        note="peak resident set of the worker, mapped parts of slots included",
        target=f"<= {WORKER_BYTES_MAX >> 20} MiB, whatever the shard's length",
        met=peak_bytes <= WORKER_BYTES_MAX,
    )


def _peak_bytes(stack: Stack) -> int:
    pid = stack.pid("holdfast_services.persistence")
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
