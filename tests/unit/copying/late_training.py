"""A training whose tensors lie on a late device, and that is saved as it goes."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from tests.late_device import WAIT_S, LateDevice
from tests.unit.state import worlds
from torch import nn

from holdfast.snapshot.buffer import SlotBuffer
from holdfast.snapshot.engine import CopyEngine, Snapshot
from holdfast.snapshot.optimizer_gate import Gate
from holdfast.state.capture import Capture


def start_values() -> dict[str, torch.Tensor]:
    """Return parameters of every kind of layout."""
    return {
        "plain": torch.arange(12.0).reshape(3, 4),
        "turned": torch.arange(15.0).reshape(3, 5).t(),
        "sparse": torch.arange(40.0)[::3],
        "tail": torch.arange(9, dtype=torch.float16)[2:],
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(3.0),
        "odd": torch.arange(7, dtype=torch.float16),
    }


class LateOptimizer(torch.optim.Optimizer):
    """Adds 1 to each parameter and 2 to its momentum, on the device, and counts on the host."""

    def __init__(self, device: LateDevice, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self._device = device
        for parameter in parameters:
            self.state[parameter] = {
                "step": torch.tensor(0.0),
                "momentum": device.place(torch.zeros_like(parameter.detach())),
            }

    def step(self, closure: object = None) -> None:
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                self._device.launch(lambda raw: raw.add_(1), parameter.data)
                torch.autograd.graph.increment_version(parameter)
                self._device.launch(lambda raw: raw.add_(2), kept["momentum"])
                kept["step"].add_(1)


class LateTraining:
    """Trains and saves on ``device``; ``saved`` are the bytes of each step when it was closed.

    ``pinned``: the slots are registered with the driver.
    """

    def __init__(self, folder: Path, device: LateDevice, *, pinned: bool = True) -> None:
        self.device = device
        self.model = nn.Module()
        for name, values in start_values().items():
            self.model.register_parameter(name, nn.Parameter(device.place(values)))
        self.model.register_parameter("tied", self.model.plain)
        self.model.register_buffer("mean", device.place(torch.zeros(5)))
        self.optimizer = LateOptimizer(device, list(self.model.parameters()))
        self.extra = {"t": device.place(torch.zeros(3))}
        state = {"m": self.model, "o": self.optimizer, "x": self.extra}
        self.capture = Capture(state, rank=0, world_size=1)
        self.engine = CopyEngine(self._closed)
        self.gate = Gate(self.engine, gate_s_max=WAIT_S, devices=device)
        self.saved: dict[int, bytes] = {}
        self.ended = threading.Event()
        self.step = 0
        self._folder = folder
        self._pinned = pinned
        self._slot: SlotBuffer | None = None
        self._make_plan()

    def _make_plan(self) -> None:
        self.plan = worlds.plan_of(self.capture, self.device)

    def train(self) -> None:
        """Queue one step: forward writes the buffer, then the optimizer steps."""
        self.device.launch(lambda raw: raw.add_(1), self.model.mean)
        self.device.launch(lambda raw: raw.add_(1), self.extra["t"])
        self.optimizer.step()
        self.step += 1

    def save(self, *, defer: bool = True) -> Snapshot:
        """Begin to save the state as training has queued it."""
        if not self.plan.is_current():
            self._make_plan()
        if self._slot is None:
            self.prepare()
        buffer, self._slot = self._slot, None
        self.ended.clear()
        return self.engine.begin(self.plan, buffer, step=self.step, generation=1, defer=defer)

    def prepare(self) -> None:
        """Make the slot of the next save."""
        lease = worlds.make_slot(self._folder, f"s{self.step}", self.plan.length_bytes)
        self._slot = SlotBuffer.open(self._folder, lease)
        if self._pinned:
            self.device.register(self._slot._bytes)

    def settle(self) -> None:
        """Let the device do all, and wait until the save has ended."""
        self.device.wake()
        self.device.finish()
        assert self.ended.wait(WAIT_S)

    def close(self) -> None:
        self.device.wake()
        self.gate.uninstall()
        assert self.engine.close(WAIT_S)

    def wrong(self, step: int) -> list[str]:
        """Return the names of what was not saved as it was after ``step``."""
        data = torch.frombuffer(bytearray(self.saved[step]), dtype=torch.uint8)
        names = []
        for piece in [*self.plan.deferred, *self.plan.eager]:
            spec = piece.entry.spec
            found = data[piece.entry.begin : piece.entry.end].view(piece.tensor.dtype)
            if not torch.equal(found.view(spec.box.lengths), self._expected(spec.fqn, step)):
                names.append(spec.fqn)
        for name, entry in self.plan.live_entries.items():
            if name.startswith("holdfast."):
                continue  # the random state
            found = data[entry.begin : entry.end].view(torch.float32)
            if not torch.equal(found, torch.full((3,), float(step))):
                names.append(name)
        return sorted(names)

    def _expected(self, fqn: str, step: int) -> torch.Tensor:
        if fqn == "m.mean":
            return torch.full((5,), float(step))
        if fqn.endswith(".step"):
            return torch.tensor(float(step))
        values = start_values()
        if fqn.endswith(".momentum"):
            return torch.full_like(values[fqn.split(".")[-2]], 2 * step)
        return values[fqn.rsplit(".", maxsplit=1)[-1]] + step

    def _closed(self, snapshot: Snapshot) -> None:
        if snapshot.copied:
            self.saved[snapshot.step] = bytes(snapshot.buffer._memory())
        if self._pinned and not self.device.lost:
            self.device.unregister(snapshot.buffer._bytes)
        snapshot.buffer.drop()
        self.ended.set()
