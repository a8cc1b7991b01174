"""What is left of the training speed while copies are made, at no rate and at one.

Two agents on this machine: what the other node receives, and hashes, takes the trainer's cores, and
no network. The same loop without copies in turn; the rate is half as much again as the saves need.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from tests.bench.harness import Record, in_turn
from tests.bench.subject import PATIENCE_S, Subject, agent

import holdfast
from holdfast.core.byte_sizes import format_bytes
from holdfast.errors import PreconditionError
from holdfast.training.save_handle import Level

NAMES = ("train/while_replicating", "train/while_replicating_at_a_rate")
COMPUTE_S = 0.25
SAVE_STEPS = 4
STEPS = 16
RUNS = 5
SPARE = 1.5


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the fraction kept without a rate, and with one."""
    length_bytes = (256 << 20) // (4 if quick else 1)
    rate = int(SPARE * length_bytes / (SAVE_STEPS * COMPUTE_S))
    for name, rate_bytes_per_s in zip(NAMES, (0, rate), strict=True):
        with agent(2, HOLDFAST_REPLICATE_RATE=str(rate_bytes_per_s)):
            yield _record(name, length_bytes, rate_bytes_per_s)


class _Job:
    """One rank that saves every few steps; ``run`` is a stretch of its loop."""

    def __init__(self, name: str, length_bytes: int, replicas: int) -> None:
        self.subject = Subject(tensors_count=201, length_bytes=length_bytes)
        self._level: Level = "replicated" if replicas else "local"
        self.slowest_s: list[float] = []
        self.safe: list[bool] = []
        self.ck = holdfast.Checkpointer(
            name,
            self.subject.state,
            save=holdfast.EverySteps(SAVE_STEPS),
            replicas=replicas,
            rng=False,
        )
        assert self.ck.restore() is None, f"job {name} is not new"

    def run(self, products_count: int) -> float:
        """Return the seconds of ``STEPS`` steps; then wait for what it saved: safe, or passed."""
        took_s, handles = [], []
        for _ in range(STEPS):
            started_s = time.perf_counter()
            self.subject.compute(products_count)
            self.subject.optimizer.step()
            self.subject.steps_done += 1
            handle = self.ck.step(self.subject.steps_done)
            took_s.append(time.perf_counter() - started_s)
            handles += [handle] if handle is not None else []
        assert len(handles) == STEPS // SAVE_STEPS
        for handle in handles:
            try:
                handle.wait(self._level, timeout_s=PATIENCE_S)
            except PreconditionError:  # no slot was free: the copy before was still coming
                self.safe.append(False)
            else:
                self.safe.append(True)
        self.slowest_s.append(max(took_s))
        return sum(took_s)


def _record(name: str, length_bytes: int, rate_bytes_per_s: int) -> Record:
    copied, alone = (_Job(f"copies-{n}", length_bytes, n) for n in (1, 0))
    count = alone.subject.products_in(COMPUTE_S)
    ours_s, peer_s = in_turn(
        lambda: copied.run(count), lambda: alone.run(count), runs=RUNS, warm_up=1
    )
    for job in (copied, alone):
        job.ck.close()
    kept = statistics.median(p / o for o, p in zip(ours_s, peer_s, strict=True))
    ours_ms, peer_ms = (1e3 * statistics.median(job.slowest_s[1:]) for job in (copied, alone))
    rate = f"at {format_bytes(rate_bytes_per_s)}/s" if rate_bytes_per_s else "at no rate"
    return Record(
        name=name,
        value=kept,
        unit="fraction of throughput kept",
        peer="the same loop, saves included, without copies",
        peer_value=1.0,
        ratio=kept,
        bytes=length_bytes,
        note=f"{rate}, {length_bytes >> 20} MiB saved every {SAVE_STEPS} steps of {COMPUTE_S} s, "
        f"one training thread; {sum(copied.safe)} of {len(copied.safe)} saves "
        f"replicated; slowest of {STEPS} steps {ours_ms:.0f} ms "
        f"with copies, {peer_ms:.0f} ms without",
        target="",
        met=True,
    )
