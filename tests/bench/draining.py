"""What is left of the training speed while a checkpoint is drained, and what the worker needs.

The loop is a job's: compute, an optimizer step, ``ck.step``, a memory save every few steps. The
worker has the defaults of a real one. Of one such run, the steps while a checkpoint drains are
compared with as many right after it, saves and all.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.harness import Record
from tests.bench.subject import PATIENCE_S, Subject, agent
from tests.e2e.stack import Stack
from tests.servers.ceph import running_ceph

import holdfast

NAMES = ("train/while_draining", "persist/worker_memory", "train/while_draining_s3")
COMPUTE_S = 0.1
SAVE_STEPS = 4
PERSIST_STEPS = 1000  # the loop goes from one multiple to the next when both phases are measured
RUNS = 7
KEPT_MIN = 0.97
WORKER_BYTES_MAX = 512 << 20
CEPH_DISK_BYTES = 24 << 30


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield three records: throughput kept, the worker's peak memory, and kept beside Ceph."""
    length_bytes = (1 << 30) // (8 if quick else 1)
    os.environ.pop("HOLDFAST_PERSIST_RATE", None)  # the worker's default
    budget = f"{6 * length_bytes}"
    with agent(HOLDFAST_BUDGET=budget) as stack:
        job = _Job("drain", length_bytes)
        kept = job.kept()
        peak_bytes = _peak_bytes(stack)
    loop = (
        f"{length_bytes >> 20} MiB, compute {COMPUTE_S} s, fused AdamW, saved every {SAVE_STEPS} "
        f"steps, one training thread of two cores, worker unset: {job.steps} steps a drain"
    )
    yield _kept("train/while_draining", kept, job, f"a folder as store; {loop}", KEPT_MIN)
    yield Record(
        name="persist/worker_memory",
        value=peak_bytes / 2**20,
        unit="MiB",
        peer="limit",
        peer_value=WORKER_BYTES_MAX / 2**20,
        ratio=peak_bytes / WORKER_BYTES_MAX,
        bytes=job.subject.length_bytes,
        note="peak resident set of the worker, mapped parts of slots included",
        target=f"<= {WORKER_BYTES_MAX >> 20} MiB, whatever the shard's length",
        met=peak_bytes <= WORKER_BYTES_MAX,
    )
    with running_ceph(disk_bytes=CEPH_DISK_BYTES) as ceph:
        settings = {**ceph.environment, "HOLDFAST_STORE": ceph.url()}
        with agent(HOLDFAST_BUDGET=budget, **settings):
            job = _Job("drain-s3", length_bytes)
            kept = job.kept()
    note = f"the server, Ceph, takes its share of the same two cores, hence no aim; {loop}"
    yield _kept("train/while_draining_s3", kept, job, note, 0.0)


class _Job:
    """A training job that saves to memory all along and persists when ``kept`` lets it."""

    def __init__(self, name: str, length_bytes: int) -> None:
        self.subject = Subject(tensors_count=201, length_bytes=length_bytes)
        self.steps = 0
        self._done = 0
        self._products_count = self.subject.products_in(COMPUTE_S)
        self._saves: list[holdfast.SaveHandle] = []
        self._ck = holdfast.Checkpointer(
            name,
            self.subject.state,
            save=holdfast.EverySteps(SAVE_STEPS),
            persist=holdfast.EverySteps(PERSIST_STEPS),
            keep=holdfast.Retention(last=1),
            replicas=0,
            rng=False,
        )
        assert self._ck.restore() is None, f"job {name} is not new"

    def kept(self) -> float:
        """Return the median fraction of the speed that is kept; end the job."""
        found = [self._round() for _ in range(1 + RUNS)][1:]
        self._ck.close()
        return statistics.median(found)

    def _round(self) -> float:
        """Return the speed of the steps while one checkpoint drains, by that of those after."""
        self._done = -(-(self._done + 1) // PERSIST_STEPS) * PERSIST_STEPS - 1
        self._step()
        drained = self._saves[-1]
        drained.wait("local", timeout_s=PATIENCE_S)
        assert drained.step == self._done, "a multiple of the persist rule is saved"
        self._saves.clear()
        draining_s = []
        while drained.level != "durable":
            assert drained.error is None, f"step {drained.step}: {drained.error}"
            draining_s.append(self._step())
        # As many saves in both: whole rounds of them.
        self.steps = len(draining_s) // SAVE_STEPS * SAVE_STEPS
        assert self.steps, f"a drain is over within {SAVE_STEPS} steps"
        alone_s = [self._step() for _ in range(self.steps)]
        for handle in self._saves:
            handle.wait("local", timeout_s=PATIENCE_S)
        return sum(alone_s) / sum(draining_s[: self.steps])

    def _step(self) -> float:
        """Do one iteration; return its seconds."""
        started_s = time.perf_counter()
        self.subject.compute(self._products_count)
        self.subject.optimizer.step()  # every byte changes: nothing is copied inside the store
        self._done += 1
        handle = self._ck.step(self._done)
        took_s = time.perf_counter() - started_s
        if handle is not None:
            self._saves.append(handle)
        return took_s


def _kept(name: str, kept: float, job: _Job, note: str, kept_min: float) -> Record:
    return Record(
        name=name,
        value=kept,
        unit="fraction of throughput kept",
        peer="the same loop, saves included, with nothing to drain",
        peer_value=1.0,
        ratio=kept,
        bytes=job.subject.length_bytes,
        note=note,
        target=f">= {kept_min} kept" if kept_min else "",
        met=kept >= kept_min,
    )


def _peak_bytes(stack: Stack) -> int:
    pid = stack.pid("holdfast_services.persistence")
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
