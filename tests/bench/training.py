"""What is left of the training speed when every step is saved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from tests.bench.harness import Record, in_turn
from tests.bench.subject import Saving, Subject, agent

NAMES = ("train/with_saves",)
STEP_S = 0.5
STEPS = 20
RUNS = 5
KEPT_MIN = 0.95


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield one record; the copy takes at most a fifth of the step."""
    with agent():
        subject = Subject(tensors_count=201, length_bytes=(1 << 30) // (16 if quick else 1))
        saving = Saving(subject, job="train")
        products_count = subject.products_in(STEP_S)

        def with_saves() -> float:
            started_s = time.perf_counter()
            for _ in range(STEPS):
                saving.train_and_save(products_count)
            took_s = time.perf_counter() - started_s
            saving.settle()
            return took_s

        def without() -> float:
            started_s = time.perf_counter()
            for _ in range(STEPS):
                subject.compute(products_count)
                subject.optimizer.step()
            return time.perf_counter() - started_s

        ours_s, peer_s = in_turn(with_saves, without, runs=RUNS, warm_up=1)
        saving.ck.close()
    kept = statistics.median(p / o for o, p in zip(ours_s, peer_s, strict=True))
    yield Record(
        name="train/with_saves",
        value=kept,
        unit="fraction of throughput kept",
        peer="the same loop without saves",
        peer_value=1.0,
        ratio=kept,
        bytes=subject.length_bytes,
        note=f"{STEPS} steps of {STEP_S} s, one training thread, saved after each, each "
        "save committed",
        target=f">= {KEPT_MIN} kept",
        met=kept >= KEPT_MIN,
    )
