"""What saves and restores cost on this GPU, each figure beside what the machine can do."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tests.bench.harness import Record, in_turn, machine, share
from tests.bench.subject import PATIENCE_S, StallClock, agent
from torch import nn

import holdfast
from holdfast.copying import stream_loader
from holdfast.copying.batches import batches
from holdfast.copying.copiers import Copiers
from holdfast.copying.cuda import CUDA
from holdfast.copying.port import Device
from holdfast.errors import CheckpointError
from holdfast.reading.registered import registered

GIB = 1 << 30
STATE_BYTES_MAX = 8 * GIB
TENSORS_COUNT = 200
ROUNDS = 5
STEPS_PER_ROUND = 3
STEP_S = 1.5
SIDE = 16384
"""Of matrices whose product takes so long that a step is far from filling the driver's queue: who
queues more than some thousand kernels waits for the GPU, whatever it queues."""
STALL_MS_MAX = 1.0
SAVES_COUNT_MAX = 20
LIMIT_BYTES_MAX = 32 * GIB


def main(result: Path) -> int:
    """Measure all; write what there is after each record."""
    records = [{**machine(), "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}]
    for measure in (copies, loads, registration, steps):
        for record in measure():
            records.append(record.as_json())
            result.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return 0


def size_of_state() -> int:
    """Return how many bytes of state both memories have room for, with two slots and more."""
    shm, gpu = shutil.disk_usage("/dev/shm").free, torch.cuda.mem_get_info()[0]
    return min(STATE_BYTES_MAX, shm // 5, gpu // 4) // GIB * GIB or GIB // 2


def timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started_s


def the_gpu() -> Device:
    found = CUDA.of(torch.zeros(1, device="cuda"))
    assert found is not None
    return found


@contextlib.contextmanager
def arena(length_bytes: int) -> Iterator[tuple[Path, torch.Tensor]]:
    """Give mapped and populated memory of a tmpfs, as a slot is."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="hf-gpu-") as file:
        os.ftruncate(file.fileno(), length_bytes)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0x8000)
        mapping = mmap.mmap(file.fileno(), length_bytes, flags=flags)
        yield Path(file.name), torch.frombuffer(mapping, dtype=torch.uint8)


def on_gpu(length_bytes: int) -> list[torch.Tensor]:
    each = length_bytes // TENSORS_COUNT // 4
    return [torch.randn(each, device="cuda") for _ in range(TENSORS_COUNT)]


