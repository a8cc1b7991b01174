"""What is saved in the benchmarks: parameters with AdamW's two moments, and steps that take time.

The stall is measured from outside, with hooks of our own around Holdfast's: what ``ck.step`` took
plus what the optimizer waited before it could begin.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping

import torch
from tests.e2e.stack import Stack, running_stack
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

import holdfast
from holdfast.training.save_handle import Level

MOMENTS = 2
PATIENCE_S = 60.0
SAMPLES = 10_000


class _Held(nn.Module):
    """Parameters in a module with a forward pass, which ``fully_shard`` asks for."""

    def __init__(self, parameters: nn.ParameterList) -> None:
        super().__init__()
        self.held = parameters

    def forward(self) -> torch.Tensor:
        return torch.stack([one.sum() for one in self.held]).sum()


class Subject:
    """A model of ``tensors_count`` tensors, ``length_bytes`` in all, moments included.

    Not ``trained``: the optimizer has no moments yet, as after the start of a process. ``sharded``:
    by FSDP2, over the ranks of the process group.
    """

    model: nn.Module

    def __init__(
        self, *, tensors_count: int, length_bytes: int, trained: bool = True, sharded: bool = False
    ) -> None:
        torch.set_num_threads(1)
        count = tensors_count // (1 + MOMENTS)
        length = length_bytes // (1 + MOMENTS) // count // 4
        self.model = nn.ParameterList([nn.Parameter(torch.randn(length)) for _ in range(count)])
        if sharded:
            self.model = fully_shard(_Held(self.model))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        if trained:
            for parameter in self.model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
            self.optimizer.step()  # makes the moments
        self.length_bytes = (1 + MOMENTS) * count * length * 4
        self.steps_done = 0
        self._work = torch.randn(512, 512)

    @property
    def state(self) -> dict[str, object]:
        """The mapping for a Checkpointer."""
        return {"model": self.model, "optimizer": self.optimizer}

    def state_dict(self) -> dict[str, Mapping[str, object]]:
        """The same state as plain PyTorch has it, for the peers."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, object]]) -> None:
        """Take over what ``state_dict`` gave."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(dict(state["optimizer"]))

    def compute(self, products_count: int) -> None:
        """Do the work of a forward and a backward pass: that many matrix products."""
        for _ in range(products_count):
            torch.mm(self._work, self._work)

    def products_in(self, seconds: float) -> int:
        """Return how many matrix products take about ``seconds`` here."""
        self.compute(20)
        started_s = time.perf_counter()
        self.compute(100)
        return max(1, round(100 * seconds / (time.perf_counter() - started_s)))


class StallClock:
    """Measures what saving keeps the training thread waiting, in seconds, one step at a time.

    Make it before the Checkpointer and call ``surround`` after the first save: torch calls
    pre-hooks in the order of their registration, so that the gate lies between our two.
    """

    def __init__(self) -> None:
        self.gate_s = 0.0
        self._began_s = 0.0
        self._hooks = [register_optimizer_step_pre_hook(self._before)]

    def surround(self) -> None:
        """Register the hook that comes after the gate, once."""
        if len(self._hooks) == 1:
            self._hooks.append(register_optimizer_step_pre_hook(self._after))

    def _before(self, *_: object) -> None:
        self._began_s = time.perf_counter()

    def _after(self, *_: object) -> None:
        self.gate_s = time.perf_counter() - self._began_s


class Saving:
    """A Subject with a Checkpointer: ``train_and_save`` is one iteration of a user's loop."""

    settled: Level = "local"

    def __init__(self, subject: Subject, *, job: str, replicas: int = 0) -> None:
        self.subject = subject
        self._clock = StallClock()
        self.ck = self._checkpointer(job, replicas)
        restored = self.ck.restore()
        assert restored is None, f"job {job} is not new"
        self.handles: list[holdfast.SaveHandle] = []

    def train_and_save(self, products_count: int) -> float:
        """Save a step and train the next; return the stall of that save in seconds."""
        self.subject.steps_done += 1
        started_s = time.perf_counter()
        self.handles.append(self._save(self.subject.steps_done))
        save_s = time.perf_counter() - started_s
        self._clock.surround()
        self.subject.compute(products_count)
        self.subject.optimizer.step()
        return save_s + self._clock.gate_s

    def settle(self) -> None:
        """Wait until every save is as safe as it gets: nothing of ours runs beside the peer.

        Raises:
            CheckpointError: one will never be; it must not count as fast.
        """
        for handle in self.handles:
            handle.wait(self.settled, timeout_s=PATIENCE_S)
        self.handles.clear()

    def _checkpointer(self, job: str, replicas: int) -> holdfast.Checkpointer:
        return holdfast.Checkpointer(
            job, self.subject.state, save=holdfast.Never(), replicas=replicas, rng=False
        )

    def _save(self, step: int) -> holdfast.SaveHandle:
        return self.ck.save(step)


class Stepping(Saving):
    """A Subject as a script has it: ``ck.step``, loader, random state, copies, all by default."""

    settled = "replicated"  # only then is there a slot for the next one

    def train_and_save(self, products_count: int) -> float:
        """Draw a batch, then as ``Saving`` does."""
        next(self._batches)
        return super().train_and_save(products_count)

    def _checkpointer(self, job: str, replicas: int) -> holdfast.Checkpointer:
        data = torch.utils.data.TensorDataset(torch.arange(SAMPLES))
        loader = holdfast.ResumableLoader(torch.utils.data.DataLoader(data, shuffle=True))
        self._batches = (batch for _ in itertools.count() for batch in loader)
        return holdfast.Checkpointer(job, {**self.subject.state, "loader": loader})

    def _save(self, step: int) -> holdfast.SaveHandle:
        handle = self.ck.step(step)
        assert handle is not None, "every step is saved"
        return handle


@contextlib.contextmanager
def agent(nodes: int = 1, **settings: str) -> Iterator[Stack]:
    """Run a stack; this process is on its first node."""
    with running_stack(nodes, forked=False, **settings) as stack:
        os.environ["HOLDFAST_AGENT"] = str(stack.node(0)["agent"])
        yield stack
