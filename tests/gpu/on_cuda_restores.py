"""F8, F31 on a real GPU: tensors filled from mapped segments, and a whole training restored."""

from __future__ import annotations

import pytest
import torch
from tests.bench.subject import agent
from tests.unit.copying.late_training import start_values
from tests.unit.state import worlds
from torch import nn

import holdfast
from holdfast.copying.cuda import CudaDevice
from holdfast.reading.files import open_files
from holdfast.state.capture import Capture

WAIT_S = 60.0


def module_of(tensors):
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor))
    return {"m": model}


def values():
    return {**start_values(), "big": torch.arange(8 << 20, dtype=torch.int64).double()}


@pytest.fixture
def located(tmp_path):
    saver = worlds.Saver(tmp_path)
    found = saver.save(Capture(module_of(values()), rank=0, world_size=1))
    assert saver.engine.close(WAIT_S)
    return found


@pytest.mark.parametrize("register", [True, False], ids=["registered", "pageable"])
def test_what_was_saved_is_on_the_gpu(located, register, monkeypatch, caplog):
    if not register:

        def refuse(*_, **__):
            raise RuntimeError("refused")

        monkeypatch.setattr(CudaDevice, "register", refuse)
    placed = {}
    for name, value in values().items():
        placed[name] = torch.empty_like(value, device="cuda")
        torch.cuda._sleep(10_000_000)
        placed[name].fill_(-1)  # is done late, and must not be the last
    with open_files([located]) as segments:
        Capture(module_of(placed), rank=0, world_size=1).load(segments, step=1)

    for name, value in values().items():
        assert torch.equal(placed[name].cpu(), value), name
    assert register == ("refused" not in caplog.text), caplog.text


class Training:
    """A model on the GPU with every kind of optimizer state that torch keeps there."""

    def __init__(self, **options: object) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Linear(256, 64)
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **options)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, step: int) -> None:
        torch.manual_seed(step)
        batch = torch.randn(32, 64, device="cuda")
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        kept = [v for state in self.optimizer.state.values() for v in state.values()]
        return [t.detach().cpu().clone() for t in (*self.model.state_dict().values(), *kept)]


@pytest.mark.parametrize(
    "options",
    [{"foreach": True}, {"fused": True}, {"capturable": True}, {"foreach": False}],
    ids=["foreach", "fused", "capturable", "one by one"],
)
def test_a_training_is_restored_bit_for_bit(options, monkeypatch):
    """Every step is saved while the next one trains; any of them is what it was."""
    name = "-".join(options) + str(*options.values())
    steps = 6
    with agent():
        first, expected = Training(**options), {}
        with holdfast.Checkpointer(name, first.state, save=holdfast.Never(), replicas=0) as ck:
            assert ck.restore() is None
            for step in range(1, steps + 1):
                first.train(step)
                expected[step] = first.values()
                handle = ck.save(step)
                first.train(100 + step)
                handle.wait("local", timeout_s=WAIT_S)
        monkeypatch.setenv("HOLDFAST_LAUNCH", "again")
        second = Training(**options)
        second.train(7)
        with holdfast.Checkpointer(
            name, second.state, save=holdfast.Never(), replicas=0, takeover=True
        ) as ck:
            restored = ck.restore()
            assert restored is not None
            assert restored.step == steps
            found = second.values()

    assert all(torch.equal(a, b) for a, b in zip(found, expected[steps], strict=True))