def views(memory: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    size = tensors[0].nbytes
    return [memory[n * size : (n + 1) * size].view(torch.float32) for n in range(len(tensors))]


def copies() -> Iterator[Record]:
    """Yield ``gpu/d2h``: our copies into a registered slot, beside bare ones into pinned memory."""
    length_bytes = size_of_state() // 2
    device, tensors = the_gpu(), on_gpu(length_bytes)
    pinned = torch.empty(length_bytes, dtype=torch.uint8, pin_memory=True)
    bare = views(pinned, tensors)
    with arena(length_bytes) as (_, memory):
        device.register(memory)
        slot, copier = views(memory, tensors), Copiers().of(device)

        def ours() -> None:
            copier.mark()
            for batch in batches(zip(slot, tensors, strict=True)):
                copier.later([target for target, _ in batch], [source for _, source in batch])
            copier.land()

        def theirs() -> None:
            for target, source in zip(bare, tensors, strict=True):
                target.copy_(source, non_blocking=True)

        ours_s, bare_s = in_turn(lambda: timed(ours), lambda: timed(theirs), runs=ROUNDS)
        device.unregister(memory)
        assert all(torch.equal(a, b) for a, b in zip(slot, bare, strict=True))
        pageable_s = statistics.median([timed(ours) for _ in range(3)])
        note = f"200 tensors; unregistered {length_bytes / pageable_s / 1e9:.3g} GB/s"
    yield share(
        "gpu/d2h", ours_s, bare_s, peer="copy_ into memory of torch's, pinned",
        length_bytes=length_bytes, note=note, share_min=0.85,
    )  # fmt: skip


def loads() -> Iterator[Record]:
    """Yield ``gpu/h2d``, from registered memory, and what a restore has with the registering."""
    length_bytes = size_of_state() // 2
    device, tensors = the_gpu(), on_gpu(length_bytes)
    pinned = torch.empty(length_bytes, dtype=torch.uint8, pin_memory=True)
    bare = views(pinned, tensors)
    with arena(length_bytes) as (path, memory):
        found = path.stat()
        inode, everything = (found.st_dev, found.st_ino), [(0, length_bytes)]

        def theirs() -> None:
            for source, target in zip(bare, tensors, strict=True):
                target.copy_(source, non_blocking=True)

        def restore(*, register: bool = True) -> None:
            wanted = everything if register else []
            with registered(device, path, inode, wanted) as known:
                source = views(memory if known is None else known, tensors)
                stream_loader.load(device, zip(tensors, source, strict=True))

        pageable_s = statistics.median([timed(lambda: restore(register=False)) for _ in range(3)])
        whole_s, bare_s = in_turn(lambda: timed(restore), lambda: timed(theirs), runs=ROUNDS)
        yield share(
            "gpu/h2d_with_registering", whole_s, bare_s, peer="copy_ from pinned memory",
            length_bytes=length_bytes, share_min=0,
            note=f"read once; unregistered {length_bytes / pageable_s / 1e9:.3g} GB/s",
        )  # fmt: skip
        device.register(memory)
        source = views(memory, tensors)
        ours_s, bare_s = in_turn(
            lambda: timed(lambda: stream_loader.load(device, zip(tensors, source, strict=True))),
            lambda: timed(theirs),
            runs=ROUNDS,
        )
        device.unregister(memory)
    yield share(
        "gpu/h2d", ours_s, bare_s, peer="copy_ from memory of torch's, pinned",
        length_bytes=length_bytes, note="200 tensors, registered before", share_min=0.85,
    )  # fmt: skip


def registration() -> Iterator[Record]:
    """Yield what registering costs for each GiB, and how much the driver took of what there is."""
    device, times_s = the_gpu(), []
    room = min(LIMIT_BYTES_MAX, shutil.disk_usage("/dev/shm").free // 2) // GIB
    taken, refused = 0, ""
    with contextlib.ExitStack() as undo:
        for _ in range(max(room, 1)):
            _, memory = undo.enter_context(arena(GIB))
            started_s = time.perf_counter()
            try:
                device.register(memory)
            except RuntimeError as error:
                refused = f"; then: {error}"
                break
            times_s.append(time.perf_counter() - started_s)
            undo.callback(device.unregister, memory)
            taken += 1
    yield Record(
        name="gpu/register", value=statistics.median(times_s or [0.0]) * 1e3, unit="ms",
        peer="", peer_value=None, ratio=1.0, bytes=GIB, target="", met=True,
        note=f"for each GiB of a populated tmpfs; {taken} GiB taken{refused}",
    )  # fmt: skip


class Training:
    """A model of ``length_bytes`` with its moments, and steps of some seconds."""

    def __init__(self, length_bytes: int) -> None:
        each = length_bytes // 3 // (TENSORS_COUNT // 3) // 4
        tensors = [torch.randn(each, device="cuda") for _ in range(TENSORS_COUNT // 3)]
        self.model = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self._work = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
        self._out = torch.empty_like(self._work)
        self.compute(10)
        self._products_count = max(1, round(STEP_S / (timed(lambda: self.compute(50)) / 50)))

    def compute(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._work, self._work, out=self._out)

    def train(self) -> None:
        self.compute(self._products_count)
        self.optimizer.step()


def _is_saved(handle: holdfast.SaveHandle) -> bool:
    try:
        handle.wait("local", timeout_s=PATIENCE_S)
    except CheckpointError:
        return False  # such as for slots that do not have all their memory yet
    return True


def steps() -> Iterator[Record]:
    """Yield what a save every step adds to the step, and what it keeps the host."""
    length_bytes = size_of_state()
    training = Training(length_bytes)
    state = {"model": training.model, "optimizer": training.optimizer}
    clock = StallClock()
    stalls_s: list[tuple[float, float]] = []
    handles: list[holdfast.SaveHandle] = []
    with agent(HOLDFAST_BUDGET=str(4 * length_bytes)):
        ck = holdfast.Checkpointer("gpu", state, save=holdfast.Never(), replicas=0, rng=False)
        assert ck.restore() is None
        done = 0

        def saving() -> None:
            nonlocal done
            for _ in range(STEPS_PER_ROUND):
                done += 1
                started_s = time.perf_counter()
                handles.append(ck.save(done))
                save_s = time.perf_counter() - started_s
                clock.surround()
                training.train()
                stalls_s.append((save_s, clock.gate_s))
                torch.cuda.synchronize()  # as a loop that looks at its loss

        def plain() -> None:
            for _ in range(STEPS_PER_ROUND):
                training.train()
                torch.cuda.synchronize()

        saves_left = 3
        while saves_left:  # the first ones make the slots, and the gate's trust
            done += 1
            saves_left -= _is_saved(ck.save(done))
            training.train()
            torch.cuda.synchronize()
            assert done < SAVES_COUNT_MAX, "no save works"
        ours_s, plain_s = in_turn(
            lambda: timed(saving), lambda: timed(plain), runs=ROUNDS, warm_up=1
        )
        ck.close()
    saved_count = sum(not handle.abandoned for handle in handles)
    with_s, without_s = statistics.median(ours_s), statistics.median(plain_s)
    delta = (with_s / without_s - 1) * 100
    yield Record(
        name="gpu/step_delta", value=delta, unit="%", peer="the same steps without saves",
        peer_value=0.0, ratio=without_s / with_s,
        bytes=length_bytes, target="< 1 %, all saved",
        met=delta < 1.0 and saved_count == len(handles),
        note=f"a save every step of {without_s / STEPS_PER_ROUND:.2f} s; "
        f"{STEPS_PER_ROUND} steps with {min(ours_s):.3f}..{max(ours_s):.3f} s, "
        f"without {min(plain_s):.3f}..{max(plain_s):.3f} s, n={len(ours_s)}; "
        f"{saved_count} of {len(handles)} saved",
    )  # fmt: skip
    saves_s, gates_s = zip(*stalls_s[STEPS_PER_ROUND:], strict=True)
    timed_s = [sum(both) for both in zip(saves_s, gates_s, strict=True)]
    stall_ms = statistics.median(timed_s) * 1e3
    yield Record(
        name="gpu/stall", value=stall_ms, unit="ms", peer="", peer_value=None,
        ratio=stall_ms / STALL_MS_MAX, bytes=length_bytes, target=f"<= {STALL_MS_MAX:g} ms",
        met=stall_ms <= STALL_MS_MAX,
        note=f"save() {statistics.median(saves_s) * 1e3:.3g} ms and the gate "
        f"{statistics.median(gates_s) * 1e3:.3g} ms, on the host, 200 tensors; "
        f"{min(timed_s) * 1e3:.3g}..{max(timed_s) * 1e3:.3g} ms, n={len(timed_s)}",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
