"""F8, P4 with CUDA graphs: saves break no capture, and replays break no save."""

from __future__ import annotations

import pytest
import torch
from tests.bench.subject import agent
from torch import nn

import holdfast
from holdfast.errors import CheckpointError

WAIT_S = 60.0
LENGTH = 1 << 29
"""Elements, of 2 GiB, which are copied for some 40 ms at least."""
SUMS_COUNT = 2000


class Graphed:
    """A training whose optimizer steps eagerly, or by a graph. All values are its step."""

    def __init__(self) -> None:
        zeros = torch.zeros(LENGTH, device="cuda")
        self.parameter = nn.Parameter(zeros)
        self.parameter.grad = torch.full_like(zeros, -1.0)
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.state = {"model": nn.ParameterList([self.parameter]), "optimizer": self.optimizer}
        self.graph = torch.cuda.CUDAGraph()

    def capture(self) -> None:
        with torch.cuda.graph(self.graph):
            self.optimizer.step()


def checkpointer(training, **options):
    return holdfast.Checkpointer(
        "graphs", training.state, save=holdfast.Never(), replicas=0, rng=False, **options
    )


@pytest.fixture
def job(monkeypatch):
    """A training, its Checkpointer, and the step that is the next: saves are deferred by now."""
    with agent(HOLDFAST_BUDGET=str(16 * LENGTH)):
        training = Graphed()
        with checkpointer(training) as ck:
            assert ck.restore() is None
            step = saved = 0
            while saved < 3:
                step += 1
                assert step < 20, "no save works"
                training.optimizer.step()
                saved += is_saved(ck.save(step))
            yield training, ck, step + 1
        monkeypatch.setenv("HOLDFAST_LAUNCH", "again")
        expected = training.expected
        with torch.no_grad():
            training.parameter.fill_(-1)
        with checkpointer(training, takeover=True) as again:
            restored = again.restore()
            assert restored is not None
            found = restored.step, training.parameter.min().item(), training.parameter.max().item()
        assert found == (expected, expected, expected)


def is_saved(handle):
    try:
        handle.wait("local", timeout_s=WAIT_S)
    except CheckpointError:
        return False
    return True


def test_a_replay_right_after_its_capture_leaves_the_save_before_as_it_was(job):
    training, ck, step = job
    training.optimizer.step()
    handle = ck.save(step)
    training.capture()
    for _ in range(8):
        training.graph.replay()
    assert is_saved(handle), handle
    training.expected = step


def test_saves_between_replays_are_of_their_steps(job):
    training, ck, step = job
    training.capture()
    for at in range(step, step + 4):
        training.graph.replay()
        handle = ck.save(at)
        training.graph.replay()
        assert is_saved(handle)
        torch.cuda.synchronize()
        with torch.no_grad():
            training.parameter.fill_(at)
    training.expected = step + 3


def test_captures_and_the_copies_of_a_save_do_not_end_each_other(job):
    """In the mode in which any thread's careless call ends a capture; many, while copies go on."""
    training, ck, step = job
    number = torch.ones((), device="cuda")
    captures_count = 0
    for at in range(step, step + 4):
        training.optimizer.step()
        handle = ck.save(at)
        while not handle.ended:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="global"):
                for _ in range(SUMS_COUNT):
                    number += 1
            graph.replay()
            captures_count += 1
        assert is_saved(handle)
    assert captures_count >= 4
    assert number.item() == 1 + captures_count * SUMS_COUNT
    training.expected = step + 3
