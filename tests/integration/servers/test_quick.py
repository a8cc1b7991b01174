"""A process with torch at a third of its price is the process that it would be without."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.servers.nursery import QUICK

STEPS = """
import atexit, gc, os, sys
import torch
atexit.register(os.write, 1, b"at exit, ")
class Left:
    def __del__(self, write=os.write):
        write(1, b"taken apart")
left = Left()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
def step():
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
before = [p.detach().clone() for p in model.parameters()]
step()
assert [torch.equal(a - 0.5, b) for a, b in zip(before, model.parameters())] == [True] * 2
assert gc.isenabled()
"""
PUT_OFF = "assert 'torch._dynamo.eval_frame' not in sys.modules and 'sympy' not in sys.modules\n"
COMPILED = """
torch.compile(step, backend="eager")()
assert [torch.allclose(a - 1.0, b) for a, b in zip(before, model.parameters())] == [True] * 2
import torch._dynamo.testing
from torch._dynamo import config, disable
assert disable.__module__.startswith("torch._dynamo") and config.optimize_ddp
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
assert "sympy" in sys.modules and torch._dynamo.utils is sys.modules["torch._dynamo.utils"]
torch._dynamo.trace_rules.clear_lru_cache()
"""


def ran(code):
    """Return exit code and output of a process that ran ``code`` in such an environment."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(QUICK)},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_a_rank_trains_without_the_compiler_and_ends_as_it_says():
    """Its code, what is registered for exits, and the end of its own objects."""
    assert ran(STEPS + PUT_OFF + "raise SystemExit(3)") == (3, "at exit, taken apart")


def test_the_compiler_is_all_there_once_it_is_asked_for():
    assert ran(STEPS + COMPILED) == (0, "at exit, taken apart")
