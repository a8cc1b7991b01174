"""How near a snapshot comes to a plain copy of the same bytes into memory already touched."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

import torch
from tests.bench.harness import Record, in_turn, share
from tests.bench.subject import PATIENCE_S, Saving, Subject, agent

NAMES = ("snapshot/memcpy",)
RUNS = 9


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield one record: the fraction of memcpy's speed that a blocking snapshot has."""
    with agent():
        subject = Subject(tensors_count=201, length_bytes=(1 << 30) // (16 if quick else 1))
        saving = Saving(subject, job="snapshot")
        source = torch.ones(subject.length_bytes, dtype=torch.uint8)
        target = torch.ones(subject.length_bytes, dtype=torch.uint8)

        def snapshot() -> float:
            subject.steps_done += 1
            started_s = time.perf_counter()
            handle = saving.ck.save(subject.steps_done)
            handle.wait("staged", timeout_s=PATIENCE_S)
            took_s = time.perf_counter() - started_s
            handle.wait("local", timeout_s=PATIENCE_S)
            subject.optimizer.step()
            return took_s

        def memcpy() -> float:
            started_s = time.perf_counter()
            ctypes.memmove(target.data_ptr(), source.data_ptr(), subject.length_bytes)
            return time.perf_counter() - started_s

        ours_s, peer_s = in_turn(snapshot, memcpy, runs=RUNS, warm_up=3)
        saving.ck.close()
    yield share(
        "snapshot/memcpy",
        ours_s,
        peer_s,
        peer="memmove into touched memory",
        length_bytes=subject.length_bytes,
        note="save() until staged, 200 tensors",
        share_min=0.85,
    )
