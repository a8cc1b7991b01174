"""F8, F31, P4 on a real GPU: the scenarios of the late device, and what only a driver shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.gpu.slow_cuda import SlowCuda
from tests.late_device import WAIT_S
from tests.unit.copying.late_training import LateTraining
from tests.unit.copying.test_order import train_and_save
from tests.unit.state import worlds

from holdfast.copying.stream_copier import StreamCopier
from holdfast.integrations.dcp import HoldfastStager
from holdfast.snapshot.buffer import SlotBuffer

ROOT = Path(__file__).parents[2]
LATE_CYCLES = 2_000_000_000


@pytest.fixture
def train(folder):
    made = []

    def start(device=None, **more):
        training = LateTraining(folder, device or SlowCuda(), **more)
        made.append(training)
        return training

    yield start
    torch.cuda.synchronize()
    for training in made:
        training.close()


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("defer", [True, False], ids=["deferred", "at once"])
def test_what_is_saved_is_the_state_of_the_step(train, defer, pinned):
    training = train(pinned=pinned)

    assert {} == train_and_save(training, defer=defer)
    assert [1, 3, 5] == sorted(training.saved)


def test_the_host_waits_for_no_byte(train):
    """A kernel of a second is in front of everything, and the script gets to its next step."""
    training = train(SlowCuda(cycles=1000))
    training.train()
    training.save()
    training.settle()  # streams are made by now
    training.train()
    training.prepare()
    torch.cuda.synchronize()
    torch.cuda._sleep(LATE_CYCLES)
    behind = torch.cuda.Event()
    behind.record()
    snapshot = training.save()
    training.train()
    assert not behind.query(), "the host has waited for the device"
    training.settle()

    assert snapshot.copied
    assert [] == training.wrong(2)


def test_another_stream_of_training_waits_too(train):
    training = train()
    training.train()
    training.save()
    torch.cuda.synchronize()
    training.settle()
    other = torch.cuda.Stream()
    training.train()
    training.save()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        training.train()
    training.settle()

    assert [] == training.wrong(2)


def test_a_slot_is_pinned_once_it_is_registered_and_no_more_after(folder):
    device = SlowCuda()
    lease = worlds.make_slot(folder, "s1", 1 << 20)
    buffer = SlotBuffer.open(folder, lease)
    assert not buffer._bytes.is_pinned()
    buffer.register(device.device)
    buffer.register(device.device)
    assert buffer._bytes.is_pinned()
    view = buffer._bytes[4096:8192]
    assert view.is_pinned()
    buffer.drop()
    again = SlotBuffer.open(folder, worlds.make_slot(folder, "s2", 1 << 20))
    again.register(device.device)
    again.drop()


def test_a_refusal_leaves_nothing_behind_for_training(folder):
    """The error of a failed call would be raised by the next kernel of its thread."""
    device = SlowCuda()
    buffer = SlotBuffer.open(folder, worlds.make_slot(folder, "s1", 1 << 20))
    buffer.register(device.device)
    with pytest.raises(RuntimeError, match="cudaHostRegister"):
        device.register(buffer._bytes)
    assert 2.0 == (torch.ones(1, device="cuda") * 2).item()
    buffer.drop()


def test_a_gpu_without_memory_costs_the_save_it_runs_out_in(train):
    """A tensor that does not lie in one piece takes a piece of memory of the GPU on its way."""
    training = train(SlowCuda(cycles=1000))
    training.model.big = torch.nn.Parameter(torch.ones(4096, 4096, device="cuda").t())
    training.optimizer.add_param_group({"params": [training.model.big]})
    training.optimizer.state[training.model.big] = {}
    training._make_plan()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        snapshot = training.save()
        training.settle()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert snapshot.abandoned
    assert "memory" in snapshot.reason
    again = training.save()
    training.settle()

    assert again.copied, again.reason


def test_without_the_wait_for_training_wrong_bytes_are_saved(train, monkeypatch):
    """That these tests can fail on this GPU."""
    monkeypatch.setattr(StreamCopier, "mark", lambda _: None)

    assert train_and_save(train())


def test_without_the_wait_of_training_wrong_bytes_are_saved(train, monkeypatch):
    """Kernels do not wait here, and the copy is long."""
    monkeypatch.setattr(StreamCopier, "hold", lambda _: None)
    training = train(SlowCuda(cycles=0))
    big = torch.nn.Parameter(torch.zeros(256 << 18, device="cuda"))
    training.model.big = big
    training.optimizer.add_param_group({"params": [big]})
    training.optimizer.state[big] = {}
    training._make_plan()
    torch.cuda.synchronize()
    training.save()
    with torch.no_grad():
        training.engine.let_pass(WAIT_S)
        big.fill_(1)
    training.settle()
    entry = next(p.entry for p in training.plan.deferred if p.tensor is big)
    saved = torch.frombuffer(
        bytearray(training.saved[0][entry.begin : entry.end]), dtype=torch.float32
    )

    assert saved.any(), "nothing shows that training waits for the copies"


def test_a_model_that_moves_to_the_gpu_gets_another_plan(folder):
    """``Module.to`` keeps its parameters and gives them other memory, of the same size."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    plan = worlds.plan_of(worlds.Capture({"m": model, "o": optimizer}, rank=0, world_size=1))
    assert plan.is_current()
    model.to("cuda")

    assert not plan.is_current()


def test_the_stager_of_dcp_copies_beside_training():
    """F8: by pinned memory, and the next step waits on the stream."""
    model = torch.nn.Linear(256, 256, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    with HoldfastStager() as stager:
        for _ in range(3):
            model(torch.ones(4, 256, device="cuda")).sum().backward()
            optimizer.step()
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            staged = stager.stage({"model": model.state_dict()})
            optimizer.step()
            found = staged.result(WAIT_S)["model"]

            assert all(value.is_pinned() for value in found.values())
            assert all(torch.equal(found[name], expected[name].cpu()) for name in expected)
            del found, staged


def test_a_gpu_that_is_reset_costs_saves_and_raises_nothing_of_ours(folder):
    """An error that ends its context, in a process of its own."""
    places = os.pathsep.join(str(ROOT / place) for place in (".", "sdk", "services"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.gpu.reset", folder],
        capture_output=True, text=True, timeout=120, check=False,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": places},
    )  # fmt: skip

    assert "abandoned: True True" in done.stdout, done.stderr[-4000:]
    assert "does not answer any more" in done.stdout
    assert 0 == done.returncode


def test_the_engine_ends_with_copies_under_way(train):
    training = train()
    training.train()
    training.save()

    assert training.engine.close(WAIT_S)
