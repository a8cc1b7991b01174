"""Scripts under ``--auto`` in this process: a checkpointer that keeps every step in memory.

A script is *killed* by an exception at a step, all that knows of it goes, and it is run again.
"""

from __future__ import annotations

import copy
import logging
import runpy
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.auto import driver, install, uninstall
from holdfast.integrations import followed
from holdfast.state import rng
from holdfast.state.dataloaders import ResumableLoader
from holdfast.state.positions import LoaderClock

BEGIN = """
import copy, itertools
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
torch.manual_seed(1)
data = TensorDataset(torch.randn(30, 4), torch.randn(30, 1))
loader = DataLoader(data, batch_size=5, shuffle=True)
valid = DataLoader(data, batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def step(x, y, optimizer=optimizer):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
def evaluate(model=model, loader=valid):
    with torch.no_grad():
        return sum(nn.functional.mse_loss(model(x), y).item() for x, y in loader)
"""
"""Most scripts begin like this; what they end with is ``result``."""


class Killed(BaseException):
    """The script's process has ended."""


def bits(value):
    """Return a copy of everything that has a value, for a save or a comparison."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    return copy.deepcopy(value)


class Memory:
    """A ``Checkpointer`` whose steps are safe at once; ``kept`` outlives it, by role."""

    kept: ClassVar[dict] = {}

    def __init__(self, job, state, role="", **_):
        self.state = state
        self.role = role
        self.clock = LoaderClock()

    def decide(self):
        kept = self.kept.get(self.role)
        return kept and SimpleNamespace(step=kept["step"], value=kept["values"].get)

    def step(self, step):
        values = {name: bits(value) for name, value in self.state.items()}
        self.kept[self.role] = {"step": step, "values": values, "stream": rng.take()}

    def restore(self):
        for value in self.state.values():
            if isinstance(value, ResumableLoader):
                value.bind(self.clock)
        kept = self.kept.get(self.role)
        if not kept:
            return None
        assert kept["values"].keys() == self.state.keys(), (list(kept["values"]), list(self.state))
        for name, value in list(self.state.items()):
            saved = copy.deepcopy(kept["values"][name])
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(saved)
            elif isinstance(value, list | torch.Tensor):
                into, of = (value, saved) if isinstance(value, list) else ([value], [saved])
                with torch.no_grad():
                    [one.copy_(other) for one, other in zip(into, of, strict=True)]
            elif isinstance(value, dict):
                self.state[name] = saved
        rng.put(kept["stream"])
        self.clock.arm(lambda: rng.put(kept["stream"]))
        return SimpleNamespace(step=kept["step"])

    def close(self):
        pass

    def __exit__(self, *_):
        pass


class Runs:
    """Runs of one script, one after the other; ``told`` is what the last one was told."""

    def __init__(self, path, monkeypatch, caplog):
        self.path = path
        self.kept = {}
        self.told = ""
        self._caplog = caplog
        caplog.set_level(logging.WARNING)
        monkeypatch.setattr(driver, "Checkpointer", Memory)
        monkeypatch.setattr(followed, "Checkpointer", Memory)

    def write(self, text, begin=BEGIN):
        self.path.write_text(begin + text)
        return self

    def run(self, kill_at=0, *, counts=register_optimizer_step_pre_hook, auto=True):
        """Run it, up to before step ``kill_at`` of the optimizers; return its ``result``.

        ``counts`` registers a hook for something else that is counted. Without ``auto`` the script
        saves itself.
        """
        steps = 0

        def count(*_):
            nonlocal steps
            steps += 1
            if steps == kill_at:
                raise Killed

        self._caplog.clear()
        Memory.kept = self.kept
        hook = counts(count)
        if auto:
            install("job")
        try:
            result = bits(runpy.run_path(str(self.path), run_name="__main__")["result"])
        except Killed:
            result = None
        finally:
            uninstall()
            hook.remove()
            self.told = self._caplog.text
        self.steps = steps
        return result

    def plain(self):
        """Run it without anything of ours that was kept."""
        Memory.kept = {}
        return bits(runpy.run_path(str(self.path), run_name="__main__")["result"])

    def differing(self, every=1, *, auto=True):
        """Return the steps at which it was killed and then ended with other bits."""
        self.kept = {}
        expected = self.run(auto=auto)
        count, differ = self.steps, []
        for at in range(2, count + 1, every):
            self.kept = {}
            assert self.run(kill_at=at, auto=auto) is None
            if not same(self.run(auto=auto), expected):
                differ.append(at)
        return differ


def same(found, expected):
    """Tell whether two results have the same bits."""
    try:
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True
