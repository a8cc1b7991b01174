"""How long a save keeps the training thread waiting, beside DCP's and torch.save's."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from tests.bench.harness import Record, faster, in_turn
from tests.bench.subject import Saving, Stepping, Subject, agent
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

NAMES = (
    "stall/dcp_async", "stall/torch_save_disk", "stall/10k_tensors", "stall/step_everything",
    "stall/fsdp2",
)  # fmt: skip
STEP_S = 0.3
RUNS = 5
STALL_MS_MAX = 5.0
STABLE_RUNS = 3  # that many in a row, all near their median: the peer reuses its memory by now
STABLE_SHARE = 0.15
WARM_UP_MAX = 8


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the records; the disk is the one of the working directory."""
    scale = 16 if quick else 1
    Path("build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="build"))
    try:
        with agent():
            yield from _measure(folder, scale)
        with agent(nodes=2):
            yield everything("step_everything", 201, (1 << 30) // scale, ms_max=STALL_MS_MAX)
        with agent(), _one_rank():
            yield _sharded(scale)
    finally:
        shutil.rmtree(folder)


def _measure(folder: Path, scale: int) -> Iterator[Record]:
    saving = Saving(Subject(tensors_count=201, length_bytes=(1 << 30) // scale), job="large")
    dcp_async, dcp_s = _compare(saving, lambda: _dcp_async(saving.subject, folder / "dcp"))
    yield faster(
        "stall/dcp_async",
        dcp_async,
        dcp_s,
        peer="dcp.async_save: the call alone",
        length_bytes=saving.subject.length_bytes,
        note="200 tensors, step longer than the copy; save() and the gate",
        times_min=10,
        value_ms_max=STALL_MS_MAX,
    )
    torch_save, disk_s = _compare(saving, lambda: _torch_save(saving.subject, folder / "torch"))
    yield faster(
        "stall/torch_save_disk",
        torch_save,
        disk_s,
        peer="torch.save, flush, fsync",
        length_bytes=saving.subject.length_bytes,
        note="200 tensors",
        times_min=100,
        value_ms_max=STALL_MS_MAX,
    )
    saving.ck.close()
    many = Saving(Subject(tensors_count=10_002, length_bytes=(1 << 28) // scale), job="many")
    ours_s, many_s = _compare(many, lambda: _dcp_async(many.subject, folder / "many"))
    yield faster(
        "stall/10k_tensors",
        ours_s,
        many_s,
        peer="dcp.async_save: the call alone",
        length_bytes=many.subject.length_bytes,
        note="10,000 tensors",
        times_min=10,
        value_ms_max=STALL_MS_MAX,
    )
    many.ck.close()


def everything(name: str, tensors_count: int, length_bytes: int, *, ms_max: float) -> Record:
    """Return the stall of ``ck.step`` as scripts call it, copies to another node included.

    A stack of two nodes runs. ``tensors_count``: parameters and moments; step counters come on top.
    """
    subject = Subject(tensors_count=tensors_count, length_bytes=length_bytes)
    saving = Stepping(subject, job=name)
    products_count = subject.products_in(STEP_S)
    stalls_ms = []
    for _ in range(WARM_UP_MAX + 2 * RUNS):
        stalls_ms.append(saving.train_and_save(products_count) * 1e3)
        saving.settle()
    saving.ck.close()
    timed_ms = stalls_ms[WARM_UP_MAX:]
    value_ms = statistics.median(timed_ms)
    counters = len(subject.optimizer.state)
    return Record(
        name=f"stall/{name}",
        value=value_ms,
        unit="ms",
        peer="",
        peer_value=None,
        ratio=value_ms / ms_max,
        bytes=subject.length_bytes,
        note=f"step(), EverySteps(1), loader, rng, a copy on another node; {tensors_count} tensors "
        f"and {counters} step counters; step() and the gate; "
        f"{min(timed_ms):.3g}..{max(timed_ms):.3g} ms, n={len(timed_ms)}",
        target=f"<= {ms_max:g} ms",
        met=value_ms <= ms_max,
    )


@contextmanager
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _sharded(scale: int) -> Record:
    """Return the stall with tensors of FSDP2, beside that with as many plain ones."""
    size = (1 << 28) // scale
    plain = Saving(Subject(tensors_count=1_002, length_bytes=size), job="plain")
    sharded = Saving(Subject(tensors_count=1_002, length_bytes=size, sharded=True), job="sharded")
    products_count = plain.subject.products_in(STEP_S)

    def stall_of(saving: Saving) -> float:
        stall_s = saving.train_and_save(products_count)
        saving.settle()
        return stall_s

    ours_s, plain_s = in_turn(
        lambda: stall_of(sharded), lambda: stall_of(plain), runs=2 * RUNS, warm_up=WARM_UP_MAX
    )
    plain.ck.close()
    sharded.ck.close()
    return faster(
        "stall/fsdp2",
        ours_s,
        plain_s,
        peer="the same with plain tensors",
        length_bytes=sharded.subject.length_bytes,
        note="1,000 tensors; save() and the gate",
        times_min=0.9,
        value_ms_max=STALL_MS_MAX,
    )


def _compare(saving: Saving, peer: Callable[[], float]) -> tuple[list[float], list[float]]:
    products_count = saving.subject.products_in(STEP_S)

    def ours() -> float:
        stall_s = saving.train_and_save(products_count)
        saving.settle()
        return stall_s

    def theirs() -> float:
        waited_s = peer()
        saving.subject.compute(products_count)
        saving.subject.optimizer.step()
        return waited_s

    _warm_up(peer)
    return in_turn(ours, theirs, runs=RUNS)


def _warm_up(peer: Callable[[], float]) -> None:
    """Call the peer until its time is stable; a peer that never is gets its chances and no more."""
    last_s: list[float] = []
    for _ in range(WARM_UP_MAX):
        last_s = [*last_s, peer()][-STABLE_RUNS:]
        middle_s = statistics.median(last_s)
        near = all(abs(one_s - middle_s) <= STABLE_SHARE * middle_s for one_s in last_s)
        if len(last_s) == STABLE_RUNS and near:
            return


def _dcp_async(subject: Subject, folder: Path) -> float:
    state = subject.state_dict()
    started_s = time.perf_counter()
    future = async_save(state, checkpoint_id=folder)
    waited_s = time.perf_counter() - started_s
    assert not isinstance(future, AsyncSaveResponse)
    future.result()
    return waited_s


def _torch_save(subject: Subject, path: Path) -> float:
    state = subject.state_dict()
    started_s = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started_s
